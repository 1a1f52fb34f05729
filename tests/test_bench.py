"""The benchmarks run and measure what they say they do. How fast anything is, `make bench` judges."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench import __main__ as command
from bench import (
    allocation,
    calls,
    cluster,
    history,
    hook,
    largest,
    memory,
    page,
    parser,
    rendering,
    serving,
    switches,
    tick,
    usage,
)
from bench.figures import Figure, row
from bench.node import NodeShape, TickClock, pods, simulated_driver
from tests.browser.chromium import chromium

SMALL = NodeShape("1xH100/2x1g.10gb", 3)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("measure", "judged"),
    [
        (lambda: serving.measure(blocks=2, requests=1), 2),
        (lambda: rendering.measure(turns=2), 1),
        (lambda: parser.measure(turns=2, largest=1_000_000), 2),
        (lambda: tick.measure(ticks=2), 0),
        (lambda: usage.measure(turns=2, first=64, last=128), 4),
        (lambda: switches.measure(seconds=2), 3),
        (lambda: allocation.measure(pods=4, few_pods=2, turns=2), 3),
        (lambda: largest.measure(SMALL, ticks=5), 0),
        (lambda: memory.measure(first=5, last=10, scrape_every=5, seconds=1), 4),
        (lambda: calls.measure(minutes=1), 6),
        (lambda: cluster.measure(nodes=3, rounds=2), 4),
        (lambda: page.measure(turns=2, nodes=20), 2 if chromium() else 0),
        (lambda: hook.measure(creations=5, bursts=2), 5),
        (lambda: history.measure(gpus=20, windows=5, steps=5), 3),
    ],
    ids=[
        "serving",
        "rendering",
        "parser",
        "tick",
        "usage",
        "switches",
        "allocation",
        "largest",
        "memory",
        "calls",
        "cluster",
        "page",
        "hook",
        "history",
    ],
)
def test_measures(measure: Callable[[], list[Figure]], judged: int) -> None:
    figures = measure()
    assert [f.verdict for f in figures if f.limit].count("") == 0
    assert len([f for f in figures if f.limit]) == judged
    assert len({f.name for f in figures}) == len(figures)


def test_a_limit_is_kept_at_its_edge_and_missed_past_it() -> None:
    assert Figure("a", 1.5, "x", at_most=1.5).verdict == "pass"
    assert Figure("a", 1.6, "x", at_most=1.5).verdict == "MISSED"
    assert Figure("a", 14.9, "x", at_least=15).verdict == "MISSED"
    assert Figure("a", 14.9, "x").verdict == ""
    assert row(Figure("a", 14.9, "x", at_least=15)).endswith(">= 15 x        MISSED")


def test_both_processes_make_the_same_node() -> None:
    driver = simulated_driver(SMALL, TickClock())
    held = [ids for pod in pods(SMALL) for devices in pod.containers.values() for ids in devices.values()]
    assert held == [[i.uuid] for i in driver.machine.gpus[0].instances]
    assert len(pods(SMALL)) == 3


def test_a_missed_limit_is_the_exit_code(tmp_path: Path) -> None:
    bad = {"bad": lambda: [Figure("too slow", 2.0, "x", at_most=1.5)]}
    assert command.main(["bad", "--json", str(tmp_path / "figures.json")], bad) == 1
    assert '"verdict": "MISSED"' in (tmp_path / "figures.json").read_text()
