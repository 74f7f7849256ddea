"""What a model's parts cost together."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from lightning_asyncpipe.plan.placement import Placement
from lightning_asyncpipe.plan.profile import Boundary, Link, ModelProfile, Unit, Weights
from lightning_asyncpipe.runtime.ownership import ParameterInfo, assign

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


@pytest.mark.parametrize(("stages", "pipelines"), [(1, 1), (2, 1), (2, 2), (4, 2), (5, 2)])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_what_a_link_carries_is_what_the_owners_of_all_replicas_make_it(
    stages: int, pipelines: int, replicas: int
) -> None:
    # Many parameters of one size in each stage, so that owners are as even as the costs take them for.
    per_stage, size = 60, 8
    placement = Placement(stages, pipelines)
    units = tuple(
        Unit(f"{s}", 1.0, 1.0, 1.0, parameters=tuple(range(s * per_stage, (s + 1) * per_stage))) for s in range(stages)
    )
    weights = tuple(Weights(f"{i}", size, 4 * size, 4 * size) for i in range(stages * per_stage))
    model = ModelProfile(units, (Boundary(4),) * (stages - 1), weights, Link(0.0, 1.0))
    owned = assign(
        [ParameterInfo(w.name, w.numel, torch.float32, True, (index // per_stage,)) for index, w in enumerate(weights)],
        placement,
        replicas,
    )
    reduced = dict.fromkeys(range(stages * replicas), 0)
    updated = dict(reduced)
    for name, owner in owned.owner.items():
        for host in owned.hosts[name]:
            if host != owner:
                reduced[host] += 4 * size
                updated[owner] += 4 * size
    costs = model.costs(range(stages - 1), placement, replicas)
    assert costs.reduce == pytest.approx(max(reduced.values()), rel=0.05)
    assert costs.update == pytest.approx(max(updated.values()), rel=0.05)


def test_weights_that_are_not_trained_cost_no_update() -> None:
    trained = profile([48] * 4)
    frozen = replace(trained, weights=(trained.weights[0], *(replace(w, gradient=0) for w in trained.weights[1:])))
    placement = Placement(4, 4)
    one = LATENCY + 24 * 3 / 4 / BANDWIDTH
    assert trained.costs(range(3), placement).update == pytest.approx(LATENCY + 4 * 24 * 3 / 4 / BANDWIDTH)
    assert frozen.costs(range(3), placement).update == pytest.approx(one)
    stepped = replace(frozen, step_seconds=1.0)
    assert stepped.costs(range(3), placement).update == pytest.approx(one + 24 / 4)


@pytest.mark.parametrize("frozen", [0, 2, 3])
def test_a_stage_that_passes_no_gradient_on_does_all_of_its_backward_with_the_weights(frozen: int) -> None:
    given = profile([8] * 6)
    boundaries = tuple(replace(b, gradient=i >= frozen) for i, b in enumerate(given.boundaries))
    for cuts in ([1, 3], [0, 2, 4], range(5)):
        stages = replace(given, boundaries=boundaries).stages(cuts)
        for begin, stage, before in zip((0, *(cut + 1 for cut in cuts)), stages, given.stages(cuts), strict=True):
            whole = before.input_grad + before.weight_grad
            assert stage.input_grad + stage.weight_grad == whole
            assert (stage.input_grad == 0) == (begin <= frozen)
            if begin > frozen:
                assert stage.input_grad == stage.weight_grad == whole / 2
