"""A schedule for people who choose its numbers: the grid of one step, and what it is simulated to cost."""

from __future__ import annotations

from lightning_asyncpipe.plan.costs import Costs
from lightning_asyncpipe.plan.geometry import Geometry
from lightning_asyncpipe.plan.grid import render
from lightning_asyncpipe.plan.schedule import Planner, SegmentPlan, SegmentSpec
from lightning_asyncpipe.plan.simulator import simulate

MESSAGE = 0.05
"""What a message takes where nobody has measured it, in forwards of a stage; as in training."""

_TOLERANCE = 0.01  # the share of time that fewer early forwards may cost, as in training
_SETTLED, _MEASURED = 4, 8  # segments


def overview(
    geometry: Geometry,
    costs: Costs,
    synchronous: bool = False,
    split_backward: bool = False,
    grid: bool = True,
) -> str:
    """What the devices do in a step after many equal ones, and the figures of that step.

    Args:
        geometry: numbers of stages, pipelines and micro-batches.
        costs: of the stages, in any unit of time.
        synchronous: drain the pipelines at every step (``max_staleness=0``).
        split_backward: plan the two halves of a backward apart.
        grid: begin with the grid of :func:`render`.
    """
    placement, count = geometry.placement, geometry.num_microbatches
    planner = Planner(placement, geometry.max_in_flight, costs, split_backward, tolerance=_TOLERANCE)
    segments: list[SegmentPlan] = []
    for index in range(_SETTLED + _MEASURED):
        carried = segments[-1].carry if segments and any(segments[-1].carry) else ()
        ahead = 0 if synchronous else count
        segments.append(planner.segment(SegmentSpec(count, ahead, carried, updated=index > 0)))
    result = simulate(placement, segments, costs)
    measured = segments[_SETTLED:]
    carries = [done for plan in measured for done in plan.carry]
    shares = [sum(done > s for done in carries) / len(measured) / count for s in range(geometry.num_stages)]
    hosted = max(len(placement.hosted(device)) for device in range(geometry.num_stages))
    lines = [
        f"D = {geometry.num_stages} stages, N = {geometry.num_pipelines} pipelines, M = {count} micro-batches a step, "
        f"w = {geometry.max_in_flight} in flight"
    ]
    for pipeline in range(geometry.num_pipelines):
        devices = " ".join(str(placement.device(pipeline, stage)) for stage in range(geometry.num_stages))
        lines.append(f"pipeline {pipeline}: stages 0 to {geometry.num_stages - 1} on devices {devices}")
    if grid:
        last = segments[-1]
        halves = "I and W the halves of a backward" if split_backward else "B backward, == goes on"
        lines += ["", f"One step (F forward, {halves}, + early, . idle):", render(placement, [last])]
    lines += [
        "",
        f"utilisation, simulated                     {result.steady_utilisation(_SETTLED):.3f}",
        f"time of a step, in forwards of a stage     {result.time_per_segment(_SETTLED) / costs.forward[0]:.1f}",
        f"stage forwards on weights of a step before {sum(shares) / len(shares):.3f}",
        f"the same by stage                          {' '.join(f'{share:.2f}' for share in shares)}",
        f"most micro-batches held on a device        {max(result.peak_held)}",
        f"stages held on a device                    {hosted} of {geometry.num_stages}",
    ]
    return "\n".join(lines)
