"""Every use of a private part of Lightning, in one place.

Each entry names the versions it was checked on; ``tests/integration/test_internals.py`` fails first when one moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim.swa_utils import AveragedModel
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum


def collect_random_states() -> dict[str, Any]:
    """The states of torch's, numpy's and Python's generators. ``_collect_rng_states``, checked on 2.6.6."""
    return _collect_rng_states(include_cuda=False)


def set_random_states(states: dict[str, Any]) -> None:
    """Set what :func:`collect_random_states` gave. ``_set_rng_states``, checked on 2.6.6."""
    _set_rng_states(states)


def step_follows(trainer: pl.Trainer) -> bool:
    """Whether the batch of the running ``training_step`` ends a window. ``_should_accumulate``, checked on 2.6.6."""
    return not trainer.fit_loop._should_accumulate()


def total_batch_index(trainer: pl.Trainer) -> int:
    """Number of the running batch over all epochs."""
    return trainer.fit_loop.epoch_loop.total_batch_idx


@contextmanager
def one_batch_later(trainer: pl.Trainer, stepped: bool, last: bool = False) -> Iterator[None]:
    """Let ``batch_idx``, ``global_step``, ``is_last_batch`` and the like be those of the next batch.

    Writes the loops' progress counters, checked on 2.6.6.

    Args:
        stepped: whether an optimizer step lies between the running batch and the next.
        last: whether the next batch is the last of its epoch.
    """
    loop = trainer.fit_loop.epoch_loop
    batches = loop.batch_progress
    steps = loop.automatic_optimization.optim_progress.optimizer.step.total
    batches.current.ready += 1
    batches.total.ready += 1
    steps.completed += int(stepped)
    was_last, batches.is_last_batch = batches.is_last_batch, last
    try:
        yield
    finally:
        batches.current.ready -= 1
        batches.total.ready -= 1
        steps.completed -= int(stepped)
        batches.is_last_batch = was_last


def set_up_training_data(trainer: pl.Trainer) -> None:
    """Create the training loaders now, as the fit loop would at its start.

    ``FitLoop.setup_data``, which returns early when it is called again; checked on 2.6.6.
    """
    trainer.fit_loop.setup_data()


class Termination:
    """SIGTERM, noted when it comes and acted on by all ranks after the same batch.

    Lightning's own handler waits in a collective, and its training loop makes one before every batch; a rank that waits
    for a message at that time would never join. Replaced on the trainer given, checked on 2.6.6:
    ``_SignalConnector._sigterm_notifier_fn`` and ``_TrainingEpochLoop._broadcast_sigterm_tensor``.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.pending = False
        self._trainer = trainer
        self._connector = trainer._signal_connector
        self._loop = trainer.fit_loop.epoch_loop
        self._connector._sigterm_notifier_fn = self._note  # type: ignore[assignment, method-assign]
        self._loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def _note(self, signum: Any, frame: Any) -> None:
        launcher = self._trainer.strategy.launcher
        if not self.pending and launcher is not None:
            launcher.kill(signum)
        self.pending = True

    def agreed(self) -> None:
        """Some rank got the signal: let the loop end after this batch, on every rank."""
        self._connector.received_sigterm = True

    def restore(self) -> None:
        """Give the trainer its own handling back."""
        self._connector.__dict__.pop("_sigterm_notifier_fn", None)
        self._loop.__dict__.pop("_broadcast_sigterm_tensor", None)


class ValidationClock:
    """Lets all ranks validate when it is time on the first one, where the interval is a time.

    Lightning looks at the clock of each process, ``_TrainingEpochLoop._should_check_val_fx`` with
    ``Trainer._val_check_time_interval``, replaced on the trainer given; checked on 2.6.6.

    Args:
        trainer: the trainer that fits.
        agree: gives every rank the decision of the first one; all ranks call it at the same point.
    """

    def __init__(self, trainer: pl.Trainer, agree: Callable[[bool], bool]) -> None:
        self._loop = trainer.fit_loop.epoch_loop
        self._agree = agree
        if trainer._val_check_time_interval is not None:  # type: ignore[attr-defined]
            self._loop._should_check_val_fx = self._is_time  # type: ignore[method-assign]

    def _is_time(self, data_fetcher: Any) -> bool:
        return self._agree(type(self._loop)._should_check_val_fx(self._loop, data_fetcher))

    def restore(self) -> None:
        """Give the loop its own method back."""
        self._loop.__dict__.pop("_should_check_val_fx", None)


class AveragingCallback:
    """A ``WeightAveraging`` whose copy of the model, and what it does with it, can be replaced.

    ``_average_model``, ``_swap_models``, ``_copy_average_to_current``; checked on 2.6.6.
    """

    def __init__(self, callback: WeightAveraging) -> None:
        self._callback = callback

    @property
    def average(self) -> AveragedModel:
        """The copy; there is one from the callback's ``setup`` on."""
        assert self._callback._average_model is not None
        return self._callback._average_model

    def replace(self, swap: Callable[[Any], None], copy: Callable[[Any], None], save: Callable[..., None]) -> None:
        """Swap weights and averages, copy averages to weights, and save, in another way."""
        vars(self._callback).update(_swap_models=swap, _copy_average_to_current=copy, on_save_checkpoint=save)

    def restore(self) -> None:
        """Give the callback its own methods back, without a copy of the model."""
        for name in ("_swap_models", "_copy_average_to_current", "on_save_checkpoint"):
            vars(self._callback).pop(name, None)
        self._callback._average_model = None


def validation_in_fit(trainer: pl.Trainer) -> bool:
    """Whether ``fit`` would run the validation loop. ``enable_validation`` and the loop's data source, 2.6.6."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    return bool(trainer.enable_validation) and bool(loop._data_source.is_defined())


def io_or_default(io: CheckpointIO | None, default: Callable[[], CheckpointIO]) -> CheckpointIO:
    """The plugin that was given, if any; one that wraps another and has none gets the default to wrap.

    ``_WrappingCheckpointIO``, whose setter leaves a plugin that is there alone; checked on 2.6.6.
    """
    if io is None:
        return default()
    if isinstance(io, _WrappingCheckpointIO):
        io.checkpoint_io = default()
    return io


def evaluation_loop(
    trainer: pl.Trainer,
) -> tuple[Literal["validation", "test", "predict"], _EvaluationLoop | _PredictionLoop]:
    """The loop that ``validate``, ``test`` or ``predict`` runs, and its kind."""
    function = trainer.state.fn
    if function == TrainerFn.VALIDATING:
        return "validation", trainer.validate_loop
    if function == TrainerFn.TESTING:
        return "test", trainer.test_loop
    return "predict", trainer.predict_loop


# torchmetrics, checked on 1.9.0


def is_reducible(metric: Metric, name: str) -> bool:
    """Whether a state of a metric is a sum, a maximum, a minimum or a concatenation over batches."""
    reduction = metric._reductions[name]
    if reduction is None:
        return isinstance(metric._defaults[name], list)
    return reduction in (dim_zero_sum, dim_zero_max, dim_zero_min, dim_zero_cat)


def reduce_metric_states(metric: Metric, before: dict[str, Any]) -> None:
    """Add an earlier state to the one that a metric has, as ``Metric.forward`` does. ``Metric._reduce_states``."""
    with torch.no_grad():
        metric._reduce_states(before)
    metric._computed = None
    if metric.compute_on_cpu:
        metric._move_list_states_to_cpu()


def metric_attributes(metric: Metric) -> list[tuple[Metric, dict[str, Any]]]:
    """What a metric and those inside it hold, to be set again; lists and dicts that are no states are copied."""
    return [
        (
            part,
            {
                name: value.copy() if type(value) in (list, dict) and name not in part._defaults else value
                for name, value in part.__dict__.items()
            },
        )
        for part in metric.modules()
        if isinstance(part, Metric)
    ]


def set_metric_attributes(metric: Metric, attributes: list[tuple[Metric, dict[str, Any]]]) -> None:
    """Set what :func:`metric_attributes` gave."""
    for part, saved in attributes:
        part.__dict__.clear()
        part.__dict__.update(saved)
