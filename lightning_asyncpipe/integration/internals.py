"""Every use of a private part of Lightning, in one place.

Each entry names the versions it was checked on; ``tests/integration/test_internals.py`` fails first when one moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states


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


def validation_in_fit(trainer: pl.Trainer) -> bool:
    """Whether ``fit`` would run the validation loop. ``enable_validation`` and the loop's data source, 2.6.6."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    return bool(trainer.enable_validation) and bool(loop._data_source.is_defined())
