"""The whole model, put together from its owners.

A full checkpoint means what a one-device checkpoint means: parameters under the names that the module gives them, the
optimizer's state numbered as one device numbers it. What no longer fits one device is gathered in CPU memory of rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_asyncpipe.errors import PipelineError
from lightning_asyncpipe.integration.optimizers import OwnedOptimizer
from lightning_asyncpipe.integration.world import World
from lightning_asyncpipe.runtime.hollow import is_hollow
from lightning_asyncpipe.runtime.ownership import Ownership


class WholeModel:
    """Gathers what the ranks own.

    Args:
        module: the LightningModule, of which this rank holds a part.
        ownership: the owner of every parameter.
        buffer_owner: the rank whose copy of a buffer counts, by name.
        world: collectives over all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        ownership: Ownership,
        buffer_owner: Mapping[str, int],
        world: World,
    ) -> None:
        self._module = module
        self._ownership = ownership
        self._buffer_owner = buffer_owner
        self._world = world

    def state_dict(self) -> dict[str, Any]:
        """The module's whole ``state_dict()`` in CPU memory on rank 0; empty elsewhere. All ranks have to call it."""
        rank = self._world.rank
        mine = {name: tensor.detach().cpu() for name, tensor in self._tensors().items() if self._owner(name) == rank}
        parts = self._world.gather(mine if rank else {})
        if parts is None:
            return {}
        parts[0] = mine
        whole = {name: tensor for part in parts for name, tensor in part.items()}
        first_name = self._first_names()
        state = self._module.state_dict()
        for key in state:
            name = first_name.get(key)
            if name in whole:
                state[key] = whole[name]
        return state

    def restore(self) -> None:
        """Give every rank the whole model again, parameters and buffers."""
        for name, tensor in self._tensors().items():
            if is_hollow(tensor):
                tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            with torch.no_grad():
                self._world.broadcast_tensor(tensor.data, self._owner(name))

    def optimizer_state(self, optimizer: OwnedOptimizer) -> dict[str, Any]:
        """The whole ``optimizer.state_dict()`` in CPU memory on rank 0; empty elsewhere."""
        local = optimizer.local_state()
        parts = self._world.gather(_to_cpu({"state": local["state"]}) if self._world.rank else {})
        if parts is None:
            return {}
        parts[0] = local
        return optimizer.full_state(parts)

    def _tensors(self) -> dict[str, Tensor]:
        return {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}

    def _owner(self, name: str) -> int:
        owner = self._ownership.owner.get(name)
        return self._buffer_owner.get(name, 0) if owner is None else owner

    def _first_names(self) -> dict[str, str]:
        """For every name of a parameter or buffer, tied ones included, the first name of the same tensor."""
        first = {id(tensor): name for name, tensor in self._tensors().items()}
        every = [
            *self._module.named_parameters(remove_duplicate=False),
            *self._module.named_buffers(remove_duplicate=False),
        ]
        return {name: first[id(tensor)] for name, tensor in every}


def _to_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _to_cpu(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to_cpu(entry) for entry in value)
    return value


def synchronise(module: nn.Module, world: World) -> None:
    """Give every rank the parameters and buffers of rank 0.

    Raises:
        PipelineError: if the ranks built different modules.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    signature = {name: [str(t.dtype), *map(str, t.shape)] for name, t in tensors.items()}
    expected = world.broadcast(signature)
    differing = sorted(name for name in {*signature, *expected} if signature.get(name) != expected.get(name))
    faults = world.all_gather(differing)
    for rank, names in enumerate(faults):
        if names:
            raise PipelineError(
                f"rank {rank} built another model than rank 0: {', '.join(names[:5])} "
                f"({len(names)} in all) differ in shape or data type or are missing. All ranks must build the same "
                "module."
            )
    for tensor in tensors.values():
        with torch.no_grad():
            world.broadcast_tensor(tensor.data, 0)
