"""Random numbers depend on the task's key and the unit, not on which units a stage runs."""

from __future__ import annotations

import random
import statistics
import sys
import timeit

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_asyncpipe.runtime import randomness
from lightning_asyncpipe.runtime.cuts import choose_cuts
from lightning_asyncpipe.runtime.program import build_program
from lightning_asyncpipe.runtime.randomness import RandomStreams, Watch, digest, preserved_state
from lightning_asyncpipe.runtime.stages import StageRunner, StageTask
from tests.runtime.stage_models import (
    WIDTH,
    Chain,
    Gpt,
    assert_equal,
    backwards,
    candidates,
    forwards,
    program_for,
    staged,
    text,
    vectors,
)


class NoisyChain(Chain):
    """Draws from all generators, in units and around them, with layers that are called twice."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            scale = random.random() + float(numpy.random.rand()) + random.gauss(0, 1)
            return F.dropout(self.linear(x), 0.3) * scale + float(numpy.random.randn())

    def __init__(self) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList([self.Layer() for _ in range(3)])

    def run(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for layer in self.layers:
                x = layer(x) * random.random() + float(numpy.random.randn())
                x = x + torch.randn_like(x)
        return x


class CheckpointedChain(NoisyChain):
    """The same layers, run again in the backward, the shared ones too."""

    def run(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
        return x

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout((x @ self.weight).tanh(), 0.3)


MODELS = {
    "dropout in units": lambda: (Gpt(dropout=0.2), text()),
    "dropout, checkpointed": lambda: (Gpt(dropout=0.2, checkpointing="plain"), text()),
    "dropout, post-LN": lambda: (Gpt(dropout=0.2, post=True), text()),
    "noise before and after the model": lambda: (Gpt(dropout=0.2, noise=True), text()),
    "all generators": lambda: (NoisyChain(), vectors()),
    "shared layers, checkpointed": lambda: (CheckpointedChain(), vectors()),
}


@pytest.mark.parametrize("name", MODELS)
def test_random_numbers_are_the_same_whatever_the_cuts(name: str) -> None:
    model, batch = MODELS[name]()
    found = candidates(model, batch, 0)
    whole = build_program(found, choose_cuts(found, 1))
    expected = staged(model, whole, batch, 0, key=(7, 1, 2))
    for stages in {2, 3, len(found.cuts) + 1}:
        program = build_program(found, choose_cuts(found, stages))
        torch.manual_seed(stages)
        random.seed(stages)
        found_now = staged(model, program, batch, 0, key=(7, 1, 2))
        assert_equal(found_now, expected, program)


def test_a_checkpointed_forward_draws_the_same_numbers_again() -> None:
    batch = vectors()
    model = CheckpointedChain()
    plain = CheckpointedChain()
    plain.load_state_dict(model.state_dict())
    plain.run = lambda x: [x := layer(x) for _ in range(2) for layer in plain.layers][-1]  # type: ignore[method-assign]
    a = staged(model, program_for(model, 3, batch, 0), batch, 0, key=(5,))
    b = staged(plain, program_for(plain, 1, batch, 0), batch, 0, key=(5,))
    for name, gradient in a.gradients.items():
        torch.testing.assert_close(gradient, b.gradients[name], rtol=1e-5, atol=1e-6)


def test_units_micro_batches_and_steps_have_streams_of_their_own() -> None:
    model, batch = Gpt(2, dropout=0.5), text()
    program = program_for(model, 1, batch, 0)
    runner = StageRunner(model, program, model.training_step)
    losses = [
        float(forwards(runner, StageTask((batch, 0), key=key))[-1].value.detach())
        for key in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0))
    ]
    runner.close()
    assert len(set(losses[:4])) == 4
    assert losses[0] == losses[4]


def test_global_states_are_restored_after_every_action() -> None:
    model, batch = NoisyChain(), vectors()
    program = program_for(model, 2, batch, 0)
    runner = StageRunner(model, program, model.training_step)
    for held_back in (False, True):
        torch.manual_seed(3)
        random.seed(3)
        numpy.random.seed(3)
        if held_back:  # the second normal number of a pair waits for its turn
            random.gauss(0, 1)
            numpy.random.randn()
        watch, python = Watch(), random.getstate()
        before = numpy.random.get_state(legacy=False)
        backwards(runner, forwards(runner, StageTask((batch, 0))))
        assert watch.drawn() == ()
        assert random.getstate() == python
        after = numpy.random.get_state(legacy=False)
        assert (after["has_gauss"], after["gauss"]) == (before["has_gauss"], before["gauss"])
        assert (after["state"]["key"] == before["state"]["key"]).all()
    runner.close()


def test_generators_that_nothing_draws_from_are_not_seeded() -> None:
    assert program_for(Gpt(), 2, text(), 0).random == ()
    assert program_for(Gpt(dropout=0.1), 2, text(), 0).random == ("torch",)
    assert program_for(NoisyChain(), 2, vectors(), 0).random == ("torch", "numpy", "python")


def test_a_generator_that_is_drawn_from_later_is_restored_and_then_seeded() -> None:
    streams = RandomStreams(("torch",))
    draws = []
    for microbatch in range(4):
        before = random.getstate()
        streams.begin((0, microbatch), digest("start"))
        streams.enter(1)
        draws.append(random.random())
        streams.end()
        assert random.getstate() == before
    assert len(set(draws[1:])) == 3


def test_other_generators_of_numpy_and_python_are_handled_by_their_own_interfaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(randomness, "_memory_of_python", lambda: None)
    original = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(1))
    try:
        python, state = random.getstate(), numpy.random.get_state(legacy=False)
        with preserved_state():
            random.gauss(0, 1)
            numpy.random.permutation(5)
        assert random.getstate() == python
        assert numpy.random.get_state(legacy=False) == state
    finally:
        numpy.random.set_bit_generator(original)


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="reads CPython's memory")
def test_the_memory_of_pythons_generator_is_found() -> None:
    assert randomness._memory_of_python() is not None


def test_a_stream_starts_within_a_tenth_of_a_millisecond() -> None:
    streams = RandomStreams()
    streams.begin((0,), 0)
    try:
        times = timeit.repeat(lambda: streams.enter(12345), number=100, repeat=9)
    finally:
        streams.end()
    assert statistics.median(times) / 100 < 1e-4
