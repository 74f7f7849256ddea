"""Simulated schedules: utilisation of endless streams and of real windows, with the time that planning took.

A forward takes 1, a backward 2 (its halves 1 each); a message nothing, or a tenth of a forward where it says so.

*Endless stream*: one long window of about 16 D micro-batches without look-ahead, planned with more effort than usual;
the share of the time that devices compute between a quarter and three quarters of their computations, where neither the
beginning nor the end is felt. 3D/(3D+1) is what the hand-written orders of the AMDP paper reach with 3 micro-batches in
flight. Where D/2 is odd, the next even numbers of pipelines are shown, too.

*Windows*: equal segments, each followed by a step and with look-ahead, one after another until nothing changes. Every
segment begins on all devices at once. Early is the share of forwards that run before the step preceding their batch.

*Planning* (``--planning`` prints this alone): seconds of process time that it takes to find the schedule of 128
micro-batches on 32 devices, and stages and schedule for a model of 200 unequal units.

    python benchmarks/schedules.py [--devices 4 8 16]
    python benchmarks/schedules.py --planning
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Literal

from lightning_asyncpipe.plan.actions import COMPUTE
from lightning_asyncpipe.plan.choice import Request, choose_plan
from lightning_asyncpipe.plan.placement import Placement
from lightning_asyncpipe.plan.profile import Boundary, Link, ModelProfile, Unit
from lightning_asyncpipe.plan.schedule import Costs, Planner, SegmentPlan, SegmentSpec
from lightning_asyncpipe.plan.simulator import simulate

MESSAGE = 0.1
EFFORT = 2_000_000


def stream(devices: int, pipelines: int, in_flight: int, split: bool, message: float = 0.0) -> float:
    """Utilisation in the middle half of a long window."""
    placement = Placement(devices, pipelines)
    costs = Costs.uniform(devices, message=message)
    rounds = 4 * (-(-4 * devices // pipelines))
    planner = Planner(placement, in_flight, costs, split, effort=EFFORT)
    plan = planner.segment(SegmentSpec(rounds * pipelines, updated=False, steps=False))
    timeline = simulate(placement, [plan], costs).timeline
    computed = elapsed = 0.0
    for line in timeline:
        computations = [timed for timed in line if timed.action.kind in COMPUTE]
        quarter = len(computations) // 4
        middle = computations[quarter : 3 * quarter]
        computed += sum(timed.end - timed.start for timed in middle)
        elapsed += computations[3 * quarter - 1].end - computations[quarter - 1].end
    return computed / elapsed


def planning_time(devices: int, pipelines: int, in_flight: int = 3, split: bool = False) -> float:
    """Seconds that planning takes for a window of 4 D micro-batches, with the usual effort."""
    started = time.process_time()
    planner = Planner(Placement(devices, pipelines), in_flight, split_backward=split)
    planner.segment(SegmentSpec(4 * devices, 4 * devices))
    return time.process_time() - started


def unequal(units: int) -> ModelProfile:
    """A model of units that take 0.2 to 3 times as long as an average one."""
    rng = random.Random(1)
    times = [rng.choice([rng.random() + 0.2, 1.0, 3 * rng.random() + 0.1]) for _ in range(units)]
    boundaries = tuple(Boundary(100) for _ in times[1:])
    return ModelProfile(tuple(Unit(f"{i}", t, t, t) for i, t in enumerate(times)), boundaries, link=Link(0.05))


def planning(devices: int = 32, units: int = 200) -> None:
    """Prints how long planning takes on many devices."""
    print(f"Schedule of {4 * devices} micro-batches, {devices} devices, {devices // 2} pipelines")
    for split, name in ((False, "whole"), (True, "in halves")):
        took = planning_time(devices, devices // 2, 2 if split else 3, split)
        print(f"  backwards {name:<10} {took:.2f} s")
    print(f"\nStages and schedule of {units} unequal units on {devices} devices")
    print("    N    M  backwards  seconds  step / even share of the work")
    profile = unequal(units)
    choices: tuple[int | Literal["auto"], ...] = (2, devices // 2, "auto")
    for pipelines in choices:
        for microbatches in (devices, 4 * devices):
            for split, name in ((False, "whole"), (True, "in halves")):
                request = Request(devices, pipelines, microbatches, "auto", split_backward=split, tolerance=0.03)
                started = time.process_time()
                plan = choose_plan(profile, request)
                took = time.process_time() - started
                share = plan.step_seconds / (sum(profile.work()) / devices * microbatches)
                print(f"{pipelines:>5} {microbatches:>4}  {name:<9} {took:>8.2f}  {share:.3f}", flush=True)


def equal_segments(planner: Planner, microbatches: int, ahead: int, count: int) -> list[SegmentPlan]:
    """Plans of equal segments one after another, each followed by a step.

    Args:
        planner: plans them.
        microbatches: of each segment.
        ahead: micro-batches of the next one that may be started.
        count: how many segments.
    """
    plans: list[SegmentPlan] = []
    for index in range(count):
        carry = plans[-1].carry if plans else ()
        plans.append(planner.segment(SegmentSpec(microbatches, ahead, carry, updated=index > 0)))
    return plans


def settled(planner: Planner, microbatches: int, segments: int, first: int) -> tuple[float, float]:
    """Utilisation of so many equal segments with look-ahead, and the share of early forwards, from the `first` on."""
    plans = equal_segments(planner, microbatches, microbatches, segments)
    early = sum(sum(plan.carry) for plan in plans[first:]) / (segments - first)
    utilisation = simulate(planner.placement, plans, planner.costs).steady_utilisation(first)
    return utilisation, early / microbatches / planner.placement.num_stages


def window(
    devices: int, pipelines: int, in_flight: int, split: bool, microbatches: int, message: float
) -> tuple[float, float]:
    """Utilisation of equal segments with a step after each, and the share of early forwards."""
    placement = Placement(devices, pipelines)
    costs = Costs.uniform(devices, message=message)
    return settled(Planner(placement, in_flight, costs, split), microbatches, 12, 4)


def streams(sizes: list[int]) -> None:
    """Prints the table of endless streams."""
    print("Endless stream")
    print("  D   N | 3D/(3D+1) | w=2    w=3    | split, w=2  with messages | planning, M = 4 D")
    for devices in sizes:
        half = max(1, devices // 2)
        for pipelines in [half] if half % 2 == 0 else [half, half + 1, half + 3]:
            if pipelines > devices:
                continue
            columns = [(2, False, 0.0), (3, False, 0.0), (2, True, 0.0), (2, True, MESSAGE)]
            two, three, split, messages = (stream(devices, pipelines, *column) for column in columns)
            target = 3 * devices / (3 * devices + 1)
            mark = " " if three >= target - 1e-9 else "-"
            print(
                f"{devices:3d} {pipelines:3d} | {target:.4f}    | {two:.4f} {three:.4f}{mark}"
                f"| {split:.4f}      {messages:.4f}        | {planning_time(devices, pipelines):.2f} s",
                flush=True,
            )


def windows() -> None:
    """Prints the table of real windows."""
    print("\nWindows with a step after each: utilisation (early)")
    print("  D   N w split  message |  M = D          M = 2 D        M = 4 D")
    for devices, pipelines in ((4, 2), (8, 4), (8, 2)):
        for split in (False, True):
            for in_flight in (2, 3) if pipelines * 2 == devices else (4, 5):
                for message in (0.0, MESSAGE):
                    row = (
                        window(devices, pipelines, in_flight, split, times * devices, message) for times in (1, 2, 4)
                    )
                    cells = "  ".join(f"{utilisation:.4f} ({early:.3f})" for utilisation, early in row)
                    print(f"{devices:3d} {pipelines:3d} {in_flight} {split!s:5}  {message:7} |  {cells}", flush=True)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = list(range(4, 33, 2))
    parser.add_argument("--devices", type=int, nargs="*", default=sizes, help="sizes of the first table")
    parser.add_argument("--planning", action="store_true", help="only how long planning takes")
    args = parser.parse_args()
    if not args.planning:
        streams(args.devices)
        windows()
        print()
    planning()


if __name__ == "__main__":
    main()
