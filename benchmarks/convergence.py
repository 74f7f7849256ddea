#!/usr/bin/env python3
"""What asynchrony costs in quality: final validation losses against synchronous training, at equal steps.

Every run is one process that executes the schedule of D devices on one copy of the weights (``ReferenceStrategy``), so
nothing but the numerics differs. ``synchronous`` (``max_staleness=0``) is, to rounding, one device that accumulates the
same micro-batches; the other columns are named after what the strategy is given. A cell is the mean over seeds, in per
cent of the synchronous loss of the same seed, and the spread between the seeds; "stale" is the share of stage
forwards whose backward met newer weights.

    python benchmarks/convergence.py --tasks gpt --optimizers adamw --factors 1 4 --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import os
import statistics
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from train_gpt import GPT, RandomCrops, standard_library_files

from lightning_asyncpipe import ReferenceStrategy

BATCH = 16  # samples a step
VALIDATION = 512  # samples
LENGTH = 64  # bytes of a text
MASK, MASKED = 0, 0.15  # the byte that hides another one, and the share that is hidden
SIDE, CLASSES = 16, 10  # of an image, of a classification

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {"max_staleness": 0},
    "none": {"staleness_correction": "none"},
    "stash": {"weight_stash": True},
    "extrapolate": {"staleness_correction": "extrapolate"},
}


# --- tasks: a model whose children are called one after the other, and data ---


class Encoder(nn.Module):
    """A BERT-like encoder of bytes: (batch, time) to logits (batch, time, 256)."""

    def __init__(self, width: int = 64, depth: int = 8) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


class VisionTransformer(nn.Module):
    """Images (batch, 1, SIDE, SIDE) to logits (batch, CLASSES)."""

    def __init__(self, width: int = 64, depth: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, 4)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (SIDE // 4) ** 2, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


class ConvolutionalNetwork(nn.Module):
    """Convolutions with group normalisation; images (batch, 1, SIDE, SIDE) to logits (batch, CLASSES)."""

    def __init__(self, width: int = 16, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width if i else 1, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU())
            for i in range(depth)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def texts(count: int, seed: int, held_out: bool) -> Tensor:
    """Crops of the standard library's sources, (count, LENGTH + 1) bytes; every tenth file is held out."""
    contents = [path.read_bytes() for i, path in enumerate(standard_library_files()) if (i % 10 == 9) == held_out]
    crops = RandomCrops(torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8), LENGTH, count, seed)
    return torch.stack([crops[i] for i in range(count)])


def language(count: int, seed: int, held_out: bool) -> list[Tensor]:
    crops = texts(count, seed, held_out)
    return [crops[:, :-1], crops[:, 1:]]


def masked_language(count: int, seed: int, held_out: bool) -> list[Tensor]:
    """Every sample hides the same number of bytes, so that means over samples and over bytes agree."""
    targets = texts(count, seed, held_out)[:, :-1]
    generator = torch.Generator().manual_seed(seed + 7)
    hidden = torch.rand(targets.shape, generator=generator).argsort(1) < round(MASKED * LENGTH)
    return [torch.where(hidden, MASK, targets), torch.where(hidden, targets, -100)]


def pictures(count: int, seed: int, held_out: bool) -> list[Tensor]:
    """Noisy pictures of two waves each, whose directions make the class."""
    generator = torch.Generator().manual_seed(2 * seed + held_out)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    images = torch.zeros(count, SIDE, SIDE)
    for multiple in (1, 3):
        angle = (labels * multiple * math.pi / CLASSES)[:, None, None]
        phase = 2 * math.pi * torch.rand(count, 1, 1, generator=generator)
        images += torch.sin(0.9 * multiple**0.5 * (rows * angle.cos() + columns * angle.sin()) + phase)
    noise = 1.2 * torch.randn(images.shape, generator=generator)
    return [(images + noise)[:, None], labels]


@dataclass(frozen=True)
class Task:
    """A model, its data, and an ordinary and a high learning rate for each optimizer."""

    model: Callable[[], nn.Module]
    data: Callable[[int, int, bool], list[Tensor]]
    rates: dict[str, tuple[float, float]]


TASKS = {
    "gpt": Task(lambda: GPT(64, 8, 4, LENGTH), language, {"adamw": (2e-3, 6e-3), "sgd": (0.1, 0.4)}),
    "bert": Task(Encoder, masked_language, {"adamw": (1e-3, 3e-3), "sgd": (0.05, 0.2)}),
    "vit": Task(VisionTransformer, pictures, {"adamw": (1e-3, 4e-3), "sgd": (0.05, 0.2)}),
    "cnn": Task(ConvolutionalNetwork, pictures, {"adamw": (3e-3, 1.2e-2), "sgd": (0.05, 0.2)}),
}


class Trained(L.LightningModule):
    """A task's model with its loss and one optimizer: a linear warm-up, then a cosine down to a tenth."""

    def __init__(self, model: nn.Module, optimizer: str, rate: float, steps: int) -> None:
        super().__init__()
        self.model, self.optimizer, self.rate, self.steps = model, optimizer, rate, steps

    def loss(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        logits = self.model(inputs)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer: torch.optim.Optimizer
        if self.optimizer == "sgd":
            optimizer = torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.rate, betas=(0.9, 0.95))
        warmup = max(1, self.steps // 5)

        def factor(step: int) -> float:
            progress = (step - warmup) / max(1, self.steps - warmup)
            return (step + 1) / warmup if step < warmup else 0.55 + 0.45 * math.cos(math.pi * min(1.0, progress))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


# --- runs ---


@dataclass(frozen=True)
class Case:
    """One training; ``factor`` is the number of micro-batches a step over that of devices."""

    task: str
    optimizer: str
    high: bool
    devices: int
    factor: int
    mode: str
    seed: int
    steps: int


def train(case: Case) -> dict[str, float]:
    """The validation loss after the training, and the share of stale forwards."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    task = TASKS[case.task]
    L.seed_everything(case.seed, verbose=False)
    module = Trained(task.model(), case.optimizer, task.rates[case.optimizer][case.high], case.steps)
    microbatches = case.factor * case.devices
    if microbatches > BATCH:
        raise ValueError(f"{microbatches} micro-batches of a batch of {BATCH} samples")
    strategy = ReferenceStrategy(case.devices, num_microbatches=microbatches, **MODES[case.mode])
    trainer = L.Trainer(
        strategy=strategy,
        devices=1,
        accelerator="cpu",
        max_steps=case.steps,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(*task.data(BATCH * case.steps, case.seed, False))
    trainer.fit(module, DataLoader(data, BATCH))
    module.eval()
    parts = DataLoader(TensorDataset(*task.data(VALIDATION, 1_000_003, True)), 64)
    with torch.no_grad():
        loss = statistics.fmean(float(module.loss(batch)) for batch in parts)
    return {"loss": loss, "stale": float(strategy.statistics()["stale_share"])}


def table(results: dict[Case, dict[str, float]], modes: list[str]) -> str:
    """One row for each task, optimizer, learning rate, number of devices and of micro-batches."""
    rows: dict[tuple[Any, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for case, found in results.items():
        row = rows[case.task, case.optimizer, case.high, case.devices, case.factor]
        synchronous = next(
            other["loss"]
            for same, other in results.items()
            if asdict(same) | {"mode": case.mode} == asdict(case) and same.mode == "synchronous"
        )
        row[case.mode].append(found["loss"] if case.mode == "synchronous" else 100 * (found["loss"] / synchronous - 1))
        if case.mode == "none":
            row["stale"].append(found["stale"])
    head = f"{'':<30}{'synchronous':>13}" + "".join(f"{mode:>20}" for mode in modes if mode != "synchronous")
    lines = [head + f"{'stale':>8}"]
    for (name, optimizer, high, devices, factor), cells in rows.items():
        rate = "high" if high else "ordinary"
        line = (
            f"{f'{name} {optimizer} {rate} D={devices} M={factor}D':<30}{statistics.fmean(cells['synchronous']):>13.4f}"
        )
        for mode in modes:
            if mode != "synchronous":
                values = cells[mode]
                spread = (max(values) - min(values)) / 2
                line += f"{statistics.fmean(values):>+10.2f} % ± {spread:<5.2f}"
        lines.append(line + (f"{statistics.fmean(cells['stale']):>7.1%}" if cells["stale"] else ""))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Final losses of asynchronous against synchronous training.")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--optimizers", nargs="+", choices=["adamw", "sgd"], default=["adamw", "sgd"])
    parser.add_argument("--rates", nargs="+", choices=["ordinary", "high"], default=["ordinary"])
    parser.add_argument("--devices", nargs="+", type=int, default=[4])
    parser.add_argument("--factors", nargs="+", type=int, default=[1, 2, 4], help="micro-batches a step, over devices")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="trainings at a time")
    args = parser.parse_args()
    modes = ["synchronous", *(mode for mode in args.modes if mode != "synchronous")]
    cases = [
        Case(task, optimizer, rate == "high", devices, factor, mode, seed, args.steps)
        for task, optimizer, rate, devices, factor, mode, seed in itertools.product(
            args.tasks, args.optimizers, args.rates, args.devices, args.factors, modes, args.seeds
        )
        if devices * factor <= BATCH
    ]
    results = {}
    with ProcessPoolExecutor(args.processes) as pool:
        for case, found in zip(cases, pool.map(train, cases), strict=True):
            results[case] = found
            print(json.dumps(asdict(case) | found), flush=True)
    print(f"\n{table(results, modes)}")


if __name__ == "__main__":
    main()
