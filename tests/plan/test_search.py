from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings

from lightning_asyncpipe.plan import search
from lightning_asyncpipe.plan.listing import Keys, list_batch
from lightning_asyncpipe.plan.lookahead import early_forwards
from lightning_asyncpipe.plan.pattern import lattice
from lightning_asyncpipe.plan.placement import Placement
from lightning_asyncpipe.plan.policies import Generator, Policy, classic_rules, even_flows, perturbed
from lightning_asyncpipe.plan.replay import Order, Starts, replay
from lightning_asyncpipe.plan.schedule import Costs, Planner
from lightning_asyncpipe.plan.search import choose
from lightning_asyncpipe.plan.simulator import simulate
from lightning_asyncpipe.plan.steady import outlook, run_segment, settle
from lightning_asyncpipe.plan.tables import FORWARD, WEIGHT, Operation, Tables
from tests.plan.chains import Case, cases, repeated


def tables(devices: int, pipelines: int, in_flight: int, split: bool = False, message: float = 0.0) -> Tables:
    costs = Costs.uniform(devices, message=message)
    return Tables(Placement(devices, pipelines), in_flight, costs, split)


def rules(tables: Tables) -> dict[str, Keys]:
    return {**dict(classic_rules(tables)), **dict(even_flows(tables))}


def middle_utilisation(tables: Tables, operations: list[Operation]) -> float:
    """The share of time that devices compute between a quarter and three quarters of their operations."""
    computed = elapsed = 0.0
    for device in range(tables.stages):
        line = [(start, end) for start, end, _, slot, _ in operations if tables.device[slot] == device]
        quarter = len(line) // 4
        computed += sum(end - start for start, end in line[quarter : 3 * quarter])
        elapsed += line[3 * quarter - 1][1] - line[quarter - 1][1]
    return computed / elapsed


def devices_of(tables: Tables, operations: list[Operation]) -> list[list[Operation]]:
    lines: list[list[Operation]] = [[] for _ in range(tables.stages)]
    for operation in operations:
        lines[tables.device[operation[3]]].append(operation)
    return lines


@pytest.mark.parametrize(("devices", "pipelines", "in_flight"), [(4, 2, 3), (12, 6, 3), (20, 10, 3), (6, 6, 2)])
def test_a_lattice_leaves_no_idle_time(devices: int, pipelines: int, in_flight: int) -> None:
    keys = lattice(Placement(devices, pipelines), in_flight)
    assert keys is not None
    assert keys.strict
    t = tables(devices, pipelines, in_flight)
    assert middle_utilisation(t, list_batch(t, keys, 16 * pipelines, ())) == 1.0


@pytest.mark.parametrize(("devices", "pipelines", "in_flight"), [(8, 4, 3), (10, 5, 3), (4, 2, 2), (32, 32, 1)])
def test_where_there_is_no_lattice_none_is_given(devices: int, pipelines: int, in_flight: int) -> None:
    assert lattice(Placement(devices, pipelines), in_flight) is None


@pytest.mark.parametrize("devices", [4, 8, 12, 16])
def test_three_in_flight_reach_the_papers_utilisation(devices: int) -> None:
    t = tables(devices, devices // 2, 3)
    best = max(middle_utilisation(t, list_batch(t, keys, 16 * t.pipelines, ())) for keys in rules(t).values())
    assert best >= 3 * devices / (3 * devices + 1) - 1e-9


@pytest.mark.parametrize("name", ["backward first", "forward first", "oldest first"])
def test_a_list_schedule_never_idles_while_something_is_ready(name: str) -> None:
    t = tables(3, 2, 2)
    operations = list_batch(t, rules(t)[name], 6, ())
    ends = {(kind, slot, j): end for _, end, kind, slot, j in operations}
    for line in devices_of(t, operations):
        free = 0.0
        for start, end, kind, slot, j in line:
            stage = slot % 3
            if kind == FORWARD:
                cause = ends[FORWARD, slot - 1, j] if stage else 0.0
                if stage == 0 and j >= 4:
                    cause = ends[1, slot, j - 4]  # two of each of the two pipelines are let in
            else:
                cause = ends[1, slot + 1, j] if stage < 2 else ends[FORWARD, slot, j]
            assert start >= max(free, cause)
            free = end


def test_backward_first_and_forward_first_do_what_they_say() -> None:
    t = tables(1, 1, 3)
    kinds = {
        name: "".join("FBW"[kind] for _, _, kind, _, _ in list_batch(t, rules(t)[name], 4, ()))
        for name in ("backward first", "forward first")
    }
    assert kinds == {"backward first": "FBFBFBFB", "forward first": "FFFBFBBB"}


def test_early_forwards_fill_waits_and_move_nothing() -> None:
    t = tables(4, 2, 2)
    current = list_batch(t, rules(t)["backward first"], 4, ())
    until = max(end for _, end, _, _, _ in current)
    kept, early = early_forwards(t, current, 4, until, 100)
    assert kept == current
    assert early
    for line in devices_of(t, [*current, *early]):
        line.sort()
        assert all(one[1] <= other[0] for one, other in pairwise(line))
        assert line[-1][1] <= until


def test_early_forwards_keep_to_their_limit() -> None:
    t = tables(4, 2, 2)
    current = list_batch(t, rules(t)["backward first"], 8, ())
    for limit in (0, 1, 2):
        _, early = early_forwards(t, current, 8, 1000.0, limit)
        assert max(len(line) for line in devices_of(t, early)) == limit


def test_weight_gradients_give_way_to_early_forwards() -> None:
    t = tables(4, 2, 2, split=True)
    current = list_batch(t, rules(t)["backward first"], 4, ())
    moved, early = early_forwards(t, current, 4, max(end for _, end, _, _, _ in current), 1)
    assert early
    assert [operation for operation in moved if operation[2] != WEIGHT] == [
        operation for operation in current if operation[2] != WEIGHT
    ]
    begun = {(slot, j): start for start, _, kind, slot, j in moved if kind == WEIGHT}
    ready = {(slot, j): end for _, end, kind, slot, j in moved if kind == 1}
    assert all(begun[key] >= ready[key] for key in begun)
    assert any(one != other for one, other in zip(moved, current, strict=True))
    for line in devices_of(t, [*moved, *early]):
        line.sort()
        assert all(one[1] <= other[0] for one, other in pairwise(line))


@given(cases(max_devices=6, max_segments=1))
@settings(deadline=None, max_examples=40)
def test_a_replay_takes_the_time_of_the_simulation_that_it_replays(case: Case) -> None:
    t = Tables(case.placement, case.max_in_flight, case.costs, case.split)
    m = case.sizes[0]
    for name in ("backward first", "longest path first"):
        current, early = run_segment(t, Policy("", rules(t)[name], 0.0, 3), m, m, (), True)
        order = Order.of(m, m, current, early)
        result = replay(t, order, (), True, Starts((0.0,) * t.stages, ()))
        simulated = max(end for _, end, _, _, _ in [*current, *early])
        if not (case.split and early):
            assert result.length == pytest.approx(simulated)
        assert result.length <= simulated + 1e-9  # weight gradients that gave way may close up


@given(cases(max_devices=5, max_segments=1))
@settings(deadline=None, max_examples=30)
def test_the_steady_state_is_that_of_the_simulator(case: Case) -> None:
    m = case.sizes[0]
    # With less effort a policy may not get the segments that it needs to settle.
    planner = Planner(case.placement, case.max_in_flight, case.costs, case.split, effort=30_000)
    choice = planner.choice(repeated(planner, m, 1)[0].spec)
    segments = repeated(planner, m, 40)
    if segments[20].carry != segments[19].carry or segments[39].carry != segments[19].carry:
        return  # a period of several segments
    # The simulator also keeps messages of a pair in order, which may cost a little.
    simulated = simulate(case.placement, segments, case.costs).time_per_segment(20)
    assert choice.state.time <= simulated * (1 + 1e-9)
    assert simulated <= choice.state.time * 1.15


def test_orders_may_be_made_for_other_messages() -> None:
    t = tables(4, 2, 3, message=0.1)
    assert (t.taken_as(0, False).message, t.taken_as(2, False).message, t.message) == (0.0, 0.2, 0.1)
    assert t.taken_as(1, False) is t
    policy = Policy("", rules(t)["even flow, 2.0 and 2.5, upward 0.0 later"], 1.0, 6)
    times = {factor: settle(t, policy._replace(message=factor), 8, 8, True, 10).time for factor in (0.0, 1.0)}
    assert times[0.0] < times[1.0]  # an order for no messages at all, run with them


def test_costs_of_steps_lengthen_a_segment() -> None:
    costs = Costs.uniform(4, reduce=1.0, update=0.5)
    t = Tables(Placement(4, 2), 2, costs, False)
    policy = Policy("", rules(t)["backward first"], 0.0, 100)
    times = {steps: settle(t, policy, 4, 4, steps, 10).time for steps in (False, True)}
    assert times[True] > times[False]


def test_more_tolerance_means_fewer_early_forwards() -> None:
    t = tables(4, 2, 2, split=True, message=0.1)
    strict, lenient = (choose(t, 4, True, True, 50_000, tolerance).state for tolerance in (0.0, 0.02))
    assert lenient.early < strict.early
    assert strict.time < lenient.time <= strict.time * 1.02


@pytest.mark.parametrize("microbatches", [4, 8, 16])
def test_split_backwards_with_two_in_flight_leave_no_idle_time(microbatches: int) -> None:
    state = choose(tables(4, 2, 2, split=True), microbatches, True, True).state
    assert state.time == 3 * microbatches
    assert state.early == 4


def test_the_choice_does_not_depend_on_earlier_choices() -> None:
    t = tables(4, 2, 3)
    first = choose(t, 8, True, True, 20_000)
    search._choose.cache_clear()
    again = choose(t, 8, True, True, 20_000)
    assert again == first
    assert again is not first


def test_what_was_searched_for_is_known():
    first = choose(tables(4, 2, 2), 8, True, True, 20_000)
    assert choose(tables(4, 2, 2), 8, True, True, 20_000) is first
    assert choose(tables(4, 2, 2, split=True), 8, True, True, 20_000) is not first
    assert choose(tables(4, 2, 2, message=0.1), 8, True, True, 20_000) is not first
    assert choose(tables(4, 2, 3), 8, True, True, 20_000) is not first


def test_the_outlook_of_a_short_batch_is_its_time() -> None:
    t = tables(4, 2, 2)
    keys = rules(t)["forward first"]
    time, operations = outlook(t, keys, 8)
    assert time == max(end for _, end, _, _, _ in list_batch(t, keys, 8, ()))
    assert operations == 64


def test_the_outlook_of_a_long_batch_is_close_to_its_time() -> None:
    t = tables(8, 4, 3)
    for keys in rules(t).values():
        time, operations = outlook(t, keys, 128)
        assert operations == 6 * 4 * 8 * 2
        assert time == pytest.approx(max(end for _, end, _, _, _ in list_batch(t, keys, 128, ())), rel=0.1)


def test_the_generator_gives_the_same_numbers_everywhere() -> None:
    generator = Generator(1)
    assert [generator.below(1000) for _ in range(6)] == [317, 750, 866, 560, 927, 639]
    assert all(0 <= generator.unit() < 1 for _ in range(1000))


def test_a_perturbation_changes_keys_but_not_weight_gradients() -> None:
    t = tables(4, 2, 2, split=True)
    keys = rules(t)["oldest first"]
    generator = Generator(7)
    for _ in range(20):
        changed = perturbed(t, keys, generator)
        assert changed.offsets[:2] != keys.offsets[:2]
        assert changed.offsets[2] == keys.offsets[2]
        assert changed.period == keys.period


@pytest.mark.parametrize("d", [4, 6, 8])
@pytest.mark.parametrize("factor", [1, 2, 4])
def test_weight_gradients_are_not_put_off_without_bound(d: int, factor: int) -> None:
    for n, more in ((2, 0), (2, 2), (d // 2, 0)):
        placement = Placement(d, n)
        w = -(-d // n) + more
        planner = Planner(placement, w, Costs.uniform(d, message=0.05), split_backward=True, tolerance=0.03)
        held = simulate(placement, repeated(planner, factor * d, 8), planner.costs).peak_held
        # As many as are in flight, and a few that early forwards of the next batch displace.
        assert max(held) <= 1.5 * n * w


@given(cases(max_devices=6, max_segments=1))
@settings(deadline=None, max_examples=30)
def test_early_forwards_that_are_put_off_are_the_same_ones_later(case: Case) -> None:
    t = Tables(case.placement, case.max_in_flight, case.costs, case.split)
    m = case.sizes[0]
    current = list_batch(t, rules(t)["backward first"], m, ())
    until = max(end for _, end, _, _, _ in current) + t.mean_forward
    (_, soon), (moved, late) = (early_forwards(t, current, m, until, 3, put_off) for put_off in (False, True))
    begun = {(slot, j): start for start, _, _, slot, j in soon}
    ends = {(slot, j): end for _, end, _, slot, j in late}
    assert ends.keys() == begun.keys()
    for start, end, _, slot, j in late:
        assert start >= begun[slot, j] - 1e-9
        assert end <= until + 1e-9
        if slot % t.stages:
            assert start >= ends[slot - 1, j] + t.message - 1e-9
    for line in devices_of(t, [*moved, *late]):
        line.sort()
        assert all(one[1] <= other[0] + 1e-9 for one, other in pairwise(line))


def test_among_equally_early_orders_that_is_taken_whose_early_forwards_know_more_of_the_update() -> None:
    t = tables(4, 2, 2, split=True, message=0.05)
    choice = choose(t, 4, True, True, tolerance=0.01)
    at_once = settle(t, choice.policy._replace(put_off=False), 4, 4, True, 10)
    assert choice.state.early == at_once.early == 4
    # With nothing gathered it would be 4; each device ever gathers half of the window, so that 2 is the least.
    assert choice.state.uninformed <= 3.0 < at_once.uninformed


def test_early_forwards_are_weighted_by_their_work() -> None:
    costs = Costs((3.0, 1.0, 1.0, 1.0), (6.0, 2.0, 2.0, 2.0), (0.0, 1.0, 1.0, 1.0), (6.0, 1.0, 1.0, 1.0))
    t = Tables(Placement(4, 2), 2, costs, True)
    state = settle(t, Policy("", rules(t)["backward first"], 1.0, 2), 8, 8, True, 10)
    assert state.early == pytest.approx(sum(8 * s * f / 1.5 for s, f in zip(state.shares, costs.forward, strict=True)))
    assert 0 < state.shares[0] < 1


@pytest.mark.parametrize(
    ("devices", "pipelines", "microbatches", "least"),
    [(2, 1, 4, 0.97), (2, 1, 8, 0.98), (4, 2, 4, 0.98), (4, 2, 8, 0.98)],
)
def test_durations_that_differ_by_chance_cost_no_more_than_their_difference(
    devices: int, pipelines: int, microbatches: int, least: float
) -> None:
    generator = Generator(microbatches)
    apart = 0.02

    def jittered(durations: list[float]) -> tuple[float, ...]:
        return tuple(duration * (1 + apart * (generator.unit() - 0.5)) for duration in durations)

    # As is measured: the first stage passes no gradient on, and the two halves of a backward are nearly alike.
    means = [1.0] * devices, [0.0, *[0.98] * (devices - 1)], [1.93, *[0.95] * (devices - 1)]
    for message in (0.005, 0.01, 0.02, 0.03, 0.04):
        forward, inputs, weights = (jittered(row) for row in means)
        whole = tuple(a + b for a, b in zip(inputs, weights, strict=True))
        costs = Costs(forward, whole, inputs, weights, message, 0.01, 0.02)
        t = Tables(Placement(devices, pipelines), 2, costs, True)
        found = choose(t, microbatches, True, True, tolerance=0.01)
        works = [sum(row) for row in zip(t.forward, t.backward, t.weight, strict=True)]
        loads = [sum(w for w, on in zip(works, t.device, strict=True) if on == device) for device in range(devices)]
        assert max(loads) * microbatches / pipelines >= (least - apart) * found.state.time


def test_what_is_nearly_the_same_is_taken_to_be_the_same_and_nothing_else() -> None:
    costs = Costs((1.0, 1.04, 1.5), (2.1, 2.0, 3.6), (1.08, 0.9, 1.5), (1.02, 1.1, 2.1), 0.1, 0.2, 0.3)
    even = costs.evened(True)
    unit = sum((1.0, 1.04, 1.08, 0.9, 1.02, 1.1)) / 6
    assert even.forward[:2] == even.input_grad[:2] == even.weight_grad[:2] == (1.0, 1.0)
    assert even.forward[2] == even.input_grad[2] == pytest.approx(1.5 / unit, abs=1e-3)
    assert even.weight_grad[2] == 2.0
    assert (even.message, even.reduce, even.update) == pytest.approx((0.1 / unit, 0.2 / unit, 0.3 / unit), abs=1e-3)
    assert costs.evened(False).backward == (2.0, 2.0, pytest.approx(3.6 / 1.02, abs=1e-3))
    t = Tables(Placement(3, 1), 2, costs, True)
    assert t.taken_as(1.0, True) is t.taken_as(1.0, True)


@pytest.mark.parametrize("unit", [1.0, 0.1, 3e-3])
def test_durations_that_are_multiples_of_one_are_left_as_they_are(unit: float) -> None:
    rows = (unit,) * 3, (2 * unit,) * 3, (0.0, unit, unit), (2 * unit, unit, unit)
    costs = Costs(*rows, message=0.1 * unit)
    assert costs.evened(True) is costs
    t = Tables(Placement(3, 1), 2, costs, True)
    assert t.taken_as(1.0, True) is t


@given(cases(max_devices=5, max_segments=1))
@settings(deadline=None, max_examples=40)
def test_sums_of_even_durations_do_not_round(case: Case) -> None:
    even = case.costs.evened(case.split)
    if even is not case.costs:
        durations = [*even.forward, *even.backward, *even.input_grad, *even.weight_grad, even.message]
        assert all(duration * 1024 == int(duration * 1024) for duration in durations)
        assert max(even.forward) + max(even.backward) > 0
