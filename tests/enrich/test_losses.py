"""Tests faults of `podgpu enrich`: a full disk, a jump of the wall clock, a file that changes while
it is read.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from podgpu.clock import Clock
from podgpu.errors import SourceError
from podgpu.files import AtomicFile
from podgpu.metrics.parse import ParsedFamily
from podgpu.model import Allocation
from podgpu.node.gpu.remote_exporter import FileExposition, parse_exposition
from podgpu.tools.enrich import Enricher
from podgpu.workers import ErrorCounts
from tests.nodes.clock import wait_until
from tests.privilege import mounted_disk
from tests.process import NO_LOGS

EXPOSITION = b'# TYPE t gauge\nt{gpu="0",UUID="GPU-1"} 33\n'
DAY = 86_400.0
WALL = 1_700_000_000.0


@contextmanager
def enriching(exposition: Path, out: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    words = [
        "--in",
        str(exposition),
        "--out",
        str(out),
        "--interval",
        "100ms",
        "--stale-after",
        "400ms",
        *NO_LOGS,
        *more,
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "podgpu", "enrich", *words], stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def fill(process: subprocess.Popen[str], disk: Path) -> None:
    """Fills the disk while enrich is stopped. A hard link prevents that replacing the old file
    frees space.
    """
    while True:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        try:
            if os.listdir(disk) == ["gpu.prom"]:
                os.link(disk / "gpu.prom", disk / "kept")
                with suppress(OSError), (disk / "filler").open("ab", buffering=0) as filler:
                    while True:
                        filler.write(b"#" * 512)
                return
        finally:
            process.send_signal(signal.SIGCONT)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_disk(tmp_path / "disk", "size=64k"):
        yield tmp_path / "disk"


@pytest.mark.fault(
    "The disk of enrich's output file is full for longer than --stale-after",
    "The old file is removed, with one log line, and is written again once there is space",
)
def test_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    exposition, out = tmp_path / "in.prom", small_disk / "gpu.prom"
    exposition.write_bytes(EXPOSITION)
    with enriching(exposition, out, "-k=false") as process:
        wait_until(
            lambda: out.exists() and b"GPU-1" in out.read_bytes(), "the first values are written"
        )
        fill(process, small_disk)
        wait_until(lambda: not out.exists(), "the stale file is removed")
        (small_disk / "filler").unlink()
        (small_disk / "kept").unlink()
        wait_until(
            lambda: out.exists() and b"GPU-1" in out.read_bytes(), "values are written again"
        )
        process.send_signal(signal.SIGTERM)
        _, logged = process.communicate(timeout=30)
    assert os.listdir(small_disk) == ["gpu.prom"]
    assert logged.count("No space left on device") == 1
    assert logged.count("removed, because its values are stale") == 1
    assert logged.count("works again") == 1


class StaleFile:
    """An enricher with fake clocks. Reads each of the given texts once, then fails."""

    def __init__(self, out: Path, *texts: bytes) -> None:
        self.now, self.wall = 100.0, WALL
        self._out, self._texts = out, iter(texts)
        clock, file = Clock(lambda: self.now, lambda: self.wall), AtomicFile(str(out))
        read = Allocation()
        self._enricher = Enricher(
            self._fetch, lambda _: read, file, ErrorCounts(), stale_after=75.0, clock=clock
        )

    def _fetch(self) -> list[ParsedFamily]:
        for text in self._texts:
            return parse_exposition(text, "exposition")
        raise SourceError("unreachable", "no exposition")

    def turn(self, seconds: float = 0.0) -> bool:
        """Runs the enricher once. Returns whether the file still has the values."""
        self.now += seconds
        self.wall += seconds
        with suppress(SourceError):
            self._enricher.update_file()
        return b"GPU-1" in self._out.read_bytes()


@pytest.mark.fault(
    "The wall clock jumps a day forward or back while enrich cannot read its exporter",
    "The last values are kept for exactly --stale-after",
)
@pytest.mark.parametrize("jump", [DAY, -DAY])
def test_the_wall_clock_jumps(jump: float, tmp_path: Path) -> None:
    file = StaleFile(tmp_path / "gpu.prom", EXPOSITION)
    file.turn()
    file.wall += jump
    assert file.turn(74.0)
    assert not file.turn(2.0)


@pytest.mark.parametrize(("written", "is_kept"), [(DAY, True), (-10.0, True), (-70.0, False)])
def test_a_file_of_an_earlier_run(written: float, is_kept: bool, tmp_path: Path) -> None:
    """A file with a time in the future counts as written when enrich started."""
    out = tmp_path / "gpu.prom"
    out.write_bytes(EXPOSITION)
    os.utime(out, (0, WALL + written))
    file = StaleFile(out)
    assert file.turn(10.0) is is_kept
    assert not file.turn(70.0)


@pytest.mark.fault(
    "The file that enrich reads does not exist yet when it starts",
    (
        "One log line says so, without promising values that the output does not have; it recovers "
        "when the file appears"
    ),
)
@pytest.mark.parametrize("has_old_values", [False, True])
def test_a_missing_file(tmp_path: Path, has_old_values: bool) -> None:
    exposition, out = tmp_path / "in.txt", tmp_path / "gpu.prom"
    if has_old_values:
        out.write_bytes(EXPOSITION)
        os.utime(out, (0, 0))
    before = out.stat().st_mtime_ns if has_old_values else None
    with enriching(exposition, out, "-k=false") as process:
        wait_until(
            lambda: out.exists() and out.stat().st_mtime_ns != before,
            "the output is written without values",
        )
        assert b"GPU-1" not in out.read_bytes()
        exposition.write_bytes(EXPOSITION)
        wait_until(lambda: b"GPU-1" in out.read_bytes(), "the output has values")
        process.send_signal(signal.SIGTERM)
        _, logged = process.communicate(timeout=30)
    missing, *removed, recovered = logged.splitlines()
    assert f"{exposition} does not exist" in missing
    assert [f"{out}: the values were removed" in line for line in removed] == [
        True
    ] * has_old_values
    assert "works again" in recovered


def replace(file: Path, content: bytes) -> None:
    new = file.with_suffix(".new")
    new.write_bytes(content)
    os.replace(new, file)


@pytest.mark.fault(
    "An exporter's file is replaced, or written over, again and again while podgpu reads it",
    "Every reading is one complete exposition, or fails with being_written",
)
@pytest.mark.parametrize("write", [replace, Path.write_bytes], ids=["renamed", "written over"])
def test_a_file_that_changes_while_it_is_read(
    write: Callable[[Path, bytes], object], tmp_path: Path
) -> None:
    file, stop = tmp_path / "in.prom", threading.Event()

    def exposition_of(number: int) -> bytes:
        return b"".join(b't{n="%d"} %d\n' % (row, number) for row in range(2000 + 500 * number))

    def keep_writing() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            write(file, exposition_of(number % 7))

    file.write_bytes(exposition_of(1))
    writer = threading.Thread(target=keep_writing)
    writer.start()
    exposition, whole, refusals = FileExposition(str(file)), 0, set[str]()
    try:
        for _ in range(60):
            try:
                content = exposition.fetch()
            except SourceError as error:
                refusals.add(error.reason)
            else:
                whole += 1
                assert content == exposition_of(int(content[8:].split(b"\n", 1)[0]))
    finally:
        stop.set()
        writer.join()
    assert exposition.fetch() == exposition_of(int(file.read_bytes()[8:].split(b"\n", 1)[0]))
    assert refusals <= {"being_written"}
    assert whole or write is not replace
