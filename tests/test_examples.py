"""The examples and benchmarks run, and end with what their documentation says."""

from __future__ import annotations

import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


def load(path: str) -> ModuleType:
    """Import a script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # so that worker processes and pickle find its classes
    spec.loader.exec_module(module)
    return module


def run(directory: Path, script: str, *arguments: object) -> str:
    """What a script prints, run in ``directory`` so that its files stay there."""
    command = [sys.executable, str(ROOT / script), *map(str, arguments)]
    result = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def train_gpt() -> ModuleType:
    return load("examples/train_gpt.py")


class TestTheTextOfTheGPT:
    def test_comes_from_the_standard_library_without_its_tests(self, train_gpt: ModuleType) -> None:
        paths = train_gpt.standard_library_files()
        assert "argparse.py" in {path.name for path in paths}
        assert paths == sorted(paths)
        assert not any({"test", "site-packages"} & set(path.parts) for path in paths)

    def test_is_the_same_at_every_set_up(self, train_gpt: ModuleType) -> None:
        first, second = (train_gpt.StandardLibrary(32, 4, 3, seed=5) for _ in range(2))
        first.setup()
        second.setup()
        batches = [list(data.train_dataloader()) for data in (first, second)]
        assert [batch.shape for batch in batches[0]] == [(4, 33)] * 3
        assert torch.equal(torch.cat(batches[0]), torch.cat(batches[1]))

    def test_holds_files_out_for_validation(self, train_gpt: ModuleType) -> None:
        data = train_gpt.StandardLibrary(32, 4, 3)
        data.setup()
        sizes = [path.stat().st_size for path in train_gpt.standard_library_files()]
        assert len(data.train.text) + len(data.validation.text) == sum(sizes)
        assert len(data.validation.text) == sum(sizes[9::10])


class TestTheGPT:
    def test_does_not_look_ahead(self, train_gpt: ModuleType) -> None:
        model = train_gpt.GPT(width=16, depth=2, heads=2, length=8).eval()
        tokens = torch.arange(8)[None]
        changed = tokens.clone()
        changed[0, 5] = 99
        difference = (model(tokens) - model(changed)).abs().amax(dim=-1)[0]
        assert (difference[:5] == 0).all()
        assert (difference[5:] > 0).all()

    def test_begins_near_the_loss_of_a_guess(self, train_gpt: ModuleType) -> None:
        torch.manual_seed(0)
        module = train_gpt.LitGPT(width=32, depth=2, heads=2, length=16)
        loss = module.loss(torch.randint(256, (4, 17)))
        assert math.log(256) - 0.5 < loss.item() < math.log(256) + 1.0


class TestTheTable:
    def test_gives_what_was_measured(self, train_gpt: ModuleType) -> None:
        text = train_gpt.report(
            {"utilisation": 0.9, "microbatches": 160, "max_staleness": 1, "unknown": 3},
            {"pipelined": (2.02, 1234.0), "one device": (2.0, None)},
        )
        assert re.search(r"pipelined +2\.0200 +1,234", text)
        assert re.search(r"one device +2\.0000 +-", text)
        assert re.search(r"difference +\+1\.00 %", text)
        assert re.search(r"utilisation of the devices +0\.900", text)
        assert "stale forward" not in text

    def test_needs_no_statistics(self, train_gpt: ModuleType) -> None:
        assert len(train_gpt.report({}, {"pipelined": (2.0, None)}).splitlines()) == 2


SMALL_GPT = ("--width", 16, "--depth", 4, "--heads", 2, "--length", 16, "--steps", 12)


def test_the_gpt_trains_pipelined_and_on_one_device(tmp_path: Path) -> None:
    output = run(tmp_path, "examples/train_gpt.py", "--compare", "--devices", 4, *SMALL_GPT)
    losses = [
        float(re.search(rf"{name} +(\d\.\d+)", output).group(1))  # type: ignore[union-attr]
        for name in ("pipelined", "one device")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert re.search(r"largest staleness, in updates +1", output)
    assert (tmp_path / "checkpoints" / "train_gpt.ckpt").exists()


def test_the_synchronous_gpt_equals_the_one_on_one_device(tmp_path: Path) -> None:
    options = ("--compare", "--devices", 2, "--max-staleness", 0, *SMALL_GPT)
    output = run(tmp_path, "examples/train_gpt.py", *options)
    assert re.search(r"difference +[+-]0\.00 %", output)


def test_the_existing_project_trains_with_its_changed_line(tmp_path: Path) -> None:
    output = run(tmp_path, "examples/existing_project.py", "--epochs", 1, "--samples", 256)
    assert re.search(r"accuracy on new pictures: 0\.\d+", output)


def test_the_emulation_gives_a_row_for_each_peer_and_for_the_strategy(tmp_path: Path) -> None:
    options = ("--devices", 2, "--microbatches", 4, "--forward-ms", 4, "--steps", 3)
    output = run(tmp_path, "benchmarks/emulated.py", *options, "--peers", "1F1B")
    table = output[output.index("utilisation, D = 2") :]
    for name in ("1F1B", "async_multipipe"):
        assert re.search(rf"^{name} +[01]\.\d+$", table, re.MULTILINE)


def test_the_overhead_is_measured(tmp_path: Path) -> None:
    output = run(tmp_path, "benchmarks/overhead.py", "--steps", 5, "--microbatches", 2, 8)
    assert re.search(r"overhead per action +-?\d+\.\d+ ms", output)
