"""A training that goes on from a checkpoint is the training that was not interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from lightning_asyncpipe import ReferenceStrategy
from tests.support.edge_basics import Regression, sized
from tests.support.edges import PartsOnOneDevice
from tests.support.fit import Losses, fit
from tests.support.resuming import LOADERS, PER_EPOCH, Saves, draw, emulated

pytestmark = pytest.mark.filterwarnings("ignore")

PLANS = {
    "one device": lambda: PartsOnOneDevice(4),
    "3 stages": lambda: ReferenceStrategy(3, num_microbatches=4, max_staleness=0),
    "2 stages, 1 pipeline": lambda: ReferenceStrategy(2, num_pipelines=1, num_microbatches=4, max_staleness=0),
}
STEPS = 2, PER_EPOCH + 3  # in the middle of an epoch
PLACES = {
    "resumable": ("step-2", "step-8", "epoch-0", "epoch-1"),
    "resumable without a length": ("step-2", "step-8", "epoch-1"),
    "shuffled": ("epoch-0", "epoch-1"),
    "shuffled by a generator of its own": ("epoch-0", "epoch-1"),
}


def assert_goes_on(strategy: Any, loader: str, directory: Path, places: tuple[str, ...], **arguments: Any) -> None:
    """Resuming at each of these places gives the bits of the run that went on."""
    trainer, module = draw(strategy(), loader, Saves(directory, STEPS), **arguments)
    assert len(module.seen) > 2 * PER_EPOCH
    for place in places:
        resumed, other = draw(
            strategy(), loader, Saves(directory / "again", STEPS), directory / f"{place}.ckpt", **arguments
        )
        assert 0 < len(other.seen) < len(module.seen), place
        assert other.seen == module.seen[-len(other.seen) :], place
        for name, tensor in module.state_dict().items():
            assert torch.equal(other.state_dict()[name], tensor), (place, name)
        assert (resumed.global_step, resumed.current_epoch) == (trainer.global_step, trainer.current_epoch)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("staleness", [0, 1])
def test_the_bits_are_those_of_an_uninterrupted_run(staleness, loader, tmp_path):
    assert_goes_on(lambda: emulated(max_staleness=staleness), loader, tmp_path, PLACES[loader])


def test_also_where_steps_end_the_training(tmp_path):
    """Where Lightning itself would train one batch too many after an epoch's end."""
    assert_goes_on(emulated, "resumable", tmp_path, ("step-8", "epoch-0"), max_steps=13, max_epochs=-1)


def test_also_with_accumulated_and_clipped_gradients_and_stashed_weights(tmp_path):
    assert_goes_on(
        lambda: emulated(weight_stash=True),
        "resumable",
        tmp_path,
        ("epoch-0", "epoch-1"),
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
    )


@pytest.mark.parametrize("plan", ["one device", "3 stages"])
def test_a_plain_loader_in_the_middle_of_an_epoch_begins_again_as_on_one_device(plan, tmp_path):
    loader = sized(5, 6, 7, 8, 9)
    fit(Regression().double(), loader, PLANS[plan](), callbacks=[Saves(tmp_path, (2,))], max_epochs=2)
    sizes = _Sizes()
    path = tmp_path / "step-2.ckpt"
    fit(Regression().double(), loader, PLANS[plan](), ckpt_path=path, callbacks=[sizes], max_epochs=2)
    assert sizes.seen == [(2, 5), (3, 6), (4, 7), (0, 5), (1, 6), (2, 7), (3, 8), (4, 9)]


class _Sizes(Losses):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((batch_idx, len(batch[0])))


# Between one device and pipelines, and from plan to plan


class Grouped(Regression):
    """Parameter groups in another order than the model's, a momentum, and a schedule by epoch."""

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        groups = [{"params": parameters[1::2]}, {"params": parameters[::2], "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("3 stages", "one device"),
        ("one device", "3 stages"),
        ("3 stages", "2 stages, 1 pipeline"),
    ],
)
def test_training_goes_on_elsewhere(first, second, tmp_path):
    torch.manual_seed(1)
    whole = Grouped().double()
    batches = sized(8, 8, 8, 5)
    saves = Saves(tmp_path)
    fit(whole, batches, PLANS[first](), callbacks=[saves], max_epochs=3)
    module = Grouped().double()
    trainer, losses = fit(module, batches, PLANS[second](), ckpt_path=tmp_path / "epoch-0.ckpt", max_epochs=3)
    assert len(losses) == 8
    assert trainer.optimizers[0].param_groups[1]["lr"] == 1e-2 * 0.5**3
    for name, tensor in whole.state_dict().items():
        assert torch.allclose(module.state_dict()[name], tensor, rtol=0, atol=1e-12), name


def _single(samples: list[Any]) -> list[torch.Tensor]:
    return [part.float() for part in default_collate(samples)]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_training_goes_on_in_another_precision(precision, tmp_path):
    fit(Grouped().double(), sized(8, 8, 8), emulated(), callbacks=[Saves(tmp_path)])
    saved = torch.load(tmp_path / "epoch-0.ckpt", weights_only=True)["optimizer_states"][0]["state"]
    module = Grouped()
    kept: dict[int, Any] = {}

    class Keeps(Losses):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            kept.update(trainer.optimizers[0].state_dict()["state"])
            kept[0] = {key: value.clone() for key, value in kept[0].items()}

    fit(
        module,
        sized(8, 8, 8, collate=_single),
        emulated(),
        ckpt_path=tmp_path / "epoch-0.ckpt",
        precision=precision,
        max_epochs=2,
        callbacks=[Keeps()],
    )
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {parameter.dtype for parameter in module.parameters()} == {dtype}
    assert kept[0]["exp_avg"].dtype == dtype
    assert torch.equal(kept[0]["exp_avg"], saved[0]["exp_avg"].to(dtype))
    assert all(parameter.isfinite().all() for parameter in module.parameters())
