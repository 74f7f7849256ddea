"""Operations of one segment under a policy, and the steady state of equal segments one after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from lightning_asyncpipe.plan.listing import list_batch
from lightning_asyncpipe.plan.lookahead import early_forwards
from lightning_asyncpipe.plan.policies import Policy
from lightning_asyncpipe.plan.replay import Order, Starts, replay
from lightning_asyncpipe.plan.tables import FORWARD, Operation, Tables


def run_segment(
    tables: Tables, policy: Policy, microbatches: int, ahead: int, carried: Sequence[int], steps: bool
) -> tuple[list[Operation], list[Operation]]:
    """Simulates one segment under a policy; returns the operations of the current batch and the early forwards."""
    current = list_batch(tables, policy.keys, microbatches, carried)
    if not ahead:
        return current, []
    reduce = tables.costs.reduce if steps else 0.0
    until = max(end + (reduce if kind != FORWARD else 0.0) for _, end, kind, _, _ in current)
    return early_forwards(tables, current, ahead, until + policy.overrun * tables.mean_forward, policy.limit)


class SteadyState(NamedTuple):
    """What a policy settles to: per segment, its time and its early forwards, and the most of those on one device.

    ``operations`` is how many were simulated to find out.
    """

    time: float
    early: float
    most_early: int
    operations: int


def settle(
    tables: Tables, policy: Policy, microbatches: int, ahead: int, steps: bool, segments: int
) -> SteadyState:
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
            current, early = run_segment(tables, policy, microbatches, ahead, carried, steps)
            order = plans[carried] = Order.of(microbatches, ahead, current, early)
            operations += len(order.operations)
        length, starts = replay(tables, order, carried, steps, starts)
        orders.append(order)
        lengths.append(length)
        carried = order.carry
        operations += len(order.operations) // 2
    first = seen.get((carried, starts), len(orders) // 2)
    period = orders[first:]
    most = 0
    for order in period:
        early_slots = (slot for _, slot, microbatch in order.operations if microbatch >= microbatches)
        most = max(most, *Counter(tables.device[slot] for slot in early_slots).values(), 0)
    early_count = sum(sum(order.carry) for order in period)
    # The weights of the step after the last segment of a period are waited for in the first one.
    return SteadyState(sum(lengths[first:]) / len(period), early_count / len(period), most, operations)
