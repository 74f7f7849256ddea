"""The whole model, put together from its owners.

A full checkpoint means what a one-device checkpoint means: parameters under the names that the module gives them, the
optimizer's state numbered as one device numbers it. What no longer fits one device is gathered in CPU memory of rank 0,
tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lightning_asyncpipe._private import FakeTensor
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
        whole: dict[str, Tensor] = {}
        for name, tensor in self._tensors().items():  # one by one, so that a device never holds another's part
            owner = self._owner(name)
            if rank == 0:
                local = owner == 0
                whole[name] = (
                    tensor.detach().cpu() if local else self._world.receive_tensor(tensor.shape, tensor.dtype, owner)
                )
            elif rank == owner:
                self._world.send_tensor(tensor)
        if rank:
            return {}
        first_name = self._first_names()
        state = self._module.state_dict()
        for key in state:
            first = first_name.get(key)
            if first in whole:
                state[key] = whole[first]
        return state

    def part(self) -> dict[str, Any]:
        """What this rank has to save of the whole ``state_dict()``: each tensor is in the part of one rank, once."""
        rank = self._world.rank
        first = self._first_names()
        part = {}
        for key, value in self._module.state_dict().items():
            name = first.get(key)
            if name is None:  # no tensor of the module's own
                if rank == 0:
                    part[key] = value
            elif name == key and self._owner(name) == rank:
                part[key] = value
        return part

    def names(self) -> dict[str, str]:
        """The names of the whole ``state_dict()``, each with the first name of its tensor."""
        first = self._first_names()
        return {key: first.get(key, key) for key in self._module.state_dict()}

    def restore(self) -> None:
        """Give every rank the whole model again, parameters and buffers."""
        for name, tensor in self._tensors().items():
            if is_hollow(tensor):  # in CPU memory: the whole may not fit the device, which it leaves anyway
                tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype)
            with torch.no_grad():
                self._world.broadcast_tensor(tensor.data, self._owner(name))

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """Every rank has the whole model in here; all ranks have to enter it."""
        tensors = self._tensors()
        hollow = {name: tensor.data for name, tensor in tensors.items() if is_hollow(tensor)}
        with torch.inference_mode(False):
            self.restore()
        try:
            yield
        finally:
            for name, data in hollow.items():
                tensors[name].data = data

    def optimizer_state(self, optimizer: OwnedOptimizer) -> dict[str, Any]:
        """The whole ``optimizer.state_dict()`` in CPU memory on rank 0; empty elsewhere."""
        local = optimizer.local_state()
        if self._world.rank:
            tensors = {number: _tensors_of(state) for number, state in local["state"].items()}
            others = {number: _others_of(state) for number, state in local["state"].items()}
            sizes = {n: {key: [t.shape, t.dtype] for key, t in found.items()} for n, found in tensors.items()}
            self._world.gather({"tensors": sizes, "others": _to_cpu(others)})
            for found in tensors.values():
                for tensor in found.values():
                    self._world.send_tensor(tensor)
            return {}
        headers = self._world.gather({})
        assert headers is not None
        parts: list[dict[str, Any]] = [{**local, "state": _to_cpu(local["state"])}]
        for rank, header in enumerate(headers[1:], 1):
            state = header["others"]
            for number, sizes in header["tensors"].items():
                for key, (shape, dtype) in sizes.items():
                    state[number][key] = self._world.receive_tensor(shape, dtype, rank)
            parts.append({"state": state})
        return optimizer.full_state(parts)

    def _tensors(self) -> dict[str, Tensor]:
        return {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}

    def _owner(self, name: str) -> int:
        if self._world.size == 1:  # it emulates the owners
            return 0
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


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized


def _tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if _is_dense(value)}


def _others_of(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if not _is_dense(value)}


def _to_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _to_cpu(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to_cpu(entry) for entry in value)
    return value


_incomplete: WeakSet[nn.Module] = WeakSet()


def leave_incomplete(module: nn.Module) -> None:
    """Remember that a module was left with this rank's part of the weights, of which some may be out of date."""
    _incomplete.add(module)


def _lacking(module: nn.Module) -> list[str]:
    """Names of the weights that a training which failed has left without, or out of date."""
    if module in _incomplete:
        return [name for name, _ in module.named_parameters()]
    return [name for name, parameter in module.named_parameters() if is_hollow(parameter)]


def check_complete(module: nn.Module, world: World) -> None:
    """Refuse a module that a training which failed has left incomplete; every rank has to call it.

    Raises:
        PipelineError: names the rank and its weights.
    """
    for rank, names in enumerate(world.all_gather(_lacking(module))):
        if names:
            raise PipelineError(
                f"a training of this module failed, and left it on rank {rank} without the weights of "
                f"{', '.join(names[:3])} ({len(names)} in all), or with old ones. Build a new module, or go on from a "
                "checkpoint with `fit(ckpt_path=...)`."
            )


def load_whole(module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> bool:
    """``module.load_state_dict`` of a whole model, also into one that has let go of weights.

    Returns:
        False, with the names and shapes compared, where the module has no memory yet: :func:`load_hosted` loads it once
        this rank has made room for what it hosts.

    Raises:
        RuntimeError: as `load_state_dict`: names missing and unexpected keys.
        PipelineError: the state lacks weights that the module has let go of.
    """
    parameters = dict(module.named_parameters())
    lacking = {id(parameters[name]): name for name in _lacking(module)}
    given = {id(p) for name, p in module.named_parameters(remove_duplicate=False) if name in state}
    lost = [name for key, name in lacking.items() if key not in given]
    if lost:
        raise PipelineError(
            f"a training of this module failed, and left it without the weights of {', '.join(lost[:3])} "
            f"({len(lost)} in all), which the checkpoint does not hold either: build a new module"
        )
    if any(is_deferred(tensor) for tensor in (*module.parameters(), *module.buffers())):
        _compare(module, state, strict)
        return False
    for parameter in parameters.values():
        if is_hollow(parameter):
            parameter.data = torch.empty_like(parameter, memory_format=torch.contiguous_format)
    module.load_state_dict(state, strict=strict)
    _incomplete.discard(module)
    return True


def load_hosted(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load of a whole state what this rank hosts."""
    elsewhere = {name for name, p in module.named_parameters(remove_duplicate=False) if is_hollow(p)}
    module.load_state_dict({name: value for name, value in state.items() if name not in elsewhere}, strict=False)


def is_deferred(tensor: Tensor) -> bool:
    """Whether a tensor has no memory yet: it was made on the meta device, or by a recorded ``configure_model``."""
    return tensor.device.type == "meta" or isinstance(tensor.data, FakeTensor)


def _compare(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Raise what `load_state_dict` would raise, without loading."""
    own = module.state_dict()
    faults = []
    if strict:
        for title, names in (("Missing", own.keys() - state.keys()), ("Unexpected", state.keys() - own.keys())):
            if names:
                listed = ", ".join(f'"{name}"' for name in (*own, *state) if name in names)
                faults.append(f"{title} key(s) in state_dict: {listed}. ")
    for name, value in state.items():
        ours = own.get(name)
        if isinstance(ours, Tensor) and isinstance(value, Tensor) and ours.shape != value.shape:
            faults.append(
                f"size mismatch for {name}: copying a param with shape {value.shape} from checkpoint, the shape in "
                f"current model is {ours.shape}."
            )
    if faults:
        listed = "".join(f"\n\t{fault}" for fault in faults)
        raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}:{listed}")


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
        if is_hollow(tensor):
            continue  # it is filled alike on all ranks later
        with torch.no_grad():
            world.broadcast_tensor(tensor.data, 0)
