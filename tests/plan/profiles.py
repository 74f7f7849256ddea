"""Made-up profiles of models."""

from __future__ import annotations

import random

from lightning_asyncpipe.plan.profile import Boundary, Link, ModelProfile, Unit, Weights


def profile(
    forward: list[float],
    link: float = 0.05,
    saved: int = 0,
    message: int = 0,
    weights: list[int] | None = None,
    state: int = 2,
) -> ModelProfile:
    """Units of which a backward takes twice as long as the forward; sizes in bytes; `state` times the weights."""
    sizes = weights or [0] * len(forward)
    return ModelProfile(
        tuple(Unit(f"layer.{i}", f, f, f, saved=saved, parameters=(i,)) for i, f in enumerate(forward)),
        tuple(Boundary(message) for _ in forward[1:]),
        tuple(Weights(f"layer.{i}.weight", size // 4, size, size, state * size) for i, size in enumerate(sizes)),
        Link(link),
    )


def random_profile(seed: int, units: int) -> ModelProfile:
    """Unequal units, some dear, some cheap, some without weights."""
    rng = random.Random(seed)
    made = []
    for i in range(units):
        forward = rng.choice([rng.random() + 0.2, 1.0, 3 * rng.random() + 0.1])
        made.append(Unit(f"layer.{i}", forward, forward, forward * rng.choice([0.0, 1.0])))
    return ModelProfile(tuple(made), tuple(Boundary(100) for _ in range(units - 1)), link=Link(0.05))
