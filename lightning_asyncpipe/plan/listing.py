"""List scheduling of one batch: an event-driven simulation in which a policy chooses among ready operations.

Whenever a device is free it runs the ready operation with the smallest key; weight gradients, which nothing waits for
but the end of the batch, when nothing else is ready, or when as many micro-batches are held for them as the bound in
flight allows (a strict order has its own place for them). A key is an offset per kind and slot plus a
period per round (micro-batch ``j`` is in round ``j // N``), so that priority rules ("backward first", "oldest first")
and repeating patterns are the same thing.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from lightning_asyncpipe.errors import ScheduleError
from lightning_asyncpipe.plan.tables import BACKWARD, FORWARD, WEIGHT, Operation, Tables


class Keys(NamedTuple):
    """Priorities: ``offsets[kind][slot] + round * period``; the smallest goes first.

    ``strict``: no operation overtakes another of its device that has a smaller key, ready or not.
    """

    offsets: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
    period: float
    strict: bool = False


def list_batch(tables: Tables, keys: Keys, microbatches: int, carried: Sequence[int]) -> list[Operation]:
    """All operations that a batch still needs, in the order in which they start, on devices that begin together at 0.

    Args:
        tables: the placement and its costs.
        keys: the policy.
        microbatches: micro-batches of the batch.
        carried: for each, how many stages have run its forward; may be empty.

    Raises:
        ScheduleError: when the carried forwards exceed the bound on micro-batches in flight.
    """
    work = _Work(tables, microbatches, carried)
    stages, last, slots, per_kind = tables.stages, tables.stages - 1, work.slots, work.per_kind
    device_of, message, split, offsets = tables.device, tables.message, tables.split, keys.offsets
    durations = (tables.forward, tables.backward, tables.weight)
    round_keys = [j // tables.pipelines * keys.period for j in range(microbatches)]
    orders = work.orders(keys) if keys.strict else None
    ready: list[list[tuple[float, int]]] = [[] for _ in range(stages)]
    weights: list[list[tuple[float, int]]] = [[] for _ in range(stages)]
    held = work.held()
    most_held = tables.pipelines * tables.max_in_flight if split else len(durations[0]) * microbatches
    free = [True] * stages
    # Events are (time, code): at least 0: that operation is over; below: -1 - code is one whose input is there.
    events = [(0.0, -1 - code) for code in sorted(work.first(), reverse=True)]
    result: list[Operation] = []

    while events:
        now = events[0][0]
        touched = []
        while events and events[0][0] == now:
            code = heappop(events)[1]
            if code < 0:
                successors = [-1 - code]
            else:
                kind, rest = divmod(code, per_kind)
                slot = rest % slots
                device, stage = device_of[slot], slot % stages
                free[device] = True
                touched.append(device)
                if kind == FORWARD:
                    successors = [code + 1 if stage < last else code + per_kind]
                elif kind == BACKWARD:
                    if stage:
                        successors = [code - 1]
                    else:
                        entering = work.waiting[slot // stages]
                        successors = [entering.pop()] if entering else []
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
                kind, rest = divmod(successor, per_kind)
                microbatch, slot = divmod(rest, slots)
                device = device_of[slot]
                due = weights if kind == WEIGHT and not orders else ready
                heappush(due[device], (offsets[kind][slot] + round_keys[microbatch], successor))
                touched.append(device)
        for device in touched:
            if not free[device]:
                continue
            line = ready[device]
            if weights[device] and (not line or (held[device] >= most_held and line[0][1] < per_kind)):
                line = weights[device]
            if not line:
                continue
            if orders:
                if line[0] != orders[device][-1]:
                    continue
                orders[device].pop()
            code = heappop(line)[1]
            kind, rest = divmod(code, per_kind)
            held[device] += (kind == FORWARD) - (kind == WEIGHT)
            microbatch, slot = divmod(rest, slots)
            end = now + durations[kind][slot]
            free[device] = False
            heappush(events, (end, code))
            result.append((now, end, kind, slot, microbatch))
    return result


class _Work:
    """The operations of a batch, as codes: ``kind * per_kind + microbatch * slots + slot``.

    ``waiting`` is per pipeline the first forwards that the bound in flight does not allow yet, the next one last.
    """

    def __init__(self, tables: Tables, microbatches: int, carried: Sequence[int]) -> None:
        self.tables = tables
        self.slots = tables.pipelines * tables.stages
        self.per_kind = self.slots * microbatches
        self.done = carried or (0,) * microbatches
        self.waiting: list[list[int]] = [[] for _ in range(tables.pipelines)]
        self.flying = [0] * tables.pipelines
        for microbatch, done in enumerate(self.done):
            pipeline = microbatch % tables.pipelines
            if not done:
                self.waiting[pipeline].append(microbatch * self.slots + pipeline * tables.stages)
                continue
            self.flying[pipeline] += 1
            if self.waiting[pipeline] or self.flying[pipeline] > tables.max_in_flight or done > tables.stages:
                raise ScheduleError(
                    f"carried forwards {tuple(carried)} cannot be continued: pipeline {pipeline} allows"
                    f" {tables.max_in_flight} micro-batches in flight, started in order, of {tables.stages} stages"
                )
        for waiting in self.waiting:
            waiting.reverse()

    def held(self) -> list[int]:
        """Per device, the forwards whose backward is still to come, counted by stage."""
        tables, held = self.tables, [0] * self.tables.stages
        for microbatch, done in enumerate(self.done):
            for stage in range(done):
                held[tables.device[microbatch % tables.pipelines * tables.stages + stage]] += 1
        return held

    def first(self) -> list[int]:
        """What may be done at once: continues the carried micro-batches, and starts others; taken off ``waiting``."""
        tables, codes = self.tables, []
        for microbatch, done in enumerate(self.done):
            if done:
                code = microbatch * self.slots + microbatch % tables.pipelines * tables.stages + done
                codes.append(code if done < tables.stages else code - 1 + self.per_kind)
        for waiting, flying in zip(self.waiting, self.flying, strict=True):
            codes += [waiting.pop() for _ in range(min(tables.max_in_flight - flying, len(waiting)))]
        return codes

    def orders(self, keys: Keys) -> list[list[tuple[float, int]]]:
        """Per device, keys and codes of all its operations, the first one last."""
        tables = self.tables
        orders: list[list[tuple[float, int]]] = [[] for _ in range(tables.stages)]
        for microbatch, done in enumerate(self.done):
            round_, pipeline = divmod(microbatch, tables.pipelines)
            for kind in range(3 if tables.split else 2):
                for stage in range(done if kind == FORWARD else 0, tables.stages):
                    slot = pipeline * tables.stages + stage
                    key = keys.offsets[kind][slot] + round_ * keys.period
                    code = kind * self.per_kind + microbatch * self.slots + slot
                    orders[tables.device[slot]].append((key, code))
        for order in orders:
            order.sort(reverse=True)
        return orders
