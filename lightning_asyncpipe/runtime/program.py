"""What each stage does at each call of a module, as plain data that one rank decides and all agree on."""

from __future__ import annotations

import enum
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from lightning_asyncpipe.runtime.candidates import Candidates, Cut
from lightning_asyncpipe.runtime.trace import CallKey


class Role(enum.Enum):
    """What a stage does at a call.

    RUN: the unit runs. ENTER: the call contains units and is entered. SKIP: zeros of the right structure are returned.
    """

    RUN = "run"
    ENTER = "enter"
    SKIP = "skip"


@dataclass(frozen=True)
class Node:
    """A call that is intercepted: a unit, or an opened call around units.

    Attributes:
        opened: it contains a valid cut: its units are nodes of their own.
        skippable: stages that begin after it need nothing from it that they could make themselves.
        first, last: the stages in which it begins and ends.
        inner: how many calls of intercepted modules it makes itself.
    """

    key: CallKey
    opened: bool
    skippable: bool
    first: int
    last: int
    inner: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class StageProgram:
    """How a step is split into stages.

    Attributes:
        cuts: the places between stages, in order.
        nodes: the intercepted calls, in order; the same whatever the cuts are, so that randomness is too.
        parameters: for each stage the names of the parameters that it must have, in the model's order.
        unused: names of parameters that no stage uses. Those of a unit that did not use them when it was traced (an
            expert that got no tokens) are not among them: they are where the unit is.
        random: generators from which the step drew when it was traced.
    """

    cuts: tuple[Cut, ...]
    nodes: tuple[Node, ...]
    parameters: tuple[tuple[str, ...], ...]
    unused: tuple[str, ...] = ()
    random: tuple[str, ...] = ()

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.cuts) + 1

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules whose calls are intercepted."""
        return tuple(dict.fromkeys(node.key.name for node in self.nodes))

    @cached_property
    def repeated(self) -> frozenset[str]:
        """Names of the modules that are called more than once, so that their calls must be counted."""
        calls = [node.key.name for node in self.nodes]
        calls += [name for node in self.nodes if not node.opened for name, _ in node.inner]
        return frozenset(name for name in calls if calls.count(name) > 1)

    def role(self, stage: int, node: Node) -> Role:
        """What a stage does at a call, if it gets there."""
        if node.skippable and node.last < stage:
            return Role.SKIP
        return Role.ENTER if node.opened else Role.RUN

    def whole(self) -> StageProgram:
        """The program of a single stage for the same step: it draws the same random numbers."""
        names = dict.fromkeys(name for stage in self.parameters for name in stage)
        return StageProgram(
            (),
            tuple(replace(node, first=0, last=0) for node in self.nodes),
            (tuple(names),),
            self.unused,
            self.random,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dictionaries, strings and numbers, for example for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StageProgram:
        """The inverse of :meth:`to_dict`, also after JSON has turned tuples into lists."""
        return cls(
            tuple(_cut(cut) for cut in data["cuts"]),
            tuple(_node(node) for node in data["nodes"]),
            tuple(tuple(names) for names in data["parameters"]),
            tuple(data["unused"]),
            tuple(data["random"]),
        )


def _cut(data: Mapping[str, Any]) -> Cut:
    exit_before = data["exit_before"]
    return Cut(
        **{
            **data,
            "call": CallKey(*data["call"]),
            "positions": tuple(data["positions"]),
            "exit_before": None if exit_before is None else CallKey(*exit_before),
            "shape": tuple(data["shape"]),
        }
    )


def _node(data: Mapping[str, Any]) -> Node:
    inner = tuple((name, count) for name, count in data["inner"])
    return Node(**{**data, "key": CallKey(*data["key"]), "inner": inner})


def build_program(candidates: Candidates, cuts: Sequence[Cut]) -> StageProgram:
    """The program for the chosen cuts.

    Args:
        candidates: all valid cuts of the step; they decide which calls are intercepted.
        cuts: those to use, in order of time; none for a single stage.
    """
    trace, liveness = candidates.trace, candidates.liveness
    times = [cut.time for cut in cuts]
    indices = [i for i, unit in enumerate(liveness.unit) if unit in (-1, i)]
    names = {trace.calls[i].key.name for i in indices}
    inner: list[dict[str, int]] = [{} for _ in trace.calls]
    for call in trace.calls:
        if call.key.name in names:
            outer = call.parent
            while outer >= 0:
                inner[outer][call.key.name] = inner[outer].get(call.key.name, 0) + 1
                outer = trace.calls[outer].parent
    nodes = tuple(
        Node(
            trace.calls[i].key,
            i in liveness.opened,
            liveness.skippable(trace, i),
            bisect_right(times, trace.calls[i].begin),
            bisect_left(times, trace.calls[i].end),
            tuple(inner[i].items()),
        )
        for i in indices
    )
    used: list[set[str]] = [set() for _ in range(len(cuts) + 1)]
    for name, uses in liveness.uses.items():
        for time in uses:
            used[bisect_right(times, time)].add(name)
    for stage in used:
        stage |= liveness.everywhere
    known = set().union(*used)
    stages = _stages_of_units(candidates, times)
    unused = []
    for name in trace.parameters:
        if name not in known:
            beside = _enclosing(name, stages)
            for index in beside:
                used[index].add(name)
            if not beside:
                unused.append(name)
    parameters = tuple(tuple(n for n in trace.parameters if n in stage) for stage in used)
    return StageProgram(tuple(cuts), nodes, parameters, tuple(unused), trace.random)


def _stages_of_units(candidates: Candidates, times: Sequence[int]) -> dict[str, set[int]]:
    """For each module that is called as a unit or inside one, the stages in which it is."""
    stages: dict[str, set[int]] = {}
    for call, unit in zip(candidates.trace.calls, candidates.liveness.unit, strict=True):
        if unit >= 0:
            stages.setdefault(call.key.name, set()).add(bisect_right(times, call.begin))
    return stages


def _enclosing(parameter: str, stages: Mapping[str, set[int]]) -> set[int]:
    """The stages of the innermost module around a parameter that has any."""
    name = parameter
    while "." in name:
        name = name.rpartition(".")[0]
        if name in stages:
            return stages[name]
    return set()
