"""A backward in two halves gives the gradients of a whole one, the second half whenever it is run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_asyncpipe.runtime.divisible import divisible_stages
from lightning_asyncpipe.runtime.halves import input_gradient
from lightning_asyncpipe.runtime.program import StageProgram
from lightning_asyncpipe.runtime.proof import loss_of
from lightning_asyncpipe.runtime.stages import StageRunner, StageTask
from tests.runtime.stage_models import (
    WIDTH,
    Chain,
    Cnn,
    Gpt,
    Outcome,
    Vit,
    assert_equal,
    forwards,
    images,
    ordinary,
    program_for,
    take_gradients,
    text,
    vectors,
)


class Counted(torch.autograd.Function):
    """Identity; ``backwards`` counts how often its gradient is computed."""

    backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        Counted.backwards += 1
        return gradients[0]


class CountedWeights(Chain):
    """What leads to some weights is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(WIDTH) for _ in self.layers])

    def run(self, x: Tensor) -> Tensor:
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = layer(x) * Counted.apply(scale)
        return x


class CountedInputs(Chain):
    """What leads to the input is counted."""

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(Counted.apply(x))
        return x


class Penalised(Chain):
    """All weights of the last stage enter its loss a second time."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        penalty = self.head.weight.square().sum() + self.layers[-1].weight.abs().sum()
        return super().training_step(batch, batch_idx) + 0.1 * penalty


class Normed(Chain):
    """Weights that are computed from others."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            nn.utils.parametrizations.weight_norm(layer)


class Branched(Chain):
    """Several layers read one tensor, and one tensor is split among several."""

    def run(self, x: Tensor) -> Tensor:
        for one, other in itertools.pairwise(self.layers):
            left, right = (one(x) + other(x)).chunk(2, dim=-1)
            x = torch.cat([right.tanh(), left * right], dim=-1)
        return x


class Scaled(Chain):
    """A hook changes the gradient of what the second layer gives."""

    def run(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1:
                x.register_hook(lambda gradient: gradient * 0.5)
        return x


def in_halves(
    model: nn.Module,
    program: StageProgram,
    *arguments: Any,
    context: Callable[[], Any] = nullcontext,
    order: Callable[[list[int]], list[int]] = list,
) -> Outcome:
    """Run the step stage by stage, all first halves before the second ones, these in any `order` of stages."""
    runner = StageRunner(model, program, model.training_step, context)
    runner.in_halves = frozenset(range(program.num_stages))
    try:
        made = forwards(runner, StageTask(arguments, key=(0, 0, 0)))
        made[-1].root = loss_of(made[-1].value)
        gradient = None
        for forward in reversed(made):
            gradient = runner.input_gradient(forward, gradient)
            gradient = None if gradient is None else gradient.clone()
        for stage in order(list(range(len(made)))):
            runner.weight_gradients(made[stage])
        return Outcome(made[-1].value, take_gradients(model))
    finally:
        runner.close()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "GPT, weights tied in a matrix product": (Gpt, text),
    "GPT, weights tied in a layer": (lambda: Gpt(tied="linear"), text),
    "GPT, norms after": (lambda: Gpt(post=True), text),
    "vision transformer": (Vit, images),
    "layers that branch": (Branched, vectors),
    "weight norm": (Normed, vectors),
    "a penalty on weights": (Penalised, vectors),
}


@pytest.mark.parametrize("order", [list, lambda stages: stages[::-1]], ids=["in order", "in reverse"])
@pytest.mark.parametrize("name", MODELS)
def test_halves_give_the_gradients_of_an_ordinary_backward(name, order):
    torch.manual_seed(0)
    make, data = MODELS[name]
    model, batch = make(), data()
    program = program_for(model, 3, batch, 0)
    assert_equal(in_halves(model, program, batch, 0, order=order), ordinary(model, batch, 0), program)


def test_halves_work_under_autocast():
    torch.manual_seed(0)
    model, batch = Gpt(), text()

    def context():
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)

    program = program_for(model, 3, batch, 0, context=context)
    expected = ordinary(model, batch, 0, context=context)
    assert_equal(in_halves(model, program, batch, 0, context=context), expected, program)


def test_a_batch_norm_is_divided_too():
    torch.manual_seed(0)
    model, batch = Cnn(), images()
    program = program_for(model, 2, batch, 0)
    assert_equal(in_halves(model, program, batch, 0), ordinary(model, batch, 0), program)


def counts(model: nn.Module, batch: Tensor) -> tuple[int, int]:
    """How often ``Counted`` runs in the first half of the stage after the first cut, and in its second."""
    program = program_for(model, 2, batch, 0)
    runner = StageRunner(model, program, model.training_step)
    runner.in_halves = frozenset({1})
    try:
        made = forwards(runner, StageTask((batch, 0), key=(0, 0, 0)))
        made[1].root = loss_of(made[1].value)
        Counted.backwards = 0
        runner.input_gradient(made[1])
        first, Counted.backwards = Counted.backwards, 0
        runner.weight_gradients(made[1])
        return first, Counted.backwards
    finally:
        runner.close()


def test_the_first_half_leaves_the_weights_to_the_second():
    first, second = counts(CountedWeights(), vectors())
    assert first == 0
    assert second > 0


def test_the_second_half_does_not_walk_towards_the_input_again():
    first, second = counts(CountedInputs(), vectors())
    assert first > 0
    assert second == 0


def test_a_parameter_that_is_used_twice_gets_its_gradient_at_once():
    torch.manual_seed(0)
    layer, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    leaf = vectors().requires_grad_()
    second = input_gradient(layer(other(layer(leaf)).tanh()).sum(), None, leaf)
    assert layer.weight.grad is not None
    assert other.weight.grad is None
    second.run()
    assert other.weight.grad is not None


def test_an_input_that_does_not_matter_gets_no_gradient_and_the_weights_theirs():
    layer = nn.Linear(WIDTH, WIDTH)
    leaf = vectors().requires_grad_()
    input_gradient(layer(leaf.detach()).sum(), None, leaf).run()
    assert leaf.grad is None
    assert layer.weight.grad is not None


# Which stages can be divided


def divisible(model: nn.Module, batch: Any, stages: int = 3) -> set[int]:
    program = program_for(model, stages, batch, 0)
    return set(divisible_stages(model, program, model.training_step, StageTask((batch, 0)), nullcontext, loss_of))


@pytest.mark.parametrize("name", MODELS)
def test_ordinary_stages_are_divisible(name):
    torch.manual_seed(0)
    make, data = MODELS[name]
    assert divisible(make(), data()) == {0, 1, 2}


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_checkpointed_stages_are_not(how):
    torch.manual_seed(0)
    model, batch = Gpt(checkpointing=how), text()
    program = program_for(model, 3, batch, 0)
    task = StageTask((batch, 0))
    found = divisible_stages(model, program, model.training_step, task, nullcontext, loss_of)
    checkpointed = {i for i, names in enumerate(program.parameters) if any("blocks" in name for name in names)}
    assert checkpointed
    assert not found & checkpointed


class CheckpointedFunctions(Chain):
    """Checkpointing around a function, after the first layer."""

    def run(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            x = checkpoint(lambda x: x.tanh() * 2, x, use_reentrant=False) if index == 0 else x.tanh()
        return x


def test_a_stage_with_a_checkpointed_function_is_not():
    torch.manual_seed(0)
    model, batch = CheckpointedFunctions(), vectors()
    program = program_for(model, 3, batch, 0, cuts=["layers.1", "layers.2"])
    task = StageTask((batch, 0))
    assert len(divisible_stages(model, program, model.training_step, task, nullcontext, loss_of)) == 2


def test_a_stage_with_a_hook_that_would_fire_twice_is_not():
    torch.manual_seed(0)
    model, batch = Scaled(), vectors()
    program = program_for(model, 2, batch, 0, cuts=["layers.1"])
    task = StageTask((batch, 0))
    assert divisible_stages(model, program, model.training_step, task, nullcontext, loss_of) == {0}


def test_a_compiled_stage_is_not():
    torch.manual_seed(0)
    model, batch = Chain(), vectors()
    program = program_for(model, 2, batch, 0, cuts=["layers.2"])
    model.layers[2].forward = torch.compile(model.layers[2].forward, backend="aot_eager")
    task = StageTask((batch, 0))
    assert divisible_stages(model, program, model.training_step, task, nullcontext, loss_of) == {0}


def test_trying_leaves_no_trace():
    torch.manual_seed(0)
    model, batch = Cnn(), images()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert divisible(model, batch, stages=2) == {0, 1}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(bool((parameter.grad == 1).all()) for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
