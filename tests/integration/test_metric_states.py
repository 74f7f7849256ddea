"""What a step gives to metrics is taken back, and applied anywhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torchmetrics as tm
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_asyncpipe.errors import PipelineError
from lightning_asyncpipe.integration.metric_states import MetricUpdate, MetricWatch


class Module(LightningModule):
    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.metric = metric


class Decays(tm.Metric):
    """Its states do not add up, which torchmetrics does not know of it."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("value", torch.zeros(()))

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.value = 0.5 * self.value + preds.mean()

    def compute(self) -> Tensor:
        return self.value


class Averages(tm.Metric):
    """Keeps a mean of the means of batches, as a state."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("value", torch.zeros(()), dist_reduce_fx="mean")
        self.add_state("times", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.times += 1
        self.value = self.value + (preds.mean() - self.value) / self.times

    def compute(self) -> Tensor:
        return self.value


METRICS: dict[str, Callable[[], Any]] = {
    "sums": lambda: tm.MeanSquaredError(),
    "lists": lambda: tm.SpearmanCorrCoef(),
    "full state": lambda: tm.PearsonCorrCoef(),
    "a metric of one's own": Decays,
    "means": Averages,
    "a wrapper": lambda: tm.wrappers.MinMaxMetric(tm.MeanSquaredError()),
    "a running window": lambda: tm.wrappers.Running(tm.MeanSquaredError(), 2),
    "a collection": lambda: tm.MetricCollection({"a": tm.MeanSquaredError(), "b": tm.MeanAbsoluteError()}),
    "groups that are given": lambda: tm.MetricCollection(
        {"a": tm.MeanSquaredError(), "b": tm.MeanSquaredError()}, compute_groups=[["a", "b"]]
    ),
    "a sum of metrics": lambda: tm.MeanSquaredError() + tm.MeanAbsoluteError(),
}


def batches(count: int = 5) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, generator=generator), torch.randn(4, generator=generator)) for _ in range(count)]


def values(module: Module) -> list[Tensor]:
    computed = module.metric.compute()
    return list(computed.values()) if isinstance(computed, dict) else [computed]


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("call", ["update", "forward"])
def test_a_metric_gets_what_steps_gave_elsewhere(name: str, call: str) -> None:
    here, there, plain = (Module(METRICS[name]()) for _ in range(3))
    watch_here, watch_there = MetricWatch(here, "step"), MetricWatch(there, "step")
    for number, (preds, target) in enumerate(batches()):
        for module in (here, plain):
            if module is plain:
                getattr(plain.metric, call)(preds, target)
                continue
            with watch_here.watching():
                returned = getattr(here.metric, call)(preds, target)
        updates = {path: MetricUpdate.from_list(update.to_list()) for path, update in watch_here.take().items()}
        assert updates
        assert (returned is None) == (call == "update")
        watch_there.apply([updates])
        if number:
            torch.testing.assert_close(values(there), values(plain))
    assert all(
        metric.update_count == 0 for metric in here.modules() if isinstance(metric, tm.Metric) and metric._defaults
    )


def test_a_metric_is_untouched_by_a_step_and_by_one_that_fails() -> None:
    module = Module(tm.CatMetric())
    module.metric.update(torch.tensor([1.0]))
    before = module.metric.value
    watch = MetricWatch(module, "step")
    with suppress(KeyError), watch.watching():
        module.metric.update(torch.tensor([2.0]))
        raise KeyError
    assert module.metric.value is before
    assert [float(x) for x in before] == [1.0]
    module.metric.update(torch.tensor([3.0]))
    assert module.metric.compute().tolist() == [1.0, 3.0]


def test_a_step_may_empty_a_metric_and_compute_its_own_part() -> None:
    module = Module(tm.SumMetric())
    module.metric.update(5.0)
    watch = MetricWatch(module, "step")
    with watch.watching():
        module.metric.reset()
        module.metric.update(2.0)
        assert float(module.metric.compute()) == 2.0
    watch.apply([watch.take()])
    assert float(module.metric.compute()) == 2.0


def test_computing_in_a_step_what_it_cannot_know_is_refused() -> None:
    module = Module(tm.SumMetric())

    def step() -> Any:
        module.metric.update(2.0)
        return module.metric.compute()

    with MetricWatch(module, "step").watching(), pytest.raises(PipelineError, match=r"`metric.compute\(\)` was called"):
        step()


def test_the_value_of_a_batch_is_that_of_all_its_parts() -> None:
    module = Module(tm.AUROC("binary"))
    watch = MetricWatch(module, "step")
    preds, target = torch.tensor([0.1, 0.8, 0.4, 0.3]), torch.tensor([0, 1, 0, 1])
    updates = []
    for part in (slice(0, 2), slice(2, 4)):
        with watch.watching():
            module.metric(preds[part], target[part])
        updates.append(watch.take())
    watch.apply(updates, frozenset({"metric"}))
    assert module.metric._forward_cache == tm.AUROC("binary")(preds, target)
