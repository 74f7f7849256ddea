"""Bounded-asynchronous, multi-directional pipeline parallelism for unmodified LightningModules.

Importing the package registers the strategy: ``Trainer(strategy="async_multipipe")``.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_asyncpipe.errors import (
    CheckpointError,
    CollectiveInStepError,
    CutError,
    DataMismatchError,
    PeerFailure,
    PipelineError,
    ScheduleError,
)
from lightning_asyncpipe.integration.children import enter_child
from lightning_asyncpipe.integration.sharded import consolidate
from lightning_asyncpipe.monitor.callback import PipelineMonitor
from lightning_asyncpipe.reference import ReferenceStrategy
from lightning_asyncpipe.strategy import AsyncMultiPipeStrategy

__all__ = [
    "AsyncMultiPipeStrategy",
    "CheckpointError",
    "CollectiveInStepError",
    "CutError",
    "DataMismatchError",
    "PeerFailure",
    "PipelineError",
    "PipelineMonitor",
    "ReferenceStrategy",
    "ScheduleError",
    "consolidate",
]

__version__ = "0.1.0"

enter_child()  # a rank that another one started ends with it, also where it has not come to its Trainer yet

if "async_multipipe" not in StrategyRegistry:
    StrategyRegistry.register(
        "async_multipipe",
        AsyncMultiPipeStrategy,
        description="Bounded-asynchronous, multi-directional pipeline parallelism",
    )
