"""Better weights for early forwards: the coming update as far as it is known, the rest of it like the last one.

By the time that a device runs forwards of the next window, part of this window's gradient has been computed, some of it
on the device itself. Where a device has gathered the sum ``s`` of a share ``c`` of the window, an early forward runs on

    w + b d r - lr (1 - b) P s / c

where d is the last update of w, b the momentum, r the ratio of the learning rates of the coming update and of the last
one, and P the optimizer's preconditioner; of s counts what clipping left of the last gradient. :mod:`update_rules` has
what this is for each optimizer. With nothing gathered it is :mod:`extrapolation`.

A rank that owns the parameter has the state of the optimizer. For Adam and AdamW it works out the step that the
optimizer would make with that gradient (:mod:`adam`), and keeps no more than one number. Elsewhere weights before the
last update are kept, and preconditioners, which owners send with new weights, every :data:`REFRESH` steps, more often
in the beginning; what clipping left, one number, they send at each step. For AdamW these are two more copies of the
weights that a device hosts and does not own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_asyncpipe.runtime.extrapolation import Extrapolation
from lightning_asyncpipe.runtime.gradients import GradientAccumulator
from lightning_asyncpipe.runtime.update_rules import UpdateRules

REFRESH = 20
"""After how many steps owners send preconditioners again."""


def refresh_is_due(steps: int) -> bool:
    """Whether preconditioners are sent so many steps after a flush: 1, 2, 4, 8, 16, and every :data:`REFRESH`."""
    return steps % REFRESH == 0 or (steps < REFRESH and steps & (steps - 1) == 0)


class Prediction(Extrapolation):
    """Copies of the hosted weights, moved on by what is known and expected of the coming update.

    Args:
        parameters: the hosted trainable parameters by name.
        stages: for each stage, the names of the parameters that it uses.
        rate: the learning rate of a parameter's next update, by name.
        rules: how the optimizer updates them.
        owned: names of those that this rank steps.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        stages: Sequence[Sequence[str]],
        rate: Callable[[str], float],
        rules: UpdateRules,
        owned: Collection[str] = (),
    ) -> None:
        super().__init__(parameters, stages, rate)
        self._rules = rules
        self._known = frozenset(name for name in owned if name in parameters and rules.tells_weights(name))
        self._left: dict[str, Tensor] = {}
        self._uses = Counter(name for names in stages for name in names)
        self._preconditioners: dict[str, Tensor] = {}
        self._norms: dict[str, Tensor] = {}
        self._steps = 0

    def step_follows(self) -> None:
        super().step_follows()
        self._steps += 1

    def before_update(self, names: Iterable[str]) -> None:
        super().before_update(name for name in names if name not in self._known)

    def collected(self, gradients: Mapping[str, Tensor]) -> None:
        self._norms = {name: gradient.norm() for name, gradient in gradients.items()}

    def stepped(self) -> None:
        """Work out what later estimates need of this rank's step, for gradients neither unscaled nor clipped."""
        for name, norm in self._norms.items():
            parameter = self._parameters[name]
            if parameter.grad is None:
                continue
            left = (parameter.grad.to(norm.dtype).norm() / norm).to(parameter.dtype)
            # A gradient of zeros tells nothing. No value is looked at here, for which a GPU would be waited for.
            self._left[name] = torch.where(left.isfinite(), left, self._left.get(name, torch.zeros_like(left)))
            if name not in self._known and refresh_is_due(self._steps):
                found = self._gains(name)
                if found is not None:
                    self._preconditioners[name] = found
        self._norms.clear()

    def _gains(self, name: str) -> Tensor | None:
        """The preconditioner of a parameter, None if there is none of finite numbers."""
        found = self._rules.preconditioner(name)
        if found is None or not found.isfinite().all():
            return None
        dtype = self._parameters[name].dtype
        largest = torch.finfo(dtype).max
        return found.clamp_(-largest, largest).to(dtype)

    def companions(self, names: Iterable[str]) -> list[Tensor]:
        """What clipping left of each gradient, and after them the preconditioners where they are due; 0: unknown."""
        names = list(names)
        lefts = [self._left.get(name, self._parameters[name].detach().new_zeros(())).reshape(1) for name in names]
        return [*lefts, *(self._companion(name).reshape(-1) for name in names if refresh_is_due(self._steps))]

    def _companion(self, name: str) -> Tensor:
        found = self._preconditioners.get(name)
        if found is None and name in self._known:
            found = self._gains(name)
        if found is None:
            return self._parameters[name].detach().new_zeros(self._rules.shape(name).numel())
        return found

    def arrived(self, names: Iterable[str], companions: Tensor) -> None:
        names = list(names)
        # Copies, since views would keep all of the message.
        lefts, gains = (part.clone() for part in companions.tensor_split([len(names)]))
        self._left.update(zip(names, lefts, strict=True))
        if not gains.numel():
            return
        shapes = [self._rules.shape(name) for name in names]
        parts = gains.tensor_split(list(accumulate(shape.numel() for shape in shapes)))
        for name, shape, part in zip(names, shapes, parts, strict=False):
            self._preconditioners[name] = part.view(shape)

    def stand_in(self, name: str, parameter: Parameter, gathered: GradientAccumulator) -> Tensor:
        gradient, left = gathered.get(name), self._left.get(name)
        covered = gathered.covered(name) / self._uses[name]
        if name in self._known and left is not None:
            whole = gradient.to_dense() if gradient is not None and covered else None
            return self._rules.next_weights(name, whole, left / (covered or 1.0))
        known = self.last_move(name, parameter)
        if known is None or gradient is None or not covered or left is None:
            return super().stand_in(name, parameter, gathered)
        move, rate = known
        whole = gradient.to_dense() * (left / covered)
        rates = self._last_rates[name], rate
        update = self._rules.update(name, move, rates, whole, covered, self._preconditioners.get(name))
        # A scaled gradient may have overflowed; the step will then be skipped, and these forwards stay of use.
        kept = torch.where(update.isfinite(), update.to(parameter.dtype), move * (rate / self._last_rates[name]))
        return parameter.detach() + kept

    def flush(self) -> None:
        super().flush()
        self._preconditioners.clear()
        self._norms.clear()
        self._left.clear()
        self._steps = 0
