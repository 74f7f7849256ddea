"""Where a step can be cut into stages.

A cut is valid where exactly one live value crosses it and that value can be put into a run of the step that skipped
what made it. There are three ways, tried in this order:

* ``result``: the value is a result of a call. Later stages skip the call and put the received tensor into what it
  returns, so that code around it, such as ``x = x + block(x)`` or a view, is right.
* ``argument``: code around calls made the value (``tokens + positions``) and only the next call uses it: it is replaced
  among the arguments of that call.
* ``filled``: code around calls made it and goes on using it (``x = x + block(x)`` in a loop): the tensor that the code
  made from zeros, which is passed to the next call, is overwritten in place with the received one.

A call that a backward recomputes (activation checkpointing) may make the value, as its result; the cut itself lies
outside: what is recomputed must not contain substituted tensors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Literal

from lightning_asyncpipe.runtime.liveness import Liveness, analyse
from lightning_asyncpipe.runtime.trace import (
    ELEMENT_COST,
    Call,
    CallKey,
    Leaf,
    Trace,
)

Way = Literal["result", "argument", "filled"]
PREFERENCE: dict[Way, int] = {"result": 0, "argument": 1, "filled": 2}
"""Lower ones are tried first."""


MESSAGE_COST = 10 * ELEMENT_COST
"""Floating-point operations that sending one element is worth: a network is slower than memory."""


@dataclass(frozen=True)
class Cut:
    """One place between two stages.

    Attributes:
        way: how the received tensor enters the later stage.
        call: the call whose result, or one of whose arguments, it replaces.
        positions: the leaves of the result, or of the arguments `(args, kwargs)`, that it replaces.
        exit_before: the earlier stage ends when this call begins; None: when `call` returns.
        copy_entry: the later stage works in place on the tensor: it gets a copy of the received one.
        copy_exit: the earlier stage may still write to the tensor before `exit_before`: it keeps a copy.
        begins: name of the module that the later stage calls first; for messages.
        shape, dtype: of the tensor in the traced micro-batch; for messages.
        time: in the trace.
        value: the value of the trace that crosses.
    """

    way: Way
    call: CallKey
    positions: tuple[int, ...]
    exit_before: CallKey | None
    copy_entry: bool
    copy_exit: bool
    begins: str
    shape: tuple[int, ...]
    dtype: str
    time: int
    value: int


@dataclass
class Candidates:
    """All valid cuts of a traced step.

    Attributes:
        trace: the recorded step.
        liveness: its analysis with exactly the calls opened that contain a valid cut.
        cuts: in the order of time, one for each value that can cross.
        refused: why values that cross alone cannot be sent: (time, value, reason).
    """

    trace: Trace
    liveness: Liveness
    cuts: tuple[Cut, ...]
    refused: list[tuple[int, int, str]] = field(default_factory=list)

    def costs(self) -> list[float]:
        """Cost of what lies before the first cut, between neighbours, and after the last one."""
        totals = [0.0] * (len(self.cuts) + 1)
        segment = 0
        for operation in self.trace.operations:
            while segment < len(self.cuts) and operation.time > self.cuts[segment].time:
                segment += 1
            totals[segment] += operation.cost
        return totals

    def messages(self) -> list[float]:
        """Cost of sending what crosses each cut, to the stages on both sides."""
        return [MESSAGE_COST * prod(cut.shape) for cut in self.cuts]

    def crossing(self, time: int) -> list[int]:
        """The live values that are made before and used after a time."""
        return [
            index
            for index, value in enumerate(self.trace.values)
            if self.liveness.live[index] and value.birth < time < self.liveness.last_use[index]
        ]

    def count_crossing(self, among: Collection[int] | None = None) -> list[int]:
        """For each time, how many live values cross it.

        Args:
            among: count these only; None: all.
        """
        steps = [0] * (self.trace.end + 2)
        for index, value in enumerate(self.trace.values):
            last = self.liveness.last_use[index]
            if self.liveness.live[index] and value.birth < last and (among is None or index in among):
                steps[value.birth + 1] += 1
                steps[last] -= 1
        return list(accumulate(steps))

    def describe(self, value: int) -> str:
        """A live value in words: what it is, what makes it and what uses it last."""
        made = self.trace.values[value]
        maker = self._who(made.call)
        user = self._who(self.liveness.last_user[value])
        dtype = str(made.dtype).removeprefix("torch.")
        use = f"by {user}" if self.liveness.last_use[value] < self.trace.end else "as the step's result"
        return f"a {dtype} tensor {list(made.shape)} made by {maker} is used after it {use}"

    def _who(self, call: int) -> str:
        unit = self.liveness.unit[call] if call >= 0 else -1
        index = unit if unit >= 0 else call
        name = self.trace.call_name(index)
        return name if index < 0 else f"'{name}'"


def find_cuts(trace: Trace, without: Collection[tuple[int, Way]] = ()) -> Candidates:
    """All valid cuts of a step.

    Which code counts as being around calls depends on which calls are opened, and only calls that contain a cut are. So
    begin with all of them open and close those that turn out to contain none, until nothing changes.

    Args:
        trace: a recorded step.
        without: values that cannot be sent in some way, though they seem able to.
    """
    opened = frozenset(call.parent for call in trace.calls if call.parent >= 0)
    while True:
        search = _Search(trace, analyse(trace, opened), without)
        cuts, needed = search.run()
        if needed == opened:
            return Candidates(trace, search.liveness, cuts, search.refused)
        opened = needed


class _Search:
    """Valid cuts under one analysis."""

    def __init__(self, trace: Trace, liveness: Liveness, without: Collection[tuple[int, Way]]) -> None:
        self.trace = trace
        self.liveness = liveness
        self.refused: list[tuple[int, int, str]] = []
        self._without = without
        self._births: dict[int, list[int]] = {}
        for value in trace.values:
            self._births.setdefault(value.storage, []).append(value.birth)
        self._begins = [call.begin for call in trace.calls]
        # Times of the operations that read or make live values.
        self._live_times = [
            operation.time
            for operation in trace.operations
            if any(liveness.live[v] for v in (*operation.inputs, *operation.outputs))
        ]
        # For each call, the calls around it.
        self._around: list[frozenset[int]] = []
        for call in trace.calls:
            outer = self._around[call.parent] | {call.parent} if call.parent >= 0 else frozenset()
            self._around.append(frozenset(outer))

    def run(self) -> tuple[tuple[Cut, ...], frozenset[int]]:
        """The valid cuts in order, and the calls that contain one."""
        options = self._options()
        skippable = {i for i, _ in options if self.liveness.skippable(self.trace, i)}
        opened: frozenset[int] = frozenset()
        while True:
            best: dict[int, tuple[tuple[int, int, int], Cut, int]] = {}
            for index, cut in options:
                if cut.way == "result" and index in opened and index not in skippable:
                    continue
                rank = (PREFERENCE[cut.way], len(self._around[index]), cut.time)
                if cut.value not in best or rank < best[cut.value][0]:
                    best[cut.value] = (rank, cut, index)
            cuts = tuple(sorted((cut for _, cut, _ in best.values()), key=lambda cut: cut.time))
            needed = opened.union(*(self._around[index] for _, _, index in best.values()))
            # A call that must be entered cannot be skipped as a whole: those cuts need another way.
            if needed == opened:
                return cuts, opened
            opened = needed

    def _options(self) -> list[tuple[int, Cut]]:
        """(index of the call, cut) for all ways to send a value that crosses alone."""
        found: list[tuple[int, Cut]] = []
        calls = self.trace.calls
        boundaries = [(call.end, True, i) for i, call in enumerate(calls)]
        boundaries += [(call.begin, False, i) for i, call in enumerate(calls)]
        events: list[tuple[int, int, int]] = []
        for index, value in enumerate(self.trace.values):
            if self.liveness.live[index] and value.birth < self.liveness.last_use[index]:
                events += [(value.birth, 1, index), (self.liveness.last_use[index], 0, index)]
        events.sort()
        active: set[int] = set()
        position = 0
        for time, returned, index in sorted(boundaries):
            while position < len(events) and events[position][0] < time:
                _, begins, changed = events[position]
                (active.add if begins else active.discard)(changed)
                position += 1
            if len(active) != 1 or not self._computes(time, self.trace.end):
                continue
            if not self._around[index] <= self.liveness.opened:
                continue
            (value_index,) = active
            cut = (self._by_result if returned else self._by_argument)(calls[index], value_index)
            if isinstance(cut, Cut) and (value_index, cut.way) in self._without:
                cut = _UNPROVEN
            if isinstance(cut, str):
                self.refused.append((time, value_index, cut))
            elif cut is not None:
                found.append((index, cut))
        return found

    def _by_result(self, call: Call, value: int) -> Cut | str | None:
        made = self.trace.values[value]
        positions = _positions(call.results, value)
        if not positions or not call.begin < made.birth < call.end:
            return None
        exit_before: Call | None = None
        if call.regions:
            regions = [self.trace.regions[i] for i in call.regions]
            if any(region.reentrant for region in regions):
                return _REENTRANT
            end = regions[0].end
            if self._computes(call.end, end):
                return _INSIDE
            exit_before = self._next_call(end)
            if exit_before is None:
                return _INSIDE
        following = exit_before or self._next_call(call.end)
        return self._cut(
            "result",
            call,
            positions,
            value,
            time=call.end,
            exit_before=exit_before,
            begins=following.key.name if following else "",
            copy_entry=self._written(value, call.end, self.trace.end),
            copy_exit=exit_before is not None and self._written(value, call.end, exit_before.begin),
        )

    def _by_argument(self, call: Call, value: int) -> Cut | str | None:
        positions = _positions(call.arguments, value)
        if not positions:
            return None
        if call.regions:
            reentrant = any(self.trace.regions[i].reentrant for i in call.regions)
            return _REENTRANT if reentrant else _INSIDE
        leaf = next(leaf for leaf in call.arguments if leaf.position == positions[0])
        inside = (
            self.liveness.last_use[value] < call.end
            and not self._written(value, call.begin, self.trace.end)
            and all(result.value != value for result in call.results)
        )
        if not inside and _overlaps(leaf):
            return "its elements share memory, so it cannot be overwritten"
        return self._cut(
            "argument" if inside else "filled",
            call,
            positions,
            value,
            time=call.begin,
            exit_before=call,
            begins=call.key.name,
            copy_entry=False,
            copy_exit=False,
        )

    def _cut(
        self,
        way: Way,
        call: Call,
        positions: tuple[int, ...],
        value: int,
        *,
        time: int,
        exit_before: Call | None,
        begins: str,
        copy_entry: bool,
        copy_exit: bool,
    ) -> Cut:
        made = self.trace.values[value]
        return Cut(
            way,
            call.key,
            positions,
            exit_before.key if exit_before else None,
            copy_entry,
            copy_exit,
            begins,
            made.shape,
            str(made.dtype).removeprefix("torch."),
            time,
            value,
        )

    def _next_call(self, time: int) -> Call | None:
        """The first call that begins after a time."""
        index = bisect_right(self._begins, time)
        return self.trace.calls[index] if index < len(self._begins) else None

    def _written(self, value: int, after: int, before: int) -> bool:
        """Whether the storage of a value is written to between two times."""
        births = self._births[self.trace.values[value].storage]
        return any(after < birth < before for birth in births)

    def _computes(self, after: int, before: int) -> bool:
        """Whether an operation between two times reads or makes live values."""
        index = bisect_right(self._live_times, after)
        return index < len(self._live_times) and self._live_times[index] < before


_INSIDE = (
    "it lies inside a call of torch.utils.checkpoint.checkpoint, which the backward runs again as a whole; checkpoint "
    "smaller parts, at most what lies between two cuts"
)
_UNPROVEN = (
    "a run in stages gave other results there: something else crosses, like an attribute or a value read with .item()"
)
_REENTRANT = (
    "it lies inside a reentrant activation checkpoint, through which no gradient of a received tensor can flow; pass "
    "use_reentrant=False to torch.utils.checkpoint.checkpoint (for transformers: "
    'gradient_checkpointing_enable({"use_reentrant": False}))'
)


def _positions(found: Iterable[Leaf], value: int) -> tuple[int, ...]:
    """Where a value is among leaves; nothing if there are different views of it."""
    matching = [leaf for leaf in found if leaf.value == value]
    if len({leaf.layout for leaf in matching}) != 1:
        return ()
    return tuple(leaf.position for leaf in matching)


def _overlaps(leaf: Leaf) -> bool:
    _, shape, strides = leaf.layout
    return any(stride == 0 and size > 1 for size, stride in zip(shape, strides, strict=True))
