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

    def rates(self, name: str) -> tuple[float, float] | None:
        """The learning rates of a parameter's last update and of its next one; None where nothing is to go by."""
        last = self._last_rates.get(name)
        return (last, self._rate(name)) if last and name in self._before else None

    def stand_in(self, name: str) -> Tensor:
        rates = self.rates(name)
        if rates is None:
            return super().stand_in(name)
        last, rate = rates
        weights = self._parameters[name].detach()
        return torch.add(weights, weights - self._before[name], alpha=rate / last)

    def flush(self) -> None:
        super().flush()
        self._before.clear()
