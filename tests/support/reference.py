"""What everything is compared with: one device that accumulates the same micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_asyncpipe.runtime.microbatch import split


class _NoTrainer:
    """Stands in for the Trainer of a module whose step logs."""

    barebones = True
    logger = None


def train_one_device(
    module: pl.LightningModule,
    batches: Iterable[Any],
    microbatches: int,
    accumulate: int = 1,
    clip: float | None = None,
    replicas: int = 1,
    min_samples: int = 1,
) -> list[float]:
    """Train by hand on `batches`, for replicas on consecutive ones, each split in micro-batches.

    Returns:
        The loss of every batch (mean over replicas).
    """
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    configured = module.configure_optimizers()
    optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
    scheduler = configured["lr_scheduler"]["scheduler"] if isinstance(configured, dict) else None
    losses: list[float] = []
    groups = _grouped(batches, replicas)
    optimizer.zero_grad()
    for index, group in enumerate(groups):
        total = 0.0
        for batch in group:
            parts = split(batch, microbatches, min_samples=min_samples)
            samples = sum(part.size for part in parts)
            for part in parts:
                loss = _loss(module.training_step(part.data, index))
                weight = part.size / samples / accumulate / replicas
                (loss * weight).backward()
                total += float(loss.detach()) * part.size / samples / replicas
        losses.append(total)
        if (index + 1) % accumulate == 0 or index + 1 == len(groups):
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
    del module.log
    return losses


def _loss(output: Any) -> Tensor:
    return output["loss"] if isinstance(output, dict) else output


def _grouped(batches: Iterable[Any], replicas: int) -> Sequence[Sequence[Any]]:
    every = list(batches)
    return [every[i : i + replicas] for i in range(0, len(every), replicas)]


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest absolute difference over all tensors; names must agree."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return max((float((one[k].double() - other[k].double()).abs().max()) for k in one if one[k].numel()), default=0.0)
