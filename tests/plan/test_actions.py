from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_asyncpipe.errors import ScheduleError
from lightning_asyncpipe.plan.actions import COMPUTE, Action, Kind

numbers = st.integers(0, 200)
whole = st.builds(Action, st.sampled_from([Kind.REDUCE, Kind.UPDATE]), numbers)
compute = st.builds(Action, st.sampled_from(sorted(COMPUTE, key=str)), numbers, numbers, numbers, st.booleans())
messages = st.builds(
    Action,
    st.sampled_from([Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION, Kind.SEND_GRADIENT, Kind.RECV_GRADIENT]),
    numbers,
    numbers,
    numbers,
    st.booleans(),
    numbers,
)


@given(st.one_of(whole, compute, messages))
@settings(deadline=None, max_examples=200)
def test_an_action_is_read_back_from_its_text(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("F2:5@1", Action(Kind.FORWARD, 2, 5, 1)),
        ("F2:5@1+", Action(Kind.FORWARD, 2, 5, 1, ahead=True)),
        ("W0:0@0", Action(Kind.WEIGHT_GRAD, 0, 0, 0)),
        ("SA2:5@1+>3", Action(Kind.SEND_ACTIVATION, 2, 5, 1, ahead=True, peer=3)),
        ("RG2:5@1<0", Action(Kind.RECV_GRADIENT, 2, 5, 1, peer=0)),
        ("R7", Action(Kind.REDUCE, 7)),
        ("U7", Action(Kind.UPDATE, 7)),
    ],
)
def test_the_text_form_is_stable(text: str, action: Action) -> None:
    assert str(action) == text
    assert Action.parse(text) == action


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F2",
        "F2:5",
        "F2:5@1>3",
        "SA2:5@1",
        "SA2:5@1<3",
        "RA2:5@1>3",
        "R2:5@1",
        "X2:5@1",
        "F02:5@1",
        "F-1:5@1",
        "F2:5@1 ",
        "F2:5@1++",
        "F٣:5@1",
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action"):
        Action.parse(text)
