"""A skipped call returns zeros of the structure that it would have returned."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_asyncpipe.runtime.hollow import hollow
from lightning_asyncpipe.runtime.shapes import SkippedCalls
from lightning_asyncpipe.runtime.structure import leaf_at, leaves, map_leaves, replace_leaf
from lightning_asyncpipe.runtime.trace import CallKey

Pair = namedtuple("Pair", "left right")
KEY = CallKey("module", 0)


@dataclasses.dataclass
class Output:
    hidden: Tensor
    states: tuple[Tensor, ...]
    note: str = "note"


class Module(nn.Module):
    """Calls `function` with itself and the arguments."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def skip(skipped: SkippedCalls, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return skipped.result(KEY, module, module, args, kwargs)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x @ m.weight,
        lambda m, x: (x @ m.weight).t(),
        lambda m, x: (x @ m.weight).mean(0, keepdim=True).expand(3, 4),
        lambda m, x: [x @ m.weight, (x.argmax(1), None, 3, "s")],
        lambda m, x: {"a": Pair(x @ m.weight, x.double() * 2), "b": torch.Size([2])},
        lambda m, x: OrderedDict(a=x @ m.weight),
        lambda m, x: Output(x @ m.weight, (x + 1, x.sum())),
        lambda m, x: torch.max(x @ m.weight, 1),
    ],
)
def test_the_structure_is_that_of_the_result(function: Any) -> None:
    module, x = Module(function), torch.randn(3, 4)
    expected = module(x)
    for _ in range(2):
        result = skip(SkippedCalls(), module, x)
        assert type(result) is type(expected)
        for a, b in zip(leaves(result), leaves(expected), strict=True):
            if isinstance(b, Tensor):
                assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
                assert not a.requires_grad
                assert not a.any()
            else:
                assert a == b


def test_outputs_of_transformers_keep_their_type() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def function(m: Module, x: Tensor) -> Any:
        return outputs.BaseModelOutput(last_hidden_state=x @ m.weight, hidden_states=(x,))

    module, x = Module(function), torch.randn(3, 4)
    result = skip(SkippedCalls(), module, x)
    assert type(result) is outputs.BaseModelOutput
    assert result.last_hidden_state is result["last_hidden_state"] is result[0]
    assert result.hidden_states[0] is x


def test_an_argument_that_is_returned_is_itself() -> None:
    cache = object()
    module = Module(lambda m, x, mask, cache: (x @ m.weight, mask, cache))
    x, mask = torch.randn(3, 4), torch.randn(3)
    _, returned, same = skip(SkippedCalls(), module, x, mask=mask, cache=cache)
    assert returned is mask
    assert type(same) is object


def test_results_are_remembered_by_shapes_types_and_plain_values() -> None:
    module = Module(lambda m, x, n=1: x.repeat(n, 1) @ m.weight)
    skipped = SkippedCalls()
    for x, n in ((torch.ones(3, 4), 1), (torch.zeros(3, 4), 1), (torch.ones(5, 4), 1), (torch.ones(3, 4), 2)):
        assert skip(skipped, module, x, n=n).shape == (len(x) * n, 4)
    assert skipped.inferred == 3


def test_every_result_is_fresh() -> None:
    module, x, skipped = Module(lambda m, x: x @ m.weight), torch.ones(3, 4), SkippedCalls()
    first = skip(skipped, module, x)
    first += 1
    assert not skip(skipped, module, x).any()


def test_code_that_looks_at_values_runs_for_real() -> None:
    def function(m: Module, x: Tensor) -> Tensor:
        m.calls += 1
        x += 1
        return x[x.sum(1) > 0] @ m.weight

    module, x = Module(function), torch.ones(3, 4)
    module.register_buffer("calls", torch.zeros(()))
    hollow(module.weight)
    assert skip(SkippedCalls(), module, x).shape == (3, 4)
    assert torch.equal(x, torch.ones(3, 4))
    assert float(module.calls) == 0


def test_a_trial_run_leaves_nothing_in_the_module() -> None:
    def function(m: Module, x: Tensor, cache: list[Tensor]) -> Tensor:
        m.last, m.table = x, x.cumsum(0)
        m.seen.append(x)
        cache.append(x)
        return x @ m.weight

    module, x, cache = Module(function), torch.ones(3, 4), Cache()
    module.seen, module.last = [], None
    module.register_buffer("table", torch.zeros(1))
    table = module.table
    skip(SkippedCalls(), module, x, cache)
    assert (module.seen, module.last, cache.items) == ([], None, [])
    assert module.table is table


class Cache:
    """An object that modules change, like a cache of keys and values."""

    def __init__(self) -> None:
        self.items: list[Tensor] = []

    def append(self, item: Tensor) -> None:
        self.items.append(item)


def test_a_module_that_fails_for_real_says_so() -> None:
    module = Module(lambda m, x: x @ torch.ones(7, 7))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        skip(SkippedCalls(), module, torch.ones(3, 4))


def test_leaves_can_be_replaced_by_position() -> None:
    x, y = torch.zeros(1), torch.ones(1)
    value = {"a": (x, [1, Pair(2, x)]), "b": Output(x, (x, x))}
    assert [type(leaf).__name__ for leaf in leaves(value)] == ["Tensor", "int", "int"] + ["Tensor"] * 4 + ["str"]
    changed = replace_leaf(value, 3, y)
    assert changed["a"][1][1].right is y
    assert value["a"][1][1].right is x
    assert changed["b"].states == (x, x)
    assert leaf_at(changed, 3) is y
    with pytest.raises(IndexError, match="no leaf 8"):
        leaf_at(value, 8)
    assert map_leaves(lambda leaf: leaf, value)["a"][1][1] == Pair(2, x)
