from __future__ import annotations

from itertools import pairwise

import pytest

from lightning_asyncpipe.plan.actions import COMPUTE
from lightning_asyncpipe.plan.anneal import Chains, Cooling, Cycle, anneal
from lightning_asyncpipe.plan.catalogue import catalogued
from lightning_asyncpipe.plan.listing import Keys, list_batch
from lightning_asyncpipe.plan.periodic import periodic
from lightning_asyncpipe.plan.placement import Placement
from lightning_asyncpipe.plan.schedule import Costs, Planner, SegmentSpec
from lightning_asyncpipe.plan.simulator import simulate
from lightning_asyncpipe.plan.tables import Tables
from lightning_asyncpipe.plan.validator import validate
from tests.plan.test_search import middle_utilisation

WHOLE = [10, 14, 18, 22]
SPLIT = [10, 14, 18, 22]


def assert_is_a_pattern(cycle: Cycle, chains: Chains) -> None:
    """No device does two things at once, everything waits for what it needs, and the bound in flight is kept."""
    stages, period = cycle.placement.num_stages, cycle.period
    taken: set[tuple[int, int]] = set()
    for pipeline, chain in enumerate(chains):
        assert len(chain) == 2 * stages
        for place, start in enumerate(chain):
            units = {(cycle.device(pipeline, place), (start + unit) % period) for unit in range(cycle.duration(place))}
            assert not units & taken
            taken |= units
        for place, (start, following) in enumerate(pairwise(chain)):
            message = 0 if place == stages - 1 else cycle.message
            assert following >= start + cycle.duration(place) + message
        assert chain[-1] + cycle.backward <= chain[0] + cycle.max_in_flight * period


def tables(devices: int, pipelines: int, in_flight: int, split: bool = False, message: float = 0.0) -> Tables:
    return Tables(Placement(devices, pipelines), in_flight, Costs.uniform(devices, message=message), split)


def stream(t: Tables, keys: Keys) -> float:
    return middle_utilisation(t, list_batch(t, keys, 16 * t.stages, ()))


@pytest.mark.parametrize(("devices", "split"), [*((d, False) for d in [*WHOLE, 26, 30]), *((d, True) for d in SPLIT)])
def test_what_is_catalogued_is_a_pattern(devices: int, split: bool) -> None:
    known = catalogued(Placement(devices, devices // 2), 2 if split else 3, split)
    assert known is not None
    assert_is_a_pattern(*known)


@pytest.mark.parametrize(("devices", "least"), [(26, 39 / 40), (30, 45 / 47)])
def test_the_largest_ones_are_idle_for_a_unit_or_two_in_a_round(devices: int, least: float) -> None:
    t = tables(devices, devices // 2, 3)
    keys, _ = periodic(t, 0)
    assert keys is not None
    assert stream(t, keys) >= least - 1e-3


@pytest.mark.parametrize(
    ("devices", "split", "message"), [*((d, False, 0.0) for d in WHOLE), *((d, True, 0.1) for d in SPLIT)]
)
def test_unequal_directions_leave_no_idle_time(devices: int, split: bool, message: float) -> None:
    t = tables(devices, devices // 2, 2 if split else 3, split, message)
    keys, _ = periodic(t, 0)
    assert keys is not None
    assert stream(t, keys) == pytest.approx(1.0)


@pytest.mark.parametrize(("devices", "split"), [(10, False), (14, False), (10, True)])
def test_the_planner_turns_patterns_into_valid_segments(devices: int, split: bool) -> None:
    message = 0.1 if split else 0.0
    placement, costs = Placement(devices, devices // 2), Costs.uniform(devices, message=message)
    planner = Planner(placement, 2 if split else 3, costs, split, effort=1)
    spec = SegmentSpec(12 * placement.num_pipelines, updated=False, steps=False)
    assert planner.choice(spec).policy.name == "without idle time"
    plan = planner.segment(spec)
    validate(placement, [plan], planner.max_in_flight)
    for line in simulate(placement, [plan], costs).timeline:
        computed = [timed for timed in line if timed.action.kind in COMPUTE]
        middle = computed[len(computed) // 3 : len(computed) * 2 // 3]
        busy = sum(timed.end - timed.start for timed in middle)
        assert busy >= 0.985 * (middle[-1].end - middle[0].start)


def test_the_catalogue_serves_higher_bounds_in_flight_and_nothing_else() -> None:
    assert catalogued(Placement(10, 5), 4, False) == catalogued(Placement(10, 5), 3, False)
    for placement, in_flight, split in (
        (Placement(10, 5), 2, False),
        (Placement(10, 4), 3, False),
        (Placement(10, 5), 1, True),
    ):
        assert catalogued(placement, in_flight, split) is None


def test_annealing_gives_the_catalogue_again() -> None:
    cycle = Cycle(Placement(10, 5), 3)
    chains, _ = anneal(cycle, Cooling(1_500_000, seed=2))
    assert chains is not None
    assert (cycle, chains) == catalogued(cycle.placement, 3, False)


@pytest.mark.parametrize(
    ("devices", "pipelines", "in_flight"), [(6, 3, 3), (5, 2, 3), (7, 3, 4), (8, 3, 5), (7, 5, 3), (8, 4, 3)]
)
def test_small_sizes_are_annealed_while_planning(devices: int, pipelines: int, in_flight: int) -> None:
    t = tables(devices, pipelines, in_flight)
    keys, moves = periodic(t, 75_000)
    assert 0 < moves < 75_000
    assert keys is not None
    assert stream(t, keys) == 1.0


def test_annealing_finds_patterns_with_messages_and_weight_gradients_and_idle_units() -> None:
    for cycle in (Cycle(Placement(6, 3), 2, 3, 3, 3, 1), Cycle(Placement(6, 3), 3, idle=1)):
        chains, _ = anneal(cycle, Cooling(400_000, hot=0.4, cold=0.05))
        assert chains is not None
        assert_is_a_pattern(cycle, chains)


def test_where_there_is_no_pattern_annealing_ends() -> None:
    chains, moves = anneal(Cycle(Placement(4, 2), 1), Cooling(5120))
    assert (chains, moves) == (None, 5120)
