"""Executes a chain of segments in simulated time, under the rendezvous model.

The model assumes no buffering: between two devices a send is complete when its receive has been issued too, and the
operations of a pair of devices, in both directions, are matched in the order in which each side issues them (NCCL's
rule). Sends and receives are issued without waiting. A computation waits for what it receives. The next segment begins
on all devices at once: ranks exchange what their micro-batches gave at the end of each. An ``UPDATE`` waits for the
step between them. Whether a set of lists gets stuck under these rules does not depend on how fast anything is, so that
one execution proves it for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from lightning_asyncpipe.errors import ScheduleError
from lightning_asyncpipe.plan.actions import COMPUTE, MESSAGES, SENDS, Action, Kind
from lightning_asyncpipe.plan.costs import Costs
from lightning_asyncpipe.plan.placement import Placement
from lightning_asyncpipe.plan.segment import SegmentPlan


class Timed(NamedTuple):
    """An action with the time at which its device turned to it and the time at which the device was free again."""

    segment: int
    start: float
    end: float
    action: Action


_Arrival = tuple[int, Kind, int, int]
"""Batch (number of the segment that finishes it), kind of receive, stage, micro-batch."""

_RECEIVE_OF = {
    Kind.SEND_ACTIVATION: (Kind.RECV_ACTIVATION, 1),
    Kind.SEND_GRADIENT: (Kind.RECV_GRADIENT, -1),
}


def execute(placement: Placement, segments: Sequence[SegmentPlan], costs: Costs) -> list[list[Timed]]:
    """Runs the lists until all are done; returns each device's actions with their times, from 0 on.

    Messages take ``costs.message`` from the time that both sides and all earlier messages of the pair allow. New
    weights of a stage arrive ``costs.update`` after all devices have left the segment before and the stage's last
    reduction, which takes ``costs.reduce``, is in.

    Raises:
        ScheduleError: when two operations that meet do not belong together, or when devices block each other; the
            message names them.
    """
    execution = _Execution(placement, segments, costs)
    execution.run()
    return execution.timed


class _Execution:
    def __init__(self, placement: Placement, segments: Sequence[SegmentPlan], costs: Costs) -> None:
        self.placement = placement
        self.segments = segments
        self.costs = costs
        self.durations = {
            Kind.FORWARD: costs.forward,
            Kind.BACKWARD: costs.backward,
            Kind.INPUT_GRAD: costs.input_grad,
            Kind.WEIGHT_GRAD: costs.weight_grad,
        }
        devices = range(placement.num_stages)
        self.lines = [
            [(index, action) for index, plan in enumerate(segments) for action in plan.actions[device]]
            for device in devices
        ]
        self.clock = [0.0 for _ in devices]
        self.entered = [0 for _ in devices]  # the segment that each device is in
        self.timed: list[list[Timed]] = [[] for _ in devices]
        self.left: list[list[float]] = [[] for _ in devices]  # when each segment was left
        self.reduced: dict[tuple[int, int], float] = {}  # (segment, stage): its last reduction so far
        self.arrived: list[dict[_Arrival, float]] = [{} for _ in devices]
        self.issued: dict[tuple[int, int], deque[tuple[int, float, Action]]] = {}
        self.matched: dict[tuple[int, int], float] = {}  # pair: when its last message could go

    def run(self) -> None:
        pending = deque(range(len(self.lines)))
        queued = set(pending)
        while pending:
            device = pending.popleft()
            queued.discard(device)
            for waker in self.advance(device):
                if waker not in queued:
                    queued.add(waker)
                    pending.append(waker)
        blocked = [
            (device, *line[len(done)])
            for device, (line, done) in enumerate(zip(self.lines, self.timed, strict=True))
            if len(done) < len(line)
        ]
        if blocked:
            names = "; ".join(f"segment {s}, device {d}, {a}" for d, s, a in blocked)
            raise ScheduleError(f"deadlock: every device that is not done waits for another: {names}")

    def advance(self, device: int) -> set[int]:
        """Runs a device as far as it gets; returns the devices that may get further now."""
        line, done, left = self.lines[device], self.timed[device], self.left[device]
        woken: set[int] = set()
        segments_left = len(left)
        while len(done) < len(line):
            segment, action = line[len(done)]
            left.extend([self.clock[device]] * (segment - len(left)))
            start = self.begin(device, segment, action)
            if start is None:
                break
            end = start
            if action.kind in MESSAGES:
                self.issue(device, segment, action)
                woken.add(action.peer)
            elif action.kind in COMPUTE:
                end = start + self.durations[action.kind][action.stage]
            elif action.kind is Kind.REDUCE:
                key = segment, action.stage
                self.reduced[key] = max(self.reduced.get(key, 0.0), start + self.costs.reduce)
            done.append(Timed(segment, start, end, action))
            self.clock[device] = end
        if len(done) == len(line):
            left.extend([self.clock[device]] * (len(self.segments) - len(left)))
        if len(left) > segments_left:
            woken.update(range(len(self.lines)))
        return woken

    def begin(self, device: int, segment: int, action: Action) -> float | None:
        """When the device can start the action; None: not known yet."""
        if segment > self.entered[device]:
            if any(len(left) < segment for left in self.left):
                return None
            self.clock[device] = max(left[segment - 1] for left in self.left)
            self.entered[device] = segment
        clock, kind, stage = self.clock[device], action.kind, action.stage
        if kind is Kind.UPDATE and segment:
            met = max(left[segment - 1] for left in self.left)
            return max(clock, max(met, self.reduced.get((segment - 1, stage), 0.0)) + self.costs.update)
        if kind is Kind.FORWARD and stage > 0:
            needed = Kind.RECV_ACTIVATION
        elif kind in (Kind.BACKWARD, Kind.INPUT_GRAD) and stage < self.placement.num_stages - 1:
            needed = Kind.RECV_GRADIENT
        else:
            return clock
        batch = segment + action.ahead
        at = self.arrived[device].get((batch, needed, stage, action.microbatch))
        if at is not None:
            return max(clock, at)
        # What arrived before the chain began was part of the first segment's carry.
        carried = self.segments[0].spec.carried
        if batch == 0 and kind is Kind.FORWARD and carried and carried[action.microbatch] == stage:
            return clock
        return None

    def issue(self, device: int, segment: int, action: Action) -> None:
        """Matches the operation with the peer's oldest unmatched one, if that has been issued."""
        peer, now = action.peer, self.clock[device]
        theirs = self.issued.setdefault((peer, device), deque())
        if not theirs:
            self.issued.setdefault((device, peer), deque()).append((segment, now, action))
            return
        other_segment, issued, other = theirs.popleft()
        sends = action.kind in SENDS
        send, receive = (action, other) if sends else (other, action)
        if (
            segment != other_segment
            or _RECEIVE_OF.get(send.kind) != (receive.kind, receive.stage - send.stage)
            or (send.microbatch, send.ahead) != (receive.microbatch, receive.ahead)
        ):
            raise ScheduleError(
                f"segment {segment}, device {device}, {action}: message: the operations of a pair of"
                f" devices meet in the order of their issue, and this one meets {other} of segment"
                f" {other_segment} on device {peer}"
            )
        pair = min(device, peer), max(device, peer)
        met = max(now, issued, self.matched.get(pair, 0.0))
        self.matched[pair] = met
        batch = segment + receive.ahead
        arrival = batch, receive.kind, receive.stage, receive.microbatch
        self.arrived[peer if sends else device][arrival] = met + self.costs.message
