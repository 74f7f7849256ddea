from __future__ import annotations

import pytest
from hypothesis import given, settings

from lightning_asyncpipe.errors import ScheduleError
from lightning_asyncpipe.plan.actions import COMPUTE, MESSAGES, RECEIVES, Action, Kind
from lightning_asyncpipe.plan.placement import Placement
from lightning_asyncpipe.plan.schedule import Costs, SegmentPlan, SegmentSpec
from lightning_asyncpipe.plan.simulator import simulate
from tests.plan.chains import Case, cases, quick_planner, repeated


def plan(spec: SegmentSpec, *lines: str, carry: tuple[int, ...] = ()) -> SegmentPlan:
    return SegmentPlan(spec, tuple(tuple(Action.parse(word) for word in line.split()) for line in lines), carry)


def quiet(microbatches: int, ahead: int = 0, carried: tuple[int, ...] = ()) -> SegmentSpec:
    """A segment without a step on either side."""
    return SegmentSpec(microbatches, ahead, carried, updated=False, steps=False)


def test_one_microbatch_on_one_device() -> None:
    segment = plan(quiet(1), "F0:0@0 B0:0@0")
    result = simulate(Placement(1, 1), [segment], Costs.uniform(1))
    assert result.makespan == 3.0
    assert result.utilisation == (1.0,)
    assert result.peak_held == (1,)
    assert result.in_flight == (1,)


def test_one_microbatch_through_two_stages_with_messages() -> None:
    segment = plan(
        quiet(1),
        "RA1:0@0<1 F1:0@0 B1:0@0 SG1:0@0>1",
        "F0:0@0 SA0:0@0>0 RG0:0@0<0 B0:0@0",
    )
    result = simulate(Placement(2, 1), [segment], Costs.uniform(2, message=0.25))
    # F 1, message .25, F 1, B 2, message .25, B 2
    assert result.makespan == 6.5
    assert result.utilisation == (3 / 6.5, 3 / 6.5)
    assert [(t.start, t.end) for t in result.timeline[0] if t.action.kind in COMPUTE] == [
        (1.25, 2.25),
        (2.25, 4.25),
    ]


def test_a_message_waits_for_its_receive_to_be_posted() -> None:
    segment = plan(
        quiet(2),
        "F0:0@0 SA0:0@0>1 RA1:1@1<1 RG0:0@0<1 F1:1@1 B1:1@1 SG1:1@1>1 B0:0@0",
        "F0:1@1 RA1:0@0<0 SA0:1@1>0 F1:0@0 B1:0@0 SG1:0@0>0 RG0:1@1<0 B0:1@1",
    )
    # Device 0 is done with F0:0 at 1, but device 1 takes its activation only when its own forward of 5 is over.
    costs = Costs((1.0, 5.0), (2.0, 2.0), (1.0, 1.0), (1.0, 1.0))
    slow = Costs((1.0, 1.0), (2.0, 2.0), (1.0, 1.0), (1.0, 1.0), message=1.0)
    assert simulate(Placement(2, 2), [segment], slow).timeline[1][3].start == 2.0
    assert simulate(Placement(2, 2), [segment], costs).makespan == 1 + 5 + 2 + 2


def test_a_step_waits_for_the_reductions_and_new_weights_for_the_step() -> None:
    first = plan(
        SegmentSpec(1, updated=False, steps=True),
        "F0:0@0 SA0:0@0>1 RG0:0@0<1 B0:0@0 R0 R1",
        "RA1:0@0<0 F1:0@0 B1:0@0 SG1:0@0>0 R1 R0",
    )
    second = plan(
        SegmentSpec(1, updated=True, steps=False),
        "U0 F0:0@0 SA0:0@0>1 RG0:0@0<1 B0:0@0 U1",
        "RA1:0@0<0 U1 F1:0@0 B1:0@0 SG1:0@0>0 U0",
    )
    costs = Costs.uniform(2, reduce=0.5, update=0.25)
    result = simulate(Placement(2, 2), [first, second], costs)
    # Device 0 leaves the first segment at 1 + 1 + 2 + 2 = 6; its reductions arrive at 6.5; then the update.
    assert result.ends == (6.0, 6.75 + 6.0)
    assert result.time_per_segment() == 6.75


def test_the_next_segment_begins_on_all_devices_at_once() -> None:
    segments = [
        plan(
            quiet(1, ahead=1),
            "RA1:0@0<1 F1:0@0 B1:0@0 SG1:0@0>1",
            "F0:0@0 SA0:0@0>0 RG0:0@0<0 B0:0@0",
            carry=(0,),
        ),
        plan(quiet(1), "RA1:0@0<1 F1:0@0 B1:0@0 SG1:0@0>1", "F0:0@0 SA0:0@0>0 RG0:0@0<0 B0:0@0"),
    ]
    result = simulate(Placement(2, 1), segments, Costs.uniform(2))
    assert result.timeline[0][4].start == 6.0 == result.ends[0]
    assert result.makespan == 12.0


def test_early_forwards_are_stale_only_across_a_step() -> None:
    planner = quick_planner(Placement(4, 2), 2)
    for steps in (False, True):
        result = simulate(Placement(4, 2), repeated(planner, 4, 3, steps), Costs.uniform(4))
        assert sum(result.early) > 0
        assert result.stale == (result.early if steps else (0, 0, 0, 0))
        assert result.forwards[0] == 12 + sum(done > 0 for done in repeated(planner, 4, 3, steps)[-1].carry)


def test_weight_gradients_hold_activations() -> None:
    placement = Placement(1, 1)
    late = plan(quiet(2), "F0:0@0 I0:0@0 F0:1@0 I0:1@0 W0:0@0 W0:1@0")
    soon = plan(quiet(2), "F0:0@0 I0:0@0 W0:0@0 F0:1@0 I0:1@0 W0:1@0")
    assert simulate(placement, [late], Costs.uniform(1)).peak_held == (2,)
    assert simulate(placement, [soon], Costs.uniform(1)).peak_held == (1,)
    assert simulate(placement, [late], Costs.uniform(1)).in_flight == (1,)


def test_what_is_carried_is_held_from_the_start() -> None:
    placement = Placement(1, 1)
    segment = plan(quiet(2, carried=(1, 1)), "B0:0@0 B0:1@0")
    result = simulate(placement, [segment], Costs.uniform(1))
    assert result.peak_held == (2,)
    assert result.in_flight == (2,)


def test_a_dropped_carry_is_held_no_more() -> None:
    placement = Placement(1, 1)
    first = plan(quiet(1, ahead=1), "F0:0@0 B0:0@0 F0:0@0+", carry=(1,))
    second = plan(quiet(1), "F0:0@0 B0:0@0")
    result = simulate(placement, [first, second], Costs.uniform(1))
    assert result.peak_held == (1,)
    assert result.in_flight == (1,)


def test_the_steady_state_needs_two_segments() -> None:
    result = simulate(Placement(2, 1), repeated(quick_planner(Placement(2, 1), 2), 2, 1), Costs.uniform(2))
    with pytest.raises(ValueError, match="settled is 1 in a chain of 1"):
        result.time_per_segment()


def test_segments_that_get_stuck_are_not_simulated() -> None:
    segment = plan(quiet(1), "RA1:0@0<1 F1:0@0", "")
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(Placement(2, 1), [segment], Costs.uniform(2))


def replay(placement: Placement, segments: list[SegmentPlan], costs: Costs) -> list[list[float]]:
    """When each action is over, by relaxing every constraint until nothing moves: slow, and in no clever order."""
    devices = range(placement.num_stages)
    lines = [[(k, a) for k, plan in enumerate(segments) for a in plan.actions[d]] for d in devices]
    where = {
        (k + a.ahead, a.kind, a.stage, a.microbatch, k): (d, i)
        for d in devices
        for i, (k, a) in enumerate(lines[d])
        if a.microbatch >= 0
    }
    meeting: dict[tuple[int, int], list[tuple[tuple[int, int], tuple[int, int]]]] = {}
    for low in devices:
        for high in range(low + 1, placement.num_stages):
            mine, theirs = (
                [(x, i) for i, (_, action) in enumerate(lines[x]) if action.peer == y and action.kind in MESSAGES]
                for x, y in ((low, high), (high, low))
            )
            assert len(mine) == len(theirs)
            meeting[low, high] = list(zip(mine, theirs, strict=True))
    durations = {
        Kind.FORWARD: costs.forward,
        Kind.BACKWARD: costs.backward,
        Kind.INPUT_GRAD: costs.input_grad,
        Kind.WEIGHT_GRAD: costs.weight_grad,
    }
    over = [[0.0] * len(line) for line in lines]
    arrival: dict[tuple[int, int], float] = {}
    moved = True
    while moved:
        moved = False
        for pairs in meeting.values():
            previous = 0.0
            for one, other in pairs:
                previous = max(previous, over[one[0]][one[1]], over[other[0]][other[1]])
                for device, index in (one, other):
                    if lines[device][index][1].kind in RECEIVES:
                        arrival[device, index] = previous + costs.message
        for d in devices:
            clock = 0.0
            for i, (k, a) in enumerate(lines[d]):
                met = max((over[x][y] for x in devices for y, (k2, _) in enumerate(lines[x]) if k2 < k), default=0.0)
                start = max(clock, met)
                needed = {Kind.FORWARD: Kind.RECV_ACTIVATION}.get(a.kind, Kind.RECV_GRADIENT)
                if a.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD):
                    for posted in (k - 1, k):
                        place = where.get((k + a.ahead, needed, a.stage, a.microbatch, posted))
                        if place is not None:
                            start = max(start, arrival.get(place, 0.0))
                elif a.kind is Kind.UPDATE and k:
                    start = max(start, met + costs.update)
                    for host in placement.hosts(a.stage):
                        for i2, (k2, a2) in enumerate(lines[host]):
                            if k2 == k - 1 and a2.kind is Kind.REDUCE and a2.stage == a.stage:
                                start = max(start, over[host][i2] + costs.reduce + costs.update)
                clock = start + (durations[a.kind][a.stage] if a.kind in COMPUTE else 0.0)
                if clock != over[d][i]:
                    over[d][i], moved = clock, True
    return over


@given(cases(max_devices=4, max_segments=3))
@settings(deadline=None, max_examples=40)
def test_times_are_those_of_a_brute_force_replay(case: Case) -> None:
    segments = case.plan()
    costs = Costs(
        case.costs.forward,
        case.costs.backward,
        case.costs.input_grad,
        case.costs.weight_grad,
        case.costs.message,
        reduce=0.7,
        update=0.4,
    )
    result = simulate(case.placement, segments, costs)
    over = replay(case.placement, segments, costs)
    for line, times in zip(result.timeline, over, strict=True):
        assert [timed.end for timed in line] == pytest.approx(times)


@given(cases(max_devices=6))
@settings(deadline=None, max_examples=40)
def test_no_simulation_beats_the_work_or_breaks_the_bound(case: Case) -> None:
    result = simulate(case.placement, case.plan(), case.costs)
    assert result.makespan >= max(result.busy)
    assert sum(result.busy) == pytest.approx(sum(result.segment_work))
    assert max(result.in_flight) <= case.max_in_flight
    assert max(result.peak_held) <= sum(case.sizes) + len(case.sizes)
    if not case.split:
        assert max(result.peak_held) <= case.placement.num_pipelines * case.max_in_flight
