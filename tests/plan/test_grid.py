from __future__ import annotations

import pytest
from hypothesis import given, settings

from lightning_asyncpipe.errors import ScheduleError
from lightning_asyncpipe.plan.actions import Action
from lightning_asyncpipe.plan.grid import dumps, loads, render
from lightning_asyncpipe.plan.placement import Placement
from lightning_asyncpipe.plan.schedule import SegmentPlan, SegmentSpec
from tests.plan.chains import Case, cases, quick_planner

PLACEMENT = Placement(2, 1)
TEXT = """\
segment microbatches=1 ahead=2 carried= updated=1 steps=1 carry=1,0
device 0: RA1:0@0<1 U1 F1:0@0 B1:0@0 SG1:0@0>1 RA1:0@0+<1 R1
device 1: U0 F0:0@0 SA0:0@0>0 RG0:0@0<0 B0:0@0 R0 F0:0@0+ SA0:0@0+>0
"""


@given(cases(max_devices=6))
@settings(deadline=None, max_examples=40)
def test_a_plan_is_read_back_from_its_text(case: Case) -> None:
    for plan in case.plan():
        assert loads(dumps(plan), case.placement, case.max_in_flight) == plan


def test_the_text_form_is_stable() -> None:
    plan = loads(TEXT, PLACEMENT, 1)
    assert plan.spec == SegmentSpec(1, 2)
    assert plan.carry == (1, 0)
    assert dumps(plan) == TEXT


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("segment", "segments", "line 1: expected"),
        ("microbatches=1", "microbatches=0", "line 1: microbatches is 0"),
        ("carried=", "carried=1,1", "line 1: carried names 2"),
        ("carried=", "carried=1,,1", "line 1: expected"),
        ("device 1", "device 2", "line 3: expected 'device 1: ...'"),
        ("U0 F0", "U0 X0", "line 3: 'X0:0@0' is not an action"),
        ("U0 F0:0@0", "U0", r"device 1: complete: F0:0@0 is missing"),
        ("carry=1,0", "carry=1", "carry: 1 entries"),
    ],
)
def test_a_text_that_is_wrong_is_refused_with_the_reason(old: str, new: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        loads(TEXT.replace(old, new, 1), PLACEMENT, 1)


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(ScheduleError, match="line 1"):
        loads("", PLACEMENT, 1)


def test_a_grid_shows_devices_over_time() -> None:
    first = loads(TEXT, PLACEMENT, 1)
    second = SegmentPlan(
        SegmentSpec(2, carried=(1, 0), updated=True, steps=False),
        tuple(
            tuple(Action.parse(word) for word in line.split())
            for line in (
                "U1 F1:0@0 B1:0@0 SG1:0@0>1 RA1:1@0<1 F1:1@0 B1:1@0 SG1:1@0>1",
                "RG0:0@0<0 U0 B0:0@0 F0:1@0 SA0:1@0>0 RG0:1@0<0 B0:1@0",
            )
        ),
        (),
    )
    assert render(PLACEMENT, [first, second]).splitlines() == [
        "          0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17",
        "device 0  .   |F0 B0  ==  .   .   .   |F0 B0  ==  .   .   .   F1  B1  ==  .   .",
        "device 1  |F0 .   .   .   B0  ==  F0+ .   .   .   |B0 ==  F1  .   .   .   B1  ==",
    ]


def test_a_grid_of_split_backwards_shows_both_halves() -> None:
    text = render(Placement(2, 2), [quick_planner(Placement(2, 2), 2, True).segment(SegmentSpec(2))])
    assert "I0" in text
    assert "W0" in text
