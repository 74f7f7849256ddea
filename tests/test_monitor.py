"""What the monitor shows is what the devices did."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_asyncpipe import AsyncMultiPipeStrategy, PipelineMonitor, ReferenceStrategy
from lightning_asyncpipe.monitor.picture import draw
from lightning_asyncpipe.monitor.timeline import Bar, read_trace, write_trace
from tests.support.launch import run_ranks
from tests.support.models import GPT, LanguageModel, loader

D, M, BATCHES = 2, 2, 6


class Kept(pl.Callback):
    """Keeps what was logged."""

    def __init__(self) -> None:
        self.logged: dict[str, float] = {}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.logged = {name: float(value) for name, value in trainer.callback_metrics.items()}


def train(strategy: Any, devices: int, monitor: PipelineMonitor) -> dict[str, float]:
    kept = Kept()
    trainer = pl.Trainer(
        strategy=strategy,
        devices=devices,
        accelerator="cpu",
        max_epochs=1,
        callbacks=[monitor, kept],
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LanguageModel(GPT()), loader(BATCHES * 8, 8))
    return kept.logged


def watched(directory: str) -> dict[str, float]:
    monitor = PipelineMonitor(every_n_batches=2, timeline_batches=[3], directory=directory, pictures=["png", "svg"])
    return train(AsyncMultiPipeStrategy(num_pipelines=1, num_microbatches=M, split_backward=False), D, monitor)


def test_a_run_is_logged_alike_on_all_ranks_and_its_timeline_has_every_action(tmp_path: Path) -> None:
    logged, other = run_ranks(watched, D, str(tmp_path))
    assert logged == pytest.approx(other, rel=0.5)  # seconds are each rank's own
    shares = [value for name, value in logged.items() if name.startswith("pipeline/waiting")]
    assert logged["pipeline/utilisation"] + sum(shares) + logged["pipeline/overhead"] == pytest.approx(1.0)
    assert 0 < logged["pipeline/utilisation"] < 1
    assert logged["pipeline/samples_per_second"] > 0
    assert logged["pipeline/peak_memory_gb"] > 0.01
    assert logged["pipeline/max_staleness"] == 1

    bars, devices = read_trace(tmp_path / "timeline-3.json")
    assert devices == D
    assert {bar.rank for bar in bars} == {0, 1}
    computed = [bar.action for bar in bars if bar.what in ("forward", "backward")]
    assert len(computed) >= 2 * 2 * D * M  # two batches, each micro-batch once forwards and once backwards in a stage
    assert any(bar.early for bar in bars)
    for rank in range(D):
        own = sorted((bar.start, bar.end) for bar in bars if bar.rank == rank)
        assert all(one[1] <= next_[0] + 1e-6 for one, next_ in itertools.pairwise(own))
    for suffix in ("png", "svg"):
        assert (tmp_path / f"timeline-3.{suffix}").stat().st_size > 1000


def test_one_process_that_stands_for_all_devices_has_counts_but_no_times() -> None:
    logged = train(ReferenceStrategy(D, num_microbatches=M), 1, PipelineMonitor(every_n_batches=3))
    assert "pipeline/stale_share" in logged
    assert "pipeline/utilisation" not in logged


def test_without_pipelines_there_is_nothing_to_watch() -> None:
    with pytest.raises(MisconfigurationException, match="strategy is SingleDeviceStrategy"):
        train("auto", 1, PipelineMonitor())


def test_a_trace_can_be_read_back(tmp_path: Path) -> None:
    bars = [Bar(0, "forward", 0.0, 0.5, "F0:0@0"), Bar(3, "waiting for activation", 0.25, 0.5, "F1:0@0+")]
    write_trace(bars, tmp_path / "trace.json", 2)
    read, devices = read_trace(tmp_path / "trace.json")
    assert devices == 2
    assert [(bar.rank, bar.what, bar.action, bar.pipeline, bar.early) for bar in read] == [
        (0, "forward", "F0:0@0", 0, False),
        (3, "waiting for activation", "F1:0@0+", 0, True),
    ]
    assert [bar.end for bar in read] == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("content", ["", "[]", "{}", json.dumps({"traceEvents": [{"ph": "X"}]})])
def test_another_file_is_no_trace(content: str, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(content)
    with pytest.raises(ValueError, match="is not a trace that PipelineMonitor wrote"):
        read_trace(tmp_path / "trace.json")


def test_a_picture_of_nothing_is_drawn(tmp_path: Path) -> None:
    draw([], [tmp_path / "empty.png"])
    assert (tmp_path / "empty.png").exists()


@pytest.mark.parametrize(
    ("pictures", "message"),
    [
        (["png", "pgn"], r"pictures=\['png', 'pgn'\]: 'pgn' is no format of a picture: choose from .*png"),
        ("png", r"pictures must be a list of suffixes, such as \['png'\]"),
    ],
)
def test_pictures_that_cannot_be_drawn_are_refused_before_training(pictures: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        PipelineMonitor(timeline_batches=[1], pictures=pictures)


def test_without_matplotlib_pictures_are_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    with pytest.raises(ModuleNotFoundError, match="drawing a timeline needs matplotlib: `pip install matplotlib`"):
        PipelineMonitor(pictures=["png"])
    PipelineMonitor(timeline_batches=[1])
