"""Splitting a sequence of costs into contiguous stages of about equal cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate


def split(costs: Sequence[float], num_stages: int, messages: Sequence[float] = ()) -> tuple[int, ...]:
    """The cuts that make the dearest stage as cheap as possible.

    A dynamic programme over (number of stages, segments left). Among the splits with the same dearest stage the one
    with the smallest sum of squared costs is taken, and of those the one with the earliest cuts, so that every caller
    with the same costs gets the same answer.

    Args:
        costs: cost of the segment before the first possible cut, between neighbours, and after the last one.
        num_stages: number of stages, at most ``len(costs)``.
        messages: for each possible cut, what it costs the stages on both sides to send and to receive there.

    Returns:
        Indices of the chosen cuts, ascending: cut `i` lies between ``costs[i]`` and ``costs[i + 1]``.

    Raises:
        ValueError: there are fewer segments than stages.
    """
    count = len(costs)
    if not 1 <= num_stages <= count:
        raise ValueError(f"{count} segments cannot make {num_stages} stages: each stage needs one at least")
    sends = [0.0, *messages, 0.0] if messages else [0.0] * (count + 1)
    totals = [0.0, *accumulate(costs)]
    bound = _best(totals, sends, num_stages, max, float("inf"))[0][0]
    _, following = _best(totals, sends, num_stages, lambda stage, rest: stage * stage + rest, bound)
    chosen: list[int] = []
    start = 0
    for table in reversed(following[1:]):
        start = table[start]
        chosen.append(start - 1)
    return tuple(chosen)


def _best(
    totals: Sequence[float],
    sends: Sequence[float],
    num_stages: int,
    combine: Callable[[float, float], float],
    bound: float,
) -> tuple[list[float], list[list[int]]]:
    """Best values, and where the first stage then ends, of splitting what begins at each segment.

    Args:
        totals: running sum of the costs, from 0.
        sends: cost of a message where each segment begins, and at the end.
        num_stages: number of stages.
        combine: value of a first stage of some cost followed by a rest of some value.
        bound: largest cost of a stage.

    Returns:
        The values for `num_stages` stages, and for each number of stages (from 1) the end of the first one.
    """
    count = len(totals) - 1
    infinite = float("inf")
    values = [infinite] * (count + 1)

    def cost(begin: int, end: int) -> float:
        return totals[end] - totals[begin] + sends[begin] + sends[end]

    for i in range(count):
        if cost(i, count) <= bound:
            values[i] = combine(cost(i, count), 0.0)
    ends = [[count] * (count + 1)]
    for stages in range(2, num_stages + 1):
        rest, values = values, [infinite] * (count + 1)
        first = [count] * (count + 1)
        for i in range(count - stages + 1):
            for j in range(i + 1, count - stages + 2):
                if combine(totals[j] - totals[i], 0.0) > min(values[i], combine(bound, 0.0)):
                    break  # it only gets dearer
                stage = cost(i, j)
                if stage <= bound:
                    value = combine(stage, rest[j])
                    if value < values[i]:
                        values[i], first[i] = value, j
        ends.append(first)
    return values, ends
