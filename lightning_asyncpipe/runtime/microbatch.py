"""Splitting one Lightning batch into micro-batches.

Samples lie on dimension 0, or are entries of a list; :func:`~lightning_asyncpipe.runtime.batch.samples` says how many
there are. Then, for every value:

* Tensors and arrays with that size on dimension 0 are split, into views, as
  ``torch.tensor_split`` splits them. Those of another length go to every micro-batch whole, and a
  warning names them once.
* 0-dim tensors, numbers, strings, None and objects without tensors go to every micro-batch.
* Mappings, dataclasses, named tuples, tuples and lists are entered, and rebuilt with their type. A
  list or tuple with one entry per sample is split; ``_is_one_entry_per_sample`` says what that is.
* An object with ``__len__`` and ``__getitem__`` for slices is sliced: the protocol by which a batch
  class of the user's own is split.
* Packed sequences, sparse and nested tensors and any other object that holds tensors are a
  TypeError that names the path and what to do.

Samples that do not lie on dimension 0 (time-major sequences, a bare list of images) cannot be told
from ones that do: return a batch whose tensors have them there, or a sliceable object.

Everything here is a pure function of its arguments, so ranks that hold the same batch get the same
micro-batches.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections import UserDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_asyncpipe.runtime.batch import SCALARS, are_alike, holds_tensors, is_sliceable, samples, values

Path = tuple[str, ...]

_REMEDY = (
    "Return a tensor, dict, tuple or dataclass of tensors whose dimension 0 counts the samples, or "
    "an object that defines `__len__` (its samples) and `__getitem__` (a slice gives its own type)."
)

_warned_paths: set[str] = set()


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One part of a batch: ``data`` as ``training_step`` receives it, ``size`` in samples."""

    data: Any
    size: int
    index: int


def split(batch: Any, count: int, *, min_samples: int = 1) -> list[MicroBatch]:
    """Split ``batch`` into ``count`` micro-batches whose sizes differ by at most one, larger first.

    There are fewer where a micro-batch would have less than ``min_samples`` samples (give 2 where a
    BatchNorm is in training). A single micro-batch is the batch itself, whatever it holds.

    Raises:
        ValueError: ``count`` or ``min_samples`` is less than 1.
        TypeError: the batch holds what cannot be split; the message names its path and what to do.

    """
    if count < 1 or min_samples < 1:
        raise ValueError(f"count ({count}) and min_samples ({min_samples}) must be at least 1")
    size = samples(batch)
    parts = max(1, min(count, size // min_samples))
    if parts == 1:
        return [MicroBatch(batch, size, 0)]
    small, larger = divmod(size, parts)
    sizes = [small + 1] * larger + [small] * (parts - larger)
    pieces = _Splitter(size, sizes).pieces(batch, ())
    return [MicroBatch(piece, n, i) for i, (piece, n) in enumerate(zip(pieces, sizes, strict=True))]


class _Splitter:
    """Splits every value of one batch of ``size`` samples into ``len(sizes)`` parts."""

    def __init__(self, size: int, sizes: list[int]) -> None:
        self.size = size
        self.count = len(sizes)
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        self.slices = [slice(end - n, end) for end, n in zip(ends, sizes, strict=True)]

    def pieces(self, node: Any, path: Path) -> list[Any]:
        """The parts of ``node``, one per micro-batch."""
        if isinstance(node, Tensor):
            return self._tensor(node, path)
        if isinstance(node, np.ndarray):
            return self._rows(node, path)
        if isinstance(node, SCALARS):
            return self._same(node)
        if isinstance(node, PackedSequence):
            raise TypeError(_message(node, path, "a packed sequence has no sample on dimension 0"))
        if isinstance(node, Mapping):
            return self._mapping(node, path)
        if isinstance(node, (list, tuple)):
            return self._sequence(node, path)
        if is_sliceable(node):
            return self._sliceable(node, path)
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            return self._dataclass(node, path)
        if holds_tensors(node):
            raise TypeError(_message(node, path, "it holds tensors and is no known container"))
        return self._same(node)

    def _same(self, node: Any) -> list[Any]:
        return [node] * self.count

    def _tensor(self, node: Tensor, path: Path) -> list[Any]:
        if node.is_nested or node.layout != torch.strided:
            kind = "a nested (jagged)" if node.is_nested else f"a {node.layout}"
            raise TypeError(_message(node, path, f"{kind} tensor cannot be split into views"))
        return self._rows(node, path)

    def _rows(self, node: Any, path: Path) -> list[Any]:
        if node.ndim == 0:
            return self._same(node)
        if node.shape[0] != self.size:
            _warn_replicated(node, path, self.size)
            return self._same(node)
        return [node[part] for part in self.slices]

    def _mapping(self, node: Mapping[Any, Any], path: Path) -> list[Any]:
        if not isinstance(node, (dict, UserDict)) and _slices_to_own_type(node):  # a TensorDict
            return self._sliceable(node, path)
        columns = {key: self.pieces(value, (*path, f"[{key!r}]")) for key, value in node.items()}
        rows = [{key: parts[i] for key, parts in columns.items()} for i in range(self.count)]
        if type(node) is dict:
            return rows
        try:
            return [self._like(node, row, i) for i, row in enumerate(rows)]
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            reason = f"a copy with other values cannot be made ({error})"
            raise TypeError(_message(node, path, reason)) from error

    def _like(self, node: Mapping[Any, Any], row: dict[Any, Any], index: int) -> Any:
        """A mapping of the type of ``node`` with the values of ``row``."""
        if isinstance(node, defaultdict) and type(node) is defaultdict:
            return defaultdict(node.default_factory, row)
        result: Any = copy.copy(node)
        for key, value in row.items():
            result[key] = value
        if isinstance(node, UserDict):
            # transformers.BatchEncoding keeps its per-sample encodings beside the mapping
            for name, value in vars(node).items():
                if isinstance(value, list) and name != "data" and len(value) == self.size:
                    setattr(result, name, value[self.slices[index]])
        return result

    def _sequence(self, node: Any, path: Path) -> list[Any]:
        if hasattr(node, "_fields"):
            columns = [self.pieces(getattr(node, name), (*path, f".{name}")) for name in node._fields]
            return [type(node)(*row) for row in zip(*columns, strict=True)]
        build = type(node)
        if _is_one_entry_per_sample(node, self.size):
            return [build(node[part]) for part in self.slices]
        columns = [self.pieces(value, (*path, f"[{i}]")) for i, value in enumerate(node)]
        if not columns:
            return self._same(node)
        return [build(row) for row in zip(*columns, strict=True)]

    def _dataclass(self, node: Any, path: Path) -> list[Any]:
        results = [copy.copy(node) for _ in range(self.count)]
        for field in dataclasses.fields(node):
            parts = self.pieces(getattr(node, field.name), (*path, f".{field.name}"))
            for result, part in zip(results, parts, strict=True):
                object.__setattr__(result, field.name, part)  # also where the dataclass is frozen
        return results

    def _sliceable(self, node: Any, path: Path) -> list[Any]:
        if len(node) != self.size:
            reason = f"its length is {len(node)}, the batch has {self.size} samples"
        else:
            try:
                parts = [node[part] for part in self.slices]
            except Exception as error:
                reason = f"slicing it failed ({error!r})"
            else:
                if all(type(part) is type(node) for part in parts):
                    return parts
                reason = f"a slice of it is a {type(parts[0]).__name__}"
        if holds_tensors(node):
            raise TypeError(_message(node, path, reason))
        return self._same(node)


def _is_one_entry_per_sample(node: list[Any] | tuple[Any, ...], size: int) -> bool:
    """Whether a list or tuple has an entry for each of ``size`` samples rather than so many fields.

    It does if it has that length and holds no tensors (strings, numbers), or if its entries are
    alike (tensors that have a dimension of one length in common, mappings
    with the same keys, objects of one type) and not all of their tensors have ``size`` rows.
    """
    if len(node) != size:
        return False
    tensors = [leaf for leaf in values(node) if isinstance(leaf, (Tensor, np.ndarray))]
    if not tensors:
        return not any(holds_tensors(entry) for entry in node) or are_alike(node)
    if all(t.ndim >= 1 and t.shape[0] == size for t in tensors):
        return False
    return are_alike(node)


def _slices_to_own_type(node: Any) -> bool:
    try:
        return type(node[0:1]) is type(node)
    except Exception:
        return False


def _name(path: Path) -> str:
    return "batch" + "".join(path)


def _message(node: Any, path: Path, reason: str) -> str:
    kind = type(node)
    return (
        f"cannot split `{_name(path)}` of type {kind.__module__}.{kind.__qualname__} into "
        f"micro-batches: {reason}. {_REMEDY}"
    )


def _warn_replicated(node: Any, path: Path, size: int) -> None:
    name = _name(path)
    if name not in _warned_paths:
        _warned_paths.add(name)
        warnings.warn(
            f"`{name}` has shape {tuple(node.shape)}, the batch has {size} samples: every "
            "micro-batch gets all of it. To have it split, make its dimension 0 the batch size, or give a list with an "
            "entry for each sample (instead of values of all samples in a row and their offsets).",
            stacklevel=2,
        )
