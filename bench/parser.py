"""Parsing metrics text compared with prometheus_client.

The text is that of a real dcgm-exporter (an H200 with a pod), with its GPU repeated: 8 times for a node, and often
enough for 100 MB. CPU time of this thread, the minimum of many turns.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from bench.figures import Figure
from bench.rendering import turn_seconds
from podgpu.metrics.parse import parse_text

LEAST_TIMES_FASTER = 25
MOST_GROWTH = 3
"""Time per byte of the largest text divided by that of a hundredth of it: 1 is linear, 100 quadratic."""
_FIXTURE = Path(__file__).parents[1] / "tests" / "fixtures" / "h200" / "dcp_pod.prom"
_UUID = "GPU-11111111-2222-3333-4444-555555555555"


def measure(turns: int = 100, largest: int = 100_000_000) -> list[Figure]:
    text = exposition_of(8)
    _check_that_both_agree(text)
    oracle, ours = map(
        min, turn_seconds(turns, lambda: list(text_string_to_metric_families(text)), partial(parse_text, text))
    )
    of_one = len(exposition_of(9)) - len(text)
    small, large = (exposition_of(max(1, size // of_one)) for size in (largest // 100, largest))
    per_byte = [min(turn_seconds(2, partial(parse_text, each))[0]) / len(each) for each in (small, large)]
    return [
        Figure("prometheus_client.parser over parse_text", oracle / ours, "x", at_least=LEAST_TIMES_FASTER),
        Figure("parse_text", ours * 1e6, "us"),
        Figure("prometheus_client.parser", oracle * 1e6, "us"),
        Figure("100 MB, time per byte over that of 1 MB", per_byte[1] / per_byte[0], "x", at_most=MOST_GROWTH),
    ]


def exposition_of(gpus: int) -> str:
    """dcgm-exporter's text for that many GPUs, each with its own pod."""
    return "".join(
        line if line.startswith("#") else _of_gpu(line, gpu)
        for line in _FIXTURE.read_text(encoding="utf-8").splitlines(keepends=True)
        for gpu in range(1 if line.startswith("#") else gpus)
    )


def _of_gpu(line: str, gpu: int) -> str:
    line = line.replace('gpu="0"', f'gpu="{gpu}"').replace('"nvidia0"', f'"nvidia{gpu}"')
    return line.replace(_UUID, f"{_UUID[:-8]}{gpu:08d}").replace("train-a", f"train-{gpu}")


def _check_that_both_agree(text: str) -> None:
    # Without the TYPE lines: they make prometheus_client rename counters.
    lines = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    theirs = [s for family in text_string_to_metric_families(lines) for s in family.samples]
    ours = [s for family in parse_text(lines) for s in family.samples]
    if [(s.name, s.labels, s.value) for s in ours] != [(s.name, s.labels, float(s.value)) for s in theirs]:
        raise RuntimeError("prometheus_client parsed other samples")
