"""Models built in ``configure_model``: nobody ever holds one whole.

The hook runs without memory (:mod:`lightning_asyncpipe.runtime.deferred`). Then buffers get their values, since the
step needs them to be traced, and parameters stay hollow until it is known which of them this rank hosts: those are
filled, with the values that building the model on one device would have given from the random state of rank 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_asyncpipe._private import swap
from lightning_asyncpipe.integration.world import World
from lightning_asyncpipe.runtime.deferred import Recording, unfilled
from lightning_asyncpipe.runtime.hollow import hollow, is_hollow

_PART = 1 << 20
"""Bytes that are added up at once: they are made wider for it."""


class DeferredModel:
    """What ``configure_model`` has built without memory, on this rank."""

    def __init__(self) -> None:
        self._recording = Recording()
        self._templates: dict[str, Tensor] = {}

    @property
    def used(self) -> bool:
        """Whether the running fit's model was built, in part at least, without memory."""
        return bool(self._templates)

    @contextmanager
    def building(self) -> Iterator[None]:
        """Around ``configure_model``."""
        self._recording = Recording()
        with self._recording.building():
            yield

    def prepare(self, module: nn.Module, device: torch.device, world: World) -> None:
        """Fill buffers and make parameters hollow, before anything looks at the model; every rank has to call it."""
        self._templates = {}
        empty = unfilled(module)
        if not any(world.all_gather(bool(empty))):
            return
        self._recording.set_states(world.broadcast(self._recording.states()))
        parameters = dict(module.named_parameters())
        buffers = [tensor for name, tensor in empty.items() if name not in parameters]
        for buffer, value in self._recording.values(buffers):
            swap(buffer, value.to(device))
        for name, parameter in parameters.items():
            if name in empty:
                trained = parameter.requires_grad
                shell = nn.Parameter(torch.zeros((), dtype=parameter.dtype, device=device), requires_grad=False)
                zero = shell.data
                shell.data = zero.expand(parameter.shape)
                hollow(shell, zero)  # not NaN, which the step may refuse when it is traced
                swap(parameter, shell)
                parameter.requires_grad_(trained)
                self._templates[name] = shell

    def fill(self, module: nn.Module, hosted: Collection[str], world: World) -> None:
        """Give memory and values to the parameters that this rank hosts; every rank has to call it."""
        if not self.used:
            return
        parameters = dict(module.named_parameters())
        mine = [name for name in self._templates if name in hosted]
        names = {id(self._templates[name]): name for name in mine}
        for template, value in self._recording.values([self._templates[name] for name in mine]):
            parameter = parameters[names[id(template)]]
            parameter.data = value.to(parameter.device, parameter.dtype)
        self._recording = Recording()  # it may hold data that was loaded
        self._agree(parameters, mine, world)

    def _agree(self, parameters: dict[str, nn.Parameter], mine: Collection[str], world: World) -> None:
        """Hosts of a parameter have the same values, also where code took them from elsewhere than torch."""
        sums = {name: _checksum(parameters[name]) for name in mine}
        everywhere = world.all_gather(sums)
        for name in self._templates:
            hosts = [rank for rank, found in enumerate(everywhere) if name in found]
            if len({everywhere[rank][name] for rank in hosts}) > 1:
                parameter = parameters[name]
                kept = (
                    parameter.data
                    if name in sums
                    else torch.empty_like(parameter, memory_format=torch.contiguous_format)
                )
                with torch.no_grad():
                    world.broadcast_tensor(kept.detach(), hosts[0])

    @contextmanager
    def released(self, module: nn.Module | None) -> Iterator[None]:
        """Around the moving of the model off its device, at the end of a run.

        What this rank does not hold goes to the meta device then, where no use of it goes unnoticed.
        """
        own = dict(module.named_parameters()) if module is not None else {}
        elsewhere = [parameter for name, parameter in own.items() if name in self._templates and is_hollow(parameter)]
        for parameter in elsewhere:
            parameter.data = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)  # moving must not fill it
            hollow(parameter)
        yield
        for parameter in elsewhere:
            trained = parameter.requires_grad
            gone = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
            swap(parameter, gone)
            parameter.requires_grad_(trained)


def _checksum(parameter: Tensor) -> int:
    """A sum over the bytes of a parameter."""
    content = parameter.detach().contiguous().view(-1).view(torch.uint8)
    parts: tuple[Tensor, ...] = torch.split(content, _PART)
    return sum([int(part.sum(dtype=torch.int64)) for part in parts])
