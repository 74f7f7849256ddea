"""Whether large tensors of messages can go from GPU to GPU, and the process group that carries them."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_asyncpipe.integration.world import World

MessageBackend = Literal["gloo", "nccl"]

_CTAS = 8  # blocks of a GPU that a transfer may take from computing
_SERIAL = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
_USE_GLOO = "Leave `message_backend` out: messages then travel over gloo."


def check_backends(message_backend: object, process_group_backend: str | None) -> None:
    """Refuse arguments of the strategy that do not fit each other.

    Raises:
        MisconfigurationException: says what was given and what is possible.
    """
    if message_backend not in ("gloo", "nccl"):
        raise MisconfigurationException(f"message_backend must be 'gloo' or 'nccl', got {message_backend!r}")
    if message_backend == "nccl" and process_group_backend not in (None, "gloo"):
        raise MisconfigurationException(
            f"message_backend='nccl' and process_group_backend={process_group_backend!r} exclude each other: "
            "operations of two communicators that run at once on a GPU can block each other. Leave "
            "process_group_backend out: collectives then travel over gloo, and NCCL carries messages alone."
        )


def check_device(message_backend: MessageBackend, device: torch.device) -> None:
    """Refuse NCCL where there is none; before any process is started.

    Raises:
        MisconfigurationException: says why, and what to do.
    """
    if message_backend != "nccl":
        return
    if device.type != "cuda":
        raise MisconfigurationException(
            f"message_backend='nccl' carries messages between GPUs, and this run is on a device of type "
            f"{device.type!r}. {_USE_GLOO}"
        )
    if not dist.is_nccl_available():
        raise MisconfigurationException(f"message_backend='nccl': this build of torch is without NCCL. {_USE_GLOO}")


def payload_group(world: World, device: torch.device, timeout: timedelta) -> dist.ProcessGroup:
    """One communicator of NCCL over all ranks, connected at once; every rank has to call it at the same point.

    Raises:
        MisconfigurationException: where two ranks have one GPU.
    """
    require_own_devices(world.all_gather(f"{socket.gethostname()}, {_identity(device)}"))
    os.environ.setdefault(_SERIAL, "false")  # that one transfer waits for the other is what is wanted
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = _CTAS
    group: dist.ProcessGroup = dist.new_group(
        backend="nccl", timeout=timeout, pg_options=options, device_id=device, group_desc="asyncpipe payloads"
    )
    return group


def require_own_devices(devices: Sequence[str]) -> None:
    """Compare the names of the ranks' GPUs.

    Raises:
        MisconfigurationException: names ranks that have one GPU between them: NCCL would hang.
    """
    for name in dict.fromkeys(devices):
        ranks = [rank for rank, other in enumerate(devices) if other == name]
        if len(ranks) > 1:
            raise MisconfigurationException(
                f"message_backend='nccl': the ranks {ranks} have one GPU between them ({name}), which NCCL does not "
                "allow. Give each process a GPU of its own, or leave `message_backend` out."
            )


def _identity(device: torch.device) -> str:
    """A name of a GPU that all processes of a machine give it, whatever they see of it."""
    return f"GPU {torch.cuda.get_device_properties(device).uuid}"
