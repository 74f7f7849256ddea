"""The private parts of Lightning and torch that the package leans on are where they were."""

from __future__ import annotations

import inspect

import lightning.pytorch as pl
import pytest
import torch

from lightning_asyncpipe._private import patched_total_norm, preserve_versions
from lightning_asyncpipe.integration import internals


@pytest.fixture
def trainer():
    return pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)


def test_an_update_in_place_between_forward_and_backward_passes_the_version_check():
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * weight).sum()
    with torch.no_grad(), preserve_versions([weight]):
        weight.add_(1.0)
    loss.backward()
    assert weight.grad.tolist() == [4.0, 4.0]


def test_a_write_outside_is_still_caught():
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * weight).sum()
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_clipping_asks_for_the_norm_where_it_is_replaced():
    from torch.nn.utils import clip_grad_norm_

    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.full((2,), 3.0)
    with patched_total_norm(lambda *args, local, **kwargs: torch.tensor(6.0)):
        assert clip_grad_norm_([weight], 3.0) == 6.0
    assert weight.grad == pytest.approx(torch.full((2,), 1.5))
    assert clip_grad_norm_([weight], 10.0) == pytest.approx(4.5**0.5)


def test_the_loop_asks_for_termination_where_it_is_replaced(trainer):
    loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(type(loop).advance)
    assert "self._sigterm_notifier_fn" in inspect.getsource(type(connector).register_signal_handlers)
    termination = internals.Termination(trainer)
    loop._broadcast_sigterm_tensor()
    connector._sigterm_notifier_fn(15, None)
    assert termination.pending
    assert not trainer.received_sigterm
    termination.agreed()
    assert trainer.received_sigterm
    termination.restore()
    assert "_broadcast_sigterm_tensor" not in vars(loop)


def test_an_early_forward_sees_the_counters_of_its_own_batch(trainer):
    trainer.strategy._lightning_module = pl.LightningModule()
    before = trainer.global_step, trainer.fit_loop.batch_idx, trainer.fit_loop.total_batch_idx
    with internals.one_batch_later(trainer, stepped=True):
        now = trainer.global_step, trainer.fit_loop.batch_idx, trainer.fit_loop.total_batch_idx
    assert now == tuple(n + 1 for n in before)
    assert (trainer.global_step, trainer.fit_loop.batch_idx, trainer.fit_loop.total_batch_idx) == before
    with internals.one_batch_later(trainer, stepped=False):
        assert trainer.global_step == before[0]
    with internals.one_batch_later(trainer, stepped=True, last=True):
        assert trainer.is_last_batch
    assert not trainer.is_last_batch


def test_random_states_can_be_collected_and_set():
    states = internals.collect_random_states()
    first = torch.rand(3)
    internals.set_random_states(states)
    assert torch.equal(torch.rand(3), first)
