"""dcgm-exporter's device strings."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.device_selection import Selection, parse_selection
from podgpu.errors import UsageError


@pytest.mark.parametrize(
    ("text", "selection"),
    [
        ("f", Selection("f")),
        ("g", Selection("g")),
        ("i", Selection("i")),
        ("g:0,1", Selection("g", (0, 1))),
        ("i:0,2-4", Selection("i", (0, 2, 3, 4))),
        ("g:3,3,1-2", Selection("g", (1, 2, 3))),
    ],
)
def test_good_ones(text: str, selection: Selection) -> None:
    assert parse_selection(text) == selection


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "starts with one of"),
        ("x", "starts with one of"),
        ("f:1", "f takes no ids; use 'g:1' or 'i:1'"),
        ("f:1\n", r"use 'g:1\\n' or 'i:1\\n'"),
        ("g:", "is no id"),
        ("g:4-2", "runs backwards; write 2-4"),
        ("g: 0", "without spaces"),
        (" g:0", "starts with one of"),
        ("g:0,i:3", "one letter"),
        ("g:-1", "is no id"),
        ("g:1-", "is no id"),
        ("g:0:1", "is no id"),
        ("g:0-99999", "more than"),
        ("g:١", "is no id"),
    ],
)
def test_bad_ones_say_what_is_wrong(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        parse_selection(text)


@given(st.text())
def test_nothing_else_is_ever_raised(text: str) -> None:
    with suppress(UsageError):
        parse_selection(text)


@given(st.sampled_from("gi"), st.sets(st.integers(0, 300), min_size=1, max_size=20))
def test_round_trip(kind: str, ids: set[int]) -> None:
    selection = Selection(kind, tuple(sorted(ids)))
    assert parse_selection(str(selection)) == selection
