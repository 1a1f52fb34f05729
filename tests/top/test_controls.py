"""Bytes to keys, keys to controls, controls to a screenful."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.errors import SourceError
from podgpu.top.api_answers import GpuFacts, XidFact
from podgpu.top.cells import ASCII, PLAIN, RICH, Glyphs, width_of
from podgpu.top.controls import Controls, Seat
from podgpu.top.details import More
from podgpu.top.feed import Seen
from podgpu.top.figures import Condition, DeviceFigures, FlatView
from podgpu.top.frame import AskMore, Frame, Screenful, frame_of, live_table
from podgpu.top.history import History
from podgpu.top.lines import lines_of
from podgpu.top.table import Printed, Watched, as_text
from podgpu.top.terminal import KeyReader
from tests.top.scene import holder

CONDITIONS = (Condition("lost", 900.0, "GPU 7 has fallen off the bus", "Drain the node and reset the GPU."),)

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
    assert KeyReader().take(data) == keys


def test_a_lone_escape_waits_to_see_what_follows() -> None:
    reader = KeyReader()
    assert (reader.take(b"\x1b"), reader.undecided) == ([], True)
    assert reader.take(b"[A") == ["up"]
    assert (reader.take(b"\x1b"), reader.settle(), reader.undecided) == ([], ["escape"], False)
    assert reader.settle() == []


@given(st.binary(max_size=40), st.integers(0, 40))
def test_keys_come_out_the_same_however_they_are_cut(data: bytes, cut: int) -> None:
    whole, pieces = KeyReader(), KeyReader()
    together = whole.take(data) + whole.settle()
    apart = pieces.take(data[:cut]) + pieces.take(data[cut:]) + pieces.settle()
    assert together == apart


@given(st.binary(max_size=60))
def test_no_sequence_keeps_it_waiting_for_ever(data: bytes) -> None:
    reader = KeyReader()
    reader.take(data)
    reader.settle()
    assert not reader.undecided


# Controls


ROWS = [("n", f"GPU-{number}", "", "") for number in range(100)]


def seat(lines: int = 100, room: int = 10, details: int = 0) -> Seat:
    return Seat(ROWS[:lines], room, details)


def after(*keys: str, controls: Controls | None = None, on: Seat | None = None) -> Controls:
    controls, on = controls or Controls(), on or seat()
    for key in keys:
        controls = controls.press(key, on)
    return controls


@pytest.mark.parametrize(
    ("key", "order"), [("g", "gpu"), ("u", "utilisation"), ("m", "memory"), ("p", "power"), ("i", "idle")]
)
def test_sorting_begins_at_the_top(key: str, order: str) -> None:
    assert after("down", key) == Controls(order)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keys", "cursor", "scroll"),
    [
        (("down", "j", "down"), 3, 0),
        (("down", "k", "up"), 0, 0),
        (("down",) * 12, 12, 3),
        ((*("down",) * 12, "up"), 11, 3),
        (("end",), 99, 90),
        (("end", "up"), 98, 90),
        (("end", "home"), 0, 0),
        (("page_down", " "), 20, 11),
        (("page_down", "page_up", "page_up"), 0, 0),
    ],
)
def test_the_cursor_moves_and_the_list_follows(keys: tuple[str, ...], cursor: int, scroll: int) -> None:
    moved = after(*keys)
    assert (moved.cursor, moved.scroll) == (cursor, scroll)
    assert moved.chosen == ROWS[cursor]


def test_all_in_sight_is_not_scrolled() -> None:
    moved = after("down", "end", on=seat(lines=5))
    assert (moved.cursor, moved.scroll) == (4, 0)


def test_the_cursor_stays_on_what_it_is_on_when_lines_come_and_go() -> None:
    chosen = after("down", "down")
    one_more = Seat([("n", "GPU-new", "", ""), *ROWS], 10)
    assert chosen.within(one_more).cursor == 3
    assert chosen.within(Seat(ROWS[2:], 10)).cursor == 0
    gone = chosen.within(Seat([*ROWS[:2], *ROWS[3:]], 10))
    assert gone.cursor == 2
    assert chosen.within(Seat([], 10)).cursor == 0


def test_a_cursor_that_nobody_moved_stays_at_the_top() -> None:
    assert Controls().within(Seat([("n", "GPU-broken", "", ""), *ROWS], 10)).cursor == 0


def test_details_open_fill_the_screen_and_close() -> None:
    assert after("enter").pane == "half"
    whole = after("enter", "enter")
    assert whole.pane == "whole"
    assert after("enter", controls=whole).pane == "closed"
    assert after("escape", controls=whole).pane == "closed"
    kept = after("enter", "escape", controls=Controls(wanted="text"))
    assert (kept.pane, kept.wanted) == ("closed", "text")


def test_details_on_the_whole_screen_are_scrolled_and_the_cursor_stays() -> None:
    on = seat(room=10, details=25)
    scrolled = after("down", "enter", "enter", "down", "page_down", on=on)
    assert (scrolled.cursor, scrolled.pane_scroll) == (1, 11)
    assert after("end", controls=scrolled, on=on).pane_scroll == 15
    assert after("home", controls=scrolled, on=on).pane_scroll == 0


def test_filtering() -> None:
    typed = after("/", "q", "u", "x", "backspace")
    assert (typed.wanted, typed.typing, typed.ended) == ("qu", True, False)
    kept = after("enter", controls=typed)
    assert (kept.wanted, kept.typing, kept.pane) == ("qu", False, "closed")
    assert after("escape", controls=kept) == Controls()
    assert after("escape", controls=typed) == Controls()
    assert after("/", "up", "\x01").wanted == ""


def test_quit_and_help() -> None:
    assert after("q").ended
    assert after("h").helping
    assert after("h", "u") == Controls()
    assert after("h", "q").ended
    assert after("x") == Controls()


KEYS = ["up", "down", "/", "q", "a", "escape", "enter", "h", "end", " ", "i", "page_up", "home", "j"]


@given(st.lists(st.sampled_from(KEYS)), st.integers(0, 12), st.integers(1, 20))
def test_any_keys_leave_it_sound(keys: list[str], lines: int, room: int) -> None:
    controls = after(*keys, on=seat(lines, room, details=8))
    assert 0 <= controls.cursor <= max(0, lines - 1)
    assert controls.scroll <= controls.cursor < controls.scroll + room or lines == 0
    assert 0 <= controls.scroll <= max(0, lines - room)
    assert 0 <= controls.pane_scroll <= max(0, 8 - room)


# Screenfuls


def seen(count: int = 30, error: SourceError | None = None, notes: tuple[str, ...] = (), **more: Any) -> Seen:
    devices = [DeviceFigures(f"GPU-{i}", i, "NVIDIA L4", "n", holders=(holder(),), **more) for i in range(count)]
    shown = FlatView(tuple(devices), notes)
    return Seen(tuple(lines_of(shown, History(), 1000.0)), shown, 100.0, error, Watched({}), 1000.0)


def frame(
    what: Seen,
    controls: Controls | None = None,
    size: tuple[int, int] = (80, 12),
    now: float = 100.0,
    glyphs: Glyphs = RICH,
    ask: AskMore = lambda _uuid: None,
) -> Frame:
    controls = controls or Controls()
    table = live_table(what, controls, size[0], glyphs)
    return frame_of(Screenful(what, table, "name", now, size, glyphs), controls, ask)


def texts(of: Frame) -> list[str]:
    return [as_text(line) for line in of.printed]


def test_title_header_body_keys() -> None:
    shown = texts(frame(seen(30)))
    assert shown[0] == "podgpu top  n  30 GPUs, 1 holder, by GPU"
    assert shown[2].startswith("GPU MODEL")
    assert shown[3].startswith("0 ")
    assert shown[-1].endswith("8/30")


def styles(printed: Printed) -> set[str]:
    return {style.split()[0] for _, style in printed if style}


def test_the_row_of_the_cursor_is_seen_with_and_without_colours() -> None:
    coloured = frame(seen(3), Controls(cursor=1)).printed
    assert ["cursor" in styles(row) for row in coloured[3:6]] == [False, True, False]
    plain = texts(frame(seen(3), Controls(cursor=1), glyphs=ASCII))
    assert [line[0] for line in plain[2:6]] == [" ", " ", ">", " "]


def test_details_of_the_row_of_the_cursor() -> None:
    shown = texts(frame(seen(9), Controls(cursor=2, pane="half"), size=(80, 24)))
    rule = next(at for at, line in enumerate(shown) if line.startswith("───"))
    assert shown[rule + 1].startswith("GPU 2  L4  on n  GPU-2")
    assert "held by research/train/main" in shown[rule:]
    whole = texts(frame(seen(9), Controls(cursor=2, pane="whole"), size=(80, 24)))
    assert whole[3].startswith("GPU 2  L4  on n  GPU-2")


def test_details_that_do_not_fit_say_so() -> None:
    shown = texts(frame(seen(30, conditions=CONDITIONS), Controls(cursor=0, pane="half"), size=(80, 14)))
    assert re.match(r"and \d+ lines more: Enter shows all", shown[-2])


def test_more_is_asked_for_only_where_somebody_looks() -> None:
    asked: list[str] = []

    def ask(uuid: str) -> More:
        asked.append(uuid)
        return More(GpuFacts(xids=(XidFact(79, "GPU has fallen off the bus", "hardware"),)))

    frame(seen(3), ask=ask)
    assert asked == []
    shown = texts(frame(seen(3), Controls(cursor=1, pane="half"), size=(80, 24), ask=ask))
    assert asked == ["GPU-1"]
    assert "XID 79 (hardware): GPU has fallen off the bus" in shown


def test_broken_gpus_come_first_in_words_and_red() -> None:
    fine = seen(3)
    lost = DeviceFigures("GPU-7", 7, "NVIDIA L4", "n", holders=(holder(),), conditions=CONDITIONS, present=False)
    shown = FlatView((*fine.view.devices, lost))
    broken = Seen(tuple(lines_of(shown, History(), 1000.0)), shown, 100.0, None, Watched({}), 1000.0)
    for controls in (Controls(), Controls(order="utilisation"), Controls(wanted="broken")):
        drawn = frame(broken, controls)
        assert texts(drawn)[3].startswith("7 ")
        assert texts(drawn)[4] == "  ! lost for 1m40s: GPU 7 has fallen off the bus"
        assert {"cursor", "bad"} & styles(drawn.printed[3])
        assert styles(drawn.printed[4]) == {"bad"}


def test_scrolled() -> None:
    assert texts(frame(seen(30), Controls(scroll=5, cursor=7)))[3].startswith("5 ")


def test_an_error_is_shown_with_the_age_of_what_is_seen() -> None:
    shown = texts(frame(seen(3, SourceError("x", "http://n: nothing listens there")), now=112.0))
    assert shown[-2] == "http://n: nothing listens there; the figures are 12s old"
    assert shown[3].startswith("0 ")


def test_a_long_error_keeps_the_age_in_sight() -> None:
    assert texts(frame(seen(3, SourceError("x", "long " * 50)), now=112.0))[-2].endswith("the figures are 12s old")


def test_notes_filter_and_help() -> None:
    assert texts(frame(seen(3, notes=("kubelet: not there",))))[-2] == "kubelet: not there"
    assert texts(frame(seen(3), Controls(wanted="zzz")))[3] == "nothing has this text"
    assert texts(frame(seen(3), Controls(wanted="zz", typing=True)))[-1] == "filter: zz_"
    assert texts(frame(seen(3), Controls(wanted="zz")))[-1].startswith("filter: zz (Esc clears)")
    assert texts(frame(seen(3), Controls(helping=True)))[3].startswith("q ")


@pytest.mark.parametrize("size", [(1, 1), (5, 3), (20, 5), (80, 24), (300, 100)])
@pytest.mark.parametrize(
    "controls",
    [
        Controls(),
        Controls(helping=True),
        Controls(wanted="n"),
        Controls(typing=True),
        Controls(pane="half"),
        Controls(pane="whole"),
    ],
)
@pytest.mark.parametrize("glyphs", [RICH, PLAIN, ASCII], ids=["rich", "plain", "ascii"])
def test_any_size_is_filled_and_not_more(size: tuple[int, int], controls: Controls, glyphs: Glyphs) -> None:
    shown = frame(seen(4, SourceError("x", "wrong"), conditions=CONDITIONS), controls, size, glyphs=glyphs).printed
    assert len(shown) == max(size[1], 5)
    if size[0] >= 20:
        assert all(sum(width_of(text) for text, _ in line) <= size[0] for line in shown)
    if glyphs is ASCII:
        assert all(text.isascii() for line in shown for text, _ in line)
