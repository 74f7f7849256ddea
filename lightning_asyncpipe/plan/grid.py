"""Schedules as text: a grid to look at, and a lossless form to store."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from lightning_asyncpipe.errors import ScheduleError
from lightning_asyncpipe.plan.actions import COMPUTE, Action
from lightning_asyncpipe.plan.costs import Costs
from lightning_asyncpipe.plan.placement import Placement
from lightning_asyncpipe.plan.rendezvous import execute
from lightning_asyncpipe.plan.segment import SegmentPlan, SegmentSpec
from lightning_asyncpipe.plan.validator import validate


def render(placement: Placement, segments: Sequence[SegmentPlan]) -> str:
    """Consecutive segments as a grid: devices are rows, columns are units of time.

    The costs are those of the field's figures: a forward takes one column, a backward two, its halves one each,
    messages nothing. A cell shows the kind and the micro-batch (``F5``), which tells the pipeline, with ``+`` for an
    early forward of the next batch; ``==`` continues the action to its left, ``.`` is idle, and ``|`` begins a segment.
    """
    timeline = execute(placement, segments, Costs.uniform(placement.num_stages))
    columns = math.ceil(max((timed.end for line in timeline for timed in line), default=0.0))
    rows = []
    for line in timeline:
        row = ["."] * columns
        segment = -1
        for timed in line:
            if timed.action.kind not in COMPUTE:
                continue
            action, column = timed.action, round(timed.start)
            mark = "|" if timed.segment > segment else ""
            segment = timed.segment
            row[column] = f"{mark}{action.kind.value}{action.microbatch}{'+' * action.ahead}"
            for more in range(column + 1, round(timed.end)):
                row[more] = "=="
        rows.append(row)
    width = max((len(cell) for row in rows for cell in row), default=1)
    width = max(width, len(str(columns)))
    names = [f"device {device}" for device in range(len(rows))]
    margin = max(len(name) for name in names)
    header = [str(column) for column in range(columns)]
    table = zip(["", *names], [header, *rows], strict=True)
    return "\n".join(
        f"{name:<{margin}}  " + " ".join(f"{cell:<{width}}" for cell in row).rstrip() for name, row in table
    )


def dumps(plan: SegmentPlan) -> str:
    """The text form of a plan: what was asked for, the carry, and a line of actions per device."""
    spec = plan.spec
    lines = [
        f"segment microbatches={spec.microbatches} ahead={spec.ahead} carried={_numbers(spec.carried)}"
        f" updated={int(spec.updated)} steps={int(spec.steps)} carry={_numbers(plan.carry)}"
    ]
    lines += [
        f"device {device}: " + " ".join(str(action) for action in actions)
        for device, actions in enumerate(plan.actions)
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def loads(text: str, placement: Placement, max_in_flight: int) -> SegmentPlan:
    """The plan of a text form, validated.

    Raises:
        ScheduleError: when the text is malformed (the message names the line), or the plan breaks a rule.
    """
    lines = text.splitlines()
    header = _HEADER.fullmatch(lines[0]) if lines else None
    if header is None:
        raise ScheduleError(f"line 1: expected 'segment microbatches=...', found {lines[:1]}")
    try:
        spec = SegmentSpec(
            int(header["microbatches"]),
            int(header["ahead"]),
            _parse_numbers(header["carried"]),
            header["updated"] == "1",
            header["steps"] == "1",
        )
    except ValueError as error:
        raise ScheduleError(f"line 1: {error}") from error
    actions = []
    for device, line in enumerate(lines[1:]):
        name = f"device {device}:"
        if not line.startswith(name):
            raise ScheduleError(f"line {device + 2}: expected '{name} ...', found {line[:40]!r}")
        try:
            actions.append(tuple(Action.parse(word) for word in line[len(name) :].split()))
        except ScheduleError as error:
            raise ScheduleError(f"line {device + 2}: {error}") from error
    plan = SegmentPlan(spec, tuple(actions), _parse_numbers(header["carry"]))
    validate(placement, [plan], max_in_flight)
    return plan


_LIST = r"(?:\d+(?:,\d+)*)?"
_HEADER = re.compile(
    rf"segment microbatches=(?P<microbatches>\d+) ahead=(?P<ahead>\d+) carried=(?P<carried>{_LIST})"
    rf" updated=(?P<updated>[01]) steps=(?P<steps>[01]) carry=(?P<carry>{_LIST})",
    re.ASCII,
)


def _numbers(values: Sequence[int]) -> str:
    return ",".join(str(value) for value in values)


def _parse_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",")) if text else ()
