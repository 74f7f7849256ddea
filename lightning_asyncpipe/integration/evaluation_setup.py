"""How the steps of validation, testing and prediction run in stages.

While weights are still whole on every rank, rank 0 runs the step once on the first batch of each loader and looks
where it can be cut. In ``fit``, the training step has decided which stage holds which weights, and the cuts must go
with that; in ``validate``, ``test`` and ``predict`` the step itself decides. The cuts are proved on that batch. A step
that cannot be run that way runs whole, each device on batches of its own, with all weights on every device.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_warn

from lightning_asyncpipe.errors import CutError, PeerFailure
from lightning_asyncpipe.integration import collectives
from lightning_asyncpipe.integration.checkpoint import WholeModel
from lightning_asyncpipe.integration.evaluation import EvaluationSteps, Way
from lightning_asyncpipe.integration.evaluation_call import EvaluationCall, Kind
from lightning_asyncpipe.integration.evaluation_data import (
    Loop,
    Shown,
    first_batches,
    install,
    step_arguments,
    uninstall,
)
from lightning_asyncpipe.integration.metric_states import LocalMetrics, MetricWatch
from lightning_asyncpipe.integration.plan_quality import stage_work
from lightning_asyncpipe.plan.geometry import Geometry
from lightning_asyncpipe.runtime.buffers import RunningStatistics
from lightning_asyncpipe.runtime.candidates import Candidates, find_cuts
from lightning_asyncpipe.runtime.forwards import ForwardExecutor
from lightning_asyncpipe.runtime.placed import placed_program
from lightning_asyncpipe.runtime.program import StageProgram
from lightning_asyncpipe.runtime.proof import confirm, prove, proven_program
from lightning_asyncpipe.runtime.stages import StageRunner, StageTask
from lightning_asyncpipe.runtime.trace import trace_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning_asyncpipe.strategy import AsyncMultiPipeStrategy

LEAST_GAIN = 1.1
"""A step of ``validate``, ``test`` or ``predict`` that stages speed up by less runs whole on every device."""

_STAGES = {
    "validation": RunningStage.VALIDATING,
    "test": RunningStage.TESTING,
    "predict": RunningStage.PREDICTING,
}


class Held:
    """Which stage's devices hold which parameters, as far as that is decided.

    Args:
        program: of the step that decides; what it does not use is free to go where another step wants it.
    """

    def __init__(self, program: StageProgram) -> None:
        self.stages = [set(names) for names in program.parameters]
        self._free = set(program.unused)

    def possible(self) -> list[set[str]]:
        """For each stage the parameters that it holds or could hold."""
        return [names | self._free for names in self.stages]

    def decide(self, program: StageProgram, stages: Sequence[int]) -> None:
        """A program finds its weights in these stages."""
        for names, stage in zip(program.parameters, stages, strict=True):
            self.stages[stage] |= self._free.intersection(names)
        self._free -= set().union(*program.parameters)

    def of(self, name: str) -> tuple[int, ...]:
        """The stages that hold a parameter; none for one that no step uses."""
        return tuple(stage for stage, names in enumerate(self.stages) if name in names)


@dataclass
class FoundWay:
    """How the step of one loader runs; `stages` as for :class:`Way`."""

    program: StageProgram
    stages: tuple[int, ...] | None


@dataclass
class Evaluation:
    """All that one kind of evaluation runs on.

    Attributes:
        kind: which one.
        loop: Lightning's loop.
        call: the step.
        found: how it runs, by loader.
        held: where the weights are.
        steps: runs its batches; made by :meth:`connect`.
    """

    kind: Kind
    loop: Loop
    call: EvaluationCall
    found: dict[int, FoundWay]
    held: Held | None = None
    steps: EvaluationSteps | None = None
    _whole: WholeModel | None = None
    _runners: list[StageRunner] = field(default_factory=list)
    _silent: list[BasePredictionWriter] = field(default_factory=list)
    _held: ExitStack = field(default_factory=ExitStack)

    @property
    def runs_whole(self) -> bool:
        """Whether the step of some loader needs all weights on every rank."""
        return any(way.stages is None for way in self.found.values())

    def connect(
        self,
        strategy: AsyncMultiPipeStrategy,
        trainer: pl.Trainer,
        geometry: Geometry,
        executor: ForwardExecutor,
        statistics: RunningStatistics,
        seed: int,
        local: LocalMetrics,
        whole: WholeModel | None,
        stopping: Callable[[], bool] = lambda: False,
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        """Make what runs the batches.

        Args:
            strategy, trainer, geometry, statistics: of the run.
            executor: runs forwards.
            seed: of what the steps draw at random.
            local: metrics are complete on every rank.
            whole: gathers the model where ranks hold parts of it; None where each has all of it.
            stopping, stop: as for :class:`EvaluationSteps`.
        """
        module, world = strategy.lightning_module, strategy.world
        assert module is not None
        ways = {}
        for loader, way in self.found.items():
            runner = StageRunner(
                module, way.program, self.call, context_of(strategy, self.kind), statistics, grad=False
            )
            self._runners.append(runner)
            ways[loader] = Way(runner, way.stages)
        self._whole = whole
        if world.size > 1 and strategy.global_rank % geometry.num_stages:
            callbacks = trainer.callbacks  # type: ignore[attr-defined]
            self._silent = [callback for callback in callbacks if isinstance(callback, BasePredictionWriter)]
        self.steps = EvaluationSteps(
            self.kind,
            trainer,
            self.loop,
            ways,
            self.call,
            executor,
            geometry.placement,
            world,
            strategy.global_rank // geometry.num_stages if world.size > 1 else 0,
            statistics,
            seed,
            local,
            context_of(strategy, self.kind),
            strategy.meet,
            stopping,
            stop,
        )

    def start(self) -> None:
        """The loop begins; all ranks call it."""
        assert self.steps is not None
        if self.runs_whole and self._whole is not None:
            self._held.enter_context(self._whole.everywhere())
        if self._silent:
            self._held.enter_context(silent_writers(self._silent))
        self.steps.start()

    def end(self) -> None:
        """The loop has ended."""
        self._held.close()

    def close(self) -> None:
        """Give the module and the trainer back as they were."""
        self._held.close()
        for runner in reversed(self._runners):
            runner.close()
        uninstall(self.loop)


@contextmanager
def silent_writers(writers: Sequence[BasePredictionWriter]) -> Iterator[None]:
    """These callbacks write nothing: the first rank of the replica has the same predictions and writes them."""
    methods = ("write_on_batch_end", "write_on_epoch_end")
    for writer in writers:
        for name in methods:
            vars(writer)[name] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        for writer in writers:
            for name in methods:
                vars(writer).pop(name, None)


def context_of(strategy: AsyncMultiPipeStrategy, kind: Kind) -> Callable[[], AbstractContextManager[Any]]:
    """What the precision plugin puts around a step."""
    plugin = strategy.precision_plugin
    return {
        "validation": plugin.val_step_context,
        "test": plugin.test_step_context,
        "predict": plugin.predict_step_context,
    }[kind]


def find_evaluation(
    strategy: AsyncMultiPipeStrategy,
    trainer: pl.Trainer,
    kind: Kind,
    loop: Loop,
    statistics: RunningStatistics,
    held: Held | None = None,
) -> Evaluation:
    """Look at the first batch of every loader, and find out how the step runs on it.

    All ranks call it at the same point, while each of them has the whole model.

    Args:
        held: what the training step has decided; None where the first loader's step decides.

    Raises:
        MisconfigurationException: the user named cuts that are not valid.
    """
    module = strategy.lightning_module
    assert module is not None
    install(loop)
    call = EvaluationCall(module, kind, MetricWatch(module, f"{kind}_step"))
    evaluation = Evaluation(kind, loop, call, {})
    with _as_in_the_loop(trainer, loop, kind):
        for shown in first_batches(trainer, loop, call.name):
            arguments = step_arguments(loop, call.name, shown)
            way = _agreed(strategy, call, shown, arguments, statistics, held)
            evaluation.found[shown.dataloader_idx] = way
            if way.stages is not None:
                held = Held(way.program) if held is None else held
                held.decide(way.program, way.stages)
    evaluation.held = held
    loop.loaders_are_set_up = loop._combined_loader is not None  # type: ignore[union-attr]
    return evaluation


@contextmanager
def _as_in_the_loop(trainer: pl.Trainer, loop: Loop, kind: Kind) -> Iterator[None]:
    """The trainer says that it evaluates, and the module is in evaluation mode."""
    stage = trainer.state.stage
    trainer.state.stage = _STAGES[kind]
    try:
        if isinstance(loop, _EvaluationLoop):
            loop._on_evaluation_model_eval()
        else:
            loop._on_predict_model_eval()
        try:
            yield
        finally:
            if isinstance(loop, _EvaluationLoop):
                loop._on_evaluation_model_train()
            else:
                loop._on_predict_model_train()
    finally:
        trainer.state.stage = stage


def _agreed(
    strategy: AsyncMultiPipeStrategy,
    call: EvaluationCall,
    shown: Shown,
    arguments: tuple[Any, ...],
    statistics: RunningStatistics,
    held: Held | None,
) -> FoundWay:
    """What rank 0 finds, on every rank."""
    world = strategy.world
    found: dict[str, Any] = {}
    if world.rank == 0:
        try:
            found = _found(strategy, call, arguments, statistics, held)
        except BaseException:
            world.broadcast({})  # the other ranks wait for it
            raise
    found = world.broadcast(found)
    if not found:
        raise PeerFailure(f"rank 0 failed while it ran `{call.name}` to find cuts")
    if "error" in found:
        raise MisconfigurationException(found["error"])
    if "whole" in found:
        _tell(call, shown, found["whole"])
        module = strategy.lightning_module
        assert module is not None
        names = tuple(name for name, _ in module.named_parameters())
        return FoundWay(StageProgram((), (), (names,)), None)
    return FoundWay(StageProgram.from_dict(json.loads(found["program"])), tuple(found["stages"]))


def _tell(call: EvaluationCall, shown: Shown, reason: str) -> None:
    rank_zero_warn(
        f"`{call.name}` (loader {shown.dataloader_idx}) cannot run in stages: {reason.rstrip('.')}. Every device runs "
        "it whole on batches of its own instead, and holds all weights while it does."
    )


def _found(
    strategy: AsyncMultiPipeStrategy,
    call: EvaluationCall,
    arguments: tuple[Any, ...],
    statistics: RunningStatistics,
    held: Held | None,
) -> dict[str, Any]:
    module = strategy.lightning_module
    assert module is not None
    context = context_of(strategy, call.kind)
    names = None if isinstance(strategy.cuts, str) else list(strategy.cuts)
    with collectives.in_step(call.name):
        try:
            trace = trace_step(module, call, arguments, context=context, ignored=statistics.tensors(), grad=False)
            candidates = find_cuts(trace)
            task = StageTask(arguments)
            if held is not None:
                program, stages = _placed(candidates, held.possible(), module, call, task, context)
            else:
                wanted = strategy.geometry.num_stages
                count = wanted if names is not None else min(wanted, len(candidates.cuts) + 1)
                program = proven_program(candidates, count, module, call.observed, task, names, context, grad=False)
                stages = tuple(range(count))
                if names is None and wanted > 1 and _gain(candidates, program) < LEAST_GAIN:
                    raise CutError("one part would do nearly all of the work, wherever it is cut")
        except CutError as error:
            return {"error" if held is None and names is not None else "whole": str(error)}
        except Exception as error:
            with context():
                call(*arguments)  # if the step itself is wrong, it fails again
            return {"whole": f"{type(error).__name__}: {error}."}
    return {"program": json.dumps(program.to_dict()), "stages": list(stages)}


def _gain(candidates: Candidates, program: StageProgram) -> float:
    """How many times faster the stages are than the step as a whole, at best."""
    stages = stage_work(candidates, program)
    return sum(stages) / max(stages) if any(stages) else 1.0


def _placed(
    candidates: Candidates,
    held: Sequence[Collection[str]],
    module: pl.LightningModule,
    call: EvaluationCall,
    task: StageTask,
    context: Callable[[], AbstractContextManager[Any]],
) -> tuple[StageProgram, tuple[int, ...]]:
    """A proven program that goes with weights that are placed already."""
    program, stages = placed_program(candidates, held)
    try:
        prove(module, program, call.observed, task, context, None, grad=False)
    except CutError:
        candidates = confirm(candidates, module, call.observed, task, context, grad=False)
        program, stages = placed_program(candidates, held)
        prove(module, program, call.observed, task, context, None, grad=False)
    return program, stages
