"""Objects as bytes without pickle, and collectives that exchange them between ranks.

What ranks tell each other (step outputs, metric states, checkpoint parts, plans) is made of a few
plain types. They are written as tagged binary: one tag byte, then a body whose lengths are
explicit. Decoding only ever builds those types, so bytes from the network can at worst give a
``ValueError``, never run code.

Supported, each with its exact type: ``None``, ``bool``, ``int``, ``float``, ``str``, ``bytes``,
``list``, ``tuple``, ``dict`` with ``str`` or ``int`` keys, ``torch.Size``, ``Path``,
``torch.dtype``, ``torch.device``, dense tensors of any dtype, numpy arrays and scalars of plain
kinds. Subclasses (a ``namedtuple``, an ``IntEnum``) are refused rather than silently turned into
their base.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None

# The position in this table is the wire code of a dtype; a torch that lacks one leaves a gap.
_DTYPE_NAMES = (
    *("float32", "float64", "float16", "bfloat16", "uint8", "int8", "int16", "int32", "int64"),
    *("bool", "complex64", "complex128", "complex32", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
DTYPE_OF_CODE: dict[int, torch.dtype] = {
    code: getattr(torch, name) for code, name in enumerate(_DTYPE_NAMES) if hasattr(torch, name)
}
CODE_OF_DTYPE: dict[torch.dtype, int] = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}

_MAX_DEPTH = 200
_TENSOR_TYPES = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
_NUMPY_KINDS = "biufcSUmM"
_LENGTH = struct.Struct("<Q")
_FLOAT = struct.Struct("<d")


def encode(obj: Any) -> bytes:
    """Return ``obj`` as bytes that :func:`decode` turns back into an equal object.

    Tensors keep their bits, shape and dtype; they come back on the CPU, contiguous, without
    ``requires_grad``.

    Raises:
        TypeError: something in ``obj`` is not supported; names its type and where it sat.
        ValueError: ``obj`` is nested too deeply, or contains itself.
    """
    parts: list[bytes] = []
    _encode_into(parts, obj, ())
    return b"".join(parts)


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Return the object that :func:`encode` wrote as ``data``.

    Raises:
        ValueError: ``data`` was not written by :func:`encode`, or is cut short.
    """
    reader = _Reader(memoryview(data))
    try:
        obj = _decode_from(reader, 0)
    except (TypeError, RuntimeError) as error:  # numpy and torch on names that they do not know
        raise ValueError(f"not an encoded object: {error}") from error
    if reader.remaining:
        raise ValueError(f"{reader.remaining} bytes are left over after the encoded object")
    return obj


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The elements of ``tensor`` in row-major order, as bytes.

    A view of its memory where it is contiguous on the CPU, a copy otherwise.
    """
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if plain.numel() == 1:  # counts as contiguous whatever its stride, but cannot be viewed then
        plain = plain.clone(memory_format=torch.contiguous_format)
    return plain.view(torch.uint8).numpy().data


# ------------------------------------------------------------------------------------------ writing


def _where(path: tuple[str | int, ...]) -> str:
    return "at " + "".join(f"[{step!r}]" for step in path) if path else "at the top level"


def _sized(parts: list[bytes], tag: bytes, body: bytes | memoryview) -> None:
    parts += (tag, _LENGTH.pack(len(body)), bytes(body))


def _shape(parts: list[bytes], shape: tuple[int, ...]) -> None:
    parts.append(struct.pack(f"<B{len(shape)}Q", len(shape), *shape))


def _encode_into(parts: list[bytes], obj: Any, path: tuple[str | int, ...]) -> None:
    if len(path) > _MAX_DEPTH:
        raise ValueError(f"nested more than {_MAX_DEPTH} levels deep, or containing itself")
    kind = type(obj)
    if obj is None:
        parts.append(b"N")
    elif kind is bool:
        parts.append(b"1" if obj else b"0")
    elif kind is int:
        _sized(parts, b"i", obj.to_bytes(obj.bit_length() // 8 + 1, "little", signed=True))
    elif kind is float:
        parts += (b"f", _FLOAT.pack(obj))
    elif kind is str:
        _sized(parts, b"s", obj.encode("utf-8", "surrogatepass"))
    elif kind is bytes:
        _sized(parts, b"b", obj)
    elif kind is list or kind is tuple or kind is torch.Size:
        parts += (_SEQUENCE_TAGS[kind], _LENGTH.pack(len(obj)))
        for index, item in enumerate(obj):
            _encode_into(parts, item, (*path, index))
    elif kind is dict:
        parts += (b"d", _LENGTH.pack(len(obj)))
        for key, item in obj.items():
            if type(key) is not str and type(key) is not int:
                raise TypeError(
                    f"cannot send a dict key of type {_name(type(key))} ({key!r}) {_where(path)}: "
                    "keys must be str or int"
                )
            _encode_into(parts, key, path)
            _encode_into(parts, item, (*path, key))
    elif isinstance(obj, Path):
        _sized(parts, b"p", str(obj).encode("utf-8", "surrogateescape"))
    elif kind is torch.dtype and obj in CODE_OF_DTYPE:
        parts.append(b"y" + bytes((CODE_OF_DTYPE[obj],)))
    elif kind is torch.device:
        _sized(parts, b"v", str(obj).encode())
    elif kind in _TENSOR_TYPES and _is_plain(obj):
        parts.append(b"T" + bytes((CODE_OF_DTYPE[obj.dtype],)))
        _shape(parts, tuple(obj.shape))
        _sized(parts, b"", tensor_bytes(obj))
    elif (kind is np.ndarray or isinstance(obj, np.generic)) and obj.dtype.kind in _NUMPY_KINDS:
        parts.append(b"a" if kind is np.ndarray else b"g")
        _sized(parts, b"", obj.dtype.str.encode())
        _shape(parts, obj.shape)
        _sized(parts, b"", obj.tobytes())
    else:
        detail = f" ({obj.layout}, {obj.device}, {obj.dtype})" if isinstance(obj, Tensor) else ""
        raise TypeError(
            f"cannot send an object of type {_name(kind)}{detail} {_where(path)}: supported are "
            "None, bool, int, float, str, bytes, list, tuple, dict with str or int keys, Path, "
            "torch.dtype, torch.device, dense tensors and numpy arrays"
        )


_SEQUENCE_TAGS: dict[type, bytes] = {list: b"l", tuple: b"t", torch.Size: b"z"}


def _name(kind: type) -> str:
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return module + kind.__qualname__


def _is_plain(tensor: Tensor) -> bool:
    dense = tensor.layout is torch.strided and not tensor.is_quantized
    return dense and tensor.device.type != "meta" and tensor.dtype in CODE_OF_DTYPE


# ------------------------------------------------------------------------------------------ reading


class _Reader:
    """A cursor over bytes that never reads past their end."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    @property
    def remaining(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int) -> memoryview:
        if count > self.remaining:
            raise ValueError(f"the encoded object is cut short: {count} bytes wanted, {self.remaining} left")
        piece = self._data[self._at : self._at + count]
        self._at += count
        return piece

    def byte(self) -> int:
        return self.take(1)[0]

    def length(self) -> int:
        return int(_LENGTH.unpack(self.take(_LENGTH.size))[0])

    def sized(self) -> memoryview:
        return self.take(self.length())

    def shape(self) -> tuple[int, ...]:
        ndim = self.byte()
        return struct.unpack(f"<{ndim}Q", self.take(8 * ndim))


def _dtype(reader: _Reader) -> torch.dtype:
    code = reader.byte()
    if code not in DTYPE_OF_CODE:
        raise ValueError(f"unknown dtype code {code}")
    return DTYPE_OF_CODE[code]


def _tensor(reader: _Reader) -> Tensor:
    dtype, shape, data = _dtype(reader), reader.shape(), reader.sized()
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"a tensor of shape {shape} and {dtype} does not have {len(data)} bytes")
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    # A bytearray of its own is writable, and does not keep the whole message alive.
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _array(reader: _Reader) -> np.ndarray[Any, Any]:
    name = bytes(reader.sized()).decode()
    dtype = np.dtype(name)
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"numpy dtype {name!r} is not supported")
    shape = reader.shape()
    return np.frombuffer(bytearray(reader.sized()), dtype=dtype).reshape(shape)


_SCALARS: dict[int, Callable[[_Reader], Any]] = {
    ord("N"): lambda r: None,
    ord("0"): lambda r: False,
    ord("1"): lambda r: True,
    ord("i"): lambda r: int.from_bytes(r.sized(), "little", signed=True),
    ord("f"): lambda r: _FLOAT.unpack(r.take(8))[0],
    ord("s"): lambda r: bytes(r.sized()).decode("utf-8", "surrogatepass"),
    ord("b"): lambda r: bytes(r.sized()),
    ord("p"): lambda r: Path(bytes(r.sized()).decode("utf-8", "surrogateescape")),
    ord("y"): _dtype,
    ord("v"): lambda r: torch.device(bytes(r.sized()).decode()),
    ord("T"): _tensor,
    ord("a"): _array,
    ord("g"): lambda r: _array(r)[()],
}
_SEQUENCES: dict[int, type] = {ord(tag): kind for kind, tag in _SEQUENCE_TAGS.items()}


def _decode_from(reader: _Reader, depth: int) -> Any:
    if depth > _MAX_DEPTH + 1:
        raise ValueError(f"the encoded object is nested more than {_MAX_DEPTH} levels deep")
    tag = reader.byte()
    if tag in _SCALARS:
        return _SCALARS[tag](reader)
    if tag in _SEQUENCES:
        return _SEQUENCES[tag]([_decode_from(reader, depth + 1) for _ in range(reader.length())])
    if tag == ord("d"):
        pairs = [(_decode_from(reader, depth + 1), _decode_from(reader, depth + 1)) for _ in range(reader.length())]
        if not all(isinstance(key, (str, int)) for key, _ in pairs):
            raise ValueError("an encoded dict has keys that are neither str nor int")
        return dict(pairs)
    raise ValueError(f"unknown tag {tag:#x} in an encoded object")


# -------------------------------------------------------------------------------------- collectives


def broadcast_object(obj: Any, src: int, group: Group = None) -> Any:
    """Return global rank ``src``'s ``obj`` on every rank of ``group``.

    What the other ranks pass is ignored.

    Raises:
        TypeError: ``obj`` cannot be encoded; on every rank, so that none is left waiting.
    """
    device = _device(group)
    frame = _frame(obj) if dist.get_rank() == src else b""
    size = torch.tensor([len(frame)], dtype=torch.int64, device=device)
    dist.broadcast(size, src=src, group=group)
    data = _padded(frame, int(size.item()), device)
    dist.broadcast(data, src=src, group=group)
    return _unframe(data, src)


def all_gather_object(obj: Any, group: Group = None) -> list[Any]:
    """Return every rank's ``obj``, in the order of ``group``'s ranks; sizes may differ.

    Raises:
        TypeError: some rank's ``obj`` cannot be encoded; on every rank, naming that rank.
    """
    device, ranks = _device(group), dist.get_process_group_ranks(group)
    frame = _frame(obj)
    sizes = _gather_sizes(len(frame), len(ranks), device, group)
    data = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in ranks]
    dist.all_gather(data, _padded(frame, max(sizes), device), group=group)
    return _unframe_all(data, sizes, ranks)


def gather_object(obj: Any, dst: int, group: Group = None) -> list[Any] | None:
    """Return every rank's ``obj`` on global rank ``dst``, in the order of ``group``'s ranks.

    Returns None on the other ranks.

    Raises:
        TypeError: some rank's ``obj`` cannot be encoded; on ``dst`` and on that rank.
    """
    device, ranks = _device(group), dist.get_process_group_ranks(group)
    frame = _frame(obj)
    sizes = _gather_sizes(len(frame), len(ranks), device, group)
    mine = _padded(frame, max(sizes), device)
    if dist.get_rank() != dst:
        dist.gather(mine, dst=dst, group=group)
        _raise_own_failure(frame)
        return None
    data = [torch.empty_like(mine) for _ in ranks]
    dist.gather(mine, data, dst=dst, group=group)
    return _unframe_all(data, sizes, ranks)


_OBJECT, _FAILURE = b"\x00", b"\x01"


def _frame(obj: Any) -> bytes:
    """``obj`` encoded, or why it could not be.

    A rank that raised here, before a collective, would leave the others waiting in it.
    """
    try:
        return _OBJECT + encode(obj)
    except (TypeError, ValueError) as error:
        return _FAILURE + str(error).encode()


def _unframe(data: Tensor, rank: int) -> Any:
    raw = tensor_bytes(data)
    if bytes(raw[:1]) == _FAILURE:
        raise TypeError(f"rank {rank}: {bytes(raw[1:]).decode()}")
    return decode(raw[1:])


def _unframe_all(data: list[Tensor], sizes: list[int], ranks: list[int]) -> list[Any]:
    return [_unframe(t[:size], rank) for t, size, rank in zip(data, sizes, ranks, strict=True)]


def _raise_own_failure(frame: bytes) -> None:
    if frame[:1] == _FAILURE:
        raise TypeError(f"rank {dist.get_rank()}: {frame[1:].decode()}")


def _padded(frame: bytes, size: int, device: torch.device) -> Tensor:
    padded = bytearray(size)
    padded[: len(frame)] = frame
    return torch.frombuffer(padded, dtype=torch.uint8).to(device)


def _gather_sizes(size: int, count: int, device: torch.device, group: Group) -> list[int]:
    mine = torch.tensor([size], dtype=torch.int64, device=device)
    sizes = [torch.empty_like(mine) for _ in range(count)]
    dist.all_gather(sizes, mine, group=group)
    return [int(other.item()) for other in sizes]


def _device(group: Group) -> torch.device:
    """Where buffers of a collective on ``group`` must live: on the CPU where it takes them."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
