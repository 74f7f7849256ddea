"""The table of what works has a row for all that Lightning has, and every row names a test that is there."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import lightning.pytorch as pl
import pytest
from lightning.pytorch import callbacks
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

from tests.support.callback_cases import USES
from tests.support.edge_data import DATA
from tests.support.edge_hooks import HOOKS
from tests.support.edge_models import MODELS
from tests.support.edge_projects import PROJECTS
from tests.support.evaluation_cases import CASES

ROOT = Path(__file__).parent
KINDS = {
    "evaluation": CASES,
    "callbacks": USES,
    "data": DATA,
    "hooks": HOOKS,
    "models": MODELS,
    "projects": PROJECTS,
}


class Row(NamedTuple):
    """A row of the table: what it is about, whether that works, and the names of tests."""

    section: str
    subject: str
    verdict: str
    tests: list[str]


def rows() -> Iterator[Row]:
    section = ""
    for line in (ROOT.parent / "docs" / "compatibility.md").read_text().splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif line.startswith("| ") and not line.endswith("| test |"):
            subject, verdict, tests = line.strip("|").rsplit("|", 2)
            yield Row(section, subject.strip(), verdict.strip(), re.findall("`([^`]+)`", tests))


ROWS = list(rows())


def named(section: str) -> set[str]:
    """What the rows of a section are about; `on_{a,b}_end` stands for two names."""
    subjects = (row.subject for row in ROWS if row.section == section)
    return {name for text in subjects for entry in re.findall("`([^`]+)`", text) for name in expand(entry)}


def expand(text: str) -> list[str]:
    found = re.search("{([^}]*)}", text)
    if found is None:
        return [text]
    return [name for choice in found[1].split(",") for name in expand(text.replace(found[0], choice, 1))]


def functions(kind: type) -> set[str]:
    """The public functions that a class itself defines."""
    return {name for name, value in vars(kind).items() if inspect.isfunction(value) and not name.startswith("_")}


def test_every_argument_of_the_trainer_has_a_row():
    assert named("Arguments of the Trainer") == set(inspect.signature(pl.Trainer).parameters)


def test_every_hook_has_a_row():
    hooks = {name for kind in (ModelHooks, DataHooks, CheckpointHooks, pl.Callback) for name in functions(kind)}
    of_modules = re.compile("configure_.*|.*_step|optimizer_zero_grad|backward")
    hooks |= {name for name in functions(pl.LightningModule) if of_modules.fullmatch(name)}
    assert named("Hooks") == hooks


def test_every_callback_has_a_row():
    assert named("Callbacks") == set(callbacks.__all__) - {"Callback"} | {"ReduceLROnPlateau"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.subject)
def test_a_row_says_whether_it_works_and_names_tests_that_exist(row):
    assert re.match("(works|error|differs)\\b", row.verdict), row.verdict
    assert row.tests
    for name in row.tests:
        kind, _, case = name.partition(": ")
        if case:
            assert case in KINDS[kind], name
        else:
            file, _, test = name.partition("::")
            assert f"\ndef {test}(" in (ROOT / file).read_text(), name
