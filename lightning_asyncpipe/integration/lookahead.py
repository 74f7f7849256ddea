"""The fit loop that looks ahead at its next batch, and that resumes loaders which are made before a checkpoint is read.

The strategy sets up the training data early, since it plans from the first batch: see
:class:`~lightning_asyncpipe.integration.fetcher.LookAheadFetcher`, the fetcher that shows it.

Everything private that it uses was checked on Lightning 2.6.6.
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.data import _auto_add_worker_init_fn, _set_sampler_epoch
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop

from lightning_asyncpipe.integration import internals
from lightning_asyncpipe.integration.fetcher import LookAheadFetcher as LookAheadFetcher
from lightning_asyncpipe.integration.fetcher import Start
from lightning_asyncpipe.integration.resuming import Randomness, set_generator_states


class _LookAheadFitLoop(_FitLoop):
    """Lightning's fit loop with a fetcher that looks ahead, and that resumes loaders made before a checkpoint was read.

    Lightning loads the states of loaders in ``setup_data``, which returns early where there are loaders. So they are
    started anew once it has resumed everything else.
    """

    resumed: Randomness | None = None
    _loader_states: list[dict[str, Any]]
    _starts_epoch = False
    _start: Start | None = None

    @property
    def restarting(self) -> bool:
        """Whether the epoch that a checkpoint was saved in goes on.

        Lightning also answers yes after an epoch's end where `max_steps` is set, so that a validation at that end could
        go on; where there is none, it would train one more batch in the epoch that has ended.
        """
        return self._restarting

    @restarting.setter
    def restarting(self, restarting: bool) -> None:
        _FitLoop.restarting.fset(self, restarting)
        progress: Any = self.epoch_progress.current
        ended = progress.ready == progress.started == progress.processed
        if restarting and ended and not self.trainer.enable_validation:
            _Loop.restarting.fset(self, False)  # type: ignore[attr-defined]

    def _load_combined_loader_states(self) -> None:
        super()._load_combined_loader_states()
        if self._combined_loader is not None:  # they are started next
            self._start = Start.of(self._combined_loader)

    def setup_data(self) -> None:
        loader = self._combined_loader
        super().setup_data()
        fetcher = self._adopt_fetcher()
        if fetcher is not None and loader is not self._combined_loader:
            self._set_sampler_epochs(fetcher)  # a peek may come before Lightning does this

    def on_save_checkpoint(self) -> dict[str, Any]:
        state = super().on_save_checkpoint()
        if "combined_loader" in state and isinstance(self._data_fetcher, LookAheadFetcher):
            state["combined_loader"] = self._data_fetcher.loader_states()
        return state

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self._loader_states = state_dict.get("combined_loader", [])

    def on_run_start(self) -> None:
        resuming = self.is_resuming
        super().on_run_start()
        fetcher = self._data_fetcher
        if resuming and isinstance(fetcher, LookAheadFetcher):
            self._resume(fetcher)  # after the hooks of the start, which an uninterrupted run does not call

    def advance(self) -> None:
        fetcher = self._data_fetcher
        if self._starts_epoch and isinstance(fetcher, LookAheadFetcher):
            fetcher.begin()  # where a run that was not interrupted does it
        self._starts_epoch = False
        super().advance()

    @property
    def _epoch(self) -> int:
        """The epoch for which Lightning sets the samplers."""
        progress: Any = self.epoch_progress.current
        return int(progress.processed)

    def _adopt_fetcher(self) -> LookAheadFetcher | None:
        fetcher = self._data_fetcher
        if fetcher is not None and not isinstance(fetcher, LookAheadFetcher):
            fetcher = self._data_fetcher = LookAheadFetcher.adopt(fetcher, self.trainer, self._start)
        return fetcher

    def _set_sampler_epochs(self, fetcher: LookAheadFetcher) -> None:
        fetcher.epoch = self._epoch
        for loader in fetcher.combined_loader.flattened:
            _set_sampler_epoch(loader, fetcher.epoch)

    def _resume(self, fetcher: LookAheadFetcher) -> None:
        """Start again loaders that were set up, and perhaps peeked, before the checkpoint was read."""
        resumed, self.resumed = self.resumed, None
        again = fetcher.rewind()
        states, self._loader_states = self._loader_states, []
        self._combined_loader_states_to_load = []
        if states and self.restarting:
            fetcher.combined_loader._load_state_dicts(states)
        self._set_sampler_epochs(fetcher)
        in_epoch = self.restarting and not self.epoch_loop.batch_progress.is_last_batch
        if in_epoch and states:
            fetcher.begin(None if resumed is None else resumed.before_next)
            if resumed is not None and resumed.before_next is not None:
                fetcher.peek()
        elif again:
            if resumed is not None:
                set_generator_states(fetcher.combined_loader.flattened, resumed.generators)
            if in_epoch or self.restarted_on_epoch_end or self.epoch_loop.restarted_on_last:
                fetcher.begin()  # and none for an epoch that has no batch left
            else:
                self._starts_epoch = True
        if resumed is not None:
            internals.set_random_states(resumed.states)


def install(trainer: Trainer, resumed: Randomness | None = None) -> LookAheadFetcher | None:
    """Make ``trainer`` fit with a ``LookAheadFetcher``, now and whenever it reloads its loaders.

    Call it before or after ``fit_loop.setup_data``; again does no harm.

    Args:
        trainer: before it restores its loops.
        resumed: the random states with which the training goes on that this ``fit`` resumes.

    Returns:
        The fetcher; None if ``setup_data`` has not run or there is nothing to train on.

    Raises:
        MisconfigurationException: ``training_step`` takes a ``dataloader_iter``.

    """
    loop = trainer.fit_loop
    if type(loop) is _FitLoop:
        loop.__class__ = _LookAheadFitLoop
    elif not isinstance(loop, _LookAheadFitLoop):  # the user's own fit loop
        loop.__class__ = type(type(loop).__name__, (_LookAheadFitLoop, type(loop)), {})
    assert isinstance(loop, _LookAheadFitLoop)
    loop.resumed, loop._loader_states, loop._starts_epoch = resumed, [], False
    fetcher = loop._adopt_fetcher()
    if fetcher is not None and loop._combined_loader is not None and not fetcher.fetched:
        loop._set_sampler_epochs(fetcher)
    return fetcher


def fetcher_of(trainer: Trainer) -> LookAheadFetcher | None:
    """The fetcher that ``trainer`` fits with, None if it has none that looks ahead."""
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher if isinstance(fetcher, LookAheadFetcher) else None


def seed_workers(dataloader: object, replica: int) -> None:
    """Seed the workers of a loader by replica, where ``seed_everything(workers=True)`` was called.

    Lightning would seed them by global rank, and the ranks of one replica would draw different
    augmentations of the same samples. A ``worker_init_fn`` of the user's own stays.
    """
    _auto_add_worker_init_fn(dataloader, replica)
