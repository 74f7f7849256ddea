"""What a model's parts cost together."""

from __future__ import annotations

from fractions import Fraction

import pytest

from lightning_asyncpipe.plan.placement import Placement
from lightning_asyncpipe.plan.profile import Boundary, Link, ModelProfile, Unit, Weights

BANDWIDTH, LATENCY = 8.0, 0.5


def profile(gradients: list[int]) -> ModelProfile:
    """A unit with one parameter for each number of bytes that its gradient has; its weights have half as many."""
    return ModelProfile(
        tuple(Unit(f"{i}", 1.0, 1.0, 1.0, parameters=(i,)) for i in range(len(gradients))),
        (Boundary(4),) * (len(gradients) - 1),
        tuple(Weights(f"{i}", size, size // 2, size) for i, size in enumerate(gradients)),
        Link(LATENCY, BANDWIDTH),
    )


@pytest.mark.parametrize("stages", [2, 3, 4, 6])
def test_devices_send_the_shares_of_all_their_stages_over_one_link(stages: int) -> None:
    gradients = [24 * (i + 1) for i in range(stages)]
    for pipelines in range(1, stages + 1):
        placement = Placement(stages, pipelines)
        costs = profile(gradients).costs(range(stages - 1), placement)
        busiest = max(
            sum(
                Fraction(gradients[stage]) * (len(placement.hosts(stage)) - 1) / len(placement.hosts(stage))
                for stage in placement.hosted(device)
            )
            for device in range(stages)
        )
        replicated = any(len(placement.hosts(stage)) > 1 for stage in range(stages))
        assert costs.reduce == pytest.approx(LATENCY + float(busiest) / BANDWIDTH if replicated else 0.0)
        assert costs.update == pytest.approx(LATENCY + float(busiest) / 2 / BANDWIDTH if replicated else 0.0)


def test_more_replicas_take_longer_to_agree() -> None:
    times = [profile([48] * 8).costs(range(7), Placement(8, n)).reduce for n in (1, 2, 4, 8)]
    assert times == sorted(times)
    assert len(set(times)) == len(times)
