"""What a text may cost: real processes that read hostile texts over real HTTP, and the memory they took at most."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fetch.test_exposition import answer, serving

LIMIT_MIB = 192
"""The chart's limit for the exporter, and for enrich."""
MIB = 2**20
REPORT = (
    "peak = re.search(r'VmHWM:\\s+(\\d+) kB', Path('/proc/self/status').read_text()); print(said, int(peak[1]) // 1024)"
)
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
from podgpu.telemetry.exposition import parse_exposition

source = UrlExposition(sys.argv[1], deadline=60.0)
fetch = lambda: parse_exposition(source.fetch(), source.shown)
try:
    Enricher(fetch, lambda _devices: Held(), AtomicFile(sys.argv[2]), Settings()).turn()
    said = "taken"
except SourceError as error:
    said = error.reason
{REPORT}
"""
"""A turn of `enrich` without its deadline of five seconds, which a busy machine may miss before anything is refused."""


GPU = 'a{{gpu="0",UUID="{n}",GPU_I_ID="1"}} 1\n'


def zeros(mebibytes: int) -> bytes:
    packer = zlib.compressobj(1, wbits=31)
    return b"".join(packer.compress(b"\n" * MIB) for _ in range(mebibytes)) + packer.flush()


def rows(form: str, size: int = 8 * MIB) -> bytes:
    def numbered() -> Iterator[str]:
        for number in range(size // len(form.format(n=1_000_000))):
            yield form.format(n=number)

    return "".join(numbered()).encode()


EXPOSITIONS = {
    "a gzip bomb": lambda: zeros(512),
    "many labels": lambda: gzip.compress(rows('a{{b="{n}"}} 1\n'), 1),
    "many metrics": lambda: gzip.compress(rows("# HELP a{n} b\n"), 1),
    "many samples": lambda: gzip.compress(b"a 1\n" * (4 * MIB - 1), 1),
    "many GPUs": lambda: gzip.compress(rows(GPU), 1),
    "one line": lambda: gzip.compress(b"a{" + rows('a{n}="",') + b"} 1\n", 1),
    "long lines": lambda: gzip.compress(
        b"".join(b"a{" + rows(f'a{i}_{{n}}="",', 900_000) + b"} 1\n" for i in range(16)), 1
    ),
}


def peak(code: str, *arguments: str) -> tuple[str, int, str]:
    """What came of it, most resident memory in MiB, what was logged."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DCGM", "PODGPU"))}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment, check=True
    )
    said, mebibytes = done.stdout.splitlines()[-1].split()
    return said, int(mebibytes), done.stderr


@pytest.mark.fault(
    "What an exporter answers is a gzip bomb, or made of a million labels, metrics or GPUs",
    "It is refused as soon as it is past its bounds, with the reason; memory stays within the chart's limit",
)
@pytest.mark.parametrize("name", EXPOSITIONS)
def test_a_hostile_exposition_costs_little(name: str, tmp_path: Path) -> None:
    with serving(answer(EXPOSITIONS[name](), Content_Encoding="gzip")) as url:
        said, mebibytes, logged = peak(READING, url, str(tmp_path / "gpu.prom"))
    assert said == ("too_large" if name == "a gzip bomb" else "malformed")
    assert "more than" in logged
    assert mebibytes < LIMIT_MIB


def test_as_much_as_is_taken_costs_no_more(tmp_path: Path) -> None:
    """50,000 GPUs, which no node has, but an exposition by file may be of many nodes."""
    exposition, out = rows(GPU, 49_000 * len(GPU.format(n=1_000_000))), tmp_path / "gpu.prom"
    with serving(answer(gzip.compress(exposition, 1), Content_Encoding="gzip")) as url:
        said, mebibytes, _ = peak(READING, url, str(out))
    assert said == "taken"
    assert out.read_bytes().count(b"\na{") == 49_000 - 1
    assert mebibytes < LIMIT_MIB


def test_the_command_refuses_a_gzip_bomb(tmp_path: Path) -> None:
    with serving(answer(EXPOSITIONS["a gzip bomb"](), Content_Encoding="gzip")) as url:
        code, mebibytes, said = peak(
            COMMAND, "enrich", "--in", url, "--out", str(tmp_path / "gpu.prom"), "-k=false", "--once"
        )
    assert code == "1"
    assert "answers with more than 16777216 bytes" in said
    assert "Traceback" not in said
    assert mebibytes < LIMIT_MIB


def test_the_exporter_takes_one_nodes_gpus() -> None:
    """Each is read in a thread of its own: an exposition of ten thousand must not make so many."""
    with serving(answer(gzip.compress(rows(GPU, 500_000), 1), Content_Encoding="gzip")) as url:
        code, mebibytes, said = peak(COMMAND, "exporter", "--telemetry", f"exporter:{url}", "--once", "-c", "5000")
    assert code == "1"
    assert "and no node has more than 1024" in said
    assert mebibytes < LIMIT_MIB
