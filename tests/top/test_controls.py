"""Bytes to keys, keys to controls, controls to a screenful."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.errors import SourceError
from podgpu.figures.device import DeviceFigures
from podgpu.top.cells import PLAIN, width_of
from podgpu.top.controls import Controls
from podgpu.top.feed import Seen
from podgpu.top.frame import Frame, frame_of
from podgpu.top.history import History
from podgpu.top.keys import KeyReader
from podgpu.top.lines import lines_of
from podgpu.top.table import as_text
from tests.top.scene import holder, view

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


def after(*keys: str, controls: Controls | None = None, lines: int = 100, room: int = 10) -> Controls:
    controls = controls or Controls()
    for key in keys:
        controls = controls.press(key, lines, room)
    return controls


@pytest.mark.parametrize(
    ("key", "order"), [("g", "gpu"), ("u", "utilisation"), ("m", "memory"), ("p", "power"), ("i", "idle")]
)
def test_sorting(key: str, order: str) -> None:
    assert after("down", key) == Controls(order)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keys", "scroll"),
    [
        (("down", "j", "down"), 3),
        (("down", "k", "up"), 0),
        (("end",), 90),
        (("end", "home"), 0),
        (("page_down", " "), 20),
        (("page_down", "page_up", "page_up"), 0),
    ],
)
def test_scrolling(keys: tuple[str, ...], scroll: int) -> None:
    assert after(*keys).scroll == scroll


def test_all_in_sight_is_not_scrolled() -> None:
    assert after("down", "end", lines=5).scroll == 0


def test_filtering() -> None:
    typed = after("/", "q", "u", "x", "backspace")
    assert (typed.wanted, typed.typing, typed.ended) == ("qu", True, False)
    kept = after("enter", controls=typed)
    assert (kept.wanted, kept.typing) == ("qu", False)
    assert after("escape", controls=kept) == Controls()
    assert after("escape", controls=typed) == Controls()
    assert after("/", "up", "\x01").wanted == ""


def test_quit_and_help() -> None:
    assert after("q").ended
    assert after("h").helping
    assert after("h", "u") == Controls()
    assert after("h", "q").ended
    assert after("x") == Controls()


@given(st.lists(st.sampled_from(["up", "down", "/", "q", "a", "escape", "enter", "h", "end", " ", "i", "page_up"])))
def test_any_keys_leave_it_sound(keys: list[str]) -> None:
    controls = after(*keys, lines=12, room=5)
    assert 0 <= controls.scroll <= 7


# Screenfuls


def seen(count: int = 30, error: SourceError | None = None, notes: tuple[str, ...] = ()) -> Seen:
    devices = [DeviceFigures(f"GPU-{i}", i, "NVIDIA L4", "n", holders=(holder(),)) for i in range(count)]
    return Seen(tuple(lines_of(view(*devices), History())), notes, 100.0, error)


def frame(what: Seen, controls: Controls | None = None, size: tuple[int, int] = (80, 12), now: float = 100.0) -> Frame:
    return frame_of(what, controls or Controls(), "name", now, size, PLAIN)


def texts(of: Frame) -> list[str]:
    return [as_text(line) for line in of.printed]


def test_title_header_body_keys() -> None:
    shown = texts(frame(seen(30)))
    assert shown[0] == "podgpu top  n  30 GPUs, 1 holder, by GPU"
    assert shown[1].startswith("GPU MODEL")
    assert shown[2].startswith("0 ")
    assert shown[-1].endswith("9/30")


def test_scrolled() -> None:
    assert texts(frame(seen(30), Controls(scroll=5)))[2].startswith("5 ")


def test_an_error_is_shown_with_the_age_of_what_is_seen() -> None:
    shown = texts(frame(seen(3, SourceError("x", "http://n: nothing listens there")), now=112.0))
    assert shown[-2] == "http://n: nothing listens there; the figures are 12s old"
    assert shown[2].startswith("0 ")


def test_a_long_error_keeps_the_age_in_sight() -> None:
    assert texts(frame(seen(3, SourceError("x", "long " * 50)), now=112.0))[-2].endswith("the figures are 12s old")


def test_notes_filter_and_help() -> None:
    assert texts(frame(seen(3, notes=("kubelet: not there",))))[-2] == "kubelet: not there"
    assert texts(frame(seen(3), Controls(wanted="zzz")))[2] == "nothing has this text"
    assert texts(frame(seen(3), Controls(wanted="zz", typing=True)))[-1] == "filter: zz_"
    assert texts(frame(seen(3), Controls(wanted="zz")))[-1].startswith("filter: zz (Esc clears)")
    assert texts(frame(seen(3), Controls(helping=True)))[2].startswith("q ")


@pytest.mark.parametrize("size", [(1, 1), (5, 3), (20, 5), (80, 24), (300, 100)])
@pytest.mark.parametrize("controls", [Controls(), Controls(helping=True), Controls(wanted="n"), Controls(typing=True)])
def test_any_size_is_filled_and_not_more(size: tuple[int, int], controls: Controls) -> None:
    shown = frame(seen(4, SourceError("x", "wrong")), controls, size).printed
    assert len(shown) == max(size[1], 5)
    if size[0] >= 20:
        assert all(sum(width_of(text) for text, _ in line) <= size[0] for line in shown)
