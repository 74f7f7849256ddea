"""Checkpoints of which every rank writes its own part: folders in the format of ``torch.distributed.checkpoint``.

Every tensor is written once, by the rank that owns it: weights under ``state_dict.NAME``, optimizer states under
``optimizer_I.state.NUMBER.KEY``, parameters numbered as one device numbers them. All else is in ``meta.pt``. So a rank
that reads takes what it needs, whatever the plan was that wrote.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_asyncpipe.errors import CheckpointError
from lightning_asyncpipe.integration.checkpoint import is_deferred
from lightning_asyncpipe.integration.files import AtomicCheckpointIO, replacing, unreadable, unwritable
from lightning_asyncpipe.integration.world import World
from lightning_asyncpipe.runtime.hollow import is_hollow
from lightning_asyncpipe.runtime.shards import PartReader, write_index, write_part

META = "meta.pt"
_MODEL = "state_dict."
_STATE_NAME = re.compile(r"optimizer_(\d+)\.state\.(\d+)\.")
_VALUES = "async_multipipe_values"  # what is no tensor in the parts of the ranks


def is_sharded(path: Path) -> bool:
    """Whether a folder is a checkpoint in parts."""
    return path.is_dir() and (path / META).is_file()


# Writing


def save(checkpoint: Mapping[str, Any], path: Path, world: World, names: Mapping[str, str]) -> None:
    """Write a checkpoint; all ranks call it at the same point.

    Args:
        checkpoint: in which `state_dict` and `optimizer_states` hold this rank's part; all else counts on rank 0.
        path: of the folder, which all ranks reach.
        world: of all ranks.
        names: of the whole `state_dict`, in its order, each with the name under which its tensor is in a part.

    Raises:
        CheckpointError: it cannot be written; what was at `path` before is still there.
    """
    rest = dict(checkpoint)
    tensors, values = _flattened(rest.pop("state_dict"), rest.pop("optimizer_states", None))
    parts = world.gather(values)
    if parts is not None:
        rest[_VALUES] = {**_merged(parts), "names": dict(names)}
        with replacing(path) as folder:
            folder.mkdir()
            _write(tensors, folder, world, rest)
    else:
        try:
            _write(tensors, path.with_name(f".{path.name}.part"), world, None)
        except OSError as error:
            raise unwritable(path, error) from error
    world.all_gather(None)  # it is there, for all


def _write(tensors: Mapping[str, Tensor], folder: Path, world: World, rest: dict[str, Any] | None) -> None:
    world.all_gather(None)  # the folder is there
    parts = world.gather(write_part(tensors, folder, world.rank))
    if parts is not None:
        with (folder / META).open("wb") as file:
            torch.save(rest, file)
            file.flush()
            os.fsync(file.fileno())
        write_index(parts, folder)


def _flattened(
    state: Mapping[str, Any], optimizers: list[dict[str, Any]] | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A rank's tensors by name, and the plain values beside them."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {"state_dict": {}, "optimizers": None if optimizers is None else []}
    for name, value in state.items():
        if isinstance(value, Tensor):
            tensors[_MODEL + name] = value.detach().contiguous()
        else:
            values["state_dict"][name] = value
    for index, optimizer in enumerate(optimizers or []):
        others: dict[int, dict[str, Any]] = {}
        for number, entries in optimizer["state"].items():
            others[number] = {}
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    tensors[_state_name(index, number, key)] = value.detach().contiguous()
                else:
                    others[number][key] = value
        values["optimizers"].append({"state": others, "param_groups": optimizer["param_groups"]})
    return tensors, values


def _state_name(index: int, number: int, key: str) -> str:
    return f"optimizer_{index}.state.{number}.{key}"


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Values of all ranks; parameter groups are the same on all of them."""
    merged: dict[str, Any] = {"state_dict": {}, "optimizers": parts[0]["optimizers"]}
    for part in parts:
        merged["state_dict"].update(part["state_dict"])
        for ours, theirs in zip(merged["optimizers"] or [], part["optimizers"] or [], strict=True):
            ours["state"].update(theirs["state"])
    return merged


# Reading


class ShardedCheckpoint:
    """A folder to read from.

    Args:
        path: of the folder.
        weights_only: as for ``torch.load``; it concerns `meta.pt` alone, since all else is tensors.

    Raises:
        CheckpointError: it is damaged, of another strategy, or holds more than it should.
    """

    def __init__(self, path: Path, weights_only: bool | None = None) -> None:
        self.path = path
        if not is_sharded(path):
            raise CheckpointError(f"the folder {path} is no checkpoint: it has no {META}")
        self.rest = AtomicCheckpointIO().load_checkpoint(path / META, weights_only=weights_only)
        if _VALUES not in self.rest:
            raise CheckpointError(
                f"the checkpoint {path} was written in parts by another strategy: turn it into one file with that "
                "strategy's tools, and resume from the file"
            )
        values = self.rest.pop(_VALUES)
        try:
            self._extra: dict[str, Any] = dict(values["state_dict"])
            self._names: dict[str, str] = dict(values["names"])
            self._optimizers: list[dict[str, Any]] | None = values["optimizers"]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(
                f"the checkpoint {path} is damaged: the entry {_VALUES!r} of its {META} is not what this version of "
                f"lightning-asyncpipe writes ({type(error).__name__}: {error}). Go on from an earlier one."
            ) from None
        try:
            self._reader = PartReader(path)
        except Exception as error:  # unpickling damaged bytes can raise anything
            raise unreadable(path, error) from error
        self._weights: list[str] = []
        self._states: dict[tuple[int, int], list[str]] = {}
        for name in self._reader.index.state_dict_metadata:
            optimizer = _STATE_NAME.match(name)
            if optimizer is not None:
                self._states.setdefault((int(optimizer[1]), int(optimizer[2])), []).append(name)
            elif name.startswith(_MODEL):
                self._weights.append(name.removeprefix(_MODEL))

    def read(self, tensors: dict[str, Tensor]) -> None:
        """Overwrite each tensor with the one that is saved under its name.

        Raises:
            CheckpointError: a file is damaged, or missing.
        """
        try:
            self._reader.read(tensors)
        except Exception as error:
            raise unreadable(self.path, error) from error

    def load_into(self, module: nn.Module) -> dict[str, Any]:
        """Read the weights, into a module's own memory where they fit; returns them as a ``state_dict``."""
        own = module.state_dict()
        targets: dict[str, Tensor] = {}
        for name in self._weights:
            tensor = self._reader.empty(_MODEL + name)
            ours = own.get(name)
            if isinstance(ours, Tensor) and ours.shape == tensor.shape and not (is_hollow(ours) or is_deferred(ours)):
                tensor = ours.detach()
            targets[_MODEL + name] = tensor
        self.read(targets)
        return self._named({name.removeprefix(_MODEL): tensor for name, tensor in targets.items()})

    def _named(self, state: dict[str, Any]) -> dict[str, Any]:
        """Under all names, in the order in which the module had them."""
        state = {**state, **self._extra}
        return {name: state[first] for name, first in self._names.items() if first in state}

    def optimizer_states(self) -> list[dict[str, Any]] | None:
        """The states of the optimizers, of which those are read that are asked for; None if none were saved."""
        if self._optimizers is None:
            return None
        return [
            {"state": _States(self, index, values["state"]), "param_groups": values["param_groups"]}
            for index, values in enumerate(self._optimizers)
        ]

    def state_of(self, index: int, number: int, read: bool = True) -> dict[str, Tensor]:
        """One parameter's state; tensors without their contents unless they are to be read."""
        prefix = _state_name(index, number, "")
        tensors = {
            name: self._reader.empty(name, "cpu" if read else "meta") for name in self._states.get((index, number), [])
        }
        if read:
            self.read(tensors)
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}

    def outline(self) -> tuple[dict[str, Any], dict[str, str]]:
        """The checkpoint with tensors that have no contents, and the file of each weight."""
        state = {name: self._reader.empty(_MODEL + name, "meta") for name in self._weights}
        optimizers = [
            {
                "state": {n: {**self.state_of(i, n, read=False), **others} for n, others in values["state"].items()},
                "param_groups": values["param_groups"],
            }
            for i, values in enumerate(self._optimizers or [])
        ]
        files = {name.removeprefix(_MODEL): file for name, file in self._reader.files().items()}
        return {**self.rest, "state_dict": self._named(state), "optimizer_states": optimizers}, files


def load(folder: Path, module: nn.Module, weights_only: bool | None) -> dict[str, Any]:
    """A checkpoint as Lightning reads it, of which the weights lie in the module's memory already where they fit.

    Optimizer states are read when they are looked up: each rank looks up those that it owns.
    """
    checkpoint = ShardedCheckpoint(folder, weights_only)
    loaded = {**checkpoint.rest, "state_dict": checkpoint.load_into(module)}
    optimizers = checkpoint.optimizer_states()
    return loaded if optimizers is None else {**loaded, "optimizer_states": optimizers}


class _States(Mapping[int, dict[str, Any]]):
    """The states of one optimizer by the number of the parameter, read when they are looked up."""

    def __init__(self, checkpoint: ShardedCheckpoint, index: int, others: Mapping[int, dict[str, Any]]) -> None:
        self._checkpoint = checkpoint
        self._index = index
        self._others = others

    def __getitem__(self, number: int) -> dict[str, Any]:
        others = self._others[number]
        return {**self._checkpoint.state_of(self._index, number), **others}

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._others))

    def __len__(self) -> int:
        return len(self._others)


# One file


def consolidate(folder: str | os.PathLike[str], file: str | os.PathLike[str] | None = None) -> Path:
    """Turn a checkpoint in parts into the one file that would have been written otherwise.

    The whole checkpoint passes through the memory of this machine.

    Args:
        folder: a checkpoint that was saved with ``save_distributed_checkpoint=True``.
        file: where to write; by default beside the folder, under its name with ``.consolidated`` added.

    Returns:
        Where the file is.

    Raises:
        CheckpointError: the folder is no such checkpoint or damaged, or the file is there already or cannot be written.
    """
    source = Path(folder)
    target = source.with_name(source.name + ".consolidated") if file is None else Path(file)
    if target.exists():
        raise CheckpointError(f"{target} is there already: remove it, or give another name")
    whole = load(source, nn.Module(), weights_only=True)
    for optimizer in whole.get("optimizer_states", []):
        optimizer["state"] = dict(optimizer["state"])
    AtomicCheckpointIO().save_checkpoint(whole, target)
    return target
