"""What a checkpoint holds, as text; read without running anything that it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_asyncpipe.errors import CheckpointError
from lightning_asyncpipe.integration import resuming
from lightning_asyncpipe.integration.files import AtomicCheckpointIO
from lightning_asyncpipe.integration.sharded import ShardedCheckpoint

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def describe(path: Path) -> str:
    """The names, shapes and types of a checkpoint's weights and optimizer states, and how far its training had come.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        CheckpointError: it cannot be read, or holds more than tensors and plain values.
    """
    files: dict[str, str] = {}
    if path.is_dir():
        checkpoint, files = ShardedCheckpoint(path, weights_only=True).outline()
    else:
        checkpoint = AtomicCheckpointIO().load_checkpoint(path, weights_only=True)
    if "state_dict" not in checkpoint:
        raise CheckpointError(f"{path} is no checkpoint of Lightning: it has no state_dict, but {_listed(checkpoint)}")
    lines = [*_progress(checkpoint, path), "", *_weights(checkpoint["state_dict"], files)]
    return "\n".join([*lines, *_optimizers(checkpoint, resuming.names_of_states(checkpoint, path))])


def _progress(checkpoint: Mapping[str, Any], path: Path) -> Iterator[str]:
    for key, title in (
        ("pytorch-lightning_version", "Lightning"),
        ("epoch", "epoch"),
        ("global_step", "global step"),
    ):
        if key in checkpoint:
            yield f"{title:<14}{checkpoint[key]}"
    own = resuming.Randomness.of(checkpoint, path)
    if own is not None:
        yield f"{'seed':<14}{own.seed}"
    for key, title in (("callbacks", "callbacks"), ("hyper_parameters", "hyperparams")):
        if checkpoint.get(key):
            yield f"{title:<14}{_listed(checkpoint[key])}"
    if "lr_schedulers" in checkpoint:
        yield f"{'schedulers':<14}{len(checkpoint['lr_schedulers'])}"


def _weights(state: Mapping[str, Any], files: Mapping[str, str]) -> Iterator[str]:
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    first: dict[object, str] = {}
    lines = []
    for name, tensor in tensors.items():
        other = first.setdefault(_identity(tensor), name)
        notes = ["" if other == name else f"  the same as {other}", f"  in {files[name]}" if name in files else ""]
        lines.append((name, _type(tensor) + "".join(notes)))
    yield f"weights, {len(tensors)} tensors, {_size(sum(tensors[name].nbytes for name in first.values()))}"
    yield from _table(lines)


def _identity(tensor: Tensor) -> object:
    """Equal for tensors that are stored once."""
    if tensor.device.type == "meta" or not tensor.numel():
        return id(tensor)
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()), tensor.shape


def _optimizers(checkpoint: Mapping[str, Any], orders: list[list[str]]) -> Iterator[str]:
    for number, optimizer in enumerate(checkpoint.get("optimizer_states", [])):
        names = dict(enumerate(orders[number])) if number < len(orders) else {}
        states = optimizer["state"]
        tensors = [value for state in states.values() for value in state.values() if isinstance(value, Tensor)]
        yield ""
        yield f"optimizer {number}, states of {len(states)} parameters, {_size(sum(t.nbytes for t in tensors))}"
        for index, group in enumerate(optimizer["param_groups"]):
            options = ", ".join(f"{key}={value}" for key, value in group.items() if key != "params")
            yield f"  group {index}: {len(group['params'])} parameters, {options}"
        yield from _table(
            [
                (
                    str(names.get(index, f"parameter {index}")),
                    ", ".join(
                        f"{key} {_type(value) if isinstance(value, Tensor) else value}" for key, value in state.items()
                    ),
                )
                for index, state in states.items()
            ]
        )


def _table(lines: list[tuple[str, str]]) -> Iterator[str]:
    width = max((len(name) for name, _ in lines), default=0)
    for name, text in lines:
        yield f"  {name:<{width}}  {text}"


def _type(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(str(key).split("{")[0] for key in values) or "nothing"


def _size(count: float) -> str:
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"
