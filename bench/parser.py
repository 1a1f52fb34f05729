"""Reading an exposition against prometheus_client, up to 100 MB, and enriching one: read, relabel, write to a disk.

The text is a real dcgm-exporter's (an H200 with a pod), its GPU repeated: 8 times for a node, many times for a large
text. The parser remembers comments and labels from one text to the next, as an exporter's texts have the same ones;
`the first time` is what it takes without that. CPU time of this thread, the least of many turns. The file is brought to
the disk at every write: that waits, and waiting is not counted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from bench.figures import Figure
from bench.rendering import turn_seconds
from podgpu.enrich.turn import Enricher, Held, Settings
from podgpu.files import AtomicFile
from podgpu.gpu.exposition import parse_exposition
from podgpu.metrics import lines as lines_of_text
from podgpu.metrics.parse import parse_text
from podgpu.model import Allocation, Assignment, Workload

LEAST_TIMES_FASTER = 25
MOST_ENRICH_MS = 20
MOST_GROWTH = 3
"""Time per byte of the largest text over that of a hundredth of it: 1 is linear, 100 quadratic. Between them lies that
the labels of thousands of GPUs do not stay in the processor's cache."""
_FIXTURE = Path(__file__).parents[1] / "tests" / "fixtures" / "h200" / "dcp_pod.prom"
_UUID = "GPU-11111111-2222-3333-4444-555555555555"


def measure(turns: int = 100, largest: int = 100_000_000) -> list[Figure]:
    exposition = exposition_of(8)
    _see_that_both_read_the_same(exposition)
    oracle, ours, first = map(
        min,
        turn_seconds(
            turns,
            lambda: list(text_string_to_metric_families(exposition)),
            lambda: parse_text(exposition),
            lambda: _parse_as_if_first(exposition),
        ),
    )
    per_byte = dict(_large_expositions(largest))
    return [
        Figure("prometheus_client.parser over parse_text", oracle / ours, "x", at_least=LEAST_TIMES_FASTER),
        Figure("prometheus_client.parser over parse_text, the first time", oracle / first, "x"),
        Figure("parse_text", ours * 1e6, "us"),
        Figure("prometheus_client.parser", oracle * 1e6, "us"),
        Figure("samples in the metrics", sum(len(f.samples) for f in parse_text(exposition)), ""),
        Figure("the largest exposition, per byte, over a hundredth of it", _growth(per_byte), "x", at_most=MOST_GROWTH),
        Figure("devices of 8,000 MIG GPUs, per GPU, over those of 1,000", _device_growth(), "x", at_most=MOST_GROWTH),
        *(Figure(f"parse_text of {size / 1e6:.3g} MB", size * each, "s") for size, each in per_byte.items()),
        Figure(
            "enrich: read, relabel, write", min(_enrich_seconds(exposition, turns)) * 1e3, "ms", at_most=MOST_ENRICH_MS
        ),
    ]


def _parse_as_if_first(exposition: str) -> None:
    lines_of_text.names_in.cache_clear()
    lines_of_text.comment_parts.cache_clear()
    parse_text(exposition)


def exposition_of(gpus: int) -> str:
    """An exposition as dcgm-exporter would print for that many GPUs, each with a pod of its own."""
    return "".join(
        line if line.startswith("#") else _of_gpu(line, gpu)
        for line in _FIXTURE.read_text(encoding="utf-8").splitlines(keepends=True)
        for gpu in range(1 if line.startswith("#") else gpus)
    )


def _of_gpu(line: str, gpu: int) -> str:
    line = line.replace('gpu="0"', f'gpu="{gpu}"').replace('"nvidia0"', f'"nvidia{gpu}"')
    return line.replace(_UUID, uuid_of(gpu)).replace("train-a", f"train-{gpu}")


def uuid_of(gpu: int) -> str:
    return f"{_UUID[:-8]}{gpu:08d}"


def _see_that_both_read_the_same(exposition: str) -> None:
    # Without the TYPE lines: they make prometheus_client rename counters.
    lines = "".join(line for line in exposition.splitlines(keepends=True) if not line.startswith("#"))
    theirs = [s for family in text_string_to_metric_families(lines) for s in family.samples]
    ours = [s for family in parse_text(lines) for s in family.samples]
    if [(s.name, s.labels, s.value) for s in ours] != [(s.name, s.labels, float(s.value)) for s in theirs]:
        raise RuntimeError("prometheus_client read other samples: there is nothing to compare")


def _large_expositions(largest: int) -> Iterator[tuple[int, float]]:
    """Seconds per byte of expositions of about a hundredth, a tenth and all of `largest` bytes."""
    of_one = len(exposition_of(9)) - len(exposition_of(8))
    for part in (100, 10, 1):
        exposition = exposition_of(max(1, largest // part // of_one))
        (seconds,) = turn_seconds(3 if part > 1 else 2, partial(parse_text, exposition))
        yield len(exposition), min(seconds) / len(exposition)


def _growth(per_byte: dict[int, float]) -> float:
    return per_byte[max(per_byte)] / per_byte[min(per_byte)]


def _device_growth() -> float:
    """Which devices a text names, where each GPU has an instance: no node has so many, a hostile text may."""
    row = 'a{{gpu="{n}",UUID="GPU-{n}",GPU_I_ID="1"}} 1\n'
    small, large = ("".join(row.format(n=n) for n in range(gpus)).encode() for gpus in (1000, 8000))
    of_small, of_large = turn_seconds(
        3, partial(parse_exposition, small, "exposition"), partial(parse_exposition, large, "exposition")
    )
    return min(of_large) / min(of_small) / 8


def _enrich_seconds(exposition: str, turns: int) -> list[float]:
    assignments = tuple(Assignment(uuid_of(gpu), Workload("team", f"pod-{gpu}", "main"), "kubelet") for gpu in range(8))
    held = Held(Allocation(assignments))
    content = exposition.encode()
    with tempfile.TemporaryDirectory() as directory:
        file = AtomicFile(f"{directory}/gpu.prom")
        enricher = Enricher(lambda: parse_exposition(content, "exposition"), lambda _devices: held, file, Settings())
        (seconds,) = turn_seconds(turns, enricher.turn)
        _see_that_it_is_enriched(file.path.read_text(encoding="utf-8"))
    return seconds


def _see_that_it_is_enriched(text: str) -> None:
    named = [line for line in text.splitlines() if line.startswith("DCGM_") and 'pod="pod-' in line]
    if len(named) != sum(line.startswith("DCGM_") for line in text.splitlines()):
        raise RuntimeError("some series came out without a pod: the figures would mean nothing")
