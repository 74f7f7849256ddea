"""Proof that a program computes what the step computes.

The analysis of a trace sees tensors. Values that cross a cut in another way, as Python numbers, in numpy arrays, on
attributes that hide them, are found by running the stages one after the other, in one process, on the traced
micro-batch, and comparing with an ordinary run bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_asyncpipe._private import CallImpl
from lightning_asyncpipe.errors import CutError, UnrepeatableStepError
from lightning_asyncpipe.runtime.buffers import preserved_buffers
from lightning_asyncpipe.runtime.calls import ForwardRun
from lightning_asyncpipe.runtime.candidates import Candidates, Cut, Way, find_cuts
from lightning_asyncpipe.runtime.cuts import choose_cuts
from lightning_asyncpipe.runtime.gradients import preserved_gradients, take_gradients
from lightning_asyncpipe.runtime.hollow import absent
from lightning_asyncpipe.runtime.program import StageProgram, build_program
from lightning_asyncpipe.runtime.stages import StageForward, StageRunner, StageTask
from lightning_asyncpipe.runtime.step_state import changed, iterators, step_state
from lightning_asyncpipe.runtime.structure import leaf_at, tensors

Context = Callable[[], AbstractContextManager[Any]]
_SPREAD = 10.0  # how many times the difference of two ordinary runs a run in stages may differ
_ROUNDING = 0.5  # two ordinary runs on a GPU may differ by this power of the precision, of the largest element


class Observed(NamedTuple):
    """What a step returned, and what it said besides.

    Attributes:
        said: tensors by what they are (values that it logged, by name), each list in order. A stage in the middle of
            the step sees only what is said in it: the last stage has the last ones of each list.
        value: what it returned.
    """

    said: dict[str, list[Tensor]]
    value: Any

    def compared(self, whole: Observed) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors of this run of the last stage, and those of a whole run that they must be equal to."""
        keys = [key for key, found in self.said.items() if found and key in whole.said]
        made = [tensor for key in keys for tensor in self.said[key]]
        expected = [tensor for key in keys for tensor in whole.said[key][-len(self.said[key]) :]]
        return [*made, *tensors(self.value)], [*expected, *tensors(whole.value)]


def loss_of(value: Any) -> Tensor:
    """The loss in what a step returned: a tensor, or ``value["loss"]``."""
    loss = value["loss"] if isinstance(value, Mapping) else value
    if not isinstance(loss, Tensor):
        raise CutError(f"the step returned {type(loss).__name__}; it must return a loss to be trained in stages")
    return loss


@dataclass
class _Ordinary:
    """What an ordinary run gives: the tensor at each cut, the step's results, the parameters' gradients."""

    boundaries: list[Tensor]
    results: list[Tensor]
    gradients: dict[str, Tensor]
    value: Any = None


class _Observation(ForwardRun):
    """A run of the whole step that looks at the tensors which would be sent."""

    def __init__(self, runner: StageRunner, result: StageForward, cuts: Sequence[Cut]) -> None:
        super().__init__(runner, result, None)
        self._cuts = cuts
        self.seen: dict[int, Tensor] = {}

    def call(self, name: str, module: nn.Module, call: CallImpl, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = None if self.inside else (name, self.counts[name])
        for index, cut in enumerate(self._cuts):
            if cut.way != "result" and cut.call == key:
                self._see(index, leaf_at((args, kwargs), cut.positions[0]))
        result = super().call(name, module, call, args, kwargs)
        for index, cut in enumerate(self._cuts):
            if cut.way == "result" and cut.call == key:
                self._see(index, leaf_at(result, cut.positions[0]))
        return result

    def _see(self, index: int, tensor: Tensor) -> None:
        with torch.no_grad():
            copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            self.seen[index] = copy.copy_(tensor).requires_grad_(tensor.requires_grad)


class _Proof:
    """Runs a step ordinarily and in stages, and compares."""

    def __init__(
        self,
        model: nn.Module,
        program: StageProgram,
        step: Callable[..., Any],
        task: StageTask,
        context: Context,
        loss: Callable[[Any], Tensor] | None,
        grad: bool = True,
    ) -> None:
        self.grad = grad
        self.model = model
        self.program = program
        self.step = step
        self.task = task
        self.context = context
        self.loss = loss
        self.parameters: dict[str, Parameter] = dict(model.named_parameters())

    def ordinary(self) -> _Ordinary:
        """Run the step as a single stage."""
        with self._runner(self.program.whole()) as runner:
            run = _Observation(runner, StageForward(0, self.task), self.program.cuts)
            forward = runner.execute(run)
            results = [tensor.detach().clone() for tensor in tensors(forward.value)]
            said = forward.value if isinstance(forward.value, Observed) else None
            if self.loss is not None:
                forward.root = self.loss(forward.value)
                runner.backward(forward)
            if len(run.seen) < len(self.program.cuts):
                raise CutError(
                    "the step called other modules when it was run a second time on the same micro-batch. Which "
                    "modules it calls must not be left to chance (LayerDrop): multiply what a layer adds by zero "
                    "instead."
                )
            boundaries = [run.seen[i] for i in range(len(self.program.cuts))]
            return _Ordinary(boundaries, results, take_gradients(self.parameters), said)

    def differences(self, ordinary: _Ordinary, again: _Ordinary | None = None) -> dict[int, str]:
        """What differs when each stage starts from what the ordinary run had at its cut, by stage.

        Args:
            ordinary: an ordinary run.
            again: another one; where the two differ, as much as they do is forgiven.
        """
        last = self.program.num_stages - 1
        found: dict[int, str] = {}
        forwards: list[StageForward] = []
        lacking = [self._absent(stage) for stage in range(last + 1)]
        with self._runner(self.program) as runner:
            for stage in range(last + 1):
                activation = None
                if stage > 0:
                    boundary = ordinary.boundaries[stage - 1]
                    activation = boundary.detach().clone().requires_grad_(boundary.requires_grad)
                try:
                    forward = runner.forward(stage, self.task, activation, lacking[stage])
                except Exception as error:
                    found[stage] = f"it fails with {type(error).__name__}: {error}"
                    continue
                made: list[Any] = tensors(forward.value) if stage == last else [forward.output]
                expected, other = (_outputs(run, stage, last) for run in (ordinary, again or ordinary))
                if isinstance(forward.value, Observed):
                    made, expected = forward.value.compared(ordinary.value)
                    _, other = forward.value.compared((again or ordinary).value)
                if len(made) != len(expected) or not all(
                    _same(x, y, z) for x, y, z in zip(made, expected, other, strict=True)
                ):
                    found[stage] = "what the step returns" if stage == last else "the tensor it sends on"
                    found[stage] += " is not the same as in an ordinary run"
                if self.loss is None:
                    forward.root = forward.value = None
                forwards.append(forward)
            if self.loss is not None and not found:
                forwards[-1].root = self.loss(forwards[-1].value)
                gradient = None
                for forward in reversed(forwards):
                    gradient = runner.backward(forward, gradient)
        self._compare_gradients(ordinary, again or ordinary, lacking, found)
        return found

    def _compare_gradients(
        self,
        ordinary: _Ordinary,
        again: _Ordinary,
        lacking: Sequence[Mapping[Parameter, Tensor]],
        found: dict[int, str],
    ) -> None:
        gradients = take_gradients(self.parameters)
        if self.loss is None or found:
            return
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        for stage, gone in enumerate(lacking):
            for parameter, stand_in in gone.items():
                if stand_in.grad is not None and stand_in.grad.any():
                    name = names[id(parameter)]
                    found.setdefault(stage, f"'{name}' gets a gradient though it is not in this stage")
        for name in self.parameters:
            stages = [i for i, used in enumerate(self.program.parameters) if name in used]
            trio = [run.get(name) for run in (gradients, ordinary.gradients, again.gradients)]
            # A missing gradient and one of zeros train alike.
            present = next((g for g in trio if g is not None), None)
            if present is None:
                continue
            a, b, c = (torch.zeros_like(present) if g is None else g for g in trio)
            if not _same(a, b, c, summed=len(stages) > 1):
                found.setdefault(stages[0] if stages else 0, f"the gradient of '{name}' is not the same")

    def found(self) -> dict[int, str]:
        """What differs, by stage; how much two ordinary runs differ is forgiven.

        Raises:
            UnrepeatableStepError: they differ by more than by rounding.
        """
        before = step_state(self.model)
        ordinary = self.ordinary()
        found = self.differences(ordinary)
        if not found:
            return found
        again = self.ordinary()
        if self.program.cuts:
            self._require_alike(ordinary, again, changed(before, step_state(self.model)))
        return self.differences(ordinary, again)

    def _require_alike(self, one: _Ordinary, other: _Ordinary, state: list[str]) -> None:
        """Two ordinary runs have the same tensors at the cuts, and return the same."""
        pairs = list(zip(self._judged(one), self._judged(other), strict=False))
        if len(self._judged(one)) == len(self._judged(other)) and all(_alike(x, y) for x, y in pairs):
            return
        passing = iterators(self.model)
        hints = [f"It changes {', '.join(f'`self.{name}`' for name in state[:5])}. "] if state else []
        if passing:
            hints.append(f"{', '.join(f'`self.{name}`' for name in passing[:5])} are iterators. ")
        raise UnrepeatableStepError(
            "the step computes something else each time that it runs on the same micro-batch with the same random "
            "state, so its stages would not go together (they would see other labels than inputs, say). "
            f"{''.join(hints)}Let it depend on the batch, the weights and random numbers alone: draw those from the "
            "global generators of torch, numpy or `random`, or from generators that are attributes of the module, "
            "which are seeded for each micro-batch; not from the clock, an iterator, a counter, the operating system "
            "or a state that it keeps from one call to the next. "
            "Or draw in the dataset, the collate function or `on_after_batch_transfer`, and pass it on in the "
            "batch."
        )

    def _judged(self, run: _Ordinary) -> list[Tensor]:
        """What two ordinary runs must have in common: in training, what is only logged (times, say) does not matter."""
        if run.value is None or not self.grad:
            return [*run.boundaries, *run.results]
        value = run.value.value
        loss = value.get("loss") if isinstance(value, Mapping) else value
        return [*run.boundaries, *tensors(loss)]

    @contextmanager
    def _runner(self, program: StageProgram) -> Iterator[StageRunner]:
        runner = StageRunner(self.model, program, self.step, self.context, grad=self.grad)
        try:
            yield runner
        finally:
            runner.close()

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Buffers and gradients are what they were afterwards."""
        with preserved_gradients(self.parameters.values()), preserved_buffers(self.model):
            yield

    def _absent(self, stage: int) -> dict[Parameter, Tensor]:
        """What the parameters are that a stage does not have."""
        names = set(self.program.parameters[stage])
        return {
            parameter: absent(parameter).expand(parameter.shape).requires_grad_(parameter.requires_grad)
            for name, parameter in self.parameters.items()
            if name not in names
        }


def prove(
    model: nn.Module,
    program: StageProgram,
    step: Callable[..., Any],
    task: StageTask,
    context: Context = nullcontext,
    loss: Callable[[Any], Tensor] | None = loss_of,
    grad: bool = True,
) -> None:
    """Run all stages of a program in this process and compare with an ordinary run.

    Parameters that a stage is not said to use are NaN in it. Buffers, gradients and random states are left as they
    were. Equal means equal to the last bit; where two ordinary runs differ themselves (atomic additions on a GPU), a
    multiple of their difference is allowed, and the gradient of a parameter of several stages may be rounded otherwise,
    since its parts are summed in another order.

    Args:
        model: with all its parameters.
        program: what to prove.
        step: as for :class:`StageRunner`.
        task: a micro-batch.
        context: as for :class:`StageRunner`.
        loss: gives the loss from what the step returns; None: compare the forward only, which needs no more memory than
            a stage.
        grad: whether forwards record a graph.

    Raises:
        CutError: something differs; the message says at which cut.
        UnrepeatableStepError: two ordinary runs differ by more than by rounding.
    """
    if program.num_stages == 1:
        return  # nothing is cut: a step that cannot be repeated need not be
    proof = _Proof(model, program, step, task, context, loss, grad)
    with proof.preserved():
        found = proof.found()
    if found:
        stage = min(found)
        place = _place(program, stage)
        raise CutError(
            f"stage {stage} ({place}) does not compute what it does in an ordinary run: {found[stage]}. Something "
            "crosses a cut that is not a tensor: an attribute, a numpy array, a value read with .item(). Name other "
            "cuts, or pass it on as part of the tensor."
        )


def confirm(
    candidates: Candidates,
    model: nn.Module,
    step: Callable[..., Any],
    task: StageTask,
    context: Context = nullcontext,
    grad: bool = True,
) -> Candidates:
    """Leave out the valid cuts at which a run in stages gives other results.

    All cuts are tried at once: each stage starts from what an ordinary run has at its cut, so a round costs about two
    forwards.

    Args:
        candidates: from :func:`find_cuts`.
        model, step, task, context, grad: as for :func:`prove`.
    """
    without: set[tuple[int, Way]] = set()
    while candidates.cuts:
        proof = _Proof(model, build_program(candidates, candidates.cuts), step, task, context, None, grad)
        with proof.preserved():
            found = proof.found()
        if not found:
            break
        # What is wrong in a stage entered it at its first cut; the first stage can only be wrong at its last one.
        wrong = [candidates.cuts[max(stage - 1, 0)] for stage in found]
        without |= {(cut.value, cut.way) for cut in wrong}
        candidates = find_cuts(candidates.trace, without)
    return candidates


def proven_program(
    candidates: Candidates,
    num_stages: int,
    model: nn.Module,
    step: Callable[..., Any],
    task: StageTask,
    names: Sequence[str] | None = None,
    context: Context = nullcontext,
    loss: Callable[[Any], Tensor] | None = None,
    grad: bool = True,
) -> StageProgram:
    """Choose cuts, prove them, and where that fails choose again among those that work.

    Args:
        candidates: from :func:`find_cuts`.
        num_stages: number of stages.
        model, step, task, context, loss, grad: as for :func:`prove`.
        names: as for :func:`choose_cuts`; cuts that the user names are not replaced.

    Raises:
        CutError: as :func:`choose_cuts` and :func:`prove`.
    """
    program = build_program(candidates, choose_cuts(candidates, num_stages, names))
    try:
        prove(model, program, step, task, context, loss, grad)
    except CutError:
        if names is not None:
            raise
        candidates = confirm(candidates, model, step, task, context, grad)
        program = build_program(candidates, choose_cuts(candidates, num_stages))
        prove(model, program, step, task, context, loss, grad)
    return program


def _place(program: StageProgram, stage: int) -> str:
    begin = f"from '{program.cuts[stage - 1].begins}'" if stage > 0 else "from the beginning"
    end = f"to '{program.cuts[stage].begins}'" if stage < len(program.cuts) else "to the end"
    return f"{begin} {end}"


def _outputs(run: _Ordinary, stage: int, last: int) -> list[Tensor]:
    return run.results if stage == last else [run.boundaries[stage]]


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether two runs gave the same: to the last bit on a CPU, but for rounding elsewhere."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.allclose(one, other, 0.0, 0.0, equal_nan=True):
        return True
    if one.device.type == "cpu" or not one.is_floating_point():
        return False
    allowed = torch.finfo(one.dtype).eps ** _ROUNDING * float(one.detach().abs().max())
    return bool((one - other).abs().max() <= allowed)


def _same(made: Any, expected: Tensor, other: Tensor, summed: bool = False) -> bool:
    """Whether `made` equals `expected`, or is as near to it as `other` is."""
    if not isinstance(made, Tensor) or made.shape != expected.shape or made.dtype != expected.dtype:
        return False
    if torch.allclose(made, expected, 0.0, 0.0, equal_nan=True):
        return True
    made, expected, other = made.detach(), expected.detach(), other.detach()
    if not made.is_floating_point():
        return False
    allowed = _SPREAD * float((expected - other).abs().max())
    if summed:
        allowed += 8 * torch.finfo(made.dtype).eps * float(expected.abs().max())
    return bool((made - expected).abs().max() <= allowed)
