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
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_asyncpipe.runtime.extrapolation import Extrapolation
from lightning_asyncpipe.runtime.gradients import GradientAccumulator, accumulation_dtype
from lightning_asyncpipe.runtime.packing import end_to_end, packs, spread, taken_apart
from lightning_asyncpipe.runtime.update_rules import UpdateRules

REFRESH = 20
"""After how many steps owners send preconditioners again."""


def refresh_is_due(steps: int) -> bool:
    """Whether preconditioners are sent so many steps after a flush: 1, 2, 4, 8, 16, and every :data:`REFRESH`."""
    return steps % REFRESH == 0 or (steps < REFRESH and steps & (steps - 1) == 0)


class _Basis(NamedTuple):
    """What a prediction goes by; parameters of which it is equal are predicted at once.

    Attributes:
        kind: of the parameter; see :meth:`UpdateRules.kind`.
        share: of the window that the gathered gradient is of.
        rates: the learning rates of the last update and of the coming one; None where the optimizer's state is at hand.
        gains: whether a preconditioner is known.
    """

    kind: Hashable
    share: float
    rates: tuple[float, float] | None = None
    gains: bool = False


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
        self._norms = {name: self._norm(name, gradient) for name, gradient in gradients.items()}

    def _norm(self, name: str, gradient: Tensor) -> Tensor:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        norm: Tensor = torch.linalg.vector_norm(values, dtype=accumulation_dtype(self._parameters[name].dtype))
        return norm

    def stepped(self) -> None:
        """Work out what later estimates need of this rank's step, for gradients neither unscaled nor clipped."""
        stepped: dict[torch.dtype, list[str]] = {}
        for name in self._norms:
            if self._parameters[name].grad is not None:
                stepped.setdefault(self._parameters[name].dtype, []).append(name)
        for dtype, names in stepped.items():
            self._note_left(names, dtype)
            for name in names if refresh_is_due(self._steps) else ():
                found = None if name in self._known else self._gains(name)
                if found is not None:
                    self._preconditioners[name] = found
        self._norms.clear()

    def _note_left(self, names: Sequence[str], dtype: torch.dtype) -> None:
        """Note what is left of the gradients of some parameters of one data type."""
        gradients = [(name, self._parameters[name].grad) for name in names]
        after = [self._norm(name, gradient) for name, gradient in gradients if gradient is not None]
        left = (torch.stack(after) / torch.stack([self._norms[name] for name in names])).to(dtype)
        # A gradient of zeros tells nothing. No value is looked at here, for which a GPU would be waited for.
        left = torch.where(left.isfinite(), left, self._lefts(names))
        self._left.update(zip(names, left, strict=True))

    def _lefts(self, names: Sequence[str]) -> Tensor:
        """What clipping left of the last gradient of each parameter, all of one data type; 0: unknown."""
        unknown = self._parameters[names[0]].detach().new_zeros(())
        return torch.stack([self._left.get(name, unknown) for name in names])

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
        due = names if refresh_is_due(self._steps) else []
        return [self._lefts(names), *(self._companion(name).reshape(-1) for name in due)]

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

    def stand_ins(self, names: Iterable[str], gathered: GradientAccumulator) -> dict[str, Tensor]:
        known = {name: self._basis(name, gathered) for name in names}
        found = {name: self.stand_in(name) for name, basis in known.items() if basis is None}
        bases = {name: basis for name, basis in known.items() if basis is not None}
        for pack in packs(self._parameters, bases):
            weights = [self._parameters[name].detach() for name in pack]
            found.update(zip(pack, taken_apart(self._predicted(pack, bases[pack[0]], gathered), weights), strict=True))
        return found

    def _basis(self, name: str, gathered: GradientAccumulator) -> _Basis | None:
        """What there is to go by beyond the last update; None: nothing."""
        if name not in self._left:
            return None
        share = 0.0 if gathered.get(name) is None else gathered.covered(name) / self._uses[name]
        if name in self._known:
            return _Basis(self._rules.kind(name), share)
        rates = self.rates(name)
        if rates is None or not share:
            return None
        return _Basis(self._rules.kind(name), share, rates, name in self._preconditioners)

    def _predicted(self, names: Sequence[str], basis: _Basis, gathered: GradientAccumulator) -> Tensor:
        """The coming weights of parameters of one basis, end to end."""
        weights = [self._parameters[name].detach() for name in names]
        gradients = [total.to_dense() for name in names if (total := gathered.get(name)) is not None and basis.share]
        scale = spread((self._lefts(names) / (basis.share or 1.0)).unbind(), weights)
        gradient = end_to_end(gradients) if gradients else None
        if basis.rates is None:
            return self._rules.next_weights(names, gradient, scale)
        assert gradient is not None
        old = end_to_end(weights)
        move = old - end_to_end([self._before[name] for name in names])
        gains = end_to_end([self._preconditioners[name] for name in names]) if basis.gains else None
        update = self._rules.update(names[0], move, basis.rates, gradient * scale, basis.share, gains)
        last, rate = basis.rates
        # A scaled gradient may have overflowed; the step will then be skipped, and these forwards stay of use.
        _repair(update, move.mul_(rate / last))
        return update.to(old.dtype).add_(old)

    def flush(self) -> None:
        super().flush()
        self._preconditioners.clear()
        self._norms.clear()
        self._left.clear()
        self._steps = 0


def _repair(update: Tensor, other: Tensor) -> None:
    """Put the numbers of `other` where those of `update` are not finite."""
    numbers, others = (torch.view_as_real(each) if each.is_complex() else each for each in (update, other))
    # Without truth values, with which a CPU is several times slower.
    overflowed = (numbers - numbers).nan_to_num_(1.0)
    numbers.nan_to_num_(0.0, 0.0, 0.0).addcmul_(overflowed, others)
