"""What an analysis of tensors cannot see is found by running the stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_asyncpipe.errors import CutError
from lightning_asyncpipe.runtime.cuts import choose_cuts
from lightning_asyncpipe.runtime.program import build_program
from lightning_asyncpipe.runtime.proof import confirm, prove, proven_program
from lightning_asyncpipe.runtime.randomness import Watch
from lightning_asyncpipe.runtime.stages import StageTask
from tests.runtime.stage_models import (
    Chain,
    Cnn,
    Gpt,
    assert_equal,
    candidates,
    images,
    ordinary,
    program_for,
    staged,
    text,
    vectors,
)


class ThroughNumpy(Chain):
    def run(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        scale = float(abs(x.detach().numpy()).mean())
        return self.layers[2](self.layers[1](x)) * scale


class ThroughItem(Chain):
    def run(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        scale = x.detach().abs().max().item()
        return self.layers[2](self.layers[1](x)) * scale


class ThroughAnAlias(Chain):
    """The result of the module that works in place is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            self.act(x)
        return x


class ThroughABackward(Chain):
    """A number that an earlier layer decides is only read by a backward."""

    class Double(torch.autograd.Function):
        factor = 0.0

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @classmethod
        def backward(cls, ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * ThroughABackward.Double.factor

    def run(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        self.Double.factor = 2.0 + x.detach().abs().max().item()
        return self.Double.apply(self.layers[2](self.layers[1](x)))


HIDDEN = [ThroughNumpy, ThroughItem, ThroughAnAlias]


@pytest.mark.parametrize("kind", HIDDEN)
def test_what_crosses_unseen_is_found_and_left_out(kind: type[Chain]) -> None:
    model, batch = kind(), vectors()
    task = StageTask((batch, 0))
    found = candidates(model, batch, 0)
    everything = build_program(found, found.cuts)
    with pytest.raises(CutError, match="does not compute what it does in an ordinary run"):
        prove(model, everything, model.training_step, task)
    with pytest.raises(CutError, match="is not the same as in an ordinary run"):
        prove(model, everything, model.training_step, task, loss=None)
    good = confirm(found, model, model.training_step, task)
    assert 1 <= len(good.cuts) <= len(found.cuts)
    expected = ordinary(model, batch, 0)
    for stages in range(1, len(good.cuts) + 2):
        program = build_program(good, choose_cuts(good, stages))
        prove(model, program, model.training_step, task)
        assert_equal(staged(model, program, batch, 0), expected)


def test_a_proven_program_avoids_cuts_that_do_not_work() -> None:
    model, batch = ThroughItem(), vectors()
    task = StageTask((batch, 0))
    found = candidates(model, batch, 0)
    program = proven_program(found, 3, model, model.training_step, task)
    assert_equal(staged(model, program, batch, 0), ordinary(model, batch, 0))
    with pytest.raises(CutError, match="does not compute"):
        proven_program(found, 2, model, model.training_step, task, names=["layers.2"])
    with pytest.raises(CutError, match="a run in stages gave other results there"):
        proven_program(found, len(found.cuts) + 1, model, model.training_step, task)


def test_another_way_is_tried_before_a_cut_is_given_up() -> None:
    model, batch = ThroughAnAlias(), vectors()
    found = candidates(model, batch, 0)
    good = confirm(found, model, model.training_step, StageTask((batch, 0)))
    assert len(good.cuts) == len(found.cuts)
    assert {cut.way for cut in good.cuts} > {cut.way for cut in found.cuts}


def test_a_wrong_gradient_is_found_where_the_values_are_right() -> None:
    model, batch = ThroughABackward(), vectors()
    task = StageTask((batch, 0))
    program = program_for(model, 2, batch, 0, cuts=["layers.2"])
    prove(model, program, model.training_step, task, loss=None)
    with pytest.raises(CutError, match=r"the gradient of 'layers\.0\.weight' is not the same"):
        prove(model, program, model.training_step, task)


def test_a_parameter_that_is_said_not_to_be_used_is_zero() -> None:
    from dataclasses import replace

    model, batch = Gpt(), text()
    program = program_for(model, 2, batch, 0, cuts=["blocks.2"])
    lacking = tuple(n for n in program.parameters[1] if n != "blocks.3.mlp.0.weight")
    wrong = replace(program, parameters=(program.parameters[0], lacking))
    with pytest.raises(CutError):
        prove(model, wrong, model.training_step, StageTask((batch, 0)))


def test_a_proof_leaves_the_model_as_it_was() -> None:
    model, batch = Cnn(), images()
    ordinary(model, batch, 0)
    model.training_step(batch, 0).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    watch = Watch()
    program = program_for(model, 3, batch, 0)
    prove(model, program, model.training_step, StageTask((batch, 0)))
    assert watch.drawn() == ()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is gradients[name] for name, p in model.named_parameters())
    assert not any("_compiled_call_impl" in module.__dict__ for module in model.modules())


def test_random_models_are_proven_with_their_random_numbers() -> None:
    model, batch = Gpt(dropout=0.3, noise=True), text()
    found = candidates(model, batch, 0)
    assert confirm(found, model, model.training_step, StageTask((batch, 0))) is found
    program = build_program(found, choose_cuts(found, 4))
    prove(model, program, model.training_step, StageTask((batch, 0), key=(1, 2, 3)))


def test_a_stage_that_fails_is_named() -> None:
    class Model(Chain):
        def run(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            if not float(x.detach().abs().sum()):
                raise ValueError("all zero")
            return self.layers[1](x)

    model, batch = Model(), vectors()
    program = program_for(model, 2, batch, 0, cuts=["head"])
    with pytest.raises(CutError, match=r"stage 1 \(from 'head' to the end\).*ValueError: all zero"):
        prove(model, program, model.training_step, StageTask((batch, 0)))
