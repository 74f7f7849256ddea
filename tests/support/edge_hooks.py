"""Scenarios about what modules do around the step: outputs, hooks, clipping, schedules and logging."""

from __future__ import annotations

import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from torch.nn import functional as F

from tests.support.edge_basics import Regression, sized, stream
from tests.support.edges import Scenarios

HOOKS = Scenarios()
HOOK_SIZES = (8, 8, 5, 8, 3)
TWO_EPOCHS = {"max_epochs": 2}


# What a step gives back


class ReturnsMore(Regression):
    """Returns a dict, and takes down what arrives in `on_train_batch_end`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        predicted = self.net(x)
        error = predicted - y
        return {
            "loss": error.square().mean(),
            "predicted": predicted.detach(),
            "scalars": {"mean": error.mean(), "index": batch_idx},
            "names": [f"{value:.3f}" for value in y.tolist()],
            "kind": "train",
        }

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["predicted"].shape == batch[1].shape
        self.seen.append({key: value for key, value in outputs.items() if key != "loss"})


class Appends(Regression):
    """Appends to lists of the module in the step, and puts them together at the epoch's end."""

    def __init__(self) -> None:
        super().__init__()
        self.outs: list[Tensor] = []
        self.pairs: list[tuple[Tensor, float]] = []
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        predicted = self.net(x)
        loss = F.mse_loss(predicted, y)
        self.outs += list(predicted.detach())
        for target, value in zip(y, predicted, strict=True):
            self.pairs.append((target, float(value)))
        return loss

    def on_train_epoch_end(self) -> None:
        stacked = torch.stack(self.outs)
        self.log("mean_prediction", stacked.mean())
        self.seen.append((stacked, len(self.pairs), sum(value for _, value in self.pairs)))
        self.outs.clear()
        self.pairs = []


HOOKS.add("a step that returns a dict", ReturnsMore, lambda: sized(8, 8, 5, 8))
HOOKS.add("a step that appends to lists", Appends, lambda: sized(8, 8, 5, 8), arguments={"max_epochs": 2})


# Hooks


class EveryHook(Regression):
    """Takes down which hooks run, in which order, with which counters."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def _note(self, name: str, *values: Any) -> None:
        self.seen.append((name, self.global_step, self.current_epoch, *values))

    def on_fit_start(self) -> None:
        self._note("fit_start")

    def on_train_start(self) -> None:
        self._note("train_start")

    def on_train_epoch_start(self) -> None:
        self._note("epoch_start")

    def on_train_epoch_end(self) -> None:
        self._note("epoch_end")

    def on_train_end(self) -> None:
        self._note("train_end")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._note("batch_end", batch_idx, float(outputs["loss"]))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self._note("before_zero_grad")

    def on_before_backward(self, loss: Tensor) -> None:
        self._note("before_backward", float(loss))

    def on_after_backward(self) -> None:
        self._note("after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._note("before_optimizer_step")

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self._note("zero_grad", epoch, batch_idx)
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self._note("lr_step")
        super().lr_scheduler_step(scheduler, metric)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class StartsBatches(Regression):
    """Changes what the next forwards do, in `on_train_batch_start`."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 0.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.factor = 1.0 + batch_idx

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.factor


class StartsBatchesFromOutside(pl.Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        module.net.scale = 1.0 + 0.1 * batch_idx


class ChangesState(Regression):
    """Changes what the next step reads, an attribute and a buffer, in a hook between two batches."""

    average: Tensor

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.factor = 1.0
        self.register_buffer("average", torch.ones(()))
        ordinary = getattr(self, hook)

        def changes(*args: Any, **kwargs: Any) -> Any:
            self.factor *= 0.9
            if "before" in hook:  # the backward, which needs this tensor, is still to come
                self.average = self.average * 1.1
            else:
                self.average.mul_(1.1)
            return ordinary(*args, **kwargs)

        setattr(self, hook, changes)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.factor / self.average


class WarmsUp(Regression):
    """The warm-up of Lightning's documentation: the learning rate is set in `optimizer_step`."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 5:
            scale = min(1.0, float(self.trainer.global_step + 1) / 5)
            for group in optimizer.param_groups:
                group["lr"] = scale * 1e-2


class WarmsUpBefore(Regression):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + self.trainer.global_step)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class StepsEverySecond(Regression):
    """Runs the closure for every batch but steps at every second only, as Lightning's documentation shows."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class ClipsItself(Regression):
    """Clips with torch's own function before the step; takes down the norms, which are those of all gradients."""

    def __init__(self, norm: float = 2.0) -> None:
        super().__init__()
        self.norm = norm
        self.seen: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        total = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1, norm_type=self.norm)
        self.log("norm", total)
        self.seen.append(float(total))


class ClipsByGroup(Regression):
    """Clips the head and the rest apart, each by its own norm."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for part in (self.net.head, self.net.layers):
            self.seen.append(float(torch.nn.utils.clip_grad_norm_(part.parameters(), 0.05)))


class ConfiguresClipping(Regression):
    """Clips half as much after the second step."""

    def __init__(self, algorithm: str) -> None:
        super().__init__()
        self.algorithm = algorithm

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        limit = 0.1 if self.global_step < 2 else 0.05
        self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm=self.algorithm)


class ChangesGradients(Regression):
    """Reads and writes gradients between backward and step."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


HOOKS.add(
    "every hook, once and in order",
    EveryHook,
    lambda: sized(*HOOK_SIZES),
    arguments={"max_epochs": 2, "accumulate_grad_batches": 2},
)
HOOKS.add("a start of batches that is overridden", StartsBatches, lambda: sized(*HOOK_SIZES), arguments=TWO_EPOCHS)
HOOKS.add(
    "a callback that starts batches",
    Regression,
    lambda: sized(*HOOK_SIZES),
    arguments=lambda: {"max_epochs": 2, "callbacks": [StartsBatchesFromOutside()]},
)
CHANGES = Scenarios()
for hook in ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_train_batch_end"):
    CHANGES.add(
        f"state that is changed in {hook}",
        lambda hook=hook: ChangesState(hook),
        lambda: sized(*HOOK_SIZES),
        arguments={"max_epochs": 2, "accumulate_grad_batches": 2},
    )
HOOKS.add("warm-up by hand after the step", WarmsUp, lambda: sized(*HOOK_SIZES), arguments=TWO_EPOCHS)
HOOKS.add("warm-up by hand before the step", WarmsUpBefore, lambda: sized(*HOOK_SIZES), arguments=TWO_EPOCHS)
HOOKS.add("a step at every second batch only", StepsEverySecond, lambda: sized(*HOOK_SIZES), arguments=TWO_EPOCHS)
HOOKS.add("clipping by hand", ClipsItself, lambda: sized(*HOOK_SIZES), arguments=TWO_EPOCHS)
HOOKS.add(
    "clipping by hand by the largest entry",
    lambda: ClipsItself(float("inf")),
    lambda: sized(*HOOK_SIZES),
    arguments=TWO_EPOCHS,
)
HOOKS.add("clipping by hand, part by part", ClipsByGroup, lambda: sized(*HOOK_SIZES), arguments=TWO_EPOCHS)
for algorithm in ("norm", "value"):
    clipping = {"max_epochs": 2, "gradient_clip_val": 0.1, "gradient_clip_algorithm": algorithm}
    HOOKS.add(f"clipping by {algorithm}", Regression, lambda: sized(*HOOK_SIZES), arguments=clipping)
    HOOKS.add(
        f"configured clipping by {algorithm}",
        lambda algorithm=algorithm: ConfiguresClipping(algorithm),
        lambda: sized(*HOOK_SIZES),
        arguments=TWO_EPOCHS,
    )
HOOKS.add(
    "gradients changed after the backward",
    ChangesGradients,
    lambda: sized(*HOOK_SIZES),
    arguments={"max_epochs": 2, "accumulate_grad_batches": 1},
)


class Constrained(Regression):
    """Keeps its weights in a range, by a hook of the optimizer."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)

        @torch.no_grad()
        def constrain(optimizer: Any, args: Any, kwargs: Any) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.clamp_(-0.3, 0.3)

        optimizer.register_step_post_hook(constrain)
        return optimizer


class Saves(pl.Callback):
    """Saves after every batch, also within a window."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with tempfile.TemporaryDirectory() as directory:
            trainer.save_checkpoint(f"{directory}/saved.ckpt", weights_only=batch_idx % 2 == 0)


HOOKS.add("weights that are constrained", Constrained, lambda: sized(*HOOK_SIZES), arguments=TWO_EPOCHS)
HOOKS.add(
    "saving within windows",
    Regression,
    lambda: sized(*HOOK_SIZES),
    arguments=lambda: {"max_epochs": 2, "callbacks": [Saves()], "accumulate_grad_batches": 2},
)
HOOKS.add(
    "windows that a callback changes",
    Regression,
    lambda: sized(*HOOK_SIZES),
    arguments=lambda: {"max_epochs": 3, "callbacks": [GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})]},
)


# Schedules


class Scheduled(Regression):
    """With a learning-rate schedule of a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.seen: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.lr_schedulers().get_last_lr()[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedulers = torch.optim.lr_scheduler
        if self.kind == "step":
            config = {"scheduler": schedulers.ExponentialLR(optimizer, 0.7), "interval": "step", "frequency": 2}
        elif self.kind == "epoch":
            config = {"scheduler": schedulers.ExponentialLR(optimizer, 0.7), "interval": "epoch"}
        elif self.kind == "whole run":
            steps = int(self.trainer.estimated_stepping_batches)
            config = {"scheduler": schedulers.OneCycleLR(optimizer, 3e-2, total_steps=steps), "interval": "step"}
        else:
            scheduler = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
            config = {"scheduler": scheduler, "monitor": "loss_epoch"}
        return {"optimizer": optimizer, "lr_scheduler": config}


class ReadsRates(Scheduled):
    """Asks for the learning rate in the step, and logs it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rate = self.optimizers().param_groups[0]["lr"]
        self.log("rate", rate, prog_bar=True)
        self.log("last", self.lr_schedulers().get_last_lr()[0])
        return super().training_step(batch, batch_idx) * (1.0 + rate)


HOOKS.add(
    "a step that reads the learning rate",
    lambda: ReadsRates("epoch"),
    lambda: sized(*HOOK_SIZES),
    arguments=TWO_EPOCHS,
)
for kind in ("step", "epoch", "whole run", "plateau"):
    HOOKS.add(
        f"a schedule by {kind}",
        lambda kind=kind: Scheduled(kind),
        lambda: sized(*HOOK_SIZES),
        arguments={"max_epochs": 3, "accumulate_grad_batches": 2},
    )


# Logging


class Logs(Regression):
    """Logs everything in every way, before the model is called and after."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.log("input", x.mean(), on_step=True, on_epoch=True)
        predicted = self.net(x)
        error = (predicted - y).square()
        loss = error.mean()
        self.log("plain", loss)
        self.log("step", loss, on_step=True, on_epoch=False)
        self.log("epoch", loss, on_step=False, on_epoch=True)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("bar", error.mean(), prog_bar=True, logger=False)
        self.log("max", error.max(), reduce_fx="max", on_step=True, on_epoch=True)
        self.log("min", error.min(), reduce_fx=torch.min, on_step=False, on_epoch=True)
        self.log("sum", error.sum(), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("synced", loss, sync_dist=True)
        self.log("rank zero", loss, rank_zero_only=False)
        self.log("sized", loss, on_epoch=True, batch_size=len(x))
        self.log("number", 3.5, on_epoch=True)
        self.log("index", batch_idx, on_step=True)
        self.log_dict({"a": error.mean(), "b": 2 * error.mean()}, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("batch_end", outputs["loss"], on_step=True, on_epoch=True, batch_size=len(batch[0]))

    def on_train_epoch_end(self) -> None:
        self.log("weight", 1.5)


class LogsSometimes(Regression):
    """Logs some keys for some batches only."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 2:
            self.log("odd", loss, on_step=True, on_epoch=True)
        if self.current_epoch == 1:
            self.log("later", loss)
        return loss


HOOKS.add("logging now and then", LogsSometimes, lambda: sized(*HOOK_SIZES), arguments=TWO_EPOCHS)
HOOKS.add("logging", Logs, lambda: sized(*HOOK_SIZES), arguments=TWO_EPOCHS)
HOOKS.add(
    "logging of a data set without a length, with windows",
    Logs,
    lambda: stream(23, 5),
    arguments={"max_epochs": 2, "accumulate_grad_batches": 2, "log_every_n_steps": 1},
)
