"""What a batch leaves behind is freed at once, not when the garbage collector comes by."""

from __future__ import annotations

import gc
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import Tensor

from lightning_asyncpipe.runtime.engine import Work
from tests.support.fit import reference_fit
from tests.support.models import GPT, LanguageModel, loader


class Counts(LanguageModel):
    """Counts the batches and tensors that are alive after each batch."""

    def __init__(self) -> None:
        super().__init__(GPT())
        self.batches: list[int] = []
        self.tensors: list[int] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        alive = gc.get_objects()
        self.batches.append(sum(isinstance(each, Work) for each in alive))
        self.tensors.append(sum(isinstance(each, Tensor) for each in alive))


@pytest.mark.parametrize("staleness", [0, 1])
def test_without_the_garbage_collector_nothing_grows(staleness: int) -> None:
    module = Counts()
    gc.collect()
    gc.disable()
    try:
        reference_fit(module, loader(12 * 8, 8), 2, {"num_microbatches": 4, "max_staleness": staleness})
    finally:
        gc.enable()
    assert isinstance(module, pl.LightningModule)
    assert max(module.batches) <= 2  # the one that ended, and the one of which forwards ran early
    steady = module.tensors[4:-1]  # no forwards run early behind the last batch
    assert max(steady) - min(steady) < 20
    assert module.tensors[-1] <= max(steady)
