"""Plans in files: JSON that people can read, checked when it is read.

A plan is good for one model, number and kind of devices, and precision. It names the cuts by the calls of modules that
they lie at, and holds the costs that its schedules are made for, so that they are the same schedules again.
"""

from __future__ import annotations

import json
import math
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
_SHOWN = 60
_MOST = 65536
"""The largest number of stages, pipelines or micro-batches that a plan may have."""
_LONGEST = 1e6
"""The largest cost: eleven days, where it is in seconds."""


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
    except (ValueError, RecursionError) as error:
        raise PlanError(f"the plan {str(path)!r} is not JSON that holds a plan: {error}") from None
    return check_form(content, f"the plan {str(path)!r}", "Write it again with `strategy.save_plan(path)`.")


def check_form(content: Any, name: str, advice: str = "") -> dict[str, Any]:
    """The same content, if it has the form of a plan.

    Args:
        content: anything, from outside.
        name: what it is called in messages.
        advice: what to do where it is damaged.

    Raises:
        PlanError: it is not a plan, or not one of this version.
    """
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise PlanError(f'{name} is not a plan: it has no entry "format": "{FORMAT}"')
    if content.get("version") != VERSION:
        raise PlanError(f"{name} has version {_shown(content.get('version'))}, this release reads {VERSION}")
    problem = _malformed(content)
    if problem:
        raise PlanError(f"{name} is damaged: {problem}. {advice}".rstrip())
    return content


def _malformed(content: Mapping[str, Any]) -> str:
    """What is wrong with the form of a plan; empty if nothing is."""
    geometry, cuts = content.get("geometry"), content.get("cuts")
    if not isinstance(geometry, dict):
        return f'"geometry" must have whole numbers for {", ".join(_NUMBERS)}'
    for name in _NUMBERS:
        value = geometry.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
            return f'"geometry", "{name}" must be a whole number of 1 to {_MOST}, found {_shown(value)}'
    stages = geometry["num_stages"]
    pipelines = geometry["num_pipelines"]
    if pipelines > stages:
        return f'"geometry", "num_pipelines" must be 1 to {stages} for {stages} stages, found {pipelines}'
    if not all(isinstance(content.get(key), str) for key in ("model", "device", "precision")):
        return '"model", "device" and "precision" must be texts'
    if not isinstance(content.get("parameters"), dict):
        return '"parameters" must map names to types and shapes'
    if not isinstance(cuts, list) or len(cuts) != stages - 1 or not all(isinstance(cut, list) for cut in cuts):
        return f'"cuts" must list {stages - 1} cuts for {stages} stages'
    return _malformed_costs(content.get("costs"), stages)


def _malformed_costs(costs: object, stages: int) -> str:
    if not isinstance(costs, dict):
        return f'"costs" must have numbers for {", ".join((*_COSTS, *_SINGLE))}, found {_shown(costs)}'
    rule = f"finite, not negative and at most {_LONGEST:,.0f}"
    for name in _COSTS:
        row = costs.get(name)
        if not isinstance(row, list) or len(row) != stages:
            return f'"costs", "{name}" must list a number for each of {stages} stages, found {_shown(row)}'
        for value in row:
            if not _is_cost(value):
                return f'"costs", "{name}" must be numbers that are {rule}, found {_shown(value)}'
    for name in _SINGLE:
        if not _is_cost(costs.get(name)):
            return f'"costs", "{name}" must be a number that is {rule}, found {_shown(costs.get(name))}'
    try:
        _costs(costs)
    except ValueError as error:  # the numbers do not fit each other
        return f'"costs": {error}'
    return ""


def _is_cost(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and 0 <= value <= _LONGEST  # type: ignore[arg-type, operator]


def _shown(value: object) -> str:
    """A value from a file, cut short; one that is missing is called so."""
    text = repr(value)
    return "nothing" if value is None else text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _costs(data: Mapping[str, Any]) -> Costs:
    forward, backward, inputs, weights = (tuple(float(value) for value in data[name]) for name in _COSTS)
    message, reduce, update = (float(data[name]) for name in _SINGLE)
    return Costs(forward, backward, inputs, weights, message, reduce, update)


def geometry_of(content: Mapping[str, Any]) -> Geometry:
    """The numbers in a plan, for one replica."""
    return Geometry(*(content["geometry"][name] for name in _NUMBERS))


def costs_of(content: Mapping[str, Any]) -> Costs:
    """The costs in a plan."""
    return _costs(content["costs"])


def differences(content: Mapping[str, Any], target: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """In what a plan is not one for this run; empty if it is.

    Args:
        content: from :func:`read_plan` or :func:`check_form`.
        target: as for :func:`plan_content`.
        asked: numbers of the geometry that the user set, by name.
    """
    differing = [
        f"its {name} is {content['geometry'][name]}, the strategy has {name}={value}"
        for name, value in asked.items()
        if content["geometry"].get(name) != value
    ]
    for key in ("device", "precision", "model"):
        if content[key] != target[key]:
            differing.append(f"its {key} is {content[key]}, this run's is {target[key]}")
    theirs, ours = content["parameters"], target["parameters"]
    names = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
    if names:
        listed = ", ".join(
            f"{name} ({theirs.get(name, 'not there')} in the plan, {ours.get(name, 'not there')} in the model)"
            for name in names[:_LISTED]
        )
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        differing.append(f"parameters differ: {listed}{more}")
    return differing


def check_plan(
    path: str | os.PathLike[str], content: Mapping[str, Any], target: Mapping[str, Any], asked: Mapping[str, Any]
) -> None:
    """Whether a plan in a file is one for this run.

    Args:
        path: for messages.
        content, target, asked: as for :func:`differences`.

    Raises:
        PlanError: says what differs.
    """
    differing = differences(content, target, asked)
    if differing:
        raise PlanError(
            f"the plan {str(path)!r} is for something else: {'; '.join(differing)}. Leave `plan` out to plan anew, and "
            "`strategy.save_plan(path)` to keep the result."
        )
