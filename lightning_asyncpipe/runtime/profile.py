"""What each unit of a step costs on this device: times, bytes kept for the backward, and messages.

Every unit is run as a stage of its own, on what the units before it made, under the precision's own context. Its
forward is timed from where the received tensor comes in to where the result goes out, so that what a stage skips on its
way is told apart. Units that do the same operations on the same shapes are timed once.

Gradients go to stand-ins for the parameters, so the parameters, their hooks and their gradients are not touched, and a
parameter without memory needs some only while its unit is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_asyncpipe._private import storage_key
from lightning_asyncpipe.plan.profile import Boundary, ModelProfile, Unit, Weights
from lightning_asyncpipe.runtime.buffers import preserved_buffers
from lightning_asyncpipe.runtime.calls import ForwardRun
from lightning_asyncpipe.runtime.candidates import Candidates
from lightning_asyncpipe.runtime.gradients import accumulation_dtype
from lightning_asyncpipe.runtime.hollow import is_hollow
from lightning_asyncpipe.runtime.program import StageProgram, build_program
from lightning_asyncpipe.runtime.proof import loss_of
from lightning_asyncpipe.runtime.stages import StageForward, StageRunner, StageTask
from lightning_asyncpipe.runtime.structure import preserved_attributes, tensors
from lightning_asyncpipe.runtime.weight_copies import WeightCopies

SECONDS = 2.0
"""How long measuring should take, beside one run of each unit and the fewest repeats."""

_REPEATS = (3, 15)
"""The fewest and the most repeats of a unit, after the first, which does not count."""

_OPERATIONS = 1e9

_PLAIN = (float, bool, str)


@dataclass
class _Measured:
    """Seconds, and bytes that are kept: by the unit itself, and whether also what came in and what goes out.

    ``copied``: of each of its parameters, bytes of the copies that micro-batches share.
    """

    forward: float
    input_grad: float
    weight_grad: float
    entry: float
    saved: int
    keeps_input: bool
    keeps_output: bool
    copied: tuple[int, ...]


def now(device: torch.device) -> float:
    """Seconds of a clock, once a device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


class _Stopwatch(ForwardRun):
    """A run of a stage that notes when it begins, receives its activation, and ends."""

    def __init__(self, runner: StageRunner, result: StageForward, activation: Tensor | None, device: torch.device):
        super().__init__(runner, result, activation)
        self._device = device
        self.began = self.received = self.ended = 0.0

    def start(self) -> None:
        self.began = self.received = now(self._device)

    def _enter(self, *args: Any, **kwargs: Any) -> Tensor:
        leaf = super()._enter(*args, **kwargs)
        self.received = now(self._device)
        return leaf

    def _exit(self) -> None:
        self.ended = now(self._device)
        super()._exit()

    def finish(self) -> None:
        if not self.ended:
            self.ended = now(self._device)
        super().finish()


class _Profiler:
    def __init__(
        self,
        candidates: Candidates,
        model: nn.Module,
        step: Callable[..., Any],
        task: StageTask,
        context: Callable[[], AbstractContextManager[Any]],
        seconds: float,
        timed: bool,
        copies: Callable[[StageProgram], WeightCopies | None],
    ) -> None:
        self.candidates = candidates
        self.model = model
        self.step = step
        self.task = task
        self.context = context
        self.seconds = seconds
        self.repeats = _REPEATS if timed else (1, 1)
        self.program: StageProgram = build_program(candidates, candidates.cuts)
        self.parameters: dict[str, Parameter] = dict(model.named_parameters())
        first = next(iter(self.parameters.values()), None)
        self.device = torch.device("cpu") if first is None else first.device
        self.watch: _Stopwatch | None = None
        self.copies = copies(self.program)

    @property
    def count(self) -> int:
        return self.program.num_stages

    def run(self) -> tuple[list[_Measured], list[Boundary]]:
        signatures = [self._signature(unit) for unit in range(self.count)]
        alone = len(set(signatures[:-1])) + 1
        known: dict[Hashable, tuple[_Measured, Tensor | None]] = {}
        entries: dict[int, float] = {}
        measured: list[_Measured] = []
        boundaries: list[Boundary] = []
        output: Tensor | None = None
        runner = StageRunner(self.model, self.program, self._timed_step, self.context, copies=self.copies)
        try:
            for unit, key in enumerate(signatures):
                # The last one is measured in any case: what a stage skips on its way is longest there.
                if key not in known or unit == self.count - 1:
                    known[key] = self._measure(runner, unit, output, self.seconds / alone)
                    if self.copies is not None:
                        self.copies.clear()
                    entries[unit] = known[key][0].entry
                found, output = known[key]
                measured.append(found)
                if unit < self.count - 1:
                    assert output is not None
                    dtype = str(output.dtype).removeprefix("torch.")
                    boundaries.append(
                        Boundary(output.nbytes, dtype, tuple(output.shape), gradient=output.requires_grad)
                    )
        finally:
            runner.close()
            self.watch = None  # it holds weights
        return self._with_entries(measured, entries), boundaries

    # One unit

    def _timed_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.watch is not None:
            self.watch.start()
        return self.step(*args, **kwargs)

    def _stand_ins(self, unit: int) -> dict[Parameter, Tensor]:
        """Leaf tensors for the parameters of a unit: the same memory, or some where there is none."""
        found: dict[Parameter, Tensor] = {}
        for name in self.program.parameters[unit]:
            parameter = self.parameters[name]
            values = parameter.detach()
            if is_hollow(parameter):
                values = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                values = values.normal_(std=0.02) if values.is_floating_point() else values.zero_()
            found[parameter] = values.requires_grad_(parameter.requires_grad)
        return found

    def _forward(
        self, runner: StageRunner, unit: int, activation: Tensor | None, weights: dict[Parameter, Tensor]
    ) -> StageForward:
        result = StageForward(unit, self.task, _weights=weights)
        self.watch = _Stopwatch(runner, result, activation, self.device)
        forward = runner.execute(self.watch)
        if unit == self.count - 1:
            forward.root = loss_of(forward.value)
        return forward

    def _measure(
        self, runner: StageRunner, unit: int, activation: Tensor | None, seconds: float
    ) -> tuple[_Measured, Tensor | None]:
        """What a unit costs, and what it gives to the next one."""
        begin = time.perf_counter()
        weights = self._stand_ins(unit)
        forward = self._forward(runner, unit, activation, weights)  # what it skips is worked out in the first run
        output = None if forward.output is None else forward.output.requires_grad_(forward.requires_grad)
        del forward
        kept = self._kept(runner, unit, activation, weights)
        fewest, most = self.repeats
        rows: list[tuple[float, float, float, float]] = []
        while len(rows) < fewest or (len(rows) < most and time.perf_counter() - begin < seconds):
            rows.append(self._repeat(runner, unit, activation, weights))
        forwards, backwards, inputs, entries = (median(column) for column in zip(*rows, strict=True))
        inputs = min(inputs, backwards)
        return _Measured(forwards, inputs, backwards - inputs, entries, *kept), output

    def _repeat(
        self, runner: StageRunner, unit: int, activation: Tensor | None, weights: dict[Parameter, Tensor]
    ) -> tuple[float, float, float, float]:
        """Seconds of the forward, of the backward, of the input's gradient alone, and until the activation comes in."""
        forward = self._forward(runner, unit, activation, weights)
        watch = self.watch
        assert watch is not None
        root, leaf, gradient = forward.root, forward.leaf, None
        inputs = backward = 0.0
        if root is not None and root.requires_grad:
            if unit < self.count - 1:
                gradient = torch.ones_like(root)
            if leaf is not None and leaf.requires_grad:
                begin = now(self.device)
                torch.autograd.grad(root, leaf, gradient, retain_graph=True, allow_unused=True)
                inputs = now(self.device) - begin
            begin = now(self.device)
            runner.backward(forward, gradient)
            backward = now(self.device) - begin
        for weight in weights.values():
            weight.grad = None
        return watch.ended - watch.received, backward, inputs, watch.received - watch.began

    def _kept(
        self, runner: StageRunner, unit: int, activation: Tensor | None, weights: dict[Parameter, Tensor]
    ) -> tuple[int, bool, bool, tuple[int, ...]]:
        """Bytes kept for the backward, whether what came in and what goes out is kept, and bytes of shared copies."""
        storages: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: Tensor) -> Tensor:
            key = storage_key(tensor)
            if key is not None:
                storages[key] = tensor.untyped_storage()
            return tensor.detach()  # with its graph it would hold itself for ever

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            forward = self._forward(runner, unit, activation, weights)
        shared = [[] if self.copies is None else self.copies.of(weight) for weight in weights.values()]
        foreign = [*self.parameters.values(), *weights.values(), *self.model.buffers(), *tensors(self.task.arguments)]
        foreign += [copy for copies in shared for copy in copies]
        ends = [storage_key(t) if t is not None else None for t in (forward.leaf, forward.output)]
        keeps = [key is not None and key in storages for key in ends]
        for key in {*map(storage_key, foreign), *ends}:
            if key is not None:
                storages.pop(key, None)
        copied = tuple(sum(copy.nbytes for copy in copies) for copies in shared)
        return sum(storage.nbytes() for storage in storages.values()), keeps[0], keeps[1], copied

    # All of them

    def _signature(self, unit: int) -> Hashable:
        """What units with the same times have in common: operations, shapes, and the settings of their modules."""
        trace, cuts = self.candidates.trace, self.candidates.cuts
        begin = cuts[unit - 1].time if unit else -1
        end = cuts[unit].time if unit < len(cuts) else trace.end
        values = trace.values
        operations = tuple(
            (
                operation.name,
                tuple((values[v].shape, values[v].dtype) if v >= 0 else None for v in operation.inputs),
                tuple((values[v].shape, values[v].dtype) for v in operation.outputs),
            )
            for operation in trace.operations
            if begin < operation.time <= end
        )
        modules = tuple(
            _settings(self.model.get_submodule(call.key.name)) for call in trace.calls if begin < call.begin <= end
        )
        trained = tuple(self.parameters[name].requires_grad for name in self.program.parameters[unit])
        return operations, modules, trained, unit == 0

    def _with_entries(self, measured: list[_Measured], entries: dict[int, float]) -> list[_Measured]:
        """Times until a unit begins grow with what lies before it; between those that were measured, evenly."""
        known = sorted(entries.items())
        result = []
        for unit, found in enumerate(measured):
            low = max((entry for entry in known if entry[0] <= unit), default=known[0])
            high = min((entry for entry in known if entry[0] >= unit), default=known[-1])
            share = (unit - low[0]) / (high[0] - low[0]) if high[0] > low[0] else 0.0
            entry = low[1] + share * (high[1] - low[1])
            result.append(replace(found, entry=entry if unit else 0.0))
        return result


def _settings(module: nn.Module) -> Hashable:
    """The class of a module and its attributes that are plain values: a rate, a mode, a switch."""
    plain = ((name, value) for name, value in vars(module).items() if type(value) in _PLAIN)
    return type(module).__qualname__, tuple(sorted(plain, key=lambda item: item[0]))


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Buffers and attributes of a model are afterwards what they were."""
    with ExitStack() as stack:
        stack.enter_context(preserved_attributes(model))
        stack.enter_context(preserved_buffers(model))
        yield


def profile_model(
    candidates: Candidates,
    model: nn.Module,
    step: Callable[..., Any],
    task: StageTask,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    *,
    state_bytes: float = 8.0,
    step_seconds: float = 0.0,
    samples: int = 1,
    seconds: float = SECONDS,
    timed: bool = True,
    copies: Callable[[StageProgram], WeightCopies | None] = lambda program: None,
    gain_bytes: Callable[[str], int] = lambda name: 0,
) -> ModelProfile:
    """Measure all units of a step on this device.

    Parameters, gradients, buffers, attributes and random states are afterwards what they were; what the step logs and
    tells metrics is the caller's affair. Parameters without memory get random values while they are needed.

    Args:
        candidates: all places where the step can be cut; a unit is what lies between two of them.
        model: with all its parameters, hollow ones included.
        step: as for :class:`StageRunner`.
        task: one micro-batch.
        context: as for :class:`StageRunner`.
        state_bytes: bytes of optimizer state for each element of a trained parameter.
        step_seconds: what the optimizer takes for one byte of weights.
        samples: in the micro-batch.
        seconds: how long measuring should take.
        timed: False: count the operations of the trace instead of measuring times, so that the same model and
            micro-batch give the same profile everywhere; a second stands for a billion of them.
        copies: makes what shares low-precision copies of weights among micro-batches; None where nothing does.
        gain_bytes: bytes of what is kept of a trained parameter's preconditioner, by name.

    Returns:
        The profile, but for the link between devices. Units that do the same operations on
        the same shapes are alike.
    """
    profiler = _Profiler(candidates, model, step, task, context, seconds, timed, copies)
    with _undisturbed(model):
        measured, boundaries = profiler.run()
    if not timed:
        counted = [cost / _OPERATIONS for cost in candidates.costs()]
        measured = [
            replace(m, forward=c, input_grad=c, weight_grad=c, entry=0.0)
            for m, c in zip(measured, counted, strict=True)
        ]
    names = list(profiler.parameters)
    index = {name: i for i, name in enumerate(names)}
    cuts = candidates.cuts
    begins = [_first_call(candidates), *(cut.begins for cut in cuts)]
    units = tuple(
        Unit(
            name,
            found.forward,
            found.input_grad,
            found.weight_grad,
            found.entry,
            found.saved,
            tuple(index[parameter] for parameter in parameters),
        )
        for name, found, parameters in zip(begins, measured, profiler.program.parameters, strict=True)
    )
    kept = [a.keeps_output or b.keeps_input for a, b in pairwise(measured)]
    copied: dict[str, int] = {}
    for found, parameters in zip(measured, profiler.program.parameters, strict=True):
        for name, nbytes in zip(parameters, found.copied, strict=True):
            copied[name] = max(nbytes, copied.get(name, 0))
    weights = tuple(
        _weights(name, profiler.parameters[name], state_bytes, copied.get(name, 0), gain_bytes) for name in names
    )
    return ModelProfile(
        units,
        tuple(replace(boundary, kept=keep) for boundary, keep in zip(boundaries, kept, strict=True)),
        weights,
        step_seconds=step_seconds,
        samples=samples,
    )


def _first_call(candidates: Candidates) -> str:
    liveness = candidates.liveness
    calls = candidates.trace.calls
    return next((c.key.name for i, c in enumerate(calls) if liveness.unit[i] == i), "") or "the step"


def _weights(
    name: str, parameter: Parameter, state_bytes: float, copied: int, gain_bytes: Callable[[str], int]
) -> Weights:
    numel, dtype = parameter.numel(), parameter.dtype
    trained = parameter.requires_grad
    return Weights(
        name,
        numel,
        numel * dtype.itemsize,
        numel * accumulation_dtype(dtype).itemsize if trained else 0,
        round(state_bytes * numel) if trained else 0,
        copied,
        gain_bytes(name) if trained else 0,
    )
