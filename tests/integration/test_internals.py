"""The private parts of Lightning and torch that the package leans on are where they were."""

from __future__ import annotations

import inspect

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_asyncpipe._private import overflow_checks, preserve_versions, rerouted, total_norm_rerouted
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
    from torch.nn.utils import clip_grad_norm_, get_total_norm

    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.full((2,), 3.0)
    seen = []

    def norm(*args, local, **kwargs):
        seen.append(float(local(*args, **kwargs)))
        return torch.tensor(6.0)

    with total_norm_rerouted(norm):
        assert clip_grad_norm_([weight], 3.0) == 6.0
        assert weight.grad == pytest.approx(torch.full((2,), 1.5))
        assert get_total_norm([weight.grad]) == 6.0
    assert seen == pytest.approx([18**0.5, 4.5**0.5])
    assert clip_grad_norm_([weight], 10.0) == pytest.approx(4.5**0.5)
    assert get_total_norm([weight.grad]) == pytest.approx(4.5**0.5)


def test_a_function_is_rerouted_under_every_name_and_restored_when_its_target_raises():
    from lightning.pytorch.utilities import grad_norm
    from lightning.pytorch.utilities.grads import grad_norm as by_another_name

    def raising(module, norm_type, group_separator="/", *, local):
        raise ZeroDivisionError(sorted(local(module, norm_type, group_separator)))

    module = torch.nn.Linear(1, 1)
    module.weight.grad = torch.ones(1, 1)
    before = grad_norm(module, 2)
    assert before
    with rerouted(grad_norm, raising), pytest.raises(ZeroDivisionError, match=r"grad_2.0_norm\|weight"):
        by_another_name(module, 2, group_separator="|")
    assert by_another_name(module, 2) == before
    with rerouted(grad_norm, lambda *args, local: 1), rerouted(grad_norm, lambda *args, local: local(*args) + 1):
        assert grad_norm(module, 2) == 2
    assert grad_norm(module, 2) == before


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("owns", [False, True])
@pytest.mark.parametrize("overflow", [False, True])
def test_a_scaler_acts_on_what_all_ranks_have_found(fused, owns, overflow):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], fused=fused)
    if not owns:
        optimizer.param_groups[0]["params"].clear()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    weight.grad = torch.full((2,), 8.0)
    found = []

    def agree(own):
        found.append(own)
        return torch.tensor(float(overflow))

    with overflow_checks(scaler, agree):
        if not fused:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert found == [torch.zeros(()) if owns else None]
    assert scaler.get_scale() == (2.0 if overflow else 4.0)
    assert torch.equal(weight.detach(), torch.ones(2)) == (overflow or not owns)
    assert not {"unscale_", "_check_inf_per_device"} & vars(scaler).keys()


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


def test_the_loop_asks_for_the_time_of_validation_where_it_is_replaced():
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, val_check_interval="00:00:01:00")
    loop = trainer.fit_loop.epoch_loop
    assert "self._should_check_val_fx(data_fetcher)" in inspect.getsource(type(loop).on_advance_end)
    loop._should_check_val_epoch = lambda: True
    trainer._last_val_time = float("-inf")
    asked: list[bool] = []
    clock = internals.ValidationClock(trainer, lambda mine: bool(asked.append(mine)))
    assert not loop._should_check_val_fx(object())
    assert asked == [True]
    clock.restore()
    assert loop._should_check_val_fx(object())


def test_averaging_callbacks_call_what_is_replaced():
    kind = WeightAveraging
    for name in ("on_validation_epoch_start", "on_validation_epoch_end"):
        assert "self._swap_models(pl_module)" in inspect.getsource(getattr(kind, name))
    assert "self._copy_average_to_current(pl_module)" in inspect.getsource(kind.on_train_end)
    assert "self._average_model.update_parameters(pl_module)" in inspect.getsource(kind.on_train_batch_end)
    callback, called = kind(), []
    callback.setup(None, pl.LightningModule(), "fit")
    averaging = internals.AveragingCallback(callback)
    assert averaging.average is callback._average_model
    averaging.replace(called.append, called.append, lambda *args: None)
    callback.on_validation_epoch_start(None, 1)
    callback.on_train_end(None, 2)
    averaging.restore()
    callback.on_validation_epoch_start(None, 3)  # there is no copy any more
    assert called == [1, 2]
    assert set(vars(callback)) == set(vars(kind()))


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


def test_loaders_are_resumed_where_the_look_ahead_does_it(trainer):
    loop = type(trainer.fit_loop)
    source = inspect.getsource(loop.setup_data)
    assert source.index("self._load_combined_loader_states()") < source.index("iter(self._data_fetcher)")
    assert 'state_dict.get("combined_loader", [])' in inspect.getsource(loop.on_load_checkpoint)
    assert "not self.trainer.fit_loop.is_resuming" in inspect.getsource(type(trainer.fit_loop.epoch_loop).on_run_start)
    assert loop.restarting.fset is not None
    assert {"restarted_on_epoch_end"} <= set(dir(trainer.fit_loop))
    assert {"restarted_on_last"} <= set(dir(trainer.fit_loop.epoch_loop))


def test_a_writer_that_wraps_another_gets_ours_unless_it_has_one():
    own, default = TorchCheckpointIO(), TorchCheckpointIO()
    assert internals.io_or_default(None, lambda: default) is default
    assert internals.io_or_default(own, lambda: default) is own
    assert internals.io_or_default(AsyncCheckpointIO(), lambda: default).checkpoint_io is default
    assert internals.io_or_default(AsyncCheckpointIO(own), lambda: default).checkpoint_io is own
