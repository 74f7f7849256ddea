from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_asyncpipe.errors import ScheduleError
from lightning_asyncpipe.plan.actions import Action, Kind
from lightning_asyncpipe.plan.placement import Placement
from lightning_asyncpipe.plan.schedule import SegmentPlan, SegmentSpec
from lightning_asyncpipe.plan.validator import validate
from tests.plan.chains import Case, cases, quick_planner, repeated

PLACEMENT = Placement(4, 2)
Line = list[Action]


def good(split: bool = False) -> list[SegmentPlan]:
    return repeated(quick_planner(PLACEMENT, 2, split), 6, 3)


def mutate(
    segments: list[SegmentPlan], segment: int, device: int, change: Callable[[Line], object]
) -> list[SegmentPlan]:
    """The chain with one device's list of one segment changed in place by ``change``."""
    plan = segments[segment]
    lines = [list(line) for line in plan.actions]
    change(lines[device])
    changed = replace(plan, actions=tuple(tuple(line) for line in lines))
    return [*segments[:segment], changed, *segments[segment + 1 :]]


def find(line: Line, kind: Kind, which: int = 0, **fields: int) -> int:
    """The position of an action of a kind with these fields."""
    found = [
        i
        for i, action in enumerate(line)
        if action.kind is kind and all(getattr(action, k) == v for k, v in fields.items())
    ]
    return found[which]


def move(kind: Kind, to: int, which: int = 0, **fields: int) -> Callable[[Line], None]:
    """A change that moves an action to a position (-1: the end)."""

    def change(line: Line) -> None:
        action = line.pop(find(line, kind, which, **fields))
        line.insert(len(line) if to == -1 else to, action)

    return change


def drop(kind: Kind, which: int = 0) -> Callable[[Line], None]:
    def change(line: Line) -> None:
        del line[find(line, kind, which)]

    return change


def edit(kind: Kind, stage: int | None = None, /, **fields: object) -> Callable[[Line], None]:
    def change(line: Line) -> None:
        at = find(line, kind) if stage is None else find(line, kind, stage=stage)
        line[at] = replace(line[at], **fields)  # type: ignore[arg-type]

    return change


@pytest.mark.parametrize("split", [False, True])
def test_a_planned_chain_is_valid(split: bool) -> None:
    validate(PLACEMENT, good(split), 2)


CHANGES = [
    ("forward moved to the end", move(Kind.FORWARD, -1), "order: comes before"),
    ("forward before its input", move(Kind.FORWARD, 0, stage=3, which=-1), "order: comes before RA3"),
    ("backward moved to the front", move(Kind.BACKWARD, 0), "order: comes before"),
    ("send before its forward", move(Kind.SEND_ACTIVATION, 0), "order: comes before F"),
    ("send before its backward", move(Kind.SEND_GRADIENT, 0), "order: comes before B"),
    ("receive after its use", move(Kind.RECV_GRADIENT, -1), "order: comes before RG"),
    ("forward dropped", drop(Kind.FORWARD), "complete: F.* is missing"),
    ("backward dropped", drop(Kind.BACKWARD), "complete: B.* is missing"),
    ("send dropped", drop(Kind.SEND_ACTIVATION), "complete: SA.* is missing"),
    ("receive dropped", drop(Kind.RECV_GRADIENT), "complete: RG.* is missing"),
    ("reduction dropped", drop(Kind.REDUCE), "reduce: 0 times instead of 1"),
    ("update dropped", drop(Kind.UPDATE), "update: 0 times instead of 1"),
    ("reduction too early", move(Kind.REDUCE, 0), "reduce: adds to gradients"),
    ("update too late", move(Kind.UPDATE, -1), "update: after a use"),
    ("another stage", edit(Kind.FORWARD, 0, stage=1), "placement: the stage of this pipeline"),
    ("no such stage", edit(Kind.FORWARD, stage=4), "range: there are 4 stages"),
    ("another pipeline", edit(Kind.FORWARD, 0, pipeline=1), "placement: the micro-batch belongs"),
    ("no such micro-batch", edit(Kind.FORWARD, microbatch=6), "range: the batch has 6"),
    ("another peer", edit(Kind.SEND_ACTIVATION, peer=3), "message: the other end is device"),
    ("update of a stage elsewhere", edit(Kind.UPDATE, stage=1), "placement: the device does not host"),
    ("an early backward", edit(Kind.BACKWARD, ahead=True), "early: only forwards"),
    ("an early forward more", edit(Kind.FORWARD, 0, ahead=True, microbatch=4), "complete: "),
]


@pytest.mark.parametrize(("change", "rule"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_a_change_is_named_with_its_device_action_and_rule(change: Callable[[Line], None], rule: str) -> None:
    with pytest.raises(ScheduleError, match=rf"segment 1, device 0.*{rule}"):
        validate(PLACEMENT, mutate(good(), 1, 0, change), 2)


def test_a_weight_gradient_comes_after_its_input_gradient() -> None:
    with pytest.raises(ScheduleError, match=r"W.*order: comes before I"):
        validate(PLACEMENT, mutate(good(True), 1, 0, move(Kind.WEIGHT_GRAD, 0)), 2)


def test_a_weight_gradient_may_not_be_left_out() -> None:
    with pytest.raises(ScheduleError, match=r"complete: W.* is missing"):
        validate(PLACEMENT, mutate(good(True), 1, 0, drop(Kind.WEIGHT_GRAD)), 2)


def test_a_reduction_waits_for_the_weight_gradients() -> None:
    def change(line: Line) -> None:
        last = find(line, Kind.WEIGHT_GRAD, -1)
        stage = line[last].stage
        line.insert(last, line.pop(find(line, Kind.REDUCE, stage=stage)))

    with pytest.raises(ScheduleError, match="reduce: adds to gradients"):
        validate(PLACEMENT, mutate(good(True), 1, 0, change), 2)


def test_a_message_without_a_stage_at_its_other_end_is_refused() -> None:
    def change(line: Line) -> None:
        line.append(Action(Kind.SEND_GRADIENT, 0, 0, 0, peer=1))

    with pytest.raises(ScheduleError, match="message: no stage at the other end"):
        validate(PLACEMENT, mutate(good(), 0, 0, change), 2)


@pytest.mark.parametrize("kind", list(Kind))
def test_nothing_is_done_twice(kind: Kind) -> None:
    segments = good(split=kind in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD))

    def change(line: Line) -> None:
        line.append(line[find(line, kind)])

    with pytest.raises(ScheduleError, match=r"once: a second time|2 times instead of 1"):
        validate(PLACEMENT, mutate(segments, 1, 0, change), 2)


@given(cases(max_devices=5, max_segments=3), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_no_action_may_be_dropped_or_doubled(case: Case, rng: random.Random) -> None:
    segments = case.plan()
    segment = rng.randrange(len(segments))
    device = rng.randrange(case.placement.num_stages)
    length = len(segments[segment].actions[device])
    if not length:
        return
    at = rng.randrange(length)
    for change in (lambda line: line.pop(at), lambda line: line.insert(at, line[at])):
        with pytest.raises(ScheduleError):
            validate(case.placement, mutate(segments, segment, device, change), case.max_in_flight)


def test_messages_of_a_pair_meet_in_the_order_of_their_issue() -> None:
    def swap(line: Line) -> None:
        first, second = (find(line, Kind.RECV_ACTIVATION, n, peer=1) for n in (0, 1))
        line[first], line[second] = line[second], line[first]

    segments = [quick_planner(PLACEMENT, 2).segment(SegmentSpec(4))]
    with pytest.raises(ScheduleError, match="meet in the order of their issue"):
        validate(PLACEMENT, mutate(segments, 0, 0, swap), 2)


def two_devices(first: str, second: str) -> SegmentPlan:
    lines = (first, second)
    return SegmentPlan(
        SegmentSpec(2, updated=False, steps=False),
        tuple(tuple(Action.parse(word) for word in line.split()) for line in lines),
        (),
    )


def test_two_devices_that_want_to_receive_first_are_refused() -> None:
    placement = Placement(2, 2)
    sound = two_devices(
        "F0:0@0 SA0:0@0>1 RA1:1@1<1 RG0:0@0<1 F1:1@1 B1:1@1 SG1:1@1>1 B0:0@0",
        "RA1:0@0<0 F0:1@1 SA0:1@1>0 F1:0@0 B1:0@0 SG1:0@0>0 RG0:1@1<0 B0:1@1",
    )
    validate(placement, [sound], 1)
    crossed = two_devices(
        "RA1:1@1<1 F0:0@0 SA0:0@0>1 RG0:0@0<1 F1:1@1 B1:1@1 SG1:1@1>1 B0:0@0",
        "RA1:0@0<0 F0:1@1 SA0:1@1>0 F1:0@0 B1:0@0 SG1:0@0>0 RG0:1@1<0 B0:1@1",
    )
    with pytest.raises(ScheduleError, match=r"segment 0, device 1, RA1:0@0<0: message: .* RA1:1@1<1 .*device 0"):
        validate(placement, [crossed], 1)


def test_a_deadlock_names_the_blocked_actions() -> None:
    placement = Placement(3, 3)
    plan = quick_planner(placement, 1).segment(SegmentSpec(3, updated=False, steps=False))
    # Device 0 waits for 1, 1 for 2 and 2 for 0, and each would send what the other waits for only afterwards.
    first = (
        "RA2:0@0<1 F2:0@0",
        "RA2:2@2<2 RA1:0@0<2 F1:0@0 SA1:0@0>0",
        "RA1:2@2<0 F1:2@2 SA1:2@2>1",
    )
    lines = []
    for line, texts in zip(plan.actions, first, strict=True):
        front = [Action.parse(text) for text in texts.split()]
        lines.append((*front, *(action for action in line if action not in front)))
    with pytest.raises(ScheduleError, match="deadlock") as caught:
        validate(placement, [replace(plan, actions=tuple(lines))], 1)
    for blocked in ("device 0, F2:0@0", "device 1, F1:0@0", "device 2, F1:2@2"):
        assert f"segment 0, {blocked}" in str(caught.value)


def test_the_bound_on_microbatches_in_flight_is_checked() -> None:
    segments = repeated(quick_planner(PLACEMENT, 3), 8, 3)
    validate(PLACEMENT, segments, 3)
    with pytest.raises(ScheduleError, match=r"device \d, F0:\d@\d.*: in flight: 3 micro-batches"):
        validate(PLACEMENT, segments, 2)


def test_the_bound_holds_across_segments() -> None:
    segments = repeated(quick_planner(PLACEMENT, 2), 4, 2)
    assert any(segments[0].carry)
    with pytest.raises(ScheduleError, match="in flight"):
        validate(PLACEMENT, segments[1:], 1)


def test_the_bound_on_staleness_is_checked() -> None:
    with pytest.raises(ScheduleError, match=r"device \d, \S*\+\S*: staleness"):
        validate(PLACEMENT, good(), 2, max_staleness=0)
    validate(PLACEMENT, repeated(quick_planner(PLACEMENT, 2), 4, 3, steps=False), 2, max_staleness=0)


def test_a_segment_continues_the_carry_of_the_one_before() -> None:
    segments = good()
    other = quick_planner(PLACEMENT, 2).segment(SegmentSpec(6, 6, (2, 1, 0, 0, 0, 0)))
    with pytest.raises(ScheduleError, match="segment 1: carry: continues"):
        validate(PLACEMENT, [segments[0], other], 2)


def test_a_carry_may_be_dropped() -> None:
    planner = quick_planner(PLACEMENT, 2)
    validate(PLACEMENT, [planner.segment(SegmentSpec(6, 6)), planner.segment(SegmentSpec(6, 6))], 2)


def test_a_carry_says_what_was_done() -> None:
    first = good()[0]
    with pytest.raises(ScheduleError, match="complete"):
        validate(PLACEMENT, [replace(first, carry=(4, *first.carry[1:]))], 2)
    with pytest.raises(ScheduleError, match="carry: 5 entries for ahead=6"):
        validate(PLACEMENT, [replace(first, carry=first.carry[1:])], 2)
    with pytest.raises(ScheduleError, match="more stages than the 4"):
        validate(PLACEMENT, [replace(first, carry=(5, *first.carry[1:]))], 2)


def test_a_step_is_followed_by_an_update() -> None:
    planner = quick_planner(PLACEMENT, 2)
    stepping = planner.segment(SegmentSpec(4))
    plain = planner.segment(SegmentSpec(4, updated=False, steps=False))
    with pytest.raises(ScheduleError, match="segment 1: update: updated=False after"):
        validate(PLACEMENT, [stepping, plain], 2)
    with pytest.raises(ScheduleError, match="segment 1: update: updated=True after"):
        validate(PLACEMENT, [plain, stepping], 2)


def test_every_device_has_a_list() -> None:
    first = good()[0]
    with pytest.raises(ScheduleError, match="shape: lists of 3 devices for 4"):
        validate(PLACEMENT, [replace(first, actions=first.actions[1:])], 2)


def test_a_missing_or_foreign_kind_of_backward_is_refused() -> None:
    def halve(line: Line) -> None:
        at = find(line, Kind.BACKWARD)
        line[at] = replace(line[at], kind=Kind.INPUT_GRAD)

    with pytest.raises(ScheduleError, match=r"complete: W.* is missing"):
        validate(PLACEMENT, mutate(good(), 1, 0, halve), 2)
