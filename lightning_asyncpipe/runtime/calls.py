"""What happens at each call of an intercepted module while a stage runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_asyncpipe._private import CallImpl
from lightning_asyncpipe.errors import PipelineError
from lightning_asyncpipe.runtime.candidates import Cut
from lightning_asyncpipe.runtime.program import Role, StageProgram
from lightning_asyncpipe.runtime.randomness import digest
from lightning_asyncpipe.runtime.shapes import TensorSpec
from lightning_asyncpipe.runtime.structure import leaf_at, replace_leaf
from lightning_asyncpipe.runtime.trace import CallKey

_SAME_CALLS = (
    "The step has to call the same modules for every micro-batch: the other stages run theirs. Let one that returns "
    "early, to skip a batch, make its calls as ever and return a loss times zero."
)

if TYPE_CHECKING:
    from lightning_asyncpipe.runtime.stages import StageForward, StageRunner


class StageExit(BaseException):
    """Unwinds the step where a stage ends. Not an ``Exception``: the user's own handlers let it pass."""


@dataclass
class CallPlan:
    """What to do at one call in one stage."""

    key: CallKey
    role: Role
    before: int
    after: int
    inner: tuple[tuple[str, int], ...]
    enter: Cut | None = None  # the stage begins here
    exit: Cut | None = None  # the stage's cut, if this call makes its value
    exit_before: Cut | None = None
    exit_after: bool = False


def make_plan(program: StageProgram, stage: int) -> dict[str, list[CallPlan | None]]:
    """For each intercepted module, what a stage does at its first call, its second one and so on."""
    enter = program.cuts[stage - 1] if stage > 0 else None
    leave = program.cuts[stage] if stage < len(program.cuts) else None
    plan: dict[str, list[CallPlan | None]] = {name: [] for name in program.modules}
    repeated = program.repeated
    for node in program.nodes:
        entry = CallPlan(
            node.key,
            program.role(stage, node),
            digest("in", *node.key),
            digest("after", *node.key),
            tuple((name, count) for name, count in node.inner if name in repeated),
        )
        if enter is not None and enter.call == node.key:
            entry.enter = enter
            if enter.way == "result":
                entry.role = Role.SKIP
        if leave is not None:
            if leave.call == node.key and leave.way == "result":
                entry.exit = leave
                entry.exit_after = leave.exit_before is None
            if leave.exit_before == node.key:
                entry.exit_before = leave
        entries = plan[node.key.name]
        entries.extend([None] * (node.key.nth + 1 - len(entries)))
        entries[node.key.nth] = entry
    return plan


class ForwardRun:
    """The state of one forward of one stage."""

    def __init__(self, runner: StageRunner, result: StageForward, activation: Tensor | None) -> None:
        if (activation is None) != (result.stage == 0):
            raise PipelineError(f"stage {result.stage} {'needs' if result.stage else 'takes no'} activation")
        self.runner = runner
        self.result = result
        self.activation = activation
        self.plan = runner.plan(result.stage)
        self.counts: dict[str, int] = dict.fromkeys(self.plan, 0)
        self.inside = False
        self.entered = result.stage == 0
        self.captured: Tensor | None = None
        self.exited = False

    def call(self, name: str, module: nn.Module, call: CallImpl, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In place of a call of an intercepted module."""
        if self.exited:  # code that catches everything, or cleans up, must not go on
            raise StageExit
        counts = self.counts
        count = counts[name]
        counts[name] = count + 1
        if self.inside:
            return call(*args, **kwargs)
        entries = self.plan[name]
        entry = entries[count] if count < len(entries) else None
        if entry is None:
            entry = self._unknown(name, count, module)
        if entry.exit_before is not None:
            self._exit_before(entry.exit_before, args, kwargs)
        if entry.enter is not None and entry.enter.way != "result":
            args, kwargs = self._enter_by_argument(entry.enter, args, kwargs)
        streams = self.runner.random
        if entry.role is Role.SKIP:
            result = self._skip(entry, module, call, args, kwargs)
        elif entry.role is Role.ENTER:
            streams.enter(entry.before)
            result = call(*args, **kwargs)
        else:
            self.result.streams[name, streams.position()] = count
            streams.enter(entry.before)
            self.inside = True
            result = call(*args, **kwargs)
            self.inside = False
        if entry.exit is not None:
            self._capture(leaf_at(result, entry.exit.positions[0]), entry.exit.copy_exit)
            if entry.exit_after:
                self._exit()
        streams.enter(entry.after)
        return result

    def _unknown(self, name: str, count: int, module: nn.Module) -> CallPlan:
        """A call that the traced step did not make: it runs if it needs no weights or the stage has them."""
        if not self.runner.has_weights(self.result.stage if self.entered else None, module):
            raise PipelineError(
                f"the step called '{name}' {count + 1} times, but less often when it was traced, and the stage in "
                "which the further calls belong is not known. The number of calls must not depend on the data."
            )
        return CallPlan(CallKey(name, count), Role.RUN, digest("in", name, count), digest("after", name, count), ())

    def _skip(
        self,
        entry: CallPlan,
        module: nn.Module,
        call: CallImpl,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        def passing(*args: Any, **kwargs: Any) -> Any:
            with self.runner.paused():
                return call(*args, **kwargs)

        for name, inner in entry.inner:
            self.counts[name] += inner
        skipped = self.runner.skipped
        if entry.enter is None:
            return skipped.result(entry.key, module, passing, args, kwargs)
        positions = entry.enter.positions
        copy = entry.enter.copy_entry
        return skipped.result(entry.key, module, passing, args, kwargs, lambda spec: self._enter(spec, copy), positions)

    def _enter(self, spec: TensorSpec | None, copy: bool) -> Tensor:
        """The received activation, as part of this stage's graph."""
        assert self.activation is not None
        wanted = self.activation.requires_grad
        leaf = self.activation.detach()
        if type(spec) is TensorSpec:
            leaf = spec.arrange(leaf)
        self.result.leaf = leaf.requires_grad_(wanted)
        self.activation = None
        self.entered = True
        return leaf.clone() if copy else leaf

    def _enter_by_argument(
        self, cut: Cut, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        made = leaf_at((args, kwargs), cut.positions[0])
        if not isinstance(made, Tensor):
            raise PipelineError(f"'{cut.call.name}' got no tensor where stage {self.result.stage} begins")
        leaf = self._enter(TensorSpec(made), copy=False)
        if made.shape != leaf.shape:
            raise PipelineError(
                f"stage {self.result.stage} begins at '{cut.call.name}' with a tensor {list(made.shape)}, but "
                f"received {list(leaf.shape)}"
            )
        if cut.way == "filled":
            if made.requires_grad and not made._is_view():
                made.detach_()
            made.copy_(leaf)
            return args, kwargs
        for position in cut.positions:
            args, kwargs = replace_leaf((args, kwargs), position, leaf)
        return args, kwargs

    def _capture(self, tensor: Any, copy: bool) -> None:
        if not isinstance(tensor, Tensor):
            raise PipelineError(
                f"stage {self.result.stage} ends with a tensor, but the step made {type(tensor).__name__} there"
            )
        self.captured = tensor.clone() if copy else tensor

    def _exit_before(self, cut: Cut, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if cut.way != "result":
            self._capture(leaf_at((args, kwargs), cut.positions[0]), copy=False)
        self._exit()

    def _exit(self) -> None:
        self.exited = True
        raise StageExit

    def finish(self) -> None:
        """The step has ended: check that it did all of the stage, and give out the result."""
        result = self.result
        last = result.stage == self.runner.program.num_stages - 1
        cuts = self.runner.program.cuts
        if not self.entered:
            cut = cuts[result.stage - 1]
            raise self._incomplete(f"before stage {result.stage} began", cut.call.name or cut.begins)
        if last:
            return
        if not self.exited or self.captured is None:
            cut = cuts[result.stage]
            name = (cut.exit_before or cut.call).name
            raise self._incomplete(f"inside stage {result.stage}", name or cut.begins)
        result.value = None
        result.requires_grad = self.captured.requires_grad
        result.output = self.captured.detach()
        result.root = self.captured if result.requires_grad else None

    def _incomplete(self, where: str, name: str) -> PipelineError:
        """The step did not come to the module `name`."""
        skipped = not self.exited and self.result.value is None
        ended = "returned None, and so ended" if skipped else "ended"
        called = f"call '{name}'" if name else "run the module's own `forward` to its end"
        return PipelineError(
            f"the step {ended} {where}: it did not {called} as it did when it was traced. {_SAME_CALLS}"
        )


class Recomputation:
    """The state of one backward: activation checkpointing may run parts of the forward again."""

    def __init__(self, runner: StageRunner, forward: StageForward) -> None:
        self.runner = runner
        self.forward = forward

    def call(self, name: str, module: nn.Module, call: CallImpl, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In place of a call of an intercepted module."""
        self.forward.recomputed = True
        streams = self.runner.random
        count = self.forward.streams.get((name, streams.position()))
        if count is None:
            return call(*args, **kwargs)
        streams.enter(digest("in", name, count))
        result = call(*args, **kwargs)
        streams.enter(digest("after", name, count))
        return result
