"""No label or number is cut off, and rows are full: on desktop and phone, in three fonts, with few
GPUs and with thousands.
"""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.browser.chromium import Tab, visited
from tests.browser.pictures import Showing, large
from tests.browser.records import priced, records_of, troubled_showing
from tests.browser.test_broken import ANSWERED, VIEWS

FONTS = ("DejaVu Sans", "Inter", "Roboto")
CUT = """(() => {
  const cut = [];
  const say = (element, text) => cut.push(`${element.className || element.id || element.tagName}: ${text.trim()}`);
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = texts.nextNode(); node; node = texts.nextNode()) {
    const own = node.parentElement;
    if (!node.data.trim() || !own.checkVisibility() || own.closest('.announced, noscript, select, svg')) continue;
    if (getComputedStyle(own).clipPath !== 'none' || own.closest('.skip')) continue; // for screen readers only
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const text of range.getClientRects()) {
      for (let box = own; box && box !== document.body; box = box.parentElement) {
        if (getComputedStyle(box).overflowX === 'visible') continue;
        const {left, right, top, bottom} = box.getBoundingClientRect();
        const isHidden = text.bottom <= top + 1 || text.top >= bottom - 1; // a line that is left out as a whole
        if (!isHidden && (text.left < left - 1 || text.right > right + 1)) say(own, node.data);
      }
      if (text.left < -1 || text.right > innerWidth + 1) say(own, node.data);
    }
  }
  const pen = document.createElement('canvas').getContext('2d');
  for (const field of document.querySelectorAll('input[type=search], select')) {
    if (!field.checkVisibility()) continue;
    const style = getComputedStyle(field);
    pen.font = style.font;
    const text = field.placeholder || field.selectedOptions?.[0]?.text || '';
    const arrow = field.tagName === 'SELECT' ? 16 : 0;
    const room = field.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight) - arrow;
    if (pen.measureText(text).width > room + 1) say(field, text);
  }
  return [...new Set(cut)];
})()"""


@pytest.fixture(scope="module", params=["24 GPUs", "8,000 GPUs"])
def usual(request: pytest.FixtureRequest) -> Showing:
    return (
        troubled_showing()
        if request.param == "24 GPUs"
        else Showing(priced(large()), records_of(large(10)))
    )


@pytest.mark.parametrize("width", [1024, 1280, 1440, 390])
def test_nothing_is_cut_off(tab: Tab, page: str, width: int) -> None:
    if shutil.which("fc-list") is None:
        pytest.skip("fc-list is not installed (Debian: fontconfig)")
    fonts = [
        font
        for font in FONTS
        if subprocess.run(["fc-list", font], capture_output=True, check=True).stdout
    ]
    if not fonts:
        pytest.skip("no font is installed (Debian: fonts-dejavu-core, fonts-inter, fonts-roboto)")
    tab.look(width, 900)
    for view in VIEWS:
        visited(tab, page, view)
        tab.wait_for(ANSWERED, "all there is to show")
        for font in fonts:
            tab.evaluate(f"document.body.style.fontFamily = '{font}'")
            assert tab.evaluate(CUT) == [], (view, font)
            assert tab.evaluate("document.documentElement.scrollWidth") <= width, (view, font)


TOTALS = """(count => {
  const list = document.querySelector('#totals');
  const usual = [...list.children];
  const shown = Array.from({length: count}, (_, i) => usual[i] ?? usual[0].cloneNode(true));
  list.replaceChildren(...shown);
  const edge = Math.round(list.getBoundingClientRect().right);
  const rows = Map.groupBy(shown, total => Math.round(total.getBoundingClientRect().top));
  const ends = [...rows.values()].map(row => Math.round(row.at(-1).getBoundingClientRect().right));
  list.replaceChildren(...usual);
  return [[...rows.values()].map(row => row.length), ends.every(end => Math.abs(end - edge) <= 1)];
})"""
"""Shows this many totals. Returns how many are in each row, and whether all rows are full."""


@pytest.mark.parametrize("width", [390, 760, 1024, 1240, 1440, 2560])
def test_each_row_of_totals_is_full(tab: Tab, page: str, width: int) -> None:
    tab.look(width, 900)
    visited(tab, page)
    tab.wait_for("document.querySelector('.total-value')?.checkVisibility()", "the totals")
    expected: dict[int, list[int]] = {8: [8], 9: [9], 10: [10], 11: [11]}
    if width <= 720:
        expected = {8: [3, 3, 2], 9: [3, 3, 2, 1], 10: [3, 3, 2, 2], 11: [3, 3, 2, 2, 1]}
    elif width <= 1240:
        expected = {8: [4, 4], 9: [5, 4], 10: [5, 5], 11: [6, 5]}
    for number, rows in expected.items():
        assert tab.evaluate(f"{TOTALS}({number})") == [rows, True], number


@pytest.mark.parametrize("width", [760, 1024, 1240, 1440, 2560])
def test_status_time_and_theme_are_beside_the_name(tab: Tab, page: str, width: int) -> None:
    tab.look(width, 900)
    visited(tab, page)
    middles = tab.evaluate(
        "['.brand', '#status', '.time', '#theme'].map(each => document.querySelector(each)"
        ".getBoundingClientRect()).map(box => (box.top + box.bottom) / 2)"
    )
    assert max(middles) - min(middles) < 4
