"""Actions of all ranks on one clock, and their form as a trace for Chrome or Perfetto.

The format is that of the Trace Event Format's complete events ("ph": "X"): https://ui.perfetto.dev opens it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_asyncpipe.runtime.timeline import Span

_MICROSECOND = 1e-6


@dataclass(frozen=True)
class Bar:
    """One stretch of time of one rank.

    Attributes:
        rank: global rank.
        what: a value of ``runtime.timeline.Spent``.
        start, end: in seconds; of one clock for all ranks.
        action: the action's text form (``plan.actions.Action``), "" where it belongs to none.
    """

    rank: int
    what: str
    start: float
    end: float
    action: str = ""

    @property
    def early(self) -> bool:
        """Whether it worked for the next batch."""
        return "+" in self.action

    @property
    def pipeline(self) -> int | None:
        """The pipeline of its micro-batch, if it belongs to one."""
        _, found, rest = self.action.partition("@")
        return int(rest.rstrip("+")) if found else None


def to_message(spans: Sequence[Span]) -> list[list[Any]]:
    """Spans as plain values for an exchange between ranks, on the clock that machines share (``time.time``)."""
    offset = time.time() - time.perf_counter()
    return [
        [span.spent.value, span.start + offset, span.end + offset, "" if span.action is None else str(span.action)]
        for span in spans
    ]


def from_messages(messages: Sequence[Sequence[Sequence[Any]]]) -> list[Bar]:
    """The bars of all ranks, from the messages of all ranks in order; time begins with the first of them."""
    begin = min((entry[1] for message in messages for entry in message), default=0.0)
    return [
        Bar(rank, what, start - begin, end - begin, action)
        for rank, message in enumerate(messages)
        for what, start, end, action in message
    ]


def write_trace(bars: Sequence[Bar], path: Path, num_stages: int) -> None:
    """Write a trace: a process for each replica, a thread for each device."""
    events: list[dict[str, Any]] = []
    for rank in sorted({bar.rank for bar in bars}):
        place = {"pid": rank // num_stages, "tid": rank % num_stages, "ph": "M"}
        events.append({**place, "name": "process_name", "args": {"name": f"replica {rank // num_stages}"}})
        events.append({**place, "name": "thread_name", "args": {"name": f"device {rank % num_stages} (rank {rank})"}})
    for bar in bars:
        events.append(
            {
                "name": bar.action or bar.what,
                "cat": bar.what,
                "ph": "X",
                "pid": bar.rank // num_stages,
                "tid": bar.rank % num_stages,
                "ts": bar.start / _MICROSECOND,
                "dur": (bar.end - bar.start) / _MICROSECOND,
                "args": {"spent": bar.what, "pipeline": bar.pipeline, "early": bar.early},
            }
        )
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def read_trace(path: Path) -> tuple[list[Bar], int]:
    """The bars of a trace that :func:`write_trace` wrote, and the number of devices of a replica.

    Raises:
        ValueError: it is no such trace.
    """
    try:
        events = json.loads(path.read_text())["traceEvents"]
        complete = [event for event in events if event["ph"] == "X"]
        devices = 1 + max(int(event["tid"]) for event in complete)
        bars = [
            Bar(
                int(event["pid"]) * devices + int(event["tid"]),
                str(event["args"]["spent"]),
                float(event["ts"]) * _MICROSECOND,
                float(event["ts"] + event["dur"]) * _MICROSECOND,
                str(event["name"]) if event["name"] != event["args"]["spent"] else "",
            )
            for event in complete
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a trace that PipelineMonitor wrote: {error}") from None
    return bars, devices
