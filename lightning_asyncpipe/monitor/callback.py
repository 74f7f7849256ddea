"""A callback that shows what a pipelined training does."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info

from lightning_asyncpipe.monitor.picture import check_formats, draw
from lightning_asyncpipe.monitor.timeline import from_messages, to_message, write_trace
from lightning_asyncpipe.runtime.batch import samples
from lightning_asyncpipe.runtime.staleness import share_and_largest
from lightning_asyncpipe.runtime.timeline import COMPUTE, Ledger

if TYPE_CHECKING:
    from lightning_asyncpipe.strategy import AsyncMultiPipeStrategy

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes, in which the system gives the resident memory


class PipelineMonitor(pl.Callback):
    """Logs utilisation, idle time by cause, staleness, speed and memory, and writes timelines of chosen batches.

    Logged every ``every_n_batches``, over the batches since the last time: ``pipeline/utilisation``; for each cause the
    share of the time, such as ``pipeline/waiting_for_activation`` and ``pipeline/overhead``, mean over devices;
    ``pipeline/stale_share`` of stage forwards and ``pipeline/max_staleness`` in updates, both since training began;
    ``pipeline/samples_per_second``; ``pipeline/peak_memory_gb``, the largest of all devices.

    Args:
        every_n_batches: how often to log; 0 for never.
        timeline_batches: numbers of batches, counted over all epochs, whose timeline to write, each with the batch
            before it.
        directory: where to; the trainer's ``default_root_dir`` if None.
        pictures: suffixes of pictures to draw beside the trace, such as ("png", "svg"); they need matplotlib.

    Raises:
        MisconfigurationException: a number or suffix has no meaning.
        ModuleNotFoundError: pictures are asked for, and matplotlib is not installed.
    """

    def __init__(
        self,
        every_n_batches: int = 50,
        timeline_batches: Sequence[int] = (),
        directory: str | Path | None = None,
        pictures: Sequence[str] = (),
    ) -> None:
        if every_n_batches < 0:
            raise MisconfigurationException(f"every_n_batches must be at least 0, got {every_n_batches}")
        if isinstance(pictures, str):
            raise MisconfigurationException(f"pictures must be a list of suffixes, such as [{pictures!r}], got a text")
        try:
            check_formats(pictures)
        except ValueError as error:
            raise MisconfigurationException(f"pictures={list(pictures)!r}: {error}") from None
        self.every_n_batches = every_n_batches
        self.timeline_batches = frozenset(timeline_batches)
        self.directory = directory
        self.pictures = tuple(pictures)
        self._before: dict[str, float] = {}
        self._wall = 0.0
        self._samples, self._since = 0, 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        ledger = _strategy(trainer).ledger
        self._begin(ledger)
        if {0, 1} & self.timeline_batches:
            ledger.spans = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        strategy = _strategy(trainer)
        number = trainer.fit_loop.total_batch_idx
        self._samples += samples(batch)
        if number in self.timeline_batches:
            self._write_timeline(trainer, number)
        wanted = {number + 1, number + 2} & self.timeline_batches
        if wanted and strategy.ledger.spans is None:
            strategy.ledger.spans = []
        elif not wanted:
            strategy.ledger.spans = None
        if self.every_n_batches and (number + 1) % self.every_n_batches == 0:
            values = self._measured(strategy)
            pl_module.log_dict({f"pipeline/{name}": value for name, value in values.items()})
            self._begin(strategy.ledger)

    def _begin(self, ledger: Ledger) -> None:
        self._before = {spent.value: seconds for spent, seconds in ledger.seconds.items()}
        self._wall = ledger.wall
        self._samples, self._since = 0, time.perf_counter()

    def _measured(self, strategy: AsyncMultiPipeStrategy) -> dict[str, float]:
        ledger = strategy.ledger
        wall = ledger.wall - self._wall
        shares = {
            spent.value: (seconds - self._before[spent.value]) / wall if wall else 0.0
            for spent, seconds in ledger.seconds.items()
        }
        mine = {
            "shares": shares,
            "lags": [[lag, count] for (_, lag), count in strategy.staleness_counts().items()],
            "memory": _peak_memory(strategy.root_device),
        }
        ranks = strategy.all_gather_objects(mine)
        mean = {name: sum(rank["shares"][name] for rank in ranks) / len(ranks) for name in shares}
        stale_share, max_staleness = share_and_largest((lag, n) for rank in ranks for lag, n in rank["lags"])
        utilisation = sum(mean[spent.value] for spent in COMPUTE)
        seconds = time.perf_counter() - self._since
        times = {
            "utilisation": utilisation,
            **{name.replace(" ", "_"): share for name, share in mean.items() if name.startswith("waiting")},
            "overhead": max(0.0, 1.0 - sum(mean.values())),
        }
        return {
            **(times if wall else {}),  # one process that stands for all devices has no idle time to tell of
            "stale_share": stale_share,
            "max_staleness": float(max_staleness),
            "samples_per_second": self._samples * strategy.geometry.replicas / seconds,
            "peak_memory_gb": max(rank["memory"] for rank in ranks) / 1e9,
        }

    def _write_timeline(self, trainer: pl.Trainer, number: int) -> None:
        strategy = _strategy(trainer)
        messages = strategy.all_gather_objects(to_message(strategy.ledger.spans or ()))
        if not trainer.is_global_zero:
            return
        bars = from_messages(messages)
        directory = Path(self.directory or trainer.default_root_dir)
        directory.mkdir(parents=True, exist_ok=True)
        trace = directory / f"timeline-{number}.json"
        write_trace(bars, trace, strategy.geometry.num_stages)
        pictures = [trace.with_suffix(f".{suffix}") for suffix in self.pictures]
        if pictures:
            draw(bars, pictures, f"batches {max(0, number - 1)} and {number}")
        rank_zero_info(f"Wrote the timeline of batch {number}: {', '.join(map(str, [trace, *pictures]))}")


def _strategy(trainer: pl.Trainer) -> AsyncMultiPipeStrategy:
    from lightning_asyncpipe.strategy import AsyncMultiPipeStrategy

    strategy = trainer.strategy
    if not isinstance(strategy, AsyncMultiPipeStrategy):
        raise MisconfigurationException(
            f"PipelineMonitor watches pipelines, but the Trainer's strategy is {type(strategy).__name__}: use "
            "`Trainer(strategy='async_multipipe')`, or leave the callback out"
        )
    return strategy


def _peak_memory(device: torch.device) -> int:
    """Bytes: allocated on an accelerator, resident in the process otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
