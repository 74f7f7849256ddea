"""Early forwards run on the weights that one more update like the last one would lead to."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from lightning_asyncpipe.runtime.extrapolation import Extrapolation
from lightning_asyncpipe.runtime.gradients import GradientAccumulator


class Training:
    """Two parameters, one for each of two stages, whose updates a test makes by hand."""

    def __init__(self, rate: float = 0.1) -> None:
        self.parameters = {"a": Parameter(torch.tensor([1.0, 2.0])), "b": Parameter(torch.tensor([5.0]))}
        self.rate = rate
        self.gathered = GradientAccumulator(self.parameters)
        self.early = Extrapolation(self.parameters, [["a"], ["b"]], lambda name: self.rate)

    def update(self, by: float, next_rate: float | None = None) -> None:
        """ "a" is stepped here, the new "b" arrives later, when the learning rate is already the next one."""
        self.early.step_follows()
        self._write("a", by)
        self.rate = self.rate if next_rate is None else next_rate
        self._write("b", by)
        self.early.rotate()

    def _write(self, name: str, by: float) -> None:
        self.early.before_update([name])
        with torch.no_grad():
            self.parameters[name].add_(by)

    def weights(self, stage: int = 0) -> list[float]:
        [leaf] = self.early.leaves(stage, self.gathered).values()
        assert leaf.requires_grad
        return leaf.tolist()


def test_before_the_first_update_weights_are_as_they_are():
    assert Training().weights() == [1.0, 2.0]


def test_weights_move_on_by_the_last_update():
    training = Training()
    training.update(0.5)
    assert training.weights() == [2.0, 3.0]
    training.update(-0.25)
    assert training.weights() == [1.0, 2.0]
    assert training.weights(stage=1) == [5.0]


def test_a_change_of_the_learning_rate_scales_the_move():
    training = Training(rate=0.1)
    training.update(0.5, next_rate=0.2)
    assert training.weights() == [2.5, 3.5]
    assert training.weights(stage=1) == [6.5]


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_a_step_that_did_nothing_moves_nothing(rate):
    training = Training(rate)
    training.update(0.5)
    training.update(0.0, next_rate=0.1)
    assert training.weights() == [1.5, 2.5]


def test_after_a_flush_nothing_is_left_of_the_updates_before_it():
    training = Training()
    training.update(0.5)
    training.early.flush()
    assert training.weights() == [1.5, 2.5]


def test_all_forwards_of_a_segment_share_their_weights_and_live_ones_are_not_touched():
    training = Training()
    training.update(0.5)
    [first], [second] = (training.early.leaves(0, training.gathered).values() for _ in range(2))
    assert first is second
    with torch.no_grad():
        first.zero_()
    assert training.parameters["a"].tolist() == [1.5, 2.5]
