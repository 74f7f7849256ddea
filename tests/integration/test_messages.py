"""What the user's steps return arrives on other ranks as it was; nothing else can be sent, and nothing is unpickled."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from lightning_asyncpipe.errors import PipelineError
from lightning_asyncpipe.integration.messages import pack, unpack
from lightning_asyncpipe.runtime.codec import decode, encode

Pair = namedtuple("Pair", ["a", "b"])
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Frozen:
    x: Any
    name: str = "n"


class Mapped(OrderedDict[str, Any]):
    pass


VALUES = [
    None,
    True,
    3,
    2.5,
    "text",
    b"bytes",
    torch.float16,
    torch.arange(6.0).reshape(2, 3).t(),
    torch.zeros(0, 3),
    torch.nn.Parameter(torch.ones(2)),
    np.arange(3),
    np.float32(1.5),
    [1, [2, (3, {"a": torch.ones(1)})]],
    {"k": None, 7: "seven"},
    Pair(1, [torch.ones(2)]),
    Frozen(torch.ones(2)),
    Mapped(a=1, b=[torch.zeros(1)]),
]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, np.ndarray):
        return bool((one == other).all())
    if isinstance(one, dict):
        return type(one) is type(other) and list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Frozen):
        return isinstance(other, Frozen) and same(one.x, other.x) and one.name == other.name
    return bool(one == other) and type(one) is type(other)


@pytest.mark.parametrize("value", VALUES, ids=[type(value).__name__ for value in VALUES])
def test_values_arrive_as_they_were(value: Any) -> None:
    assert same(value, unpack(decode(encode(pack(value, "it"))), CPU))


def test_what_cannot_be_sent_is_named_with_its_place() -> None:
    with pytest.raises(
        PipelineError, match=r"^what `predict_step` returns holds at `\['a'\]\[1\]` an object of type .*set"
    ):
        pack({"a": [1, {2}]}, "what `predict_step` returns")


@pytest.mark.parametrize(
    "name", ["no_such_module:Pair", f"{__name__}:nothing", "os:system", "subprocess:Popen", "builtins:exec"]
)
def test_a_message_that_names_anything_but_a_known_class_of_its_kind_is_refused(name: str) -> None:
    tag = pack(Pair(1, 2), "it")[0]
    with pytest.raises(PipelineError, match=r"cannot find|not of the kind"):
        unpack([tag, name, [[7, "touch"]]], CPU)
