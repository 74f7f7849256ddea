"""The wire format of one message: a fixed-size first part, and a second part for large payloads.

gloo aborts the process when a message is larger than the receive that was posted for it, so the
size of everything on the wire must be known beforehand. The first part therefore always has
``FIRST_SIZE`` bytes: a header of 64-bit integers, then up to ``INLINE_SIZE`` bytes of payload, so
that a small tensor costs one message. A larger payload follows as a second part, whose exact size
the header tells. Nothing is pickled.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_asyncpipe.errors import PipelineError
from lightning_asyncpipe.runtime.codec import CODE_OF_DTYPE, DTYPE_OF_CODE

INLINE_SIZE = 8192
MAX_NDIM = 8

_MAGIC = 0x41505031  # "APP1"; changes with the format
_HAS_TENSOR, _REQUIRES_GRAD, _ON_DEVICE = 1, 2, 4
# magic, key (5), flags, fingerprint, dtype code, ndim, bytes, shape (8), strides (8), one spare
_HEADER = struct.Struct(f"<{11 + 2 * MAX_NDIM + 1}q")
FIRST_SIZE = _HEADER.size + INLINE_SIZE


class MessageKey(NamedTuple):
    """What a message is: small integers whose meaning sender and receiver agree on."""

    kind: int
    stage: int
    pipeline: int
    batch: int  # serial number
    microbatch: int


class Message(NamedTuple):
    """A received message; ``requires_grad`` is the flag of the tensor that was sent."""

    tensor: Tensor | None
    fingerprint: int = 0
    requires_grad: bool = False


class Header(NamedTuple):
    """The decoded first part of a message, without its payload."""

    key: MessageKey
    fingerprint: int
    requires_grad: bool
    dtype: torch.dtype | None  # None: the message carries no tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    nbytes: int
    on_device: bool = False  # whether the payload goes from device to device

    def empty(self, device: torch.device | str = "cpu", pin_memory: bool = False) -> Tensor:
        """An uninitialised tensor with the dtype, shape and strides of the one sent."""
        assert self.dtype is not None
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device, pin_memory=pin_memory)


def dense(tensor: Tensor) -> Tensor:
    """``tensor`` itself where its elements fill a block of memory, else a contiguous copy.

    Dense tensors keep their strides over the wire: a channels-last activation must arrive as one,
    or the receiver's kernels round differently from those of a run on one device.
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain if plain.is_contiguous() or _fills_memory(plain) else plain.contiguous()


def memory(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in memory order: a uint8 view, one-dimensional."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def pack(
    key: MessageKey, tensor: Tensor | None, requires_grad: bool, fingerprint: int, on_device: bool = False
) -> bytearray:
    """The first part of a message, ``FIRST_SIZE`` bytes, still without its payload.

    Args:
        key: fields within 64-bit signed integers, as ``fingerprint``.
        tensor: dense (see :func:`dense`), at most 8 dimensions; or None.
        requires_grad: the flag to carry; ``tensor`` itself is detached by then.
        fingerprint: carried along unchanged.
        on_device: whether the payload goes from device to device; it is not for the second part then.

    Raises:
        ValueError: more than 8 dimensions, or an integer that does not fit.
        TypeError: a dtype that has no wire code.
    """
    part = bytearray(FIRST_SIZE)
    fields = [_MAGIC, *key, 0, fingerprint, 0, 0, 0, *(0,) * (2 * MAX_NDIM + 1)]
    if tensor is not None:
        if tensor.ndim > MAX_NDIM:
            raise ValueError(
                f"a message can carry a tensor of at most {MAX_NDIM} dimensions, not one of shape "
                f"{tuple(tensor.shape)}; flatten some of them"
            )
        if tensor.dtype not in CODE_OF_DTYPE:
            raise TypeError(f"a message cannot carry a tensor of dtype {tensor.dtype}")
        ndim = tensor.ndim
        fields[6] = _HAS_TENSOR | _REQUIRES_GRAD * requires_grad | _ON_DEVICE * on_device
        fields[8:11] = CODE_OF_DTYPE[tensor.dtype], ndim, tensor.nbytes
        fields[11 : 11 + ndim] = tensor.shape
        fields[11 + MAX_NDIM : 11 + MAX_NDIM + ndim] = tensor.stride()
    try:
        _HEADER.pack_into(part, 0, *fields)
    except struct.error as error:
        raise ValueError(f"{key} with fingerprint {fingerprint} does not fit 64-bit signed integers") from error
    return part


def unpack(part: bytearray) -> Header:
    """Read the header of a first part.

    Raises:
        PipelineError: the bytes are not a message of this format.
    """
    magic, *fields = _HEADER.unpack_from(part)
    key, (flags, fingerprint, code, ndim, nbytes) = MessageKey(*fields[:5]), fields[5:10]
    if magic != _MAGIC or not 0 <= ndim <= MAX_NDIM:
        raise PipelineError(
            "received bytes that are not a message of this package's transport; its process group "
            "must not be used for anything else, and every rank must run the same version"
        )
    if not flags & _HAS_TENSOR:
        return Header(key, fingerprint, False, None, (), (), 0)
    shape, strides = tuple(fields[10 : 10 + ndim]), tuple(fields[10 + MAX_NDIM :][:ndim])
    dtype = DTYPE_OF_CODE.get(code)
    if dtype is None or nbytes != math.prod(shape) * dtype.itemsize:
        raise PipelineError(
            f"received a message for {key} with dtype code {code}, shape {shape} and {nbytes} "
            "bytes, which do not fit each other; every rank must run the same version"
        )
    requires_grad, on_device = bool(flags & _REQUIRES_GRAD), bool(flags & _ON_DEVICE)
    return Header(key, fingerprint, requires_grad, dtype, shape, strides, nbytes, on_device)


def inline(part: bytearray) -> memoryview:
    """The room for an inlined payload within a first part."""
    return memoryview(part)[_HEADER.size :]


def mismatch(rank: int, expected: MessageKey, peer: int, received: MessageKey) -> str:
    """The message of the error for a message that is not the expected one."""
    return (
        f"rank {rank} expected {expected} from rank {peer}, but received {received}: the two ranks "
        "execute different schedules"
    )


def _fills_memory(tensor: Tensor) -> bool:
    """Whether some order of the dimensions makes ``tensor`` contiguous."""
    order = sorted(range(tensor.ndim), key=lambda d: (tensor.stride(d), tensor.size(d)))
    expected = 1
    for dim in order:
        if tensor.size(dim) == 1:
            continue
        if tensor.stride(dim) != expected:
            return False
        expected *= tensor.size(dim)
    return True
