"""What is trained, interrupted and resumed: a module and loaders that draw random numbers wherever one can."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_asyncpipe import ReferenceStrategy
from tests.support.edge_basics import WIDTH, Points, Tower
from tests.support.fit import fit

SAMPLES, BATCH = 50, 10
PER_EPOCH = SAMPLES // BATCH


class Augmented(Points):
    """Points that are moved at random each time they are read."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(WIDTH, dtype=torch.float64) + 0.1 * random.random(), y


class Resumable:
    """A shuffling loader that can go on in the middle of an epoch."""

    def __init__(self) -> None:
        self.data = Augmented(SAMPLES)
        self.state: dict[str, Any] = {"position": 0, "order": []}

    def __iter__(self) -> Iterator[list[Tensor]]:
        if self.state["position"] == 0:
            self.state["order"] = torch.randperm(SAMPLES).tolist()
        while True:
            start = self.state["position"]
            items = [self.data[i] for i in self.state["order"][start : start + BATCH]]
            self.state["position"] = (start + BATCH) % SAMPLES
            yield [torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])]
            if self.state["position"] == 0:
                return

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


class SizedResumable(Resumable):
    def __len__(self) -> int:
        return PER_EPOCH


LOADERS = {
    "resumable": SizedResumable,
    "resumable without a length": Resumable,
    "shuffled": lambda: DataLoader(Augmented(SAMPLES), BATCH, shuffle=True),
    "shuffled by a generator of its own": lambda: DataLoader(
        Augmented(SAMPLES), BATCH, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
}


class Drawing(pl.LightningModule):
    """Draws in its step, its layers and a hook; has running statistics, and a schedule that asks for the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), Tower(4))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self.net(x + 0.1 * torch.randn_like(x)), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.drawn = random.random(), float(torch.rand(()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer = self.trainer
        self.seen.append((trainer.global_step, trainer.current_epoch, batch_idx, float(batch[0].sum()), *self.drawn))

    def on_train_start(self) -> None:
        torch.rand(3)  # which an uninterrupted run does only once
        random.random()

    def on_train_epoch_start(self) -> None:
        random.random()

    def configure_optimizers(self) -> Any:
        steps = max(100, self.trainer.estimated_stepping_batches)
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Saves(pl.Callback):
    """Saves after some steps, and at the ends of epochs."""

    def __init__(self, directory: Path, steps: tuple[int, ...] = (), epochs: bool = True) -> None:
        self.directory, self.steps, self.epochs = directory, steps, epochs

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(self.directory / f"step-{trainer.global_step}.ckpt")

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.epochs:
            trainer.save_checkpoint(self.directory / f"epoch-{trainer.current_epoch}.ckpt")


def draw(
    strategy: Any, loader: str, saves: Saves, ckpt_path: Path | None = None, devices: int = 1, **arguments: Any
) -> tuple[pl.Trainer, Drawing]:
    """Train a :class:`Drawing`; one that is resumed starts from other random states and weights."""
    seed = 1 if ckpt_path is None else 99
    torch.manual_seed(seed)
    random.seed(seed)
    module = Drawing().double()
    arguments = {"max_epochs": 3, "callbacks": [saves], "ckpt_path": ckpt_path, **arguments}
    trainer, _ = fit(module, LOADERS[loader](), strategy, devices, **arguments)
    return trainer, module


def emulated(**options: Any) -> ReferenceStrategy:
    return ReferenceStrategy(**{"num_stages": 3, "num_microbatches": 4, **options})
