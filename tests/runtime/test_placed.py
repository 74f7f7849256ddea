"""A step is cut so that each part finds its weights on the stage that holds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_asyncpipe.errors import CutError
from lightning_asyncpipe.runtime.candidates import Candidates, find_cuts
from lightning_asyncpipe.runtime.placed import placed_program
from lightning_asyncpipe.runtime.program import StageProgram
from lightning_asyncpipe.runtime.proof import prove
from lightning_asyncpipe.runtime.stages import StageTask
from lightning_asyncpipe.runtime.trace import trace_step


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def run(self, x: Tensor, *order: int) -> Tensor:
        for index in order:
            x = self.layers[index](x)
        return x


HELD = [{f"layers.{i}.{kind}" for i in pair for kind in ("weight", "bias")} for pair in ((0, 1), (2, 3), (4, 5))]


def candidates_of(model: Model, step: Any) -> tuple[Candidates, StageTask]:
    task = StageTask((torch.randn(3, 4),))
    return find_cuts(trace_step(model, step, task.arguments, grad=False)), task


def placed(*order: int) -> tuple[StageProgram, tuple[int, ...]]:
    model = Model()

    def step(x: Tensor) -> Tensor:
        return model.run(x, *order)

    candidates, task = candidates_of(model, step)
    program, route = placed_program(candidates, HELD)
    prove(model, program, step, task, loss=None, grad=False)
    return program, route


@pytest.mark.parametrize(
    ("order", "route"),
    [
        ((0, 1, 2, 3, 4, 5), (0, 1, 2)),
        ((0, 1), (0,)),
        ((4, 5), (2,)),
        ((0, 4), (0, 2)),
        ((5, 4, 3, 2, 1, 0), (2, 1, 0)),
        ((0, 2, 1, 3, 1), (0, 1, 0, 1, 0)),
    ],
)
def test_layers_in_any_order_run_where_they_are(order: tuple[int, ...], route: tuple[int, ...]) -> None:
    program, found = placed(*order)
    assert found == route
    for names, stage in zip(program.parameters, found, strict=True):
        assert set(names) <= HELD[stage]


def test_what_several_stages_hold_runs_where_it_saves_messages() -> None:
    model = Model()
    candidates, _ = candidates_of(model, lambda x: model.run(x, 0, 2, 4))
    everywhere = [names | HELD[1] for names in HELD]
    assert placed_program(candidates, everywhere)[1] == (0, 2)


def test_a_part_that_cannot_be_cut_is_named_with_what_crosses() -> None:
    model = Model()
    candidates, _ = candidates_of(model, lambda x: model.run(x, 0, 2) + model.run(x.flip(0), 1, 3))
    with pytest.raises(CutError, match=r"uses 'layers\.\d\.\w+', which is on stage \d.*one tensor may cross, but 2 do"):
        placed_program(candidates, HELD)
