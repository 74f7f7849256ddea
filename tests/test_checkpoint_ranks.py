"""Real processes write, resume and convert checkpoints; one launch, and what it must equal in one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_asyncpipe import ReferenceStrategy, consolidate
from lightning_asyncpipe.__main__ import main
from tests.support import checkpoint_ranks
from tests.support.checkpoint_ranks import KINDS, PLACES, RANKS, SAVED, grouped, kept
from tests.support.edges import PartsOnOneDevice, assert_close
from tests.support.launch import run_ranks
from tests.support.resuming import Saves, draw, emulated

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def one_device(directory: Path) -> Any:
    """What one device ends with, and what the ranks go on from: one device's file, and another plan's parts."""
    grouped(emulated(max_staleness=0, **KINDS["parts"]), directory / "elsewhere" / "parts")
    return grouped(PartsOnOneDevice(4), directory / "elsewhere" / "file")


@pytest.fixture(scope="module")
def ranks(directory: Path, one_device: Any) -> list[dict[Any, Any]]:
    """What each rank has seen."""
    return run_ranks(checkpoint_ranks.everything, RANKS, directory, timeout=280.0)


# Resuming


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(kind, ranks):
    for rank in ranks:
        tensors, seen = rank[kind]["whole"]
        for place in PLACES:
            found, seen_again = rank[kind][place]
            assert 0 < len(seen_again) < len(seen)
            assert seen_again == seen[-len(seen_again) :]
            assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items()), place


def test_it_is_the_run_of_one_process_that_emulates_the_ranks(ranks, tmp_path):
    _, module = draw(emulated(num_stages=RANKS), "resumable", Saves(tmp_path, SAVED))
    for rank in ranks:
        for kind in KINDS:
            assert_close(rank[kind]["whole"], (dict(module.state_dict()), module.seen))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_go_on_from_one_device_and_from_another_plan(kind, ranks, one_device):
    for rank in ranks:
        assert_close(rank[kind, "here"], one_device, tolerance=1e-12)
        assert_close(rank[kind, "from elsewhere"], one_device, tolerance=1e-12)


def test_what_ranks_saved_goes_on_with_ddp(ranks, one_device):
    for rank in ranks:
        assert_close(rank["ddp"], one_device, tolerance=1e-12)


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: PartsOnOneDevice(4),
        lambda: ReferenceStrategy(3, num_microbatches=4, max_staleness=0),
        lambda: ReferenceStrategy(2, num_microbatches=4, max_staleness=0, save_distributed_checkpoint=True),
    ],
    ids=["one device", "3 stages", "2 pipelines"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_ranks_saved_goes_on_elsewhere(kind, strategy, ranks, directory, one_device, tmp_path):
    chosen, path = strategy(), directory / kind / "grouped" / "epoch-0.ckpt"
    if kind == "parts" and isinstance(chosen, PartsOnOneDevice):
        path = consolidate(path, tmp_path / "one.ckpt")
    assert_close(grouped(chosen, tmp_path, ckpt_path=path), one_device, tolerance=1e-12)


# Parts


def test_parts_make_the_file_that_would_have_been_written(ranks, directory, tmp_path):
    parts, file = (directory / kind / "grouped" / "epoch-1.ckpt" for kind in ("parts", "file"))
    found = torch.load(consolidate(parts, tmp_path / "one.ckpt"), weights_only=True)
    expected = torch.load(file, weights_only=True)
    assert list(found["state_dict"]) == list(expected["state_dict"])
    assert_close(found, expected, tolerance=0.0)
    weight = found["state_dict"]["net.layers.0.weight"]
    assert weight.data_ptr() == found["state_dict"]["net.layers.3.weight"].data_ptr()


def test_each_rank_writes_what_it_owns_once(ranks, directory, capsys):
    folder = directory / "parts" / "grouped" / "epoch-1.ckpt"
    assert sorted(path.name for path in folder.iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]
    main(["inspect", str(folder)])
    lines = capsys.readouterr().out.splitlines()
    written = [line.split(" in ")[1] for line in lines if " in __" in line]
    assert set(written) == {"__0_0.distcp", "__1_0.distcp"}
    assert len(written) == 13  # of 14 tensors, since one has two names
    assert any(re.search(r"net.layers.3.weight .* the same as net.layers.0.weight", line) for line in lines)


# Callbacks


def test_callbacks_keep_the_checkpoints_that_they_keep_on_one_device(ranks, tmp_path):
    expected = kept(tmp_path, "one device", "auto")
    assert [len(names) for _, names, _ in expected] == [2, 6, 2, 1]
    for rank in ranks:
        assert_close(rank["kept"], expected)


# Failures


def test_a_module_whose_training_failed_is_not_trained_on_by_accident(ranks):
    for number, rank in enumerate(ranks):
        found = rank["after a failure"]
        assert found["first"] == "ValueError: the third step"
        assert "a training of this module failed, and left it on rank 0 without the weights of" in found["again"], (
            number
        )
        assert "`fit(ckpt_path=...)`" in found["again"]
        assert found["from the checkpoint"] == "none"
        steps = [step for step, *_ in found["seen"]]
        assert steps == [1, 2, 3, 3, 4, 5]


def test_a_full_disk_ends_the_run_and_leaves_what_was_there(ranks, directory):
    first, second = (rank["full disk"] for rank in ranks)
    path = directory / "file" / "step-2.ckpt"
    assert first.startswith(f"CheckpointError: the checkpoint {path} cannot be written: File too large. What was saved")
    assert second.startswith("PeerFailure")
    assert torch.load(path, weights_only=True)["global_step"] == 2
    assert not list(path.parent.glob(".*.part"))
