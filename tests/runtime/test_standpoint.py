"""Ranks that wait for each other find out why, and ranks that are only slow are not accused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from torch.distributed import HashStore

from lightning_asyncpipe.errors import DataMismatchError
from lightning_asyncpipe.runtime import standpoint
from lightning_asyncpipe.runtime.standpoint import Standpoints

TICK = 0.05


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Standpoints]]]:
    """Makes the standpoints of all ranks of a run, which take note of what they tell."""
    monkeypatch.setattr(standpoint, "_STILL", TICK)
    made: list[Standpoints] = []

    def build(world_size: int, num_stages: int, told: list[DataMismatchError] | None = None) -> list[Standpoints]:
        store, tell = HashStore(), (told if told is not None else []).append
        made.extend(Standpoints(store, rank, world_size, num_stages, tell) for rank in range(world_size))
        return made

    yield build
    for one in made:
        one.close()


def stand_still() -> None:
    time.sleep(2.5 * TICK)


def test_different_data_in_a_replica_is_named(make):
    ranks = make(3, 3)
    for step in range(5):
        for rank, one in enumerate(ranks):
            one.train(step, 4, 4, step + (rank == 2 and step == 4))
    stand_still()
    with pytest.raises(DataMismatchError, match=r"step 4: ranks 0 and 2 belong to one replica but .*different data"):
        ranks[0].compare()
    with pytest.raises(DataMismatchError, match=r"step 4: ranks [01] and 2"):
        ranks[2].compare()


def test_replicas_have_data_of_their_own(make):
    ranks = make(4, 2)
    for rank, one in enumerate(ranks):
        one.train(0, 4 - rank // 2, 3, rank // 2)
    stand_still()
    for one in ranks:
        one.compare()


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_rank_without_a_next_batch_is_named(make, num_stages):
    ranks = make(2, num_stages)
    ranks[0].train(7, 4, 4, 1)
    ranks[1].train(7, 4, 0, 1)
    stand_still()
    with pytest.raises(DataMismatchError, match="step 8: rank 0 has a batch 8, but rank 1 has no batch 8"):
        ranks[1].compare()


def test_loops_that_have_come_apart_are_named_though_one_went_on(make):
    ranks = make(2, 2)
    for one in ranks:
        one.train(0, 4, 0, 1)
    ranks[0].train(1, 4, 0, 1)
    ranks[1].meet("saves")
    for _ in range(3):
        ranks[1].meet("calls `strategy.reduce`")
    stand_still()
    with pytest.raises(DataMismatchError, match="step 1: rank 0 trains batch 1, but rank 1 saves"):
        ranks[0].compare()


def test_a_rank_that_is_slow_is_not_accused(make):
    told: list[DataMismatchError] = []
    ranks = make(2, 2, told)
    for step in range(30):
        for one in ranks:
            one.train(step, 4, 4, step)
    ranks[0].meet("saves")
    ranks[0].train(30, 4, 4, 30)
    time.sleep(12 * TICK)
    for one in ranks:
        one.compare()
    assert told == []


def test_ranks_that_cannot_raise_are_told_of_by_the_watch(make):
    told: list[DataMismatchError] = []
    ranks = make(2, 2, told)
    ranks[0].meet("saves")
    ranks[1].meet("calls `strategy.barrier`")
    deadline = time.monotonic() + 20.0
    while len(told) < 2 and time.monotonic() < deadline:
        time.sleep(TICK)
    assert {str(error)[:60] for error in told} == {"step 0: rank 0 saves, but rank 1 calls `strategy.barrier`. A"}


def test_an_explanation_waits_for_the_other_ranks(make, monkeypatch):
    monkeypatch.setattr(standpoint, "_TOLD", 2.5 * TICK)
    ranks = make(2, 2)
    ranks[0].train(0, 4, 4, 1)
    ranks[1].train(0, 3, 4, 2)
    assert isinstance(ranks[0].explain(), DataMismatchError)
