"""What the runtime makes of a schedule's messages is a special case of the rendezvous model that the validator proves.

The model has one queue for each pair of devices, in which both directions keep one order, and posts a receive where the
schedule has it. The runtime has a queue for each direction, and posts all receives of a segment at its start, in the
order of the sender's list. Sends and receives wait in helper threads, so that only computing waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hypothesis import given, settings

from lightning_asyncpipe.plan.actions import RECEIVES, SENDS, Action, Kind
from lightning_asyncpipe.plan.placement import Placement
from lightning_asyncpipe.plan.schedule import SegmentPlan
from lightning_asyncpipe.plan.validator import validate
from tests.plan.chains import Case, cases

_SENT = {Kind.RECV_ACTIVATION: (Kind.SEND_ACTIVATION, -1), Kind.RECV_GRADIENT: (Kind.SEND_GRADIENT, 1)}
Message = tuple[Kind, int, int, bool]


def sent(action: Action) -> Message:
    return action.kind, action.stage, action.microbatch, action.ahead


def received(action: Action) -> Message:
    kind, step = _SENT[action.kind]
    return kind, action.stage + step, action.microbatch, action.ahead


def queues(plan: SegmentPlan, devices: int) -> dict[tuple[int, int], tuple[list[Message], list[Message]]]:
    """For each direction of each pair, what is sent and what the schedule has the other end receive, in order."""
    found: dict[tuple[int, int], tuple[list[Message], list[Message]]] = {
        (a, b): ([], []) for a in range(devices) for b in range(devices)
    }
    for device, line in enumerate(plan.actions):
        for action in line:
            if action.kind in SENDS:
                found[device, action.peer][0].append(sent(action))
            elif action.kind in RECEIVES:
                found[action.peer, device][1].append(received(action))
    return found


def needed(action: Action, stages: int) -> Message | None:
    """What a computation waits for."""
    if action.kind is Kind.FORWARD and action.stage:
        return Kind.SEND_ACTIVATION, action.stage - 1, action.microbatch, False
    if action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD) and action.stage < stages - 1:
        return Kind.SEND_GRADIENT, action.stage + 1, action.microbatch, False
    return None


def runs_to_the_end(placement: Placement, segments: Sequence[SegmentPlan]) -> bool:
    """Whether every device gets to the end where it waits for what it computes with, and for nothing else."""
    lines = [
        deque((index, action) for index, plan in enumerate(segments) for action in plan.actions[device])
        for device in range(placement.num_stages)
    ]
    there: set[tuple[int, int, Message]] = set()
    moved = True
    while moved:
        moved = False
        for device, line in enumerate(lines):
            while line:
                segment, action = line[0]
                batch, wanted = segment + action.ahead, needed(action, placement.num_stages)
                if wanted is not None and (device, batch, wanted) not in there:
                    break
                if action.kind in SENDS:
                    there.add((action.peer, batch, (*sent(action)[:3], False)))
                line.popleft()
                moved = True
    return not any(lines)


@settings(max_examples=30, deadline=None)
@given(cases())
def test_each_direction_of_a_pair_is_one_queue_and_no_device_waits_for_ever(case: Case) -> None:
    segments = case.plan()
    validate(case.placement, segments, case.max_in_flight)
    for plan in segments:
        for leaving, expected in queues(plan, case.placement.num_stages).values():
            assert leaving == expected
    assert runs_to_the_end(case.placement, segments)
