"""Runs forward-only plans: one rank of several, or one process for all devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from lightning_asyncpipe.plan.forwards import ForwardPlan, plan_forwards
from lightning_asyncpipe.runtime.channels import MessageKey, Transport
from lightning_asyncpipe.runtime.stages import StageForward, StageRunner, StageTask
from lightning_asyncpipe.runtime.standpoint import Standpoints, explained, mismatch

EVALUATION = 4
"""The kind of the messages; 0 to 3 are those of training."""


@dataclass(eq=False)
class Passage:
    """One batch on its way through stages.

    Attributes:
        runner: runs the stages.
        route: the device of each stage.
        task: the arguments of the step.
        fingerprint: of the batch, the same on all ranks of a replica.
        passed: called with what each stage left that ran in this process.
        number: of the batch, for messages about it.
        serial: number in messages; given by the executor.
        progress: stages that have run, on whatever device.
    """

    runner: StageRunner
    route: tuple[int, ...]
    task: StageTask
    fingerprint: int
    passed: Callable[[StageForward], None]
    number: int = 0
    serial: int = -1
    progress: int = 0
    activation: Tensor | None = field(default=None, repr=False)


class ForwardExecutor(Protocol):
    """What runs passages."""

    def run(self, window: Sequence[Passage], needed: int) -> None:
        """Run until the first `needed` passages are done.

        Args:
            window: all batches that may be worked on, in order, those begun before first; the same on every rank.
            needed: how many of them have to be done.
        """


def _planned(devices: int, window: Sequence[Passage], needed: int) -> ForwardPlan:
    return plan_forwards(devices, tuple(p.route for p in window), tuple(p.progress for p in window), needed)


class ForwardEngine:
    """Runs this rank's share.

    Args:
        rank: global rank.
        num_devices: devices of a replica.
        transport: carries the activations.
        standpoints: tell why ranks wait for each other; None where there is one rank.
    """

    def __init__(self, rank: int, num_devices: int, transport: Transport, standpoints: Standpoints | None) -> None:
        self._device = rank % num_devices
        self._first = rank - self._device
        self._num_devices = num_devices
        self._transport = transport
        self._standpoints = standpoints
        self._serial = 0

    def run(self, window: Sequence[Passage], needed: int) -> None:
        """As :meth:`ForwardExecutor.run`."""
        for passage in window:
            if passage.serial < 0:
                passage.serial, self._serial = self._serial, self._serial + 1
        plan = _planned(self._num_devices, window, needed)
        self._post_receives(plan, window)
        for batch, stage in plan.turns[self._device]:
            self._forward(window[batch], stage)
        for passage, progress in zip(window, plan.progress, strict=True):
            passage.progress = progress

    def _post_receives(self, plan: ForwardPlan, window: Sequence[Passage]) -> None:
        for peer, turns in enumerate(plan.turns):
            if peer == self._device:
                continue
            keys = [
                self._key(window[batch], stage + 1)
                for batch, stage in turns
                if stage + 1 < len(window[batch].route) and window[batch].route[stage + 1] == self._device
            ]
            if keys:
                self._transport.expect(self._first + peer, keys)

    def _forward(self, passage: Passage, stage: int) -> None:
        activation, passage.activation = passage.activation, None
        if stage > 0 and passage.route[stage - 1] != self._device:
            activation = self._received(passage, stage)
        forward = passage.runner.forward(stage, passage.task, activation)
        passage.passed(forward)
        if stage + 1 == len(passage.route):
            return
        following = passage.route[stage + 1]
        if following == self._device:
            passage.activation = forward.output
        else:
            self._transport.send(
                self._first + following, self._key(passage, stage + 1), forward.output, passage.fingerprint
            )

    def _received(self, passage: Passage, stage: int) -> Tensor:
        with explained(self._standpoints):
            message = self._transport.take(self._key(passage, stage))
        if message.fingerprint != passage.fingerprint:
            sender = self._first + passage.route[stage - 1]
            ranks = sorted((sender, self._first + self._device))
            raise mismatch(passage.number, (ranks[0], ranks[1]), "were given different data to evaluate")
        assert message.tensor is not None
        return message.tensor

    @staticmethod
    def _key(passage: Passage, stage: int) -> MessageKey:
        return MessageKey(EVALUATION, stage, 0, passage.serial, 0)


class ForwardOracle:
    """Runs the share of all devices in one process.

    Args:
        num_devices: devices that are emulated.
    """

    def __init__(self, num_devices: int) -> None:
        self._num_devices = num_devices

    def run(self, window: Sequence[Passage], needed: int) -> None:
        """As :meth:`ForwardExecutor.run`."""
        plan = _planned(self._num_devices, window, needed)
        for batch, stage in plan.sequence:
            passage = window[batch]
            activation = None if stage == 0 else passage.activation
            forward = passage.runner.forward(stage, passage.task, activation)
            passage.activation = None if forward.output is None else forward.output.clone()
            passage.passed(forward)
        for passage, progress in zip(window, plan.progress, strict=True):
            passage.progress = progress
