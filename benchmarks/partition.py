#!/usr/bin/env python3
"""The partitioner: simulated against measured steps, and what measuring gains over stages of as many layers each.

``--case uneven`` trains layers that sleep for unequal times (as in ``emulated.py``: compute takes no core, so that many
devices fit on few cores). ``--case head`` trains a language model of narrow blocks whose head, for a vocabulary of 32k,
costs as much as many blocks: with real compute, or with ``--emulated`` as layers that sleep in the proportions in which
those were measured to take time in one process. Each is trained with the measured plan and with as many layers in each
stage; printed are the simulated step, the median step, their ratio, and utilisation: the time that
devices compute over the time of the step, mean over devices.

    python benchmarks/partition.py --case uneven
    python benchmarks/partition.py --case head --emulated
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
import torch
import torch.nn.functional as F
from child import measured
from peers import SAMPLES, WIDTH, SleepingLayer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_asyncpipe import AsyncMultiPipeStrategy

WARMUP = 4  # steps that are not measured
UNEVEN = (3.0, 1.0, 2.0, 1.0, 1.0, 4.0, 1.0, 1.0, 2.0, 2.0, 1.0, 5.0)  # forward times of layers, relative
VOCABULARY, NARROW, LENGTH, BLOCKS = 32_000, 256, 32, 24


class Sleeping(L.LightningModule):
    """An embedding that costs nothing and layers that sleep for the given seconds in F, I and W each."""

    def __init__(self, seconds: list[float]) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(WIDTH))
        self.layers = nn.ModuleList(SleepingLayer(each) for each in seconds)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch + self.embedding
        for layer in self.layers:
            x = layer(x)
        return (x - batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Head(nn.Module):
    """Logits over the vocabulary and their loss, (samples, length, width) to a scalar for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Linear(NARROW, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.logits(x)
        return logits


class HeavyHead(L.LightningModule):
    """A language model of narrow blocks with a large vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, NARROW)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(NARROW, 4, 4 * NARROW, dropout=0.0, batch_first=True) for _ in range(BLOCKS)
        )
        self.head = Head()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embedding(batch)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Clock(L.Callback):
    """The ends of steps."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())


def seconds_of_heavy_head() -> list[float]:
    """Forward seconds of each block and of the head of :class:`HeavyHead` on one micro-batch, the median of some."""
    torch.set_num_threads(1)
    module = HeavyHead()
    x, targets = torch.randn(SAMPLES, LENGTH, NARROW), torch.randint(VOCABULARY, (SAMPLES, LENGTH))

    def median(run: Any) -> float:
        found = []
        for _ in range(9):
            begin = time.perf_counter()
            run()
            found.append(time.perf_counter() - begin)
        return statistics.median(found)

    def head() -> Tensor:
        return F.cross_entropy(module.head(x).flatten(0, 1), targets.flatten())

    block = median(lambda: module.layers[0](x))
    return [block] * BLOCKS + [median(head)]


def build(case: str, seconds: list[float]) -> tuple[L.LightningModule, Any]:
    """The module, and what its data set holds."""
    if seconds:
        return Sleeping(seconds), lambda count: torch.zeros(count, WIDTH)
    return HeavyHead(), lambda count: torch.randint(VOCABULARY, (count, LENGTH))


def run_case(args: argparse.Namespace) -> None:
    """Train in this process and its launcher's; rank 0 writes what came out."""
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    module, data = build(args.case, args.seconds)
    cuts: Any = "auto"
    if args.split == "equal":
        count = len(module.layers)  # type: ignore[arg-type]
        cuts = [f"layers.{round(stage * count / args.devices)}" for stage in range(1, args.devices)]
    strategy = AsyncMultiPipeStrategy(
        num_pipelines=args.pipelines, num_microbatches=args.microbatches, cuts=cuts, partition="profile"
    )
    clock = Clock()
    trainer = L.Trainer(
        strategy=strategy,
        devices=args.devices,
        accelerator="cpu",
        max_steps=WARMUP + args.steps,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batch = SAMPLES * args.microbatches
    trainer.fit(module, DataLoader(data(batch * (WARMUP + args.steps)), batch_size=batch))
    if trainer.is_global_zero:
        seconds = [after - before for before, after in itertools.pairwise(clock.ends[WARMUP - 1 :])]
        plan = strategy.describe()
        args.result.write_text(
            json.dumps(
                {
                    "simulated": plan["step_ms"] / 1e3,
                    "measured": statistics.median(seconds),
                    "stages": [stage["begins"] for stage in plan["stages"]],
                    "work": [stage["forward_ms"] + stage["backward_ms"] for stage in plan["stages"]],
                    "pipelines": plan["num_pipelines"],
                }
            )
        )


def measure(args: argparse.Namespace, split: str, seconds: list[float]) -> dict[str, Any]:
    """One training in processes of its own."""
    given = {name: getattr(args, name) for name in ("case", "devices", "microbatches", "steps", "pipelines")}
    found: dict[str, Any] = measured(__file__, quiet=True, split=split, seconds=seconds or None, **given)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulated and measured steps of partitions.")
    parser.add_argument("--case", choices=("uneven", "head"), required=True)
    parser.add_argument("--emulated", action="store_true", help="head: layers that sleep as long as it takes")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--pipelines", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="steps that are measured")
    parser.add_argument("--unit-ms", type=float, default=10.0, help="uneven: the shortest layer's forward")
    parser.add_argument("--total-ms", type=float, default=150.0, help="emulated head: all layers' forward")
    # set in the process of a run
    parser.add_argument("--split", choices=("profile", "equal"), help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, nargs="+", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.result is not None:
        run_case(args)
        return

    seconds: list[float] = []
    if args.case == "uneven":
        seconds = [args.unit_ms / 1e3 * each for each in UNEVEN]
    elif args.emulated:
        took = seconds_of_heavy_head()
        seconds = [args.total_ms / 1e3 * each / sum(took) for each in took]
        print(f"a block sleeps {seconds[0] * 1e3:.1f} ms, the head {seconds[-1] * 1e3:.1f} ms, forward")
    print(f"{'':<22}{'simulated':>10} {'measured':>9} {'ratio':>6} {'utilisation':>12}  stages begin at")
    steps = {}
    for split, name in (("profile", "measured plan"), ("equal", "equal numbers of layers")):
        found = measure(args, split, seconds)
        work = sum(seconds) * 3e3 if seconds else sum(found["work"])
        utilisation = work * args.microbatches / args.devices / (found["measured"] * 1e3)
        steps[split] = found["measured"]
        print(
            f"{name:<22.22}{found['simulated'] * 1e3:>7.0f} ms {found['measured'] * 1e3:>6.0f} ms "
            f"{found['simulated'] / found['measured']:>6.2f} {utilisation:>12.3f}  {', '.join(found['stages'][1:])}",
            flush=True,
        )
    print(f"the measured plan's step is {steps['equal'] / steps['profile']:.2f} times as fast")


if __name__ == "__main__":
    main()
