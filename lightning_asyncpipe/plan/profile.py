"""What a model's parts cost: the numbers that a partition is chosen by.

A *unit* is what lies between two neighbouring places where the model can be cut; a stage is a run of units. Times are
seconds for one micro-batch, sizes are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from lightning_asyncpipe.plan.costs import Costs
from lightning_asyncpipe.plan.placement import Placement


@dataclass(frozen=True)
class Unit:
    """What lies between two neighbouring cuts.

    Attributes:
        name: the module that is called first in it.
        forward, input_grad, weight_grad: seconds; a backward is its two halves together.
        entry: seconds that a stage which begins here takes to get here, past what it skips.
        saved: bytes that its forward keeps for its backward, but for parameters, copies of them that all micro-batches
            share, and what crosses its two ends.
        parameters: indices of the parameters that it uses.
    """

    name: str
    forward: float
    input_grad: float
    weight_grad: float
    entry: float = 0.0
    saved: int = 0
    parameters: tuple[int, ...] = ()


@dataclass(frozen=True)
class Boundary:
    """What crosses between two units.

    Attributes:
        nbytes: of the message.
        dtype, shape: of the message; for people.
        kept: whether a backward needs it, so that it takes memory also where no cut is made.
        gradient: whether a gradient flows back, which it does not from what is frozen.
    """

    nbytes: int
    dtype: str = ""
    shape: tuple[int, ...] = ()
    kept: bool = True
    gradient: bool = True


@dataclass(frozen=True)
class Weights:
    """One parameter.

    Attributes:
        name: its first name in the model.
        numel: number of elements.
        nbytes: of its weights.
        gradient: bytes of the sum of its gradients; 0 if it is not trained.
        state: bytes of its optimizer's state.
        copy: bytes of the low-precision copy that all micro-batches share; 0 if there is none.
        gains: bytes of what tells an update of its optimizer from a gradient; 0 if nothing has to be kept for that.
    """

    name: str
    numel: int
    nbytes: int
    gradient: int = 0
    state: int = 0
    copy: int = 0
    gains: int = 0


@dataclass(frozen=True)
class Link:
    """How long a message takes: ``latency + bytes / bandwidth`` seconds."""

    latency: float = 0.0
    bandwidth: float = math.inf

    def seconds(self, nbytes: float) -> float:
        """For a message of `nbytes`."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Stage:
    """What a run of units costs together; see :class:`Unit` and :class:`Weights`.

    Attributes:
        activations: bytes that one micro-batch keeps from its forward to its backward, messages at both ends included.
        parameters: indices of the parameters.
        gradients: bytes of the sums of its gradients.
        trained: bytes of the weights that are trained.
    """

    forward: float
    input_grad: float
    weight_grad: float
    activations: int
    parameters: frozenset[int]
    gradients: int
    trained: int


@dataclass(frozen=True)
class ModelProfile:
    """The profile of a model for one size of micro-batch.

    Attributes:
        units: in the order of the step.
        boundaries: between neighbouring units; one less than units.
        weights: all parameters that some unit uses.
        link: between two devices.
        step_seconds: what the optimizer takes for one byte of weights.
        samples: in the micro-batch that was measured.

    Raises:
        ValueError: for numbers of boundaries, or indices of parameters, that do not fit.
    """

    units: tuple[Unit, ...]
    boundaries: tuple[Boundary, ...]
    weights: tuple[Weights, ...] = ()
    link: Link = Link()
    step_seconds: float = 0.0
    samples: int = 1

    def __post_init__(self) -> None:
        if len(self.boundaries) != len(self.units) - 1:
            raise ValueError(f"{len(self.units)} units have {len(self.boundaries)} boundaries between them")
        known = range(len(self.weights))
        if any(index not in known for unit in self.units for index in unit.parameters):
            raise ValueError(f"a unit uses a parameter that is not among the {len(self.weights)} given")
        object.__setattr__(self, "_stages", {})

    @cached_property
    def _sums(self) -> tuple[list[float], list[float], list[float], list[int], list[int]]:
        units, kept = self.units, [b.nbytes if b.kept else 0 for b in self.boundaries]
        return (
            [0.0, *accumulate(unit.forward for unit in units)],
            [0.0, *accumulate(unit.input_grad for unit in units)],
            [0.0, *accumulate(unit.weight_grad for unit in units)],
            [0, *accumulate(unit.saved for unit in units)],
            [0, *accumulate(kept)],
        )

    def stage(self, begin: int, end: int) -> Stage:
        """The stage of the units from `begin` until before `end`."""
        known: dict[tuple[int, int], Stage] = self.__dict__["_stages"]
        found = known.get((begin, end))
        if found is None:
            forward, inputs, weights, saved, kept = self._sums
            activations = saved[end] - saved[begin] + kept[end - 1] - kept[begin]
            activations += sum(self.boundaries[i].nbytes for i in (begin - 1, end - 1) if 0 <= i < len(self.boundaries))
            parameters = frozenset(index for unit in self.units[begin:end] for index in unit.parameters)
            trained = [self.weights[index] for index in parameters if self.weights[index].gradient]
            input_grad, weight_grad = inputs[end] - inputs[begin], weights[end] - weights[begin]
            if not begin or not self.boundaries[begin - 1].gradient:
                # No gradient is passed on: nothing is done before the weights' half, and all of it then.
                input_grad, weight_grad = 0.0, input_grad + weight_grad
            found = known[begin, end] = Stage(
                forward[end] - forward[begin] + self.units[begin].entry,
                input_grad,
                weight_grad,
                activations,
                parameters,
                sum(weights.gradient for weights in trained),
                sum(weights.nbytes for weights in trained),
            )
        return found

    def stages(self, cuts: Sequence[int]) -> tuple[Stage, ...]:
        """The stages between ascending cuts; cut `i` lies between ``units[i]`` and ``units[i + 1]``."""
        return tuple(
            self.stage(begin, end) for begin, end in pairwise((0, *(cut + 1 for cut in cuts), len(self.units)))
        )

    def work(self) -> list[float]:
        """Seconds of each unit, forward and backward."""
        return [unit.forward + unit.input_grad + unit.weight_grad for unit in self.units]

    def costs(self, cuts: Sequence[int], placement: Placement, replicas: int = 1) -> Costs:
        """What the actions of a schedule cost, in seconds.

        A device's link is shared by all stages that it hosts, whose last backwards come shortly after one another: a
        reduction takes as long as all that the busiest device sends of its gradients, and an update as long as the
        optimizer's step on what a device owns and all that it then sends of its new weights. Each parameter is owned
        by one of its hosts in all data-parallel replicas together, so that with more of these a host owns less, and
        sends more of its gradients away.
        """
        stages = self.stages(cuts)
        shares = [max(1, len(placement.hosts(stage))) * replicas for stage in range(len(stages))]
        hosted = [placement.hosted(device) for device in range(placement.num_stages)]
        reduce = self._exchange([stage.gradients for stage in stages], shares, hosted)
        update = self._exchange([stage.trained for stage in stages], shares, hosted)
        owned = [sum(stages[s].trained / shares[s] for s in numbers) for numbers in hosted]
        messages = [self.link.seconds(self.boundaries[cut].nbytes) for cut in cuts]
        inputs, weights = tuple(s.input_grad for s in stages), tuple(s.weight_grad for s in stages)
        return Costs(
            tuple(stage.forward for stage in stages),
            tuple(a + b for a, b in zip(inputs, weights, strict=True)),
            inputs,
            weights,
            max(messages, default=0.0),
            reduce,
            update + self.step_seconds * max(owned),
        )

    def _exchange(self, nbytes: Sequence[int], shares: Sequence[int], hosted: Sequence[Sequence[int]]) -> float:
        """Seconds in which the busiest device sends, of each stage, all shares but its own; 0 if it has them all."""
        if max(shares) == 1:
            return 0.0
        return self.link.seconds(max(sum(nbytes[s] * (1 - 1 / shares[s]) for s in numbers) for numbers in hosted))

    def total(self, parameters: frozenset[int], kind: str) -> int:
        """The sum over some parameters of a size: ``"nbytes"``, ``"gradient"`` or another of :class:`Weights`."""
        return sum(getattr(self.weights[index], kind) for index in parameters)

    def scaled(self, samples: int) -> ModelProfile:
        """An estimate for micro-batches of another size: all but weights in proportion to the samples."""
        ratio = samples / self.samples
        units = tuple(
            replace(
                unit,
                forward=unit.forward * ratio,
                input_grad=unit.input_grad * ratio,
                weight_grad=unit.weight_grad * ratio,
                saved=math.ceil(unit.saved * ratio),
            )
            for unit in self.units
        )
        boundaries = tuple(replace(b, nbytes=math.ceil(b.nbytes * ratio)) for b in self.boundaries)
        return replace(self, units=units, boundaries=boundaries, samples=samples)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dictionaries, strings and numbers."""
        return {**asdict(self), "link": {"latency": self.link.latency, "bandwidth": _finite(self.link.bandwidth)}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelProfile:
        """The inverse of :meth:`to_dict`."""
        bandwidth = data["link"]["bandwidth"]
        return cls(
            tuple(Unit(**{**unit, "parameters": tuple(unit["parameters"])}) for unit in data["units"]),
            tuple(Boundary(**{**boundary, "shape": tuple(boundary["shape"])}) for boundary in data["boundaries"]),
            tuple(Weights(**weights) for weights in data["weights"]),
            Link(data["link"]["latency"], math.inf if bandwidth is None else bandwidth),
            data["step_seconds"],
            data["samples"],
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
