"""``Trainer(strategy="async_multipipe")``: Lightning's side of the pipelines.

What happens where: the arguments become a :class:`Geometry`; ``setup`` sees the first batch, cuts the model and builds
the executor (``integration.assembly``); each ``training_step`` of Lightning's loop runs one segment
(``integration.steps``); ``backward`` hands the window's gradients to the optimizer; the owners step.

What is a subject of its own lies in the classes below: the processes and how they talk (``integration.connected``), the
plan and what came of it (``integration.planned``), saving and loading (``integration.checkpointed``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from lightning_asyncpipe._private import preserve_versions
from lightning_asyncpipe.integration import guards, internals, sameness
from lightning_asyncpipe.integration.advice import UnneededAdvice
from lightning_asyncpipe.integration.assembly import (
    Assembly,
    EvaluationAssembly,
    align_ranks,
    assemble,
    assemble_evaluation,
)
from lightning_asyncpipe.integration.checkpoint import check_complete, leave_incomplete
from lightning_asyncpipe.integration.checkpointed import CheckpointedStrategy
from lightning_asyncpipe.integration.clipping import GlobalNorms, reduce_with
from lightning_asyncpipe.integration.connected import StartMethod
from lightning_asyncpipe.integration.device_messages import MessageBackend
from lightning_asyncpipe.integration.early_weights import choose_early_weights, make_stash
from lightning_asyncpipe.integration.evaluation_setup import Evaluation
from lightning_asyncpipe.integration.lookahead import install, seed_workers
from lightning_asyncpipe.integration.materialise import DeferredModel
from lightning_asyncpipe.integration.optimizers import OwnedOptimizer
from lightning_asyncpipe.integration.parts import explain
from lightning_asyncpipe.integration.precision import agreed_overflow, check_precision
from lightning_asyncpipe.integration.process_launcher import ProcessLauncher
from lightning_asyncpipe.integration.steps import Executor
from lightning_asyncpipe.plan.geometry import Geometry
from lightning_asyncpipe.plan.memory import EarlyWeights
from lightning_asyncpipe.plan.schedule import Planner
from lightning_asyncpipe.runtime.engine import Engine
from lightning_asyncpipe.runtime.exchange import WeightExchange
from lightning_asyncpipe.runtime.forwards import ForwardEngine, ForwardExecutor
from lightning_asyncpipe.runtime.ownership import Ownership
from lightning_asyncpipe.runtime.stages import StageRunner
from lightning_asyncpipe.runtime.staleness import StalenessCounter
from lightning_asyncpipe.runtime.stash import WeightStash
from lightning_asyncpipe.runtime.timeline import Ledger, Spent


class AsyncMultiPipeStrategy(CheckpointedStrategy):
    """Bounded-asynchronous, multi-directional pipeline parallelism (AMDP, arXiv 2605.29664) for a LightningModule.

    Args:
        num_stages: D, devices per replica; "auto" is the world size divided by ``data_parallel_size``.
        num_pipelines: N, pipelines that run over the same devices at once, 1 to D.
        num_microbatches: M, micro-batches into which each batch is split, where it has as many samples.
        max_in_flight: w, micro-batches that a pipeline takes in before a backward returns.
        max_staleness: how many weight updates may lie between a micro-batch's forward and its backward. 0 flushes the
            pipelines at every optimizer step and equals one device that accumulates the same micro-batches.
        weight_stash: let early forwards and their backwards use the same weights, those before the update.
        staleness_correction: the weights that early forwards run on: "none", those before the update; "extrapolate",
            those moved on by the last update, one more copy of the hosted weights; "predict", those that momentum and
            the gradients so far lead to, for Adam, AdamW, SGD and Muon, "extrapolate" for others (docs/accuracy.md);
            "auto" is "predict" where forwards run early, unless ``weight_stash`` asks for the old ones.
        split_backward: run the two halves of a backward, the gradient of the input and those of the weights, at
            different times, which leaves devices less idle; "auto" does so in all stages that can. False never does.
        cuts: "auto", or the names of the modules that begin a stage (all but the first stage).
        partition: how stages are made even: "profile" measures the model's parts on the device and takes the plan with
            the shortest simulated step, "operations" counts operations and measures nothing, so that two runs have the
            same plan. "auto" is "operations" in one process and under ``Trainer(deterministic=True)``, else "profile".
        memory_limit: bytes of each device that a plan may use; None: all of a GPU, no limit on a CPU.
        plan: path of a plan that :meth:`save_plan` wrote, to be used again.
        data_parallel_size: R, replicas of the whole set of pipelines, each on its own part of the data.
        save_distributed_checkpoint: let every rank write its own part of a checkpoint, which is a folder then.
        process_group_backend: backend of the default process group; by the device if None.
        timeout: how long a collective or a message may take.
        start_method: how processes are started: "popen", "spawn", "fork" or "forkserver", as for DDP.
        message_backend: what carries activations, gradients and weights: "gloo", from GPUs through pinned memory of the
            host; "nccl", large tensors directly from GPU to GPU, one for each process.

    Raises:
        MisconfigurationException: for values out of range, once the world size is known.
    """

    def __init__(
        self,
        num_stages: int | Literal["auto"] = "auto",
        num_pipelines: int | Literal["auto"] = "auto",
        num_microbatches: int | Literal["auto"] = "auto",
        max_in_flight: int | Literal["auto"] = "auto",
        max_staleness: Literal[0, 1] = 1,
        weight_stash: bool = False,
        staleness_correction: Literal["auto", "none", "extrapolate", "predict"] = "auto",
        split_backward: bool | Literal["auto"] = "auto",
        cuts: Literal["auto"] | Sequence[str] = "auto",
        partition: Literal["auto", "profile", "operations"] = "auto",
        memory_limit: int | None = None,
        plan: str | os.PathLike[str] | None = None,
        data_parallel_size: int = 1,
        save_distributed_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: StartMethod = "popen",
        message_backend: MessageBackend = "gloo",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            numbers={
                "num_stages": num_stages,
                "num_pipelines": num_pipelines,
                "num_microbatches": num_microbatches,
                "max_in_flight": max_in_flight,
                "data_parallel_size": data_parallel_size,
            },
            max_staleness=max_staleness,
            weight_stash=weight_stash,
            staleness_correction=staleness_correction,
            split_backward=split_backward,
            cuts=cuts,
            partition=partition,
            memory_limit=memory_limit,
            plan=plan,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            message_backend=message_backend,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.deferred = DeferredModel()
        self._evaluated: EvaluationAssembly | None = None
        self._advice: UnneededAdvice | None = None
        self.final_state: dict[str, Any] | None = None

    # Setting up

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        self._check(trainer)
        self._advice = UnneededAdvice(self.geometry.replicas)
        self._partition = None
        check_complete(self.lightning_module, self.world)
        sameness.check_settings(self, trainer)
        install(trainer, self.resumed)
        self.deferred.prepare(self.lightning_module, self.root_device, self.world)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        align_ranks(self.lightning_module, self.world)
        if trainer.state.fn != TrainerFn.FITTING:
            kind, loop = internals.evaluation_loop(trainer)
            self._evaluated = assemble_evaluation(self, trainer, kind, loop)
            self.setup_precision_plugin()
            return
        self.setup_optimizers(trainer)  # before the step is run to find its cuts: it may read the learning rate
        sameness.check_optimizers(self)
        self._assembly = assemble(self, trainer)
        self._owned = [
            OwnedOptimizer(optimizer, self._assembly.names_by_id, self._assembly.owned) for optimizer in self.optimizers
        ]
        self.setup_precision_plugin()
        _optimizers_to_device(self.optimizers, self.root_device)

    def _check(self, trainer: pl.Trainer) -> None:
        assert self.lightning_module is not None
        guards.check_module(self.lightning_module, trainer)
        check_precision(self.precision_plugin)
        if self.world.size > 1:
            guards.leave_exceptions_unsaved(trainer)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Around ``configure_model``: what is built in it has no memory, and each rank later fills what it hosts."""
        with self.deferred.building():
            yield

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        with guards.one_optimizer():
            super().setup_optimizers(trainer)
        guards.check_optimizers(self.optimizers)
        if self.staleness_correction == "predict" and self.early_weights == "extrapolated":
            guards.note_unpredictable(self.optimizers)

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def process_dataloader(self, dataloader: object) -> object:
        seed_workers(dataloader, self.global_rank // self.geometry.num_stages)
        return dataloader

    # What runs the pipelines

    def hosted_by_this_process(self, ownership: Ownership) -> frozenset[str]:
        """Names of the parameters that this process keeps."""
        return ownership.hosted(self.global_rank)

    def make_executor(
        self,
        geometry: Geometry,
        planner: Planner,
        runner: StageRunner,
        ownership: Ownership,
        parameters: dict[str, nn.Parameter],
    ) -> Executor:
        """What runs this rank's segments.

        Args:
            parameters: the trainable parameters that this process keeps, by name.
        """
        transport = self._connected(geometry)
        stash = self._stash(runner, parameters, ownership.owned(self.global_rank))
        weights = WeightExchange(
            self.global_rank,
            geometry.placement,
            geometry.replicas,
            ownership,
            parameters,
            transport,
            stash,
        )
        return Engine(
            self.global_rank,
            geometry.placement,
            planner,
            runner,
            transport,
            weights,
            StalenessCounter(self.max_staleness),
            stash,
            self._standpoints,
        )

    def make_forward_executor(self, geometry: Geometry) -> ForwardExecutor:
        """What runs this rank's forwards of evaluation."""
        transport = self._connected(geometry)
        return ForwardEngine(self.global_rank, geometry.num_stages, transport, self._standpoints)

    def _stash(
        self, runner: StageRunner, parameters: dict[str, nn.Parameter], owned: frozenset[str]
    ) -> WeightStash | None:
        stages = runner.program.parameters
        return make_stash(self.early_weights, self.optimizers, stages, parameters, owned)

    @property
    def early_weights(self) -> EarlyWeights:
        """What early forwards run on."""
        correction = self.staleness_correction if self.max_staleness else "none"
        return choose_early_weights(self.weight_stash, correction, self.optimizers)

    # Training

    def _require_assembly(self) -> Assembly:
        if self._assembly is None:
            raise MisconfigurationException(f"{type(self).__name__} is not set up: call `Trainer.fit` first")
        return self._assembly

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one segment; what comes back is the same on every rank."""
        return self._require_assembly().run_batch(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Hand the window's gradients over, between the hooks that surround a backward on one device."""
        assert self.lightning_module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self._require_assembly().install_gradients()
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step what this rank owns; forwards that are in flight keep passing autograd's version check."""
        assembly = self._require_assembly()
        parameters = [p for owned in self._owned for p in owned.parameters()]
        reduce = reduce_with(self.world.control, partial(assembly.executor.ledger.counting, Spent.NORM))
        norms = GlobalNorms(
            assembly.parameters, assembly.owned, assembly.gradients, reduce, self.root_device, self._begin_collective
        )
        with ExitStack() as writes:

            def closure_then_writes() -> Any:
                result = closure()
                # Only the writes of the step itself are exempt, not what the user's code does in the closure.
                writes.enter_context(preserve_versions(parameters))
                return result

            with norms.in_hooks(), agreed_overflow(self.precision_plugin, reduce, self.root_device) as verdict:
                output = super().optimizer_step(optimizer, closure_then_writes, model, **kwargs)
        assembly.step_is_over(verdict.skipped)
        return output

    def on_train_start(self) -> None:
        self._require_assembly().steps.stopping.agree()

    def on_train_end(self) -> None:
        assembly = self._require_assembly()
        assembly.steps.flush()
        self._statistics = assembly.collect_statistics()

    def staleness_counts(self) -> dict[tuple[int, int], int]:
        """How often backwards of this rank met newer weights than their forwards, until now; for callbacks.

        Returns:
            For each (stage, updates between forward and backward) the number of micro-batches.
        """
        return dict(self._require_assembly().executor.staleness.counts)

    @property
    def ledger(self) -> Ledger:
        """What this rank has spent its time on until now; for callbacks."""
        return self._require_assembly().executor.ledger

    # Validation, testing, prediction

    def _evaluation(self) -> Evaluation:
        evaluation = self._evaluated.evaluation if self._evaluated else None
        evaluation = self._assembly.validation if self._assembly else evaluation
        if evaluation is None:
            raise MisconfigurationException(f"{type(self).__name__} is not set up for evaluation")
        return evaluation

    def _evaluation_step(self, *args: Any) -> Any:
        steps = self._evaluation().steps
        assert steps is not None
        return steps.run(*args)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step of one batch; what comes back is the same on every rank of a replica."""
        return self._evaluation_step(*args)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`validation_step`."""
        return self._evaluation_step(*args)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`validation_step`."""
        return self._evaluation_step(*args)

    def on_validation_start(self) -> None:
        """Evaluation is a flush point: it sees the weights of the last step on every rank."""
        if self._assembly is not None:
            self._assembly.steps.flush()
        self._evaluation().start()

    def on_validation_end(self) -> None:
        self._evaluation().end()

    def on_test_start(self) -> None:
        self._evaluation().start()

    def on_test_end(self) -> None:
        self._evaluation().end()

    def on_predict_start(self) -> None:
        self._evaluation().start()

    def on_predict_end(self) -> None:
        self._evaluation().end()

    # The end

    def on_exception(self, exception: BaseException) -> None:
        explain(exception, self.lightning_module)
        super().on_exception(exception)

    def teardown(self) -> None:
        if self._advice is not None:
            self._advice.close()
        assembly, self._assembly = self._assembly, None
        evaluated, self._evaluated = self._evaluated, None
        # A model that was never whole stays in parts, unless the main process waits for it.
        parts = self.deferred.used and not isinstance(self._launcher, ProcessLauncher)
        if assembly is not None:
            assembly.close(restore=not self._failed and not parts)
            self._finished = assembly
        if evaluated is not None:
            evaluated.close(restore=not self._failed and not parts)
            if self._transport is not None:
                self._transport.close()
            if self._standpoints is not None:
                self._standpoints.close()
        self._transport = self._standpoints = None
        with self.deferred.released(self.lightning_module) if parts else nullcontext():
            super().teardown()
        if self._failed:
            if assembly is not None and self.world.size > 1 and self.lightning_module is not None:
                leave_incomplete(self.lightning_module)
        elif isinstance(self._launcher, ProcessLauncher) and self.is_global_zero:
            assert self.lightning_module is not None
            self.final_state = self.lightning_module.state_dict()
        self._leave_processes()
