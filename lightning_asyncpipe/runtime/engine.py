"""One rank executes its actions.

The engine walks this device's part of a :class:`SegmentPlan` from front to back. Every action is a few lines: take what
it needs from the transport, run a stage, send what came out. What the numbers mean (losses, records, batches) is the
business of the :class:`Work` that it is given; when weights move is :class:`WeightExchange`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_asyncpipe.errors import ScheduleError
from lightning_asyncpipe.plan.actions import Action, Kind
from lightning_asyncpipe.plan.placement import Placement
from lightning_asyncpipe.plan.schedule import Planner, SegmentPlan, SegmentSpec
from lightning_asyncpipe.plan.validator import validate
from lightning_asyncpipe.runtime.buffers import BufferRecord
from lightning_asyncpipe.runtime.channels import MessageKey, Transport
from lightning_asyncpipe.runtime.exchange import WeightExchange
from lightning_asyncpipe.runtime.stages import StageForward, StageRunner, StageTask
from lightning_asyncpipe.runtime.staleness import StalenessCounter
from lightning_asyncpipe.runtime.standpoint import Standpoints, explained, mismatch
from lightning_asyncpipe.runtime.stash import WeightStash
from lightning_asyncpipe.runtime.timeline import Ledger, Spent

ACTIVATION, GRADIENT = 0, 1


@dataclass
class Work:
    """One Lightning batch on its way through the pipelines.

    Attributes:
        tasks: the arguments of the step for each micro-batch.
        fingerprints: one per micro-batch, of its input.
        early: entered around each forward that runs before the batch's own segment.
        finish: called with (micro-batch, value of the step) on the last stage; returns the scalar from which the
            backward starts.
        passed: called with (micro-batch, stage) after each forward.
        recorded: called in the batch's own segment once all its forwards on this rank have run.
        step: number of the optimizer step that the batch belongs to, for messages.
        shares: of each micro-batch in the gradient of its window; none if nobody asks.
        serial: number of the batch in messages; given by the engine when the batch starts.
        batch_statistics: what running statistics (of a BatchNorm) saw, by micro-batch.
    """

    tasks: Sequence[StageTask]
    fingerprints: Sequence[int]
    finish: Callable[[int, Any], Tensor]
    early: Callable[[], AbstractContextManager[Any]] = nullcontext
    passed: Callable[[int, int], None] = lambda microbatch, stage: None
    recorded: Callable[[], None] = lambda: None
    step: int = 0
    shares: Sequence[float] = ()
    serial: int = -1
    batch_statistics: dict[int, list[BufferRecord]] = field(default_factory=dict)

    def release(self) -> None:
        """Let go of the data, and of the callables, which refer back to this: reference counts then free the batch."""
        self.tasks = ()
        self.finish = lambda microbatch, value: value
        self.passed = lambda microbatch, stage: None
        self.recorded = lambda: None

    @property
    def digest(self) -> int:
        """One number for the data of all micro-batches."""
        digest = 1
        for fingerprint in self.fingerprints:
            digest = (digest * 1_000_003 ^ fingerprint) & ((1 << 63) - 1)
        return digest

    def share(self, microbatch: int) -> float:
        """Of a micro-batch in the gradient of its window."""
        return self.shares[microbatch] if self.shares else 0.0


@dataclass
class _InFlight:
    """A micro-batch's stay in one stage, from its forward to its backward."""

    forward: StageForward
    version: int
    leaves: dict[Any, Tensor] | None


class Engine:
    """Executes this rank's share of each segment.

    Args:
        rank: global rank; ``rank % num_stages`` is the device within the replica.
        placement: which device hosts what.
        planner: makes the segment plans, the same on every rank.
        runner: runs stages of the user's step.
        transport: carries activations and gradients.
        weights: gathers gradients at their owners and sends new weights back.
        staleness: counts and bounds the versions that forwards and backwards met.
        stash: gives early forwards a second set of weights; None lets them run on the live ones.
        standpoints: tell why ranks wait for each other; None where there is one rank.
    """

    def __init__(
        self,
        rank: int,
        placement: Placement,
        planner: Planner,
        runner: StageRunner,
        transport: Transport,
        weights: WeightExchange,
        staleness: StalenessCounter,
        stash: WeightStash | None = None,
        standpoints: Standpoints | None = None,
    ) -> None:
        self.rank = rank
        self.device = rank % placement.num_stages
        self.replica = rank // placement.num_stages
        self.placement = placement
        self.planner = planner
        self.runner = runner
        self.transport = transport
        self.weights = weights
        self.staleness = staleness
        self.stash = stash
        self.standpoints = standpoints
        self.ledger = Ledger()
        self._serial = 0
        self._carried: Work | None = None
        self._carry: tuple[int, ...] = ()
        self._flight: dict[tuple[int, int, int], _InFlight] = {}
        self._leaving: dict[tuple[int, int, int], Tensor | None] = {}
        self._unread: set[MessageKey] = set()
        self._incoming: dict[int, tuple[SegmentPlan, dict[int, list[Action | MessageKey]]]] = {}
        self._handlers: dict[Kind, Callable[[Action, Work, bool], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT_GRAD: self._backward,
            Kind.WEIGHT_GRAD: self._weight_gradients,
            Kind.SEND_ACTIVATION: self._send_activation,
            Kind.SEND_GRADIENT: self._send_gradient,
            Kind.REDUCE: lambda action, work, stale: self.weights.reduce(action.stage, work.serial),
            Kind.UPDATE: lambda action, work, stale: self._update(action.stage),
        }

    def run(self, current: Work, upcoming: Work | None, steps: bool) -> SegmentPlan:
        """Run all that is left of `current`, and what the plan starts early of `upcoming`.

        Args:
            current: the batch of this segment; the one given as `upcoming` last time, if any was.
            upcoming: the next batch, None to flush the pipelines.
            steps: whether an optimizer step follows.
        """
        if self._carried is not None and self._carried is not current:
            raise ScheduleError("the batch given is not the one whose first forwards already ran; drop the carry first")
        for work in (current, upcoming):
            if work is not None and work.serial < 0:
                work.serial, self._serial = self._serial, self._serial + 1
        plan = self.planner.segment(
            SegmentSpec(
                microbatches=len(current.tasks),
                ahead=0 if upcoming is None else len(upcoming.tasks),
                carried=self._carry,
                updated=self.weights.replicas_outdated,
                steps=steps,
            )
        )
        if self.standpoints is not None:
            self.standpoints.train(current.step, len(current.tasks), plan.spec.ahead, current.digest)
        self._post_receives(plan, current, upcoming)
        if plan.spec.updated:
            self.weights.publish(current.serial)
        self._execute(plan, current, upcoming)
        self.staleness.close_segment(plan)
        self._carried, self._carry = (upcoming, plan.carry) if any(plan.carry) else (None, ())
        if self.stash is not None:
            self.stash.rotate()
        if self.runner.copies is not None:
            self.runner.copies.clear()
        self.ledger.tick()
        return plan

    def _execute(self, plan: SegmentPlan, current: Work, upcoming: Work | None) -> None:
        last = self._last_record(plan)
        if last < 0:
            current.recorded()
        for position, action in enumerate(plan.actions[self.device]):
            handler = self._handlers.get(action.kind)
            if handler is not None:
                work = upcoming if action.ahead else current
                assert work is not None
                handler(action, work, action.ahead and plan.spec.steps)
            if position == last:
                current.recorded()

    def _last_record(self, plan: SegmentPlan) -> int:
        """Where this device runs a forward of the segment's own batch for the last time, -1 if it runs none."""
        runs = [
            position
            for position, action in enumerate(plan.actions[self.device])
            if action.kind is Kind.FORWARD and not action.ahead
        ]
        return runs[-1] if runs else -1

    def drop_carry(self) -> None:
        """Flush: forget all early forwards; their batch starts anew in the next segment."""
        with self._receiving():
            for key in sorted(self._unread):
                self.transport.take(key)
        self._unread.clear()
        self._flight.clear()
        if self._carried is not None:
            self._carried.serial = -1
            self._carried.batch_statistics.clear()
        self._carried, self._carry = None, ()
        if self.stash is not None:
            self.stash.rotate()

    def collect_gradients(self) -> dict[str, Tensor]:
        """The window's gradients of the parameters that this rank owns, by name; waits for the other hosts."""
        if self.stash is not None:
            self.stash.step_follows()
        with self._receiving(), self.ledger.counting(Spent.REDUCTION):
            gradients = self.weights.collect()
        if self.stash is not None:
            self.stash.collected(gradients)
        return gradients

    def stepped(self) -> None:
        """The optimizer has stepped."""
        if self.stash is not None:
            self.stash.stepped()
        self.weights.stepped()

    def skipped(self) -> None:
        """The optimizer has skipped its step, on every rank: no weight has changed, and no update is to go by."""
        if self.stash is not None:
            self.stash.flush()

    def settle(self) -> None:
        """Bring every replica of every stage up to date now; every rank has to call it at the same point."""
        if self.standpoints is not None:
            self.standpoints.meet("saves, or ends its training")
        if self.weights.replicas_outdated:
            with self._receiving():
                # A number that no batch has: weights sent here are never taken for those that a batch begins with.
                self.weights.settle(-1 - self._serial)
            self._serial += 1
            if self.runner.copies is not None:
                self.runner.copies.clear()
            for stage in self.placement.hosted(self.device):
                self.staleness.updated(stage)
        if self.stash is not None:
            self.stash.flush()

    def close(self) -> None:
        """Stop what runs in the background."""
        self.transport.close()
        if self.standpoints is not None:
            self.standpoints.close()

    # Messages

    def _post_receives(self, plan: SegmentPlan, current: Work, upcoming: Work | None) -> None:
        known = self._incoming.get(id(plan))
        if known is None:
            validate(self.placement, [plan], self.planner.max_in_flight)
            known = (plan, self._incoming_of(plan))
            self._incoming[id(plan)] = known
        for peer, expected in known[1].items():
            keys = []
            for item in expected:
                if isinstance(item, MessageKey):
                    keys.append(item._replace(batch=current.serial))
                    continue
                work = upcoming if item.ahead else current
                assert work is not None
                key = self._key_of_send(item, work)
                self._unread.add(key)
                keys.append(key)
            self.transport.expect(peer, keys)

    def _incoming_of(self, plan: SegmentPlan) -> dict[int, list[Action | MessageKey]]:
        """What each other rank sends to this one in a segment, in the order in which it does."""
        incoming: dict[int, list[Action | MessageKey]] = {}
        for peer in self.weights.peers(self.replica):
            device = peer % self.placement.num_stages
            same_replica = peer // self.placement.num_stages == self.replica
            items: list[Action | MessageKey] = []
            if plan.spec.updated:
                items += self.weights.published_by(peer)
            reduced: set[int] = set()
            for action in plan.actions[device]:
                if action.kind is Kind.REDUCE:
                    items += self.weights.reduced_by(peer, action.stage, reduced)
                elif (
                    same_replica
                    and action.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
                    and action.peer == self.device
                ):
                    items.append(action)
            if items:
                incoming[peer] = items
        return incoming

    def _receiving(self) -> AbstractContextManager[None]:
        return explained(self.standpoints)

    @staticmethod
    def _key_of_send(action: Action, work: Work) -> MessageKey:
        kind, stage = (
            (ACTIVATION, action.stage + 1) if action.kind is Kind.SEND_ACTIVATION else (GRADIENT, action.stage - 1)
        )
        return MessageKey(kind, stage, action.pipeline, work.serial, action.microbatch)

    def _take(self, kind: int, action: Action, work: Work) -> Any:
        key = MessageKey(kind, action.stage, action.pipeline, work.serial, action.microbatch)
        started = time.perf_counter()
        with self._receiving():
            message = self.transport.take(key)
        self.ledger.add(Spent.ACTIVATION if kind == ACTIVATION else Spent.GRADIENT, started, action)
        self._unread.discard(key)
        return message

    def _global(self, device: int) -> int:
        return self.replica * self.placement.num_stages + device

    # Actions

    def _forward(self, action: Action, work: Work, stale: bool) -> None:
        stage, index = action.stage, action.microbatch
        activation = None
        if stage > 0:
            message = self._take(ACTIVATION, action, work)
            self._compare_data(action, work, message.fingerprint)
            activation = message.tensor
            if activation is not None:
                activation.requires_grad_(message.requires_grad)
        leaves = self.stash.leaves(stage, self.weights.accumulator) if stale and self.stash is not None else None
        started = time.perf_counter()
        with work.early() if action.ahead else nullcontext():
            forward = self.runner.forward(stage, work.tasks[index], activation, leaves)
            if stage == self.placement.num_stages - 1:
                forward.root = work.finish(index, forward.value)
            work.passed(index, stage)
        self.ledger.add(Spent.FORWARD, started, action)
        work.batch_statistics.setdefault(index, []).extend(forward.buffer_records)
        version = self.staleness.forward(stage)
        self._flight[work.serial, index, stage] = _InFlight(forward, version, leaves)

    def _backward(self, action: Action, work: Work, stale: bool) -> None:
        stage, index = action.stage, action.microbatch
        gradient = None
        if stage < self.placement.num_stages - 1:
            gradient = self._take(GRADIENT, action, work).tensor
        key = work.serial, index, stage
        held = self._flight[key]
        started = time.perf_counter()
        names = self.runner.program.parameters[stage]
        with self.weights.accumulator.collecting(names, held.leaves):
            if action.kind is Kind.INPUT_GRAD:
                entry_gradient = self.runner.input_gradient(held.forward, gradient)
            else:
                entry_gradient = self.runner.backward(held.forward, gradient)
        if held.forward.second_half is None:
            self.weights.accumulator.cover(names, work.share(index))
        self.ledger.add(Spent.BACKWARD, started, action)
        work.batch_statistics.setdefault(index, []).extend(held.forward.recomputed_records())
        self.staleness.backward(stage, held.version)
        if stage > 0:
            self._leaving[key] = entry_gradient
        if action.kind is not Kind.INPUT_GRAD:
            del self._flight[key]

    def _weight_gradients(self, action: Action, work: Work, stale: bool) -> None:
        stage, index = action.stage, action.microbatch
        held = self._flight.pop((work.serial, index, stage))
        if held.forward.second_half is None:
            return
        started = time.perf_counter()
        names = self.runner.program.parameters[stage]
        with self.weights.accumulator.collecting(names, held.leaves):
            self.runner.weight_gradients(held.forward)
        self.weights.accumulator.cover(names, work.share(index))
        self.ledger.add(Spent.WEIGHT_GRADIENT, started, action)
        work.batch_statistics.setdefault(index, []).extend(held.forward.recomputed_records())

    def _send_activation(self, action: Action, work: Work, stale: bool) -> None:
        forward = self._flight[work.serial, action.microbatch, action.stage].forward
        assert forward.output is not None
        self.transport.send(
            self._global(action.peer),
            self._key_of_send(action, work),
            forward.output.detach().requires_grad_(forward.requires_grad),
            work.fingerprints[action.microbatch],
        )

    def _send_gradient(self, action: Action, work: Work, stale: bool) -> None:
        gradient = self._leaving.pop((work.serial, action.microbatch, action.stage))
        self.transport.send(self._global(action.peer), self._key_of_send(action, work), gradient)

    def _update(self, stage: int) -> None:
        with self._receiving(), self.ledger.counting(Spent.WEIGHTS):
            self.weights.update(stage)
        if self.runner.copies is not None:
            self.runner.copies.forget(stage)
        self.staleness.updated(stage)

    def _compare_data(self, action: Action, work: Work, theirs: int) -> None:
        ours = work.fingerprints[action.microbatch]
        if theirs == ours:
            return
        sender = self._global(self.placement.device(action.pipeline, action.stage - 1))
        ranks = min(sender, self.rank), max(sender, self.rank)
        raise mismatch(work.step, ranks, f"were given different data for micro-batch {action.microbatch}")
