"""The benchmarks run, shortened. `make bench` compares their figures with the limits."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator

import pytest

from bench import __main__ as command
from bench import cluster, history, memory, page, scale, serving, text, usage
from bench.figures import Figure

SHORTENED: dict[str, Callable[[], list[Figure]]] = {
    "serving": lambda: serving.measure(blocks=2, requests=1),
    "text": lambda: text.measure(turns=1),
    "usage": lambda: usage.measure(turns=2),
    "memory": lambda: memory.measure(first=2, last=4, pause=0.0),
    "cluster": lambda: cluster.measure(nodes=3, rounds=2),
    "page": lambda: page.measure(nodes=3, turns=1),
    "history": lambda: history.measure(gpus=20, coarse_rounds=5, fine_rounds=5),
    "scale": lambda: scale.measure(gpus=12_600, owners=10),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", command.BENCHMARKS)
def test_benchmark_runs(name: str) -> None:
    if name == "scale" and shutil.which("victoria-metrics") is None:
        pytest.skip("victoria-metrics is not installed here")
    figures = SHORTENED[name]()
    assert any(figure.limit for figure in figures)
    assert len({figure.name for figure in figures}) == len(figures)


def test_missed_limits_are_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    kept = {"edge": lambda: [Figure("fast", 1.5, "x", at_most=1.5), Figure("only shown", 9.0)]}
    assert command.main(["edge"], kept) == 0
    for figure in (Figure("slow", 1.6, "x", at_most=1.5), Figure("slow", 14.9, "x", at_least=15)):
        assert command.main([], {"bad": lambda figure=figure: [figure]}) == 1
        assert "MISSED" in capsys.readouterr().out
