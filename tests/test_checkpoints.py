"""Checkpoint files: whole at every moment, and not trusted when they are read."""

from __future__ import annotations

import copy
import errno
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn

from lightning_asyncpipe import CheckpointError, consolidate
from lightning_asyncpipe.integration import sharded
from lightning_asyncpipe.integration.checkpoint import load_hosted, load_whole
from lightning_asyncpipe.integration.files import AtomicCheckpointIO
from lightning_asyncpipe.integration.inspection import describe
from lightning_asyncpipe.integration.resuming import Randomness
from lightning_asyncpipe.integration.sharded import ShardedCheckpoint
from lightning_asyncpipe.integration.world import World
from lightning_asyncpipe.runtime.hollow import hollow, is_hollow
from tests.support.edge_basics import Regression, sized
from tests.support.fit import fit
from tests.support.resuming import Saves, emulated

pytestmark = pytest.mark.filterwarnings("ignore")

KINDS: dict[str, dict[str, Any]] = {"file": {}, "parts": {"save_distributed_checkpoint": True}}


def save(directory: Path, kind: str = "file", module: pl.LightningModule | None = None, **arguments: Any) -> Path:
    """Train an epoch, with a checkpoint at its end."""
    torch.manual_seed(1)
    module = Regression() if module is None else module
    fit(module.double(), sized(8, 8), emulated(**KINDS[kind]), callbacks=[Saves(directory)], **arguments)
    return directory / "epoch-0.ckpt"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: save(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture
def saved(originals: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A checkpoint of a kind, to damage."""

    def copy(kind: str = "file") -> Path:
        path = tmp_path / "epoch-0.ckpt"
        (shutil.copyfile if kind == "file" else shutil.copytree)(originals[kind], path)
        return path

    return copy


def resume(path: Path, module: pl.LightningModule | None = None, **arguments: Any) -> pl.LightningModule:
    module = Regression() if module is None else module
    fit(module.double(), sized(8, 8), emulated(), ckpt_path=path, **{"max_epochs": 2, **arguments})
    return module


def contents(path: Path) -> dict[str, bytes]:
    """All that is saved there."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    return {file.name: file.read_bytes() for file in files}


# Writing


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file can become longer than this: what a full disk does, to this process alone."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0, 700, 6000])
def test_a_full_disk_leaves_what_was_there_and_ends_the_run(size, kind, saved, tmp_path):
    path = saved(kind)
    before = contents(path)
    with room_for(size), pytest.raises(CheckpointError, match=r"cannot be written: File too large\. What was saved"):
        save(tmp_path, kind)
    assert contents(path) == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_cannot_be_written_is_named(kind, tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(CheckpointError, match=r"taken/here/epoch-0.ckpt cannot be written: .* Choose another folder"):
        save(tmp_path / "taken" / "here", kind)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="cannot be written: Permission denied"):
        save(tmp_path)


@pytest.mark.parametrize(("first", "second"), [("file", "parts"), ("parts", "file"), ("parts", "parts")])
def test_a_checkpoint_takes_the_place_of_one_of_another_kind(first, second, saved, tmp_path):
    saved(first)
    path = save(tmp_path, second)
    assert path.is_dir() == (second == "parts")
    resume(path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def write_for_ever(path: Path, kind: str) -> None:
    """Save again and again, each time one number in all tensors."""
    for count in range(1, 1_000_000):
        tensors = {str(index): torch.full((20_000,), float(count)) for index in range(20)}
        if kind == "file":
            AtomicCheckpointIO().save_checkpoint({"state_dict": tensors, "count": count}, path)
        else:
            sharded.save({"state_dict": tensors, "count": count}, path, World(), {name: name for name in tensors})


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_killed_at_any_moment_leaves_a_whole_checkpoint(kind, tmp_path):
    path = tmp_path / "last.ckpt"
    generator = random.Random(1)
    last = 0
    for _ in range(8):
        process = multiprocessing.get_context("fork").Process(target=write_for_ever, args=(path, kind), daemon=True)
        process.start()
        time.sleep(0.1 + 0.15 * generator.random())
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        if not path.exists():
            continue
        io = AtomicCheckpointIO()
        found = io.load_checkpoint(path) if kind == "file" else sharded.load(path, nn.Module(), True)
        values = {float(value) for tensor in found["state_dict"].values() for value in tensor.unique()}
        assert values == {float(found["count"])}
        last = max(last, found["count"])
    assert last > 1
    assert {file.name for file in tmp_path.iterdir()} <= {"last.ckpt", ".last.ckpt.part"}


def test_lightnings_own_writer_would_not_do(tmp_path, monkeypatch):
    """It moves a file from the system's temporary folder, which copies where that is another file system."""

    def other_file_system(*args: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    path = tmp_path / "last.ckpt"
    TorchCheckpointIO().save_checkpoint({"count": 1}, path)
    half: list[int] = []

    def copy(source: str, target: str, **kwargs: Any) -> str:
        Path(target).write_bytes(b"")  # where a crash would leave it
        half.append(path.stat().st_size)
        shutil.copyfile(source, target)
        return target

    monkeypatch.setattr(os, "rename", other_file_system)
    monkeypatch.setattr(shutil, "copy2", copy)
    monkeypatch.setattr(shutil.move, "__kwdefaults__", None)
    monkeypatch.setattr(shutil.move, "__defaults__", (copy,))
    TorchCheckpointIO().save_checkpoint({"count": 2}, path)
    assert half == [0]
    half.clear()
    AtomicCheckpointIO().save_checkpoint({"count": 3}, path)
    assert not half
    assert AtomicCheckpointIO().load_checkpoint(path)["count"] == 3


def test_other_writers_are_used_where_they_are_given(tmp_path):
    seen: list[str] = []

    class Own(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            seen.append(Path(path).name)
            super().save_checkpoint(checkpoint, path, storage_options)

    save(tmp_path / "own", plugins=[Own()])
    assert seen == ["epoch-0.ckpt"]
    path = save(tmp_path / "later", plugins=[AsyncCheckpointIO()])
    assert torch.load(path, weights_only=True)["global_step"] == 2
    with pytest.raises(MisconfigurationException, match="cannot use a CheckpointIO plugin"):
        save(tmp_path / "parts", "parts", plugins=[Own()])


# Reading


def truncated(path: Path, share: float) -> None:
    for file in [path] if path.is_file() else [*path.glob("*.distcp")]:
        file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_truncated_checkpoint_is_named(share, kind, saved):
    path = saved(kind)
    truncated(path, share)
    with pytest.raises(
        CheckpointError, match=r"epoch-0.ckpt cannot be read: it is truncated, damaged or no checkpoint"
    ):
        resume(path)


@pytest.mark.parametrize("name", [".metadata", "meta.pt", "__0_0.distcp"])
def test_parts_of_which_a_file_is_missing_or_damaged_are_named(name, saved):
    path = saved("parts")
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"epoch-0.ckpt.* cannot be read"):
        resume(path)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=r"epoch-0.ckpt.* (cannot be read|is no checkpoint: it has no meta.pt)"):
        resume(path)


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing.ckpt"):
        resume(tmp_path / "nothing.ckpt")
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        resume(tmp_path)


class Runs:
    """Leaves a file when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.proof,)


def hostile(path: Path, proof: Path, place: str) -> None:
    """Hide something that runs."""
    if place == "index":
        (path / ".metadata").write_bytes(pickle.dumps(Runs(proof)))
        return
    if place == "entry of the index":
        reader = ShardedCheckpoint(path)._reader
        reader.index.planner_data = {"state_dict.net": Runs(proof)}
        (path / ".metadata").write_bytes(pickle.dumps(reader.index))
        return
    file = path if place == "file" else path / "meta.pt"
    checkpoint = torch.load(file, weights_only=True)
    checkpoint["hyper_parameters"] = {"harmless": Runs(proof)}
    torch.save(checkpoint, file)


@pytest.mark.parametrize("place", ["file", "meta.pt", "index", "entry of the index"])
def test_what_a_checkpoint_hides_is_not_run(place, saved, tmp_path):
    path, proof = saved("file" if place == "file" else "parts"), tmp_path / "proof"
    hostile(path, proof, place)
    with pytest.raises(CheckpointError, match=r"was refused|cannot be read.*no part of an index") as raised:
        resume(path)
    assert not proof.exists()
    if place in ("file", "meta.pt"):
        assert "weights_only=False" in str(raised.value)
        assert "Re-running" not in str(raised.value)  # torch's advice, of some paragraphs
        assert raised.value.__cause__ is None
        with pytest.raises(CheckpointError, match="was refused"):
            resume(path, weights_only=True)
        resume(path, weights_only=False)  # the user trusts it
        assert proof.exists()


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("weights_only", [None, True, False])
@pytest.mark.filterwarnings("error")
def test_a_pickle_that_is_no_checkpoint_is_called_so_and_not_run(weights_only, protocol, tmp_path):
    path, proof = tmp_path / "raw.ckpt", tmp_path / "proof"
    path.write_bytes(pickle.dumps({"state_dict": Runs(proof)}, protocol))
    with pytest.raises(CheckpointError, match="was refused: it is a pickle of Python, not a checkpoint"):
        AtomicCheckpointIO().load_checkpoint(path, weights_only=weights_only)
    assert not proof.exists()


def test_a_file_of_torchs_old_format_is_read(saved, tmp_path):
    path = tmp_path / "old.ckpt"
    content = {"state_dict": {"x": torch.arange(3)}}
    torch.save(content, path, _use_new_zipfile_serialization=False)
    assert torch.equal(AtomicCheckpointIO().load_checkpoint(path)["state_dict"]["x"], torch.arange(3))
    torch.save({**content, "more": Runs(tmp_path / "proof")}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"was refused: it holds more than .* weights_only=False"):
        AtomicCheckpointIO().load_checkpoint(path)


def test_what_only_looks_at_a_checkpoint_does_not_advise_to_trust_it(saved, tmp_path):
    path = saved()
    hostile(path, tmp_path / "proof", "file")
    with pytest.raises(CheckpointError, match="was refused") as raised:
        describe(path)
    assert "weights_only" not in str(raised.value)


def test_a_folder_where_one_file_is_needed_is_named_with_what_makes_one(saved):
    with pytest.raises(CheckpointError, match=r"is a folder: `lightning_asyncpipe.consolidate\('.*', file\)`"):
        AtomicCheckpointIO().load_checkpoint(saved("parts"))


def test_parts_outside_the_folder_are_not_read(saved, tmp_path):
    path = saved("parts")
    (tmp_path / "outside").write_bytes((path / "__0_0.distcp").read_bytes())
    index = ShardedCheckpoint(path)._reader.index
    for info in index.storage_data.values():
        info.relative_path = "../outside"
    (path / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=r"points to \.\./outside, which is not in the folder"):
        resume(path)


class Wider(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net.extra = nn.Linear(5, 5)
        del self.net.layers[5]


class Resized(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net.layers[2] = nn.Linear(5, 7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_another_model_is_refused_by_names(kind, saved):
    path = saved(kind)
    with pytest.raises(RuntimeError) as raised:
        resume(path, Wider())
    text = str(raised.value)
    assert 'Missing key(s) in state_dict: "net.extra.weight", "net.extra.bias"' in text
    assert 'Unexpected key(s) in state_dict: "net.layers.5.weight", "net.layers.5.bias"' in text
    with pytest.raises(RuntimeError, match=r"size mismatch for net.layers.2.weight: .*\[5, 5\].*\[7, 5\]"):
        resume(path, Resized())


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_that_is_not_strict_takes_what_there_is(kind, saved):
    path = saved(kind)
    module = Wider()
    module.strict_loading = False
    with pytest.raises(
        CheckpointError, match=r"parameter groups have \[14\] parameters, those of AdamW have \[14\]|.*"
    ):
        resume(path, module)  # its optimizer is another one
    saved = sharded.load(path, nn.Module(), True) if kind == "parts" else torch.load(path, weights_only=True)
    assert torch.equal(module.net.layers[0].weight, saved["state_dict"]["net.layers.0.weight"])


def with_optimizer(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> pl.LightningModule:
    kind = type("Other", (Regression,), {"configure_optimizers": lambda self: make(list(self.parameters()))})
    return kind()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            r"another optimizer than SGD: parameter group 0 has the options amsgrad, betas.*, and lacks dampening,",
        ),
        (
            lambda parameters: torch.optim.AdamW(parameters[2:]),
            r"parameter groups have \[14\] parameters, those of AdamW have \[12\]",
        ),
        (
            lambda parameters: torch.optim.AdamW([{"params": parameters[:3]}, {"params": parameters[3:]}]),
            r"have \[14\] parameters, those of AdamW have \[3, 11\]",
        ),
    ],
    ids=["kind", "parameters", "groups"],
)
def test_a_checkpoint_of_another_optimizer_is_refused(make, message, kind, saved):
    path = saved(kind)
    with pytest.raises(CheckpointError, match=message):
        resume(path, with_optimizer(make))


def test_an_optimizer_of_another_version_is_not_another_one(saved):
    path = saved()
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["optimizer_states"][0]["param_groups"][0]["decoupled_weight_decay"]  # as torch 2.6 saves it
    torch.save(checkpoint, path)
    resume(path)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_alone_are_saved_but_not_resumed(kind, tmp_path):
    callback = ModelCheckpoint(tmp_path, filename="weights", save_weights_only=True)
    strategy = emulated(**KINDS[kind])
    fit(Regression().double(), sized(8, 8), strategy, callbacks=[callback], enable_checkpointing=True)
    with pytest.raises(KeyError, match="checkpoint contains only the model"):
        resume(tmp_path / "weights.ckpt")
    module = Regression().double()
    if kind == "parts":
        loaded = torch.load(consolidate(tmp_path / "weights.ckpt"), weights_only=True)
        assert "optimizer_states" not in loaded
        module.load_state_dict(loaded["state_dict"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["last", "best", "a link to the last"])
def test_callbacks_find_what_they_have_saved(name, kind, tmp_path):
    link = "link" if "link" in name else True

    def trained(epochs: int, **arguments: Any) -> tuple[pl.Trainer, list[float]]:
        callback = ModelCheckpoint(tmp_path, monitor="loss_epoch", save_last=link, filename="{epoch}")
        strategy = emulated(**KINDS[kind])
        checkpoints = {"callbacks": [callback], "enable_checkpointing": True, "max_epochs": epochs}
        return fit(Regression().double(), sized(8, 8), strategy, **checkpoints, **arguments)

    trainer, _ = trained(2)
    best = trainer.checkpoint_callback.best_model_path
    trainer, losses = trained(4, ckpt_path=best if name == "best" else "last")
    epoch = (
        torch.load(best if kind == "file" else f"{best}/meta.pt", weights_only=True)["epoch"] if name == "best" else 1
    )
    assert len(losses) == 2 * (3 - epoch)
    assert (tmp_path / "last.ckpt").is_symlink() == (link == "link")


class KeepsMore(Regression):
    """Takes down what its hooks, and those of a callback, get back from a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.got: list[Any] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["more"] = list(checkpoint["state_dict"])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.got.append(checkpoint["more"])

    def configure_callbacks(self) -> Any:
        return [Keeps()]


class Keeps(pl.Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"kept": 3}

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["and more"] = 4

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        module.got.append(checkpoint["and more"])

    def on_train_start(self, trainer: Any, module: Any) -> None:
        module.got.append(self.loaded if module.got else None)


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_get_back_what_they_have_put_in_a_checkpoint(kind, tmp_path):
    path = save(tmp_path, kind, KeepsMore())
    resumed = resume(path, KeepsMore())
    assert resumed.got == [list(Regression().state_dict()), 4, {"kept": 3}]


DAMAGES = {
    "no dict": (lambda entry: [1, 2], "the entry 'async_multipipe' is not .*it is list, not a dict"),
    "all but the seed missing": (lambda entry: {"seed": 1}, "'random_states' is not .*'random_states' is missing"),
    "a seed that is a word": (lambda entry: {**entry, "seed": "x"}, "the entry 'async_multipipe', 'seed' is not"),
    "no states": (lambda entry: {**entry, "random_states": None}, "'async_multipipe', 'random_states' is not"),
    "states of something else": (
        lambda entry: {**entry, "random_states": {**entry["random_states"], "torch": torch.zeros(3)}},
        "'async_multipipe', 'random_states' is not",
    ),
    "states that lack one": (
        lambda entry: {**entry, "random_states": {"torch": entry["random_states"]["torch"]}},
        "'async_multipipe', 'random_states' is not .*'python' is missing",
    ),
    "generators that are numbers": (lambda entry: {**entry, "generators": [3]}, "'generators' is not .*not all are"),
    "names that are a number": (lambda entry: {**entry, "parameters": 3}, "'async_multipipe', 'parameters' is not"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_whose_entry_of_ours_is_damaged_is_refused_by_the_names_of_both(damage, saved):
    change, message = DAMAGES[damage]
    path = saved()
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["async_multipipe"] = change(checkpoint["async_multipipe"])
    torch.save(checkpoint, path)
    # The names are there for people alone: nothing is resumed from them.
    for read in (describe,) if "names" in damage else (describe, resume):
        with pytest.raises(CheckpointError, match=rf"the checkpoint {path} is damaged: .*{message}") as raised:
            read(path)
        assert "Delete the entry 'async_multipipe'" in str(raised.value)


def test_a_checkpoint_without_an_entry_of_ours_is_one_of_another_strategy():
    assert Randomness.of({}) is None


def test_parts_of_another_strategy_are_refused(saved):
    path = saved("parts")
    meta = torch.load(path / "meta.pt", weights_only=True)
    del meta["async_multipipe_values"]
    torch.save(meta, path / "meta.pt")
    with pytest.raises(CheckpointError, match="was written in parts by another strategy"):
        resume(path)


@pytest.mark.parametrize("values", [None, {}, {"state_dict": {}, "names": 3, "optimizers": None}])
def test_parts_whose_entry_of_ours_is_damaged_are_refused_by_the_names_of_both(values, saved):
    path = saved("parts")
    meta = torch.load(path / "meta.pt", weights_only=True)
    torch.save({**meta, "async_multipipe_values": values}, path / "meta.pt")
    with pytest.raises(CheckpointError, match=rf"{path} is damaged: the entry 'async_multipipe_values' of its meta.pt"):
        resume(path)


def test_one_file_does_not_take_the_place_of_another(saved, tmp_path):
    path = saved("parts")
    target = consolidate(path)
    assert target.name == "epoch-0.ckpt.consolidated"
    with pytest.raises(CheckpointError, match="is there already"):
        consolidate(path)
    with pytest.raises(CheckpointError, match=r"is no checkpoint: it has no meta\.pt"):
        consolidate(target, tmp_path / "other")


# Modules without memory, and those that a failure has left incomplete


def test_a_module_without_memory_is_loaded_where_it_is_hosted():
    other = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    state = other.state_dict()
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        resized = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(5))
    assert not load_whole(module, state)
    for wrong in (resized, nn.Sequential(module[0], module[1], module[0])):
        with pytest.raises(RuntimeError) as raised:
            load_whole(wrong, state)
        with pytest.raises(RuntimeError) as expected:
            copy.deepcopy(wrong).to_empty(device="cpu").load_state_dict(state)
        assert str(raised.value) == str(expected.value)
    module.to_empty(device="cpu")
    hollow(module[0].weight)
    load_hosted(module, state)
    assert is_hollow(module[0].weight)
    assert all(torch.equal(module.state_dict()[name], state[name]) for name in state if name != "0.weight")


def test_weights_that_were_let_go_of_come_back_from_a_checkpoint():
    module, other = nn.Linear(3, 2), nn.Linear(3, 2)
    hollow(module.weight)
    with pytest.raises(
        RuntimeError, match=r"left it without the weights of weight \(1 in all\), .* build a new module"
    ):
        load_whole(module, {"bias": other.bias}, strict=False)
    load_whole(module, other.state_dict())
    assert torch.equal(module.weight, other.weight)
