"""Objects survive the codec bit by bit, and nothing else is accepted."""

from __future__ import annotations

import contextlib
import enum
import math
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_asyncpipe.runtime import codec
from lightning_asyncpipe.runtime.codec import decode, encode
from lightning_asyncpipe.runtime.fingerprint import fingerprint
from tests.runtime.processes import run_ranks

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec=None))
    | st.binary()
)
OBJECTS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (count * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


@settings(max_examples=100, deadline=None)
@given(OBJECTS)
def test_nested_objects_come_back_equal_and_of_the_same_types(obj: Any) -> None:
    assert repr(decode(encode(obj))) == repr(obj)


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.0, 5e-324, 0.1])
def test_floats_keep_their_bits(value: float) -> None:
    assert decode(encode(value)).hex() == value.hex()


@pytest.mark.parametrize("dtype", codec.CODE_OF_DTYPE, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensors_keep_bits_shape_and_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_tensor(dtype, shape)
    received = decode(encode({"x": [tensor]}))["x"][0]
    assert (received.dtype, received.shape) == (tensor.dtype, tensor.shape)
    assert codec.tensor_bytes(received) == codec.tensor_bytes(tensor)


def test_views_conjugates_and_parameters_are_sent_by_value() -> None:
    transposed = torch.arange(6.0).reshape(2, 3).t()
    conjugate = torch.tensor([1 + 2j]).conj()
    parameter = torch.nn.Parameter(torch.ones(2))
    received = decode(encode((transposed, conjugate, parameter)))
    assert torch.equal(received[0], transposed)
    assert received[1].item() == 1 - 2j
    assert type(received[2]) is torch.Tensor
    assert not received[2].requires_grad


def test_tensors_of_one_element_with_an_odd_stride_are_like_others() -> None:
    column = torch.arange(6.0).view(2, 3)[:, 1]
    assert torch.equal(decode(encode(column[:1])), torch.tensor([1.0]))
    assert fingerprint(column[:1]) == fingerprint(torch.tensor([1.0]))


def test_decoded_tensors_can_be_written_to() -> None:
    assert decode(encode(torch.zeros(2))).add_(1).tolist() == [1, 1]


def test_other_supported_types() -> None:
    obj = {
        "path": Path("/a/b"),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"),
        "size": torch.Size([2, 3]),
        "scalar": np.float32(1.5),
        "array": np.arange(6, dtype=">i2").reshape(2, 3),
        "words": np.array(["a", "bc"]),
    }
    received = decode(encode(obj))
    assert repr(received) == repr(obj)
    assert received["array"].dtype == obj["array"].dtype


class _Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("obj", "name"),
    [
        (object(), "object"),
        (_Colour.RED, "_Colour"),
        (namedtuple("Point", "x")(1), "Point"),
        (OrderedDict(a=1), "collections.OrderedDict"),
        ({1, 2}, "set"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.zeros(2).to_sparse(), "sparse"),
        (np.array([object()]), "numpy.ndarray"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_types_are_refused_with_type_and_place(obj: Any, name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}.* at \['outs'\]\[3\]"):
        encode({"outs": [0, 1, 2, obj]})


def test_keys_other_than_str_and_int_are_refused() -> None:
    with pytest.raises(TypeError, match=r"dict key of type tuple .* at \['a'\]"):
        encode({"a": {(1, 2): 3}})
    with pytest.raises(TypeError, match=r"dict key of type bool .* at the top level"):
        encode({True: 3})


def test_an_object_that_contains_itself_is_refused() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(ValueError, match="containing itself"):
        encode(cycle)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_arbitrary_bytes_give_a_value_error_at_worst(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        decode(data)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_cut_or_extended_messages_are_refused(data: st.DataObject) -> None:
    whole = encode({"a": [1, torch.ones(3), np.ones(2)], "b": "text"})
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ValueError, match="cut short"):
        decode(whole[:cut])
    with pytest.raises(ValueError, match="left over"):
        decode(whole + b"N")


def test_a_nesting_bomb_is_refused() -> None:
    bomb = (b"l" + (1).to_bytes(8, "little")) * 100_000
    with pytest.raises(ValueError, match="nested more than"):
        decode(bomb)


# -------------------------------------------------------------------------------------- collectives


def _collectives(rank: int) -> None:
    mine = {"rank": rank, "x": torch.full((rank * 1000,), float(rank), dtype=torch.bfloat16)}

    gathered = codec.all_gather_object(mine)
    assert [item["rank"] for item in gathered] == [0, 1, 2]
    assert [item["x"].shape[0] for item in gathered] == [0, 1000, 2000]

    on_one = codec.gather_object(mine, dst=1)
    assert (on_one is None) == (rank != 1)
    if on_one is not None:
        assert [item["rank"] for item in on_one] == [0, 1, 2]

    assert codec.broadcast_object(mine if rank == 2 else None, src=2)["rank"] == 2

    group = torch.distributed.new_group([0, 2])  # group ranks differ from global ranks
    if rank != 1:
        assert codec.broadcast_object(rank, src=2, group=group) == 2
        assert codec.all_gather_object(rank, group=group) == [0, 2]
        assert codec.gather_object(rank, dst=2, group=group) == ([0, 2] if rank == 2 else None)


def _unsupported_on_one_rank(rank: int) -> None:
    bad = [object()] if rank == 1 else [rank]
    with pytest.raises(TypeError, match=r"rank 1: cannot send .* object at \[0\]"):
        codec.all_gather_object(bad)
    with pytest.raises(TypeError, match="rank 1: cannot send"):
        codec.broadcast_object(bad, src=1)
    if rank == 2:
        assert codec.gather_object(bad, dst=0) is None
    else:
        with pytest.raises(TypeError, match="rank 1: cannot send"):
            codec.gather_object(bad, dst=0)


def test_collectives_exchange_objects_of_different_sizes() -> None:
    run_ranks(_collectives, 3)


def test_an_unsupported_object_on_one_rank_raises_instead_of_hanging() -> None:
    run_ranks(_unsupported_on_one_rank, 3)
