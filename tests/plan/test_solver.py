"""Stages are cut where the simulated step is shortest and the memory of every device suffices."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import combinations

import pytest

from lightning_asyncpipe.plan.balance import split
from lightning_asyncpipe.plan.choice import Chosen, MemoryLimitError, Request, choose_plan
from lightning_asyncpipe.plan.geometry import resolve
from lightning_asyncpipe.plan.profile import ModelProfile
from lightning_asyncpipe.plan.schedule import Planner, SegmentSpec
from lightning_asyncpipe.plan.search import choose
from lightning_asyncpipe.plan.simulator import simulate
from lightning_asyncpipe.plan.solver import Setting, judge, solve
from lightning_asyncpipe.plan.tables import Tables
from tests.plan.profiles import profile, random_profile

GIB = 2**30


def setting(devices: int, pipelines: int, limit: int | None = None) -> Setting:
    geometry = resolve(devices, num_pipelines=pipelines)
    return Setting(geometry.placement, geometry.max_in_flight, geometry.num_microbatches, memory_limit=limit)


def step_time(model: ModelProfile, cuts: tuple[int, ...], s: Setting) -> float:
    """What the search for schedules finds for a split, with more effort than the solver can spend on each."""
    tables = Tables(s.placement, s.max_in_flight, model.costs(cuts, s.placement), False)
    return choose(tables, s.microbatches, True, True, 50_000, 0.0).state.time


@pytest.mark.parametrize(("seed", "units", "devices", "pipelines"), [(3, 6, 4, 4), (5, 7, 3, 2), (9, 8, 4, 2)])
def test_no_split_is_more_than_a_percent_faster(seed: int, units: int, devices: int, pipelines: int) -> None:
    model, s = random_profile(seed, units), setting(devices, pipelines)
    every = {cuts: step_time(model, cuts, s) for cuts in combinations(range(units - 1), devices - 1)}
    assert every[solve(model, s).cuts] <= 1.01 * min(every.values())


def test_where_splits_are_many_the_result_is_faster_than_the_most_even_one() -> None:
    model, s = random_profile(1, 40), setting(5, 2)
    even = split(model.work(), 5)
    found = solve(model, s)
    assert found.verdict.time <= judge(model, even, s).verdict.time
    assert found.verdict.time >= sum(model.work()) * s.microbatches / 5
    assert solve(model, s).cuts == found.cuts


def test_large_problems_are_solved_in_seconds() -> None:
    """200 units on 32 devices take less than the search for a schedule takes for the most dear of them, a few times."""
    model, s = random_profile(3, 200), setting(32, 2)
    tables = Tables(s.placement, s.max_in_flight, model.costs(split(model.work(), 32), s.placement), False)
    begin = time.process_time()
    choose(tables, s.microbatches, True, True)
    one = time.process_time() - begin
    begin = time.process_time()
    assert len(solve(model, s).cuts) == 31
    assert time.process_time() - begin < 4 * one


def test_a_heavy_head_shares_its_device_with_a_light_first_stage() -> None:
    """Stage 0 and stage D - 1 are on the same two devices: what the head costs more, stage 0 takes less."""
    model, s = profile([1.0] * 12 + [6.0], link=0.0), setting(4, 2)
    first, *_, last = (stage.forward for stage in model.stages(solve(model, s).cuts))
    assert last == 6.0
    assert first == 3.0
    assert solve(model, s).verdict.time < judge(model, (3, 7, 11), s).verdict.time


def test_simulated_time_is_that_of_the_schedules_that_run() -> None:
    model = profile([1.0, 2.0, 1.5, 0.5, 1.0, 3.0])
    plan = choose_plan(model, request(3, num_pipelines=2))
    m = plan.geometry.num_microbatches
    segments, carried = [], ()
    for number in range(6):
        segments.append(plan.planner.segment(SegmentSpec(m, m, carried, updated=number > 0)))
        carried = segments[-1].carry
    measured = simulate(plan.geometry.placement, segments, plan.planner.costs).time_per_segment(2)
    assert measured == pytest.approx(plan.step_seconds, rel=0.02)


# Pipelines and micro-batches


def request(devices: int, **arguments: object) -> Request:
    return Request(
        **{
            "num_stages": devices,
            "num_pipelines": "auto",
            "num_microbatches": "auto",
            "max_in_flight": "auto",
            "effort": 30_000,
            **arguments,
        }
    )  # type: ignore[arg-type]


def peak(plan: Chosen) -> int:
    return max(device.total for device in plan.memory)


def test_without_a_limit_there_are_two_pipelines_or_more_and_four_micro_batches_a_device() -> None:
    plan = choose_plan(profile([1.0] * 8), request(4, samples=64))
    assert (plan.geometry.num_pipelines, plan.geometry.num_microbatches) == (2, 16)
    assert choose_plan(profile([1.0] * 3), request(1)).geometry.num_pipelines == 1
    wide = choose_plan(profile([1.0] * 16), request(8))
    assert wide.geometry.num_pipelines in (2, 4)
    assert wide.geometry.num_microbatches == 32


def test_an_expensive_reduction_of_gradients_speaks_for_fewer_pipelines() -> None:
    cheap = choose_plan(profile([1.0] * 16, weights=[4] * 16), request(8))
    model = profile([1.0] * 16, weights=[4] * 16)
    slow = ModelProfile(model.units, model.boundaries, model.weights, type(model.link)(0.05, 0.05))
    dear = choose_plan(slow, request(8))
    assert dear.geometry.num_pipelines < cheap.geometry.num_pipelines


def test_what_the_user_asked_for_is_kept() -> None:
    plan = choose_plan(
        profile([1.0] * 8), request(4, num_pipelines=4, num_microbatches=8, max_in_flight=3, cuts=(0, 1, 2))
    )
    assert plan.geometry == resolve(4, num_pipelines=4, num_microbatches=8, max_in_flight=3)
    assert plan.cuts == (0, 1, 2)


def test_where_weights_do_not_fit_twice_there_is_one_pipeline() -> None:
    model = profile([1.0] * 8, weights=[1000] * 8)
    free = choose_plan(model, request(4))
    narrow = choose_plan(model, request(4, memory_limit=int(0.8 * peak(free))))
    assert (free.geometry.num_pipelines, narrow.geometry.num_pipelines) == (2, 1)
    assert peak(narrow) <= 0.8 * peak(free)


def test_where_activations_do_not_fit_there_are_more_and_smaller_micro_batches() -> None:
    model = replace(profile([1.0] * 8, saved=1000, message=100), samples=4)
    free = choose_plan(model, request(4, num_pipelines=2, samples=64))
    narrow = choose_plan(model, request(4, num_pipelines=2, samples=64, memory_limit=peak(free) // 3))
    assert narrow.geometry.num_microbatches > free.geometry.num_microbatches == 16
    assert peak(narrow) <= peak(free) // 3


def test_a_limit_that_nothing_fits_is_refused_with_the_smallest_that_would() -> None:
    model = profile([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], saved=50, message=10, weights=[100, 900, 100, 100, 300, 100])
    with pytest.raises(MemoryLimitError, match=r"memory_limit=10 bytes .* is too small") as refused:
        choose_plan(model, request(3, memory_limit=10))
    smallest = refused.value.smallest
    assert f"is {smallest} bytes" in str(refused.value)
    assert peak(choose_plan(model, request(3, memory_limit=smallest))) <= smallest
    with pytest.raises(MemoryLimitError):
        choose_plan(model, request(3, memory_limit=smallest // 2))


def test_uneven_weights_are_split_so_that_they_fit() -> None:
    """Time alone would put the three heavy units into one stage."""
    model = profile([0.1, 0.1, 0.1, 3.0, 3.0, 3.0], weights=[1000, 1000, 1000, 10, 10, 10])
    free = choose_plan(model, request(3, num_pipelines=1))
    narrow = choose_plan(model, request(3, num_pipelines=1, memory_limit=int(0.7 * peak(free))))
    assert peak(narrow) <= 0.7 * peak(free)
    assert narrow.step_seconds > free.step_seconds


# Memory


def test_memory_of_a_device_is_that_of_the_stages_it_hosts() -> None:
    plan = choose_plan(profile([1.0] * 8, weights=[GIB] * 8), request(4, num_pipelines=2))
    for device in plan.memory:
        assert device.weights == 4 * GIB  # N / D of the model
        assert device.optimizer == 4 * GIB  # 1 / D of twice the model
        assert device.total >= device.weights + device.optimizer + 4 * GIB


@pytest.mark.parametrize("pipelines", [1, 2])
def test_where_owners_work_early_weights_out_copies_are_kept_of_what_others_own(pipelines: int) -> None:
    model = profile([1.0] * 4, weights=[GIB] * 4)
    model = replace(model, weights=tuple(replace(weights, gains=GIB // 4) for weights in model.weights))
    memory = {}
    for early in ("stash", "extrapolated", "stepped", "predicted"):
        asked = request(4, num_pipelines=pipelines, cuts=(0, 1, 2), early_weights=early)
        memory[early] = choose_plan(model, asked).memory
    for stash, extrapolated, stepped, predicted in zip(*memory.values(), strict=True):
        assert extrapolated.total - stash.total == pipelines * GIB
        assert stepped.total - stash.total == 1.25 * (pipelines - 1) * GIB  # it owns one of the stages that it hosts
        assert predicted.total - stash.total == 1.25 * pipelines * GIB


def test_activations_are_those_that_the_order_of_a_device_holds_at_once() -> None:
    plan = choose_plan(profile([1.0] * 4, saved=1), request(4, num_pipelines=2))
    segments, carried = [], ()
    m = plan.geometry.num_microbatches
    for number in range(4):
        segments.append(plan.planner.segment(SegmentSpec(m, m, carried, updated=number > 0)))
        carried = segments[-1].carry
    held = simulate(plan.geometry.placement, segments, plan.planner.costs).peak_held
    assert tuple(device.activations for device in plan.memory) == held


def test_a_parameter_of_several_stages_counts_once_on_a_device() -> None:
    model = profile([1.0] * 4, weights=[8, 8, 8, 8])
    tied = ModelProfile(
        (*model.units[:3], type(model.units[3])("head", 1.0, 1.0, 1.0, parameters=(0, 3))),
        model.boundaries,
        model.weights,
    )
    plan = choose_plan(tied, request(4, num_pipelines=2, cuts=(0, 1, 2)))
    assert [device.weights for device in plan.memory] == [16, 16, 16, 16]


def test_low_precision_copies_count_once_for_each_version_of_the_weights() -> None:
    model = profile([1.0] * 4, weights=[8] * 4, saved=1000)
    cast = replace(model, weights=tuple(replace(weights, copy=4) for weights in model.weights))
    for look_ahead, most in ((False, 1), (True, 2)):  # versions of the weights of a device's two stages
        asked = request(4, num_pipelines=2, cuts=(0, 1, 2), look_ahead=look_ahead)
        plain, copied = choose_plan(model, asked).memory, choose_plan(cast, asked).memory
        more = [b.total - a.total for a, b in zip(plain, copied, strict=True)]
        assert all(2 * 4 <= nbytes <= most * 2 * 4 for nbytes in more)
        assert [b.activations for b in copied] == [a.activations for a in plain]


def test_a_profile_survives_being_written() -> None:
    model = random_profile(2, 5)
    assert ModelProfile.from_dict(model.to_dict()) == model
    with pytest.raises(ValueError, match="3 units have 1 boundaries"):
        ModelProfile(model.units[:3], model.boundaries[:1])
    assert isinstance(choose_plan(model, request(2)).planner, Planner)
