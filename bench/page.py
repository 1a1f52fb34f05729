"""The page over 8,000 GPUs in a real Chromium: how fast it opens with its history, and how fast it filters.

The clock is the browser's own. Opening is from the navigation on until GPUs are painted and an hour of lines, as the
server keeps it, lies ready; every file comes from the server anew. A filter's clock starts as the `input` event is
sent and stops in the first task after the frame in which the page shows what was asked for: style, layout and paint are
in it. Some filters leave thousands of GPUs (a map), some a handful (tiles); the slowest kind is judged by its median.
Without Chromium there is nothing to measure.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median

from bench.figures import Figure
from tests.browser.chromium import Tab, browser, chromium
from tests.browser.pictures import Showing, large
from tests.browser.records import all_lines, priced

MOST_MS = 100
MOST_OPENING_MS = 1500
KINDS = {
    "a word that leaves thousands": ("q", "job-1"),
    "a word that leaves a few": ("q", "dev-4-"),
    "a namespace": ("ns", "vision"),
    "every idle GPU": ("state", "idle"),
    "every broken GPU": ("state", "broken"),
    "longest idle first": ("sort", "idle"),
}
_CHANGE = """async (name, value) => {
  const field = document.querySelector('#filters').elements[name];
  const painted = () => new Promise(done => requestAnimationFrame(() => {
    const {port1, port2} = new MessageChannel();
    port1.onmessage = done;
    port2.postMessage(0);
  }));
  const change = async (to) => {
    const began = performance.now();
    field.value = to;
    field.dispatchEvent(new Event('input', {bubbles: true}));
    await painted();
    return performance.now() - began;
  };
  await painted();
  const there = await change(value);
  return [there, await change('')];
}"""
_OPENED = """new Promise(async (done) => {
  const found = (selector) => document.querySelector(selector);
  const frame = () => new Promise(then => requestAnimationFrame(() => setTimeout(then)));
  while (!found('.square') || !performance.getEntriesByType('resource').some(e => e.name.includes('api/v1/history'))) {
    await frame();
  }
  await frame();
  const answers = performance.getEntriesByType('resource').filter(e => e.name.includes('api/v1/'));
  done([performance.now(), Math.max(...answers.map(e => e.responseEnd)), answers.map(e => e.transferSize)]);
})"""
_NEW_PICTURE = """async () => {
  const {devicesOf} = await import(new URL('page/devices.js', location));
  const {totalsOf} = await import(new URL('page/totals.js', location));
  const text = await (await fetch('api/v1/view')).text();
  const began = performance.now();
  const picture = JSON.parse(text);
  totalsOf(devicesOf(picture, picture.taken_at), true);
  return performance.now() - began;
}"""


def measure(turns: int = 15, nodes: int = 1000) -> list[Figure]:
    if chromium() is None:
        print("page: no chromium here, so nothing is measured")
        return []
    with _page(nodes) as (tab, url):
        opening = [_open(tab, url) for _ in range(max(2, turns // 3))]
        time.sleep(0.5)  # whatever a fresh page still does
        there: dict[str, list[float]] = {kind: [] for kind in KINDS}
        back: list[float] = []
        for _ in range(turns):
            for kind, (name, value) in KINDS.items():
                took = tab.evaluate(f"({_CHANGE})({json.dumps(name)}, {json.dumps(value)})")
                there[kind].append(took[0])
                back.append(took[1])
        parsing = median(tab.evaluate(f"({_NEW_PICTURE})()") for _ in range(turns))
    slowest = max([*map(median, there.values()), median(back)])
    return [
        Figure(
            f"page, {nodes * 8:,} GPUs: opened with an hour of history, median", median(opening), "ms", MOST_OPENING_MS
        ),
        Figure("page: the slowest opening", max(opening), "ms"),
        Figure(f"page, {nodes * 8:,} GPUs: the slowest kind of filter", slowest, "ms", MOST_MS),
        *(Figure(f"page: {kind}, median", median(took), "ms") for kind, took in there.items()),
        Figure("page: all of them again, median", median(back), "ms"),
        Figure("page: the longest of all changes", max([*back, *(t for took in there.values() for t in took)]), "ms"),
        Figure("page: a new picture read and understood, median", parsing, "ms"),
    ]


def _open(tab: Tab, url: str) -> float:
    """Nothing is kept from the last time."""
    tab.open("about:blank")
    tab.call("Network.clearBrowserCache")
    tab.call("Page.navigate", url=f"{url}/#show=map")
    tab.wait_for("document.querySelector('main')", "the page begins")
    painted: float = tab.evaluate(_OPENED)[0]
    line = "document.querySelector('.card .spark-line').getAttribute('d').split('L').length"
    tab.point_at(".square.is-u4")
    tab.wait_for(f"{line} > 50", "its line is full")
    return painted


@contextmanager
def _page(nodes: int) -> Iterator[tuple[Tab, str]]:
    cluster = priced(replace(large(nodes), interval_seconds=3600.0))
    lines = all_lines(cluster, 60)  # kept by the server: making them up is not what is measured
    shown = Showing(cluster, lambda path, query: lines if path == "history" else None)
    with shown.served() as client, browser() as tab:
        tab.look(1440, 900)
        yield tab, client.address.url
