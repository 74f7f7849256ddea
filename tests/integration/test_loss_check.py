"""A loss that is not a mean over samples is named before training, and no other one is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_asyncpipe.integration.loss_check import warn_unless_mean
from lightning_asyncpipe.reference import ReferenceStrategy
from tests.support.edge_basics import Regression, sized

rank_zero_only.rank = 0


class Net(nn.Module):
    """Dropout and batch normalisation make micro-batches differ in training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def contrastive(net: Net, x: Tensor) -> Tensor:
    z = F.normalize(net(x), dim=-1)
    return F.cross_entropy(z @ z.T / 0.5, torch.arange(len(z)))


def in_batch_variance(net: Net, x: Tensor) -> Tensor:
    return (net(x) - net(x).mean(0)).pow(2).mean()


def mean_over_few_tokens(net: Net, x: Tensor) -> Tensor:
    """Each token's loss is about the same."""
    token = torch.arange(len(x) * 2).reshape(-1, 2) % 7
    return F.cross_entropy(net(x * 0.01).repeat(1, 2).view(-1, 8), token.flatten(), ignore_index=3)


def in_evaluation_fails(net: Net, x: Tensor) -> Tensor:
    if not net.training:
        raise RuntimeError("needs targets")
    return net(x).sum()


NOT_MEANS: dict[str, Callable[[Net, Tensor], Any]] = {
    "a sum": lambda net, x: net(x).pow(2).sum(),
    "a sum in a dict": lambda net, x: {"loss": net(x).pow(2).sum(), "more": "else"},
    "contrastive": contrastive,
    "statistics of the batch": in_batch_variance,
}
MEANS: dict[str, Callable[[Net, Tensor], Any]] = {
    "a mean": lambda net, x: net(x).pow(2).mean(),
    "a mean and a penalty": lambda net, x: net(x).mean() + net.layers[0].weight.pow(2).sum(),
    "a mean over tokens of which few are ignored": mean_over_few_tokens,
    "one at random": lambda net, x: (net(x) * torch.randn(1)).sum(),
    "a sum that does not run in evaluation mode": in_evaluation_fails,
    "a sum that is not finite": lambda net, x: net(x).sum() / 0,
    "zero": lambda net, x: 0.0 * net(x).sum(),
    "none": lambda net, x: None,
}


def warnings_of(loss: Callable[[Net, Tensor], Any], count: int = 4) -> list[str]:
    net = Net()
    net.layers[1].eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x = torch.randn(9, 4, generator=torch.Generator().manual_seed(1))
        warn_unless_mean(net, lambda batch: loss(net, batch), x, count, nullcontext)
    assert [each.training for each in net.layers] == [True, False, True, True]
    assert net.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("name", NOT_MEANS)
def test_a_loss_over_the_batch_is_named_with_what_to_do(name: str) -> None:
    (said,) = warnings_of(NOT_MEANS[name])
    assert "The loss of 5 samples together is" in said
    assert "average over 2 micro-batches" in said
    assert "`num_microbatches`" in said


@pytest.mark.parametrize("name", MEANS)
def test_nothing_is_said_of_a_mean_or_where_it_cannot_be_known(name: str) -> None:
    assert not warnings_of(MEANS[name])


def test_nothing_is_said_of_a_batch_that_is_not_split() -> None:
    assert not warnings_of(NOT_MEANS["contrastive"], count=1)


class Summed(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * len(batch[0])


@pytest.mark.parametrize("kind", [Regression, Summed])
def test_a_fit_says_it_once_and_trains_on(kind: type[pl.LightningModule]) -> None:
    strategy = ReferenceStrategy(num_stages=2, num_microbatches=4)
    trainer = pl.Trainer(
        strategy=strategy,
        max_epochs=1,
        precision="64-true",
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(kind(), sized(8, 8))
    assert sum("not a mean over samples" in str(w.message) for w in caught) == (kind is Summed)
    assert trainer.global_step == 2
