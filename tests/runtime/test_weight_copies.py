"""Forwards of one version of the weights share one low-precision copy, and compute what they would with their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_asyncpipe._private import preserve_versions
from lightning_asyncpipe.runtime import weight_copies
from lightning_asyncpipe.runtime.weight_copies import MATRIX_FUNCTIONS, WeightCopies

WIDTH = 8


@pytest.fixture(autouse=True)
def _share_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_copies, "SMALLEST", 1)


def autocast(dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype, cache_enabled=False)


def saved_by(forward: Callable[[], Any], shape: tuple[int, ...]) -> list[int]:
    """The addresses of 16-bit tensors of a shape, or its transpose, that a forward keeps for its backward."""
    found = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.bfloat16 and tuple(tensor.shape) in (shape, shape[::-1]):
            found.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return found


# What is shared


class Stage:
    """One linear layer as a stage, run as the stages of a pipeline are."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, 5) if layer is None else layer
        self.copies = WeightCopies([list(self.layer.parameters())], "cpu")
        self.x = torch.randn(3, WIDTH)
        self.alive: list[Any] = []
        self.forward()  # the first forward finds out what is cast
        self.alive.clear()

    def forward(self, weights: Any = None) -> Tensor:
        with autocast(), self.copies.shared(0, weights):
            weight = self.layer.weight if weights is None else weights[self.layer.weight]
            out = F.linear(self.x.clone().requires_grad_(), weight, self.layer.bias)
        self.alive.append(out)
        return out

    def kept(self, weights: Any = None) -> int:
        """Where the copy of the weight is that a forward keeps."""
        (address,) = saved_by(lambda: self.forward(weights), (5, WIDTH))
        return address


def test_forwards_of_a_version_keep_one_copy() -> None:
    stage = Stage()
    assert len({stage.kept() for _ in range(4)}) == 1


def test_an_update_begins_a_new_copy_and_leaves_backwards_theirs() -> None:
    stage = Stage()
    before = stage.kept()
    weight = stage.layer.weight.detach().clone()
    with torch.no_grad(), preserve_versions([stage.layer.weight]):
        stage.layer.weight.add_(1.0)
    stage.copies.forget(0)
    assert stage.kept() != before
    assert torch.equal(
        stage.alive[1], F.linear(stage.x.bfloat16(), (weight + 1).bfloat16(), stage.layer.bias.bfloat16())
    )
    (found,) = torch.autograd.grad(stage.alive[0].float().sum(), [inputs_of(stage.alive[0])])
    assert torch.equal(found, weight.bfloat16().float().sum(0).bfloat16().float().expand_as(stage.x))


def inputs_of(out: Tensor) -> Tensor:
    """The leaf that is no parameter in the graph of a linear layer's result."""
    pending = [out.grad_fn]
    while pending:
        node = pending.pop()
        variable = getattr(node, "variable", None)
        if variable is not None and not isinstance(variable, Parameter):
            return variable
        pending += [next_node for next_node, _ in node.next_functions if next_node is not None]
    raise AssertionError("no input")


def in_place(weight: Parameter) -> None:
    with torch.no_grad():
        weight.mul_(2.0)


def other_memory(weight: Parameter) -> None:
    weight.data = weight.data * 2.0


@pytest.mark.parametrize("write", [in_place, other_memory])
def test_weights_that_the_step_itself_writes_to_are_copied_anew(write: Callable[[Parameter], None]) -> None:
    stage = Stage()
    before = stage.forward()
    with torch.no_grad():
        stage.layer.bias.zero_()
        write(stage.layer.weight)
    expected = F.linear(stage.x.bfloat16(), stage.layer.weight.bfloat16(), stage.layer.bias.bfloat16())
    assert torch.equal(stage.forward(), expected)
    assert not torch.equal(before, expected)


def test_what_leaves_no_trace_is_seen_once_the_segment_is_over() -> None:
    stage = Stage()
    stage.forward()
    stage.layer.weight.data.mul_(2.0)
    stage.copies.clear()
    expected = F.linear(stage.x.bfloat16(), stage.layer.weight.bfloat16(), stage.layer.bias.bfloat16())
    assert torch.equal(stage.forward(), expected)


def test_stand_ins_have_copies_of_their_own() -> None:
    stage = Stage()
    live = stage.kept()
    stand_ins = {p: p.detach().clone().mul_(3.0).requires_grad_() for p in stage.layer.parameters()}
    assert stage.kept(stand_ins) == stage.kept(stand_ins) != live
    assert stage.kept() == live
    stage.alive[-2].float().sum().backward()
    assert stage.layer.weight.grad is None
    assert stand_ins[stage.layer.weight].grad is not None


def test_small_parameters_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_copies, "SMALLEST", 5 * WIDTH + 1)
    stage = Stage()
    assert len({stage.kept() for _ in range(3)}) == 3


def test_nothing_is_shared_where_autocast_is_off_or_sharing_is_paused() -> None:
    stage = Stage()
    with stage.copies.shared(0):
        assert stage.layer(stage.x).dtype == torch.float32
        with autocast():
            with torch.autocast("cpu", enabled=False):
                assert stage.layer(stage.x).dtype == torch.float32
            with stage.copies.paused():
                assert stage.copies.replace(stage.layer.weight) is stage.layer.weight
            assert stage.copies.replace(stage.layer.weight).dtype == torch.bfloat16
            with autocast(torch.float16):
                assert stage.layer(stage.x).dtype == torch.float16
    assert stage.copies.replace(stage.layer.weight) is stage.layer.weight


def test_without_gradients_the_copy_has_none_and_later_forwards_do() -> None:
    stage = Stage()
    with autocast(), stage.copies.shared(0):
        with torch.no_grad():
            assert not stage.layer(stage.x).requires_grad
        stage.layer(stage.x).float().sum().backward()
    assert stage.layer.weight.grad is not None


def test_uses_of_one_weight_add_up_in_float32() -> None:
    """In bfloat16 256 + 1 is 256."""
    weight = Parameter(torch.ones(1, 1))
    copies = WeightCopies([[weight]], "cpu")
    for _ in range(2):
        weight.grad = None
        with autocast(), copies.shared(0):
            total = F.linear(torch.full((1, 1), 256.0), weight) + sum(
                F.linear(torch.ones(1, 1), weight) for _ in range(3)
            )
        total.float().sum().backward()
    assert weight.grad.item() == 259.0


# The functions

CALLS: dict[Callable[..., Any], tuple[tuple[int, ...], ...]] = {}
for _dimensions, _names in (
    (1, ("conv1d", "conv_transpose1d")),
    (2, ("conv2d", "conv_transpose2d")),
    (3, ("conv3d", "conv_transpose3d")),
):
    for _name in _names:
        for _owner in (F, torch):
            CALLS[getattr(_owner, _name)] = ((2, 3, *(6,) * _dimensions), (3, 3, *(2,) * _dimensions))
for _owner in (torch, Tensor):
    CALLS[_owner.matmul] = CALLS[_owner.mm] = ((3, 4), (4, 5))
    CALLS[_owner.bmm] = ((2, 3, 4), (2, 4, 5))
    CALLS[_owner.addmm] = ((3, 5), (3, 4), (4, 5))
    CALLS[_owner.addbmm] = ((3, 5), (2, 3, 4), (2, 4, 5))
    CALLS[_owner.baddbmm] = ((2, 3, 5), (2, 3, 4), (2, 4, 5))
CALLS[F.linear] = ((3, 4), (5, 4), (5,))
CALLS[Tensor.__matmul__] = CALLS[Tensor.__rmatmul__] = ((4, 4), (4, 4))


def test_every_function_is_tried() -> None:
    assert set(CALLS) == MATRIX_FUNCTIONS


@pytest.mark.parametrize("function", CALLS, ids=lambda function: getattr(function, "__qualname__", function.__name__))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_functions_cast_all_their_arguments_under_autocast(function: Any, dtype: torch.dtype) -> None:
    """So that it does not matter whether an argument has been cast before."""
    torch.manual_seed(0)
    arguments = [Parameter(torch.randn(shape)) for shape in CALLS[function]]
    copies = WeightCopies([arguments], "cpu")
    with autocast(dtype):
        expected = function(*arguments)
        assert expected.dtype == dtype
        gradients = torch.autograd.grad(expected.float().square().sum(), arguments)
        for _ in range(2):
            with copies.shared(0):
                found = function(*arguments)
    assert len(copies._shared) == len(arguments)
    assert torch.equal(found, expected)
    for one, other in zip(torch.autograd.grad(found.float().square().sum(), arguments), gradients, strict=True):
        assert torch.equal(one, other)


# Models


class Tied(nn.Module):
    """An embedding that is also the head, and has a say in the result in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.embedding.weight
        y = self.embedding(x.argmax(-1)) + self.layer(x)
        return F.linear(y, weight) + y @ weight.T + x @ weight + weight.norm()


class Repeated(nn.Module):
    """One layer again and again, once of it frozen, once checkpointed, once without autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.layer(x))
        x = checkpoint(self.layer, x, use_reentrant=False)
        x = checkpoint(self.layer, x.requires_grad_(), use_reentrant=True)
        with torch.autocast("cpu", enabled=False):
            x = self.layer(x.float())
        with torch.no_grad():
            target = self.layer(x)
        return self.layer(x) + target


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = x[None]
        return self.attention(x, x, x)[0] + self.attention(x, x + 1, x + 2)[0]


class Transformed(nn.Module):
    """Function transforms over a layer, and a gradient of a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.func.grad(lambda y: self.layer(y).float().square().sum())(x)
        x = x.clone().requires_grad_()
        penalty = torch.autograd.grad(self.layer(x).float().square().sum(), x, create_graph=True)[0]
        return torch.func.vmap(self.layer)(x) + inner + penalty


def models() -> Iterator[Any]:
    yield pytest.param(Tied, id="tied")
    yield pytest.param(Repeated, id="repeated")
    yield pytest.param(Attention, id="attention")
    yield pytest.param(lambda: Attention(kdim=WIDTH, vdim=WIDTH, bias=False), id="attention without bias")
    yield pytest.param(lambda: Attention(add_bias_kv=True, add_zero_attn=True), id="attention with bias_kv")
    yield pytest.param(lambda: nn.LSTM(WIDTH, WIDTH, 2), id="LSTM")
    yield pytest.param(lambda: nn.GRUCell(WIDTH, WIDTH), id="GRUCell")
    yield pytest.param(lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH), id="bilinear")
    yield pytest.param(lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0), id="transformer layer")
    yield pytest.param(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), id="weight_norm")
    yield pytest.param(Transformed, id="function transforms")


@pytest.mark.parametrize("build", models())
def test_results_and_gradients_are_those_without_sharing(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = build()
    copies = WeightCopies([list(module.parameters())], "cpu")
    inputs = [torch.randn(4, WIDTH) for _ in range(3)]

    def results(sharing: bool) -> list[Tensor]:
        module.zero_grad()
        outs = []
        for x in inputs:
            with autocast(), copies.shared(0) if sharing else nullcontext():
                out = module(x, x) if isinstance(module, nn.Bilinear) else module(x)
                outs.append(out[0] if isinstance(out, tuple) else out)
        for out in outs:
            out.float().square().sum().backward()
        return [*outs, *(p.grad for p in module.parameters() if p.grad is not None)]

    expected = results(False)
    for one, other in zip(results(True), expected, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(results(True), expected, strict=True):
        assert torch.equal(one, other)
