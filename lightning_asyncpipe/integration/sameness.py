"""Settings that must be the same on every rank, compared at the start.

The ranks run one training between them: a learning rate, a number of batches to accumulate or a width that is another
one on some of them would train a model that nobody asked for, or leave ranks waiting for each other. A digest is
exchanged, and the settings themselves only where it differs.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_asyncpipe.integration.world import World
from lightning_asyncpipe.runtime.step_state import step_state

if TYPE_CHECKING:
    from lightning_asyncpipe.strategy import AsyncMultiPipeStrategy

Settings = dict[str, str]

_OF_THE_TRAINER = (
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "max_epochs",
    "min_epochs",
    "max_steps",
    "min_steps",
    "precision",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "overfit_batches",
    "fast_dev_run",
    "val_check_interval",
    "check_val_every_n_epoch",
    "num_sanity_val_steps",
    "reload_dataloaders_every_n_epochs",
)
_OF_THE_STRATEGY = (
    "max_staleness",
    "weight_stash",
    "staleness_correction",
    "split_backward",
    "cuts",
    "partition",
    "memory_limit",
    "plan",
    "save_distributed_checkpoint",
    "message_backend",
)
_LONGEST = 120  # characters of a value in a message
_ONE_VALUE = (
    "Let all of them have the same value; one that is drawn at random has to be drawn after `seed_everything`, and "
    "must not be made from the rank."
)
ONE_INSTALLATION = (
    "Install the same versions on every machine, and the same copy of this package: the ranks make their schedules, "
    "each its own."
)


def check_settings(strategy: AsyncMultiPipeStrategy, trainer: pl.Trainer) -> None:
    """Compare what is installed, and what the Trainer, the strategy and the module were made with; all ranks call it.

    Raises:
        MisconfigurationException: names the setting, its values and their ranks.
    """
    module = strategy.lightning_module
    assert module is not None
    world = strategy.world
    _exchange(world, versions(), partial(require_alike, advice=ONE_INSTALLATION))
    settings = {**settings_of_the_trainer(trainer), **settings_of_the_strategy(strategy)}
    _exchange(world, settings, require_alike)
    submodules = frozenset(name for name, _ in module.named_modules() if name)
    _exchange(world, settings_of_the_module(module), partial(compare_modules, submodules=submodules))


def check_optimizers(strategy: AsyncMultiPipeStrategy) -> None:
    """Compare what ``configure_optimizers`` returned; every rank has to call it.

    Raises:
        MisconfigurationException: as :func:`check_settings`.
    """
    module = strategy.lightning_module
    assert module is not None
    _exchange(
        strategy.world,
        settings_of_optimizers(strategy.optimizers, strategy.lr_scheduler_configs, module),
        require_alike,
    )


@cache
def versions() -> Settings:
    """The versions of what schedules and results depend on; of this package, which may be a copy, also its sources."""
    from lightning_asyncpipe import __version__  # which imports this module

    return {
        "The version of torch": torch.__version__,
        "The version of Lightning": lightning.__version__,
        "The version of lightning-asyncpipe": f"{__version__} (sources {fingerprint(Path(__file__).parents[1])})",
    }


def fingerprint(folder: Path) -> str:
    """Eight digits that stand for the names and contents of the Python sources in a folder."""
    digest = hashlib.blake2b(digest_size=4)
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def settings_of_the_trainer(trainer: pl.Trainer) -> Settings:
    """The Trainer's arguments that decide what is trained, and when."""
    return {f"Trainer({name}=...)": _shown(getattr(trainer, name, None)) for name in _OF_THE_TRAINER}


def settings_of_the_strategy(strategy: AsyncMultiPipeStrategy) -> Settings:
    """The strategy's arguments that decide how."""
    arguments = {**strategy.asked_numbers(), **{name: getattr(strategy, name) for name in _OF_THE_STRATEGY}}
    return {f"{type(strategy).__name__}({name}=...)": _shown(value) for name, value in arguments.items()}


def settings_of_the_module(module: nn.Module) -> Settings:
    """Numbers, strings and the like in attributes of a module and its submodules; private ones are state."""
    public = {name: value for name, value in step_state(module).items() if "._" not in f".{name}"}
    return {f"self.{name}": _shown(value) for name, value in public.items()}


def settings_of_optimizers(optimizers: Sequence[Any], schedulers: Iterable[Any], module: nn.Module) -> Settings:
    """Classes, options and parameters of optimizers, and of the schedulers of their learning rates."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    schedulers = list(schedulers)
    # What others follow from comes first: a scheduler adds options to groups, and takes rates from them.
    settings: Settings = {"the optimizer": ", ".join(type(optimizer).__name__ for optimizer in optimizers)}
    of = "of the learning rate scheduler"
    for config in schedulers:
        settings["the learning rate scheduler"] = type(config.scheduler).__name__
        for key in ("interval", "frequency", "monitor", "reduce_on_plateau", "strict"):
            settings[f"`{key}` {of}"] = _shown(getattr(config, key, None))
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            here = f"of the optimizer's parameter group {number}"
            settings[f"the parameters {here}"] = ", ".join(names.get(id(p), "?") for p in group["params"])
            settings |= {f"`{key}` {here}": _shown(value) for key, value in group.items() if key != "params"}
    for config in schedulers:
        plain = {key: value for key, value in vars(config.scheduler).items() if _plain(value)}
        settings |= {f"`{key.lstrip('_')}` {of}": _shown(value) for key, value in plain.items()}
    return settings


def require_alike(rows: Sequence[Mapping[str, str]], advice: str = _ONE_VALUE) -> None:
    """Raise for the first setting that is not the same on every rank.

    Args:
        rows: each rank's settings.
        advice: what to do.

    Raises:
        MisconfigurationException: names the setting, its values and their ranks.
    """
    for name, values in _differing(rows):
        raise MisconfigurationException(
            f"{name} is not the same on every rank: {_by_value(values)}. The ranks run one training between them. "
            f"{advice}"
        )


def compare_modules(rows: Sequence[Mapping[str, str]], submodules: frozenset[str]) -> None:
    """As :func:`require_alike` for attributes of submodules; of other attributes, which the step need not use, warn.

    What is on some ranks only is left to the comparison of parameters, and what says which rank this is, alone.

    Args:
        rows: of each rank, from :func:`settings_of_the_module`.
        submodules: their names.

    Raises:
        MisconfigurationException: names the attribute, its values and their ranks.
    """
    ranks = [str(rank) for rank in range(len(rows))]
    firsts = [str(rank == 0) for rank in range(len(rows))]
    found = [each for each in _differing(rows) if _MISSING not in each[1] and each[1] not in (ranks, firsts)]
    certain = [name for name, _ in found if name.removeprefix("self.").rpartition(".")[0] in submodules]
    require_alike([{f"`{name}`": row[name] for name in certain} for row in rows])
    for name, values in found:
        rank_zero_warn(
            f"`{name}` is not the same on every rank: {_by_value(values)}. The ranks run different parts of "
            "`training_step`: if it uses that, what it computes belongs to no value at all. Seed what is drawn at "
            "random in `__init__` with `seed_everything`."
        )


_MISSING = "not there"


def _exchange(world: World, settings: Settings, compare: Callable[[Sequence[Settings]], None]) -> None:
    if world.size == 1:
        return
    text = "\x1f".join(f"{name}\x1e{value}" for name, value in sorted(settings.items()))
    digests = world.all_gather(hashlib.blake2b(text.encode(), digest_size=16).hexdigest())
    if len(set(digests)) > 1:
        compare(world.all_gather(settings))


def _differing(rows: Sequence[Mapping[str, str]]) -> Iterable[tuple[str, list[str]]]:
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name, _MISSING) for row in rows]
        if len(set(values)) > 1:
            yield name, values


def _by_value(values: Sequence[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(
        f"{value[:_LONGEST]} on rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"
        for value, found in ranks.items()
    )


def _plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    return isinstance(value, (bool, int, float, str, type(None)))


def _shown(value: Any) -> str:
    """A value as text that is the same wherever the value is."""
    if isinstance(value, Tensor):
        return repr(value.item()) if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_shown(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_shown, value)) + "]"
    if _plain(value):
        return repr(value)
    if isinstance(value, type) or inspect.isroutine(value):
        return str(value.__qualname__)
    return str(value) if hasattr(value, "__fspath__") else type(value).__qualname__
