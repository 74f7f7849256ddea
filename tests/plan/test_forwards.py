"""Forward-only plans: everything runs once and in order, no device blocks another, and none idles for long."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_asyncpipe.plan.forwards import ForwardPlan, Turn, plan_forwards
from lightning_asyncpipe.plan.placement import Placement

Routes = tuple[tuple[int, ...], ...]


def windows(devices: int, routes: Routes, needed: int, ahead: int) -> list[tuple[int, ForwardPlan]]:
    """The plans of a whole evaluation, each with the number of its first batch."""
    plans = []
    first, progress = 0, [0] * len(routes)
    while first < len(routes):
        shown = slice(first, first + needed + ahead)
        plan = plan_forwards(devices, routes[shown], tuple(progress[shown]), min(needed, len(routes) - first))
        plans.append((first, plan))
        progress[shown] = plan.progress
        first += needed
    return plans


def ticks(devices: int, routes: Routes, plans: list[tuple[int, ForwardPlan]]) -> int:
    """Units of time until all lists are done, where a forward waits for the stage before and plans follow each other.

    Fails if the devices block each other.
    """
    done: dict[Turn, int] = {}
    clock = 0
    for first, plan in plans:
        lists = [[Turn(first + turn.batch, turn.stage) for turn in turns] for turns in plan.turns]
        while any(lists):
            ran = []
            for turns in lists:
                if turns and (
                    turns[0].stage == 0 or done.get(turns[0]._replace(stage=turns[0].stage - 1), clock) < clock
                ):
                    ran.append(turns.pop(0))
            assert ran, f"blocked: {lists}"
            done.update(dict.fromkeys(ran, clock))
            clock += 1
    assert set(done) == {Turn(batch, stage) for batch, route in enumerate(routes) for stage in range(len(route))}
    return clock


@st.composite
def evaluations(draw: st.DrawFn) -> tuple[int, Routes, int, int]:
    devices = draw(st.integers(1, 5))
    route = st.lists(st.integers(0, devices - 1), min_size=1, max_size=6).map(tuple)
    routes = tuple(draw(st.lists(route, max_size=12)))
    return devices, routes, draw(st.integers(1, 5)), draw(st.integers(0, 5))


@settings(deadline=None)
@given(evaluations())
def test_every_stage_of_every_batch_runs_once_in_order_and_nothing_blocks(evaluation):
    devices, routes, needed, ahead = evaluation
    plans = windows(devices, routes, needed, ahead)
    ticks(devices, routes, plans)
    for first, plan in plans:
        for device, turns in enumerate(plan.turns):
            assert all(routes[first + turn.batch][turn.stage] == device for turn in turns)
        passed = {batch: [] for batch in range(len(routes))}
        for turn in plan.sequence:
            passed[turn.batch].append(turn.stage)
        assert all(stages == sorted(stages) for stages in passed.values())
        done = plan.progress[: min(needed, len(routes) - first)]
        assert done == tuple(len(routes[first + i]) for i in range(len(done)))


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("pipelines", [1, 2, "all"])
def test_devices_are_busy_with_the_batches_behind(devices, pipelines):
    placement = Placement(devices, devices if pipelines == "all" else min(pipelines, devices))
    batches = 40 * devices
    routes = tuple(
        tuple(placement.device(placement.pipeline_of(batch), stage) for stage in range(devices))
        for batch in range(batches)
    )
    looking_ahead = ticks(devices, routes, windows(devices, routes, devices, devices - 1))
    one_by_one = ticks(devices, routes, windows(devices, routes, 1, 0))
    assert one_by_one == batches * devices
    assert batches / looking_ahead > 0.9


def test_what_makes_no_plan_is_refused():
    with pytest.raises(ValueError, match="leaves the 2 devices"):
        plan_forwards(2, ((0, 2),), (0,), 1)
    with pytest.raises(ValueError, match="3 batches are needed"):
        plan_forwards(2, ((0, 1),), (0,), 3)
