"""The processes of a run, and how they talk: the part of the strategy that knows nothing of stages.

Ranks and devices, the process groups, the failure board, the transport of messages, and the collectives that
Lightning's loops and callbacks call, each of which first makes sure that all ranks can come.
"""

from __future__ import annotations

from abc import abstractmethod
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from lightning_asyncpipe._private import own_store
from lightning_asyncpipe.errors import PipelineError
from lightning_asyncpipe.integration import collectives, device_messages, guards
from lightning_asyncpipe.integration.afterwards import together
from lightning_asyncpipe.integration.device_messages import MessageBackend
from lightning_asyncpipe.integration.popen_launcher import PopenLauncher
from lightning_asyncpipe.integration.process_launcher import ProcessLauncher
from lightning_asyncpipe.integration.terminal import quieten
from lightning_asyncpipe.integration.world import World
from lightning_asyncpipe.plan.geometry import Geometry
from lightning_asyncpipe.runtime.channels import GlooTransport, Transport
from lightning_asyncpipe.runtime.failure import FailureBoard
from lightning_asyncpipe.runtime.loopback import LoopbackNetwork
from lightning_asyncpipe.runtime.standpoint import Standpoints

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class ConnectedStrategy(ParallelStrategy):
    """Starts and connects the processes of a run.

    Args:
        process_group_backend, timeout, start_method, message_backend: as for :class:`AsyncMultiPipeStrategy`.
        kwargs: as for Lightning's ``ParallelStrategy``.
    """

    def __init__(
        self,
        process_group_backend: str | None,
        timeout: timedelta | None,
        start_method: StartMethod,
        message_backend: MessageBackend,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        device_messages.check_backends(message_backend, process_group_backend)
        self.message_backend = message_backend
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._start_method = start_method
        self._num_nodes = 1
        self._world: World | None = None
        self._board: FailureBoard | None = None
        self._standpoints: Standpoints | None = None
        self._transport: Transport | None = None
        self._failed = False

    @property
    @abstractmethod
    def geometry(self) -> Geometry:
        """The numbers of devices and replicas."""

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
    def _placed_processes(self) -> int:
        return self.num_nodes * self.num_processes

    @property
    def process_group_backend(self) -> str | None:
        """Backend of the default process group."""
        return self._process_group_backend

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        guards.check_session(self._start_method)
        _ = self.geometry  # before any process is started
        device_messages.check_device(self.message_backend, self.root_device)
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
        quieten()
        super().setup_environment()
        self._connect_processes()

    def _connect_processes(self) -> None:
        reset_seed()
        self.set_world_ranks()
        direct = self.message_backend == "nccl"
        if self._process_group_backend is None:
            by_device = _get_default_process_group_backend_for_device(self.root_device)
            self._process_group_backend = "gloo" if direct else by_device
        assert self.cluster_environment is not None
        device = None if direct or self.root_device.type == "cpu" else self.root_device
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

    def _connected(self, geometry: Geometry) -> Transport:
        """The messages of this run, made once."""
        if self._transport is not None:
            return self._transport
        if self.world.size == 1:
            self._transport = LoopbackNetwork(1).transport(0)
            return self._transport
        world = self.world
        assert world.messages is not None
        timeout = self._timeout or default_pg_timeout
        self._standpoints = Standpoints(
            own_store("standpoints"), self.global_rank, world.size, geometry.num_stages, self._end_because
        )
        if self.message_backend == "nccl" and world.payloads is None:
            world.payloads = device_messages.payload_group(world, self.root_device, timeout)
        self._transport = GlooTransport(
            world.messages,
            self.root_device,
            self._board,
            timeout.total_seconds(),
            self._standpoints.compare,
            world.payloads,
        )
        return self._transport

    def all_gather_objects(self, obj: Any) -> list[Any]:
        """Every rank's `obj`, made of numbers, strings, lists, dicts and tensors; every rank has to call it."""
        self._begin_collective("strategy.all_gather_objects")
        return self.world.all_gather(obj)

    # Collectives of Lightning's loops and callbacks

    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Tensor | Any:
        """As in DDP, with one process for a replica: its ranks log the same, so "sum" is over the replicas.

        ``ReduceOp.SUM``, with which Lightning counts the ranks that agree on something, is over all ranks.
        """
        self._begin_collective("strategy.reduce")
        if not isinstance(tensor, Tensor):
            return tensor
        reduced = _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
        if group is None and isinstance(reduce_op, str) and reduce_op.lower() == "sum" and self.world.size > 1:
            stages = self.geometry.num_stages
            return reduced / stages if reduced.is_floating_point() else reduced // stages
        return reduced

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        self._begin_collective("self.all_gather")
        return super().all_gather(tensor, group, sync_grads)

    def barrier(self, name: str | None = None) -> None:
        collectives.forbid_in_step("strategy.barrier")
        if self._has_failed or not _distributed_is_initialized():
            return  # in a hook that runs on an exception there is nobody to wait for
        self._begin_collective("strategy.barrier")
        with together(name or "strategy.barrier", over=self._board is None):
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
        collectives.forbid_in_step(call)
        if self._has_failed:
            raise PipelineError(f"`{call}` was called after the run had failed: the other ranks do not answer any more")
        self.meet(f"calls `{call}`")

    def meet(self, where: str) -> None:
        """This rank is about to wait for all others; `where` completes a sentence about it, should they not come."""
        if self._standpoints is not None:
            self._standpoints.meet(where)

    # The end

    def _end_because(self, error: PipelineError) -> None:
        """End a run in which ranks wait in collectives, where they cannot raise what is wrong; called by a thread."""
        if self._board is not None:
            self._board.report_lost(self.global_rank, str(error))

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        if self._board is not None:
            self._board.report(exception)

    def _leave_processes(self) -> None:
        """The run is over on this rank: well, or because it has failed."""
        if self._board is None:
            return
        if not self._failed:
            self._board.ending = True
            self.barrier("teardown")
        self._board.close()  # after a failure, whoever catches the error may go on in this process
        self._board = None
