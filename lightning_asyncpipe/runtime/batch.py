"""What a batch holds, and how many samples.

The *batch size* is dimension 0 of the first tensor with at least one dimension, in the order in which Lightning's
``extract_batch_size`` walks a batch; if there is no tensor, of the first numpy array or sliceable object. Where that
tensor lies in a list of samples, which the rest of the batch tells, the batch has as many as the list.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

SCALARS = (str, bytes, bytearray, int, float, complex, bool, type(None), torch.Size, np.generic)
_SEARCH_DEPTH = 4


def batch_size(batch: Any) -> int:
    """Samples in ``batch``: dimension 0 of its first tensor with a dimension; 1 if it has none.

    Arrays and sliceable objects count only where there is no such tensor.
    """
    fallback: int | None = None
    for value in values(batch):
        if isinstance(value, Tensor):
            if value.ndim >= 1:
                return int(value.shape[0])
        elif fallback is None:
            if isinstance(value, np.ndarray):
                fallback = int(value.shape[0]) if value.ndim >= 1 else None
            elif is_sliceable(value):
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
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type) and not is_sliceable(batch):
        fields = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    else:
        return size
    holding = next((i for i, field in enumerate(fields) if any(_has_rows(leaf) for leaf in values(field))), None)
    if holding is None:
        return size
    entries, others = fields[holding], fields[:holding] + fields[holding + 1 :]
    if not isinstance(entries, (list, tuple)) or hasattr(entries, "_fields") or not are_alike(entries):
        return size
    rows = {len(other) for other in others if isinstance(other, (Tensor, np.ndarray)) and other.ndim >= 1}
    lists = {len(other) for other in others if isinstance(other, (list, tuple)) and not _holds_rows(other, size)}
    return len(entries) if size not in rows and len(entries) in rows | lists else size


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim >= 1


def _holds_rows(fields: Any, size: int) -> bool:
    """Whether there are tensors, and all of them have ``size`` rows, as in a tuple of collated fields."""
    lengths = {len(leaf) for leaf in values(fields) if _has_rows(leaf)}
    return lengths == {size}


def are_alike(entries: list[Any] | tuple[Any, ...]) -> bool:
    """Whether entries of a list may be samples: of one kind, and if they are tensors, with a dimension in common."""
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


def values(node: Any) -> Iterator[Any]:
    """All that is no container in ``node``, in order: tensors, arrays, numbers, other objects."""
    if isinstance(node, (Tensor, np.ndarray, *SCALARS)):
        yield node
    elif isinstance(node, Mapping):
        for value in node.values():
            yield from values(value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from values(value)
    elif dataclasses.is_dataclass(node) and not isinstance(node, type) and not is_sliceable(node):
        for field in dataclasses.fields(node):
            yield from values(getattr(node, field.name))
    else:
        yield node


def is_sliceable(node: Any) -> bool:
    """Whether an object that is no container known here says that it can be split."""
    kind = type(node)
    return (
        hasattr(kind, "__len__")
        and hasattr(kind, "__getitem__")
        and not isinstance(node, (Mapping, list, tuple, torch.nn.Module, range, *SCALARS))
    )


def attributes(node: Any) -> dict[str, Any]:
    """What an object holds, in its dictionary or in slots."""
    found = dict(getattr(node, "__dict__", {}))
    for kind in type(node).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(node, name):
                found[name] = getattr(node, name)
    return found


def holds_tensors(node: Any, depth: int = _SEARCH_DEPTH) -> bool:
    """Whether a tensor is found in ``node`` within a few levels of containers and attributes."""
    if isinstance(node, Tensor):
        return True
    if depth == 0 or callable(node) or isinstance(node, (np.ndarray, *SCALARS)):
        return False
    if isinstance(node, Mapping):
        return any(holds_tensors(value, depth - 1) for value in node.values())
    if isinstance(node, (list, tuple, set, frozenset, deque)):
        return any(holds_tensors(value, depth - 1) for value in node)
    return any(holds_tensors(value, depth - 1) for value in attributes(node).values())
