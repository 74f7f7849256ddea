"""Where a rank's time goes: seconds by what it was spent on, and the single spans where somebody asks for them.

The sums cost an addition for each action and are always kept; spans are kept while :attr:`Ledger.spans` is a list.
Times are those of ``time.perf_counter``, which on Linux is one clock for all processes of a machine.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from lightning_asyncpipe.plan.actions import Action


class Spent(enum.Enum):
    """What time is spent on; all but the first three are idle time with its cause.

    ``BACKWARD`` is the whole backward, or its first half where it is run in halves.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT_GRADIENT = "weight gradient"
    ACTIVATION = "waiting for activation"
    GRADIENT = "waiting for gradient"
    WEIGHTS = "waiting for update"
    REDUCTION = "waiting for reduction"
    RECORDS = "waiting for records"
    NORM = "waiting for norm"


COMPUTE = (Spent.FORWARD, Spent.BACKWARD, Spent.WEIGHT_GRADIENT)


class Span(NamedTuple):
    """One stretch of time of one rank, in seconds; ``action`` is the one that it belongs to, if any."""

    spent: Spent
    start: float
    end: float
    action: Action | None = None


class Ledger:
    """Seconds by what they were spent on, from the end of one segment to the end of another.

    Attributes:
        seconds: by cause, of all segments that counted.
        wall: their length, in seconds.
        segments: their number.
        spans: every span since it was made a list; None while nobody asks.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(Spent, 0.0)
        self.wall = 0.0
        self.segments = 0
        self.spans: list[Span] | None = None
        self._current = dict.fromkeys(Spent, 0.0)
        self._since: float | None = None

    @property
    def utilisation(self) -> float:
        """Share of the wall time spent in forwards and backwards."""
        return sum(self.seconds[spent] for spent in COMPUTE) / self.wall if self.wall else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Share of the wall time by what it was spent on; what nothing accounts for is "overhead"."""
        wall = self.wall or 1.0
        shares = {spent.value: seconds / wall for spent, seconds in self.seconds.items()}
        return shares | {"overhead": max(0.0, 1.0 - sum(shares.values())) if self.wall else 0.0}

    def add(self, spent: Spent, start: float, action: Action | None = None) -> None:
        """Count the time from `start` until now."""
        end = time.perf_counter()
        self._current[spent] += end - start
        if self.spans is not None:
            self.spans.append(Span(spent, start, end, action))

    @contextmanager
    def counting(self, spent: Spent) -> Iterator[None]:
        """Count the time spent in here."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(spent, start)

    def tick(self) -> None:
        """A segment has ended: what was counted since the last one counts, if that end is known."""
        now = time.perf_counter()
        if self._since is not None:
            for spent, seconds in self._current.items():
                self.seconds[spent] += seconds
            self.wall += now - self._since
            self.segments += 1
        self._since = now
        self._current = dict.fromkeys(Spent, 0.0)

    def pause(self) -> None:
        """Leave out the time until the next segment ends."""
        self._since = None
