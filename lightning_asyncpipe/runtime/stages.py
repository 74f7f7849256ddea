"""Runs one stage of the user's own step.

The step is called as on one device. Calls of submodules are intercepted: those before the stage return zeros, at the
entry the received activation takes the place of what was skipped, and at the exit an exception unwinds the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_asyncpipe._private import CallImpl, Interception, intercept, parameter_slots
from lightning_asyncpipe.errors import PipelineError
from lightning_asyncpipe.runtime.buffers import BufferRecord, RunningStatistics
from lightning_asyncpipe.runtime.calls import (
    CallPlan,
    ForwardRun,
    Recomputation,
    StageExit,
    make_plan,
)
from lightning_asyncpipe.runtime.halves import WeightGradients, input_gradient
from lightning_asyncpipe.runtime.hollow import hollow as hollow
from lightning_asyncpipe.runtime.hollow import is_hollow as is_hollow
from lightning_asyncpipe.runtime.program import StageProgram
from lightning_asyncpipe.runtime.randomness import RandomStreams, digest
from lightning_asyncpipe.runtime.shapes import SkippedCalls
from lightning_asyncpipe.runtime.weight_copies import WeightCopies

_START = digest("start")


_running: list[ForwardRun | Recomputation] = []


def within_stage() -> bool:
    """Whether the code that runs now belongs to the stage that is running, or to no stage at all.

    A stage also runs the code around the calls before it, on zeros: what that logs, say, is not to be believed.
    """
    active = _running[-1] if _running else None
    return not isinstance(active, ForwardRun) or (active.entered and active.captured is None)


@dataclass
class StageTask:
    """One micro-batch for the step.

    Attributes:
        arguments: positional arguments of the step, usually (batch, batch_idx).
        kwargs: keyword arguments of the step.
        key: of its random numbers: seed, step, micro-batch. The same on all stages.
        microbatch: its number in the batch.
    """

    arguments: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    key: tuple[int, ...] = (0,)
    microbatch: int = 0


@dataclass
class StageForward:
    """What a stage's forward leaves, for what follows and for its backward.

    Attributes:
        stage: the stage.
        task: the micro-batch.
        output: the activation for the next stage, detached; None on the last stage.
        requires_grad: whether a gradient can flow back through the output.
        value: what the step returned; on the last stage only.
        root: the tensor from which the backward starts; the caller sets it on the last stage, to a scalar.
        leaf: the received activation as a leaf of the graph; None on the first stage.
        buffer_records: what normalisation layers saw.
        second_half: of a backward that was begun with :meth:`StageRunner.input_gradient`.
        recomputed: whether the backward ran modules of the forward again.
    """

    stage: int
    task: StageTask
    output: Tensor | None = None
    requires_grad: bool = False
    value: Any = None
    root: Tensor | None = None
    leaf: Tensor | None = None
    buffer_records: list[BufferRecord] = field(default_factory=list)
    second_half: WeightGradients | None = None
    recomputed: bool = False
    _recomputed: list[BufferRecord] = field(default_factory=list)
    streams: dict[tuple[str, int], int] = field(default_factory=dict)
    _weights: Mapping[Parameter, Tensor] | None = None

    def recomputed_records(self) -> list[BufferRecord]:
        """What normalisation layers saw again, because the backward ran parts of the forward again; given out once."""
        records, self._recomputed = self._recomputed, []
        return records


class StageRunner:
    """Runs stages of a step, forwards and backwards, in any order.

    Calls of submodules are intercepted from now on until :meth:`close`; outside a forward or backward of this runner
    they pass through.

    Args:
        model: the module whose step it is; parameters of other stages may be hollow.
        program: what each stage does.
        step: usually ``model.training_step``.
        context: entered around each forward alone, for example autocast.
        statistics: staging of running statistics; made here if None, and then closed with the runner.
        grad: whether forwards record a graph; without, they run in whatever mode is on around them.
        copies: low-precision copies of weights that forwards share; None where there is no autocast.
        loss_scale: given the scalar from which a backward starts, the gradient that it starts with; 1 if None.

    Attributes:
        in_halves: the stages whose backwards can be run in two halves, see ``halves``; none to begin with.
    """

    def __init__(
        self,
        model: nn.Module,
        program: StageProgram,
        step: Callable[..., Any],
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        statistics: RunningStatistics | None = None,
        grad: bool = True,
        copies: WeightCopies | None = None,
        loss_scale: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.model = model
        self.program = program
        self.statistics = RunningStatistics(model) if statistics is None else statistics
        self._owns_statistics = statistics is None
        self._grad = grad
        self.skipped = SkippedCalls()
        self.random = RandomStreams(program.random, model)
        self.copies = copies
        self.in_halves: frozenset[int] = frozenset()
        self._step = step
        self._context = context
        self._loss_scale = loss_scale
        self._active: ForwardRun | Recomputation | None = None
        self._plans: dict[int, dict[str, list[CallPlan | None]]] = {}
        self._slots: dict[Tensor, list[tuple[Any, Any]]] = {}
        for module in model.modules():
            for container, key, parameter in parameter_slots(module):
                self._slots.setdefault(parameter, []).append((container, key))
        self._hosted: dict[int, set[int]] = {}
        self._interceptions: list[Interception] = []
        for name in program.modules:
            module = model.get_submodule(name)
            self._interceptions.append(intercept(module, self._around(name, module)))
        idle = {name.rpartition(".")[0] for name in program.unused} - {"", *program.modules}
        for name in sorted(idle) if program.num_stages > 1 else ():
            self._interceptions.append(intercept(model.get_submodule(name), self._guard(name)))

    def close(self) -> None:
        """Stop intercepting calls."""
        for interception in reversed(self._interceptions):
            interception.remove()
        if self._owns_statistics:
            self.statistics.close()

    def _around(self, name: str, module: nn.Module) -> Callable[[CallImpl], CallImpl]:
        def wrap(call: CallImpl) -> CallImpl:
            def intercepted(*args: Any, **kwargs: Any) -> Any:
                active = self._active
                if active is None:
                    return call(*args, **kwargs)
                return active.call(name, module, call, args, kwargs)

            return intercepted

        return wrap

    def _guard(self, name: str) -> Callable[[CallImpl], CallImpl]:
        """Let no stage call a module whose weights belong to none."""

        def wrap(call: CallImpl) -> CallImpl:
            def guarded(*args: Any, **kwargs: Any) -> Any:
                if isinstance(self._active, ForwardRun):
                    raise PipelineError(
                        f"the step called '{name}', which has parameters that it did not use when it was traced on the "
                        "first batch, so they belong to no stage. Use all modules in every step, for example with a "
                        "factor of zero in the loss."
                    )
                return call(*args, **kwargs)

            return guarded

        return wrap

    def forward(
        self,
        stage: int,
        task: StageTask,
        activation: Tensor | None = None,
        weights: Mapping[Parameter, Tensor] | None = None,
    ) -> StageForward:
        """Run one stage on one micro-batch.

        Args:
            stage: from 0.
            task: the micro-batch.
            activation: the output of the stage before; whether it requires a gradient says whether one is wanted. None
                for the first stage.
            weights: leaf tensors to use instead of parameters, here and in the backward of this forward; gradients then
                go to them.

        Raises:
            PipelineError: the step did not come past the calls where the stage begins or ends.
        """
        return self.execute(ForwardRun(self, StageForward(stage, task, _weights=weights), activation))

    def execute(self, run: ForwardRun) -> StageForward:
        """Run the step with calls going through `run`."""
        result = run.result
        task = result.task
        with self._action(run, task, _START, result._weights):
            self.statistics.begin()
            try:
                with torch.set_grad_enabled(self._grad), self._context(), self._sharing(result):
                    result.value = self._step(*task.arguments, **task.kwargs)
            except StageExit as signal:
                # The frames hold the step's variables and, in generators, hooks on saved tensors: free them now.
                signal.__traceback__ = None
            finally:
                result.buffer_records = self.statistics.end()
        run.finish()
        return result

    def backward(self, forward: StageForward, gradient: Tensor | None = None) -> Tensor | None:
        """Run the backward of a forward; parameters' gradients accumulate as ever.

        Args:
            forward: it is used up.
            gradient: of the stage's output; None on the last stage, or where none flows.

        Returns:
            The gradient of the received activation; None where there is none.
        """
        root, gradient, leaf = self._begin_backward(forward, gradient)
        if root is None:
            return None
        with self._backward_action(forward):
            torch.autograd.backward(root, gradient)
        return None if leaf is None else leaf.grad

    def input_gradient(self, forward: StageForward, gradient: Tensor | None = None) -> Tensor | None:
        """As :meth:`backward`, but leave what only the parameters need to :meth:`weight_gradients`.

        Where that cannot be told apart (see ``in_halves``) the whole backward is run.
        """
        if forward.stage not in self.in_halves:
            return self.backward(forward, gradient)
        root, gradient, leaf = self._begin_backward(forward, gradient)
        if root is None:
            return None
        if leaf is None or not leaf.requires_grad:
            forward.second_half = WeightGradients(whole=(root, gradient))
            return None
        with self._backward_action(forward):
            forward.second_half = input_gradient(root, gradient, leaf)
        return leaf.grad

    def weight_gradients(self, forward: StageForward) -> None:
        """Run the second half of a backward; parameters' gradients accumulate as ever."""
        second_half, forward.second_half = forward.second_half, None
        if second_half is not None:
            with self._backward_action(forward):
                second_half.run()

    def _begin_backward(
        self, forward: StageForward, gradient: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Where the backward starts (None: nowhere), with which gradient, and the received activation."""
        root, leaf = forward.root, forward.leaf
        forward.root = forward.leaf = None
        last = forward.stage == self.program.num_stages - 1
        if root is None or not root.requires_grad or (gradient is None and not last):
            return None, None, None
        if last and self._loss_scale is not None:
            gradient = self._loss_scale(root)
        return root, gradient, leaf

    @contextmanager
    def _backward_action(self, forward: StageForward) -> Iterator[None]:
        start = digest("backward", forward.stage)
        with self._action(Recomputation(self, forward), forward.task, start, forward._weights):
            self.statistics.begin(watch=False)
            try:
                yield
            finally:
                forward._recomputed = self.statistics.end()

    @contextmanager
    def _action(
        self,
        active: ForwardRun | Recomputation,
        task: StageTask,
        start: int,
        weights: Mapping[Parameter, Tensor] | None,
    ) -> Iterator[None]:
        if self._active is not None:
            raise PipelineError("a stage cannot run inside another one of the same runner")
        self.random.begin(task.key, start)
        try:
            with nullcontext() if not weights else self._substituted(weights):
                self._active = active
                _running.append(active)
                try:
                    yield
                finally:
                    _running.pop()
        finally:
            self._active = None
            self.random.end()

    @contextmanager
    def _substituted(self, weights: Mapping[Parameter, Tensor]) -> Iterator[None]:
        replaced: list[tuple[Any, Any, Parameter]] = []
        try:
            for parameter, leaf in weights.items():
                for container, key in self._slots.get(parameter, ()):
                    replaced.append((container, key, parameter))
                    container[key] = leaf
            yield
        finally:
            for container, key, parameter in replaced:
                container[key] = parameter

    def _sharing(self, result: StageForward) -> AbstractContextManager[None]:
        return nullcontext() if self.copies is None else self.copies.shared(result.stage, result._weights)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let calls pass through, as they do outside stages."""
        active, self._active = self._active, None
        try:
            with self.statistics.paused(), nullcontext() if self.copies is None else self.copies.paused():
                yield
        finally:
            self._active = active

    def has_weights(self, stage: int | None, module: nn.Module) -> bool:
        """Whether a stage has all parameters of a module; None: whether there are none."""
        if stage is None:
            return next(module.parameters(), None) is None
        if self.program.num_stages == 1:
            return True
        hosted = self._hosted.get(stage)
        if hosted is None:
            hosted = {id(self.model.get_parameter(name)) for name in self.program.parameters[stage]}
            self._hosted[stage] = hosted
        return all(id(parameter) in hosted for parameter in module.parameters())

    def plan(self, stage: int) -> dict[str, list[CallPlan | None]]:
        plan = self._plans.get(stage)
        if plan is None:
            plan = self._plans[stage] = make_plan(self.program, stage)
        return plan
