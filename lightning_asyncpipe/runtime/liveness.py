"""Which values of a trace depend on the model, until when each is used, and which parameters are used when.

The step's code around the calls of modules runs on every stage: on real values in the stage that a point of the step
belongs to, on zeros before it. So a value is *local*, and may cross from one stage to the next without a message, if
every stage can make it: from the batch, buffers and constants, by code outside skipped calls. Parameters that such code
reads directly (``self.pos_embed[:, :length]``) make their value local too, and are then used wherever that value is.
All other values are *live* from the operation that made them to the last one that uses them.

Which code is around skipped calls, and which inside, depends on where the step is cut: the *opened* calls are those
that contain a cut and are therefore entered; the calls that they make are the *units*.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_asyncpipe.runtime.trace import Operation, Trace

NOTHING: frozenset[str] = frozenset()


@dataclass(eq=False)
class Liveness:
    """What :func:`analyse` finds for one set of opened calls.

    Attributes:
        opened: indices of calls that are entered.
        unit: for each call, the index of the unit it is or is in; -1 for an opened call.
        local: units that depend on no parameter and no live value: they run on every stage.
        live: for each value, whether it is live.
        last_use: for each value, the time of its last use; 0 if it has none.
        last_user: for each value, the index of the call that used it last.
        uses: for each parameter, the times at which a stage must have it.
        local_births: (birth, last use) of all local values that the step makes, ascending.
        everywhere: parameters whose content reached Python outside units: used by all stages.
    """

    opened: frozenset[int]
    unit: list[int]
    local: set[int] = field(default_factory=set)
    live: list[bool] = field(default_factory=list)
    last_use: list[int] = field(default_factory=list)
    last_user: list[int] = field(default_factory=list)
    uses: dict[str, list[int]] = field(default_factory=dict)
    everywhere: set[str] = field(default_factory=set)
    local_births: list[tuple[int, int]] = field(default_factory=list)

    def skippable(self, trace: Trace, call: int) -> bool:
        """Whether a stage that begins after a call can do without it.

        A local unit is run instead. An opened call must be entered again if a local value that it makes is used after
        it: that value is not sent.
        """
        if call in self.local:
            return False
        if call not in self.opened:
            return True
        begin, end = trace.calls[call].begin, trace.calls[call].end
        first, stop = bisect_left(self.local_births, (begin, 0)), bisect_left(self.local_births, (end, 0))
        return not any(last > end for _, last in self.local_births[first:stop])


def units_of(trace: Trace, opened: frozenset[int]) -> list[int]:
    """For each call the unit that it is or is in: the outermost call around it that is not opened; -1 if opened."""
    unit: list[int] = []
    for index, call in enumerate(trace.calls):
        outer = unit[call.parent] if call.parent >= 0 else -1
        unit.append(outer if outer >= 0 else -1 if index in opened else index)
    return unit


def analyse(trace: Trace, opened: Iterable[int]) -> Liveness:
    """Follow all values through the step.

    Args:
        trace: a recorded step.
        opened: the calls that are entered; with a call, all calls around it.
    """
    opened = frozenset(opened)
    result = Liveness(opened, units_of(trace, opened))
    _Analysis(trace, result).run()
    return result


class _Analysis:
    def __init__(self, trace: Trace, result: Liveness) -> None:
        self.trace = trace
        self.result = result
        count = len(trace.values)
        result.live = [False] * count
        result.last_use = [0] * count
        result.last_user = [-1] * count
        # The parameters that a local value was made from.
        self.origins: list[frozenset[str]] = [value.parameters for value in trace.values]

    def run(self) -> None:
        operations = self.trace.operations
        position = 0
        while position < len(operations):
            unit = self._unit(operations[position])
            stop = position + 1
            if unit >= 0:
                while stop < len(operations) and self._unit(operations[stop]) == unit:
                    stop += 1
            group = operations[position:stop]
            if unit >= 0 and any(self._depends(operation) for operation in group):
                for operation in group:
                    self._live(operation)
            else:
                if unit >= 0:
                    self.result.local.add(unit)
                for operation in group:
                    self._around(operation, inside_unit=unit >= 0)
            position = stop
        computing = {self._unit(operation) for operation in operations}
        # A unit without any operation makes nothing that could not be made everywhere.
        self.result.local |= {u for u in self.result.unit if u >= 0 and u not in computing}
        for value in self.trace.results:
            if value >= 0:
                self.result.last_use[value] = self.trace.end
                if not self.result.live[value]:
                    self._used(self.origins[value], self.trace.end)
        self.result.local_births = sorted(
            (value.birth, self.result.last_use[index])
            for index, value in enumerate(self.trace.values)
            if value.birth > 0 and not self.result.live[index]
        )

    def _unit(self, operation: Operation) -> int:
        return self.result.unit[operation.call] if operation.call >= 0 else -1

    def _depends(self, operation: Operation) -> bool:
        """Whether an operation inside a unit reads a parameter or a live value."""
        values = self.trace.values
        return any(self.result.live[v] or values[v].parameters for v in operation.inputs)

    def _live(self, operation: Operation) -> None:
        """An operation that runs on one stage only, or on something that is made on one stage only."""
        self._touch(operation)
        for value in operation.inputs:
            self._used(self.origins[value], operation.time)
        for value in operation.outputs:
            self.result.live[value] = True

    def _around(self, operation: Operation, inside_unit: bool) -> None:
        """An operation of the code around units, or of a unit that runs everywhere."""
        if any(self.result.live[v] for v in operation.inputs):
            self._live(operation)
            return
        self._touch(operation)
        origins = NOTHING.union(*(self.origins[v] for v in operation.inputs))
        if operation.reads and origins and not inside_unit:
            self.result.everywhere |= origins
        for value in operation.outputs:
            self.origins[value] |= origins

    def _touch(self, operation: Operation) -> None:
        for value in operation.inputs:
            self.result.last_use[value] = operation.time
            self.result.last_user[value] = operation.call

    def _used(self, parameters: frozenset[str], time: int) -> None:
        for name in parameters:
            self.result.uses.setdefault(name, []).append(time)
