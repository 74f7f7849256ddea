"""Where the processes are started by multiprocessing, the main process knows of the run what every rank knew."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.trainer.connectors import checkpoint_connector
from lightning.pytorch.utilities._pytree import _tree_flatten

from lightning_asyncpipe import AsyncMultiPipeStrategy, ReferenceStrategy
from lightning_asyncpipe.integration.terminal import quieten
from tests.support.edge_basics import Regression, sized
from tests.support.fit import fit
from tests.support.launch import free_port


def test_after_a_forked_fit_the_main_process_has_its_figures_and_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    strategy = AsyncMultiPipeStrategy(num_microbatches=4, start_method="fork", partition="operations")
    module = Regression().double()
    before = module.net.head.weight.clone()
    fit(module, sized(8, 8, 8), strategy, devices=2)
    assert not torch.equal(module.net.head.weight, before)
    statistics = strategy.statistics()
    assert (statistics["steps"], statistics["microbatches"]) == (3, 12)
    assert 0.0 < statistics["utilisation"] <= 1.0
    assert len(strategy.describe()["stages"]) == 2
    strategy.save_plan(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["geometry"]["num_microbatches"] == 4
    again = ReferenceStrategy(2, plan=str(tmp_path / "plan.json"))
    fit(Regression().double(), sized(8), again)
    assert again.describe()["cuts"] == strategy.describe()["cuts"]


@pytest.mark.parametrize("rank", [0, 1])
def test_lines_that_each_rank_would_print_are_printed_once_or_not_at_all(
    rank: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", rank, raising=False)
    saving = checkpoint_connector.log
    with warnings.catch_warnings(record=True) as caught, caplog.at_level("INFO"):
        warnings.simplefilter("always")
        quieten()
        quieten()
        saving.info("`weights_only` was not set, defaulting to `False`.")
        saving.info("another line")
        _tree_flatten([torch.zeros(1)])
        warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated", FutureWarning, stacklevel=1)
    assert [record.getMessage() for record in caplog.records].count("another line") == 1
    assert sum("weights_only" in record.getMessage() for record in caplog.records) == (rank == 0)
    assert [str(warning.message) for warning in caught] == ["`isinstance(treespec, LeafSpec)` is deprecated"]
    assert sum(kept.__name__ == "_first_rank_alone" for kept in saving.filters) == 1
