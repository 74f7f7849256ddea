"""What early forwards run on, and how close training stays to synchronous training; one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_asyncpipe import ReferenceStrategy
from tests.support.fit import fit
from tests.support.models import GPT, LanguageModel, loader


class Model(LanguageModel):
    def __init__(self, kind: type[torch.optim.Optimizer]) -> None:
        torch.manual_seed(1)
        super().__init__(GPT())
        self.kind = kind

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=5e-3)


def train(kind: type[torch.optim.Optimizer] = torch.optim.AdamW, steps: int = 12, **options: Any) -> tuple[Any, Any]:
    """The losses of a training on four emulated devices with as many micro-batches, and its strategy."""
    strategy = ReferenceStrategy(4, num_microbatches=4, **options)
    trainer, losses = fit(Model(kind).double(), loader(8 * steps, 8), strategy)
    return torch.tensor(losses), trainer.strategy


def test_better_weights_for_early_forwards_keep_training_close_to_synchronous() -> None:
    synchronous, _ = train(max_staleness=0)
    distances = []
    for correction in ("none", "extrapolate", "predict"):
        losses, strategy = train(staleness_correction=correction)
        distances.append(float((losses - synchronous).abs().mean()))
        statistics = strategy.statistics()
        assert statistics["stale_share"] > 0.2
        shares = statistics["stale_share_by_stage"]
        assert sum(shares) / 4 == pytest.approx(statistics["stale_share"])
        assert shares[0] > shares[3] == 0.0
    none, extrapolated, predicted = distances
    assert max(extrapolated, predicted) < 0.4 * none


def test_weights_are_predicted_where_nothing_else_is_said() -> None:
    assert torch.equal(train(steps=8)[0], train(steps=8, staleness_correction="predict")[0])


def test_updates_of_an_unknown_optimizer_are_extrapolated_with_one_note(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        losses, strategy = train(torch.optim.Adagrad, 8, staleness_correction="predict")
    assert strategy.early_weights == "extrapolated"
    assert torch.equal(losses, train(torch.optim.Adagrad, 8, staleness_correction="extrapolate")[0])
    assert sum("not Adagrad" in record.message for record in caplog.records) == 1
