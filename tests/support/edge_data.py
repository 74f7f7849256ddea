"""Scenarios about data and loops: what batches look like, how many there are, and when a training ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.support.edge_basics import WIDTH, Points, Regression, shuffled, sized, stream
from tests.support.edges import Scenarios
from tests.support.models import GPT, LanguageModel, Rows

DATA = Scenarios()


DATA.add("sizes that do not divide", Regression, lambda: sized(10, 10, 10, 10))
DATA.add("sizes that change", Regression, lambda: sized(7, 10, 3, 9, 2, 6))
DATA.add("a last batch smaller than M", Regression, lambda: sized(8, 8, 8, 3))
DATA.add("a last batch of one sample", Regression, lambda: sized(8, 8, 8, 1))
DATA.add("batches of one sample", Regression, lambda: sized(1, 1, 1, 1))
DATA.add("one micro-batch for each batch", Regression, lambda: sized(4, 4, 4, 4), strategy={"num_microbatches": 1})
DATA.add(
    "a short last window of batches of different sizes",
    Regression,
    lambda: sized(7, 10, 3, 9, 8, 5, 4),
    arguments={"accumulate_grad_batches": 3, "gradient_clip_val": 0.2},
)
DATA.add(
    "sizes that change over epochs with windows",
    Regression,
    lambda: sized(7, 10, 3, 9, 8),
    arguments={"accumulate_grad_batches": 2, "max_epochs": 3},
)


class Lengths(Dataset[Tensor]):
    """Rows whose length changes from batch to batch."""

    def __init__(self, lengths: Sequence[int], size: int) -> None:
        self.batches = [Rows(size, length, seed=i).rows for i, length in enumerate(lengths)]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Tensor:
        return self.batches[index]


DATA.add(
    "sequence lengths that change from batch to batch",
    lambda: LanguageModel(GPT(blocks=3)),
    lambda: DataLoader(Lengths([8, 5, 8, 11, 2, 5], 6), batch_size=None),
)


# What batches look like


@dataclass
class Batch:
    x: Tensor
    y: Tensor
    name: str = "train"
    scale: float = 1.0


@dataclass(frozen=True)
class Nested:
    inputs: Batch
    weights: list[Tensor]
    note: Any = None


class Named(NamedTuple):
    x: Tensor
    y: Tensor
    ids: list[str]


def _stacked(samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


def as_dict(samples: Any) -> dict[str, Any]:
    x, y = _stacked(samples)
    names = [f"sample {i}" for i in range(len(samples))]
    return {"kind": "train", "x": x, "y": y, "names": names, "temperature": 0.5, "missing": None, "flags": {"deep": 3}}


def as_nested(samples: Any) -> tuple[Any, ...]:
    x, y = _stacked(samples)
    return ({"inner": [x, {"deep": (y, "text")}]}, 7, torch.tensor(2.0, dtype=x.dtype))


def as_dataclass(samples: Any) -> Batch:
    return Batch(*_stacked(samples))


def as_named(samples: Any) -> Named:
    return Named(*_stacked(samples), [str(i) for i in range(len(samples))])


class FromDict(Regression):
    def inputs(self, batch: Any) -> tuple[Tensor, Tensor]:
        assert batch["kind"] == "train"
        assert batch["missing"] is None
        assert batch["flags"] == {"deep": 3}
        assert len(batch["names"]) == len(batch["x"])
        return batch["x"] * batch["temperature"], batch["y"]


class FromNested(Regression):
    def inputs(self, batch: Any) -> tuple[Tensor, Tensor]:
        (tensors, number, scale) = batch
        x, deep = tensors["inner"]
        y, text = deep["deep"]
        assert (number, text) == (7, "text")
        return x * scale, y


class FromDataclass(Regression):
    def inputs(self, batch: Any) -> tuple[Tensor, Tensor]:
        assert type(batch) is Batch
        assert batch.name == "train"
        return batch.x * batch.scale, batch.y


class FromNamed(Regression):
    def inputs(self, batch: Any) -> tuple[Tensor, Tensor]:
        assert type(batch) is Named
        assert len(batch.ids) == len(batch.x)
        return batch.x, batch.y


DATA.add("batches that are dicts", FromDict, lambda: sized(7, 10, 3, 2, collate=as_dict))
DATA.add("batches that are nested", FromNested, lambda: sized(7, 10, 3, 2, collate=as_nested))
DATA.add("batches that are dataclasses", FromDataclass, lambda: sized(7, 10, 3, 2, collate=as_dataclass))
DATA.add("batches that are named tuples", FromNamed, lambda: sized(7, 10, 3, 2, collate=as_named))


class ChangesItsBatch(FromDict):
    """Takes its batch apart and writes to its tensors."""

    def inputs(self, batch: Any) -> tuple[Tensor, Tensor]:
        y = batch.pop("y")
        y += 0.5
        batch["x"].mul_(2.0)
        batch["names"].clear()
        batch["scaled"] = batch["x"] - 0.1
        return batch["scaled"], y


DATA.add("a step that changes its batch", ChangesItsBatch, lambda: sized(7, 10, 3, 2, collate=as_dict))


class NoIndex(Regression):
    def training_step(self, batch: Any) -> Any:
        return super().training_step(batch, 0)


class Indexed(Regression):
    """Weighs batches by their number and remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1.0 + batch_idx) * (1.0 + 0.1 * self.global_step)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((batch_idx, self.global_step, len(batch[0])))


DATA.add("a step without batch_idx", NoIndex, lambda: sized(7, 10, 3, 2))
DATA.add(
    "a step that uses batch_idx and global_step",
    Indexed,
    lambda: sized(7, 10, 3, 2, 8),
    arguments={"max_epochs": 2, "accumulate_grad_batches": 2},
)


# How many batches there are


DATA.add("a data set without a length", Regression, lambda: stream(19, 5), arguments={"max_epochs": 3})
DATA.add(
    "a data set without a length and windows",
    Regression,
    lambda: stream(23, 5),
    arguments={"max_epochs": 2, "accumulate_grad_batches": 2},
)
DATA.add("several epochs with shuffling", Regression, lambda: shuffled(19, 5), arguments={"max_epochs": 3})
DATA.add("max_steps in mid-epoch", Regression, lambda: shuffled(40, 5), arguments={"max_steps": 11, "max_epochs": -1})
DATA.add(
    "max_steps in mid-epoch with windows",
    Regression,
    lambda: shuffled(40, 5),
    arguments={"max_steps": 5, "max_epochs": -1, "accumulate_grad_batches": 3},
)
DATA.add(
    "limit_train_batches", Regression, lambda: shuffled(40, 5), arguments={"limit_train_batches": 3, "max_epochs": 2}
)
DATA.add(
    "limit_train_batches of a data set without a length",
    Regression,
    lambda: stream(40, 5),
    arguments={"limit_train_batches": 3, "max_epochs": 2},
)
DATA.add("a share of the batches", Regression, lambda: shuffled(40, 5), arguments={"limit_train_batches": 0.5})


class Augmented(Points):
    """Adds noise to each sample when it is read."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(WIDTH, dtype=x.dtype), y + 0.1 * torch.rand((), dtype=y.dtype)


class RemembersTargets(Regression):
    """Takes down the targets of all batches."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch[1].clone())


class WithItsOwnLoader(RemembersTargets):
    """Makes a loader of other data for each epoch."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Points(19, seed=self.current_epoch), 5)


class Module(pl.LightningDataModule):
    """Scales the batches on their way to the device."""

    def setup(self, stage: str) -> None:
        self.points = Points(19)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.points, 5)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [0.5 * batch[0], batch[1]]


for workers in (0, 1):
    DATA.add(
        f"shuffling and augmentation with {workers} workers",
        RemembersTargets,
        lambda workers=workers: DataLoader(Augmented(15), 5, shuffle=True, num_workers=workers),
        arguments={"max_epochs": 3},
    )
DATA.add(
    "loaders that are made for each epoch",
    WithItsOwnLoader,
    lambda: None,
    arguments={"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1},
)
DATA.add("a data module", RemembersTargets, Module, arguments={"max_epochs": 2})
DATA.add(
    "overfit_batches",
    RemembersTargets,
    lambda: shuffled(40, 5),
    arguments={"overfit_batches": 2, "max_epochs": 2},
)
DATA.add("fast_dev_run", RemembersTargets, lambda: shuffled(40, 5), arguments={"fast_dev_run": 3})
DATA.add("detect_anomaly", RemembersTargets, lambda: sized(8, 5, 8), arguments={"detect_anomaly": True})
DATA.add("a profiler", RemembersTargets, lambda: sized(8, 5, 8), arguments={"profiler": "simple"})


class Paired(Regression):
    """Steps on the batches of two loaders at once."""

    def inputs(self, batch: Any) -> tuple[Tensor, Tensor]:
        (x, y), (other, target) = batch["long"], batch["short"]
        return torch.cat([x, other], 1).reshape(-1, WIDTH), torch.stack([y, target], 1).reshape(-1)


class MaybeMissing(Regression):
    """`max_size` gives None for the loader that has ended."""

    def inputs(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch["long"]
        return (x, y) if batch["short"] is None else (x + 0.1 * batch["short"][0], y)


def combined(mode: Any) -> CombinedLoader:
    loaders = {"long": DataLoader(Points(20), 4), "short": DataLoader(Points(8, seed=1), 4)}
    return CombinedLoader(loaders, mode)


DATA.add("combined loaders that cycle", Paired, lambda: combined("max_size_cycle"), arguments={"max_epochs": 2})
DATA.add("combined loaders to the shortest", Paired, lambda: combined("min_size"), arguments={"max_epochs": 2})
DATA.add("combined loaders to the longest", MaybeMissing, lambda: combined("max_size"), arguments={"max_epochs": 2})


# When a training ends


class Stop(pl.Callback):
    """Asks the trainer to stop after some batches."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step >= self.after:
            trainer.should_stop = True


class StopAtBatch(Stop):
    """Asks the trainer to stop after a batch, whether or not it ended with a step."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = batch_idx >= self.after


DATA.add(
    "a callback that stops",
    Regression,
    lambda: shuffled(40, 5),
    arguments=lambda: {"max_epochs": 3, "callbacks": [Stop(5)]},
)
DATA.add(
    "a callback that stops within a window",
    Regression,
    lambda: shuffled(40, 5),
    arguments=lambda: {"max_epochs": 3, "callbacks": [StopAtBatch(4)], "accumulate_grad_batches": 3},
)
DATA.add(
    "early stopping on a training metric",
    Regression,
    lambda: shuffled(20, 5),
    arguments=lambda: {
        "max_epochs": 8,
        "callbacks": [EarlyStopping("loss_epoch", patience=1, min_delta=0.05, check_on_train_epoch_end=True)],
    },
)


class StopsItself(Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


DATA.add("a batch start that ends the epoch", StopsItself, lambda: shuffled(40, 5), arguments={"max_epochs": 2})
