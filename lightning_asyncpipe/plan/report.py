"""A plan in plain data, and as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_asyncpipe.plan.choice import Chosen
from lightning_asyncpipe.plan.geometry import Geometry
from lightning_asyncpipe.plan.profile import ModelProfile

_NUMBERS = ("num_stages", "num_pipelines", "num_microbatches", "max_in_flight")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def describe_geometry(geometry: Geometry) -> dict[str, Any]:
    """The numbers of a run."""
    return {
        "num_stages": geometry.num_stages,
        "num_pipelines": geometry.num_pipelines,
        "num_microbatches": geometry.num_microbatches,
        "max_in_flight": geometry.max_in_flight,
        "data_parallel_size": geometry.replicas,
    }


def describe_stages(
    geometry: Geometry,
    begins: Sequence[str],
    units: Sequence[int],
    parameters: Sequence[int],
    messages: Sequence[tuple[Sequence[int], str, int]],
) -> list[dict[str, Any]]:
    """What is known of stages without a profile.

    Args:
        geometry: the numbers of the run.
        begins: the module that each stage calls first.
        units: how many places to cut each stage has, counting its own begin.
        parameters: how many elements the parameters of each stage have.
        messages: shape, type and bytes of what each stage but the last sends.
    """
    placement = geometry.placement
    stages = []
    for number, name in enumerate(begins):
        shape, dtype, nbytes = messages[number] if number < len(messages) else ((), "", 0)
        stages.append(
            {
                "stage": number,
                "begins": name,
                "units": units[number],
                "parameters": parameters[number],
                "forward_ms": None,
                "backward_ms": None,
                "stale_share": None,
                "message_shape": list(shape),
                "message_dtype": dtype,
                "message_bytes": nbytes,
                "devices": list(placement.hosts(number)),
            }
        )
    return stages


def describe_devices(geometry: Geometry) -> list[dict[str, Any]]:
    """What is known of devices without a profile."""
    placement = geometry.placement
    return [
        {"device": device, "stages": list(placement.hosted(device)), "memory": None, "utilisation": None}
        for device in range(geometry.num_stages)
    ]


def add_predictions(description: dict[str, Any], profile: ModelProfile, chosen: Chosen) -> None:
    """Put what a profile and a simulation say into a description of stages and devices."""
    geometry, placement = chosen.geometry, chosen.geometry.placement
    parts = profile.stages(chosen.cuts)
    for entry, part, share in zip(description["stages"], parts, chosen.shares, strict=True):
        entry["forward_ms"] = 1e3 * part.forward
        entry["backward_ms"] = 1e3 * (part.input_grad + part.weight_grad)
        entry["stale_share"] = share
    work = [part.forward + part.input_grad + part.weight_grad for part in parts]
    pipelines, m = geometry.num_pipelines, geometry.num_microbatches
    for entry in description["devices"]:
        device = entry["device"]
        busy = sum(work[stage] * len(range(p, m, pipelines)) for p, stage in placement.slots(device))
        entry["memory"] = vars(chosen.memory[device]).copy()
        entry["utilisation"] = busy / chosen.step_seconds
    description["step_ms"] = 1e3 * chosen.step_seconds
    description["message_ms"] = 1e3 * chosen.planner.costs.message
    description["early_forwards"] = chosen.early


def size(nbytes: float) -> str:
    """Bytes with a unit."""
    power = 0
    while nbytes >= 1024 and power < len(_UNITS) - 1:
        nbytes /= 1024
        power += 1
    return f"{nbytes:.0f} {_UNITS[power]}" if power == 0 else f"{nbytes:.1f} {_UNITS[power]}"


def with_predictions(description: dict[str, Any], stored: object) -> dict[str, Any]:
    """A description with the times and memory that an earlier one, of a file, has of the same stages and devices.

    Where that is none that can be shown, the description alone: nothing but what people read depends on it.
    """
    if not isinstance(stored, dict):
        return description
    own = {name: description[name] for name in (*_NUMBERS, "data_parallel_size", "planned_by")}
    merged = {**description, **stored, **own}
    try:
        table(merged)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return description
    return merged


def table(description: dict[str, Any]) -> str:
    """A description as text: a line of numbers, a table of stages, a table of devices."""
    stages, pipelines, microbatches, in_flight = (description[number] for number in _NUMBERS)
    lines = [
        f"{stages} stages, {pipelines} pipelines, {microbatches} micro-batches, {in_flight} in flight; "
        f"planned by {description['planned_by']}"
    ]
    if description["step_ms"] is not None:
        lines[0] += f", {description['step_ms']:.1f} ms a step simulated"
    rows = [["stage", "begins at", "units", "parameters", "forward", "backward", "stale", "message", "devices"]]
    for stage in description["stages"]:
        shape = "x".join(map(str, stage["message_shape"]))
        message = f"{stage['message_dtype']} {shape} {size(stage['message_bytes'])}" if shape else "-"
        times = [stage["forward_ms"], stage["backward_ms"]]
        rows.append(
            [
                str(stage["stage"]),
                stage["begins"] or "-",
                str(stage["units"]),
                f"{stage['parameters']:,}",
                *("-" if ms is None else f"{ms:.2f} ms" for ms in times),
                "-" if stage["stale_share"] is None else f"{stage['stale_share']:.2f}",
                message,
                ", ".join(map(str, stage["devices"])),
            ]
        )
    lines += ["", *_aligned(rows, left=(1, 7, 8))]
    if description["devices"][0]["memory"] is None:
        return "\n".join(lines)
    rows = [
        ["device", "stages", "weights", "optimizer", "gradients", "activations", "buffers", "memory", "utilisation"]
    ]
    for device in description["devices"]:
        memory = device["memory"]
        kinds = ("weights", "optimizer", "gradients", "activations", "buffers", "total")
        rows.append(
            [
                str(device["device"]),
                ", ".join(map(str, device["stages"])),
                *("-" if memory is None else size(memory[kind]) for kind in kinds),
                "-" if device["utilisation"] is None else f"{device['utilisation']:.2f}",
            ]
        )
    return "\n".join([*lines, "", *_aligned(rows, left=(1,))])


def _aligned(rows: list[list[str]], left: Sequence[int]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
