#!/usr/bin/env python3
"""What the engine costs in Python for each action and each step, and whether its memory grows.

A pipeline of one device sends no messages, so what it takes beyond a plain loop over the same
micro-batches is the engine's own time. Both are measured at two numbers of micro-batches. The
difference is the time of the micro-batches between; what no micro-batch accounts for is paid once
a step (Lightning's loop, the optimizer). A micro-batch is two actions, a forward and a backward.

    python benchmarks/overhead.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch
from child import measured
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_asyncpipe import AsyncMultiPipeStrategy

WIDTH, LAYERS, SAMPLES = 32, 4, 2
ACTIONS = 2  # of a micro-batch: its forward and its backward
WARMUP = 20  # steps before times and memory count
MEBIBYTE = 2**20


class TinyModel(L.LightningModule):
    """A few narrow layers: (samples, ``WIDTH``) to the same, mean square error to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        error: Tensor = self.layers(batch) - batch
        return error.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Meter(L.Callback):
    """Seconds between steps, and resident memory after each, in bytes."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.memory: list[int] = []
        self.process = psutil.Process()

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())
        self.memory.append(self.process.memory_info().rss)


def batches(microbatches: int, steps: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES * microbatches * steps, WIDTH, generator=generator)


def run_strategy(microbatches: int, steps: int, result: Path) -> None:
    """Train on one device and write the median step in seconds and the growth in bytes."""
    torch.set_num_threads(1)
    meter = Meter()
    trainer = L.Trainer(
        strategy=AsyncMultiPipeStrategy(num_microbatches=microbatches),
        devices=1,
        accelerator="cpu",
        max_steps=WARMUP + steps,
        callbacks=[meter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = batches(microbatches, WARMUP + steps)
    trainer.fit(TinyModel(), DataLoader(data, batch_size=SAMPLES * microbatches))  # type: ignore[arg-type]
    ends = meter.ends[WARMUP - 1 :]
    result.write_text(
        json.dumps(
            {
                "step": statistics.median(b - a for a, b in itertools.pairwise(ends)),
                "growth": meter.memory[-1] - meter.memory[WARMUP],
            }
        )
    )


def strategy_case(microbatches: int, steps: int) -> dict[str, float]:
    """``run_strategy`` in a process of its own."""
    found: dict[str, float] = measured(__file__, microbatches=microbatches, steps=steps)
    return found


def plain_step(microbatches: int, steps: int) -> float:
    """Median seconds of a step of a plain loop over the same micro-batches."""
    torch.set_num_threads(1)
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seconds = []
    for batch in torch.split(batches(microbatches, steps), SAMPLES * microbatches):
        start = time.perf_counter()
        optimizer.zero_grad()
        for part in torch.split(batch, SAMPLES):
            torch.autograd.backward(model.training_step(part, 0) / microbatches)
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description="The engine's overhead per action and step.")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--steps", type=int, default=300, help="steps that are measured")
    # set in the process of a case
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.result is not None:
        run_strategy(args.microbatches[0], args.steps, args.result)
        return

    few, many = min(args.microbatches), max(args.microbatches)
    if few == many:
        parser.error(f"--microbatches {few}: give two different numbers")
    own = {number: strategy_case(number, args.steps) for number in (few, many)}
    plain = {number: plain_step(number, args.steps) for number in (few, many)}
    own_each = (own[many]["step"] - own[few]["step"]) / (many - few)
    plain_each = (plain[many] - plain[few]) / (many - few)
    print(f"{'per micro-batch, plain loop':<44}{plain_each * 1e3:>9.3f} ms")
    print(f"{'per micro-batch, one-device pipeline':<44}{own_each * 1e3:>9.3f} ms")
    print(f"{'overhead per action':<44}{(own_each - plain_each) / ACTIONS * 1e3:>9.3f} ms")
    print(f"{'per step beyond them, plain loop':<44}{(plain[few] - few * plain_each) * 1e3:>9.3f} ms")
    print(f"{'per step beyond them, one-device pipeline':<44}{(own[few]['step'] - few * own_each) * 1e3:>9.3f} ms")
    for number in (few, many):
        growth = own[number]["growth"] / MEBIBYTE
        print(f"{f'growth over {args.steps} steps, M = {number}':<44}{growth:>9.2f} MiB")


if __name__ == "__main__":
    main()
