"""A disk that is full, a clock that is set, a file that is replaced while it is read: what stands in the file then."""

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
from podgpu.enrich.enricher import Enricher, EnrichSettings
from podgpu.errors import SourceError
from podgpu.files import AtomicFile
from podgpu.gpu.exposition import FileExposition, ParsedExposition, parse_exposition
from podgpu.holders.reader import AllocationResult
from podgpu.workers import ErrorCounts
from tests.nodes.clock import wait_until
from tests.web.process import NO_LOGS

EXPOSITION = b'# TYPE t gauge\nt{gpu="0",UUID="GPU-1"} 33\n'
DAY = 86_400.0


# A full disk


@contextmanager
def enriching(exposition: Path, out: Path) -> Iterator[subprocess.Popen[str]]:
    words = ["--in", exposition, "--out", out, "-k=false", "--interval", "100ms", "--stale-after", "400ms", *NO_LOGS]
    process = subprocess.Popen(
        [sys.executable, "-m", "podgpu", "enrich", *words], stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def fill(process: subprocess.Popen[str], disk: Path) -> None:
    """To the last byte, and for good: while enrich stands still between two writings, as a file that it is about to put
    in place would free the room of the one before, and with a second name for the file that it will remove."""
    while True:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        try:
            if os.listdir(disk) == ["gpu.prom"]:
                os.link(disk / "gpu.prom", disk / "kept")
                _fill_up(disk / "filler")
                return
        finally:
            process.send_signal(signal.SIGCONT)


def _fill_up(path: Path) -> None:
    with suppress(OSError), path.open("ab", buffering=0) as filler:
        while True:
            filler.write(b"#" * 512)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "disk"
    mount.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", mount], check=True)


@pytest.mark.fault(
    "The disk of enrich's output file is full for longer than --stale-after",
    "The old file is removed, as nothing can be written over it, and said so once; it comes back once there is room",
)
def test_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    exposition, out = tmp_path / "in.prom", small_disk / "gpu.prom"
    exposition.write_bytes(EXPOSITION)
    with enriching(exposition, out) as process:
        wait_until(lambda: out.exists() and b"GPU-1" in out.read_bytes(), "the first figures are written")
        fill(process, small_disk)
        wait_until(lambda: not out.exists(), "figures that are too old are gone")
        (small_disk / "filler").unlink()
        (small_disk / "kept").unlink()
        wait_until(lambda: out.exists() and b"GPU-1" in out.read_bytes(), "figures are written again")
        process.send_signal(signal.SIGTERM)
        _, logged = process.communicate(timeout=30)
    assert os.listdir(small_disk) == ["gpu.prom"]
    assert logged.count("No space left on device") == 1
    assert logged.count("removed, because its values are stale") == 1
    assert logged.count("works again") == 1


# A clock that is set


class Hands:
    """Both clocks, by hand."""

    def __init__(self) -> None:
        self.now, self.wall = 100.0, 1_700_000_000.0
        self.clock = Clock(lambda: self.now, lambda: self.wall)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        self.wall += seconds


@pytest.mark.fault(
    "The wall clock jumps a day forward or back while enrich cannot read its exporter",
    "The last figures stand for --stale-after, not a second more or less",
)
@pytest.mark.parametrize("jump", [DAY, -DAY])
def test_a_clock_that_jumps_while_figures_stand(jump: float, tmp_path: Path) -> None:
    hands, out = Hands(), tmp_path / "gpu.prom"
    expositions = iter([parse_exposition(EXPOSITION, "exposition")])

    def fetch() -> ParsedExposition:
        for exposition in expositions:
            return exposition
        raise SourceError("unreachable", "no exposition")

    file = AtomicFile(str(out), wall=hands.clock.wall)
    enricher = Enricher(
        fetch,
        lambda _devices: AllocationResult(),
        file,
        ErrorCounts(),
        EnrichSettings(stale_after=75.0),
        clock=hands.clock,
    )
    enricher.turn()
    hands.wall += jump
    for seconds, stands in ((74.0, True), (2.0, False)):
        hands.pass_by(seconds)
        with pytest.raises(SourceError):
            enricher.turn()
        assert (b"GPU-1" in out.read_bytes()) is stands


@pytest.mark.parametrize(("written", "stands"), [(DAY, True), (-10.0, True), (-70.0, False)])
def test_a_file_of_an_earlier_run_from_the_past_or_the_future(written: float, stands: bool, tmp_path: Path) -> None:
    """One from the future is as if written at the start: it grows old like any other."""
    hands, out = Hands(), tmp_path / "gpu.prom"
    out.write_bytes(EXPOSITION)
    os.utime(out, (0, hands.wall + written))

    def fetch() -> ParsedExposition:
        raise SourceError("unreachable", "no exposition")

    file = AtomicFile(str(out), wall=hands.clock.wall)
    enricher = Enricher(
        fetch,
        lambda _devices: AllocationResult(),
        file,
        ErrorCounts(),
        EnrichSettings(stale_after=75.0),
        clock=hands.clock,
    )
    for seconds, is_there in ((10.0, stands), (70.0, False)):
        hands.pass_by(seconds)
        with pytest.raises(SourceError):
            enricher.turn()
        assert (b"GPU-1" in out.read_bytes()) is is_there


# A file that is replaced


def replace(file: Path, content: bytes) -> None:
    beside = file.with_suffix(".new")
    beside.write_bytes(content)
    os.replace(beside, file)


@pytest.mark.fault(
    "An exporter's file is replaced, or written over, again and again while podgpu reads it",
    "Every reading is one whole exposition; where that cannot be had it is refused as being_written",
)
@pytest.mark.parametrize("write", [replace, Path.write_bytes], ids=["renamed", "written over"])
def test_a_file_that_changes_while_it_is_read(write: Callable[[Path, bytes], object], tmp_path: Path) -> None:
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
