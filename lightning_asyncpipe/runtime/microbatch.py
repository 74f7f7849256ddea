"""Splitting one Lightning batch into micro-batches, and telling micro-batches apart.

Samples lie on dimension 0. The *batch size* is dimension 0 of the first tensor with at least one
dimension, in the order in which Lightning's ``extract_batch_size`` walks a batch; if there is no
tensor, of the first numpy array or sliceable object. Where that tensor lies in a list of samples,
which the rest of the batch tells (``samples``), it is the length of the list. Then, for every value:

* Tensors and arrays with the batch size on dimension 0 are split, into views, as
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
import hashlib
import warnings
from collections import UserDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

Path = tuple[str, ...]

_SCALARS = (str, bytes, bytearray, int, float, complex, bool, type(None), torch.Size, np.generic)
_REMEDY = (
    "Return a tensor, dict, tuple or dataclass of tensors whose dimension 0 counts the samples, or "
    "an object that defines `__len__` (its samples) and `__getitem__` (a slice gives its own type)."
)
# A fingerprint covers a tensor of so many bytes in full, and samples so many words of a longer one.
_EXACT_BYTES = 1 << 16
_SAMPLED_WORDS = 1 << 12
# Sums over every 251st word; a prime, so that samples that change places fall into other sums.
_SUMS = 251
_SEARCH_DEPTH = 4

_warned_paths: set[str] = set()


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One part of a batch: ``data`` as ``training_step`` receives it, ``size`` in samples."""

    data: Any
    size: int
    index: int


def batch_size(batch: Any) -> int:
    """Samples in ``batch``: dimension 0 of its first tensor with a dimension; 1 if it has none.

    Arrays and sliceable objects count only where there is no such tensor.
    """
    fallback: int | None = None
    for value in _leaves(batch):
        if isinstance(value, Tensor):
            if value.ndim >= 1:
                return int(value.shape[0])
        elif fallback is None:
            if isinstance(value, np.ndarray):
                fallback = int(value.shape[0]) if value.ndim >= 1 else None
            elif _is_sliceable(value):
                fallback = len(value)
    return 1 if fallback is None else fallback


def samples(batch: Any) -> int:
    """Samples in ``batch``, also where they are entries of a list: :func:`batch_size` otherwise.

    A list or tuple that holds the first tensor, such as sequences of different lengths beside their
    labels, counts the samples if its entries are alike, something outside of it (a tensor's
    dimension 0, another list) has its length, and no tensor outside has the first one's; nor have
    all tensors of that other list, as in ``((view, view), (target, target))``.
    """
    size = batch_size(batch)
    if isinstance(batch, Mapping):
        fields = list(batch.values())
    elif isinstance(batch, (list, tuple)):
        fields = list(batch)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type) and not _is_sliceable(batch):
        fields = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    else:
        return size
    holding = next((i for i, field in enumerate(fields) if any(_has_rows(leaf) for leaf in _leaves(field))), None)
    if holding is None:
        return size
    entries, others = fields[holding], fields[:holding] + fields[holding + 1 :]
    if not isinstance(entries, (list, tuple)) or hasattr(entries, "_fields") or not _are_alike(entries):
        return size
    rows = {len(other) for other in others if isinstance(other, (Tensor, np.ndarray)) and other.ndim >= 1}
    lists = {len(other) for other in others if isinstance(other, (list, tuple)) and not _holds_rows(other, size)}
    return len(entries) if size not in rows and len(entries) in rows | lists else size


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim >= 1


def _holds_rows(fields: Any, size: int) -> bool:
    """Whether there are tensors, and all of them have ``size`` rows, as in a tuple of collated fields."""
    lengths = {len(leaf) for leaf in _leaves(fields) if _has_rows(leaf)}
    return lengths == {size}


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


def fingerprint(microbatch: MicroBatch | Any) -> int:
    """A signed 64-bit number, never 0, the same on every rank for equal data and no other.

    It covers shape, dtype and contents of all tensors and arrays, and strings and numbers. A tensor
    of at most 64 KiB counts in full, a longer one by 251 interleaved sums over all of it and by
    4096 or more words at even distances. For tensors on an accelerator it waits for the device:
    call it before other work is queued there.
    """
    data = microbatch.data if isinstance(microbatch, MicroBatch) else microbatch
    digest = hashlib.blake2b(digest_size=8)
    for value in _leaves(data):
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            _update_with_tensor(digest, value)
        elif isinstance(value, np.ndarray):
            digest.update(f"{value.dtype}{value.shape}".encode())
            if value.dtype != object:
                _update_with_bytes(digest, np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        elif isinstance(value, _SCALARS):
            digest.update(f"{value!r};".encode())
        elif _is_sliceable(value):
            for inner in _leaves(_attributes(value)):
                if isinstance(inner, Tensor):
                    _update_with_tensor(digest, inner)
    return int.from_bytes(digest.digest(), "little", signed=True) or 1


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
        if isinstance(node, _SCALARS):
            return self._same(node)
        if isinstance(node, PackedSequence):
            raise TypeError(_message(node, path, "a packed sequence has no sample on dimension 0"))
        if isinstance(node, Mapping):
            return self._mapping(node, path)
        if isinstance(node, (list, tuple)):
            return self._sequence(node, path)
        if _is_sliceable(node):
            return self._sliceable(node, path)
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            return self._dataclass(node, path)
        if _holds_tensors(node):
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
        if _holds_tensors(node):
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
    tensors = [leaf for leaf in _leaves(node) if isinstance(leaf, (Tensor, np.ndarray))]
    if not tensors:
        return not any(_holds_tensors(entry) for entry in node) or _are_alike(node)
    if all(t.ndim >= 1 and t.shape[0] == size for t in tensors):
        return False
    return _are_alike(node)


def _are_alike(entries: list[Any] | tuple[Any, ...]) -> bool:
    if len({_kind(entry) for entry in entries}) != 1:
        return False
    if not isinstance(entries[0], (Tensor, np.ndarray)) or entries[0].ndim < 2:
        return True
    lengths = [set(sizes) for sizes in zip(*(entry.shape for entry in entries), strict=True)]
    return any(len(found) == 1 for found in lengths)


def _kind(entry: Any) -> Any:
    if isinstance(entry, (Tensor, np.ndarray)):
        return (type(entry), entry.dtype, entry.ndim)
    if isinstance(entry, Mapping):
        return (type(entry), frozenset(entry))
    return type(entry)


def _leaves(node: Any) -> Iterator[Any]:
    """All that is no container in ``node``, in order: tensors, arrays, numbers, other objects."""
    if isinstance(node, (Tensor, np.ndarray, *_SCALARS)):
        yield node
    elif isinstance(node, Mapping):
        for value in node.values():
            yield from _leaves(value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from _leaves(value)
    elif dataclasses.is_dataclass(node) and not isinstance(node, type) and not _is_sliceable(node):
        for field in dataclasses.fields(node):
            yield from _leaves(getattr(node, field.name))
    else:
        yield node


def _is_sliceable(node: Any) -> bool:
    """Whether an object that is no container known here says that it can be split."""
    kind = type(node)
    return (
        hasattr(kind, "__len__")
        and hasattr(kind, "__getitem__")
        and not isinstance(node, (Mapping, list, tuple, torch.nn.Module, range, *_SCALARS))
    )


def _slices_to_own_type(node: Any) -> bool:
    try:
        return type(node[0:1]) is type(node)
    except Exception:
        return False


def _attributes(node: Any) -> dict[str, Any]:
    values = dict(getattr(node, "__dict__", {}))
    for kind in type(node).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(node, name):
                values[name] = getattr(node, name)
    return values


def _holds_tensors(node: Any, depth: int = _SEARCH_DEPTH) -> bool:
    """Whether a tensor is found in ``node`` within a few levels of containers and attributes."""
    if isinstance(node, Tensor):
        return True
    if depth == 0 or callable(node) or isinstance(node, (np.ndarray, *_SCALARS)):
        return False
    if isinstance(node, Mapping):
        return any(_holds_tensors(value, depth - 1) for value in node.values())
    if isinstance(node, (list, tuple, set, frozenset, deque)):
        return any(_holds_tensors(value, depth - 1) for value in node)
    return any(_holds_tensors(value, depth - 1) for value in _attributes(node).values())


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
            "micro-batch gets all of it. To have it split, make its dimension 0 the batch size.",
            stacklevel=2,
        )


def _update_with_tensor(digest: Any, tensor: Tensor) -> None:
    tensor = tensor.detach()
    if tensor.is_nested or tensor.layout != torch.strided:
        return  # cannot be split: such a batch is one micro-batch, told apart by its other tensors
    if tensor.numel() == 0:
        return
    flat = tensor.contiguous().reshape(-1)
    if flat.numel() == 1:  # counts as contiguous whatever its stride, but cannot be viewed then
        flat = flat.clone(memory_format=torch.contiguous_format)
    flat = flat.view(torch.uint8)
    if flat.device.type == "cpu":
        _update_with_bytes(digest, flat.numpy())
    elif flat.numel() <= _EXACT_BYTES:
        digest.update(flat.cpu().numpy())
    else:
        digest.update(_summed_on_device(flat).cpu().numpy())


def _summed_on_device(flat: Tensor) -> Tensor:
    """What stands for the long ``flat``, uint8 [bytes], in a digest; int64 [a few thousand]."""
    words = flat[: flat.numel() // 4 * 4].view(torch.int32)
    sums = words[: words.numel() // _SUMS * _SUMS].view(-1, _SUMS).sum(0, dtype=torch.int64)
    step = words.numel() // _SAMPLED_WORDS
    return torch.cat([sums, words[::step].long(), flat[-4 * _SUMS :].long()])


def _update_with_bytes(digest: Any, flat: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Cover ``flat``, the contiguous bytes of one array."""
    if flat.size <= _EXACT_BYTES:
        digest.update(flat)
        return
    words = flat[: flat.size // 8 * 8].view(np.uint64)
    sums = words[: words.size // _SUMS * _SUMS].reshape(-1, _SUMS).sum(0)  # wrap around
    step = words.size // _SAMPLED_WORDS
    for covered in (sums, words[::step], flat[-8 * _SUMS :]):
        digest.update(np.ascontiguousarray(covered))
