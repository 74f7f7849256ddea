#!/usr/bin/env python3
"""The time until synchronous training's final validation loss, on emulated devices with a real small model's numerics.

A GPT learns bytes of the standard library. Each of its D blocks computes in earnest, and sleeps besides for as long as
a block of a large model would take, so that D devices fit on few cores. It is trained with ``max_staleness=0`` first,
then the same as one pipeline with whole backwards, the usual schedule, and then with each of the other settings, for
half as many steps more. Validation is left out of the time. Printed are the steps and the time until the validation
loss is that of the synchronous training's end, and the ratio of times.

    python benchmarks/time_to_loss.py --devices 4 --factors 1
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from child import measured
from peers import SleepInForwardAndInputGradient, SleepInWeightGradient
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from train_gpt import GPT, StandardLibrary

from lightning_asyncpipe import AsyncMultiPipeStrategy

WIDTH, HEADS, LENGTH, BATCH = 64, 4, 64, 16
SETTINGS: dict[str, dict[str, Any]] = {
    "synchronous": {"max_staleness": 0},
    "1F1B": {"max_staleness": 0, "num_pipelines": 1, "split_backward": False},
    "default": {},
    "none": {"staleness_correction": "none"},
    "stash": {"weight_stash": True},
}


class Slow(nn.Module):
    """A block that takes ``seconds`` more in its forward and in each half of its backward."""

    def __init__(self, block: nn.Module, seconds: float) -> None:
        super().__init__()
        self.block, self.seconds = block, seconds
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        slowed: Tensor = SleepInForwardAndInputGradient.apply(x, self.seconds)  # type: ignore[no-untyped-call]
        bias: Tensor = SleepInWeightGradient.apply(self.bias, self.seconds)  # type: ignore[no-untyped-call]
        changed: Tensor = self.block(slowed + bias)
        return changed


class Model(L.LightningModule):
    """The slow GPT, and how its validation loss falls over steps and time."""

    def __init__(self, depth: int, seconds: float, learning_rate: float) -> None:
        super().__init__()
        self.model = GPT(WIDTH, depth, HEADS, LENGTH)
        self.model.blocks = nn.ModuleList(Slow(block, seconds) for block in self.model.blocks)
        self.learning_rate = learning_rate
        self.curve: list[tuple[int, float, float]] = []  # steps, seconds of training, validation loss
        self.trained = self.began = 0.0

    def loss(self, sequences: Tensor) -> Tensor:
        return F.cross_entropy(self.model(sequences[:, :-1]).flatten(0, 1), sequences[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation_loss", self.loss(batch))

    def on_train_start(self) -> None:
        self.began = time.perf_counter()

    def on_validation_start(self) -> None:
        self.trained += time.perf_counter() - self.began

    def on_validation_end(self) -> None:
        loss = self.trainer.callback_metrics["validation_loss"]
        self.curve.append((self.global_step, self.trained, float(loss)))
        self.began = time.perf_counter()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, betas=(0.9, 0.95))


def run_case(args: argparse.Namespace) -> None:
    """Trains with one setting; rank 0 writes the curve."""
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    strategy = AsyncMultiPipeStrategy(
        num_microbatches=args.devices * args.factors[0],
        cuts=[f"model.blocks.{stage}" for stage in range(1, args.devices)],
        **SETTINGS[args.setting],
    )
    steps = args.steps if SETTINGS[args.setting].get("max_staleness") == 0 else args.steps * 3 // 2
    trainer = L.Trainer(
        strategy=strategy,
        devices=args.devices,
        accelerator="cpu",
        max_steps=steps,
        val_check_interval=args.every,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Model(args.devices, args.forward_ms / 1e3, args.learning_rate)
    data = StandardLibrary(LENGTH, BATCH, steps)
    data.setup()
    trainer.fit(module, DataLoader(data.train, batch_size=BATCH), DataLoader(data.validation, batch_size=64))
    if trainer.is_global_zero:
        args.result.write_text(json.dumps(module.curve))


def measure(setting: str, factor: int, args: argparse.Namespace) -> list[tuple[int, float, float]]:
    """A curve, from processes of its own."""
    given = {name: getattr(args, name) for name in ("devices", "steps", "every", "forward_ms", "learning_rate")}
    curve = measured(__file__, quiet=True, setting=setting, factors=factor, **given)
    return [(step, seconds, loss) for step, seconds, loss in curve]


def reaching(curve: list[tuple[int, float, float]], target: float) -> tuple[float, float] | None:
    """Steps and seconds at which the loss is `target` for the first time, between two validations in proportion."""
    last = (0, 0.0, float("inf"))
    for point in curve:
        if point[2] <= target:
            share = 1.0 if last[2] == float("inf") or last[2] == point[2] else (last[2] - target) / (last[2] - point[2])
            return last[0] + share * (point[0] - last[0]), last[1] + share * (point[1] - last[1])
        last = point
    return None


def rows(args: argparse.Namespace) -> Iterator[str]:
    """The table, line by line."""
    for factor in args.factors:
        curves = {setting: measure(setting, factor, args) for setting in SETTINGS}
        steps, seconds, target = curves["synchronous"][-1]
        for setting, curve in curves.items():
            at_equal_steps = next(loss for step, _, loss in curve if step == steps)
            found = reaching(curve, target)
            pace = curve[-1][1] / curve[-1][0]
            cells = f"{at_equal_steps:8.4f} ({(at_equal_steps / target - 1) * 100:+.2f} %)   {pace * 1e3:6.0f} ms"
            if found is None:
                cells += "   not within half as many steps more"
            else:
                cells += f"   {found[0]:6.0f}   {found[1]:6.1f} s   {seconds / found[1]:5.2f}"
            yield f"{f'M = {factor * args.devices}':<8}{setting:<14}{cells}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to a validation loss on emulated devices.")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--factors", type=int, nargs="+", default=[1], help="micro-batches, in D")
    parser.add_argument("--forward-ms", type=float, default=20.0, help="that each block sleeps in a forward")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--every", type=int, default=10, help="steps between two validations")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    # set in the process of a case
    parser.add_argument("--setting", choices=SETTINGS, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.setting is not None:
        run_case(args)
        return
    print("                      validation loss,            time of   until synchronous' final loss:")
    print("                      at synchronous' end         a step    steps      time      times as fast")
    for line in rows(args):
        print(line, flush=True)


if __name__ == "__main__":
    main()
