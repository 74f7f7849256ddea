"""What Lightning's loops do with a batch before its step, done ahead of them.

A batch that is looked at early is prepared then. The loop's own preparation of it, which follows when it is handed out,
leaves it as it is, so every hook sees every batch once. Everything private that is used was checked on Lightning 2.6.6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer import call


def prepare(trainer: Trainer, batch: Any, dataloader_idx: int) -> Any:
    """The batch as its step receives it: converted and on the device."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
    return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=dataloader_idx)


def pass_through(trainer: Trainer, batch: Any) -> None:
    """Let the loop's own preparation of ``batch``, which follows at once, leave it as it is."""
    _return_unchanged_once(trainer.precision_plugin, "convert_input", batch)
    _return_unchanged_once(trainer.lightning_module, "_on_before_batch_transfer", batch)
    _return_unchanged_once(trainer.strategy, "batch_to_device", batch)


def _return_unchanged_once(owner: Any, name: str, batch: Any) -> None:
    """Make the next call of ``owner.name`` return its argument if that is ``batch``.

    The method is replaced for this one call only, so that nothing stays on the user's objects.
    """
    attributes: dict[str, Any] = vars(owner)
    replaced = name in attributes
    method: Callable[..., Any] = getattr(owner, name)

    def once(data: Any, *args: Any, **kwargs: Any) -> Any:
        if replaced:
            attributes[name] = method
        else:
            attributes.pop(name, None)
        return data if data is batch else method(data, *args, **kwargs)

    attributes[name] = once
