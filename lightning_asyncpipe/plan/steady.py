"""Operations of one segment under a policy, and the steady state of equal segments one after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from lightning_asyncpipe.plan.listing import Keys, list_batch
from lightning_asyncpipe.plan.lookahead import early_forwards
from lightning_asyncpipe.plan.policies import Policy
from lightning_asyncpipe.plan.replay import Order, Starts, replay
from lightning_asyncpipe.plan.tables import BACKWARD, FORWARD, WEIGHT, Operation, Tables

_OUTLOOK = 6
"""Rounds of a batch that tell what the rest of it will be like."""


def run_segment(
    tables: Tables, policy: Policy, microbatches: int, ahead: int, carried: Sequence[int], steps: bool
) -> tuple[list[Operation], list[Operation]]:
    """Simulates one segment under a policy; returns the operations of the current batch and the early forwards."""
    tables = tables.taken_as(policy.message, policy.even)
    current = list_batch(tables, policy.keys, microbatches, carried)
    if not ahead:
        return current, []
    reduce = tables.costs.reduce if steps else 0.0
    until = max(end + (reduce if kind != FORWARD else 0.0) for _, end, kind, _, _ in current)
    until += policy.overrun * tables.mean_forward
    return early_forwards(tables, current, ahead, until, policy.limit, policy.put_off)


class SteadyState(NamedTuple):
    """What a policy settles to, per segment.

    Attributes:
        time: of a segment.
        early: its early forwards, each weighted by its work: one is a stage of average work.
        uninformed: the same, each weighted also by the share of its stage's gradient that its device has not gathered
            before it.
        shares: per stage, the share of its forwards that are early.
        most_early: the most early forwards on one device.
        operations: how many were simulated to find out.
    """

    time: float
    early: float
    uninformed: float
    shares: tuple[float, ...]
    most_early: int
    operations: int


def settle(tables: Tables, policy: Policy, microbatches: int, ahead: int, steps: bool, segments: int) -> SteadyState:
    """Repeats a segment until its state (carry and starts) recurs, or for a number of segments."""
    carried: tuple[int, ...] = ()
    starts = Starts((0.0,) * tables.stages, ())
    plans: dict[tuple[int, ...], Order] = {}
    seen: dict[tuple[tuple[int, ...], Starts], int] = {}
    orders: list[Order] = []
    lengths: list[float] = []
    operations = 0
    while len(orders) < segments and (carried, starts) not in seen:
        seen[carried, starts] = len(orders)
        order = plans.get(carried)
        if order is None:
            operations_of = run_segment(tables, policy, microbatches, ahead, carried, steps)
            order = plans[carried] = Order.of(microbatches, ahead, *operations_of)
            operations += len(order.operations)
        length, starts = replay(tables, order, carried, steps, starts)
        orders.append(order)
        lengths.append(length)
        carried = order.carry
        operations += len(order.operations) // 2
    first = seen.get((carried, starts), len(orders) // 2)
    period = orders[first:]
    most = 0
    early = uninformed = 0.0
    by_stage = [0] * tables.stages
    for order in period:
        early_slots = [slot for _, slot, microbatch in order.operations if microbatch >= microbatches]
        most = max(most, *Counter(tables.device[slot] for slot in early_slots).values(), 0)
        early += sum(tables.forward[slot] for slot in early_slots)
        for slot in early_slots:
            by_stage[slot % tables.stages] += 1
        uninformed += _uninformed(tables, order)
    scale = len(period) * (tables.mean_forward or 1.0)
    time = sum(lengths[first:]) / len(period)
    shares = tuple(count / (len(period) * microbatches) for count in by_stage)
    return SteadyState(time, early / scale, uninformed / scale, shares, most, operations)


def _uninformed(tables: Tables, order: Order) -> float:
    """The work of early forwards, each times the share of its stage's gradient that its device has not gathered."""
    last = WEIGHT if tables.split else BACKWARD
    gathered: Counter[tuple[int, int]] = Counter()
    total = 0.0
    for kind, slot, microbatch in order.operations:
        place = tables.device[slot], slot % tables.stages
        if kind == last:
            gathered[place] += 1
        elif microbatch >= order.microbatches:
            total += tables.forward[slot] * (1 - gathered[place] / order.microbatches)
    return total


def outlook(tables: Tables, keys: Keys, microbatches: int) -> tuple[float, int]:
    """An estimate of the time of a batch from its first rounds, and how many operations were simulated for it.

    A short batch is simulated as it is, without a carry; a long one is taken to go on at the pace that it has reached.
    """
    first = min(microbatches, _OUTLOOK * tables.pipelines)
    operations = list_batch(tables, keys, first, ())
    makespan = max(end for _, end, _, _, _ in operations)
    if first < microbatches:
        per_device = len(operations) // tables.stages
        reached = [[0.0, 0.0] for _ in range(tables.stages)]
        counts = [0] * tables.stages
        for _, end, _, slot, _ in operations:
            device = tables.device[slot]
            counts[device] += 1
            if counts[device] in (per_device // 3, per_device * 5 // 6):
                reached[device][counts[device] > per_device // 3] = end
        pace = sum(end - begin for begin, end in reached) / tables.stages / (first * (5 / 6 - 1 / 3))
        makespan += pace * (microbatches - first)
    return makespan, len(operations)
