"""Small tensors end to end: an operation on many of them at once takes hardly longer than on one of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

SMALL = 1 << 14
"""Elements of a tensor that is packed; with a larger one the time goes to its elements."""
FULL = 1 << 16
"""Elements of a pack, which so stays in a CPU's cache, and takes little memory."""


def packs(tensors: Mapping[str, Tensor], kinds: Mapping[str, Hashable]) -> Iterator[list[str]]:
    """All names of `kinds`, those together whose tensors are small, of one type and device, and of equal kind.

    Args:
        tensors: by name, of other names as well.
        kinds: of tensors that are treated alike, equal.
    """
    open_packs: dict[Hashable, tuple[list[str], int]] = {}
    for name, kind in kinds.items():
        tensor = tensors[name]
        size = tensor.numel()
        if size > SMALL:
            yield [name]
            continue
        key = kind, tensor.dtype, tensor.device
        names, total = open_packs.get(key, ([], 0))
        if total + size > FULL:
            yield names
            names, total = [], 0
        names.append(name)
        open_packs[key] = names, total + size
    for names, _ in open_packs.values():
        yield names


def end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    """All elements in one dimension; a tensor that is alone as it is, not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat([tensor.flatten() for tensor in tensors])


def spread(values: Sequence[Tensor], like: Sequence[Tensor]) -> Tensor:
    """One number for each tensor of `like`, to multiply :func:`end_to_end` of these with."""
    if len(like) == 1:
        return values[0]
    return torch.cat([value.expand(tensor.numel()) for value, tensor in zip(values, like, strict=True)])


def taken_apart(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """What :func:`end_to_end` has put together, in memory of their own: writes to one are not seen in another."""
    if len(like) == 1:
        return [flat]
    parts = flat.split_with_sizes([tensor.numel() for tensor in like])
    return [torch.empty_like(tensor).copy_(part.view(tensor.shape)) for tensor, part in zip(like, parts, strict=True)]
