"""`python -m lightning_asyncpipe`, and configuration files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_asyncpipe import AsyncMultiPipeStrategy
from lightning_asyncpipe.__main__ import main
from tests.support.edge_basics import sized
from tests.support.fit import fit
from tests.support.resuming import Saves, emulated
from tests.support.scripts import PYTHON_PATH
from tests.test_resuming import Grouped

pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "configured.py"
CONFIG = ROOT / "examples" / "configured.yaml"


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """The last thing that is said of arguments that make no sense."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert "Traceback" not in printed.err
    return printed.err


# Arguments


@pytest.mark.parametrize("command", [[], ["run"], ["plan"], ["inspect"], ["consolidate"]])
def test_help_says_what_there_is(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(" ".join(["usage: python -m lightning_asyncpipe", *command]))
    assert len(text.splitlines()) > 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: command"),
        (["fly"], "invalid choice: 'fly'"),
        (["run"], "the following arguments are required: script"),
        (["run", "nothing.py"], "there is no file nothing.py; a module is run with -m"),
        (["plan"], "--stages"),
        (["plan", "--stages", "four"], "invalid int value: 'four'"),
        (["plan", "--stages", 0], "num_stages must be 'auto' or an integer of at least 1, got 0"),
        (["plan", "--stages", 4, "--pipelines", 9], "num_pipelines=9 is more than the 4 devices"),
        (["plan", "--stages", 4, "--message", -1], "a cost is -1.0"),
        (["inspect", "nothing.ckpt"], "Checkpoint file not found: nothing.ckpt"),
        (["consolidate", "nothing.ckpt"], "the folder nothing.ckpt is no checkpoint"),
        (["inspect", __file__], "cannot be read: it is truncated, damaged or no checkpoint"),
    ],
)
def test_arguments_without_a_meaning_are_refused(arguments, message, capsys):
    assert message in refused(capsys, *arguments)


# Schedules


def test_a_plan_shows_the_grid_and_its_figures(capsys):
    main(["plan", "--stages", "4", "--pipelines", "2", "--microbatches", "8"])
    text = capsys.readouterr().out
    assert re.search(r"^pipeline 1: stages 0 to 3 on devices 3 2 1 0$", text, re.MULTILINE)
    for device in range(4):
        row = re.search(rf"^device {device} .*$", text, re.MULTILINE)
        assert row is not None
        for half in "IW":  # every micro-batch passes every device once
            assert sorted(re.findall(rf"{half}(\d)", row[0])) == list("01234567")
    assert 0.9 < float(re.search(r"utilisation, simulated +(\S+)", text)[1]) <= 1
    assert 0 < float(re.search(r"weights of a step before +(\S+)", text)[1]) < 1


def test_a_synchronous_plan_has_no_stale_forwards(capsys):
    main(["plan", "--stages", "4", "--max-staleness", "0", "--no-grid"])
    text = capsys.readouterr().out
    assert "device 0" not in text
    assert "+" not in text
    assert float(re.search(r"weights of a step before +(\S+)", text)[1]) == 0


# Checkpoints


def test_a_checkpoint_is_listed_with_whose_state_is_whose(tmp_path, capsys):
    fit(Grouped().double(), sized(8, 8), emulated(), callbacks=[Saves(tmp_path)])
    main(["inspect", str(tmp_path / "epoch-0.ckpt")])
    text = capsys.readouterr().out
    assert re.search(r"^global step +2$", text, re.MULTILINE)
    assert re.search(r"^weights, 14 tensors, 1\.5 KiB$", text, re.MULTILINE)
    assert re.search(r"^  net\.head\.weight +float64 \[1, 5\]$", text, re.MULTILINE)
    assert re.search(r"^  group 1: 7 parameters, .*weight_decay=0\.1", text, re.MULTILINE)
    assert re.search(r"^  net\.head\.weight +step float32 \[\], exp_avg float64 \[1, 5\]", text, re.MULTILINE)


def test_parts_become_one_file(tmp_path, capsys):
    strategy = emulated(save_distributed_checkpoint=True)
    fit(Grouped().double(), sized(8, 8), strategy, callbacks=[Saves(tmp_path)])
    main(["consolidate", str(tmp_path / "epoch-0.ckpt"), str(tmp_path / "one.ckpt")])
    assert capsys.readouterr().out.strip() == str(tmp_path / "one.ckpt")
    assert torch.load(tmp_path / "one.ckpt", weights_only=True)["global_step"] == 2


def test_nothing_that_a_checkpoint_holds_is_run(tmp_path, capsys):
    torch.save({"state_dict": {}, "hyper_parameters": Path("x").joinpath}, tmp_path / "hostile.ckpt")
    assert "was refused" in refused(capsys, "inspect", tmp_path / "hostile.ckpt")


# Configuration files


def configured(directory: Path, strategy: Any, *arguments: str) -> LightningCLI:
    path = directory / "config.yaml"
    trainer = {"devices": 3, "accelerator": "cpu", "strategy": strategy, "logger": False}
    path.write_text(yaml.safe_dump({"trainer": trainer}))
    return LightningCLI(BoringModel, args=["--config", str(path), *arguments], run=False, save_config_callback=None)


def test_a_configuration_names_the_strategy(tmp_path):
    strategy = configured(tmp_path, "async_multipipe").trainer.strategy
    assert type(strategy) is AsyncMultiPipeStrategy
    assert strategy.geometry.num_stages == 3


def test_a_configuration_sets_every_argument(tmp_path):
    arguments = {"num_pipelines": 3, "num_microbatches": 6, "max_staleness": 0, "cuts": ["layer"], "timeout": "0:10:00"}
    name = "lightning_asyncpipe.AsyncMultiPipeStrategy"
    parsed = configured(
        tmp_path,
        {"class_path": name, "init_args": arguments},
        "--trainer.strategy.init_args.num_pipelines=2",
    )
    strategy = parsed.trainer.strategy
    assert (strategy.geometry.num_pipelines, strategy.geometry.num_microbatches) == (2, 6)
    assert (strategy.max_staleness, list(strategy.cuts), strategy._timeout.seconds) == (0, ["layer"], 600)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("max_staleness", 2),
        ("num_pipelines", "two"),
        ("num_stages", 1.5),
        ("weight_stash", "perhaps"),
        ("start_method", "teleport"),
        ("timeout", "soon"),
        ("cuts", 3),
        ("pipelines", 2),
    ],
)
def test_a_configuration_with_a_wrong_value_is_refused(argument, value, tmp_path, capsys):
    wrong = {"class_path": "lightning_asyncpipe.AsyncMultiPipeStrategy", "init_args": {argument: value}}
    with pytest.raises(SystemExit):
        configured(tmp_path, wrong)
    assert argument in capsys.readouterr().err


def test_a_configuration_is_printed_with_every_argument(capsys):
    with pytest.raises(SystemExit):
        LightningCLI(BoringModel, args=["--config", str(_strategy_alone()), "--print_config"], run=False)
    printed = yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"]["init_args"]
    assert printed["num_stages"] == "auto"
    assert printed["max_staleness"] == 1
    assert printed["timeout"] == "0:30:00"
    assert printed["start_method"] == "popen"


def _strategy_alone() -> Path:
    return ROOT / "tests" / "support" / "strategy.yaml"


# Scripts that do not know of the package


def run(directory: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "lightning_asyncpipe", "run", str(SCRIPT), *arguments]
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    result = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def test_a_script_that_does_not_import_the_package_runs_on_all_ranks_and_goes_on(tmp_path):
    common = ("fit", "--config", str(CONFIG), "--trainer.enable_progress_bar", "false")
    first = run(tmp_path, *common, "--trainer.strategy", "async_multipipe", "--trainer.max_epochs", "1")
    assert "Starting with 2 processes" in first
    path = next((tmp_path / "lightning_logs" / "version_0" / "checkpoints").glob("*.ckpt"))
    assert path.name == "epoch=0-step=16.ckpt"
    saved = torch.load(path, weights_only=True)
    assert saved["global_step"] == 16
    assert set(saved["async_multipipe"]) >= {"seed", "random_states"}
