"""Scenarios about random numbers: dropout, noise in the step, and what activation checkpointing draws again."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.edge_basics import WIDTH, Regression, Tower, sized
from tests.support.edge_models import Of
from tests.support.edges import Scenarios
from tests.support.models import GPT, LanguageModel, loader

RANDOM = Scenarios()


class DropoutTower(Tower):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.dropout(torch.tanh(layer(x)), 0.3, self.training)
        return self.head(x).squeeze(-1)


class CheckpointedBlock(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return x + checkpoint(self.body, x, use_reentrant=False)
        return x + self.body(x)


class CheckpointedTower(nn.Module):
    """Blocks that are checkpointed, by themselves or by the model around them."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CheckpointedBlock(inside) for _ in range(4))
        self.outside = not inside
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.outside else block(x)
        return self.head(x).squeeze(-1)


class Noisy(Regression):
    """Draws in the step, before and after the model, and uses the early noise late, as diffusion does."""

    def __init__(self, dropout: bool = False) -> None:
        super().__init__()
        self.net = DropoutTower() if dropout else Tower()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        noise = torch.randn_like(x)
        time = torch.rand(len(x), dtype=x.dtype)
        mask = torch.rand(x.shape) < 0.3
        predicted = self.net((x + noise * time[:, None]).masked_fill(mask, 0.0))
        target = y + noise.mean(1) + 0.1 * torch.randn_like(y)
        loss = ((predicted - target) ** 2 * (1 + time)).mean()
        self.log("loss", loss)
        self.log("noise", noise.mean(), on_step=True)
        return loss


RANDOM.add("dropout", lambda: Of(DropoutTower()), lambda: sized(8, 8, 5, 8), reference="none")
RANDOM.add(
    "dropout of attention and blocks",
    lambda: LanguageModel(GPT(blocks=3, dropout=0.2)),
    lambda: loader(20, 5),
    reference="none",
)
RANDOM.add("noise in the step", Noisy, lambda: sized(8, 8, 5, 8), reference="none")
RANDOM.add("noise in the step and dropout", lambda: Noisy(True), lambda: sized(8, 8, 5, 8), reference="none")
for inside in (True, False):
    RANDOM.add(
        f"checkpointed blocks with dropout, {'inside' if inside else 'outside'}",
        lambda inside=inside: Of(CheckpointedTower(inside)),
        lambda: sized(8, 8, 5, 8),
        reference="none",
    )


class RememberedDropout(nn.Module):
    """Dropout that keeps a fingerprint of each of its masks."""

    masks: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand(x.shape, dtype=x.dtype) < 0.7
        if type(mask) is Tensor:
            self.masks.append(hash(tuple(mask.flatten().tolist())))
        return x * mask / 0.7


class RemembersMasks(Regression):
    """Checkpointed blocks; `seen` says how often each mask was drawn in training."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.net = CheckpointedTower(inside)
        for block in self.net.blocks:
            # So wide that no two masks are equal by chance.
            block.body = nn.Sequential(nn.Linear(WIDTH, 128), RememberedDropout(), nn.Linear(128, WIDTH))

    def on_train_start(self) -> None:
        RememberedDropout.masks.clear()

    def on_train_end(self) -> None:
        self.seen = sorted(Counter(RememberedDropout.masks).values())
