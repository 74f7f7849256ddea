"""Which weights early forwards run on, by what the user asked for and the optimizer allows, and what keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_asyncpipe.integration.optimizers import LearningRates
from lightning_asyncpipe.plan.memory import EarlyWeights
from lightning_asyncpipe.runtime.extrapolation import Extrapolation
from lightning_asyncpipe.runtime.prediction import Prediction
from lightning_asyncpipe.runtime.stash import WeightStash
from lightning_asyncpipe.runtime.update_rules import UpdateRules, is_known, tells_weights


def choose_early_weights(stash: bool, correction: str, optimizers: Sequence[Optimizer]) -> EarlyWeights:
    """What early forwards run on.

    Args:
        stash, correction: ``weight_stash`` and ``staleness_correction``.
        optimizers: of the run.
    """
    if stash:
        return "stash"
    if correction == "none":
        return "live"
    if correction == "extrapolate" or not all(map(is_known, optimizers)):
        return "extrapolated"
    return "stepped" if all(map(tells_weights, optimizers)) else "predicted"


def make_stash(
    kind: EarlyWeights,
    optimizers: Sequence[Optimizer],
    stages: Sequence[Sequence[str]],
    parameters: Mapping[str, Parameter],
    owned: frozenset[str],
) -> WeightStash | None:
    """The weights of early forwards, None for the live ones.

    Args:
        kind: what they are.
        optimizers: as the user configured them, before they are pruned to what a rank owns.
        stages: for each stage, the names of the parameters that it uses.
        parameters: the trainable parameters that are kept here, by name.
        owned: names of those that are stepped here.
    """
    if kind == "stash":
        return WeightStash(parameters, stages)
    if kind == "live":
        return None
    rate = LearningRates(optimizers, parameters).of
    if kind == "extrapolated":
        return Extrapolation(parameters, stages, rate)
    return Prediction(parameters, stages, rate, update_rules(optimizers, parameters), owned)


def update_rules(optimizers: Sequence[Optimizer], parameters: Mapping[str, Parameter]) -> UpdateRules:
    """How parameters are updated, by name; `optimizers` as for :func:`make_stash`."""
    return UpdateRules(parameters, LearningRates(optimizers, parameters).places)
