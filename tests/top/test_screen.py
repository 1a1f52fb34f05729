"""Bytes to keys, keys to controls, controls to a screen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.cluster.alerts import Alert
from podgpu.cluster.view import GpuDetails, XidView
from podgpu.errors import SourceError
from podgpu.top.feed import FetchedDetails, Seen
from podgpu.top.lines import arrange
from podgpu.top.screen import Controls, Frame, Scene, Viewport, draw
from podgpu.top.table import Spans, Table, as_text
from podgpu.top.terminal import decode_keys
from tests.top import scene
from tests.top.scene import LOST, gpu, holder

# Keys


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


# Controls


ROWS = [("n", f"GPU-{number}", "", "") for number in range(100)]


def press(*keys: str, controls: Controls | None = None, lines: int = 100, details: int = 0) -> Controls:
    controls = controls or Controls()
    for key in keys:
        controls = controls.press(key, Viewport(ROWS[:lines], 10, details))
    return controls


@pytest.mark.parametrize(
    ("key", "order"), [("g", "gpu"), ("u", "utilisation"), ("m", "memory"), ("p", "power"), ("i", "idle")]
)
def test_sorting_moves_to_the_top(key: str, order: str) -> None:
    assert press("down", key) == Controls(order)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keys", "cursor", "scroll"),
    [
        (("down", "j", "down"), 3, 0),
        (("down", "k", "up"), 0, 0),
        (("down",) * 12, 12, 3),
        ((*("down",) * 12, "up"), 11, 3),
        (("end",), 99, 90),
        (("end", "home"), 0, 0),
        (("page_down", " "), 20, 11),
        (("page_down", "page_up", "page_up"), 0, 0),
    ],
)
def test_the_list_scrolls_with_the_cursor(keys: tuple[str, ...], cursor: int, scroll: int) -> None:
    moved = press(*keys)
    assert (moved.cursor, moved.scroll, moved.selected) == (cursor, scroll, ROWS[cursor])


def test_the_cursor_follows_its_row() -> None:
    selected = press("down", "down")
    first = ("n", "GPU-new", "", "")
    assert selected.clamp(Viewport([first, *ROWS], 10)).cursor == 3
    assert selected.clamp(Viewport([*ROWS[:2], *ROWS[3:]], 10)).cursor == 2
    assert selected.clamp(Viewport([], 10)).cursor == 0
    assert Controls().clamp(Viewport([first, *ROWS], 10)).cursor == 0


def test_details_are_opened_scrolled_and_closed() -> None:
    opened = press("down", "enter", "down", "page_down", details=25)
    assert (opened.detailed, opened.cursor, opened.details_scroll) == (True, 1, 11)
    assert press("end", controls=opened, details=25).details_scroll == 15
    for key in ("enter", "escape"):
        closed = press(key, controls=opened)
        assert (closed.detailed, closed.cursor, closed.details_scroll) == (False, 1, 0)


def test_typing_a_filter() -> None:
    typed = press("/", "q", "u", "x", "backspace", "up", "\x01")
    assert (typed.wanted, typed.typing, typed.ended) == ("qu", True, False)
    kept = press("enter", controls=typed)
    assert (kept.wanted, kept.typing, kept.detailed) == ("qu", False, False)
    assert press("escape", controls=kept) == press("escape", controls=typed) == Controls()


def test_quit_and_help() -> None:
    assert press("q").ended
    assert press("h").helping
    assert press("?").helping
    assert press("h", "u") == Controls()
    assert press("h", "q").ended


KEYS = ["up", "down", "/", "q", "a", "escape", "enter", "h", "end", " ", "i", "page_up", "home", "j"]


@given(st.lists(st.sampled_from(KEYS)), st.integers(0, 12))
def test_any_keys(keys: list[str], lines: int) -> None:
    controls = press(*keys, lines=lines, details=12)
    assert 0 <= controls.cursor <= max(0, lines - 1)
    assert controls.scroll <= controls.cursor < controls.scroll + 10
    assert 0 <= controls.scroll <= max(0, lines - 10)
    assert 0 <= controls.details_scroll <= 2


# Screens


def seen(count: int = 30, error: SourceError | None = None, notes: tuple[str, ...] = (), **more: Any) -> Seen:
    gpus = [gpu(number, holder(), model="NVIDIA L4", **more) for number in range(count)]
    return replace(scene.seen(*gpus, notes=list(notes)), error=error)


def frame(what: Seen, controls: Controls | None = None, size: tuple[int, int] = (80, 12)) -> Frame:
    controls = controls or Controls()
    table = Table(arrange(what.lines, controls.order, controls.wanted), controls.order, size[0])
    return draw(Scene(what, table, "name", 112.0, size), controls)


def texts(of: Frame) -> list[str]:
    return [as_text(line) for line in of.lines]


def styles(spans: Spans) -> set[str]:
    return {style.split()[0] for _, style in spans if style}


def test_title_header_body_and_keys() -> None:
    shown = texts(frame(seen(30)))
    assert shown[0] == "podgpu top  n  30 GPUs, 1 holder, by GPU"
    assert shown[2].startswith("GPU MODEL")
    assert shown[3].startswith("0 ")
    assert shown[-1].endswith("8/30")
    assert texts(frame(seen(30), Controls(scroll=5, cursor=7)))[3].startswith("5 ")


def test_the_cursor_is_visible() -> None:
    rows = frame(seen(3), Controls(cursor=1)).lines[3:6]
    assert ["cursor" in styles(row) for row in rows] == [False, True, False]


def test_details_of_the_selected_gpu() -> None:
    assert frame(seen(3)).selected == ""
    details = GpuDetails(xids=[XidView(xid=79, says="GPU has fallen off the bus")])
    what = replace(seen(9), fetched=FetchedDetails("GPU-2", details))
    drawn = frame(what, Controls(cursor=2, detailed=True), size=(80, 24))
    assert drawn.selected == "GPU-2"
    shown = texts(drawn)
    assert shown[3].startswith("GPU 2  L4  on n  GPU-2")
    assert {"held by research/train/main", "XID 79: GPU has fallen off the bus"} <= set(shown)


def test_broken_gpus_are_first_and_red() -> None:
    broken = scene.seen(gpu(0, holder()), gpu(7, holder(), conditions=[LOST], absent=True))
    for controls in (Controls(), Controls(order="utilisation"), Controls(wanted="broken")):
        drawn = frame(broken, controls)
        assert texts(drawn)[3].startswith("7 ")
        assert texts(drawn)[4] == "  ! lost for 1m40s: GPU 1 has fallen off the bus"
        assert styles(drawn.lines[4]) == {"bad"}


def test_an_error_is_shown_with_the_age_of_the_figures() -> None:
    shown = texts(frame(seen(3, SourceError("x", "http://n: nothing listens there"))))
    assert shown[-2] == "http://n: nothing listens there; the figures are 12s old"
    assert shown[3].startswith("0 ")
    assert texts(frame(seen(3, SourceError("x", "long " * 50))))[-2].endswith("the figures are 12s old")


def test_notes() -> None:
    assert texts(frame(seen(3, notes=("kubelet: not there",))))[-2] == "kubelet: not there"
    alerts = [Alert("warning", "of a GPU", "n", "GPU-0"), Alert("broken", "serious", "n")]
    notes = ["of a GPU", *(f"note {number}" for number in range(5)), "serious"]
    shown = texts(frame(scene.seen(gpu(0), notes=notes, alerts=alerts)))
    assert shown[-4:-1] == ["serious", "note 0", "4 more notes: run podgpu top --once to see them"]


def test_filter_and_help() -> None:
    assert texts(frame(seen(3), Controls(wanted="zzz")))[3] == "no line matches the filter"
    assert texts(frame(seen(3), Controls(wanted="zz", typing=True)))[-1] == "filter: zz_"
    assert texts(frame(seen(3), Controls(wanted="zz")))[-1].startswith("filter: zz (Esc clears)")
    assert texts(frame(seen(3), Controls(helping=True)))[3].startswith("q ")


@pytest.mark.parametrize("size", [(1, 1), (5, 3), (20, 5), (80, 24), (300, 100)])
def test_any_size(size: tuple[int, int]) -> None:
    for controls in (Controls(), Controls(helping=True), Controls(typing=True), Controls(detailed=True)):
        shown = frame(seen(4, SourceError("x", "wrong"), conditions=[LOST]), controls, size).lines
        assert len(shown) == max(size[1], 5)
