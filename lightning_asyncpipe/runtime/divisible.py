"""Which stages' backwards can be run in halves: tried out, not believed.

A hook on a tensor fires in both halves, activation checkpointing runs the forward again for each, a compiled block
computes everything at once whatever is asked for. Such stages run whole backwards; all others must give the gradients
of a whole backward to the last bit, or, where parts of a gradient are added up in another order, to its rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from lightning_asyncpipe._private import checkpoint_frames
from lightning_asyncpipe.runtime.buffers import preserved_buffers
from lightning_asyncpipe.runtime.gradients import preserved_gradients, take_gradients
from lightning_asyncpipe.runtime.program import StageProgram
from lightning_asyncpipe.runtime.stages import StageForward, StageRunner, StageTask
from lightning_asyncpipe.runtime.structure import tensors

_COMPILED = "CompiledFunction"
_ROUNDING = 8  # units in the last place that the largest entry of a gradient may be off


def divisible_stages(
    model: nn.Module,
    program: StageProgram,
    step: Callable[..., Any],
    task: StageTask,
    context: Callable[[], AbstractContextManager[Any]],
    loss: Callable[[Any], Tensor],
) -> frozenset[int]:
    """The stages whose backwards can be run in halves.

    Two forwards and backwards of each stage are run, one stage after the other. Gradients, buffers and the random
    state of steps are left as they were.

    Args:
        model: with all its parameters.
        program: its stages.
        step, context: as for :class:`StageRunner`.
        task: a micro-batch.
        loss: gives the loss from what the step returns.
    """
    runner = StageRunner(model, program, step, context)
    try:
        parameters = dict(model.named_parameters())
        with preserved_gradients(parameters.values()), preserved_buffers(model):
            return _try(runner, task, parameters, loss)
    finally:
        runner.close()


def _try(
    runner: StageRunner, task: StageTask, parameters: Mapping[str, Parameter], loss: Callable[[Any], Tensor]
) -> frozenset[int]:
    divisible = set()
    activation: Tensor | None = None
    last = runner.program.num_stages - 1
    for stage in range(last + 1):

        def forward(stage: int = stage, received: Tensor | None = activation) -> StageForward:
            if received is not None:
                received = received.detach().clone().requires_grad_(received.requires_grad)
            made = runner.forward(stage, task, received)
            if stage == last:
                made.root = loss(made.value)
            return made

        with _CheckpointWatch() as watch:
            first = forward()
        gradient = None if first.output is None else torch.ones_like(first.output)
        whole = [runner.backward(first, gradient), *_gradients(parameters)]
        again = watch.found or first.recomputed
        if not again and _same(whole, _in_halves(runner, forward(), gradient, parameters)):
            divisible.add(stage)
        activation = None if first.output is None else first.output.requires_grad_(first.requires_grad)
    return frozenset(divisible)


class _CheckpointWatch(TorchFunctionMode):
    """Notices activation checkpointing, also around functions that call no modules.

    What a stage computes from the zeros that skipped modules return is not part of its backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self.found and any(tensor.requires_grad for tensor in tensors((args, kwargs))):
            self.found = bool(checkpoint_frames())
        return func(*args, **(kwargs or {}))


def _in_halves(
    runner: StageRunner, forward: StageForward, gradient: Tensor | None, parameters: Mapping[str, Parameter]
) -> list[Tensor | None]:
    """The gradients by two halves; none at all where that fails or computes everything twice."""
    runner.in_halves = frozenset({forward.stage})
    try:
        entry = runner.input_gradient(forward, gradient)
        second = forward.second_half
        if second is not None and any(_COMPILED in name for name in second.operations):
            return []
        runner.weight_gradients(forward)
    except RuntimeError:  # such as a graph that cannot be walked in parts
        return []
    finally:
        gradients = _gradients(parameters)
        runner.in_halves = frozenset()
    return [entry, *gradients]


def _gradients(parameters: Mapping[str, Parameter]) -> list[Tensor | None]:
    found = take_gradients(parameters)
    return [found.get(name) for name in parameters]


def _same(whole: list[Tensor | None], halves: list[Tensor | None]) -> bool:
    if len(whole) != len(halves):
        return False
    for expected, made in zip(whole, halves, strict=True):
        if expected is None or made is None:
            if expected is not made:
                return False
            continue
        expected, made = expected.detach().to_dense(), made.detach().to_dense()
        if not torch.allclose(made, expected, 0.0, 0.0, equal_nan=True):
            allowed = _ROUNDING * torch.finfo(expected.dtype).eps * float(expected.abs().max())
            if not bool((made - expected).abs().max() <= allowed):
                return False
    return True
