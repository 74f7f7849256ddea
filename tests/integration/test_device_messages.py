"""Messages from device to device: refused where they cannot be, the same training where they can."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_asyncpipe import AsyncMultiPipeStrategy
from lightning_asyncpipe.integration import device_messages
from lightning_asyncpipe.runtime.payloads import DevicePayloads
from tests.support.fit import fit, parameters_of
from tests.support.launch import run_ranks
from tests.support.models import GPT, LanguageModel, loader


def test_other_backends_than_gloo_and_nccl_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match="message_backend must be 'gloo' or 'nccl', got 'mpi'"):
        AsyncMultiPipeStrategy(message_backend="mpi")  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_nccl_for_messages_and_collectives_at_once_is_refused(backend: str) -> None:
    with pytest.raises(MisconfigurationException, match=r"exclude each other.*Leave process_group_backend out"):
        AsyncMultiPipeStrategy(message_backend="nccl", process_group_backend=backend)
    AsyncMultiPipeStrategy(message_backend="nccl", process_group_backend="gloo")


def test_nccl_is_refused_on_other_devices_before_a_process_is_started() -> None:
    strategy = AsyncMultiPipeStrategy(message_backend="nccl")
    with pytest.raises(MisconfigurationException, match=r"between GPUs.*of type 'cpu'.*Leave `message_backend` out"):
        pl.Trainer(strategy=strategy, devices=2, accelerator="cpu", logger=False)


def test_nccl_is_refused_where_torch_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(MisconfigurationException, match="this build of torch is without NCCL"):
        device_messages.check_device("nccl", torch.device("cuda", 0))
    device_messages.check_device("gloo", torch.device("cpu"))


def test_ranks_that_share_a_gpu_are_named() -> None:
    device_messages.require_own_devices(["a, GPU 1", "a, GPU 2", "b, GPU 1"])
    with pytest.raises(MisconfigurationException, match=r"ranks \[0, 2\] have one GPU between them \(a, GPU 1\)"):
        device_messages.require_own_devices(["a, GPU 1", "a, GPU 2", "a, GPU 1"])


def train_over_both() -> list[Any]:
    """Parameters and losses over gloo, and with large tensors over a group of their own, in the place of NCCL's."""
    passed: list[int] = []
    through = DevicePayloads.send

    def counted(self: DevicePayloads, peer: int, tensor: torch.Tensor) -> None:
        passed.append(tensor.nbytes)
        through(self, peer, tensor)

    DevicePayloads.send = counted  # type: ignore[method-assign]
    device_messages.check_device = lambda backend, device: None
    device_messages.payload_group = lambda world, device, timeout: dist.new_group(backend="gloo")
    results: list[Any] = []
    for backend in ("gloo", "nccl"):
        torch.manual_seed(1)
        module = LanguageModel(GPT(width=40), optimizer="adamw")
        strategy = AsyncMultiPipeStrategy(num_pipelines=2, num_microbatches=4, message_backend=backend)  # type: ignore[arg-type]
        _, losses = fit(module, loader(80, 16), strategy, devices=3, gradient_clip_val=0.5)
        results.append((parameters_of(module), losses, len(passed)))
    return results


def test_a_training_gives_the_same_bits_over_both() -> None:
    for (over_gloo, losses, none), (direct, other_losses, some) in run_ranks(train_over_both, 3):
        assert losses == other_losses
        assert all(torch.equal(over_gloo[name], direct[name]) for name in over_gloo)
        assert none == 0
        assert some > 20
