"""A timeline drawn as a picture: devices as rows, work coloured by pipeline, waits by their cause."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_asyncpipe.monitor.timeline import Bar
from lightning_asyncpipe.runtime.timeline import COMPUTE, Spent

_WORK = {spent.value: depth for spent, depth in zip(COMPUTE, (0.45, 0.75, 1.0), strict=True)}
_WAITS = {
    Spent.ACTIVATION.value: "#dddddd",
    Spent.GRADIENT.value: "#c8c8c8",
    Spent.WEIGHTS.value: "#f2d0d0",
    Spent.REDUCTION.value: "#f2b8b8",
    Spent.RECORDS.value: "#f2dcb3",
    Spent.NORM.value: "#e8c27a",
}
_SHORTEST = 0.02  # share of the picture's width that a bar must have to get a text


def check_formats(suffixes: Sequence[str]) -> None:
    """Whether pictures of these formats can be drawn here.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; says how to install it.
        ValueError: matplotlib writes no such format; lists those that it does.
    """
    if not suffixes:
        return
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            'drawing a timeline needs matplotlib: `pip install matplotlib` (the package\'s extra "monitor"), or write '
            "the trace alone and open it at https://ui.perfetto.dev"
        ) from None
    known = FigureCanvasBase.get_supported_filetypes()
    unknown = [suffix for suffix in suffixes if suffix not in known]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no format of a picture: choose from {', '.join(sorted(known))}")


def draw(bars: Sequence[Bar], paths: Sequence[Path], title: str = "") -> None:
    """Draw a timeline and write it to all paths, in the formats that their suffixes name (png, svg, pdf).

    Forwards, backwards (or input gradients) and weight gradients have ever darker shades of their pipeline's colour;
    what runs early for the next batch is hatched.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; says how to install it.
    """
    check_formats([path.suffix.removeprefix(".") for path in paths])
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = sorted({bar.rank for bar in bars})
    rows = {rank: row for row, rank in enumerate(ranks)}
    pipelines = sorted({bar.pipeline for bar in bars if bar.pipeline is not None})
    colours = {pipeline: colormaps["tab10"](index % 10) for index, pipeline in enumerate(pipelines)}
    length = max((bar.end for bar in bars), default=0.0)

    figure = Figure(figsize=(14, 1.2 + 0.55 * len(ranks)), layout="constrained")
    axes = figure.add_subplot()
    for bar in sorted(bars, key=lambda bar: bar.what in _WORK):  # work over waits
        pipeline = bar.pipeline if bar.what in _WORK else None
        work = pipeline is not None
        colour = _WAITS.get(bar.what, "#eeeeee") if pipeline is None else _shade(colours[pipeline], _WORK[bar.what])
        axes.barh(
            rows[bar.rank],
            1e3 * (bar.end - bar.start),
            left=1e3 * bar.start,
            height=0.8 if work else 0.5,
            color=colour,
            edgecolor="white" if work else "none",
            linewidth=0.5,
            hatch="////" if bar.early and work else None,
        )
        if work and bar.end - bar.start > _SHORTEST * length:
            middle = 1e3 * (bar.start + bar.end) / 2
            text = bar.action.partition("@")[0]
            axes.text(middle, rows[bar.rank], text, ha="center", va="center", fontsize=6)
    axes.set_yticks(list(rows.values()), [f"device {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlim(0, 1e3 * length)
    axes.set_xlabel("milliseconds")
    axes.set_title(title, fontsize=10)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    legend = [Patch(color=_shade(colours[p], 0.75), label=f"pipeline {p}") for p in pipelines]
    legend.append(Patch(facecolor="#888888", hatch="////", edgecolor="white", label="early, for the next batch"))
    waits = [what for what in _WAITS if any(bar.what == what for bar in bars)]
    legend += [Patch(color=_WAITS[what], label=what) for what in waits]
    figure.legend(handles=legend, loc="outside lower center", ncols=6, fontsize=7, frameon=False)
    for path in paths:
        figure.savefig(path, dpi=130)


def _shade(colour: Any, depth: float) -> tuple[float, float, float]:
    """A colour mixed with white; depth 1 is the colour itself."""
    red, green, blue = colour[:3]
    return 1 - depth * (1 - red), 1 - depth * (1 - green), 1 - depth * (1 - blue)
