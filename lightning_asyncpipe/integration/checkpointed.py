"""Checkpoints as Lightning asks a strategy for them: the part that saves a run, and goes on from a saved one.

A save is a flush point. What is saved is the whole model and the optimizer's whole state, put together from their
owners, or every rank's own part; with it go the random states and the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from torch.optim import Optimizer

from lightning_asyncpipe.errors import PipelineError
from lightning_asyncpipe.integration import guards, internals, resuming, sharded
from lightning_asyncpipe.integration.afterwards import together
from lightning_asyncpipe.integration.assembly import Assembly
from lightning_asyncpipe.integration.checkpoint import load_hosted, load_whole
from lightning_asyncpipe.integration.files import AtomicCheckpointIO, local_path
from lightning_asyncpipe.integration.optimizers import OwnedOptimizer
from lightning_asyncpipe.integration.planned import PlannedStrategy
from lightning_asyncpipe.integration.resuming import Randomness
from lightning_asyncpipe.runtime.standpoint import SAVES

_SAVE = "trainer.save_checkpoint"


class CheckpointedStrategy(PlannedStrategy):
    """Saves the training that runs, or the last one that has run, and reads what was saved.

    Args:
        save_distributed_checkpoint: as for :class:`AsyncMultiPipeStrategy`.
        kwargs: as for :class:`PlannedStrategy`.
    """

    def __init__(self, save_distributed_checkpoint: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.save_distributed_checkpoint = save_distributed_checkpoint
        self._assembly: Assembly | None = None
        self._finished: Assembly | None = None
        self._owned: list[OwnedOptimizer] = []
        self.resumed: Randomness | None = None
        self.resumed_plan: Any = None
        self._weights_to_load: Mapping[str, Any] | None = None

    def setup_environment(self) -> None:
        self.resumed, self.resumed_plan, self._weights_to_load = None, None, None
        super().setup_environment()

    # Saving

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model on rank 0, or this rank's part; a flush point, since what is saved must be able to go on."""
        assert self.lightning_module is not None
        if self._has_failed:
            raise PipelineError(
                "the weights cannot be saved: training has failed, and every process holds a part of them only. Go on "
                "from the last checkpoint."
            )
        if self._assembly is not None:
            self.meet(SAVES)
            self._assembly.steps.flush()
            if not self.save_distributed_checkpoint:
                return self._assembly.whole.state_dict()
        assembly = self._assembly or self._finished
        if self.save_distributed_checkpoint and assembly is not None:
            return assembly.whole.part()
        return self.lightning_module.state_dict() if self.is_global_zero else {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        for owned in self._owned:
            if owned.optimizer is getattr(optimizer, "_optimizer", optimizer):
                assembly = self._assembly or self._finished
                assert assembly is not None
                if self.save_distributed_checkpoint:
                    return owned.full_state([owned.local_state()])
                with together(_SAVE, over=self._assembly is None):
                    return assembly.whole.optimizer_state(owned)
        raise MisconfigurationException("this optimizer is not one that `configure_optimizers` returned")

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What reads and writes checkpoints: files that are whole at every moment, unless another plugin is given."""
        return internals.io_or_default(self._checkpoint_io, AtomicCheckpointIO)

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        assembly = self._assembly or self._finished
        if assembly is not None and "optimizer_states" in checkpoint:
            own = {"parameters": [owned.order for owned in self._owned], "plan": self._plan_to_save()}
            checkpoint[resuming.KEY] = {**assembly.steps.random_states().to_dict(), **own}
        if not self.save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        guards.check_distributed_save(self._checkpoint_io, storage_options)
        names = {name: name for name in checkpoint["state_dict"]} if assembly is None else assembly.whole.names()
        with together(_SAVE, over=self._assembly is None):
            sharded.save(checkpoint, Path(self.broadcast(str(filepath))), self.world, names)

    # Loading

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """The whole checkpoint, on every rank; what a rank does not host it lets go of in ``setup``."""
        path = self.broadcast(str(checkpoint_path))
        folder = local_path(path)
        if folder is not None and folder.is_dir():
            assert self.lightning_module is not None
            checkpoint = sharded.load(folder, self.lightning_module, weights_only)
        else:
            checkpoint = super().load_checkpoint(path, weights_only)
        self.resumed, self.resumed_plan = resuming.Randomness.of(checkpoint, path), resuming.plan_of(checkpoint)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        state = checkpoint["state_dict"]
        self._weights_to_load = None if load_whole(self.lightning_module, state, strict) else state

    def load_weights(self) -> None:
        """Load what a checkpoint holds of weights for which there was no memory when it was read."""
        state, self._weights_to_load = self._weights_to_load, None
        if state is not None:
            assert self.lightning_module is not None
            load_hosted(self.lightning_module, state)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for owned, state in zip(self._owned, checkpoint["optimizer_states"], strict=True):
            owned.load_full_state(state)
            _optimizers_to_device([owned.optimizer], self.root_device)
