"""A second set of weights for early forwards.

With ``weight_stash`` an early forward and its backward use the same weights, those of the version before the update;
``extrapolation`` gives them better ones. The forward runs on leaf tensors of its own, copied once per window and stage,
and its gradients go to the real parameters' accumulators. Live parameters never change their ``.data``: operations that
saved the parameter itself would then see one version and operations that saved a derived copy another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_asyncpipe.runtime.gradients import GradientAccumulator


class WeightStash:
    """Copies of the hosted weights as they were before the coming update.

    Args:
        parameters: the hosted trainable parameters by name.
        stages: for each stage, the names of the parameters that it uses.
    """

    def __init__(self, parameters: Mapping[str, Parameter], stages: Sequence[Sequence[str]]) -> None:
        self._parameters = parameters
        self._stages = stages
        self._leaves: dict[str, Tensor] = {}

    def leaves(self, stage: int, gathered: GradientAccumulator) -> dict[Parameter, Tensor]:
        """The stand-ins for the parameters of a stage, made on first use.

        Args:
            stage: from 0.
            gathered: the gradients that the device of this forward has gathered in the window so far.
        """
        hosted = [name for name in self._stages[stage] if name in self._parameters]
        missing = [name for name in hosted if name not in self._leaves]
        for name, leaf in self.stand_ins(missing, gathered).items():
            self._leaves[name] = leaf.requires_grad_()
        return {self._parameters[name]: self._leaves[name] for name in hosted}

    def stand_ins(self, names: Iterable[str], gathered: GradientAccumulator) -> dict[str, Tensor]:
        """What an early forward uses instead of these parameters; each in memory of its own."""
        return {name: self.stand_in(name) for name in names}

    def stand_in(self, name: str) -> Tensor:
        """What stands in for a parameter as far as it can be told without gradients."""
        return self._parameters[name].detach().clone(memory_format=torch.preserve_format)

    def step_follows(self) -> None:
        """The window has ended; the optimizers are about to step, on this rank and elsewhere."""

    def collected(self, gradients: Mapping[str, Tensor]) -> None:
        """The gradients of the window with which this rank is about to step what it owns."""

    def stepped(self) -> None:
        """This rank has stepped what it owns."""

    def companions(self, names: Iterable[str]) -> list[Tensor]:
        """What is sent with the new weights of these parameters, all of which this rank owns; flat, of their type."""
        return []

    def arrived(self, names: Iterable[str], companions: Tensor) -> None:
        """What was sent with the new weights of these parameters."""

    def before_update(self, names: Iterable[str]) -> None:
        """New weights are about to be written to these parameters, by this rank's step or because they arrived."""

    def rotate(self) -> None:
        """A segment ends: the forwards that are in flight keep their copies alive, the next ones make new ones."""
        self._leaves.clear()

    def flush(self) -> None:
        """The pipelines are empty, and what comes must not depend on what was before but for the weights."""
        self._leaves.clear()
