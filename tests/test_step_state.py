"""What a step changes of a module, beside its loss, is named in a warning: it is not the same on every rank."""

from __future__ import annotations

import warnings
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn

from lightning_asyncpipe import ReferenceStrategy
from tests.support.edge_basics import Regression, Tower, sized
from tests.support.fit import fit


class Counting(nn.Linear):
    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x)


class Holds(Regression):
    """Has something in an attribute, and changes it in the step."""

    def __init__(self, held: Any, change: Any) -> None:
        super().__init__()
        self.held = held
        self.change = change

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.change(self.held)
        return super().training_step(batch, batch_idx)


class Inside(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = Tower()
        self.net.layers[2] = Counting(5, 5)


def counted(held: Any) -> None:
    held["n"] = held.get("n", 0) + 1


def counted_in_an_object(held: Any) -> None:
    held.n += 1


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (lambda: Holds({"n": 0}, counted), r"self\.held"),
        (lambda: Holds(Counter(), counted), r"self\.held"),
        (lambda: Holds(SimpleNamespace(n=0), counted_in_an_object), r"self\.held\.n"),
        (Inside, r"self\.net\.layers\.2\.count"),
    ],
)
def test_it_is_named_once(module: Any, name: str) -> None:
    with pytest.warns(UserWarning, match=f"`training_step` changes `{name}`") as caught:
        fit(module().double(), sized(8, 8), ReferenceStrategy(2, num_microbatches=4))
    assert sum("changes `self" in str(each.message) for each in caught) == 1


def test_what_stays_is_not() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Holds({"n": 0}, len).double(), sized(8, 8), ReferenceStrategy(2, num_microbatches=4))
    assert not [each for each in caught if "changes `self" in str(each.message)]
