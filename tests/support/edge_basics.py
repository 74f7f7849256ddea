"""What scenarios are made of: a small data set, a small model, and loaders with and without a length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

WIDTH = 5


class Points(Dataset[dict[str, Any]]):
    """Inputs and targets, a function of their number alone."""

    def __init__(self, count: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
        self.y = torch.randn(count, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Tower(nn.Module):
    """Residual layers, a list of them."""

    def __init__(self, layers: int = 6, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x).squeeze(-1)


class Regression(pl.LightningModule):
    """A regression whose loss is a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Tower()

    def inputs(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        return x, y

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = self.inputs(batch)
        loss = F.mse_loss(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def sized(*sizes: int, collate: Any = None, **kwargs: Any) -> DataLoader[Any]:
    """A loader of batches of these sizes."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    samples = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    return DataLoader(Points(sum(sizes)), batch_sampler=samples, collate_fn=collate, **kwargs)


class Stream(IterableDataset[Any]):
    """A data set without a length."""

    def __init__(self, count: int) -> None:
        self.points = Points(count)

    def __iter__(self) -> Iterator[Any]:
        yield from (self.points[i] for i in range(len(self.points)))


def stream(count: int, batch_size: int) -> DataLoader[Any]:
    return DataLoader(Stream(count), batch_size=batch_size)


def shuffled(count: int, batch_size: int) -> DataLoader[Any]:
    """Another order in each epoch, from a generator of its own."""
    return DataLoader(Points(count), batch_size, shuffle=True, generator=torch.Generator().manual_seed(5))
