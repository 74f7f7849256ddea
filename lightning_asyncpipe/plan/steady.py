"""Operations of one segment under a policy, and the steady state of equal segments one after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from lightning_asyncpipe.plan.listing import list_batch
from lightning_asyncpipe.plan.lookahead import early_forwards, horizons
from lightning_asyncpipe.plan.policies import Policy
from lightning_asyncpipe.plan.tables import FORWARD, Operation, Starts, Tables


class Segment(NamedTuple):
    """Operations of a segment: the current batch's and the next one's, and when it leaves what to the next.

    ``ends`` is per device the end of its last operation; ``stepped`` per stage when the weights after the step
    that follows are on its hosts; ``carry`` per micro-batch of the next batch how many forwards it has done, and
    ``arrivals`` when the result of the last of them is where it is used next.
    """

    current: list[Operation]
    early: list[Operation]
    ends: tuple[float, ...]
    stepped: tuple[float, ...]
    carry: tuple[int, ...]
    arrivals: tuple[float, ...]

    def following(self, steps: bool) -> tuple[float, Starts]:
        """When the first device begins the next segment, and that one's starts, counted from then."""
        begin = min(self.ends)
        return begin, Starts(
            tuple(end - begin for end in self.ends),
            tuple(max(0.0, at - begin) if steps else 0.0 for at in self.stepped),
            tuple(max(0.0, at - begin) for at in self.arrivals),
        )


def run_segment(
    tables: Tables,
    policy: Policy,
    microbatches: int,
    ahead: int,
    carried: Sequence[int],
    steps: bool,
    starts: Starts,
) -> Segment:
    """Simulates one segment under a policy."""
    blended = ahead if policy.blend else 0
    current = list_batch(tables, policy.keys, microbatches, carried, starts, blended)
    early: list[Operation] = []
    if blended:
        early = [(*rest, j - microbatches) for *rest, j in current if j >= microbatches]
        current = [operation for operation in current if operation[4] < microbatches]
    elif ahead:
        ends, reduced = _ends(tables, current, starts)
        until = horizons(tables, ends, reduced if steps else None)
        extra = policy.overrun * tables.mean_forward
        current, early = early_forwards(
            tables, current, ahead, starts, [end + extra for end in until], policy.limit
        )
    ends, reduced = _ends(tables, current, starts)
    carry, arrivals = [0] * ahead, [0.0] * ahead
    for _, end, _, slot, microbatch in early:
        device = tables.device[slot]
        ends[device] = max(ends[device], end)
        carry[microbatch] += 1
        turns = slot % tables.stages == tables.stages - 1
        arrivals[microbatch] = end + (0.0 if turns else tables.message)
    stepped = tuple(
        max(reduced[stage], max(ends[device] for device in hosts)) + tables.costs.update
        for stage, hosts in enumerate(tables.hosts)
    )
    return Segment(
        current, early, tuple(ends), stepped, tuple(carry), tuple(arrivals)
    )


def _ends(
    tables: Tables, operations: Sequence[Operation], starts: Starts
) -> tuple[list[float], list[float]]:
    """Per device the end of its last operation, per stage the time its gradients are with their owners."""
    ends, reduced = list(starts.devices), [0.0] * tables.stages
    for _, end, kind, slot, _ in operations:
        device, stage = tables.device[slot], slot % tables.stages
        ends[device] = max(ends[device], end)
        if kind != FORWARD:
            reduced[stage] = max(reduced[stage], end + tables.costs.reduce)
    return ends, reduced


class SteadyState(NamedTuple):
    """What a policy settles to.

    Attributes:
        time: per segment.
        early: early forwards per segment.
        most_early: the most of one device in a segment.
        starts: for each carry that occurred, when devices and weights were available then.
        operations: how many operations were simulated to find out.
    """

    time: float
    early: float
    most_early: int
    starts: dict[tuple[int, ...], Starts]
    operations: int


def settle(
    tables: Tables, policy: Policy, microbatches: int, ahead: int, steps: bool, segments: int
) -> SteadyState:
    """Repeats a segment until its state (carry and starts) recurs, or for a number of segments."""
    carried: tuple[int, ...] = ()
    starts = tables.at_once
    seen: dict[tuple[tuple[int, ...], Starts], int] = {(carried, starts): 0}
    known: dict[tuple[int, ...], Starts] = {}
    times, earlies = [0.0], [0]
    operations = 0
    base = 0.0
    most_early = 0
    first = 0
    while len(times) <= segments:
        segment = run_segment(tables, policy, microbatches, ahead, carried, steps, starts)
        operations += len(segment.current) + len(segment.early)
        times.append(base + sum(segment.ends) / tables.stages)
        begin, starts = segment.following(steps)
        base += begin
        carried = segment.carry
        earlies.append(len(segment.early))
        counts = Counter(tables.device[slot] for _, _, _, slot, _ in segment.early)
        most_early = max(most_early, *counts.values(), 0)
        known[carried] = starts
        index = seen.setdefault((carried, starts), len(times) - 1)
        if index < len(times) - 1:
            first = index
            break
    else:
        first = min(len(times) // 2, len(times) - 2)
    count = len(times) - 1 - first
    return SteadyState(
        time=(times[-1] - times[first]) / count,
        early=sum(earlies[first + 1 :]) / count,
        most_early=most_early,
        starts=known,
        operations=operations,
    )
