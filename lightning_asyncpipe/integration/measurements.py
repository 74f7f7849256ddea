"""What a plan depends on beside the model: the memory of devices, the optimizer, the link between ranks."""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_asyncpipe.integration.world import World
from lightning_asyncpipe.plan.profile import Link
from lightning_asyncpipe.runtime.profile import now

_TRIAL = (512, 1024)
_ADAM = 8.0
"""Bytes of state for an element under Adam."""
_PINGS = 9
_FREE = 0.9
"""The share of a GPU's memory that a plan may use."""


def memory_of(device: torch.device) -> int | None:
    """Bytes of a device that a plan may use; None where there is no telling."""
    if device.type != "cuda":
        return None
    return int(_FREE * torch.cuda.get_device_properties(device).total_memory)


def optimizer_costs(optimizers: list[Optimizer], device: torch.device) -> tuple[float, float]:
    """Bytes of state for each element of a parameter, and seconds for each byte: one step on a parameter made for it.

    What cannot be tried out is taken to be like Adam.
    """
    if not optimizers:
        return 0.0, 0.0
    optimizer = optimizers[0]
    trial = torch.zeros(_TRIAL, device=device, requires_grad=True)
    # A twin with the same settings but no constructor, whose arguments nobody knows, and no hooks.
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.state = defaultdict(dict)
    twin.param_groups = [{**optimizer.param_groups[0], "params": [trial]}]
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    seconds = 0.0
    try:
        for _ in range(2):
            trial.grad = torch.ones_like(trial)
            begin = now(device)
            type(optimizer).step(twin)  # schedulers replace the instance's own
            seconds = now(device) - begin
    except Exception:
        return _ADAM, 0.0
    tensors = [value for value in twin.state[trial].values() if isinstance(value, torch.Tensor) and value.numel() > 1]
    return sum(tensor.nbytes for tensor in tensors) / trial.numel(), seconds / trial.nbytes


def measure_link(world: World, nbytes: int = 1 << 20) -> Link | None:
    """How long messages between two ranks take; every rank has to call it. None where there is one rank.

    Half a round trip between ranks 0 and 1, of a small message and a large one; the shortest of some, since waiting for
    a busy core is not the link's. A message of a pipeline is a header and its content.
    """
    if world.size == 1:
        return None
    small, large = (_half_round_trip(world, size) for size in (256, nbytes))
    return Link(2 * small, nbytes / max(large - small, 1e-9))


def _half_round_trip(world: World, nbytes: int) -> float:
    seconds = []
    message = torch.zeros(nbytes, dtype=torch.uint8)
    for _ in range(_PINGS if world.rank < 2 else 0):
        begin = time.perf_counter()
        if world.rank == 0:
            dist.send(message, 1, group=world.control)
            dist.recv(message, 1, group=world.control)
        else:
            dist.recv(message, 0, group=world.control)
            dist.send(message, 0, group=world.control)
        seconds.append(time.perf_counter() - begin)
    return min(seconds, default=0.0) / 2
