"""Fits with a Trainer that prints nothing and writes nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_asyncpipe import AsyncMultiPipeStrategy, ReferenceStrategy


class Losses(pl.Callback):
    """The loss that each batch returned to the loop."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)


def fit(
    module: pl.LightningModule,
    batches: Iterable[Any],
    strategy: AsyncMultiPipeStrategy | str,
    devices: int = 1,
    **trainer_arguments: Any,
) -> tuple[pl.Trainer, list[float]]:
    """Train `module` on a loader, from `ckpt_path` if given; returns the trainer and the loss of every batch."""
    loading = {key: trainer_arguments.pop(key) for key in ("ckpt_path", "weights_only") if key in trainer_arguments}
    losses = Losses()
    arguments: dict[str, Any] = {
        "max_epochs": 1,
        "precision": "64-true",
        "accelerator": "cpu",
        "devices": devices,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
        "use_distributed_sampler": False,
        **trainer_arguments,
    }
    callbacks = [losses, *arguments.pop("callbacks", [])]
    trainer = pl.Trainer(strategy=strategy, callbacks=callbacks, **arguments)
    trainer.fit(module, batches, **loading)
    return trainer, losses.values


def reference_fit(
    module: pl.LightningModule, batches: Iterable[Any], num_stages: int, strategy: dict[str, Any], **arguments: Any
) -> tuple[pl.Trainer, list[float]]:
    """:func:`fit` in this process, with emulated devices."""
    return fit(module, batches, ReferenceStrategy(num_stages, **strategy), **arguments)


def parameters_of(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def clone(module: pl.LightningModule, dtype: torch.dtype = torch.float64) -> pl.LightningModule:
    """An equal module of its own."""
    return copy.deepcopy(module).to(dtype)
