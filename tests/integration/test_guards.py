"""Configurations that a pipeline cannot honour are refused with what to do instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    LambdaCallback,
    LearningRateMonitor,
    ModelPruning,
    StochasticWeightAveraging,
)

from lightning_asyncpipe import ReferenceStrategy
from lightning_asyncpipe.integration.guards import check_module, check_optimizers, overrides_train_batch_start

torch.set_num_threads(1)

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(Model):
    def backward(self, loss: torch.Tensor) -> None:  # type: ignore[override]
        loss.backward()


class TakesIterator(Model):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return None


class Synchronised(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.Sequential(torch.nn.SyncBatchNorm(1))


class NoStep(LightningModule):
    pass


def trainer(**options: Any) -> Trainer:
    return Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, **options)


def test_an_ordinary_module_passes() -> None:
    check_module(Model(), trainer())
    check_optimizers([torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])])
    check_optimizers([])


@pytest.mark.parametrize(
    ("module", "found", "remedy"),
    [
        (Manual, "Manual.automatic_optimization", "Return the loss"),
        (OwnBackward, "OwnBackward.backward", "scale the loss"),
        (TakesIterator, "dataloader_iter", r"def training_step\(self, batch, batch_idx\)"),
        (Synchronised, r"SyncBatchNorm \(norms.0\)", "GroupNorm"),
        (NoStep, "NoStep", "Define one"),
    ],
)
def test_modules_that_cannot_be_pipelined_are_refused(module: type[LightningModule], found: str, remedy: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"{found}.*{remedy}"):
        check_module(module(), trainer())


def test_sync_batchnorm_of_the_trainer_is_refused() -> None:
    asked = trainer(strategy="ddp", sync_batchnorm=True)
    with pytest.raises(MisconfigurationException, match=r"`sync_batchnorm=True`.*BatchNorm"):
        check_module(Model(), asked)


@pytest.mark.parametrize(
    ("callback", "remedy"),
    [
        (StochasticWeightAveraging(1e-2), "Use `WeightAveraging`"),
        (ModelPruning("l1_unstructured", amount=0.5), "Prune a checkpoint"),
        (BackboneFinetuning(), "Freeze before"),
    ],
)
def test_callbacks_that_need_the_whole_model_are_refused(callback: Callback, remedy: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"{type(callback).__name__}.*{remedy}"):
        check_module(Model(), trainer(callbacks=[callback]))


def test_averages_of_weights_are_not_written_in_parts() -> None:
    asked = trainer(strategy=ReferenceStrategy(2, save_distributed_checkpoint=True), callbacks=[EMAWeightAveraging()])
    with pytest.raises(MisconfigurationException, match=r"EMAWeightAveraging.*leave one of them out"):
        check_module(Model(), asked)


def test_several_optimizers_and_lbfgs_are_refused() -> None:
    weights = [torch.nn.Parameter(torch.ones(1))]
    sgd, adam = torch.optim.SGD(weights, lr=0.1), torch.optim.Adam(weights)
    with pytest.raises(MisconfigurationException, match=r"2 optimizers \(SGD, Adam\).*groups"):
        check_optimizers([sgd, adam])
    with pytest.raises(MisconfigurationException, match=r"LBFGS.*AdamW"):
        check_optimizers([torch.optim.LBFGS(weights)])


# Early forwards


class StartsBatches(Callback):
    def on_train_batch_start(self, *args: Any) -> None:
        pass


class MonitorsMore(LearningRateMonitor):
    """Inherits Lightning's ``on_train_batch_start``."""


class StartsInModule(Model):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass


class StartsInData(LightningDataModule):
    def on_train_batch_start(self, *args: Any) -> None:
        pass


def overriding(module: LightningModule, *callbacks: Callback) -> str | None:
    made = trainer(callbacks=list(callbacks))
    made.strategy.connect(module)
    return overrides_train_batch_start(made)


def test_what_overrides_the_start_of_a_batch_is_named() -> None:
    assert overriding(Model(), MonitorsMore(), LambdaCallback()) is None
    assert overriding(StartsInModule()) == "StartsInModule.on_train_batch_start"
    assert overriding(Model(), StartsBatches()) == "StartsBatches.on_train_batch_start"
    given = LambdaCallback(on_train_batch_start=lambda *args: None)
    assert overriding(Model(), given) == "LambdaCallback.on_train_batch_start"


def test_a_datamodule_has_no_such_hook() -> None:
    called: list[str] = []

    class Noting(StartsInData):
        def on_train_batch_start(self, *args: Any) -> None:
            called.append("data")

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.ones(2, 1))  # type: ignore[arg-type]

    made = trainer(max_epochs=1, enable_progress_bar=False, enable_model_summary=False)
    made.fit(Model(), datamodule=Noting())
    assert called == []
