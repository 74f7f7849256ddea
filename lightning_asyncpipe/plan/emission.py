"""From simulated operations to every device's list of actions: messages, reductions and updates put in.

Between two devices a send is matched with a receive by their order alone, so both sides must agree on the order of all
messages of the pair, in both directions. It is the order of the simulated times of the sends. That order is possible on
both sides at once because the simulation it is taken from is an execution of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_asyncpipe.plan.actions import Action, Kind
from lightning_asyncpipe.plan.segment import SegmentPlan, SegmentSpec
from lightning_asyncpipe.plan.tables import BACKWARD, FORWARD, WEIGHT, Operation, Tables


def emit(tables: Tables, spec: SegmentSpec, current: Sequence[Operation], early: Sequence[Operation]) -> SegmentPlan:
    """The plan of a segment from its operations, each of the two sequences in an order of causes before effects."""
    kinds = {
        FORWARD: Kind.FORWARD,
        BACKWARD: Kind.INPUT_GRAD if tables.split else Kind.BACKWARD,
        WEIGHT: Kind.WEIGHT_GRAD,
    }
    stages = tables.stages
    number = 0
    ordered = []
    for ahead, operations in ((False, current), (True, early)):
        for start, end, kind, slot, microbatch in operations:
            # Ties are broken by the number, so that causes stay before effects where durations are 0.
            ordered.append((end, start, number, kind, slot, microbatch, ahead))
            number += 1

    # Messages of all pairs by the time of their send. What follows a device's own send to a peer, up to its next one,
    # are receives from that peer: all of them are posted right after that send.
    first: list[list[Action]] = [[] for _ in range(stages)]
    posted: list[dict[int, list[Action]]] = [{} for _ in range(stages)]
    after: dict[int, tuple[Action, list[Action]]] = {}
    for _, _, number, kind, slot, microbatch, ahead in sorted(ordered):
        pipeline, stage = divmod(slot, stages)
        if kind == FORWARD and stage < stages - 1:
            step, send_kind, receive_kind = 1, Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION
        elif kind == BACKWARD and stage > 0:
            step, send_kind, receive_kind = -1, Kind.SEND_GRADIENT, Kind.RECV_GRADIENT
        else:
            continue
        device, peer = tables.device[slot], tables.device[slot + step]
        send = Action(send_kind, stage, microbatch, pipeline, ahead, peer)
        receive = Action(receive_kind, stage + step, microbatch, pipeline, ahead, device)
        following: list[Action] = []
        after[number] = (send, following)
        posted[device][peer] = following
        posted[peer].get(device, first[peer]).append(receive)

    final: list[dict[int, int]] = [{} for _ in range(stages)]  # per device: stage -> its last backward's number
    ordered.sort(key=_program_order)
    last_kind = WEIGHT if tables.split else BACKWARD
    for _, _, number, kind, slot, _, _ in ordered:
        if kind == last_kind:
            final[tables.device[slot]][slot % stages] = number

    actions = first
    fresh = [set(hosted) if spec.updated else set() for hosted in tables.hosted]
    carry = [0] * spec.ahead
    for _, _, number, kind, slot, microbatch, ahead in ordered:
        pipeline, stage = divmod(slot, stages)
        device = tables.device[slot]
        line = actions[device]
        if stage in fresh[device]:
            fresh[device].remove(stage)
            line.append(Action(Kind.UPDATE, stage))
        line.append(Action(kinds[kind], stage, microbatch, pipeline, ahead))
        if ahead:
            carry[microbatch] += 1
        message = after.get(number)
        if message is not None:
            line.append(message[0])
            line.extend(message[1])
        if spec.steps and final[device].get(stage) == number:
            line.append(Action(Kind.REDUCE, stage))
    for device, hosted in enumerate(tables.hosted):
        # Stages that the segment does not use still take part in the step before and the step after it.
        for stage in hosted:
            if stage in fresh[device]:
                actions[device].append(Action(Kind.UPDATE, stage))
            if spec.steps and stage not in final[device]:
                actions[device].append(Action(Kind.REDUCE, stage))
    return SegmentPlan(spec, tuple(tuple(line) for line in actions), tuple(carry))


def _program_order(entry: tuple[float, float, int, int, int, int, bool]) -> tuple[float, float, int]:
    end, start, number = entry[:3]
    return start, end, number
