#!/usr/bin/env python3
"""Utilisation of this project's strategy on emulated devices, through the real ``Trainer``.

The devices are emulated as in ``peers.py``: a process each, whose compute is a sleep. Everything
else is what a user's training has: Lightning's loop, an optimizer and its scheduler, gradient
clipping, the module's own hooks, and ``self.log``. The first layer's input gradient is needed too,
as behind an embedding, which costs the first device more than the same layer costs the peers.

Utilisation is micro-batches x 3 x forward time over the time from one optimizer step to the next,
the median of the steps after the first ones. With ``--peers`` the schedules of
``torch.distributed.pipelining`` are measured in the same run and put beside it. With ``--repeats`` everything is run
so often, in turn, and a cell is the smallest, the median and the largest. ``--timeline`` writes a
trace and a picture of one step of each of the strategy's own runs to a directory.

    python benchmarks/emulated.py --devices 4 --microbatches 4 8 16 --forward-ms 20 --peers
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import torch
from child import measured
from peers import SAMPLES, SCHEDULES, WIDTH, Case, Row, SleepingLayer, measure_all, row, spread
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_asyncpipe import AsyncMultiPipeStrategy, PipelineMonitor

NAME = "async_multipipe"
SETTINGS: dict[str, dict[str, Any]] = {
    NAME: {},
    f"{NAME}, stash": {"weight_stash": True},
    f"{NAME}, synchronous": {"max_staleness": 0},
}
WARMUP = 4  # optimizer steps that are not measured


class SleepingModel(L.LightningModule):
    """An embedding that costs nothing and ``depth`` layers that sleep."""

    def __init__(self, depth: int, forward_seconds: float) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(WIDTH))
        self.layers = nn.ModuleList(SleepingLayer(forward_seconds) for _ in range(depth))
        self.step_ends: list[float] = []
        self.gradients_seen = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch + self.embedding
        for layer in self.layers:
            x = layer(x)
        loss = (x - batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("mean", x.detach().mean())
        return loss

    def on_after_backward(self) -> None:
        self.gradients_seen += sum(p.grad is not None for p in self.parameters())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("gradients", float(self.gradients_seen))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.step_ends.append(time.perf_counter())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def run_case(case: Case, pipelines: str, result: Path, timeline: Path | None) -> None:
    """Train in this process and its launcher's; rank 0 writes the seconds and the statistics."""
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    strategy = AsyncMultiPipeStrategy(
        num_pipelines="auto" if pipelines == "auto" else int(pipelines),
        num_microbatches=case.microbatches,
        # Sleeping costs no floating-point operations, by which the model would be cut otherwise.
        cuts=[f"layers.{stage}" for stage in range(1, case.devices)],
        **SETTINGS[case.schedule],
    )
    monitor = PipelineMonitor(0, (WARMUP + case.steps - 1,), timeline, ("png", "svg"))
    trainer = L.Trainer(
        strategy=strategy,
        devices=case.devices,
        accelerator="cpu",
        max_steps=WARMUP + case.steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[monitor] if timeline is not None else [],
    )
    module = SleepingModel(case.devices, case.forward_seconds)
    batches = torch.zeros(SAMPLES * case.microbatches * (WARMUP + case.steps), WIDTH)
    trainer.fit(module, DataLoader(batches, batch_size=SAMPLES * case.microbatches))  # type: ignore[arg-type]
    if trainer.is_global_zero:
        ends = module.step_ends[WARMUP - 1 :]
        seconds = [after - before for before, after in itertools.pairwise(ends)]
        result.write_text(json.dumps({"seconds": seconds, "statistics": dict(strategy.statistics())}, default=str))


def measure(case: Case, pipelines: str, timeline: Path | None = None) -> tuple[Row, dict[str, Any]]:
    """The row of a case, and the strategy's own statistics, from processes of its own."""
    found = measured(
        __file__,
        devices=case.devices,
        microbatches=case.microbatches,
        forward_ms=case.forward_seconds * 1e3,
        steps=case.steps,
        pipelines=pipelines,
        settings=case.schedule,
        timeline=timeline,
    )
    return row(case, statistics.median(found["seconds"])), found["statistics"]


def table(rows: Iterable[Row]) -> str:
    """Utilisation by schedule (down) and by number of micro-batches (across)."""
    cells: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in rows:
        cells[each.schedule][each.microbatches].append(each.utilisation)
    columns = sorted({number for found in cells.values() for number in found})
    width = 10 if all(len(values) == 1 for found in cells.values() for values in found.values()) else 22
    lines = [f"{'':<30}" + "".join(f"{f'M={number}':>{width}}" for number in columns)]
    for name, found in cells.items():
        texts = (spread(found[n], 3) if n in found else "-" for n in columns)
        lines.append(f"{name:<30}" + "".join(f"{text:>{width}}" for text in texts))
    peers = [name for name in cells if name not in SETTINGS]
    if NAME in cells and peers:
        medians = {name: {n: statistics.median(values) for n, values in found.items()} for name, found in cells.items()}
        best = {n: max(medians[name][n] for name in peers if n in medians[name]) for n in columns}
        ratios = (f"{medians[NAME][n] / best[n]:.2f}" for n in columns)
        lines.append(f"{'times the best peer':<30}" + "".join(f"{ratio:>{width}}" for ratio in ratios))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Utilisation of the strategy, emulated devices.")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--microbatches", type=int, nargs="+", help="default: D, 2D and 4D")
    parser.add_argument("--forward-ms", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=12, help="steps that are measured")
    parser.add_argument("--pipelines", default="auto")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=[NAME], help="of this project's strategy")
    parser.add_argument("--timeline", type=Path, help="a directory for a trace and a picture")
    parser.add_argument("--peers", nargs="*", choices=SCHEDULES, help="torch's schedules to measure as well, or all")
    # set in the process of a case
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    seconds = args.forward_ms / 1e3
    microbatches = args.microbatches or [args.devices * factor for factor in (1, 2, 4)]
    cases = [Case(name, args.devices, number, seconds, args.steps) for number in microbatches for name in args.settings]
    if args.result is not None:
        run_case(cases[0], args.pipelines, args.result, args.timeline)
        return

    rows = []
    for _ in range(args.repeats):
        if args.peers is not None:
            names = tuple(args.peers) or SCHEDULES
            for peer in measure_all(args.devices, microbatches, seconds, names=names):
                print(json.dumps(asdict(peer)), flush=True)
                rows.append(peer)
        for case in cases:
            own, counted = measure(case, args.pipelines, args.timeline)
            print(json.dumps(asdict(own) | {"statistics": counted}), flush=True)
            rows.append(own)
    print(f"\nutilisation, D = {args.devices}, F = {args.forward_ms:g} ms, B = 2F\n{table(rows)}")


if __name__ == "__main__":
    main()
