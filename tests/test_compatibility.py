"""Every row of the table of what works names a test that is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.callback_cases import USES
from tests.support.evaluation_cases import CASES

ROOT = Path(__file__).parent
TABLE = (ROOT.parent / "docs" / "compatibility.md").read_text()
NAMES = sorted(
    {
        name
        for row in TABLE.splitlines()
        if row.startswith("|")
        for name in re.findall("`([^`]+)`", row.rsplit("|", 2)[1])
    }
)


@pytest.mark.parametrize("name", NAMES)
def test_a_named_test_exists(name):
    kind, _, case = name.partition(": ")
    if kind in ("evaluation", "callbacks"):
        assert case in (CASES if kind == "evaluation" else USES)
        return
    file, _, test = name.partition("::")
    assert f"def {test}" in (ROOT / file).read_text()
