"""Segments are split into stages whose dearest is as cheap as possible."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_asyncpipe.plan.balance import split


def stages(costs: list[float], messages: list[float], cuts: tuple[int, ...]) -> list[float]:
    ends = [*(cut + 1 for cut in cuts), len(costs)]
    begins = [0, *ends[:-1]]
    edge = [0.0, *messages, 0.0]
    return [sum(costs[b:e]) + edge[b] + edge[e] for b, e in zip(begins, ends, strict=True)]


@given(st.data())
def test_no_other_split_has_a_cheaper_dearest_stage(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(0, 20).map(float), min_size=1, max_size=9))
    number = data.draw(st.integers(1, len(costs)))
    messages = data.draw(st.lists(st.integers(0, 5).map(float), min_size=len(costs) - 1, max_size=len(costs) - 1))
    cuts = split(costs, number, messages)
    assert len(cuts) == number - 1
    assert list(cuts) == sorted(set(cuts))
    every = [stages(costs, messages, c) for c in combinations(range(len(costs) - 1), number - 1)]
    best = min((max(s), sum(x * x for x in s)) for s in every)
    found = stages(costs, messages, cuts)
    assert (max(found), sum(x * x for x in found)) == best


def test_ties_go_to_the_earliest_cuts() -> None:
    assert split([1, 0, 0, 1], 2) == (0,)
    assert split([1.0] * 8, 4) == (1, 3, 5)


def test_the_stages_beside_the_dearest_are_balanced_too() -> None:
    assert split([1, 1, 1, 1, 10], 3) == (1, 3)


def test_a_large_message_is_avoided() -> None:
    assert split([3, 3, 3, 3], 2) == (1,)
    assert split([3, 3, 3, 3], 2, [0, 9, 0]) == (0,)


def test_more_stages_than_segments_are_refused() -> None:
    with pytest.raises(ValueError, match="2 segments cannot make 3 stages"):
        split([1, 2], 3)
    with pytest.raises(ValueError, match="cannot make 0 stages"):
        split([1, 2], 0)
