"""Several processes compute what one process computes: the oracle, and one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.fit import clone, fit, parameters_of, reference_fit
from tests.support.launch import run_ranks
from tests.support.models import GPT, LanguageModel, loader
from tests.support.reference import largest_difference

BATCHES, BATCH_SIZE = 20, 10


def module_and_loader(optimizer="adamw"):
    torch.manual_seed(1)
    return LanguageModel(GPT(), optimizer=optimizer), loader(BATCHES * BATCH_SIZE, BATCH_SIZE)


def train_cases(world: int, cases: list[tuple[dict[str, Any], dict[str, Any]]], optimizer: str = "adamw") -> list[Any]:
    """On each rank: the parameters, losses and statistics of every case."""
    import lightning_asyncpipe

    results = []
    for strategy, arguments in cases:
        module, batches = module_and_loader(optimizer)
        module = clone(module)
        trainer, losses = fit(
            module,
            batches,
            lightning_asyncpipe.AsyncMultiPipeStrategy(**strategy),
            devices=world,
            **arguments,
        )
        results.append((parameters_of(module), losses, trainer.strategy.statistics()))
    return results


def grid(d, n):
    cases = []
    for m in sorted({1, d, 2 * d + 1}):
        paper = (1, {"staleness_correction": "none"}, True)
        extrapolated = (1, {"staleness_correction": "extrapolate"}, m > 1)
        predicted = (1, {"staleness_correction": "predict"}, m == d)
        stashed = (1, {"weight_stash": True}, m == d)
        two = {1: (paper, extrapolated), d: (predicted, stashed), 2 * d + 1: (paper, predicted)}
        for staleness, early, halves in ((0, {}, m > 1), *two[m]):
            extra = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5} if (d + n + m) % 2 else {}
            strategy = {
                "num_pipelines": n,
                "num_microbatches": m,
                "max_staleness": staleness,
                "split_backward": halves,
                **early,
            }
            cases.append((strategy, extra))
    return cases


@pytest.mark.parametrize(("d", "n"), [(d, n) for d in (2, 3, 4) for n in sorted({1, 2, d})])
def test_distributed_runs_equal_the_oracle(d, n):
    cases, optimizer = grid(d, n), "sgd" if (d, n) == (3, 2) else "adamw"
    ranks = run_ranks(train_cases, d, d, cases, optimizer)
    for i, (strategy, arguments) in enumerate(cases):
        module, batches = module_and_loader(optimizer)
        expected = clone(module)
        trainer, losses = reference_fit(expected, batches, d, strategy, **arguments)
        for results in ranks:
            parameters, found, statistics = results[i]
            assert largest_difference(parameters, parameters_of(expected)) < 1e-9, strategy
            assert found == pytest.approx(losses, abs=1e-9)
            for key in ("stale_microbatches", "microbatches", "max_staleness", "steps"):
                assert statistics[key] == trainer.strategy.statistics()[key], (strategy, key)
            assert statistics["stale_share"] == pytest.approx(trainer.strategy.statistics()["stale_share"])


def train_twice_with(world: int, strategy: dict[str, Any]) -> list[Any]:
    return [parameters for parameters, _, _ in train_cases(world, [(strategy, {})] * 2)]


def test_two_runs_give_the_same_bits():
    ranks = run_ranks(train_twice_with, 3, 3, {"num_pipelines": 2, "num_microbatches": 4})
    first = ranks[0][0]
    for one, other in ranks:
        assert all(torch.equal(one[name], first[name]) for name in first)
        assert all(torch.equal(other[name], first[name]) for name in first)
