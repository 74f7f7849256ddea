"""A plan that leaves devices idle is said to be a poor one."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_asyncpipe.integration.plan_quality import poor
from lightning_asyncpipe.plan.geometry import Geometry


def judged(
    work: list[float],
    pipelines: int = 1,
    parameters: list[int] | None = None,
    measured: list[float] | None = None,
    utilisation: float | None = None,
) -> str | None:
    stages = len(work)
    description: dict[str, Any] = {
        "stages": [
            {
                "begins": "" if stage == stages - 1 else f"layers.{stage}",
                "parameters": 1 if parameters is None else parameters[stage],
                "forward_ms": None if measured is None else measured[stage],
                "backward_ms": None if measured is None else 2 * measured[stage],
            }
            for stage in range(stages)
        ],
        "devices": [{"device": device, "utilisation": utilisation} for device in range(stages)],
    }
    return poor(work, Geometry(stages, pipelines, 8, 8, 1), description)


@pytest.mark.parametrize(
    "plan",
    [
        {"work": [1.0]},
        {"work": [1.0, 1.0]},
        {"work": [3.0, 4.0, 5.0]},
        {"work": [1.0, 0.0], "pipelines": 2},  # both devices run both stages
        {"work": [9.0, 1.0, 1.0, 1.0], "measured": [1.0, 1.0, 1.0, 1.0], "utilisation": 0.8},
    ],
)
def test_fair_plans_are_not_spoken_of(plan: dict[str, Any]) -> None:
    assert judged(**plan) is None


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (
            {"work": [9.0, 1.0]},
            r"stage 0 \(from 'layers.0'\) would do 90% of the work, so that 2 devices are at most 1.1 ",
        ),
        ({"work": [1.0, 1.0, 1.0, 9.0]}, r"stage 3 would do 75% of the work, so that 4 devices are at most 1.3 times"),
        ({"work": [1.0] * 3, "parameters": [5, 0, 5]}, "device 1 would hold none of the weights"),
        ({"work": [1.0] * 3, "measured": [1.0, 8.0, 1.0], "utilisation": 0.4}, "stage 1 .* 80%"),
        ({"work": [1.0] * 3, "measured": [1.0] * 3, "utilisation": 0.05}, "predicted to be busy 5% of the time"),
    ],
)
def test_poor_plans_are_named_with_what_to_do(plan: dict[str, Any], expected: str) -> None:
    with pytest.raises(AssertionError, match=f"(?s)poor one: .*{expected}.*Use fewer devices"):
        raise AssertionError(judged(**plan))
