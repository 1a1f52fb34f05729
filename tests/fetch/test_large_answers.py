"""What a text may cost: real processes that read hostile texts over real HTTP, and the memory they took at most."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.fetch.test_exposition import answer, serving

LIMIT_MIB = 192
"""The chart's limit for the exporter, and for enrich."""
MIB = 2**20
REPORT = "print('COST', said, int(re.search(r'VmHWM:\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1]) // 1024)"
COMMAND = (
    f"import re, sys; from pathlib import Path; from podgpu.cli.main import run; said = run(sys.argv[1:]); {REPORT}"
)
READING = f"""
import re, sys
from pathlib import Path
from podgpu.atomic_file import AtomicFile
from podgpu.enrich.turn import Enricher, Held, Settings
from podgpu.errors import SourceError
from podgpu.fetch.exposition import UrlExposition
from podgpu.gpu.exposition import parse_exposition

for url in sys.argv[2:]:
    source = UrlExposition(url, deadline=60.0)
    fetch = lambda: parse_exposition(source.fetch(), source.shown)
    try:
        Enricher(fetch, lambda _devices: Held(), AtomicFile(sys.argv[1]), Settings()).turn()
        said = "taken"
    except SourceError as error:
        said = error.reason
    {REPORT}
    print("----", file=sys.stderr)
"""
"""A turn of `enrich` on each URL, without its deadline of five seconds, which a busy machine may miss before it has
refused anything. The most memory it took is told after each."""


GPU = b'a{gpu="0",UUID="%d",GPU_I_ID="1"} 1\n'


@cache
def bomb() -> bytes:
    """Of a megabyte, that unpacks to more than anybody may take."""
    return _empty_lines(2 * LIMIT_MIB)


def _empty_lines(mebibytes: int) -> bytes:
    packer = zlib.compressobj(1, wbits=31)
    return b"".join(packer.compress(b"\n" * MIB) for _ in range(mebibytes)) + packer.flush()


def rows(form: bytes, size: int = 8 * MIB) -> bytes:
    return b"".join([form % number for number in range(size // len(form % 1_000_000))])


EXPOSITIONS = {
    "a gzip bomb": bomb,
    "many labels": lambda: gzip.compress(rows(b'a{b="%d"} 1\n'), 1),
    "many metrics": lambda: gzip.compress(rows(b"# HELP a%d b\n"), 1),
    "many samples": lambda: gzip.compress(b"a 1\n" * (4 * MIB - 1), 1),
    "many GPUs": lambda: gzip.compress(rows(GPU), 1),
    "one line": lambda: gzip.compress(b"a{" + rows(b'a%d="",') + b"} 1\n", 1),
    "long lines": lambda: gzip.compress(
        b"".join(b"a{" + rows(b'a%d_%%d="",' % i, 900_000) + b"} 1\n" for i in range(16)), 1
    ),
}


@dataclass(frozen=True)
class Cost:
    said: str
    """What came of it."""
    mebibytes: int
    """Most resident memory until then."""
    logged: str


def run(code: str, *arguments: str) -> list[Cost]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DCGM", "PODGPU"))}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment, check=True
    )
    told = [line.split() for line in done.stdout.splitlines() if line.startswith("COST ")]
    logged = done.stderr.split("----\n")
    return [Cost(said, int(mebibytes), log) for (_, said, mebibytes), log in zip(told, logged, strict=False)]


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Cost]:
    """One process that takes one after the other: what it let go of late would count against the next."""
    bodies = {f"/{number}": make() for number, make in enumerate(EXPOSITIONS.values())}
    out = tmp_path_factory.mktemp("out") / "gpu.prom"
    with serving(lambda request: answer(bodies[request.path], Content_Encoding="gzip")(request)) as url:
        found = run(READING, str(out), *(url.replace("/metrics", path) for path in bodies))
    return dict(zip(EXPOSITIONS, found, strict=True))


@pytest.mark.fault(
    "What an exporter answers is a gzip bomb, or made of a million labels, metrics or GPUs",
    "It is refused as soon as it is past its bounds, with the reason; memory stays within the chart's limit",
)
@pytest.mark.parametrize("name", EXPOSITIONS)
def test_a_hostile_exposition_costs_little(name: str, costs: dict[str, Cost]) -> None:
    cost = costs[name]
    assert cost.said == ("too_large" if name == "a gzip bomb" else "malformed")
    assert "more than" in cost.logged
    assert cost.mebibytes < LIMIT_MIB


def test_as_much_as_is_taken_costs_no_more(tmp_path: Path) -> None:
    """50,000 GPUs, which no node has, but an exposition by file may be of many nodes."""
    exposition, out = rows(GPU, 49_000 * len(GPU % 1_000_000)), tmp_path / "gpu.prom"
    with serving(answer(gzip.compress(exposition, 1), Content_Encoding="gzip")) as url:
        (cost,) = run(READING, str(out), url)
    assert cost.said == "taken"
    assert out.read_bytes().count(b"\na{") == 49_000 - 1
    assert cost.mebibytes < LIMIT_MIB


def test_the_command_refuses_a_gzip_bomb(tmp_path: Path) -> None:
    with serving(answer(bomb(), Content_Encoding="gzip")) as url:
        (cost,) = run(COMMAND, "enrich", "--in", url, "--out", str(tmp_path / "gpu.prom"), "-k=false", "--once")
    assert cost.said == "1"
    assert "answers with more than 16777216 bytes" in cost.logged
    assert "Traceback" not in cost.logged
    assert cost.mebibytes < LIMIT_MIB


def test_the_exporter_takes_one_nodes_gpus() -> None:
    """Each is read in a thread of its own: an exposition of ten thousand must not make so many."""
    with serving(answer(gzip.compress(rows(GPU, 500_000), 1), Content_Encoding="gzip")) as url:
        (cost,) = run(COMMAND, "exporter", "--telemetry", f"exporter:{url}", "--once", "-c", "5000")
    assert cost.said == "1"
    assert "and no node has more than 1024" in cost.logged
    assert cost.mebibytes < LIMIT_MIB
