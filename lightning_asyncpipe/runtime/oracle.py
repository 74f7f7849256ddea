"""The reference: the same action lists, executed by one process on one copy of the weights.

The contract says on which version of the weights every forward and backward runs, whatever the timing. So one process
that walks the lists of all devices in any order that meets their dependencies, on the real modules, with the optimizer
writing in place between segments, must get the same parameters as the distributed run. There are no messages, owners
or replicas here that could be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

from torch import Tensor
from torch.nn import Parameter

from lightning_asyncpipe.errors import ScheduleError
from lightning_asyncpipe.plan.actions import COMPUTE, Action, Kind
from lightning_asyncpipe.plan.schedule import Planner, SegmentPlan, SegmentSpec
from lightning_asyncpipe.runtime.engine import Work
from lightning_asyncpipe.runtime.gradients import GradientAccumulator
from lightning_asyncpipe.runtime.stages import StageForward, StageRunner
from lightning_asyncpipe.runtime.staleness import StalenessCounter
from lightning_asyncpipe.runtime.stash import WeightStash
from lightning_asyncpipe.runtime.timeline import Ledger


class Oracle:
    """Executes the segments of all devices of one replica in this process.

    Args:
        planner: makes the segment plans.
        runner: runs stages of the user's step; its model holds all weights.
        parameters: the trainable parameters by name.
        staleness: counts and bounds the versions that forwards and backwards met.
        stashes: for each device, what gives its early forwards a second set of weights; None lets them run on the live
            ones. Devices may share one, and then share what they gather.
    """

    def __init__(
        self,
        planner: Planner,
        runner: StageRunner,
        parameters: Mapping[str, Parameter],
        staleness: StalenessCounter,
        stashes: Sequence[WeightStash | None],
    ) -> None:
        self.planner = planner
        self.runner = runner
        self.staleness = staleness
        self._stashes = stashes
        self._apart = [stash for stash in dict.fromkeys(stashes) if stash is not None]
        self.ledger = Ledger()
        self._sums = [GradientAccumulator(parameters) for _ in range(max(1, len(self._apart)))]
        self._parameters = dict(parameters)
        self._last_stage = planner.placement.num_stages - 1
        self._updated = False
        self._carried: Work | None = None
        self._carry: tuple[int, ...] = ()
        self._forwards: dict[tuple[int, int, int], tuple[StageForward, int, Mapping[Parameter, Tensor] | None]] = {}
        self._entry_gradients: dict[tuple[int, int, int], Tensor | None] = {}
        self._serial = 0

    def run(self, current: Work, upcoming: Work | None, steps: bool) -> SegmentPlan:
        """As :meth:`Engine.run`, for all devices."""
        for work in (current, upcoming):
            if work is not None and work.serial < 0:
                work.serial, self._serial = self._serial, self._serial + 1
        spec = SegmentSpec(
            microbatches=len(current.tasks),
            ahead=0 if upcoming is None else len(upcoming.tasks),
            carried=self._carry,
            updated=self._updated,
            steps=steps,
        )
        plan = self.planner.segment(spec)
        if self._updated:
            self._updated = False
            for stage in range(self._last_stage + 1):
                self.staleness.updated(stage)
        queues = [[a for a in actions if a.kind in COMPUTE] for actions in plan.actions]
        positions = [0] * len(queues)
        while any(position < len(queue) for position, queue in zip(positions, queues, strict=True)):
            progressed = False
            for device, queue in enumerate(queues):
                while positions[device] < len(queue):
                    action = queue[positions[device]]
                    work = upcoming if action.ahead else current
                    assert work is not None
                    if not self._execute(device, action, work, action.ahead and steps):
                        break
                    positions[device] += 1
                    progressed = True
            if not progressed:
                raise ScheduleError(f"no device can go on: positions {positions}")
        current.recorded()
        self.staleness.close_segment(plan)
        self._carried, self._carry = (upcoming, plan.carry) if any(plan.carry) else (None, ())
        for stash in self._apart:
            stash.rotate()
        if self.runner.copies is not None:
            self.runner.copies.clear()
        return plan

    def _execute(self, device: int, action: Action, work: Work, stale: bool) -> bool:
        """Run the action if what it needs is there."""
        key = (work.serial, action.microbatch, action.stage)
        sums = self._sums[device % len(self._sums)]
        if action.kind is Kind.FORWARD:
            stash = self._stashes[device] if stale else None
            leaves = None if stash is None else partial(stash.leaves, action.stage, sums)
            return self._forward(key, work, action, leaves)
        if action.kind is Kind.WEIGHT_GRAD:
            return self._weight_gradients(key, work, sums)
        return self._backward(key, work, sums, action.kind is Kind.INPUT_GRAD)

    def _forward(
        self,
        key: tuple[int, int, int],
        work: Work,
        action: Action,
        make_leaves: Callable[[], Mapping[Parameter, Tensor]] | None,
    ) -> bool:
        serial, index, stage = key
        activation = None
        if stage > 0:
            if (serial, index, stage - 1) not in self._forwards:
                return False
            before = self._forwards[serial, index, stage - 1][0]
            assert before.output is not None
            activation = before.output.detach().clone().requires_grad_(before.requires_grad)
        leaves = None if make_leaves is None else make_leaves()
        with work.early() if action.ahead else nullcontext():
            forward = self.runner.forward(stage, work.tasks[index], activation, leaves)
            if stage == self._last_stage:
                forward.root = work.finish(index, forward.value)
            work.passed(index, stage)
        work.batch_statistics.setdefault(index, []).extend(forward.buffer_records)
        self._forwards[key] = (forward, self.staleness.forward(stage), leaves)
        return True

    def _backward(self, key: tuple[int, int, int], work: Work, sums: GradientAccumulator, half: bool) -> bool:
        serial, index, stage = key
        gradient = None
        if stage < self._last_stage:
            if (serial, index, stage + 1) not in self._entry_gradients:
                return False
            gradient = self._entry_gradients.pop((serial, index, stage + 1))
        forward, version, leaves = self._forwards[key]
        run = self.runner.input_gradient if half else self.runner.backward
        names = self.runner.program.parameters[stage]
        with sums.collecting(names, leaves):
            entry_gradient = run(forward, gradient)
        if forward.second_half is None:
            sums.cover(names, work.share(index))
        work.batch_statistics.setdefault(index, []).extend(forward.recomputed_records())
        self.staleness.backward(stage, version)
        if stage > 0:
            self._entry_gradients[key] = entry_gradient
        if not half:
            del self._forwards[key]
        return True

    def _weight_gradients(self, key: tuple[int, int, int], work: Work, sums: GradientAccumulator) -> bool:
        _, index, stage = key
        forward, _, leaves = self._forwards.pop(key)
        if forward.second_half is None:
            return True
        names = self.runner.program.parameters[stage]
        with sums.collecting(names, leaves):
            self.runner.weight_gradients(forward)
        sums.cover(names, work.share(index))
        work.batch_statistics.setdefault(index, []).extend(forward.recomputed_records())
        return True

    def drop_carry(self) -> None:
        """As :meth:`Engine.drop_carry`."""
        self._forwards.clear()
        if self._carried is not None:
            self._carried.serial = -1
            self._carried.batch_statistics.clear()
        self._carried, self._carry = None, ()
        for stash in self._apart:
            stash.rotate()

    def collect_gradients(self) -> dict[str, Tensor]:
        """The window's gradients of all parameters that got one, by name."""
        gradients: dict[str, Tensor] = {}
        for sums in self._sums:
            for name in self._parameters:
                gradient = sums.get(name)
                if gradient is not None:
                    gradients[name] = gradients[name].add_(gradient) if name in gradients else gradient
            sums.clear()
        for stash in self._apart:
            stash.step_follows()
            stash.before_update(self._parameters)
            stash.collected(gradients)
        return gradients

    def stepped(self) -> None:
        """The optimizer has stepped."""
        self._updated = True
        for stash in self._apart:
            stash.stepped()

    def skipped(self) -> None:
        """As :meth:`Engine.skipped`."""
        for stash in self._apart:
            stash.flush()

    def settle(self) -> None:
        """Count the new version now; there are no replicas to bring up to date."""
        if self._updated:
            self._updated = False
            for stage in range(self._last_stage + 1):
                self.staleness.updated(stage)
        for stash in self._apart:
            stash.flush()

    def close(self) -> None:
        """Nothing to stop."""
