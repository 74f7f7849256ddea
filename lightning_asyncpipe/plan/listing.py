"""List scheduling of one batch: an event-driven simulation in which a policy chooses among ready operations.

Whenever a device is free it runs the ready operation with the smallest key. A key is an offset per kind and slot plus a
period per round (micro-batch ``j`` is in round ``j // N``), so that priority rules ("backward first", "oldest first")
and repeating patterns are the same thing.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import islice
from typing import NamedTuple

from lightning_asyncpipe.errors import ScheduleError
from lightning_asyncpipe.plan.tables import BACKWARD, FORWARD, Operation, Starts, Tables


class Keys(NamedTuple):
    """Priorities: ``offsets[kind][slot] + round * period``; the smallest goes first.

    ``strict``: no operation overtakes another of its device that has a smaller key, ready or not.
    """

    offsets: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
    period: float
    strict: bool = False


def list_batch(
    tables: Tables, keys: Keys, microbatches: int, carried: Sequence[int], starts: Starts
) -> list[Operation]:
    """All operations that a batch still needs, in the order in which they start.

    Args:
        tables: the placement and its costs.
        keys: the policy.
        microbatches: micro-batches of the batch.
        carried: for each, how many stages have run its forward; may be empty.
        starts: when devices and weights are available.

    Raises:
        ScheduleError: when the carried forwards exceed the bound on micro-batches in flight.
    """
    pipelines, stages, last = tables.pipelines, tables.stages, tables.stages - 1
    device_of, release = tables.device, [starts.stages[s] for s in tables.stage]
    durations = (tables.forward, tables.backward, tables.weight)
    message, split, period = tables.message, tables.split, keys.period
    slots = pipelines * stages
    per_kind = slots * microbatches  # code of an operation: kind * per_kind + microbatch * slots + slot
    ready: list[list[tuple[float, int]]] = [[] for _ in range(stages)]
    busy = [True] * stages
    events: list[tuple[float, int]] = []  # code >= 0: finished; -1 - code: ready; below: a device begins
    wake = -1 - 3 * per_kind
    result: list[Operation] = []

    waiting = [iter(range(p, microbatches, pipelines)) for p in range(pipelines)]
    room = [tables.max_in_flight] * pipelines
    for microbatch in range(microbatches):
        done = carried[microbatch] if carried else 0
        if done == 0:
            continue
        pipeline = microbatch % pipelines
        room[pipeline] -= 1
        if next(waiting[pipeline]) != microbatch or room[pipeline] < 0 or done > stages:
            raise ScheduleError(
                f"carried forwards {tuple(carried)} cannot be continued: pipeline {pipeline} allows"
                f" {tables.max_in_flight} micro-batches in flight, started in order, of {stages} stages"
            )
        slot = pipeline * stages
        code = microbatch * slots + slot + done
        if done == stages:
            code += per_kind - 1
        at = starts.carried[microbatch] if starts.carried else 0.0
        heappush(events, (max(at, release[code % slots]), -1 - code))
    for pipeline in range(pipelines):
        slot = pipeline * stages
        for microbatch in islice(waiting[pipeline], room[pipeline]):
            heappush(events, (release[slot], -1 - (microbatch * slots + slot)))
    for device in range(stages):
        heappush(events, (starts.devices[device], wake - device))

    orders: list[list[tuple[float, int]]] = []
    if keys.strict:
        orders = _orders(tables, keys, microbatches, carried)

    while events:
        now = events[0][0]
        touched = []
        while events and events[0][0] == now:
            code = heappop(events)[1]
            if code < 0:
                if code <= wake:
                    device = wake - code
                    busy[device] = False
                    touched.append(device)
                    continue
                successors = [-1 - code]
            else:
                kind, rest = divmod(code, per_kind)
                slot = rest % slots
                device = device_of[slot]
                busy[device] = False
                touched.append(device)
                stage = slot % stages
                if kind == FORWARD:
                    successors = [code + 1 if stage < last else code + per_kind]
                elif kind == BACKWARD:
                    if stage > 0:
                        successors = [code - 1]
                    else:
                        following = next(waiting[slot // stages], None)
                        successors = [] if following is None else [following * slots + slot]
                    if split:
                        successors.append(code + per_kind)
                else:
                    continue
                if message:
                    kept = []
                    for successor in successors:
                        if device_of[successor % slots] != device:
                            heappush(events, (now + message, -1 - successor))
                        else:
                            kept.append(successor)
                    successors = kept
            for successor in successors:
                slot = successor % slots
                if release[slot] > now:
                    heappush(events, (release[slot], -1 - successor))
                    continue
                kind, rest = divmod(successor, per_kind)
                key = keys.offsets[kind][slot] + rest // slots // pipelines * period
                device = device_of[slot]
                heappush(ready[device], (key, successor))
                touched.append(device)
        for device in touched:
            if not busy[device] and ready[device]:
                if orders:
                    if ready[device][0] != orders[device][-1]:
                        continue
                    orders[device].pop()
                code = heappop(ready[device])[1]
                kind, rest = divmod(code, per_kind)
                microbatch, slot = divmod(rest, slots)
                end = now + durations[kind][slot]
                busy[device] = True
                heappush(events, (end, code))
                result.append((now, end, kind, slot, microbatch))
    return result


def _orders(
    tables: Tables, keys: Keys, microbatches: int, carried: Sequence[int]
) -> list[list[tuple[float, int]]]:
    """Per device, keys and codes (as in ``list_batch``) of all operations to be done, the first one last."""
    stages, pipelines = tables.stages, tables.pipelines
    slots = pipelines * stages
    per_kind = slots * microbatches
    orders: list[list[tuple[float, int]]] = [[] for _ in range(stages)]
    for microbatch in range(microbatches):
        round_, pipeline = divmod(microbatch, pipelines)
        for kind in range(3 if tables.split else 2):
            first = carried[microbatch] if kind == FORWARD and carried else 0
            for stage in range(first, stages):
                slot = pipeline * stages + stage
                key = keys.offsets[kind][slot] + round_ * keys.period
                code = kind * per_kind + microbatch * slots + slot
                orders[tables.device[slot]].append((key, code))
    for order in orders:
        order.sort(reverse=True)
    return orders
