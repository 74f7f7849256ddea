"""Every use of a private part of Lightning, in one place.

Each entry names the versions it was checked on; ``tests/integration/test_internals.py`` fails first when one moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
def one_batch_later(trainer: pl.Trainer, stepped: bool) -> Iterator[None]:
    """Let ``batch_idx``, ``global_step`` and the like be those of the next batch.

    Writes the loops' progress counters, checked on 2.6.6.

    Args:
        stepped: whether an optimizer step lies between the running batch and the next.
    """
    loop = trainer.fit_loop.epoch_loop
    batches = loop.batch_progress
    steps = loop.automatic_optimization.optim_progress.optimizer.step.total
    batches.current.ready += 1
    batches.total.ready += 1
    steps.completed += int(stepped)
    try:
        yield
    finally:
        batches.current.ready -= 1
        batches.total.ready -= 1
        steps.completed -= int(stepped)


def set_up_training_data(trainer: pl.Trainer) -> None:
    """Create the training loaders now, as the fit loop would at its start.

    ``FitLoop.setup_data``, which returns early when it is called again; checked on 2.6.6.
    """
    trainer.fit_loop.setup_data()


def replace_sigterm_broadcast(trainer: pl.Trainer, check: Callable[[], None]) -> Callable[[], None]:
    """Replace the broadcast that the training loop makes before every batch by `check`; returns the way back.

    ``_TrainingEpochLoop._broadcast_sigterm_tensor``, checked on 2.6.6.
    """
    loop = trainer.fit_loop.epoch_loop
    if not hasattr(loop, "_broadcast_sigterm_tensor"):
        return lambda: None
    loop._broadcast_sigterm_tensor = check  # type: ignore[method-assign]

    def restore() -> None:
        loop.__dict__.pop("_broadcast_sigterm_tensor", None)

    return restore


def validation_in_fit(trainer: pl.Trainer) -> bool:
    """Whether ``fit`` would run the validation loop. ``enable_validation`` and the loop's data source, 2.6.6."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    return bool(trainer.enable_validation) and bool(loop._data_source.is_defined())
