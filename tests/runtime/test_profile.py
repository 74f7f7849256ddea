"""Units are measured one by one, alike ones once, and nothing is disturbed."""

from __future__ import annotations

import copy
import gc
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_asyncpipe.plan.profile import ModelProfile
from lightning_asyncpipe.runtime.hollow import hollow, is_hollow
from lightning_asyncpipe.runtime.profile import profile_model
from lightning_asyncpipe.runtime.program import StageProgram
from lightning_asyncpipe.runtime.stages import StageTask
from lightning_asyncpipe.runtime.weight_copies import WeightCopies
from tests.runtime.stage_models import Gpt, candidates, text

WIDTH, SAMPLES = 8, 4


class Counted(nn.Module):
    """Counts its calls."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        return self.layer(x)


class Chain(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def training_step(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0].clone(), None, None


class Sleeper(nn.Module):
    """Sleeps `seconds` in its forward and in its input's gradient, and twice that in its weight's."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Sleep.apply(x, self.seconds, self.seconds)  # type: ignore[no-untyped-call]
        weight: Tensor = _Sleep.apply(self.weight, 0.0, 2 * self.seconds)  # type: ignore[no-untyped-call]
        return y + weight


def profiled(model: nn.Module, *arguments: Any, **options: Any) -> ModelProfile:
    found = candidates(model, *arguments)
    return profile_model(found, model, model.training_step, StageTask(arguments), **options)


def vectors() -> Tensor:
    return torch.randn(SAMPLES, WIDTH)


def test_times_of_halves_are_told_apart_and_layers_that_only_differ_in_a_setting_too() -> None:
    model = Chain(nn.Linear(WIDTH, WIDTH), Sleeper(0.02), Sleeper(0.06), Sleeper(0.02))
    units = [unit for unit in profiled(model, vectors(), seconds=0.0).units if unit.forward >= 0.02]
    assert len(units) == 3
    short, long, again = units
    assert long.forward > 1.5 * short.forward
    assert (again.forward, again.weight_grad) == (short.forward, short.weight_grad)
    for unit in units:
        assert unit.input_grad >= unit.forward / 2
        assert unit.weight_grad > 1.2 * unit.input_grad


@pytest.mark.parametrize("frozen", [0, 2])
def test_a_stage_passes_a_gradient_on_where_the_profile_says_so(frozen: int) -> None:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(5)]
    for layer in layers[:frozen]:
        layer.requires_grad_(False)
    model = Chain(*layers)
    profile = profiled(model, vectors(), seconds=0.0)
    for cut, boundary in enumerate(profile.boundaries):
        trained_before = {index for unit in profile.units[: cut + 1] for index in unit.parameters}
        assert boundary.gradient == any(profile.weights[index].gradient for index in trained_before)


def test_alike_blocks_are_measured_once() -> None:
    layers = [Counted(nn.Linear(WIDTH, WIDTH)) for _ in range(48)]
    model = Chain(*layers)
    found = candidates(model, vectors())
    for layer in layers:
        layer.calls.clear()
    x = vectors()
    profile = profile_model(found, model, model.training_step, StageTask((x,)), seconds=0.0)
    assert len(profile.units) == 49 or len(profile.units) == 48
    # The first layer needs no gradient of its input, and behind the last one is the loss.
    assert sum(bool(layer.calls) for layer in layers) <= 4
    middle = profile.units[10:40]
    assert {(unit.forward, unit.input_grad, unit.weight_grad, unit.saved) for unit in middle} == {
        (middle[0].forward, middle[0].input_grad, middle[0].weight_grad, middle[0].saved)
    }
    assert [unit.parameters for unit in middle] == [(2 * i, 2 * i + 1) for i in range(10, 40)]


def test_bytes_are_those_that_autograd_keeps() -> None:
    model = Chain(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    profile = profiled(model, vectors(), seconds=0.0)
    message = SAMPLES * WIDTH * 4
    assert {boundary.nbytes for boundary in profile.boundaries} == {message}
    assert {boundary.dtype for boundary in profile.boundaries} == {"float32"}
    # What a Linear and a GELU keep is what comes in; a ReLU keeps what goes out.
    assert [boundary.kept for boundary in profile.boundaries] == [True, True, False, True, True]
    assert [unit.saved for unit in profile.units[:4]] == [0, 0, 0, 0]
    stage = profile.stage(0, 4)
    assert stage.activations == 3 * message  # both inputs of its inner layers, and what it sends
    assert [w.nbytes for w in profile.weights[:2]] == [4 * WIDTH * WIDTH, 4 * WIDTH]


def test_messages_have_the_type_that_precision_gives_them() -> None:
    model = Chain(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    x = vectors()

    def mixed() -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    found = candidates(model, x, context=mixed)
    profile = profile_model(found, model, model.training_step, StageTask((x,)), mixed, seconds=0.0)
    assert {(b.dtype, b.nbytes) for b in profile.boundaries} == {("bfloat16", 2 * SAMPLES * WIDTH)}


def test_nothing_is_disturbed() -> None:
    model = Gpt(3, dropout=0.3)
    model.blocks[1].register_buffer("count", torch.zeros(()))
    norm = nn.BatchNorm1d(12)
    model.blocks[1].mlp.append(norm)
    fired: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_hook(fired.append)
        parameter.grad = torch.ones_like(parameter)
    batch = text()
    found = candidates(model, batch, 0)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    profile_model(found, model, model.training_step, StageTask((batch, 0)), seconds=0.0)
    assert torch.equal(torch.get_rng_state(), random)
    assert not fired
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes


def test_parameters_without_memory_are_given_some_while_they_are_measured() -> None:
    model = Gpt(3)
    batch = text()
    found = candidates(model, batch, 0)
    whole = profile_model(found, model, model.training_step, StageTask((batch, 0)), seconds=0.0)
    for parameter in model.parameters():
        hollow(parameter)
    empty = profile_model(found, model, model.training_step, StageTask((batch, 0)), seconds=0.0)
    assert all(is_hollow(parameter) for parameter in model.parameters())
    assert [u.saved for u in empty.units] == [u.saved for u in whole.units]
    assert empty.boundaries == whole.boundaries
    assert empty.weights == whole.weights


def test_nothing_stays_in_memory() -> None:
    model = Gpt(3)
    batch = text()
    found = candidates(model, batch, 0)

    def in_memory() -> int:
        gc.collect()
        return sum(type(found) in (Tensor, nn.Parameter) for found in gc.get_objects())

    before = in_memory()
    profile_model(found, model, model.training_step, StageTask((batch, 0)), seconds=0.0)
    assert in_memory() == before


def test_counted_profiles_are_the_same_every_time() -> None:
    model = Gpt(3)
    batch = text()
    one, other = (profiled(model, batch, 0, timed=False) for _ in range(2))
    assert one == other
    assert all(unit.forward > 0 for unit in one.units[1:-1])


def test_an_error_of_the_step_comes_out() -> None:
    class Fails(Chain):
        runs = 0

        def training_step(self, x: Tensor) -> Tensor:
            self.runs += 1
            if self.runs > 4:
                raise KeyError("mine")
            return super().training_step(x)

    with pytest.raises(KeyError, match="mine"):
        profiled(Fails(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), vectors(), seconds=0.0)


def test_low_precision_copies_count_with_the_weights_not_with_each_micro_batch() -> None:
    """A micro-batch keeps a cast of its own of small parameters only; those of large ones are shared."""
    wide = 256
    model = Chain(*(nn.Linear(wide, wide, bias=False) for _ in range(3)))
    context = partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False)
    found = candidates(model, torch.randn(SAMPLES, wide))

    def copies(program: StageProgram) -> WeightCopies:
        parameters = dict(model.named_parameters())
        return WeightCopies([[parameters[name] for name in names] for names in program.parameters], "cpu")

    def measured(**options: Any) -> ModelProfile:
        task = StageTask((torch.randn(SAMPLES, wide),))
        return profile_model(found, model, model.training_step, task, context, seconds=0.0, **options)

    own, shared = measured(), measured(copies=copies)
    nbytes = 2 * wide * wide
    assert [weights.copy for weights in own.weights] == [0, 0, 0]
    assert [weights.copy for weights in shared.weights] == [nbytes] * 3
    saved = [one.saved - other.saved for one, other in zip(own.units, shared.units, strict=True) if one.parameters]
    assert saved == [0, nbytes, nbytes]  # the first layer's input needs no gradient, and so no weight
    assert ModelProfile.from_dict(shared.to_dict()) == shared
