"""What ordinary projects evaluate, and in which ways."""

from __future__ import annotations

import os
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics as tm
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel

from tests.support.evaluated import (
    CLASSES,
    STAGES,
    WIDTH,
    Classified,
    Classifier,
    How,
    Run,
    Takes,
    metrics_of_all_kinds,
    points,
    run,
)


@dataclass(frozen=True)
class Case:
    """One use of a Trainer.

    Attributes:
        module: builds the module.
        calls: builds what is called: names of the Trainer's methods with their arguments.
        arguments: builds further arguments of the Trainer.
    """

    module: Callable[[], pl.LightningModule]
    calls: Callable[[], list[tuple[str, dict[str, Any]]]]
    arguments: Callable[[], dict[str, Any]] = field(default=dict)


CASES: dict[str, Case] = {}


def case(name: str, module: Callable[[], pl.LightningModule], calls: Any, **arguments: Any) -> None:
    assert name not in CASES, name
    CASES[name] = Case(module, calls, lambda: {k: v() if callable(v) else v for k, v in arguments.items()})


def observe(name: str, how: How, **strategy: Any) -> dict[str, Any]:
    """Run a case; what all see of it that look at it."""
    chosen = CASES[name]
    takes = Takes()
    arguments = chosen.arguments()
    arguments["callbacks"] = [takes, *arguments.pop("callbacks", [])]
    done: Run = run(chosen.module, how, *chosen.calls(), strategy=strategy, **arguments)
    return {
        "results": done.results,
        "seen": takes.seen,
        "module": getattr(done.module, "seen", None),
        "callbacks": [getattr(callback, "seen", None) for callback in arguments["callbacks"][1:]],
    }


def fitting(train: int = 20, validation: int = 18, **more: Any) -> Callable[[], list[tuple[str, dict[str, Any]]]]:
    return lambda: [
        ("fit", {"train_dataloaders": points(train), "val_dataloaders": points(validation, 5, seed=1), **more})
    ]


# When validation runs, and on what

case("sanity checking and each epoch", Classifier, fitting(), max_epochs=2)
case("a fraction of an epoch", Classifier, fitting(), val_check_interval=0.4)
case("a number of batches", Classifier, fitting(), val_check_interval=3, max_epochs=2)
case("across epochs", Classifier, fitting(), val_check_interval=7, check_val_every_n_epoch=None, max_epochs=2)
case("every second epoch", Classifier, fitting(), check_val_every_n_epoch=2, max_epochs=3)
case("a limit as a number", Classifier, fitting(), limit_val_batches=2, num_sanity_val_steps=0)
case("a limit as a fraction", Classifier, fitting(), limit_val_batches=0.5, num_sanity_val_steps=-1)
case("one sample in the last batch", Classifier, fitting(validation=11))
case("fewer batches than stages", Classifier, fitting(validation=5))
case("fast_dev_run", Classifier, fitting(), fast_dev_run=2)
case("overfit_batches", Classifier, fitting(), overfit_batches=2, max_epochs=2)

case("no more than so many steps", Classifier, fitting(), max_steps=7, max_epochs=-1)
case("loaders made anew", Classifier, fitting(), reload_dataloaders_every_n_epochs=1, max_epochs=3)
case("inference mode off", Classifier, fitting(), inference_mode=False)
case("anomalies looked for", Classifier, fitting(), detect_anomaly=True)
case("deterministic algorithms", Classifier, fitting(), deterministic=True)
case("clipping", Classifier, fitting(), gradient_clip_val=0.1, gradient_clip_algorithm="norm")
case("clipping by value", Classifier, fitting(), gradient_clip_val=0.01, gradient_clip_algorithm="value")
case("no training batches beyond a limit", Classifier, fitting(), limit_train_batches=0.6, max_epochs=2)


class Streamed(torch.utils.data.IterableDataset[Any]):
    """Has no length."""

    def __iter__(self) -> Any:
        return iter(list(points(13).dataset))


case(
    "a loader without a length",
    Classifier,
    lambda: [
        (
            "fit",
            {
                "train_dataloaders": points(12),
                "val_dataloaders": torch.utils.data.DataLoader(Streamed(), 3),
            },
        )
    ],
)


class Several(Classifier):
    """Validates on several loaders, in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.net(batch[0])
        return F.cross_entropy(self.head(h) + 0.1 * self.other(h), batch[1])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        h = self.net(batch[0])
        logits = self.head(h) if dataloader_idx == 0 else self.other(h)
        loss = F.cross_entropy(logits, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log(f"one_name_{dataloader_idx}", loss, add_dataloader_idx=False)
        return loss

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.head(self.net(batch[0])) + dataloader_idx


def three_loaders() -> list[Any]:
    return [points(13, 4, seed=1), points(7, 3, seed=2), points(2, 2, seed=3)]


case(
    "several loaders",
    Several,
    lambda: [
        ("fit", {"train_dataloaders": points(12), "val_dataloaders": three_loaders()}),
        ("validate", {"dataloaders": three_loaders(), "verbose": False}),
        ("test", {"dataloaders": three_loaders(), "verbose": False}),
        ("predict", {"dataloaders": three_loaders()}),
    ],
)


case(
    "limits of tests and predictions",
    Several,
    lambda: [
        ("test", {"dataloaders": three_loaders(), "verbose": False}),
        ("predict", {"dataloaders": three_loaders()[:2]}),
    ],
    limit_test_batches=2,
    limit_predict_batches=0.5,
)


class Combined(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        one, other = batch
        loss = F.cross_entropy(self.logits(one[0]), one[1])
        if other is not None:
            loss = loss + other[0].mean()
        self.log("loss", loss, batch_size=len(one[0]))


case(
    "loaders combined",
    Combined,
    lambda: [("validate", {"dataloaders": CombinedLoader([points(13), points(7)], "max_size"), "verbose": False})],
)

# What the step returns

Pair = namedtuple("Pair", ["left", "right"])


class Returns(Classifier):
    """Returns all kinds of things."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        logits = self.logits(batch[0])
        return {"logits": logits, "pair": Pair(batch_idx, [logits.argmax(1), "text"]), "none": None}

    test_step = predict_step = validation_step

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append((batch_idx, outputs, len(batch[0]), dataloader_idx))

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end


class Writes(BasePredictionWriter):
    """Takes down what it would write."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.seen: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *rest: Any) -> None:
        self.seen.append((prediction, indices, rest[1:]))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.seen.append((predictions, indices))


case(
    "returned values and written predictions",
    Returns,
    lambda: [
        ("fit", {"train_dataloaders": points(8), "val_dataloaders": points(9)}),
        ("test", {"dataloaders": points(18, 4), "verbose": False}),
        ("predict", {"dataloaders": points(18, 4)}),
        ("predict", {"dataloaders": [points(5, 4), points(6, 5)]}),
    ],
    callbacks=lambda: [Writes()],
)
case(
    "predict with the default step, on batches that can be walked through once",
    Classifier,
    lambda: [("predict", {"dataloaders": (batch for batch in points(18, 4))})],
)


class Remembers(Classifier):
    """Appends to lists, as was usual before hooks got outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.outs: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.logits(batch[0])
        self.outs.append({"right": logits.argmax(1) == batch[1], "loss": F.cross_entropy(logits, batch[1])})

    def on_validation_epoch_end(self) -> None:
        self.log("right", torch.cat([out["right"] for out in self.outs]).double().mean())
        self.log("mean", torch.stack([out["loss"] for out in self.outs]).mean(), sync_dist=True)
        self.log("sum", torch.tensor(1.0 * len(self.outs)), reduce_fx="sum", sync_dist=True)
        self.seen.append(len(self.outs))
        self.outs.clear()


case("lists that grow", Remembers, fitting(), max_epochs=2)


class StartsBatches(Classifier):
    """Code of its own runs before every batch."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(("start", batch_idx))

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(("end", batch_idx))


case("hooks around batches", StartsBatches, fitting())


class AllHooks(Returns):
    """Takes down every hook, of its own and of a callback."""

    def configure_callbacks(self) -> Any:
        return [AllOfACallback()]


class AllOfACallback(pl.Callback):
    """Tells the module of every hook."""


HOOKS = [
    *("on_fit_start", "on_fit_end", "setup", "teardown", "configure_model"),
    *(f"on_train_{when}" for when in ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end")),
    *(
        f"on_{kind}_{when}"
        for kind in ("validation", "test", "predict")
        for when in ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end")
    ),
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
]


def _hooked(name: str) -> Callable[..., None]:
    def hook(self: Any, *args: Any, **kwargs: Any) -> None:
        self.seen.append(name)

    return hook


def _hooked_outside(name: str) -> Callable[..., None]:
    def hook(self: Any, trainer: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        module.seen.append(f"callback.{name}")

    return hook


for _name in HOOKS:
    setattr(AllHooks, _name, _hooked(_name))
CALLBACK_HOOKS = [
    name for name in vars(pl.Callback) if name.startswith("on_") and name not in ("on_exception", "on_load_checkpoint")
]
for _name in ("setup", "teardown", *CALLBACK_HOOKS):
    setattr(AllOfACallback, _name, _hooked_outside(_name))

case(
    "all hooks in their order",
    AllHooks,
    lambda: [
        ("fit", {"train_dataloaders": points(8), "val_dataloaders": points(9)}),
        ("validate", {"dataloaders": points(9), "verbose": False}),
        ("test", {"dataloaders": points(9), "verbose": False}),
        ("predict", {"dataloaders": points(9)}),
    ],
    max_epochs=2,
    accumulate_grad_batches=2,
)


class BringsItsData(Classifier):
    """Has loaders of its own, and hooks around them."""

    prepared = False

    def prepare_data(self) -> None:
        self.prepared = True

    def setup(self, stage: str) -> None:
        assert self.prepared == (self.trainer.local_rank == 0)
        self.seen.append(("setup", stage))

    def configure_sharded_model(self) -> None:
        self.seen.append("configure_sharded_model")

    def on_validation_model_zero_grad(self) -> None:
        self.seen.append("on_validation_model_zero_grad")
        super().on_validation_model_zero_grad()

    def train_dataloader(self) -> Any:
        return points(20)

    def val_dataloader(self) -> Any:
        return points(9, seed=1)

    def test_dataloader(self) -> Any:
        return points(9, seed=2)

    predict_dataloader = test_dataloader

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self.logits(batch[0]), batch[1]))


case(
    "a module with loaders of its own",
    BringsItsData,
    lambda: [("fit", {}), ("validate", {"verbose": False}), ("test", {"verbose": False}), ("predict", {})],
    val_check_interval=2,
    accumulate_grad_batches=2,
)

# Logging


class Logs(Classifier):
    """Logs in all ways."""

    def _log_all(self, name: str, batch: Any, batch_idx: int) -> Any:
        logits = self.logits(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.log(f"{name}/default", loss)
        self.log(f"{name}/both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log(f"{name}/epoch", loss, on_step=False, on_epoch=True)
        self.log_dict({f"{name}/a": loss, f"{name}/b": 2.0 * loss}, on_step=False, on_epoch=True)
        for reduction in ("mean", "sum", "max", "min"):
            self.log(f"{name}/{reduction}", logits.mean(), reduce_fx=reduction, on_step=False, on_epoch=True)
        self.log(f"{name}/weighted", loss, batch_size=batch_idx + 1, on_step=False, on_epoch=True)
        self.log(f"{name}/synchronised", loss, sync_dist=True, on_step=False, on_epoch=True)
        self.log(f"{name}/first_rank", loss, rank_zero_only=True, on_step=False, on_epoch=True)
        self.log(f"{name}/hidden", loss, logger=False)
        self.log(f"{name}/number", float(batch_idx))
        if batch_idx % 2:
            self.log(f"{name}/sometimes", loss, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._log_all("train", batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self._log_all("val", batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self._log_all("test", batch, batch_idx)

    def on_train_start(self) -> None:
        self.log("hook/train_start", 1.0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("hook/batch", float(outputs["loss"]), on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("hook/epoch_end", float(self.current_epoch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("hook/validation_end", 3.0, prog_bar=True)
        self.log("hook/sum", 3.0, reduce_fx="sum", sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("hook/before_step", float(self.global_step))


case(
    "logs of all kinds",
    Logs,
    lambda: [*fitting(train=18)(), ("test", {"dataloaders": points(13), "verbose": False})],
    max_epochs=2,
    log_every_n_steps=1,
    accumulate_grad_batches=2,
)


class LogsOnTheWay(Classifier):
    """Logs, and gives to metrics, what the model is about to go on with."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner = tm.MeanMetric(), tm.MaxMetric()
        self.after = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)))

    def _step(self, name: str, batch: Any) -> Any:
        self.log(f"{name}/samples", float(len(batch[0])), on_epoch=True)
        self.before(batch[0].mean())
        self.log(f"{name}/before", self.before, on_step=True, on_epoch=True)
        h = self.net(batch[0])
        self.log(f"{name}/inner", h.norm(), on_epoch=True)
        self.inner.update(h.abs().max())
        self.log(f"{name}/inner_max", self.inner, on_step=False, on_epoch=True)
        h = self.after(h)
        self.inner.update(h.abs().max())
        loss = F.cross_entropy(self.head(h), batch[1])
        self.log(f"{name}/loss", loss, on_epoch=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._step("train", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self._step("val", batch)


case("logs in the middle of the model", LogsOnTheWay, fitting(), max_epochs=2)

# Metrics


class OrderMatters(tm.Metric):
    """A metric of a user's own: states of batches do not add up."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("value", torch.zeros((), dtype=torch.float64))

    def update(self, x: Tensor) -> None:
        self.value = 0.5 * self.value + x.double().mean()

    def compute(self) -> Tensor:
        return self.value


class Measures(Classifier):
    """Uses metrics in all ways, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = nn.ModuleDict({f"{kind}_": self._metrics() for kind in ("train", "val", "test")})
        self.plain_list = [tm.MeanMetric()]

    @staticmethod
    def _metrics() -> nn.ModuleDict:
        return nn.ModuleDict(
            {
                "accuracy": tm.Accuracy("multiclass", num_classes=CLASSES),
                "auroc": tm.AUROC("multiclass", num_classes=CLASSES),
                "never": tm.AUROC("multiclass", num_classes=CLASSES),
                "matrix": tm.ConfusionMatrix("multiclass", num_classes=CLASSES),
                "retrieval": tm.RetrievalMRR(),
                "cosine": tm.CosineSimilarity(reduction="mean"),
                "mean": tm.MeanMetric(),
                "largest": tm.MaxMetric(),
                "cat": tm.CatMetric(),
                "collection": metrics_of_all_kinds(),
                "pearson": tm.PearsonCorrCoef(),
                "own": OrderMatters(),
                "minmax": tm.wrappers.MinMaxMetric(tm.MeanMetric()),
                "running": tm.wrappers.Running(tm.SumMetric(), window=2),
            }
        )

    def _step(self, kind: str, batch: Any) -> Any:
        m = self.metrics[f"{kind}_"]
        logits = self.logits(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        m["accuracy"](logits, batch[1])
        self.log(f"{kind}/accuracy", m["accuracy"], on_step=True, on_epoch=True)
        m["auroc"].update(logits, batch[1])
        self.log(f"{kind}/auroc", m["auroc"], on_step=False, on_epoch=True)
        m["matrix"].update(logits, batch[1])
        m["retrieval"].update(logits[:, 0], batch[1] == 0, indexes=torch.zeros_like(batch[1]) + len(batch[1]) % 2)
        m["cosine"].update(logits, batch[0][:, :CLASSES])
        m["mean"].update(loss, weight=len(batch[0]))
        m["largest"](loss)
        m["cat"].update(logits[:, 0])
        values = m["collection"](logits, batch[1])
        self.log(f"{kind}/of_batch", values["m_recall"], on_step=False, on_epoch=True)
        self.log_dict({f"{kind}/{name}": metric for name, metric in m["collection"].items()}, on_epoch=True)
        m["pearson"](logits[:, 0], batch[0][:, 0])
        self.log(f"{kind}/pearson", m["pearson"], on_step=False, on_epoch=True)
        m["own"](logits)
        self.log(f"{kind}/own", m["own"], on_step=True, on_epoch=True)
        m["minmax"].update(loss)
        m["running"](loss)
        self.plain_list[0].update(loss)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._step("train", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self._step("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self._step("test", batch)

    def _end(self, kind: str) -> None:
        m = self.metrics[f"{kind}_"]
        for name in ("matrix", "retrieval", "cosine", "mean", "largest", "cat", "minmax", "running"):
            self.seen.append((kind, name, m[name].compute()))
            m[name].reset()
        self.seen.append((kind, "plain", self.plain_list[0].compute()))
        self.plain_list[0].reset()
        self.log(f"{kind}/hand", self.seen[-1][-1])

    def on_train_epoch_end(self) -> None:
        self._end("train")

    def on_validation_epoch_end(self) -> None:
        self._end("val")

    def on_test_epoch_end(self) -> None:
        self._end("test")


case(
    "metrics of all kinds",
    Measures,
    lambda: [*fitting(train=18)(), ("test", {"dataloaders": points(13), "verbose": False})],
    max_epochs=2,
    num_sanity_val_steps=0,
)


class MeasuresInHooks(Classifier):
    """Updates metrics from what steps return."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = tm.Accuracy("multiclass", num_classes=CLASSES)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.logits(batch[0])

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.accuracy.update(outputs, batch[1])
        self.seen.append(self.accuracy.compute())

    def on_validation_epoch_end(self) -> None:
        self.log("accuracy", self.accuracy)


case("metrics in hooks", MeasuresInHooks, fitting())

# Other ways of running the model than training's


class Partly(Classifier):
    """Validation does without the end of the model, prediction without its beginning."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("norm", self.net[1](self.net[0](batch[0])).norm())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.head(self.net[4](batch[0]))


case(
    "parts of the model",
    Partly,
    lambda: [*fitting()(), ("predict", {"dataloaders": points(18, 4)})],
)


class Otherwise(Classifier):
    """Evaluation has a branch of its own."""

    def logits(self, x: Tensor) -> Tensor:
        h = self.net(x)
        return self.head(h) if self.training else self.head(h).softmax(-1).log()


case("a branch for evaluation", Otherwise, fitting())


class BackAndForth(Classifier):
    """Validation uses the layers in another order."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.net(batch[0])
        for layer in reversed(self.net):
            h = layer(h)
        self.log("val_loss", F.cross_entropy(self.head(h), batch[1]))


case("layers in another order", BackAndForth, fitting())


class Twice(Classifier):
    """Averages over two passes: what the first gave crosses the whole of the second."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.logits(batch[0]) + self.logits(batch[0].flip(-1))
        self.log("val_loss", F.cross_entropy(logits, batch[1]))
        return logits

    predict_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:  # noqa: F811
        x, outputs = batch[0], []
        while len(outputs) < 2 + batch_idx % 2:  # as many passes as the data say
            logits = self.logits(x)
            x = x + F.pad(logits, (0, WIDTH - CLASSES))
            outputs.append(logits.argmax(-1))
        return torch.stack(outputs)


case(
    "passes that depend on each other",
    Twice,
    lambda: [*fitting()(), ("predict", {"dataloaders": points(18, 4)})],
)


class Differentiates(Classifier):
    """Validation needs gradients with respect to the input."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self.logits(x).sum(), x)
        self.log("slope", gradient.norm())


case("gradients in validation", Differentiates, fitting(), inference_mode=False)


class Generates(pl.LightningModule):
    """A language model of `transformers`; what it predicts are texts of its own."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"n_layer": 4, "n_head": 2, "n_embd": 8, "vocab_size": 19, "n_positions": 16}
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        self.model = GPT2LMHeadModel(GPT2Config(**sizes, **off, bos_token_id=0, eos_token_id=0, pad_token_id=0))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(input_ids=batch, labels=batch).loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model.generate(batch[:, :3], max_new_tokens=4, do_sample=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.3)


def texts(count: int) -> Any:
    return DataLoader(torch.arange(7 * count).reshape(count, 7) * 5 % 18 + 1, batch_size=3)


case(
    "a language model that generates",
    Generates,
    lambda: [
        ("fit", {"train_dataloaders": texts(9), "val_dataloaders": texts(7)}),
        ("predict", {"dataloaders": texts(5)}),
    ],
)

WHOLE = {"a language model that generates", "passes that depend on each other", "gradients in validation"}
"""Cases with a step that runs whole on every device."""


class Adds(Classifier):
    """Logs only what does not depend on how a batch is divided, and metrics whose states add up."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.ModuleDict({f"{kind}_": self._metrics() for kind in ("train", "val")})
        self.in_hooks = tm.Accuracy("multiclass", num_classes=CLASSES)
        self.in_hooks_too = tm.AUROC("multiclass", num_classes=CLASSES)

    @staticmethod
    def _metrics() -> nn.ModuleDict:
        return nn.ModuleDict(
            {
                "accuracy": tm.Accuracy("multiclass", num_classes=CLASSES),
                "auroc": tm.AUROC("multiclass", num_classes=CLASSES),
                "matrix": tm.ConfusionMatrix("multiclass", num_classes=CLASSES),
                "collection": metrics_of_all_kinds(),
            }
        )

    def _step(self, kind: str, batch: Any) -> Any:
        m, logits = self.kinds[f"{kind}_"], self.logits(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        both = {"on_step": True, "on_epoch": True}
        self.log(f"{kind}/loss", loss, **both)
        self.log(f"{kind}/largest", logits.max(), reduce_fx="max", **both)
        for name in ("accuracy", "auroc"):
            m[name](logits, batch[1])
            self.log(f"{kind}/{name}", m[name], **both)
        m["matrix"].update(logits, batch[1])
        m["collection"](logits, batch[1])
        self.log_dict({f"{kind}/{name}": metric for name, metric in m["collection"].items()}, **both)
        return {"loss": loss, "logits": logits}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._step("train", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self._step("val", batch)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.in_hooks.update(outputs["logits"], batch[1])
        self.in_hooks_too.update(outputs["logits"], batch[1])

    def on_validation_epoch_end(self) -> None:
        self.seen.append(self.kinds["val_"]["matrix"].compute())
        self.seen.append(self.kinds["train_"]["matrix"].compute())
        self.log("in_hooks", self.in_hooks.compute())
        self.log("in_hooks_too", self.in_hooks_too)
        self.in_hooks.reset()


def divided(how: How, replicas: int = 1, num_stages: int = STAGES, **strategy: Any) -> Any:
    """Train and validate on batches of 8 samples, of which each replica sees its share."""
    takes = Takes()
    replica = int(os.environ.get("LOCAL_RANK", "0")) // num_stages

    def loader(count: int, seed: int) -> Any:
        data = Classified(count, seed)
        sampler = DistributedSampler(data, replicas, replica, shuffle=False)
        return DataLoader(data, 8 // replicas, sampler=sampler)

    done = run(
        Adds,
        how,
        ("fit", {"train_dataloaders": loader(32, 0), "val_dataloaders": loader(24, 1)}),
        strategy={"num_stages": num_stages, "data_parallel_size": replicas, **strategy} if how != "one" else None,
        callbacks=[takes],
        max_epochs=2,
    )
    seen = [entry for entry in takes.seen if isinstance(entry[0], str)]  # not outputs, of which each has its own
    return seen, done.module.seen
