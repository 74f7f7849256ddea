"""What an ordinary run allows and a pipeline cannot: found early, with what to do instead."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_asyncpipe.plan.geometry import positive

_ONE_OPTIMIZER = "A pipeline steps one: put the parameters in parameter groups of one optimizer."
_OWN_PACKAGES = ("lightning.pytorch.", "lightning_asyncpipe.")


def check_arguments(
    max_staleness: object,
    weight_stash: object,
    staleness_correction: object,
    split_backward: object,
    cuts: object,
    timeout: object,
    start_method: object,
) -> None:
    """Refuse arguments of the strategy that have no meaning; numbers are checked once the world size is known.

    Raises:
        MisconfigurationException: says what was given and what is possible.

    """
    if isinstance(max_staleness, bool) or max_staleness not in (0, 1):
        raise MisconfigurationException(
            f"max_staleness must be 0 (synchronous) or 1, got {max_staleness!r}: the schedules keep "
            "forwards at most one update ahead."
        )
    if not isinstance(weight_stash, bool):
        raise MisconfigurationException(f"weight_stash must be True or False, got {weight_stash!r}")
    if staleness_correction not in ("auto", "none", "extrapolate", "predict"):
        raise MisconfigurationException(
            f"staleness_correction must be 'auto', 'none', 'extrapolate' or 'predict', got {staleness_correction!r}"
        )
    if weight_stash and staleness_correction in ("extrapolate", "predict"):
        raise MisconfigurationException(
            f"weight_stash=True and staleness_correction={staleness_correction!r} exclude each other: early forwards "
            "run either on the weights before the update or on those that it is expected to lead to. Leave one of them "
            "out."
        )
    if not isinstance(split_backward, bool) and split_backward != "auto":
        raise MisconfigurationException(f"split_backward must be True, False or 'auto', got {split_backward!r}")
    named = isinstance(cuts, Sequence) and not isinstance(cuts, str)
    if cuts != "auto" and not (named and all(isinstance(name, str) for name in cuts)):  # type: ignore[attr-defined]
        raise MisconfigurationException(
            f"cuts must be 'auto' or a list of the names of the modules that begin a stage, such as "
            f"['model.blocks.4'], got {cuts!r}"
        )
    if timeout is not None and not isinstance(timeout, timedelta):
        raise MisconfigurationException(
            f"timeout must be a datetime.timedelta, such as timedelta(minutes=30), got {timeout!r}"
        )
    if start_method not in ("popen", "spawn", "fork", "forkserver"):
        raise MisconfigurationException(
            f"start_method must be 'popen', 'spawn', 'fork' or 'forkserver', got {start_method!r}"
        )


def checked_numbers(**numbers: Any) -> dict[str, Any]:
    """The numbers of a plan as the user gave them; how they fit each other is seen once the world size is known.

    Raises:
        MisconfigurationException: one is neither "auto", where that is possible, nor an integer of at least 1.
    """
    for name, value in numbers.items():
        if value == "auto" and name != "data_parallel_size":
            continue
        try:
            positive(name, value, auto=name != "data_parallel_size")
        except ValueError as error:
            raise MisconfigurationException(str(error)) from None
    return numbers


def check_session(start_method: str) -> None:
    """Refuse to start processes in a way that an interactive session has no means for.

    Raises:
        MisconfigurationException: names the way that works.
    """
    if start_method != "fork" and (hasattr(sys, "ps1") or sys.flags.interactive):
        raise MisconfigurationException(
            f"start_method={start_method!r} runs the script once more in each process, and an interactive session "
            "(Jupyter, IPython) has none: use `Trainer(strategy=AsyncMultiPipeStrategy(start_method='fork'), ...)`, or "
            "run the code as a script"
        )


def check_module(module: LightningModule, trainer: Trainer) -> None:
    """Refuse what a pipeline cannot train, before anything is set up.

    Raises:
        MisconfigurationException: says what was found and what to do.

    """
    name = type(module).__name__
    if not is_overridden("training_step", module):
        raise MisconfigurationException(
            f"`{name}` has no `training_step`. Define one that returns the loss of a batch."
        )
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"`{name}.automatic_optimization` is False. Backwards and optimizer steps are part of "
            "the pipeline's schedule, so manual optimization is not supported. Return the loss "
            "from `training_step`, and remove `manual_backward` and the optimizer's calls."
        )
    if is_overridden("backward", module):
        raise MisconfigurationException(
            f"`{name}.backward` is overridden. The pipeline runs the backward stage by stage and "
            "never calls it. Remove it: scale the loss in `training_step`, change gradients in "
            "`on_before_optimizer_step`."
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise MisconfigurationException(
            f"`{name}.training_step` takes a `dataloader_iter`. The pipeline has to see a batch in "
            "order to split it. Take the batch as an argument: "
            "`def training_step(self, batch, batch_idx)`."
        )
    synchronised = [path for path, part in module.named_modules() if isinstance(part, torch.nn.SyncBatchNorm)]
    if synchronised or getattr(trainer.strategy, "_layer_sync", None) is not None:
        where = f"SyncBatchNorm ({synchronised[0]})" if synchronised else "`sync_batchnorm=True`"
        raise MisconfigurationException(
            f"{where} is not supported: the ranks of a pipeline run a layer at different times. "
            "Use BatchNorm, whose statistics are those of a micro-batch, or GroupNorm or LayerNorm."
        )
    _check_callbacks(trainer)


def _check_callbacks(trainer: Trainer) -> None:
    """Refuse Lightning's callbacks that need the whole model on every rank."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        name = type(callback).__name__
        if isinstance(callback, StochasticWeightAveraging):
            raise MisconfigurationException(
                f"`{name}` is not supported: it averages the weights that its rank sees, and each rank holds a part of "
                "the model. Use `WeightAveraging`, with a learning rate schedule of your own."
            )
        if isinstance(callback, WeightAveraging) and getattr(trainer.strategy, "save_distributed_checkpoint", False):
            raise MisconfigurationException(
                f"`{name}` puts a second model in each checkpoint, which `save_distributed_checkpoint=True` does not "
                "write in parts: leave one of them out."
            )
        if isinstance(callback, LearningRateFinder):
            raise MisconfigurationException(
                f"`{name}` is not supported: it trains, loads the weights from before and trains on within one `fit`, "
                "and each rank holds a part of the model. Find the learning rate on one device, or on a "
                "smaller model, and pass it to the module."
            )
        if isinstance(callback, ModelPruning):
            raise MisconfigurationException(
                f"`{name}` is not supported: it compares weights of the whole model, and each rank holds a part of it. "
                "Prune a checkpoint on one device, and go on training from it."
            )
        if isinstance(callback, BaseFinetuning):
            raise MisconfigurationException(
                f"`{name}` is not supported: which parameters are trained is part of the pipelines' plan. "
                "Freeze before `fit`; to unfreeze layers later, end the `fit` (`max_epochs`) and start another one on "
                "the same module."
            )


@contextmanager
def one_optimizer() -> Iterator[None]:
    """Around Lightning's set-up of optimizers, which advises manual optimization where there are several.

    The text of ``_validate_multiple_optimizers_support``, checked on Lightning 2.6.6.
    """
    try:
        yield
    except RuntimeError as error:
        if "multiple optimizers" not in str(error):
            raise
        raise MisconfigurationException(
            f"`configure_optimizers` returned several optimizers. {_ONE_OPTIMIZER}"
        ) from None


def note_unpredictable(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Say that updates of these optimizers cannot be told in advance."""
    rank_zero_info(
        f"staleness_correction='predict' knows Adam, AdamW, SGD and Muon of torch.optim, not "
        f"{', '.join(sorted({type(optimizer).__name__ for optimizer in optimizers}))}: early forwards run on "
        "extrapolated weights (staleness_correction='extrapolate')."
    )


def check_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse optimizers that a pipeline cannot step, after ``configure_optimizers``.

    Raises:
        MisconfigurationException: says what was found and what to do.

    """
    if len(optimizers) > 1:
        kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise MisconfigurationException(
            f"`configure_optimizers` returned {len(optimizers)} optimizers ({kinds}). {_ONE_OPTIMIZER}"
        )
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise MisconfigurationException(
                "LBFGS is not supported: it evaluates the loss several times in a step, and a "
                "batch passes the pipeline once. Use one that evaluates it once, such as AdamW."
            )


def check_distributed_save(io: CheckpointIO | None, storage_options: object) -> None:
    """Refuse what a checkpoint in parts has no use for.

    Raises:
        MisconfigurationException: a plugin, or options, for how one file is written.

    """
    given = "a CheckpointIO plugin" if io is not None else "`storage_options`" if storage_options is not None else ""
    if given:
        raise MisconfigurationException(
            f"`save_distributed_checkpoint=True` writes a folder by itself, and cannot use {given}: leave that out, or "
            "save one file (`save_distributed_checkpoint=False`)."
        )


_BETWEEN = (
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_train_batch_end",
)


def leave_exceptions_unsaved(trainer: Trainer) -> None:
    """Keep Lightning's callbacks from saving when an exception ends the run; warns where one would.

    Each process holds a part of the model then, and the others do not answer any more.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelCheckpoint) and callback.save_on_exception:
            callback.save_on_exception = False
            setting = "`ModelCheckpoint(save_on_exception=True)`"
        elif isinstance(callback, OnExceptionCheckpoint):
            callback.on_exception = lambda *_, **__: None  # type: ignore[method-assign]
            setting = "`OnExceptionCheckpoint`"
        else:
            continue
        rank_zero_warn(
            f"{setting} has no effect: after an exception each process holds a part of the model "
            "only, and the others cannot be asked for theirs. Save during training, for example "
            "with `ModelCheckpoint(every_n_train_steps=...)`."
        )


def overrides_train_batch_start(trainer: Trainer) -> str | None:
    """What runs user code in ``on_train_batch_start``, such as "MyModule.on_train_batch_start".

    Early forwards would run before that code, so they are off where it exists. Callbacks of
    Lightning and of this package do nothing there that a forward depends on. A
    ``LightningDataModule`` is not asked: Lightning never calls this hook on it.
    """
    return overrides(trainer, "on_train_batch_start")


def accumulates(trainer: Trainer) -> bool:
    """Whether some optimizer steps are of several batches."""
    scheduled = any(isinstance(c, GradientAccumulationScheduler) for c in trainer.callbacks)  # type: ignore[attr-defined]
    return scheduled or trainer.accumulate_grad_batches > 1


def runs_before_forwards(trainer: Trainer, synchronous: bool) -> str | None:
    """What runs user code between two batches that forwards of the second must not run before, if anything does.

    Synchronous training starts the second early only where both are of one optimizer step, and promises what one device
    gives: there any hook may change what the step reads. Asynchronous training promises it for the start of batches.
    """
    exact = synchronous and accumulates(trainer)
    return next((found for hook in _BETWEEN if exact and (found := overrides(trainer, hook))), None) or (
        overrides_train_batch_start(trainer)
    )


def overrides(trainer: Trainer, hook: str) -> str | None:
    """What runs user code in a hook of the module and of callbacks, such as "MyModule.on_train_batch_end"."""
    for owner in (trainer.lightning_module, *trainer.callbacks):  # type: ignore[attr-defined]
        defined_by = next((kind for kind in type(owner).__mro__ if hook in vars(kind)), None)
        is_own = defined_by is None or defined_by.__module__.startswith(_OWN_PACKAGES)
        if hook in vars(owner) or not is_own:
            return f"{type(owner).__name__}.{hook}"
    return None
