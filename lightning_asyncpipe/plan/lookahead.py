"""Early forwards: filling a batch's waits with forwards of the next one.

The operations of the current batch stay where they are, except weight gradients, which give way: they can be done any
time before the segment's end. A forward of the next batch is put into a gap of its device only if it fits as a whole,
and after the device's last operation only if it is over by the time that the last device is done: forwards that fill no
wait are better run after the optimizer step, on new weights.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from lightning_asyncpipe.plan.tables import BACKWARD, FORWARD, WEIGHT, Operation, Tables

_Gaps = list[tuple[float, float]]
"""The waits of a device, ``(begin, end)``, in order."""


def early_forwards(
    tables: Tables, current: Sequence[Operation], ahead: int, until: float, limit: int, put_off: bool = False
) -> tuple[list[Operation], list[Operation]]:
    """Forwards of the next batch that fit into the waits of this one.

    Args:
        tables: the placement and its costs.
        current: the operations of the current batch, as ``list_batch`` gives them.
        ahead: micro-batches of the next batch.
        until: when all early forwards must be over.
        limit: the most early forwards of a device.
        put_off: run them as late as possible, after as many weight gradients as possible.

    Returns:
        The current batch's operations, weight gradients moved, and the early forwards; each in an order of causes
        before effects.
    """
    stages, message = tables.stages, tables.message
    gaps = _gaps(tables, current, until)
    left = [limit] * stages
    candidates = _entries(tables, current, ahead)
    early: list[Operation] = []
    refused: set[int] = set()  # slots at which a micro-batch found no place: later ones may not overtake it
    while candidates:
        at, microbatch, slot = heappop(candidates)
        device, duration = tables.device[slot], tables.forward[slot]
        if slot in refused or not left[device]:
            continue
        start = _place(gaps[device], at, duration)
        if start is None:
            refused.add(slot)
            continue
        left[device] -= 1
        early.append((start, start + duration, FORWARD, slot, microbatch))
        if slot % stages < stages - 1:
            heappush(candidates, (start + duration + message, microbatch, slot + 1))
    if put_off:
        gaps = _gaps(tables, current, until)
        early = _put_off(tables, early, gaps)
    if early and tables.split:
        return _weights_given_way(tables, current, early, gaps), early
    return list(current), early


def _put_off(tables: Tables, early: Sequence[Operation], gaps: Sequence[_Gaps]) -> list[Operation]:
    """The early forwards, each as late as the later ones of its device and of its micro-batch allow."""
    needed: dict[tuple[int, int], float] = {}
    late: list[Operation] = []
    # The last one first: what is put off then takes no place of those that are not yet.
    for at, _, kind, slot, microbatch in sorted(
        early, key=lambda operation: (operation[0], operation[3]), reverse=True
    ):
        duration = tables.forward[slot]
        start = _place_late(gaps[tables.device[slot]], at, needed.get((microbatch, slot), math.inf), duration)
        needed[microbatch, slot - 1] = start - tables.message
        late.append((start, start + duration, kind, slot, microbatch))
    late.reverse()
    return late


def _entries(tables: Tables, current: Sequence[Operation], ahead: int) -> list[tuple[float, int, int]]:
    """First forwards that the bound in flight allows: a heap of time, micro-batch, slot."""
    pipelines, stages = tables.pipelines, tables.stages
    freed: list[list[float]] = [[] for _ in range(pipelines)]
    begun = [0.0] * pipelines
    for _, end, kind, slot, _ in current:
        if slot % stages == 0:
            if kind == FORWARD:
                begun[slot // stages] = end
            elif kind == BACKWARD:
                freed[slot // stages].append(end)
    entries: list[tuple[float, int, int]] = []
    for microbatch in range(min(ahead, pipelines * tables.max_in_flight)):
        round_, pipeline = divmod(microbatch, pipelines)
        needed = len(freed[pipeline]) + round_ - tables.max_in_flight
        room = freed[pipeline][needed] if needed >= 0 else 0.0
        entries.append((max(room, begun[pipeline]), microbatch, pipeline * stages))
    heapify(entries)
    return entries


def _gaps(tables: Tables, current: Sequence[Operation], until: float) -> list[_Gaps]:
    """Per device, its waits up to the horizon, weight gradients counted as waits."""
    free = [0.0] * tables.stages
    gaps: list[_Gaps] = [[] for _ in free]
    for start, end, kind, slot, _ in current:
        if kind == WEIGHT:
            continue
        device = tables.device[slot]
        if start > free[device]:
            gaps[device].append((free[device], start))
        free[device] = end
    for line, end in zip(gaps, free, strict=True):
        if until > end:
            line.append((end, until))
    return gaps


def _weights_given_way(
    tables: Tables, current: Sequence[Operation], early: Sequence[Operation], gaps: Sequence[_Gaps]
) -> list[Operation]:
    """The current batch with its weight gradients put into what gaps are left, or at the end."""
    done = [0.0] * tables.stages
    inputs: dict[tuple[int, int], float] = {}
    for operations in (current, early):
        for _, end, kind, slot, microbatch in operations:
            if kind == BACKWARD:
                inputs[slot, microbatch] = end
            if kind != WEIGHT:
                device = tables.device[slot]
                done[device] = max(done[device], end)
    for line, end in zip(gaps, done, strict=True):
        begin = line.pop()[0] if line and line[-1][1] > end else end
        line.append((begin, math.inf))
    moved = []
    for operation in current:
        _, _, kind, slot, microbatch = operation
        if kind == WEIGHT:
            duration = tables.weight[slot]
            start = _place(gaps[tables.device[slot]], inputs[slot, microbatch], duration)
            assert start is not None
            operation = start, start + duration, kind, slot, microbatch
        moved.append(operation)
    return moved


def _place_late(gaps: _Gaps, at: float, until: float, duration: float) -> float:
    """Takes the last piece of a gap from ``at`` on that holds ``duration`` and ends by ``until``; returns its begin.

    ``at`` is known to be one. What takes no time needs no gap.
    """
    for index in range(len(gaps) - 1, -1, -1):
        begin, end = gaps[index]
        start = max(at, min(end, until) - duration)
        if start >= begin and start + duration <= end:
            pieces = ((begin, start), (start + duration, end))
            gaps[index : index + 1] = [piece for piece in pieces if piece[0] < piece[1]]
            return start
    return at


def _place(gaps: _Gaps, at: float, duration: float) -> float | None:
    """Takes the first piece of a gap that holds ``duration`` from ``at`` on; returns its begin."""
    for index in range(max(0, bisect_left(gaps, (at, at)) - 1), len(gaps)):
        begin, end = gaps[index]
        start = max(begin, at)
        if start + duration <= end:
            pieces = ((begin, start), (start + duration, end))
            gaps[index : index + 1] = [piece for piece in pieces if piece[0] < piece[1]]
            return start
    return None
