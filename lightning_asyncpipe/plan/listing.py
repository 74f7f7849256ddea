"""List scheduling of one batch: an event-driven simulation in which a policy chooses among ready operations.

Whenever a device is free it runs the ready operation with the smallest key. A key is an offset per kind and slot plus a
period per round (micro-batch ``j`` is in round ``j // N``), so that priority rules ("backward first", "oldest first")
and repeating patterns are the same thing.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
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
    tables: Tables,
    keys: Keys,
    microbatches: int,
    carried: Sequence[int],
    starts: Starts,
    ahead: int = 0,
) -> list[Operation]:
    """All operations that a batch still needs, in the order in which they start.

    With ``ahead``, forwards of the next batch, numbered from ``microbatches`` on, compete with them under the same keys,
    as in an endless stream, until their device is done with this batch.

    Args:
        tables: the placement and its costs.
        keys: the policy.
        microbatches: micro-batches of the batch.
        carried: for each, how many stages have run its forward; may be empty.
        starts: when devices and weights are available.
        ahead: micro-batches of the next batch that take part.

    Raises:
        ScheduleError: when the carried forwards exceed the bound on micro-batches in flight.
    """
    work = _Work(tables, keys, microbatches, carried, ahead)
    stages, last, slots, per_kind = tables.stages, tables.stages - 1, work.slots, work.per_kind
    device_of, release = tables.device, [starts.stages[s] for s in tables.stage]
    durations = (tables.forward, tables.backward, tables.weight)
    message, split, offsets = tables.message, tables.split, keys.offsets
    waiting, round_keys, left = work.waiting, work.round_keys, work.left
    orders = work.orders() if keys.strict else None
    ready: list[list[tuple[float, int]]] = [[] for _ in range(stages)]
    busy = [True] * stages
    # Events are (time, code): at least 0: that operation is over; below, -1 - code: that one may start, and with a
    # code that is no operation's: that device begins.
    none = 3 * per_kind
    events = [(at, -1 - none - device) for device, at in enumerate(starts.devices)]
    for code in work.first():
        microbatch = code % per_kind // slots
        at = starts.carried[microbatch] if microbatch < len(starts.carried) else 0.0
        events.append((max(at, release[code % slots]), -1 - code))
    heapify(events)
    result: list[Operation] = []

    while events:
        now = events[0][0]
        touched = []
        while events and events[0][0] == now:
            code = heappop(events)[1]
            if code < 0:
                code = -1 - code
                if code >= none:
                    device = code - none
                    busy[device] = False
                    touched.append(device)
                    continue
                successors = [code]
            else:
                kind, rest = divmod(code, per_kind)
                microbatch, slot = divmod(rest, slots)
                device, stage = device_of[slot], slot % stages
                busy[device] = False
                touched.append(device)
                if kind == FORWARD:
                    if stage < last:
                        successors = [code + 1]
                    else:  # backwards are never early
                        successors = [code + per_kind] if microbatch < microbatches else []
                elif kind == BACKWARD:
                    if stage:
                        successors = [code - 1]
                    else:
                        entering = waiting[slot // stages]
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
                if release[slot] > now:
                    heappush(events, (release[slot], -1 - successor))
                    continue
                device = device_of[slot]
                heappush(ready[device], (offsets[kind][slot] + round_keys[microbatch], successor))
                touched.append(device)
        for device in touched:
            if busy[device] or not ready[device] or not left[device]:
                continue
            if orders:
                if ready[device][0] != orders[device][-1]:
                    continue
                orders[device].pop()
            code = heappop(ready[device])[1]
            kind, rest = divmod(code, per_kind)
            microbatch, slot = divmod(rest, slots)
            end = now + durations[kind][slot]
            busy[device] = True
            if microbatch < microbatches:
                left[device] -= 1
            heappush(events, (end, code))
            result.append((now, end, kind, slot, microbatch))
    return result


class _Work:
    """The operations of a batch, as codes: ``kind * per_kind + microbatch * slots + slot``.

    Attributes:
        round_keys: per micro-batch, what its round adds to its keys.
        waiting: per pipeline, the first forwards that the bound in flight does not allow yet, the next one last
            (after ``first``).
        left: per device, how many operations of the current batch it has to do.
    """

    def __init__(
        self, tables: Tables, keys: Keys, microbatches: int, carried: Sequence[int], ahead: int
    ) -> None:
        self.tables, self.keys, self.current = tables, keys, microbatches
        pipelines, stages = tables.pipelines, tables.stages
        self.kinds = 3 if tables.split else 2
        self.slots = slots = pipelines * stages
        self.per_kind = slots * (microbatches + ahead)
        rounds = [tables.rounds(pipeline, microbatches) for pipeline in range(pipelines)]
        self.pipeline = [j % pipelines for j in range(microbatches)]
        self.pipeline += [j % pipelines for j in range(ahead)]
        self.round_keys = [j // pipelines * keys.period for j in range(microbatches)]
        self.round_keys += [
            (rounds[j % pipelines] + j // pipelines) * keys.period for j in range(ahead)
        ]
        self.done = [*(carried or (0,) * microbatches), *(0,) * ahead]
        self.waiting: list[list[int]] = [[] for _ in range(pipelines)]
        self.left = [self.kinds * microbatches] * stages
        flying = [0] * pipelines
        for microbatch, (pipeline, done) in enumerate(zip(self.pipeline, self.done, strict=True)):
            slot = pipeline * stages
            if not done:
                self.waiting[pipeline].append(microbatch * slots + slot)
                continue
            flying[pipeline] += 1
            if self.waiting[pipeline] or flying[pipeline] > tables.max_in_flight or done > stages:
                raise ScheduleError(
                    f"carried forwards {tuple(carried)} cannot be continued: pipeline {pipeline} allows"
                    f" {tables.max_in_flight} micro-batches in flight, started in order, of {stages} stages"
                )
            for device in tables.device[slot : slot + done]:
                self.left[device] -= 1
        self.room = [tables.max_in_flight - count for count in flying]

    def first(self) -> list[int]:
        """What may be done at once: continues the carried micro-batches, and starts others; taken off ``waiting``."""
        stages, codes = self.tables.stages, []
        for microbatch, done in enumerate(self.done):
            if done:
                code = microbatch * self.slots + self.pipeline[microbatch] * stages + done
                codes.append(code if done < stages else code - 1 + self.per_kind)
        for waiting, room in zip(self.waiting, self.room, strict=True):
            waiting.reverse()
            codes += [waiting.pop() for _ in range(min(room, len(waiting)))]
        return codes

    def orders(self) -> list[list[tuple[float, int]]]:
        """Per device, keys and codes of all that it does in strict order, the first one last.

        Of the next batch, it does what comes before the last of this one and has a cause that is done so, too.
        """
        stages, slots = self.tables.stages, self.slots
        orders: list[list[tuple[float, int]]] = [[] for _ in range(stages)]
        latest: list[float] = []
        started = [0] * self.tables.pipelines
        for microbatch, done in enumerate(self.done):
            early = microbatch >= self.current
            if early and not latest:
                latest = [max(order)[0] if order else 0.0 for order in orders]
            pipeline = self.pipeline[microbatch]
            started[pipeline] += early
            if started[pipeline] > self.tables.max_in_flight:
                continue
            for kind in range(1 if early else self.kinds):
                for stage in range(0 if kind else done, stages):
                    slot = pipeline * stages + stage
                    key = self.keys.offsets[kind][slot] + self.round_keys[microbatch]
                    device = self.tables.device[slot]
                    if early and key >= latest[device]:
                        break
                    code = kind * self.per_kind + microbatch * slots + slot
                    orders[device].append((key, code))
        for order in orders:
            order.sort(reverse=True)
        return orders
