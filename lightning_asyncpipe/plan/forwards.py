"""The order of forwards where there are no backwards: validation, testing, prediction.

Batches follow each other through the devices. A loop takes their results one by one, in order, but while the last
devices finish the batches that it needs next, the first ones already work on later batches, so that nobody waits for a
pipeline to fill. What has been started of later batches is carried into the next plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple


class Turn(NamedTuple):
    """One forward: a batch, by its place in the window, and how many stages it has passed before."""

    batch: int
    stage: int


@dataclass(frozen=True)
class ForwardPlan:
    """What every device runs until the batches that are needed are done.

    Attributes:
        turns: for each device its forwards, in order.
        sequence: the same of all devices, in an order in which one process can run them.
        progress: for each batch, the stages that it has passed afterwards.
    """

    turns: tuple[tuple[Turn, ...], ...]
    sequence: tuple[Turn, ...]
    progress: tuple[int, ...]


@lru_cache(maxsize=4096)
def plan_forwards(
    num_devices: int, routes: tuple[tuple[int, ...], ...], progress: tuple[int, ...], needed: int
) -> ForwardPlan:
    """Simulate devices that each take one unit of time for a forward, the earliest batch first.

    Every device's order is that of the simulated time, so the lists cannot block each other: what a forward waits for
    was run at an earlier time. It is a pure function of its arguments; all ranks call it with the same.

    Args:
        num_devices: devices of a replica.
        routes: for each batch of the window the devices that it visits, in order; a device may come twice.
        progress: for each batch the stages that it has passed already.
        needed: how many of the first batches have to be done at the end.

    Raises:
        ValueError: if a route visits a device that does not exist, or more batches are needed than there are.
    """
    if not 0 <= needed <= len(routes) or len(progress) != len(routes):
        raise ValueError(f"{needed} batches are needed of {len(routes)}, whose progress is {progress}")
    if any(not 0 <= device < num_devices for route in routes for device in route):
        raise ValueError(f"a route among {routes} leaves the {num_devices} devices")
    passed = list(progress)
    turns: list[list[Turn]] = [[] for _ in range(num_devices)]
    sequence: list[Turn] = []
    while any(passed[batch] < len(routes[batch]) for batch in range(needed)):
        taken = _next_turns(routes, passed)
        for device, turn in taken.items():
            turns[device].append(turn)
            sequence.append(turn)
            passed[turn.batch] += 1
    return ForwardPlan(tuple(map(tuple, turns)), tuple(sequence), tuple(passed))


def _next_turns(routes: Sequence[tuple[int, ...]], passed: Sequence[int]) -> dict[int, Turn]:
    """What each device runs next, if it can run anything: the first batch that waits for it."""
    taken: dict[int, Turn] = {}
    for batch, route in enumerate(routes):
        if passed[batch] < len(route):
            taken.setdefault(route[passed[batch]], Turn(batch, passed[batch]))
    return taken
