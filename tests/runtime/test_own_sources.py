"""A step that draws from random sources of its own: seeded where that can be, else refused."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_asyncpipe.errors import UnrepeatableStepError
from lightning_asyncpipe.runtime.own_random import own_generators
from lightning_asyncpipe.runtime.proof import confirm, prove
from lightning_asyncpipe.runtime.stages import StageTask
from lightning_asyncpipe.runtime.step_state import changed, step_state
from tests.runtime.stage_models import Chain, assert_equal, candidates, ordinary, program_for, staged, vectors

VARIABLE = np.random.default_rng(5)


class Holder:
    """An object of the user's own, as an augmentation is."""

    def __init__(self) -> None:
        self.source = random.Random(3)
        self.count = 0


class Mixed(Chain):
    """Swaps inputs and targets alike, by a permutation from a source of its own; draws in units and between too."""

    def __init__(self, make: Any, draw: Any) -> None:
        super().__init__()
        self.source = make()
        self.draw = draw

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        order = self.draw(self, len(batch))
        x = batch[order]
        for layer in self.layers:
            x = layer(x)
            x = x + 0.1 * self.draw(self, len(batch))[:, None]
        return ((self.head(x) - batch[order]) ** 2).mean()


def shuffled(source: random.Random, n: int) -> Tensor:
    return torch.tensor(source.sample(range(n), n))


def seeded(n: int, seed: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


def counted(m: Mixed, n: int) -> Tensor:
    m.source["n"] += 1
    return seeded(n, m.source["n"])


def counted_in_an_object(m: Mixed, n: int) -> Tensor:
    m.source.count += 1
    return seeded(n, m.source.count)


SEEDED: dict[str, tuple[Any, Any]] = {
    "torch.Generator": (
        lambda: torch.Generator().manual_seed(3),
        lambda m, n: torch.randperm(n, generator=m.source),
    ),
    "numpy's Generator": (
        lambda: np.random.default_rng(0),
        lambda m, n: torch.from_numpy(m.source.permutation(n)),
    ),
    "numpy's RandomState": (
        lambda: np.random.RandomState(0),
        lambda m, n: torch.from_numpy(m.source.permutation(n)),
    ),
    "random.Random": (lambda: random.Random(0), lambda m, n: shuffled(m.source, n)),
    "in a dict": (lambda: {"noise": [random.Random(0)]}, lambda m, n: shuffled(m.source["noise"][0], n)),
    "in an object": (Holder, lambda m, n: shuffled(m.source.source, n)),
    "a variable of the file": (lambda: None, lambda m, n: torch.from_numpy(VARIABLE.permutation(n))),
}

REFUSED: dict[str, tuple[Any, Any, str]] = {
    "an iterator": (
        lambda: itertools.count(),
        lambda m, n: seeded(n, next(m.source)),
        "`self.source` are iterators",
    ),
    "a count in a dict": (lambda: {"n": 0}, counted, "It changes `self.source`"),
    "a count in an object": (Holder, counted_in_an_object, r"It changes `self.source\.count`"),
    "the clock": (lambda: None, lambda m, n: seeded(n, time.time_ns() % 2**31), "not from the clock"),
    "the operating system": (lambda: random.SystemRandom(), lambda m, n: shuffled(m.source, n), "operating system"),
}


@pytest.mark.parametrize("source", SEEDED)
def test_generators_of_the_modules_own_give_every_stage_the_same_numbers(source: str) -> None:
    make, draw = SEEDED[source]
    model, batch = Mixed(make, draw), vectors()
    program = program_for(model, 3, batch, 0)
    prove(model, program, model.training_step, StageTask((batch, 0), key=(1, 2)))
    alone = program_for(model, 1, batch, 0)
    first = staged(model, alone, batch, 0, key=(1, 2))
    assert_equal(staged(model, program, batch, 0, key=(1, 2)), first)
    with pytest.raises(AssertionError):
        assert_equal(staged(model, program, batch, 0, key=(1, 3)), first)


@pytest.mark.parametrize("source", SEEDED)
def test_they_are_afterwards_what_they_were(source: str) -> None:
    make, draw = SEEDED[source]
    model, batch = Mixed(make, draw), vectors()
    again = Mixed(make, draw)
    before = VARIABLE.bit_generator.state
    staged(model, program_for(model, 2, batch, 0), batch, 0)
    assert VARIABLE.bit_generator.state == before
    if source != "a variable of the file":
        assert torch.equal(draw(model, 50), draw(again, 50))


@pytest.mark.parametrize("source", REFUSED)
def test_a_step_that_cannot_be_repeated_is_refused_with_what_to_do(source: str) -> None:
    make, draw, expected = REFUSED[source]
    model, batch = Mixed(make, draw), vectors()
    program = program_for(model, 2, batch, 0)
    task = StageTask((batch, 0))
    with pytest.raises(UnrepeatableStepError, match=f"(?s)each time that it runs.*{expected}.*on_after_batch_transfer"):
        prove(model, program, model.training_step, task)
    with pytest.raises(UnrepeatableStepError):
        confirm(candidates(model, batch, 0), model, model.training_step, task)


def test_one_stage_may_draw_from_wherever_it_likes() -> None:
    make, draw, _ = REFUSED["the clock"]
    model, batch = Mixed(make, draw), vectors()
    prove(model, program_for(model, 1, batch, 0), model.training_step, StageTask((batch, 0)), loss=None)


def test_a_generator_that_the_step_seeds_goes_on_with_that_seed() -> None:
    class Fixed(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.source = torch.Generator()

        def run(self, x: Tensor) -> Tensor:
            self.source.manual_seed(7)
            for layer in self.layers:
                x = layer(x) + torch.randn(x.shape, generator=self.source)
            return x

    model, batch = Fixed(), vectors()
    expected = ordinary(model, batch, 0)
    assert_equal(staged(model, program_for(model, 3, batch, 0), batch, 0, key=(1, 2)), expected)


def test_the_global_generators_are_nobodys_own() -> None:
    model = nn.Linear(2, 2)
    model.sources = [torch.default_generator, random._inst, np.random.mtrand._rand]
    assert own_generators(model) == {}


def test_a_generator_is_found_once_however_often_it_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.one = model[0].two = {"three": random.Random()}
    assert list(own_generators(model)) == ["one['three']"]


def test_state_that_changes_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].count, model[1].holder, model.names, model.fixed = 0, Holder(), {"n": float("nan")}, 3
    before = step_state(model)
    assert changed(before, step_state(model)) == ["names"] or not changed(before, step_state(model))
    model[1].count += 1
    model[1].holder.count += 1
    model.names["n"] = 1
    assert changed(before, step_state(model)) == ["names", "1.count", "1.holder.count"]
