"""Lightning's averages of weights, of which each rank keeps what it owns.

``WeightAveraging`` and ``EMAWeightAveraging`` update a copy of the model after each step, validate with it and save it.
Here each rank averages the parameters that it owns, whose newest values it has; the copies of all others are on the
meta device, where the callback's arithmetic costs nothing. For a validation owners send their averages to the ranks
that host the parameter; for a checkpoint they are gathered like the weights themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn

from lightning_asyncpipe.integration.checkpoint import WholeModel, synchronise
from lightning_asyncpipe.integration.internals import AveragingCallback
from lightning_asyncpipe.integration.world import World
from lightning_asyncpipe.runtime.hollow import is_hollow
from lightning_asyncpipe.runtime.ownership import Ownership


class AveragedParts:
    """Makes one callback of Lightning's average in parts, until it is closed.

    Args:
        callback: has made its copy of the whole model.
        module: the module that trains.
        ownership: the owner of every parameter.
        buffer_owner: the rank whose copy of a buffer counts, by name.
        world: collectives over all ranks.
        flush: brings all replicas of all weights up to date; all ranks call it at the same point.
    """

    def __init__(
        self,
        callback: WeightAveraging,
        module: pl.LightningModule,
        ownership: Ownership,
        buffer_owner: Mapping[str, int],
        world: World,
        flush: Callable[[], None],
    ) -> None:
        self._callback = AveragingCallback(callback)
        self._module = module
        self._owner = ownership.owner
        self._world = world
        self._flush = flush
        self._current: dict[str, Tensor] = {}
        average = self._callback.average.module
        self._whole = WholeModel(average, ownership, buffer_owner, world)
        synchronise(average, world)
        _let_go(average, {name for name, _ in average.named_parameters() if self._owner[name] != world.rank})
        self._average = dict(average.named_parameters())
        self._average_buffers = dict(average.named_buffers())
        self._callback.replace(self._swap, self._copy, self._save)

    def _swap(self, pl_module: pl.LightningModule) -> None:
        """Put the averages in the place of the weights; the next time put the weights back."""
        with torch.no_grad():
            if self._current:
                for name, tensor in self._tensors().items():
                    if name in self._current:
                        tensor.data.copy_(self._current[name])
                self._current = {}
                return
            self._current = {
                name: tensor.data.clone() for name, tensor in self._tensors().items() if not is_hollow(tensor)
            }
            self._install()

    def _copy(self, pl_module: pl.LightningModule) -> None:
        self._flush()
        with torch.no_grad():
            self._install()

    def _install(self) -> None:
        """Overwrite what this rank has of the module with the averages."""
        for name, parameter in self._module.named_parameters():
            owner = self._owner[name]
            own = self._average[name].data if owner == self._world.rank else torch.empty(parameter.shape)
            value = own.to(parameter.device, parameter.dtype, copy=True)
            self._world.broadcast_tensor(value, owner)
            if not is_hollow(parameter):
                parameter.data.copy_(value)
        for name, buffer in self._module.named_buffers():
            buffer.data.copy_(self._average_buffers[name].data)

    def _tensors(self) -> dict[str, Tensor]:
        return {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}

    def _save(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """As the callback has it, with the whole average."""
        checkpoint["current_model_state"] = checkpoint["state_dict"]
        checkpoint["state_dict"] = self._whole.state_dict()
        checkpoint["averaging_state"] = {
            name: value for name, value in self._callback.average.state_dict().items() if not name.startswith("module.")
        }

    def close(self) -> None:
        """Training has ended: its average is in the module, and the callback has no copy in parts any more."""
        self._callback.restore()


def _let_go(module: nn.Module, names: set[str]) -> None:
    """Replace parameters, under all their names, by ones of the same shape on the meta device."""
    replacements = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        for name, parameter in module.named_parameters()
        if name in names
    }
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in replacements:
                setattr(part, name, replacements[id(parameter)])


def averages_in_parts(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    ownership: Ownership,
    buffer_owner: Mapping[str, int],
    world: World,
    flush: Callable[[], None],
) -> list[AveragedParts]:
    """Let each averaging callback of a trainer keep what this rank owns; the arguments are those of the class."""
    if world.size == 1:
        return []
    return [
        AveragedParts(callback, module, ownership, buffer_owner, world, flush)
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging)
    ]
