"""Validation, testing and prediction give what one device gives."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.nn import functional as F
from torchmetrics import MeanMetric

from lightning_asyncpipe.errors import PipelineError
from tests.support.evaluated import Classifier, assert_same, points, run
from tests.support.evaluation_cases import CASES, WHOLE, divided, observe
from tests.support.launch import run_ranks


@functools.cache
def one_device(name: str) -> dict[str, Any]:
    """What is seen of a case on one device."""
    return observe(name, "one")


@pytest.mark.parametrize("name", CASES)
def test_emulated_devices_give_what_one_device_gives(name):
    expected = one_device(name)
    assert any(expected.values())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = observe(name, "emulated")
    assert_same(found, expected)
    told = [str(warning.message) for warning in caught if "cannot run in stages" in str(warning.message)]
    assert bool(told) == (name in WHOLE), told


def test_metrics_of_micro_batches_are_those_of_the_batch():
    assert_same(divided("emulated", num_microbatches=3), divided("one"))


def test_asynchronous_training_validates_the_weights_that_it_has():
    found = []

    class Again(pl.Callback):
        def on_validation_end(self, trainer, module):
            data = trainer.val_dataloaders.dataset
            alone = Classifier().double()
            alone.load_state_dict(module.state_dict())
            with torch.no_grad():
                loss = F.cross_entropy(alone.logits(data.x), data.y)
            found.append((float(loss), float(trainer.callback_metrics["val_loss"])))

    loaders = {"train_dataloaders": points(40, 8), "val_dataloaders": points(18, 5, seed=1)}
    done = run(
        Classifier,
        "emulated",
        ("fit", loaders),
        strategy={"max_staleness": 1, "num_microbatches": 6},
        callbacks=[Again()],
        num_sanity_val_steps=-1,
        val_check_interval=2,
        max_epochs=2,
    )
    assert done.trainer.strategy.statistics()["stale_microbatches"]
    assert len({expected for expected, _ in found}) == len(found) == 5
    for expected, logged in found:
        assert logged == pytest.approx(expected)


class Computes(Classifier):
    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()

    def validation_step(self, batch, batch_idx):
        self.mean.update(batch[0])
        self.log("mean", self.mean.compute())


def test_a_metric_computed_in_a_step_says_what_to_do():
    with pytest.raises(PipelineError, match=r"`mean.compute\(\)` was called inside `validation_step`.*self.log"):
        run(Computes, "emulated", ("validate", {"dataloaders": points(8)}))


class ReturnsAnything(Classifier):
    def predict_step(self, batch, batch_idx):
        raise KeyError("a mistake of the user's")


def test_a_mistake_in_a_step_is_raised_as_it_is():
    with pytest.raises(KeyError, match="a mistake of the user's"):
        run(ReturnsAnything, "emulated", ("predict", {"dataloaders": points(8)}))


class LogsPredictions(Classifier):
    def predict_step(self, batch, batch_idx):
        self.log("prediction", self.logits(batch[0]).mean())


def test_logging_where_lightning_forbids_it_is_forbidden():
    said = []
    for how in ("one", "emulated"):
        with pytest.raises(Exception, match="log") as raised:
            run(LogsPredictions, how, ("predict", {"dataloaders": points(8)}))
        said.append((raised.type, str(raised.value)))
    assert said[0] == said[1]


def observed_by_a_rank() -> dict[str, object]:
    """What one of three ranks sees of all cases."""
    return {name: observe(name, "ranks") for name in CASES}


@pytest.fixture(scope="module")
def ranks():
    """What each of three ranks has seen."""
    return run_ranks(observed_by_a_rank, 3, timeout=500.0)


@pytest.mark.parametrize("name", CASES)
def test_every_rank_sees_what_one_device_sees(name, ranks):
    expected = one_device(name)
    for number, rank in enumerate(ranks):
        found = dict(rank[name])
        if number:  # the first rank writes predictions
            assert not any(found.pop("callbacks"))
        assert_same(found, {key: expected[key] for key in found})
