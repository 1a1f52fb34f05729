"""Bytes to keys, keys to controls, controls to a screen."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.cluster.alerts import Alert
from podgpu.cluster.view import GpuDetails, XidView
from podgpu.errors import SourceError
from podgpu.top.feed import FetchedDetails, Seen
from podgpu.top.screen import Controls, Frame, Scene, Viewport, draw, make_live_table
from podgpu.top.table import Spans, as_text
from podgpu.top.terminal import KeyReader
from podgpu.top.text import ASCII, PLAIN, RICH, Glyphs, width_of
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
        (b"\x1b[1;5Cq", ["unknown", "q"]),
        (b"\x1b\x1b[A", ["escape", "up"]),
        (b"\x1bq", ["escape", "q"]),
    ],
)
def test_keys(data: bytes, keys: list[str]) -> None:
    assert KeyReader().decode(data) == keys


def test_an_escape_is_a_key_if_nothing_follows() -> None:
    reader = KeyReader()
    assert (reader.decode(b"\x1b"), reader.is_incomplete) == ([], True)
    assert reader.decode(b"[A") == ["up"]
    assert (reader.decode(b"\x1b"), reader.finish(), reader.is_incomplete) == ([], ["escape"], False)


@given(st.binary(max_size=40), st.integers(0, 40))
def test_keys_do_not_depend_on_how_the_bytes_arrive(data: bytes, cut: int) -> None:
    whole, pieces = KeyReader(), KeyReader()
    together = whole.decode(data) + whole.finish()
    assert together == pieces.decode(data[:cut]) + pieces.decode(data[cut:]) + pieces.finish()
    assert not pieces.is_incomplete


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


def test_the_details_pane() -> None:
    assert press("enter").pane == "half"
    full = press("enter", "enter")
    assert full.pane == "full"
    assert press("enter", controls=full).pane == press("escape", controls=full).pane == "closed"
    scrolled = press("down", "enter", "enter", "down", "page_down", details=25)
    assert (scrolled.cursor, scrolled.pane_scroll) == (1, 11)
    assert press("end", controls=scrolled, details=25).pane_scroll == 15


def test_typing_a_filter() -> None:
    typed = press("/", "q", "u", "x", "backspace", "up", "\x01")
    assert (typed.wanted, typed.typing, typed.ended) == ("qu", True, False)
    kept = press("enter", controls=typed)
    assert (kept.wanted, kept.typing, kept.pane) == ("qu", False, "closed")
    assert press("escape", controls=kept) == press("escape", controls=typed) == Controls()


def test_quit_and_help() -> None:
    assert press("q").ended
    assert press("h").helping
    assert press("h", "u") == Controls()
    assert press("h", "q").ended


KEYS = ["up", "down", "/", "q", "a", "escape", "enter", "h", "end", " ", "i", "page_up", "home", "j"]


@given(st.lists(st.sampled_from(KEYS)), st.integers(0, 12))
def test_any_keys(keys: list[str], lines: int) -> None:
    controls = press(*keys, lines=lines, details=12)
    assert 0 <= controls.cursor <= max(0, lines - 1)
    assert controls.scroll <= controls.cursor < controls.scroll + 10
    assert 0 <= controls.scroll <= max(0, lines - 10)
    assert 0 <= controls.pane_scroll <= 2


# Screens


def seen(count: int = 30, error: SourceError | None = None, notes: tuple[str, ...] = (), **more: Any) -> Seen:
    gpus = [gpu(number, holder(), model="NVIDIA L4", **more) for number in range(count)]
    return replace(scene.seen(*gpus, notes=list(notes)), error=error)


def frame(
    what: Seen, controls: Controls | None = None, size: tuple[int, int] = (80, 12), glyphs: Glyphs = RICH, **more: Any
) -> Frame:
    controls = controls or Controls()
    table = make_live_table(what, controls, size[0], glyphs)
    return draw(Scene(what, table, "name", 112.0, size, glyphs, **more), controls)


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


def test_the_cursor_is_visible_with_and_without_colours() -> None:
    coloured = frame(seen(3), Controls(cursor=1)).lines
    assert ["cursor" in styles(row) for row in coloured[3:6]] == [False, True, False]
    plain = texts(frame(seen(3), Controls(cursor=1), glyphs=ASCII))
    assert [line[0] for line in plain[2:6]] == [" ", " ", ">", " "]


def test_details_are_fetched_for_the_selected_gpu_only() -> None:
    requested: list[str] = []

    def fetch(uuid: str) -> FetchedDetails:
        requested.append(uuid)
        return FetchedDetails(GpuDetails(xids=[XidView(xid=79, says="GPU has fallen off the bus")]))

    frame(seen(3), fetch=fetch)
    assert requested == []
    shown = texts(frame(seen(9), Controls(cursor=2, pane="half"), size=(80, 24), fetch=fetch))
    assert requested == ["GPU-2"]
    rule = next(at for at, line in enumerate(shown) if line.startswith("───"))
    assert shown[rule + 1].startswith("GPU 2  L4  on n  GPU-2")
    assert {"held by research/train/main", "XID 79: GPU has fallen off the bus"} <= set(shown[rule:])
    full = texts(frame(seen(9), Controls(cursor=2, pane="full"), size=(80, 24)))
    assert full[3].startswith("GPU 2  L4  on n  GPU-2")


def test_details_that_do_not_fit() -> None:
    shown = texts(frame(seen(30, conditions=[LOST]), Controls(pane="half"), size=(80, 14)))
    assert re.match(r"\d+ more lines: press Enter", shown[-2])


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
@pytest.mark.parametrize("glyphs", [RICH, PLAIN, ASCII], ids=["rich", "plain", "ascii"])
def test_any_size(size: tuple[int, int], glyphs: Glyphs) -> None:
    for controls in (Controls(), Controls(helping=True), Controls(typing=True), Controls(pane="half")):
        shown = frame(seen(4, SourceError("x", "wrong"), conditions=[LOST]), controls, size, glyphs).lines
        assert len(shown) == max(size[1], 5)
        if size[0] >= 20:
            assert all(sum(width_of(text) for text, _ in line) <= size[0] for line in shown)
        if glyphs is ASCII:
            assert all(text.isascii() for line in shown for text, _ in line)
