from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_asyncpipe.plan.placement import Placement

SIZES = [(devices, pipelines) for devices in range(1, 18) for pipelines in range(1, devices + 1)]


def rows(placement: Placement) -> list[list[int]]:
    stages = range(placement.num_stages)
    return [[placement.device(p, s) for s in stages] for p in range(placement.num_pipelines)]


@pytest.mark.parametrize(("devices", "pipelines"), SIZES)
def test_pipelines_are_those_of_the_formula(devices: int, pipelines: int) -> None:
    down, up = pipelines // 2, pipelines - pipelines // 2
    expected = [[(i * devices // down + s) % devices for s in range(devices)] for i in range(down)] + [
        [(i * devices // up + devices - 1 - s) % devices for s in range(devices)] for i in range(up)
    ]
    assert sorted(rows(Placement(devices, pipelines))) == sorted(expected)


def test_the_papers_case_of_four_devices() -> None:
    assert rows(Placement(4, 2)) == [[0, 1, 2, 3], [3, 2, 1, 0]]


def test_the_papers_case_of_eight_devices() -> None:
    assert sorted(rows(Placement(8, 4))) == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [3, 2, 1, 0, 7, 6, 5, 4],
        [4, 5, 6, 7, 0, 1, 2, 3],
        [7, 6, 5, 4, 3, 2, 1, 0],
    ]


def test_directions_alternate_so_that_two_microbatches_use_both() -> None:
    assert [Placement(8, 4).runs_up(p) for p in range(4)] == [False, True, False, True]
    assert [Placement(6, 3).runs_up(p) for p in range(3)] == [True, False, True]


@pytest.mark.parametrize(("devices", "pipelines"), SIZES)
def test_rank_0_hosts_a_last_stage(devices: int, pipelines: int) -> None:
    assert devices - 1 in Placement(devices, pipelines).hosted(0)


def test_a_single_pipeline_runs_up() -> None:
    assert rows(Placement(5, 1)) == [[4, 3, 2, 1, 0]]


@given(st.sampled_from(SIZES))
@settings(deadline=None, max_examples=60)
def test_every_view_says_the_same(size: tuple[int, int]) -> None:
    placement = Placement(*size)
    devices, pipelines = size
    for p in range(pipelines):
        assert sorted(placement.device(p, s) for s in range(devices)) == list(range(devices))
        for s in range(devices):
            device = placement.device(p, s)
            assert placement.stage(p, device) == s
            assert (p, s) in placement.slots(device)
            assert s in placement.hosted(device)
            assert device in placement.hosts(s)
    for device in range(devices):
        assert len(placement.slots(device)) == pipelines
        assert list(placement.hosted(device)) == sorted({s for _, s in placement.slots(device)})
    for s in range(devices):
        assert all(s in placement.hosted(device) for device in placement.hosts(s))


def test_a_device_that_hosts_a_stage_twice_lists_it_once() -> None:
    placement = Placement(3, 3)
    assert [s for _, s in placement.slots(1)] == [1, 1, 2]
    assert placement.hosted(1) == (1, 2)
    assert placement.hosts(1) == (1, 2)


def test_microbatches_are_dealt_out_in_turn() -> None:
    assert [Placement(4, 3).pipeline_of(j) for j in range(5)] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(("devices", "pipelines"), [(0, 1), (4, 0), (4, 5)])
def test_impossible_sizes_are_named(devices: int, pipelines: int) -> None:
    with pytest.raises(ValueError, match=rf"is {devices if devices < 1 else pipelines}\b"):
        Placement(devices, pipelines)


def test_placements_of_one_size_are_equal() -> None:
    assert Placement(6, 3) == Placement(6, 3)
    assert hash(Placement(6, 3)) == hash(Placement(6, 3))
    assert Placement(6, 3) != Placement(6, 2)
