"""Lightning's precision plugins, with the loss scaled and gradients unscaled in a pipeline.

A plugin's contexts surround each forward, as on one device. Its ``backward`` is never called, since backwards are part
of the schedule, and what it does around the optimizer's step sees what one rank owns. So the plugins are those whose
part in this is known: the loss is scaled where a micro-batch's backward begins, with the scale of its window even if
its forward ran before the last update of the scale; gradients are gathered scaled and unscaled once, by their owners;
and if one of them finds an overflow, all ranks skip the step and lower their scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor

from lightning_asyncpipe._private import is_compiled, overflow_checks
from lightning_asyncpipe.runtime.program import StageProgram
from lightning_asyncpipe.runtime.weight_copies import WeightCopies

_PLUGINS = (MixedPrecision, HalfPrecision, DoublePrecision, Precision)
_SCALERS = (torch.amp.GradScaler, torch.cuda.amp.GradScaler)
# What a plugin does to losses and gradients; a pipeline calls it with less than all of them, or not at all.
_BACKWARD = ("pre_backward", "backward", "post_backward")
_STEP = (
    "optimizer_step",
    "main_params",
    "clip_gradients",
    "clip_grad_by_norm",
    "clip_grad_by_value",
    "_clip_gradients",
    "_wrap_closure",
    "_after_closure",
)
_POSSIBLE = "'32-true', '64-true', 'bf16-true', '16-true', 'bf16-mixed' or '16-mixed'"


def check_precision(plugin: Precision) -> None:
    """Refuse precision plugins whose numerics the pipeline would not keep.

    A subclass of Lightning's own may change contexts and conversions, not what happens to losses and gradients.

    Raises:
        MisconfigurationException: says what was found and what to do.
    """
    kind = type(plugin)
    base = next(known for known in kind.__mro__ if known in _PLUGINS or known.__module__.startswith("lightning."))
    if base not in _PLUGINS:
        raise MisconfigurationException(
            f"The precision plugin {kind.__name__} is not supported: it keeps weights or gradients in forms of its "
            f"own, which stages of a pipeline do not exchange. Use precision {_POSSIBLE}."
        )
    for names, why, instead in (
        (_BACKWARD, "backwards run stage by stage, so it would not act on them", "change the loss in `training_step`"),
        (
            _STEP,
            "it would see the gradients of one rank alone, each rank others",
            "override `configure_gradient_clipping` or `on_before_optimizer_step` of the LightningModule",
        ),
    ):
        for name in names:
            if name in vars(plugin) or getattr(kind, name, None) is not getattr(base, name, None):
                raise MisconfigurationException(
                    f"The precision plugin {kind.__name__} overrides `{name}`, which is not supported: {why}. Use "
                    f"precision {_POSSIBLE}, and {instead}."
                )
    scaler = getattr(plugin, "scaler", None)
    if scaler is None:
        return
    if base is not MixedPrecision:
        raise MisconfigurationException(
            f"The precision plugin {kind.__name__} has a scaler, {type(scaler).__name__}, which nothing would use. Use "
            "precision '16-mixed' for a scaled loss."
        )
    if type(scaler) not in _SCALERS:
        raise MisconfigurationException(
            f"The scaler {type(scaler).__name__} is not supported: all ranks have to come to the same scale. Use a "
            "`torch.amp.GradScaler`, with its arguments as you need them."
        )


def active_scaler(plugin: Precision) -> torch.amp.GradScaler | None:
    """What scales the loss; None where nothing does."""
    scaler: torch.amp.GradScaler | None = getattr(plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def loss_scale(plugin: Precision) -> Callable[[Tensor], Tensor] | None:
    """For a micro-batch's loss, the gradient from which its backward starts: the scale at that time."""
    scaler = active_scaler(plugin)
    if scaler is None:
        return None
    return lambda loss: scaler.scale(torch.ones_like(loss))


def shared_copies(plugin: Precision, module: LightningModule, program: StageProgram) -> WeightCopies | None:
    """Low-precision copies of the weights for all micro-batches, where the plugin has an autocast.

    Compiled code makes its own copies.
    """
    if not isinstance(plugin, MixedPrecision) or any(is_compiled(part) for part in module.modules()):
        return None
    stages = [[module.get_parameter(name) for name in names] for names in program.parameters]
    return WeightCopies(stages, plugin.device)


@dataclass
class StepVerdict:
    """Whether an optimizer step was skipped, the same on every rank."""

    skipped: bool = False


@contextmanager
def agreed_overflow(
    plugin: Precision, all_reduce: Callable[[Tensor, str], Tensor], device: torch.device
) -> Iterator[StepVerdict]:
    """Around an optimizer step: a rank skips it if any rank, also one of another replica, has found an overflow.

    Args:
        plugin: has the scaler.
        all_reduce: reduces a tensor over all ranks, by "max".
        device: of the verdict of a rank without gradients.
    """
    verdict = StepVerdict()
    scaler = active_scaler(plugin)
    if scaler is None:
        yield verdict
        return

    def agree(found: Tensor | None) -> Tensor:
        every = all_reduce(torch.zeros((), device=device) if found is None else found.clone(), "max")
        verdict.skipped = bool(every > 0)
        return every

    with overflow_checks(scaler, agree):
        yield verdict
