"""Plans that outlive their run: in a file that the user asked for, and in every checkpoint.

A file is a wish: where it does not fit, the run ends and says what differs. A checkpoint's plan is there so that a
training which measured its model goes on with the plan that it had, to the same bits; where the model, the devices, the
precision or an option is another one by now, the model is planned anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_asyncpipe.plan.saved import PlanError, check_form, differences, plan_content

if TYPE_CHECKING:
    from lightning_asyncpipe.integration.partitioning import Partition
    from lightning_asyncpipe.integration.planned import PlannedStrategy

NAME = "the plan in the checkpoint"


def target_of(strategy: PlannedStrategy, module: nn.Module) -> dict[str, Any]:
    """What a plan is for."""
    kind = type(module)
    return {
        "model": f"{kind.__module__}.{kind.__qualname__}",
        "device": strategy.root_device.type,
        "precision": str(strategy.precision_plugin.precision),
        "parameters": {
            name: f"{str(p.dtype).removeprefix('torch.')} {list(p.shape)}" for name, p in module.named_parameters()
        },
    }


def saved_plan(strategy: PlannedStrategy, partition: Partition, module: nn.Module) -> dict[str, Any]:
    """The content of a file for a plan."""
    description = {k: v for k, v in partition.description.items() if k not in ("cuts", "planned_by")}
    cuts = partition.description["cuts"]
    return plan_content(target_of(strategy, module), partition.geometry, cuts, partition.costs, description)


def checkpoint_entry(strategy: PlannedStrategy, partition: Partition, module: nn.Module, way: str) -> dict[str, Any]:
    """What a checkpoint holds of the plan: the content of a file, and the options that it was made under."""
    return {**saved_plan(strategy, partition, module), "options": _options(strategy, way)}


def plan_to_resume(entry: Any, strategy: PlannedStrategy, module: nn.Module, way: str) -> dict[str, Any] | None:
    """The content of a checkpoint's plan if it is one for this run; None, with a note that says why, if it is not.

    Args:
        entry: from :func:`checkpoint_entry`, by way of a file.
        strategy, module, way: of this run.
    """
    try:
        content: dict[str, Any] = check_form(json.loads(json.dumps(entry)), NAME)
    except (PlanError, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, PlanError) else f"{NAME} is damaged: {error}"
        rank_zero_info(f"{_capitalised(reason).rstrip('.')}. The model is planned anew.")
        return None
    before, now = content.get("options"), _options(strategy, way)
    before = before if isinstance(before, Mapping) else {}
    differing = [
        f"it was made with {name}={before.get(name)!r}, this run has {name}={value!r}"
        for name, value in now.items()
        if before.get(name) != value
    ]
    differing += differences(content, target_of(strategy, module), {"num_stages": now["num_stages"]})
    if differing:
        reason = f"{_capitalised(NAME)} is for something else: {'; '.join(differing)}"
        rank_zero_info(f"{reason}. The model is planned anew.")
        return None
    return content


def _capitalised(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _options(strategy: PlannedStrategy, way: str) -> dict[str, Any]:
    """What the user decided of the things that a plan depends on."""
    asked = strategy.asked_numbers()
    resolved = strategy.resolved()
    return {
        **asked,
        "num_stages": resolved.num_stages,
        "data_parallel_size": resolved.replicas,
        "cuts": strategy.cuts if isinstance(strategy.cuts, str) else list(strategy.cuts),
        "max_staleness": strategy.max_staleness,
        "weight_stash": strategy.weight_stash,
        "staleness_correction": strategy.staleness_correction,
        "split_backward": strategy.split_backward,
        "memory_limit": strategy.memory_limit,
        "partition": "file" if strategy.plan is not None else way,
    }
