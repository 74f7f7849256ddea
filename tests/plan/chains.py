"""Chains of segments for the tests: drawn by hypothesis, or of one size."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from lightning_asyncpipe.plan.placement import Placement
from lightning_asyncpipe.plan.schedule import Costs, Planner, SegmentPlan, SegmentSpec


@dataclass(frozen=True)
class Case:
    """A planner's arguments and the chain of segments it is asked for."""

    placement: Placement
    max_in_flight: int
    costs: Costs
    split: bool
    sizes: tuple[int, ...]
    looks_ahead: tuple[bool, ...]
    steps: tuple[bool, ...]
    effort: int

    def planner(self) -> Planner:
        return Planner(self.placement, self.max_in_flight, self.costs, self.split, self.effort)

    def plan(self) -> list[SegmentPlan]:
        planner = self.planner()
        segments: list[SegmentPlan] = []
        for index, size in enumerate(self.sizes):
            follows = self.looks_ahead[index] and index + 1 < len(self.sizes)
            before = segments[-1] if segments else None
            spec = SegmentSpec(
                microbatches=size,
                ahead=self.sizes[index + 1] if follows else 0,
                carried=before.carry if before else (),
                updated=before.spec.steps if before else False,
                steps=self.steps[index],
            )
            segments.append(planner.segment(spec))
        return segments


@st.composite
def cases(draw: st.DrawFn, max_devices: int = 9, max_segments: int = 4) -> Case:
    devices = draw(st.integers(1, max_devices))
    pipelines = draw(st.integers(1, devices))
    length = draw(st.integers(1, max_segments))
    duration = st.sampled_from([0.0, 0.5, 1.0, 1.0, 1.7])
    row = st.lists(duration, min_size=devices, max_size=devices).map(tuple)
    forward, input_grad, weight_grad = draw(row), draw(row), (1.0,) * devices
    costs = Costs(
        forward,
        tuple(a + b for a, b in zip(input_grad, weight_grad, strict=True)),
        input_grad,
        weight_grad,
        message=draw(st.sampled_from([0.0, 0.1, 2.5])),
    )
    flags = st.lists(st.booleans(), min_size=length, max_size=length).map(tuple)
    sizes = st.integers(1, 3 * devices)
    same = sizes.map(lambda size: (size,) * length)
    varied = st.lists(sizes, min_size=length, max_size=length).map(tuple)
    return Case(
        placement=Placement(devices, pipelines),
        max_in_flight=draw(st.integers(1, 4)),
        costs=draw(st.sampled_from([costs, Costs.uniform(devices)])),
        split=draw(st.booleans()),
        sizes=draw(st.one_of(same, varied)),
        looks_ahead=draw(st.one_of(flags, st.just((True,) * length))),
        steps=draw(st.one_of(flags, st.just((True,) * length))),
        effort=draw(st.sampled_from([1, 1000, 8000])),
    )


def quick_planner(placement: Placement, max_in_flight: int, split_backward: bool = False) -> Planner:
    """A planner that does not search for long."""
    return Planner(placement, max_in_flight, split_backward=split_backward, effort=3000)


def repeated(planner: Planner, microbatches: int, count: int, steps: bool = True) -> list[SegmentPlan]:
    """``count`` segments of one size, the first without a carry, each looking ahead."""
    segments: list[SegmentPlan] = []
    carry: tuple[int, ...] = ()
    for index in range(count):
        spec = SegmentSpec(microbatches, microbatches, carry, steps and index > 0, steps)
        segments.append(planner.segment(spec))
        carry = segments[-1].carry
    return segments
