"""Checks a chain of segments against every rule that the runtime relies on.

Each message names the segment, the device, the action and the rule. Rules of single devices are checked first, then the
whole chain is executed against the rendezvous model (``rendezvous``), which proves that nothing waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

from lightning_asyncpipe.errors import ScheduleError
from lightning_asyncpipe.plan.actions import COMPUTE, Action, Kind
from lightning_asyncpipe.plan.costs import Costs
from lightning_asyncpipe.plan.placement import Placement
from lightning_asyncpipe.plan.rendezvous import execute
from lightning_asyncpipe.plan.segment import SegmentPlan

_Work = tuple[Kind, int, int, bool]
"""Kind, stage, micro-batch, ahead."""

_BACKWARDS = frozenset({Kind.BACKWARD, Kind.INPUT_GRAD})
_ACCUMULATES = frozenset({Kind.BACKWARD, Kind.WEIGHT_GRAD})
_EARLY = frozenset({Kind.FORWARD, Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION})


def validate(
    placement: Placement,
    segments: Sequence[SegmentPlan],
    max_in_flight: int,
    max_staleness: int = 1,
) -> None:
    """Checks that a chain of segments is correct, within its bounds and free from deadlock.

    Args:
        placement: which device runs which stage.
        segments: consecutive segments. The carry of each is what the next continues, or drops (``carried=()``).
        max_in_flight: the bound on micro-batches per pipeline.
        max_staleness: how many updates may lie between the weights a forward runs on and those of its batch.

    Raises:
        ScheduleError: for the first rule that is broken.
    """
    for index, plan in enumerate(segments):
        _check_chain(placement, segments, index)
        for device in range(placement.num_stages):
            _Device(placement, plan, index, device).check()
        if max_staleness < 1 and plan.spec.steps:
            for device, line in enumerate(plan.actions):
                for action in line:
                    if action.ahead:
                        _fail(
                            index,
                            device,
                            action,
                            "staleness",
                            f"an early forward before a step, with max_staleness={max_staleness}",
                        )
    _check_in_flight(placement, segments, max_in_flight)
    execute(placement, segments, Costs.uniform(placement.num_stages))


def _fail(segment: int, device: int, action: Action | None, rule: str, why: str) -> NoReturn:
    where = f"segment {segment}, device {device}" + ("" if action is None else f", {action}")
    raise ScheduleError(f"{where}: {rule}: {why}")


def _check_chain(placement: Placement, segments: Sequence[SegmentPlan], index: int) -> None:
    """The segment's shape, and that it continues the one before."""
    plan = segments[index]
    spec = plan.spec
    if len(plan.actions) != placement.num_stages:
        raise ScheduleError(f"segment {index}: shape: lists of {len(plan.actions)} devices for {placement.num_stages}")
    if len(plan.carry) != spec.ahead:
        raise ScheduleError(f"segment {index}: carry: {len(plan.carry)} entries for ahead={spec.ahead}")
    if max((*spec.carried, *plan.carry), default=0) > placement.num_stages:
        raise ScheduleError(f"segment {index}: carry: more stages than the {placement.num_stages} there are")
    if index == 0:
        return
    before = segments[index - 1]
    if any(spec.carried) and spec.carried != before.carry:
        raise ScheduleError(
            f"segment {index}: carry: continues {spec.carried}, but segment {index - 1} leaves {before.carry}"
        )
    if spec.updated != before.spec.steps:
        raise ScheduleError(
            f"segment {index}: update: updated={spec.updated} after a segment with steps={before.spec.steps}"
        )


class _Device:
    """The rules that concern the list of one device in one segment."""

    def __init__(self, placement: Placement, plan: SegmentPlan, segment: int, device: int) -> None:
        self.placement = placement
        self.plan = plan
        self.segment = segment
        self.device = device
        self.line = plan.actions[device]
        self.at: dict[_Work, int] = {}

    def check(self) -> None:
        for position, action in enumerate(self.line):
            self.check_form(action)
            if action.kind not in (Kind.REDUCE, Kind.UPDATE):
                work = (action.kind, action.stage, action.microbatch, action.ahead)
                if work in self.at:
                    self.fail(action, "once", "a second time")
                self.at[work] = position
        self.check_complete()
        self.check_order()
        self.check_steps()

    def fail(self, action: Action | None, rule: str, why: str) -> NoReturn:
        _fail(self.segment, self.device, action, rule, why)

    def check_form(self, action: Action) -> None:
        spec, placement = self.plan.spec, self.placement
        if action.kind in (Kind.REDUCE, Kind.UPDATE):
            if action.stage not in placement.hosted(self.device):
                self.fail(action, "placement", "the device does not host this stage")
            return
        count = spec.ahead if action.ahead else spec.microbatches
        if not 0 <= action.microbatch < count:
            self.fail(action, "range", f"the batch has {count} micro-batches")
        if action.pipeline != placement.pipeline_of(action.microbatch):
            pipeline = placement.pipeline_of(action.microbatch)
            self.fail(action, "placement", f"the micro-batch belongs to pipeline {pipeline}")
        if action.ahead and action.kind not in _EARLY:
            self.fail(action, "early", "only forwards and their messages may be early")
        stages = placement.num_stages
        if not 0 <= action.stage < stages:
            self.fail(action, "range", f"there are {stages} stages")
        if placement.device(action.pipeline, action.stage) != self.device:
            self.fail(action, "placement", "the stage of this pipeline is on another device")
        other = _other_end(action)
        if other is None:
            return
        if not 0 <= other < stages:
            self.fail(action, "message", "no stage at the other end")
        peer = placement.device(action.pipeline, other)
        if action.peer != peer:
            self.fail(action, "message", f"the other end is device {peer}")

    def expected(self) -> Iterator[_Work]:
        """Everything that must be done, apart from backwards, which have two forms."""
        spec, last = self.plan.spec, self.placement.num_stages - 1
        carried = spec.carried or (0,) * spec.microbatches
        for ahead, begin, end in (
            (False, carried, (last + 1,) * spec.microbatches),
            (True, (0,) * spec.ahead, self.plan.carry),
        ):
            for microbatch, (first, past) in enumerate(zip(begin, end, strict=True)):
                stage = self.placement.stage(self.placement.pipeline_of(microbatch), self.device)
                if first <= stage < past:
                    yield Kind.FORWARD, stage, microbatch, ahead
                    if stage < last:
                        yield Kind.SEND_ACTIVATION, stage, microbatch, ahead
                if first < stage <= past:
                    yield Kind.RECV_ACTIVATION, stage, microbatch, ahead
                if not ahead and stage > 0:
                    yield Kind.SEND_GRADIENT, stage, microbatch, False
                if not ahead and stage < last:
                    yield Kind.RECV_GRADIENT, stage, microbatch, False

    def check_complete(self) -> None:
        expected = set(self.expected())
        for microbatch in range(self.plan.spec.microbatches):
            stage = self.placement.stage(self.placement.pipeline_of(microbatch), self.device)
            whole = (Kind.BACKWARD, stage, microbatch, False)
            halves = {(kind, stage, microbatch, False) for kind in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)}
            expected |= halves if halves & self.at.keys() and whole not in self.at else {whole}
        for kind, stage, microbatch, ahead in sorted(expected - self.at.keys(), key=_readable):
            missing = Action(kind, stage, microbatch, self.placement.pipeline_of(microbatch), ahead)
            self.fail(None, "complete", f"{kind.value}{stage}:{microbatch}@{missing.pipeline} is missing")
        for work, position in self.at.items():
            if work not in expected:
                self.fail(self.line[position], "complete", "not a part of this segment")

    def check_order(self) -> None:
        for (kind, stage, microbatch, ahead), position in self.at.items():
            before: list[Kind] = []
            if kind is Kind.FORWARD:
                before = [Kind.RECV_ACTIVATION]
            elif kind in _BACKWARDS:
                before = [Kind.FORWARD, Kind.RECV_GRADIENT]
            elif kind is Kind.WEIGHT_GRAD:
                before = [Kind.INPUT_GRAD]
            elif kind is Kind.SEND_ACTIVATION:
                before = [Kind.FORWARD]
            elif kind is Kind.SEND_GRADIENT:
                before = [Kind.BACKWARD, Kind.INPUT_GRAD]
            for cause in before:
                at = self.at.get((cause, stage, microbatch, ahead))
                if at is not None and at > position:
                    self.fail(self.line[position], "order", f"comes before {self.line[at]}")

    def check_steps(self) -> None:
        spec = self.plan.spec
        for stage in self.placement.hosted(self.device):
            for kind, wanted in ((Kind.REDUCE, spec.steps), (Kind.UPDATE, spec.updated)):
                action = Action(kind, stage)
                found = self.line.count(action)
                if found != int(wanted):
                    why = f"{found} times instead of {int(wanted)}"
                    self.fail(action, kind.name.lower(), why)
        used: set[int] = set()
        reduced: set[int] = set()
        for action in self.line:
            if action.kind is Kind.UPDATE and action.stage in used:
                self.fail(action, "update", "after a use of the stage")
            elif action.kind is Kind.REDUCE:
                reduced.add(action.stage)
            elif action.kind in COMPUTE:
                used.add(action.stage)
                if action.kind in _ACCUMULATES and action.stage in reduced:
                    self.fail(action, "reduce", "adds to gradients that have been given away")


def _other_end(action: Action) -> int | None:
    """The stage at the other end of a message."""
    if action.kind in (Kind.SEND_ACTIVATION, Kind.RECV_GRADIENT):
        return action.stage + 1
    if action.kind in (Kind.RECV_ACTIVATION, Kind.SEND_GRADIENT):
        return action.stage - 1
    return None


def _readable(work: _Work) -> tuple[str, int, int, bool]:
    kind, stage, microbatch, ahead = work
    return kind.value, stage, microbatch, ahead


def _check_in_flight(placement: Placement, segments: Sequence[SegmentPlan], max_in_flight: int) -> None:
    """A pipeline's micro-batches enter and leave on one device, so that its list alone decides."""
    for pipeline in range(placement.num_pipelines):
        device = placement.device(pipeline, 0)
        carried = segments[0].spec.carried if segments else ()
        flying = sum(1 for done in carried[pipeline :: placement.num_pipelines] if done)
        for index, plan in enumerate(segments):
            if index and not any(plan.spec.carried):
                flying = 0  # a carry that is dropped
            for action in plan.actions[device]:
                if action.stage or action.pipeline != pipeline:
                    continue
                if action.kind is Kind.FORWARD:
                    flying += 1
                    if flying > max_in_flight:
                        _fail(
                            index,
                            device,
                            action,
                            "in flight",
                            f"{flying} micro-batches of pipeline {pipeline}, at most {max_in_flight}",
                        )
                elif action.kind in _BACKWARDS:
                    flying -= 1
