"""dcgm-exporter's device strings."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.errors import UsageError
from podgpu.model import Device
from podgpu.node.agent.device_selection import Selection, parse_selection


@pytest.mark.parametrize(
    ("text", "selection"),
    [
        ("f", Selection()),
        ("g:0,1", Selection((0, 1), None)),
        ("i:0,2-4", Selection(None, (0, 2, 3, 4))),
        ("g:0+i:1", Selection((0,), (1,))),
        ("i:1+g:0", Selection((0,), (1,))),
        ("g+i:0-2", Selection((), (0, 1, 2))),
    ],
)
def test_valid_strings(text: str, selection: Selection) -> None:
    assert parse_selection(text) == selection


@pytest.mark.parametrize(
    "text",
    [
        "",
        "f:1",
        "g:",
        "g:4-2",
        "g:0,4-2",
        "g: 0",
        "g:0,i:3",
        "g:-1",
        "g:0+",
        "g:0+g:1",
        "f+i:0",
        "x",
    ],
)
def test_invalid_strings(text: str) -> None:
    with pytest.raises(UsageError, match="such as g:0,2-4"):
        parse_selection(text)


@given(st.text())
def test_any_text_is_parsed_or_a_usage_error(text: str) -> None:
    with suppress(UsageError):
        parse_selection(text)


GPU, CUT = (Device(n, f"GPU-{n}", f"00000000:0{n}:00.0", "H100", mig_enabled=n > 0) for n in (0, 1))
FIRST, SECOND = replace(CUT, gi_id=3, profile="1g.10gb"), replace(CUT, gi_id=4, profile="1g.10gb")
NODE = (GPU, CUT, FIRST, SECOND)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("g:0+i:1", {GPU.key, CUT.key, SECOND.key}),
        ("g+i:0", {GPU.key, CUT.key, FIRST.key}),
        ("i:1", {CUT.key, SECOND.key}),
    ],
)
def test_gpus_and_instances_together(text: str, shown: set[str]) -> None:
    """An instance is selected together with its GPU."""
    selection = parse_selection(text)
    selection.check(NODE)
    assert selection.select(NODE) == shown


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("g:7", "this node has no GPU 7"),
        ("g:7+i:0", "this node has no GPU 7"),
        ("g:0+i:2", "this node has no MIG instance 2"),
    ],
)
def test_devices_that_do_not_exist(
    text: str, complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UsageError, match=complaint):
        parse_selection(text).check(NODE)
    assert caplog.text == ""
