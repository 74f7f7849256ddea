"""Telling batches and micro-batches apart by a number."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_asyncpipe.runtime.batch import SCALARS, attributes, is_sliceable, values

# A fingerprint covers a tensor of so many bytes in full, and samples so many words of a longer one.
_EXACT_BYTES = 1 << 16
_SAMPLED_WORDS = 1 << 12
# Sums over every 251st word; a prime, so that samples that change places fall into other sums.
_SUMS = 251


def fingerprint(data: Any) -> int:
    """A signed 64-bit number, never 0, the same on every rank for equal data and no other.

    It covers shape, dtype and contents of all tensors and arrays, and strings and numbers. A tensor
    of at most 64 KiB counts in full, a longer one by 251 interleaved sums over all of it and by
    4096 or more words at even distances. For tensors on an accelerator it waits for the device:
    call it before other work is queued there.
    """
    digest = hashlib.blake2b(digest_size=8)
    for value in values(data):
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            _update_with_tensor(digest, value)
        elif isinstance(value, np.ndarray):
            digest.update(f"{value.dtype}{value.shape}".encode())
            if value.dtype != object:
                _update_with_bytes(digest, np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        elif isinstance(value, SCALARS):
            digest.update(f"{value!r};".encode())
        elif is_sliceable(value):
            for inner in values(attributes(value)):
                if isinstance(inner, Tensor):
                    _update_with_tensor(digest, inner)
    return int.from_bytes(digest.digest(), "little", signed=True) or 1


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
