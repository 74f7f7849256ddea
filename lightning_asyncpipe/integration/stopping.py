"""``trainer.should_stop``, set on one rank, ends training on all of them after the same batch.

Lightning's own callbacks decide together with all ranks. Code of the user's may not, and a rank that stops alone leaves
the others waiting. What is set in ``training_step`` or before it travels with the records of the batch. What is set
later is agreed where the loops look at it: after validation and at the end of an epoch, and after each batch where
code of the user's runs in a hook there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_asyncpipe.integration import guards
from lightning_asyncpipe.integration.world import World

_AFTER_THE_STEP = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_train_batch_end",
)


class AgreedStop:
    """Keeps ``should_stop`` the same on all ranks.

    Replaces ``on_advance_end`` of the fit loop and its epoch loop on the trainer given, checked on Lightning 2.6.6.

    Args:
        trainer: the trainer that fits.
        world: collectives over all ranks.
        meet: told where this rank is before it waits for the others.
    """

    def __init__(self, trainer: pl.Trainer, world: World, meet: Callable[[str], None]) -> None:
        self._trainer = trainer
        self._world = world
        self._meet = meet
        self._fit_loop = trainer.fit_loop
        self._epoch_loop = trainer.fit_loop.epoch_loop
        self._after_batches = any(guards.overrides(trainer, hook) for hook in _AFTER_THE_STEP)
        self._epoch_loop.on_advance_end = self._batch_ended  # type: ignore[method-assign]
        self._fit_loop.on_advance_end = self._epoch_ended  # type: ignore[method-assign]

    def restore(self) -> None:
        """Give the loops their own methods back."""
        self._epoch_loop.__dict__.pop("on_advance_end", None)
        self._fit_loop.__dict__.pop("on_advance_end", None)

    def agree(self) -> None:
        """Every rank stops if any would; all ranks call it at the same point."""
        if self._world.size > 1:
            self._meet("asks whether training goes on")
            mine = torch.tensor([int(self._trainer.should_stop)])
            self._trainer.should_stop = any(bool(flag) for flag in self._world.begin_all_gather(mine)())

    def _batch_ended(self, data_fetcher: Any) -> None:
        if self._after_batches:
            self.agree()
        loop = self._epoch_loop
        validated = loop.val_loop.batch_progress.total.ready
        type(loop).on_advance_end(loop, data_fetcher)
        if loop.val_loop.batch_progress.total.ready != validated:
            self.agree()

    def _epoch_ended(self) -> None:
        type(self._fit_loop).on_advance_end(self._fit_loop)
        self.agree()
