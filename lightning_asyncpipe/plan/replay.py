"""The times of a segment whose order is given: when its devices, its messages and new weights allow each operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_asyncpipe.plan.tables import BACKWARD, FORWARD, Operation, Tables


class Order(NamedTuple):
    """The operations of a segment in an order that every device keeps: kind, slot, micro-batch.

    Those of the next batch are numbered from ``microbatches`` on. ``carry`` counts their forwards.
    """

    microbatches: int
    operations: list[tuple[int, int, int]]
    carry: tuple[int, ...]

    @classmethod
    def of(cls, microbatches: int, ahead: int, current: Sequence[Operation], early: Sequence[Operation]) -> Order:
        """The order of the simulated times of a segment's operations."""
        numbered = [*current, *((a, b, kind, slot, microbatches + j) for a, b, kind, slot, j in early)]
        # Ties are broken by the position, so that causes stay before effects where durations are 0.
        entries = sorted((a, b, at, kind, slot, j) for at, (a, b, kind, slot, j) in enumerate(numbered))
        carry = [0] * ahead
        for operation in early:
            carry[operation[-1]] += 1
        return cls(microbatches, [entry[3:] for entry in entries], tuple(carry))


class Starts(NamedTuple):
    """What a segment waits for, beside its devices, which begin together at 0.

    Per stage, when its new weights arrive; per micro-batch, when the result of its last carried forward is where it is
    used next.
    """

    stages: tuple[float, ...]
    carried: tuple[float, ...]


class Replay(NamedTuple):
    """The length of a segment, and what it leaves to the next one, counted from its end."""

    length: float
    following: Starts


def replay(tables: Tables, order: Order, carried: Sequence[int], steps: bool, starts: Starts) -> Replay:
    """Runs the operations in their order, each as soon as its device, its input and its weights allow.

    The next segment begins on all devices at once: ranks exchange what their micro-batches gave at the end of each. A
    step waits for the last reduction of each stage, and its weights for the step.
    """
    stages, slots, last = tables.stages, tables.pipelines * tables.stages, tables.stages - 1
    device_of, message = tables.device, tables.message
    durations = (tables.forward, tables.backward, tables.weight)
    # When the inputs of forwards are there, and those of backwards after them: by micro-batch, then slot.
    per_kind = slots * (order.microbatches + len(order.carry))
    inputs = [0.0] * (2 * per_kind)
    for microbatch, (done, at) in enumerate(zip(carried, starts.carried, strict=True)):
        slot = microbatch % tables.pipelines * stages + done
        inputs[microbatch * slots + slot + (per_kind - 1 if done == stages else 0)] = at
    clock, reduced = [0.0] * stages, [0.0] * stages
    arrivals = [0.0] * len(order.carry)
    for kind, slot, microbatch in order.operations:
        device, stage = device_of[slot], slot % stages
        code = microbatch * slots + slot
        end = max(clock[device], starts.stages[stage])
        if kind == FORWARD:
            end = max(end, inputs[code]) + tables.forward[slot]
            arrival = end if stage == last else end + message
            inputs[code + 1 if stage < last else per_kind + code] = arrival
            if microbatch >= order.microbatches:
                arrivals[microbatch - order.microbatches] = arrival
        else:
            if kind == BACKWARD:
                end = max(end, inputs[per_kind + code])
            end += durations[kind][slot]
            if kind == BACKWARD and stage:
                inputs[per_kind + code - 1] = end + message
            reduced[stage] = end if end > reduced[stage] else reduced[stage]
        clock[device] = end
    length = max(clock)
    costs = tables.costs
    weights = [max(0.0, at + costs.reduce - length) + costs.update if steps else 0.0 for at in reduced]
    return Replay(length, Starts(tuple(weights), tuple(max(0.0, at - length) for at in arrivals)))
