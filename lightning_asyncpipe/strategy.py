"""``Trainer(strategy="async_multipipe")``: Lightning's side of the pipelines.

What happens where: the arguments become a :class:`Geometry`; ``setup`` sees the first batch, cuts the model and builds
the executor (``integration.assembly``); each ``training_step`` of Lightning's loop runs one segment
(``integration.steps``); ``backward`` hands the window's gradients to the optimizer; the owners step; checkpoints are
put together from the owners (``integration.checkpoint``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from lightning_asyncpipe._private import own_store, preserve_versions
from lightning_asyncpipe.errors import PipelineError
from lightning_asyncpipe.integration import guards, internals
from lightning_asyncpipe.integration.assembly import Assembly, align_ranks, assemble
from lightning_asyncpipe.integration.clipping import global_norms, reduce_with
from lightning_asyncpipe.integration.launchers import PopenLauncher, ProcessLauncher
from lightning_asyncpipe.integration.lookahead import seed_workers
from lightning_asyncpipe.integration.optimizers import LearningRates, OwnedOptimizer
from lightning_asyncpipe.integration.steps import Executor
from lightning_asyncpipe.integration.world import World
from lightning_asyncpipe.plan.geometry import Geometry, resolve
from lightning_asyncpipe.plan.schedule import Planner
from lightning_asyncpipe.runtime.channels import GlooTransport, Transport
from lightning_asyncpipe.runtime.engine import Engine
from lightning_asyncpipe.runtime.exchange import WeightExchange
from lightning_asyncpipe.runtime.extrapolation import Extrapolation
from lightning_asyncpipe.runtime.failure import FailureBoard
from lightning_asyncpipe.runtime.loopback import LoopbackNetwork
from lightning_asyncpipe.runtime.ownership import Ownership
from lightning_asyncpipe.runtime.stages import StageRunner
from lightning_asyncpipe.runtime.staleness import StalenessCounter
from lightning_asyncpipe.runtime.standpoint import Standpoints
from lightning_asyncpipe.runtime.stash import WeightStash
from lightning_asyncpipe.runtime.timeline import Ledger, Spent


class AsyncMultiPipeStrategy(ParallelStrategy):
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
            those moved on by the last update, one more copy of the hosted weights; "auto" is "extrapolate" where
            forwards run early, unless ``weight_stash`` asks for the old ones.
        split_backward: run the two halves of a backward, the gradient of the input and those of the weights, at
            different times, which leaves devices less idle; "auto" does so in all stages that can. False never does.
        cuts: "auto", or the names of the modules that begin a stage (all but the first stage).
        data_parallel_size: R, replicas of the whole set of pipelines, each on its own part of the data.
        process_group_backend: backend of the default process group; by the device if None.
        timeout: how long a collective or a message may take.
        start_method: how processes are started: "popen", "spawn", "fork" or "forkserver", as for DDP.

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
        staleness_correction: Literal["auto", "none", "extrapolate"] = "auto",
        split_backward: bool | Literal["auto"] = "auto",
        cuts: Literal["auto"] | Sequence[str] = "auto",
        data_parallel_size: int = 1,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        guards.check_arguments(
            max_staleness, weight_stash, staleness_correction, split_backward, cuts, timeout, start_method
        )
        self.max_staleness = max_staleness
        self.weight_stash = weight_stash
        self.staleness_correction = staleness_correction
        self.split_backward = split_backward
        self.cuts = cuts
        self._asked = {
            "num_stages": num_stages,
            "num_pipelines": num_pipelines,
            "num_microbatches": num_microbatches,
            "max_in_flight": max_in_flight,
            "data_parallel_size": data_parallel_size,
        }
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._start_method = start_method
        self._num_nodes = 1
        self._world: World | None = None
        self._board: FailureBoard | None = None
        self._standpoints: Standpoints | None = None
        self._assembly: Assembly | None = None
        self._finished: Assembly | None = None
        self._owned: list[OwnedOptimizer] = []
        self._statistics: dict[str, Any] = {}
        self.final_state: dict[str, Any] | None = None
        self._failed = False

    # Processes and devices

    @property
    def is_distributed(self) -> bool:
        """Lightning injects a DistributedSampler and honours ``sync_dist`` where this is true."""
        return True

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Processes on each machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def geometry(self) -> Geometry:
        """The resolved numbers of devices, pipelines and micro-batches.

        Raises:
            MisconfigurationException: if the arguments do not fit each other or the world size.
        """
        return self.resolved()

    def resolved(self, split_backward: bool = False) -> Geometry:
        """As :attr:`geometry`; with split backwards, fewer micro-batches need to be in flight."""
        try:
            return resolve(self._placed_processes, **self._asked, split_backward=split_backward)  # type: ignore[arg-type]
        except ValueError as error:
            raise MisconfigurationException(str(error)) from None

    @property
    def _placed_processes(self) -> int:
        return self.num_nodes * self.num_processes

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """All ranks of a replica see the same samples."""
        geometry = self.geometry
        return {"num_replicas": geometry.replicas, "rank": self.global_rank // geometry.num_stages}

    @property
    def process_group_backend(self) -> str | None:
        """Backend of the default process group."""
        return self._process_group_backend

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        _ = self.geometry  # before any process is started
        self._launcher: _Launcher | None
        if self._start_method == "popen":
            self._launcher = PopenLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = ProcessLauncher(self, start_method=self._start_method)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and Lightning's rank-zero utilities who this process is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        self._failed = False
        super().setup_environment()
        self._connect_processes()

    def _connect_processes(self) -> None:
        reset_seed()
        self.set_world_ranks()
        if self._process_group_backend is None:
            self._process_group_backend = _get_default_process_group_backend_for_device(self.root_device)
        assert self.cluster_environment is not None
        device = self.root_device if self.root_device.type != "cpu" else None
        _init_dist_connection(
            self.cluster_environment,
            self._process_group_backend,
            timeout=self._timeout,
            device_id=device,
        )
        if self._world is None:
            self._world = World()
        if self._board is None:
            self._board = FailureBoard.over_default_store()
            if isinstance(self._launcher, (PopenLauncher, ProcessLauncher)):
                self._launcher.board = self._board

    @property
    def world(self) -> World:
        """Collectives over all ranks."""
        if self._world is None:
            self._world = World()
        return self._world

    # Setting up

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        self._check(trainer)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        align_ranks(self.lightning_module, self.world)
        self.setup_optimizers(trainer)  # before the step is run to find its cuts: it may read the learning rate
        self._assembly = assemble(self, trainer)
        self._owned = [
            OwnedOptimizer(optimizer, self._assembly.names_by_id, self._assembly.owned) for optimizer in self.optimizers
        ]
        self.setup_precision_plugin()
        _optimizers_to_device(self.optimizers, self.root_device)

    def _check(self, trainer: pl.Trainer) -> None:
        function = trainer.state.fn
        if function is not None and function != TrainerFn.FITTING:
            raise MisconfigurationException(
                f"`Trainer.{function.value}` is not supported by {type(self).__name__} yet: load the checkpoint into "
                "the module on one device and use a Trainer without this strategy."
            )
        if internals.validation_in_fit(trainer):
            raise MisconfigurationException(
                f"Validation during `fit` is not supported by {type(self).__name__} yet: pass "
                "`Trainer(limit_val_batches=0, num_sanity_val_steps=0)`, and validate a saved checkpoint on one device."
            )
        assert self.lightning_module is not None
        guards.check_module(self.lightning_module, trainer)
        guards.check_precision(self.precision_plugin)
        if self.world.size > 1:
            guards.leave_exceptions_unsaved(trainer)

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
        world = self.world
        transport: Transport
        standpoints: Standpoints | None = None
        if world.size == 1:
            transport = LoopbackNetwork(1).transport(0)
        else:
            assert world.messages is not None
            timeout = self._timeout or default_pg_timeout
            standpoints = self._standpoints = Standpoints(
                own_store("standpoints"), self.global_rank, world.size, geometry.num_stages, self._end_because
            )
            transport = GlooTransport(
                world.messages,
                self.root_device,
                self._board,
                timeout.total_seconds(),
                standpoints.compare,
            )
        stash = self._stash(runner, parameters)
        weights = WeightExchange(
            self.global_rank,
            geometry.placement,
            geometry.replicas,
            ownership,
            parameters,
            transport,
            *(() if stash is None else (stash.before_update,)),
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
            standpoints,
        )

    def _stash(self, runner: StageRunner, parameters: dict[str, nn.Parameter]) -> WeightStash | None:
        """The weights of early forwards, None for the live ones."""
        stages = runner.program.parameters
        if self.weight_stash:
            return WeightStash(parameters, stages)
        if self.staleness_correction == "none" or not self.max_staleness:
            return None
        return Extrapolation(parameters, stages, LearningRates(self.optimizers, parameters).of)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        with guards.one_optimizer():
            super().setup_optimizers(trainer)
        guards.check_optimizers(self.optimizers)

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def process_dataloader(self, dataloader: object) -> object:
        seed_workers(dataloader, self.global_rank // self.geometry.num_stages)
        return dataloader

    def _require_assembly(self) -> Assembly:
        if self._assembly is None:
            raise MisconfigurationException(f"{type(self).__name__} is not set up: call `Trainer.fit` first")
        return self._assembly

    # Training

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one segment; what comes back is the same on every rank."""
        return self._require_assembly().steps.run(*args, **kwargs)

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
        dtype = next((p.dtype for p in assembly.parameters.values() if p.requires_grad), torch.float32)
        with ExitStack() as writes:

            def closure_then_writes() -> Any:
                result = closure()
                # Only the writes of the step itself are exempt, not what the user's code does in the closure.
                writes.enter_context(preserve_versions(parameters))
                return result

            norms = reduce_with(self.world.control, partial(assembly.executor.ledger.counting, Spent.NORM))
            with global_norms(norms, self.root_device, dtype):
                output = super().optimizer_step(optimizer, closure_then_writes, model, **kwargs)
        assembly.executor.stepped()
        return output

    def on_train_end(self) -> None:
        assembly = self._require_assembly()
        assembly.steps.flush()
        self._statistics = assembly.collect_statistics()

    def statistics(self) -> dict[str, Any]:
        """What was measured in the last ``fit``: utilisation, staleness counts, micro-batches, steps.

        The same on every rank, available once ``fit`` has ended.
        """
        return dict(self._statistics)

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

    def all_gather_objects(self, obj: Any) -> list[Any]:
        """Every rank's `obj`, made of numbers, strings, lists, dicts and tensors; every rank has to call it."""
        self._begin_collective("strategy.all_gather_objects")
        return self.world.all_gather(obj)

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model on rank 0; a flush point, since what is saved must be a trajectory that can go on."""
        assert self.lightning_module is not None
        if self._has_failed:
            raise PipelineError(
                "the weights cannot be saved: training has failed, and every process holds a part of them only. Go on "
                "from the last checkpoint."
            )
        if self._assembly is not None:
            self._assembly.steps.flush()
            return self._assembly.whole.state_dict()
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        for owned in self._owned:
            if owned.optimizer is getattr(optimizer, "_optimizer", optimizer):
                assembly = self._assembly or self._finished
                assert assembly is not None
                return assembly.whole.optimizer_state(owned)
        raise MisconfigurationException("this optimizer is not one that `configure_optimizers` returned")

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        raise MisconfigurationException(
            f"Resuming from a checkpoint ({checkpoint_path}) is not supported by {type(self).__name__} yet: load the "
            "weights with `LitModel.load_from_checkpoint` before `fit`."
        )

    # Collectives of Lightning's loops and callbacks

    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Tensor | Any:
        self._begin_collective("strategy.reduce")
        if isinstance(tensor, Tensor):
            return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
        return tensor

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        self._begin_collective("self.all_gather")
        return super().all_gather(tensor, group, sync_grads)

    def barrier(self, name: str | None = None) -> None:
        guards.forbid_in_step("strategy.barrier")
        if self._has_failed or not _distributed_is_initialized():
            return  # in a hook that runs on an exception there is nobody to wait for
        self._begin_collective("strategy.barrier")
        if torch.distributed.get_backend() == "nccl":
            torch.distributed.barrier(device_ids=[self.root_device.index])
        else:
            torch.distributed.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self._begin_collective("strategy.broadcast")
        return self.world.broadcast(obj, src)

    @property
    def _has_failed(self) -> bool:
        """Whether several ranks hold parts of a run that has failed, here or elsewhere."""
        if self._world is None or self._world.size == 1:
            return False
        return self._failed or (self._board is not None and self._board.failure is not None)

    def _begin_collective(self, call: str) -> None:
        guards.forbid_in_step(call)
        if self._has_failed:
            raise PipelineError(f"`{call}` was called after the run had failed: the other ranks do not answer any more")
        if self._standpoints is not None:
            self._standpoints.meet(f"calls `{call}`")

    # The end

    def _end_because(self, error: PipelineError) -> None:
        """End a run in which ranks wait in collectives, where they cannot raise what is wrong; called by a thread."""
        if self._board is not None:
            self._board.report_lost(self.global_rank, str(error))

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        if self._board is not None:
            self._board.report(exception)

    def teardown(self) -> None:
        assembly, self._assembly = self._assembly, None
        self._standpoints = None
        if assembly is not None:
            assembly.close(restore=not self._failed)
            self._finished = assembly
        super().teardown()
        if self._failed:
            if self._board is not None:
                self._board.close()  # whoever catches the error may go on in this process
                self._board = None
            return
        if isinstance(self._launcher, ProcessLauncher) and self.is_global_zero:
            assert self.lightning_module is not None
            self.final_state = self.lightning_module.state_dict()
        if self._board is not None:
            self._board.ending = True
            self.barrier("teardown")
            self._board.close()
            self._board = None
