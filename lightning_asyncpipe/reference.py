"""The same training, by one process: what the pipelines must compute, without the pipelines.

``ReferenceStrategy`` runs the schedule of D devices in one process on one copy of the weights, staleness included. Use
it to see what asynchrony does to a model's training before there are D devices, or to tell a fault of the model from
one of the distributed run.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies.launchers.launcher import _Launcher
from torch import nn

from lightning_asyncpipe.integration.steps import Executor
from lightning_asyncpipe.plan.geometry import Geometry
from lightning_asyncpipe.plan.schedule import Planner
from lightning_asyncpipe.runtime.forwards import ForwardExecutor, ForwardOracle
from lightning_asyncpipe.runtime.oracle import Oracle
from lightning_asyncpipe.runtime.ownership import Ownership
from lightning_asyncpipe.runtime.prediction import Prediction
from lightning_asyncpipe.runtime.stages import StageRunner
from lightning_asyncpipe.runtime.staleness import StalenessCounter
from lightning_asyncpipe.strategy import AsyncMultiPipeStrategy


class ReferenceStrategy(AsyncMultiPipeStrategy):
    """`num_stages` emulated devices in one process. ``Trainer(devices=1, strategy=ReferenceStrategy(num_stages=4))``.

    Args:
        num_stages: D, devices to emulate.
        kwargs: as for :class:`AsyncMultiPipeStrategy`, but for ``data_parallel_size`` and how processes start.
    """

    def __init__(self, num_stages: int, **kwargs: Any) -> None:
        super().__init__(num_stages=num_stages, **kwargs)
        self._emulated = num_stages

    @property
    def _placed_processes(self) -> int:
        return self._emulated

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    def _configure_launcher(self) -> None:
        self._launcher: _Launcher | None = None

    def _connect_processes(self) -> None:
        self.set_world_ranks()

    def hosted_by_this_process(self, ownership: Ownership) -> frozenset[str]:
        return frozenset(ownership.owner)

    def make_executor(
        self,
        geometry: Geometry,
        planner: Planner,
        runner: StageRunner,
        ownership: Ownership,
        parameters: dict[str, nn.Parameter],
    ) -> Executor:
        stashes = [self._stash(runner, parameters, ownership.owned(d)) for d in range(geometry.num_stages)]
        if not isinstance(stashes[0], Prediction):  # otherwise each device goes by the gradients that it has itself
            stashes = stashes[:1] * geometry.num_stages
        return Oracle(planner, runner, parameters, StalenessCounter(self.max_staleness), stashes)

    def make_forward_executor(self, geometry: Geometry) -> ForwardExecutor:
        return ForwardOracle(geometry.num_stages)
