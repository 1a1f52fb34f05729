"""Tests the decoding of keys, and the effect of keys on the screen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.errors import SourceError
from podgpu.fleet.choose import Alert
from podgpu.fleet.view import GpuDetails, XidView
from podgpu.top.feed import FetchedDetails, Seen
from podgpu.top.live import decode_keys
from podgpu.top.screen import Screen
from podgpu.top.table import Spans, as_text
from tests.top import scene
from tests.top.scene import LOST, busy_gpu, gpu, holder


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"q", ["q"]),
        (b"\x1b[A\x1b[B\x1bOA\x1bOB", ["up", "down", "up", "down"]),
        (b"\x1b[5~\x1b[6~\x1b[H\x1b[F", ["page_up", "page_down", "home", "end"]),
        (b"\r\n\x7f\x08", ["enter", "enter", "backspace", "backspace"]),
        ("ü漢".encode(), ["ü", "漢"]),
        (b"\x1b[1;5Cq", ["\x1b[1;5C", "q"]),
        (b"\x1b\x1b[A", ["escape", "up"]),
        (b"\x1bq", ["escape", "q"]),
    ],
)
def test_keys(data: bytes, keys: list[str]) -> None:
    assert decode_keys(data) == keys


def seen(
    count: int = 30, error: SourceError | None = None, notes: tuple[str, ...] = (), **more: Any
) -> Seen:
    gpus = [gpu(number, holder(), model="NVIDIA L4", **more) for number in range(count)]
    return replace(scene.seen(*gpus, notes=list(notes)), error=error)


class Terminal:
    """A screen of 12 lines: title, totals, header, 8 lines of the table, and a line with keys."""

    def __init__(self, shown: Seen, size: tuple[int, int] = (80, 12), **options: Any) -> None:
        self.screen = Screen("name", **options)
        self.seen, self.size = shown, size
        self.draw()

    def draw(self) -> None:
        self.lines: list[Spans] = self.screen.draw(self.seen, self.size, 112.0)
        self.texts = [as_text(line) for line in self.lines]

    def press(self, *keys: str) -> Terminal:
        for key in keys:
            self.screen.press(key)
            self.draw()
        return self

    @property
    def body(self) -> list[str]:
        return self.texts[3:11]

    @property
    def cursor(self) -> int | None:
        """Number of the GPU at the cursor."""
        rows = [
            as_text(line)
            for line in self.lines
            if any(style.startswith("cursor") for _, style in line)
        ]
        return int(rows[0].split()[0]) if rows else None


def test_title_header_body_and_keys() -> None:
    shown = Terminal(seen(30)).texts
    assert shown[0] == "podgpu top  n  30 GPUs, 1 holder, by GPU"
    assert shown[2].startswith("GPU MODEL")
    assert shown[3].startswith("0 ")
    assert shown[-1].endswith("8/30")


@pytest.mark.parametrize(
    ("keys", "cursor", "first"),
    [
        (("down", "j", "down"), 3, 0),
        (("down", "k", "up"), 0, 0),
        (("down",) * 12, 12, 5),
        ((*("down",) * 12, "up"), 11, 5),
        (("end",), 29, 22),
        (("end", "home"), 0, 0),
        (("page_down", " "), 16, 9),
        (("page_down", "page_up", "page_up"), 0, 0),
    ],
)
def test_the_list_scrolls_with_the_cursor(keys: tuple[str, ...], cursor: int, first: int) -> None:
    terminal = Terminal(seen()).press(*keys)
    assert (terminal.cursor, int(terminal.body[0].split()[0])) == (cursor, first)


def test_the_cursor_follows_its_row() -> None:
    terminal = Terminal(seen(5)).press("down", "down")
    broken = gpu(4, holder(), conditions=[LOST])
    terminal.seen = scene.seen(*(gpu(number, holder()) for number in range(4)), broken)
    terminal.draw()
    assert (terminal.cursor, terminal.body[0][0]) == (2, "4")
    terminal.seen = seen(2)
    terminal.draw()
    assert terminal.cursor == 1, "must move to the last row if its GPU is gone"


@pytest.mark.parametrize(
    ("key", "title"), [("u", "utilisation"), ("m", "memory"), ("p", "power"), ("i", "idle time")]
)
def test_sorting_moves_to_the_top(key: str, title: str) -> None:
    terminal = Terminal(seen()).press("down", key)
    assert terminal.texts[0].endswith(f"by {title}")
    assert terminal.cursor == 0
    assert terminal.press("g").texts[0].endswith("by GPU")


def test_typing_a_filter() -> None:
    terminal = Terminal(seen(3)).press("/", "q", "u", "x", "backspace", "up", "\x01")
    assert (terminal.texts[-1], terminal.screen.ended) == ("filter: qu_", False)
    assert terminal.body[0] == "no line matches the filter"
    assert terminal.press("enter").texts[-1].startswith("filter: qu (Esc clears)")
    assert terminal.press("escape").body[0].startswith("0 ")
    assert Terminal(seen(3), wanted="train").body[2].startswith("2 ")


def test_quit_and_help() -> None:
    assert Terminal(seen(3)).press("q").screen.ended
    for key in ("h", "?"):
        terminal = Terminal(seen(3)).press(key)
        assert terminal.body[0].startswith("q ")
        assert terminal.press("u").body[0].startswith("0 ")
    assert Terminal(seen(3)).press("h", "q").screen.ended


def test_the_help_explains_what_the_idle_column_shows() -> None:
    terminal = Terminal(scene.seen(busy_gpu(0)), size=(100, 30))
    shown = terminal.body[0].split()[-1]
    explained = [line for line in terminal.press("h").texts if line.startswith("IDLE ")]
    assert f" {shown}: the holder uses the GPU" in explained[0]


def test_details_of_the_selected_gpu() -> None:
    details = GpuDetails(xids=[XidView(xid=79, says="GPU has fallen off the bus")])
    terminal = Terminal(replace(seen(9), fetched=FetchedDetails("GPU-2", details)))
    terminal.press("down", "down")
    assert terminal.screen.detailed_uuid == ""
    terminal.press("enter")
    assert terminal.screen.detailed_uuid == "GPU-2"
    assert terminal.body[0].startswith("GPU 2  L4  on n  GPU-2")
    assert {"held by research/train/main", "XID 79: GPU has fallen off the bus"} <= set(
        terminal.body
    )
    for key in ("escape", "enter"):
        assert terminal.press(key, "enter", key).cursor == 2
        assert terminal.screen.detailed_uuid == ""
        terminal.press("enter")


def test_details_scroll() -> None:
    terminal = Terminal(seen(1, conditions=[LOST] * 5)).press("enter")
    first = terminal.body
    assert terminal.press("down").body[:-1] == first[1:]
    assert terminal.press("end", "page_up", "home").body == first


def test_broken_gpus_are_first_and_red() -> None:
    broken = scene.seen(gpu(0, holder()), gpu(7, holder(), conditions=[LOST], absent=True))
    orders: tuple[dict[str, Any], ...] = ({}, {"order": "utilisation"}, {"wanted": "broken"})
    for options in orders:
        drawn = Terminal(broken, **options)
        assert drawn.body[0].startswith("7 ")
        assert drawn.body[1] == "  ! lost for 1m40s: GPU 1 has fallen off the bus"
        assert {style for _, style in drawn.lines[4]} == {"bad"}


def test_an_error_is_shown_with_the_age_of_the_figures() -> None:
    shown = Terminal(seen(3, SourceError("x", "http://n: nothing listens there"))).texts
    assert shown[-2] == "http://n: nothing listens there; the figures are 12s old"
    assert shown[3].startswith("0 ")
    assert (
        Terminal(seen(3, SourceError("x", "long " * 50)))
        .texts[-2]
        .endswith("the figures are 12s old")
    )


def test_notes() -> None:
    assert Terminal(seen(3, notes=("kubelet: not there",))).texts[-2] == "kubelet: not there"
    alerts = [Alert("warning", "of a GPU", "n", "GPU-0"), Alert("broken", "serious", "n")]
    notes = ["of a GPU", *(f"note {number}" for number in range(5)), "serious"]
    shown = Terminal(scene.seen(gpu(0), notes=notes, alerts=alerts)).texts
    assert shown[-4:-1] == ["serious", "note 0", "4 more notes: run podgpu top --once to see them"]


KEYS = ["up", "down", "/", "a", "escape", "enter", "h", "end", " ", "i", "page_up", "home", "j"]


@given(
    st.lists(st.sampled_from(KEYS)),
    st.integers(0, 12),
    st.sampled_from([(1, 1), (5, 3), (20, 5), (80, 24)]),
)
def test_any_keys_and_size(keys: list[str], gpus: int, size: tuple[int, int]) -> None:
    terminal = Terminal(seen(gpus, SourceError("x", "wrong"), conditions=[LOST]), size).press(*keys)
    assert len(terminal.lines) == max(size[1], 5)
