"""What a chain of segments costs: time, idle time, memory and staleness.

The times are those of ``rendezvous.execute``: computations of a device one after another, messages with a latency and
in the order of their pair, segments that begin on all devices at once, with new weights after a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_asyncpipe.plan.actions import COMPUTE, Kind
from lightning_asyncpipe.plan.costs import Costs
from lightning_asyncpipe.plan.placement import Placement
from lightning_asyncpipe.plan.rendezvous import Timed, execute
from lightning_asyncpipe.plan.segment import SegmentPlan


@dataclass(frozen=True)
class Simulation:
    """The figures of a simulated chain of segments, in the unit of time of its costs.

    Attributes:
        timeline: per device, its actions with their times.
        ends: per segment, when its last device left it.
        busy: per device, the time that it spent computing.
        segment_work: per segment, the time that all devices together computed in it.
        peak_held: per device, the most micro-batches that were between their forward and the end of their backward on
            it (of their weight gradients, where those are apart), counted once per stage.
        in_flight: per pipeline, the most micro-batches between the first stage's forward and its backward.
        early: per stage, the forwards that ran in the segment before their batch's own.
        stale: per stage, those of them with an optimizer step between the two segments.
        forwards: per stage, all forwards.
    """

    timeline: tuple[tuple[Timed, ...], ...]
    ends: tuple[float, ...]
    busy: tuple[float, ...]
    segment_work: tuple[float, ...]
    peak_held: tuple[int, ...]
    in_flight: tuple[int, ...]
    early: tuple[int, ...]
    stale: tuple[int, ...]
    forwards: tuple[int, ...]

    @property
    def makespan(self) -> float:
        """From the first device's start to the last one's end."""
        return max(self.ends, default=0.0)

    @property
    def utilisation(self) -> tuple[float, ...]:
        """Per device, the share of the makespan that it computed."""
        return tuple(busy / self.makespan if self.makespan else 1.0 for busy in self.busy)

    def time_per_segment(self, settled: int = 1) -> float:
        """The mean time between the ends of segments, from the end of segment ``settled - 1`` on.

        Raises:
            ValueError: when no segment follows that one.
        """
        if not 1 <= settled < len(self.ends):
            raise ValueError(f"settled is {settled} in a chain of {len(self.ends)} segments")
        return (self.ends[-1] - self.ends[settled - 1]) / (len(self.ends) - settled)

    def steady_utilisation(self, settled: int = 1) -> float:
        """The share of ``time_per_segment`` that the work of its segments takes, mean over devices."""
        work = sum(self.segment_work[settled:]) / (len(self.ends) - settled)
        return work / len(self.busy) / self.time_per_segment(settled)


def simulate(placement: Placement, segments: Sequence[SegmentPlan], costs: Costs) -> Simulation:
    """Simulates consecutive segments.

    Raises:
        ScheduleError: when the segments get stuck.
    """
    stages = placement.num_stages
    timeline = execute(placement, segments, costs)
    ends = [0.0] * len(segments)
    work = [0.0] * len(segments)
    early, stale, forwards = [0] * stages, [0] * stages, [0] * stages
    busy = []
    for line in timeline:
        total = 0.0
        for segment, start, end, action in line:
            ends[segment] = max(ends[segment], end)
            if action.kind not in COMPUTE:
                continue
            total += end - start
            work[segment] += end - start
            if action.kind is Kind.FORWARD:
                forwards[action.stage] += 1
                early[action.stage] += action.ahead
                stale[action.stage] += action.ahead and segments[segment].spec.steps
        busy.append(total)
    for index in range(1, len(ends)):
        ends[index] = max(ends[index], ends[index - 1])
    peaks = [_peaks(placement, segments, device, line) for device, line in enumerate(timeline)]
    return Simulation(
        timeline=tuple(tuple(line) for line in timeline),
        ends=tuple(ends),
        busy=tuple(busy),
        segment_work=tuple(work),
        peak_held=tuple(peak for peak, _ in peaks),
        in_flight=tuple(max(most) for most in zip(*(most for _, most in peaks), strict=True)),
        early=tuple(early),
        stale=tuple(stale),
        forwards=tuple(forwards),
    )


def _peaks(
    placement: Placement, segments: Sequence[SegmentPlan], device: int, line: Sequence[Timed]
) -> tuple[int, list[int]]:
    """Most micro-batches held on a device, and most in flight in each pipeline that begins there (0 for others)."""
    held: set[tuple[int, int]] = set()  # stage, micro-batch: of the current batch and of the next
    flying = [0] * placement.num_pipelines
    if segments:
        for microbatch, done in enumerate(segments[0].spec.carried):
            pipeline = placement.pipeline_of(microbatch)
            stage = placement.stage(pipeline, device)
            if done > stage:
                held.add((stage, microbatch))
                flying[pipeline] += stage == 0
    peak, most, early = len(held), list(flying), set[tuple[int, int]]()
    at = 0
    for segment, _, _, action in line:
        if segment != at:
            at = segment
            held, early = early, set()
            if not any(segments[segment].spec.carried):
                held.clear()
                flying = [0] * placement.num_pipelines
        work = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            (early if action.ahead else held).add(work)
            peak = max(peak, len(held) + len(early))
            if action.stage == 0:
                flying[action.pipeline] += 1
                most[action.pipeline] = max(most[action.pipeline], flying[action.pipeline])
        elif action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD) and action.stage == 0:
            flying[action.pipeline] -= 1
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD):
            held.discard(work)
    return peak, most
