"""Plans in files: JSON that people can read, checked when it is read.

A plan is good for one model, number and kind of devices, and precision. It names the cuts by the calls of modules that
they lie at, and holds the costs that its schedules are made for, so that they are the same schedules again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_asyncpipe.plan.costs import Costs
from lightning_asyncpipe.plan.geometry import Geometry
from lightning_asyncpipe.plan.report import describe_geometry

FORMAT = "lightning-asyncpipe plan"
VERSION = 1

_COSTS = ("forward", "backward", "input_grad", "weight_grad")
_SINGLE = ("message", "reduce", "update")
_NUMBERS = ("num_stages", "num_pipelines", "num_microbatches", "max_in_flight")
_LISTED = 5


class PlanError(ValueError):
    """A file is no plan, or one for something else; the message says what differs."""


def write_plan(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write a plan; see :func:`plan_content`."""
    Path(path).write_text(json.dumps(content, indent=1) + "\n")


def plan_content(
    target: Mapping[str, Any],
    geometry: Geometry,
    cuts: list[list[Any]],
    costs: Costs,
    description: Mapping[str, Any],
) -> dict[str, Any]:
    """What a file holds.

    Args:
        target: what the plan is for: "model" (its class), "parameters" (name to type and shape), "device", "precision".
        geometry: the numbers.
        cuts: an identification of each cut, of strings and numbers.
        costs: of the schedules.
        description: for people.
    """
    stored: dict[str, Any] = {name: list(getattr(costs, name)) for name in _COSTS}
    stored |= {name: getattr(costs, name) for name in _SINGLE}
    return {
        "format": FORMAT,
        "version": VERSION,
        **{key: target[key] for key in ("model", "device", "precision")},
        "geometry": describe_geometry(geometry),
        "cuts": cuts,
        "costs": stored,
        "description": dict(description),
        "parameters": dict(target["parameters"]),
    }


def read_plan(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a file.

    Raises:
        PlanError: it cannot be read, or is not a plan of this version.
    """
    try:
        content = json.loads(Path(path).read_text())
    except OSError as error:
        raise PlanError(
            f"the plan {str(path)!r} cannot be read: {error.strerror or error}. `strategy.save_plan(path)` writes one."
        ) from None
    except ValueError as error:
        raise PlanError(f"the plan {str(path)!r} is not JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise PlanError(f'{str(path)!r} is not a plan: it has no entry "format": "{FORMAT}"')
    if content.get("version") != VERSION:
        raise PlanError(f"the plan {str(path)!r} has version {content.get('version')!r}, this release reads {VERSION}")
    problem = _malformed(content)
    if problem:
        raise PlanError(
            f"the plan {str(path)!r} is damaged: {problem}. Write it again with `strategy.save_plan(path)`."
        )
    return content


def _malformed(content: Mapping[str, Any]) -> str:
    """What is wrong with the form of a plan; empty if nothing is."""
    geometry, cuts, costs = (content.get(key) for key in ("geometry", "cuts", "costs"))
    if not isinstance(geometry, dict) or not all(_whole(geometry.get(key)) for key in _NUMBERS):
        return f'"geometry" must have whole numbers for {", ".join(_NUMBERS)}'
    if not all(isinstance(content.get(key), str) for key in ("model", "device", "precision")):
        return '"model", "device" and "precision" must be texts'
    if not isinstance(content.get("parameters"), dict):
        return '"parameters" must map names to types and shapes'
    stages = geometry["num_stages"]
    if not isinstance(cuts, list) or len(cuts) != stages - 1 or not all(isinstance(cut, list) for cut in cuts):
        return f'"cuts" must list {stages - 1} cuts for {stages} stages'
    try:
        _costs(costs, stages)
    except (TypeError, KeyError, ValueError) as error:
        return f'"costs": {error}'
    return ""


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _costs(data: Any, stages: int) -> Costs:
    rows = [tuple(float(value) for value in data[name]) for name in _COSTS]
    if any(len(row) != stages for row in rows):
        raise ValueError(f"there must be a number for each of {stages} stages")
    forward, backward, inputs, weights = rows
    message, reduce, update = (float(data[name]) for name in _SINGLE)
    return Costs(forward, backward, inputs, weights, message, reduce, update)


def costs_of(content: Mapping[str, Any]) -> Costs:
    """The costs in a plan."""
    return _costs(content["costs"], content["geometry"]["num_stages"])


def check_plan(
    path: str | os.PathLike[str], content: Mapping[str, Any], target: Mapping[str, Any], asked: Mapping[str, Any]
) -> None:
    """Whether a plan is one for this run.

    Args:
        path: for messages.
        content: from :func:`read_plan`.
        target: as for :func:`plan_content`.
        asked: numbers of the geometry that the user set, by name.

    Raises:
        PlanError: says what differs.
    """
    differing = [
        f"its {name} is {content['geometry'][name]}, the strategy has {name}={value}"
        for name, value in asked.items()
        if content["geometry"].get(name) != value
    ]
    for key, what in (("device", "device"), ("precision", "precision"), ("model", "model")):
        if content[key] != target[key]:
            differing.append(f"its {what} is {content[key]}, this run's is {target[key]}")
    theirs, ours = content["parameters"], target["parameters"]
    names = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
    if names:
        listed = ", ".join(
            f"{name} ({theirs.get(name, 'not there')} in the plan, {ours.get(name, 'not there')} in the model)"
            for name in names[:_LISTED]
        )
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        differing.append(f"parameters differ: {listed}{more}")
    if differing:
        raise PlanError(
            f"the plan {str(path)!r} is for something else: {'; '.join(differing)}. Leave `plan` out to plan anew, and "
            "`strategy.save_plan(path)` to keep the result."
        )
