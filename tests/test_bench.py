"""Runs shortened benchmarks. `make bench` compares their results with the limits."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from bench import __main__ as command
from bench import (
    cluster,
    history,
    memory,
    months,
    page,
    savings,
    scale,
    serving,
    stragglers,
    text,
    usage,
    webhook,
    writers,
)
from bench.figures import Figure

SHORTENED: dict[str, Callable[[], list[Figure]]] = {
    "serving": lambda: serving.measure(blocks=2, requests=1),
    "text": lambda: text.measure(turns=1),
    "usage": lambda: usage.measure(turns=2),
    "memory": lambda: memory.measure(first=2, last=4, pause=0.0),
    "cluster": lambda: cluster.measure(nodes=3, rounds=2),
    "page": lambda: page.measure(nodes=3, turns=1),
    "history": lambda: history.measure(gpus=20, coarse_rounds=5, fine_rounds=5),
    "months": lambda: months.measure(gpus=20, rounds=24),
    "scale": lambda: scale.measure(gpus=12_600, owners=10),
    "stragglers": lambda: stragglers.measure(gpu_days=1.0, jobs=2),
    "savings": lambda: savings.measure(gpus=30, pods=20),
    "writers": lambda: writers.measure(nodes=1, hours=2.0),
    "webhook": lambda: webhook.measure(nodes=2, hours=2.0),
}


@pytest.mark.parametrize("name", command.BENCHMARKS)
def test_benchmark_runs(name: str) -> None:
    if name == "scale" and shutil.which("victoria-metrics") is None:
        pytest.skip("victoria-metrics is not installed here")
    figures = SHORTENED[name]()
    assert any(figure.limit for figure in figures)
    assert len({figure.name for figure in figures}) == len(figures)
