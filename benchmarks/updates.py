#!/usr/bin/env python3
"""How much longer a step takes because devices exchange gradients and weights.

The devices are those of ``emulated.py``, processes whose layers sleep, so that computing leaves the cores to the
update, and each layer has a parameter that is large enough for it to matter. Links are emulated too: what a device
sends to another one leaves as if over a link of ``--link`` megabytes a second (0: as this machine carries it). Every
row is measured against the same training, with the same plan and in the same run, in which each device steps what
it owns and exchanges nothing. The difference is what of the exchange is not hidden. That is

* as it is: a stage's gradients leave after its last backward of the window, early forwards fill the wait, and new
  weights are taken where a stage is used again;
* not hidden: gradients leave when all computing of the window is done, early forwards included, and new weights are
  waited for before anything else, in the same order of computing;
* synchronous: ``max_staleness=0``, where nothing is early;

and the first of them with clipping by the norm of all gradients, on old weights instead of predicted ones, and with two
data-parallel replicas of two devices each.

    python benchmarks/updates.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import torch
from child import measured
from peers import SAMPLES, WIDTH, SleepingLayer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_asyncpipe import AsyncMultiPipeStrategy
from lightning_asyncpipe.integration import cutting
from lightning_asyncpipe.integration.world import World
from lightning_asyncpipe.plan.actions import Action, Kind
from lightning_asyncpipe.plan.placement import Placement
from lightning_asyncpipe.plan.profile import Link
from lightning_asyncpipe.plan.schedule import Planner, SegmentPlan, SegmentSpec
from lightning_asyncpipe.runtime import channels
from lightning_asyncpipe.runtime.devices import Device
from lightning_asyncpipe.runtime.exchange import WeightExchange
from lightning_asyncpipe.runtime.ownership import Ownership

WARMUP = 3  # optimizer steps that are not measured
DEVICES = 4


@dataclass(frozen=True)
class Variant:
    """A row: arguments of the strategy and the Trainer, and whether the schedule hides the update."""

    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    hidden: bool = True

    @property
    def plan(self) -> tuple[Any, ...]:
        """Variants that are equal in this run on one plan, which the first of them makes."""
        return self.strategy.get("max_staleness", 1), self.strategy.get("data_parallel_size", 1)

    @property
    def alone(self) -> Variant:
        """What the row is measured against, but that it exchanges nothing."""
        return Variant(self.strategy)


VARIANTS = {
    "as it is": Variant(),
    "not hidden": Variant(hidden=False),
    "synchronous": Variant({"max_staleness": 0}),
    "clipping": Variant(trainer={"gradient_clip_val": 1.0}),
    "early forwards on old weights": Variant({"staleness_correction": "none"}),
    "two replicas": Variant({"data_parallel_size": 2}),
    "two replicas, not hidden": Variant({"data_parallel_size": 2}, hidden=False),
}


class HeavyLayer(nn.Module):
    """A layer that sleeps, and has ``numel`` weights more than it needs."""

    def __init__(self, seconds: float, numel: int) -> None:
        super().__init__()
        self.sleeping = SleepingLayer(seconds)
        self.bulk = nn.Parameter(torch.zeros(numel))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.sleeping(x) + self.bulk[0]
        return found


class HeavyModel(L.LightningModule):
    """An embedding that costs nothing and ``DEVICES`` heavy layers."""

    def __init__(self, seconds: float, numel: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(WIDTH))
        self.layers = nn.ModuleList(HeavyLayer(seconds, numel) for _ in range(DEVICES))
        self.step_ends: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch + self.embedding
        for layer in self.layers:
            x = layer(x)
        return (x - batch).square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        self.step_ends.append(time.perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class SlowLink(Device):
    """Memory of the CPU, from which a tensor leaves no faster than a link carries it."""

    immediate = False
    bytes_per_second = math.inf

    def to_host(self, tensor: Tensor) -> Callable[[], Tensor]:
        def wait() -> Tensor:
            time.sleep(tensor.nbytes / self.bytes_per_second)
            return tensor

        return wait


def emulate_link(megabytes_per_second: float) -> None:
    """Have messages take their time, and the planner know it."""

    def link(world: World, nbytes: int = 0) -> Link | None:
        return Link(3e-4, SlowLink.bytes_per_second)

    SlowLink.bytes_per_second = megabytes_per_second * 1e6
    channels.device_of = SlowLink  # type: ignore[assignment, attr-defined]
    cutting.measure_link = link  # type: ignore[attr-defined]


def exchange_nothing() -> None:
    """Every rank is taken for the only host of what it owns: it steps that by its own gradients, and sends nothing."""
    begin = WeightExchange.__init__

    def alone(
        self: WeightExchange, rank: int, placement: Placement, replicas: int, ownership: Ownership, *rest: Any
    ) -> None:
        buckets = tuple(
            replace(bucket, hosts=(rank,), shards=tuple(shard for shard in bucket.shards if shard[0] == rank))
            for bucket in ownership.buckets
        )
        begin(self, rank, placement, replicas, replace(ownership, buckets=buckets), *rest)

    WeightExchange.__init__ = alone  # type: ignore[method-assign, assignment]


def hide_nothing() -> None:
    """Plans as they are, but for reductions, which come last, and updates, which come first."""
    plan = Planner.segment

    def moved(line: tuple[Action, ...]) -> tuple[Action, ...]:
        place = {Kind.UPDATE: 0, Kind.REDUCE: 2}
        return tuple(sorted(line, key=lambda action: place.get(action.kind, 1)))

    @cache
    def segment(self: Planner, spec: SegmentSpec) -> SegmentPlan:
        found = plan(self, spec)
        return replace(found, actions=tuple(moved(line) for line in found.actions))

    Planner.segment = segment  # type: ignore[method-assign]


def run(args: argparse.Namespace) -> None:
    """One training, in this process and its launcher's; rank 0 writes the seconds of its steps."""
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    variant = VARIANTS[args.variant].alone if args.alone else VARIANTS[args.variant]
    if args.link:
        emulate_link(args.link)
    if args.alone:
        exchange_nothing()
    if not variant.hidden:
        hide_nothing()
    stages = DEVICES // variant.strategy.get("data_parallel_size", 1)
    width = DEVICES // stages
    known = args.plan.exists()
    strategy = AsyncMultiPipeStrategy(
        num_pipelines=2,  # one alone would have nothing to exchange
        num_microbatches=args.microbatches,
        cuts="auto" if known else [f"layers.{stage * width}" for stage in range(1, stages)],
        plan=args.plan if known else None,
        **variant.strategy,
    )
    trainer = L.Trainer(
        strategy=strategy,
        devices=DEVICES,
        accelerator="cpu",
        max_steps=WARMUP + args.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **variant.trainer,
    )
    module = HeavyModel(args.forward_ms / 1e3, int(args.megabytes * 2**20 / 4))
    samples = SAMPLES * args.microbatches
    batches = torch.zeros(samples * width * (WARMUP + args.steps), WIDTH)
    trainer.fit(module, DataLoader(batches, batch_size=samples))  # type: ignore[arg-type]
    if trainer.is_global_zero:
        if not known:
            strategy.save_plan(args.plan)
        # Across an epoch's end the pipelines are drained: the last step has no early forwards.
        ends = module.step_ends[WARMUP - 1 : -1]
        args.result.write_text(json.dumps([after - before for before, after in itertools.pairwise(ends)]))


def measure(args: argparse.Namespace, directory: Path, name: str, alone: bool) -> float:
    """Seconds of a step, the median of a training in processes of its own."""
    plan = directory / ("-".join(map(str, VARIANTS[name].plan)) + ".json")
    given = {option: getattr(args, option) for option in ("microbatches", "forward_ms", "megabytes", "link", "steps")}
    seconds: list[float] = measured(__file__, variant=name, plan=plan, alone=alone, **given)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description="Exposed time of the exchange, emulated devices.")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--forward-ms", type=float, default=20.0, help="of one layer")
    parser.add_argument("--megabytes", type=float, default=8.0, help="of each of the four layers")
    parser.add_argument("--link", type=float, default=250.0, help="megabytes a second")
    parser.add_argument("--steps", type=int, default=10, help="steps that are measured")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    # set in the processes of a run
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.result is not None:
        run(args)
        return
    alone: dict[str, float] = {}
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for name in args.variants:
            seconds = measure(args, Path(directory), name, alone=False)
            base = str(VARIANTS[name].alone)
            if base not in alone:
                alone[base] = measure(args, Path(directory), name, alone=True)
            rows.append(
                f"{name:<32}{alone[base] * 1e3:>12.0f}{seconds * 1e3:>12.0f}{(seconds - alone[base]) * 1e3:>12.0f}"
            )
            print(rows[-1], flush=True)
    print(
        f"\nms a step, M = {args.microbatches}, F = {args.forward_ms:g} ms, four layers of {args.megabytes:g} MB, "
        f"links of {args.link:g} MB/s\n"
        f"{'':<32}{'alone':>12}{'in all':>12}{'exposed':>12}"
    )
    print("\n".join(rows))


if __name__ == "__main__":
    main()
