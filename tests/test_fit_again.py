"""`fit` once more: of the same Trainer, of the same strategy, of the same module, and after one that failed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from tests.support.edge_basics import Regression, shuffled, sized
from tests.support.edges import PartsOnOneDevice, assert_close
from tests.support.fit import Losses
from tests.support.resuming import Saves, emulated

pytestmark = pytest.mark.filterwarnings("ignore")

QUIET: dict[str, Any] = {
    "precision": "64-true",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
    "use_distributed_sampler": False,
    "devices": 1,
}


class Fails(Regression):
    """Fails in the middle of a batch, the second one if not told otherwise, as often as it is told to."""

    def __init__(self, times: int = 1, batch: int = 1) -> None:
        super().__init__()
        self.times, self.batch = times, batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == self.batch and self.times:
            self.times -= 1
            raise ValueError("in the second batch" if self.batch == 1 else f"in batch {self.batch}")
        return loss


def regression(kind: Callable[[], pl.LightningModule] = Regression) -> pl.LightningModule:
    torch.manual_seed(1)
    return kind().double()


def trained(module: pl.LightningModule, strategy: Any, batches: Any, epochs: int = 1, **arguments: Any) -> list[float]:
    losses = Losses()
    callbacks = [losses, *arguments.pop("callbacks", [])]
    trainer = pl.Trainer(**{**QUIET, "strategy": strategy, "max_epochs": epochs, "callbacks": callbacks})
    trainer.fit(module, batches, **arguments)
    return losses.values


def test_a_trainer_that_fits_again_goes_on_as_on_one_device():
    found = []
    for strategy in (PartsOnOneDevice(4), emulated(max_staleness=0)):
        module, losses, batches = regression(), Losses(), shuffled(30, 6)
        trainer = pl.Trainer(**{**QUIET, "strategy": strategy, "max_epochs": 1, "callbacks": [losses]})
        for epochs in (1, 3):
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(module, batches)
        found.append((losses.values, dict(module.state_dict()), trainer.current_epoch, trainer.global_step))
    assert len(found[0][0]) == 15
    assert_close(found[1], found[0])


def test_a_strategy_that_has_a_trainer_is_refused_to_another_one_as_lightning_does_with_its_own():
    for strategy in (emulated(), pl.strategies.DDPStrategy()):
        trained_by = {**QUIET, "precision": None, "strategy": strategy}
        pl.Trainer(**trained_by)
        with pytest.raises(MisconfigurationException, match=r"CPU parallel_devices set through .*Strategy class"):
            pl.Trainer(**trained_by)


@pytest.mark.parametrize("again", ["the same trainer", "another trainer"])
def test_a_fit_after_one_that_failed_is_one_of_a_module_with_those_weights(again):
    module, strategy = regression(Fails), emulated(max_staleness=0)
    losses = Losses()
    trainer = pl.Trainer(**{**QUIET, "strategy": strategy, "max_epochs": 1, "callbacks": [losses]})
    with pytest.raises(ValueError, match="in the second batch"):
        trainer.fit(module, sized(8, 8, 8))
    expected = regression()
    expected.load_state_dict(module.state_dict())
    if again == "the same trainer":
        losses.values.clear()
        trainer.fit(module, sized(8, 8, 8))
        found = losses.values
        assert trainer.global_step == 4  # Lightning counts the step before the failure
    else:
        found = trained(module, emulated(max_staleness=0), sized(8, 8, 8))
    assert found == trained(expected, emulated(max_staleness=0), sized(8, 8, 8))[: len(found)]
    assert len(found) == 3
    assert_close(dict(module.state_dict()), dict(expected.state_dict()))


def test_a_fit_after_one_that_failed_may_go_on_from_a_checkpoint(tmp_path: Path):
    # A batch's first forwards run before the step of the batch before it, so the third one fails after the first step.
    module, expected = regression(lambda: Fails(batch=2)), regression()
    with pytest.raises(ValueError, match="in batch 2"):
        trained(module, emulated(), sized(8, 8, 8), callbacks=[Saves(tmp_path, (1,))])
    found = trained(module, emulated(), sized(8, 8, 8), ckpt_path=tmp_path / "step-1.ckpt")
    assert len(found) == 2
    trained(expected, emulated(), sized(8, 8, 8), callbacks=[Saves(tmp_path / "whole", (1,))])
    saved = torch.load(tmp_path / "whole" / "step-1.ckpt", weights_only=True)["state_dict"]
    assert_close(torch.load(tmp_path / "step-1.ckpt", weights_only=True)["state_dict"], saved)
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_a_trainer_that_resumed_fits_again_from_where_it_is(tmp_path: Path):
    module = regression()
    trained(module, emulated(), sized(8, 8, 8), callbacks=[Saves(tmp_path)])
    losses = Losses()
    trainer = pl.Trainer(**{**QUIET, "strategy": emulated(), "max_epochs": 2, "callbacks": [losses]})
    trainer.fit(regression(), sized(8, 8, 8), ckpt_path=tmp_path / "epoch-0.ckpt")
    assert len(losses.values) == 3
    other = regression()
    trainer.fit_loop.max_epochs = 3
    trainer.fit(other, sized(8, 8, 8))
    assert len(losses.values) == 6
    assert trainer.current_epoch == 3
    assert losses.values[3] == trained(regression(), emulated(), sized(8, 8, 8))[0]
