"""A training as a user starts it, in which one thing goes wrong: ``python faulty.py FAULT DIRECTORY``.

Each process leaves a file ``pid-RANK`` in the directory. When the fault happens, its time is left in the file
``fault``; where it is to come from outside (a signal), the file ``training`` says that it may.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_asyncpipe import AsyncMultiPipeStrategy
from lightning_asyncpipe.errors import CollectiveInStepError
from tests.support.edge_basics import WIDTH, Points, Regression, Tower, sized

BUSY = 60.0
"""Seconds that a rank is busy without looking up: longer than a run may take to end."""


class Boom(Exception):
    """What the user's own code raises."""


def rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def directory() -> Path:
    return Path(sys.argv[2])


def happens() -> None:
    """The fault happens now."""
    path = directory() / "fault"
    if not path.exists():
        unfinished = directory() / f"unfinished-{rank()}"
        unfinished.write_text(str(time.time()))
        unfinished.replace(path)


# Data


def batches(count: int = 12, size: int = 8) -> Iterable[Any]:
    """Ordinary data."""
    return sized(*[size] * count)


class Noisy(Points):
    """Each rank adds noise of its own to the samples from batch 2 on."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        if index < 16 or not rank():
            return x, y
        happens()
        return x + torch.randn(WIDTH, dtype=x.dtype), y


class Corrupt(Points):
    """One sample of batch 3 cannot be read."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 27:
            happens()
            raise Boom("sample 27 is corrupt")
        return super().__getitem__(index)


class Sizes:
    """A batch sampler: batches of these sizes, each of its own eight samples; at one of them it goes wrong."""

    def __init__(self, sizes: list[int], wrong: int) -> None:
        self.sizes, self.wrong = sizes, wrong

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Any]:
        for number, size in enumerate(self.sizes):
            if number == self.wrong:
                happens()
            yield range(8 * number, 8 * number + size)
        if self.wrong == len(self.sizes):
            happens()


def differing(*sizes: list[int], wrong: int) -> Iterable[Any]:
    """The batches of each rank; batch `wrong` is the first that is not there or not the same on all of them."""
    return DataLoader(Points(96), batch_sampler=Sizes(sizes[rank()], wrong))


class Part(IterableDataset[Any]):
    """A stream that ends earlier on some ranks."""

    def __init__(self, *lengths: int) -> None:
        self.points, self.length = Points(max(lengths)), lengths[rank()]

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.length):
            yield self.points[index]
        if self.length < len(self.points):
            happens()


# Modules


class Half(Regression):
    """The second half of the model has no parameters, and so has one of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 1), nn.Flatten(0), nn.Tanh(), nn.Tanh())


class Raises(Regression):
    """The step raises on one rank; the others are busy then, if so wanted."""

    def __init__(self, rank: int, batch: int, busy: bool = False) -> None:
        super().__init__()
        self.rank, self.batch, self.busy = rank, batch, busy

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.batch and rank() != self.rank and self.busy:
            time.sleep(BUSY)
        if batch_idx == self.batch and rank() == self.rank:
            if self.busy:
                time.sleep(1.0)
            happens()
            raise Boom(f"of rank {self.rank} in batch {batch_idx}")
        return super().training_step(batch, batch_idx)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Dies(Regression):
    """A rank ends in mid-step, by default because it is killed."""

    def __init__(self, rank: int, end: Callable[[], None] = is_killed) -> None:
        super().__init__()
        self.rank, self.end = rank, end

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 5 and rank() == self.rank:
            happens()
            self.end()
        return super().training_step(batch, batch_idx)


class ClipsAlone(Regression):
    """Clips on one rank, where all have to."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if rank() == 0 and self.global_step == 4:
            happens()
            torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)


class Slow(Regression):
    """Trains until it is stopped."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.01)
        if batch_idx == 6:
            (directory() / "training").touch()
        return super().training_step(batch, batch_idx)


class Gathers(Regression):
    """Calls collectives inside the step; catches the errors of all but the last one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            for call in (
                lambda: self.trainer.strategy.barrier(),
                lambda: torch.distributed.all_reduce(torch.ones(1)),
            ):
                try:
                    call()
                except CollectiveInStepError as error:
                    print(f"caught: {error}", flush=True)
            happens()
            self.all_gather(batch[0])
        return super().training_step(batch, batch_idx)


class Manual(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def setup(self, stage: str) -> None:
        happens()


class Announced(Regression):
    """What is wrong is found out after this module's setup."""

    def setup(self, stage: str) -> None:
        happens()


class OtherOnEachRank(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = Tower(4 + rank())

    def setup(self, stage: str) -> None:
        happens()


class OwnLearningRate(Regression):
    def configure_optimizers(self) -> Any:
        happens()
        return torch.optim.SGD(self.parameters(), lr=0.1 + rank())


class Measured(Regression):
    """What happens while rank 0 measures: after a few runs of the step it calls `then`, and is busy."""

    def __init__(self, then: Callable[[], None], rank_1: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.then, self.rank_1, self.runs = then, rank_1, 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.runs += 1
        if self.runs > 6:
            self.then()
            time.sleep(BUSY)
        return super().training_step(batch, batch_idx)

    def setup(self, stage: str) -> None:
        if rank() == 1 and self.rank_1 is not None:
            threading.Thread(target=self.rank_1, daemon=True).start()


def raises() -> None:
    happens()
    raise Boom("while measuring")


def is_killed_while_rank_0_measures() -> None:
    """This process is killed."""
    while not (directory() / "training").exists():
        time.sleep(0.02)
    happens()
    is_killed()


def may_come() -> None:
    """A signal from outside may come now."""
    (directory() / "training").touch()


def slow_to_start() -> None:
    """Rank 1 takes for ever to start; rank 0 waits for it."""
    if rank() == 1:
        time.sleep(0.5)
        may_come()
        time.sleep(BUSY)


def killed_at_start() -> None:
    """Rank 1 is killed before it has joined the others."""
    if rank() == 1:
        happens()
        is_killed()


# Callbacks


class SavesBadly(pl.Callback):
    """Raises while the other ranks wait to save."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if rank() == 1 and trainer.global_step == 6:
            happens()
            raise Boom("while saving")


class SavesAlone(pl.Callback):
    """Saves on one rank, as one does where that rank has the whole model."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero and batch_idx == 4:
            happens()
            trainer.save_checkpoint(directory() / "alone.ckpt")


class WaitsAlone(pl.Callback):
    """Calls a collective on one rank, when the other one is in another collective."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if rank() == 1:
            happens()
            trainer.strategy.barrier()


def saves_alone(trainer: pl.Trainer) -> None:
    """One rank saves when the others have ended."""
    if trainer.is_global_zero:
        happens()
        trainer.save_checkpoint(directory() / "alone.ckpt")


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        module: builds the module.
        loader: builds the loader.
        ranks: of the run.
        strategy: arguments of the strategy.
        callbacks: builds callbacks beside the checkpoints.
        send: a signal that is to come from outside, to "all" processes or the "first".
        start: called before anything else.
        after: called when the training has ended.
        guarded: whether processes that are spawned leave out what the script does.
    """

    module: Callable[[], pl.LightningModule] = Regression
    loader: Callable[[], Any] = batches
    ranks: int = 2
    strategy: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[pl.Callback]] = list
    send: tuple[signal.Signals, str] | None = None
    start: Callable[[], None] = lambda: None
    after: Callable[[pl.Trainer], None] = lambda _: None
    guarded: bool = True


SYNCHRONOUS = {"max_staleness": 0}
SPAWN = {"start_method": "spawn"}
MEASURED = {"partition": "profile"}
FOREIGN = Path(__file__).with_name("foreign_plan.json")
FAULTS: dict[str, Fault] = {
    "nothing": Fault(Half, strategy={"num_pipelines": 1}),
    "noise of each rank's own": Fault(loader=lambda: DataLoader(Noisy(96), 8), ranks=3),
    "a smaller batch": Fault(loader=lambda: differing([8] * 5, [8, 8, 3, 8, 8], wrong=2)),
    "a shorter loader": Fault(loader=lambda: differing([8] * 5, [8] * 3, wrong=3)),
    "a shorter loader, synchronous": Fault(loader=lambda: differing([8] * 5, [8] * 3, wrong=3), strategy=SYNCHRONOUS),
    "a shorter stream of a replica": Fault(
        loader=lambda: DataLoader(Part(40, 24), 8), strategy={"data_parallel_size": 2, **SYNCHRONOUS}
    ),
    "a corrupt sample": Fault(loader=lambda: DataLoader(Corrupt(96), 8, num_workers=1)),
    "rank 1 raises in the first step": Fault(lambda: Raises(1, 0)),
    "rank 0 raises, rank 1 is busy": Fault(lambda: Raises(0, 5, busy=True)),
    "rank 2 raises, the others are busy": Fault(lambda: Raises(2, 5, busy=True), ranks=3),
    "rank 1 raises in a hook while others save": Fault(callbacks=lambda: [SavesBadly()]),
    "rank 0 saves alone": Fault(callbacks=lambda: [SavesAlone()]),
    "rank 0 saves alone after the end": Fault(after=saves_alone),
    "rank 1 waits alone": Fault(callbacks=lambda: [WaitsAlone()]),
    "collectives in the step": Fault(Gathers),
    "manual optimization": Fault(Manual),
    "different modules": Fault(OtherOnEachRank),
    "rank 0 is killed": Fault(lambda: Dies(0)),
    "rank 1 is killed": Fault(lambda: Dies(1), ranks=3),
    "rank 0 clips alone": Fault(ClipsAlone),
    "rank 1 leaves without a word": Fault(lambda: Dies(1, lambda: os._exit(0)), ranks=3),
    "rank 1 calls sys.exit": Fault(lambda: Dies(1, lambda: sys.exit(3))),
    "ctrl-c": Fault(Slow, lambda: batches(10_000), send=(signal.SIGINT, "all")),
    "sigterm": Fault(Slow, lambda: batches(10_000), send=(signal.SIGTERM, "first")),
    "rank 1 raises, spawned": Fault(lambda: Raises(1, 5), strategy=SPAWN),
    "no main guard, spawned": Fault(strategy=SPAWN, guarded=False),
    "rank 0 is killed, spawned": Fault(lambda: Dies(0), strategy=SPAWN),
    "a learning rate of each rank's own": Fault(OwnLearningRate),
    "a foreign plan": Fault(Announced, strategy={"plan": str(FOREIGN)}),
    "a memory limit that nothing fits": Fault(Announced, strategy={"memory_limit": 100, **MEASURED}),
    "a cut that leaves a stage empty": Fault(Announced, strategy={"cuts": ["net"], **MEASURED}),
    "the step raises while it is measured": Fault(lambda: Measured(raises), strategy=MEASURED),
    "ctrl-c while ranks start": Fault(send=(signal.SIGINT, "all"), start=slow_to_start),
    "sigterm while ranks start": Fault(send=(signal.SIGTERM, "first"), start=slow_to_start),
    "rank 1 is killed while ranks start": Fault(start=killed_at_start),
    "ctrl-c while measuring": Fault(lambda: Measured(may_come), strategy=MEASURED, send=(signal.SIGINT, "all")),
    "sigterm while measuring": Fault(lambda: Measured(may_come), strategy=MEASURED, send=(signal.SIGTERM, "first")),
    "rank 1 is killed while measuring": Fault(
        lambda: Measured(may_come, is_killed_while_rank_0_measures), strategy=MEASURED
    ),
    "sigterm, spawned": Fault(Slow, lambda: batches(10_000), strategy=SPAWN, send=(signal.SIGTERM, "first")),
}


def main(fault: Fault) -> None:
    torch.manual_seed(1)
    (directory() / f"pid-{rank()}").write_text(str(os.getpid()))
    fault.start()
    saving = ModelCheckpoint(directory(), every_n_train_steps=2, save_top_k=-1, save_on_exception=True)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=fault.ranks,
        strategy=AsyncMultiPipeStrategy(**{"num_microbatches": 4, **fault.strategy}),
        callbacks=[saving, *fault.callbacks()],
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(fault.module().double(), fault.loader())
    fault.after(trainer)


if __name__ == "__main__" or (__name__ == "__mp_main__" and not FAULTS[sys.argv[1]].guarded):
    main(FAULTS[sys.argv[1]])
