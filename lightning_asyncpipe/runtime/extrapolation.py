"""Better weights for early forwards: those that the coming update will lead to if it resembles the last one.

An early forward runs on w + (w - w') * (lr / lr'), where w' are the weights before the last update, lr' the learning
rate with which that was made and lr the one of the coming update. It needs no state of the optimizer, and one more copy
of the weights that a device hosts. Its backward uses the same tensors.

With the first update still to come, after a flush and after a step that was skipped there is nothing to go by: then the
weights are those of a stash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_asyncpipe.runtime.gradients import GradientAccumulator
from lightning_asyncpipe.runtime.stash import WeightStash


class Extrapolation(WeightStash):
    """Copies of the hosted weights, moved on by one update.

    Args:
        parameters: the hosted trainable parameters by name.
        stages: for each stage, the names of the parameters that it uses.
        rate: the learning rate of a parameter's next update, by name.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        stages: Sequence[Sequence[str]],
        rate: Callable[[str], float],
    ) -> None:
        super().__init__(parameters, stages)
        self._rate = rate
        self._last_rates: dict[str, float] = {}
        self._before: dict[str, Tensor] = {}

    def step_follows(self) -> None:
        self._last_rates = {name: self._rate(name) for name in self._parameters}

    def before_update(self, names: Iterable[str]) -> None:
        for name in names:
            kept = self._before.get(name)
            if kept is None:
                self._before[name] = self._parameters[name].detach().clone(memory_format=torch.preserve_format)
            else:
                kept.copy_(self._parameters[name].detach())

    def last_move(self, name: str, parameter: Parameter) -> tuple[Tensor, float] | None:
        """A parameter's last update, and the learning rate of its next one; None where there is nothing to go by."""
        before = self._before.get(name)
        if before is None or not self._last_rates.get(name):
            return None
        return parameter.detach() - before, self._rate(name)

    def stand_in(self, name: str, parameter: Parameter, gathered: GradientAccumulator) -> Tensor:
        known = self.last_move(name, parameter)
        if known is None:
            return super().stand_in(name, parameter, gathered)
        move, rate = known
        return torch.add(parameter.detach(), move, alpha=rate / self._last_rates[name])

    def flush(self) -> None:
        super().flush()
        self._before.clear()
