"""Whether a plan is worth its devices.

A plan that is proven computes what it should; it may still leave most devices idle, where the model can be cut in few
places or was cut in the wrong ones. That is said once, on rank 0.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_asyncpipe.plan.geometry import Geometry
from lightning_asyncpipe.runtime.candidates import Candidates
from lightning_asyncpipe.runtime.program import StageProgram

LEAST_BALANCE = 0.65
"""The mean work of a device, in that of the busiest one, below which a plan is called poor."""

LEAST_UTILISATION = 0.2
"""The share of the time that devices are predicted to be busy, below which a plan is called poor."""


def stage_work(candidates: Candidates, program: StageProgram) -> list[float]:
    """The operations of each stage of a traced step, in any unit."""
    times = [cut.time for cut in program.cuts]
    stages = [0.0] * program.num_stages
    for cut, cost in zip((None, *candidates.cuts), candidates.costs(), strict=True):
        stages[0 if cut is None else bisect_right(times, cut.time)] += cost
    return stages


def poor(work: Sequence[float], geometry: Geometry, description: Mapping[str, Any]) -> str | None:
    """What is wrong with a plan, in a sentence or two; None if it is a fair one.

    Args:
        work: of each stage, in any unit; what was measured counts instead, where it was.
        geometry: of the plan.
        description: of the plan.
    """
    count = geometry.num_stages
    entries = description["stages"]
    if all(entry["forward_ms"] is not None for entry in entries):
        work = [entry["forward_ms"] + entry["backward_ms"] for entry in entries]
    if count == 1 or not sum(work):
        return None
    placement = geometry.placement
    busy = [sum(work[stage] for _, stage in placement.slots(device)) for device in range(count)]
    balance = sum(busy) / count / max(busy)
    faults = []
    if balance < LEAST_BALANCE:
        largest = max(range(count), key=work.__getitem__)
        begins = entries[largest]["begins"]
        faults.append(
            f"stage {largest}{f' (from {begins!r})' if begins else ''} would do {work[largest] / sum(work):.0%} of the "
            f"work, so that {count} devices are at most {balance * count:.1f} times as fast as one"
        )
    parameters = [sum(entries[stage]["parameters"] for stage in placement.hosted(d)) for d in range(count)]
    if not all(parameters) and any(parameters):
        without = ", ".join(str(device) for device in range(count) if not parameters[device])
        faults.append(f"device {without} would hold none of the weights")
    predicted = [device["utilisation"] for device in description["devices"]]
    if not faults and None not in predicted and sum(predicted) < LEAST_UTILISATION * len(predicted):
        faults.append(
            f"devices are predicted to be busy {sum(predicted) / len(predicted):.0%} of the time: stages are short "
            "beside the messages between them"
        )
    if not faults:
        return None
    return (
        f"The plan is a poor one: {'; '.join(faults)}. Use fewer devices, or a larger batch or model; where it is the "
        "places to cut that are few, restructure the model so that one tensor is passed on in more of them."
    )
