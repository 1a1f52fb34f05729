"""Runs Debian's prometheus and victoria-metrics, each on its own port and in its own folder."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.net import QuietHandler, free_port, read_if_ready, serving
from tests.nodes.clock import PATIENCE, wait_until


@dataclass(frozen=True)
class Point:
    """One sample to store."""

    name: str
    labels: Mapping[str, str]
    value: float
    at: float
    """Unix time, whole milliseconds."""


def needs(*binaries: str) -> pytest.MarkDecorator:
    missing = [name for name in binaries if shutil.which(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed here: {', '.join(missing)}")


@contextlib.contextmanager
def prometheus(
    folder: Path, points: Iterable[Point] = (), configuration: str = "", options: Iterable[str] = ()
) -> Iterator[str]:
    """Yields its URL. Stores `points` before the start. `configuration` is the content of
    prometheus.yml.
    """
    store = folder / "prometheus"
    store.mkdir()
    text = open_metrics(points)
    if text:
        (folder / "points.om").write_text(text + "# EOF\n", encoding="utf-8")
        # One block: promtool reads all points once per block, and by default a block has two hours.
        blocks = [
            "promtool",
            "tsdb",
            "create-blocks-from",
            "--max-block-duration=1000h",
            "openmetrics",
        ]
        subprocess.run(
            [*blocks, str(folder / "points.om"), str(store)], check=True, capture_output=True
        )
    (folder / "prometheus.yml").write_text(
        configuration or "scrape_configs: []\n", encoding="utf-8"
    )
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={store}",
        "--storage.tsdb.retention.time=10y",
        "--log.level=warn",
        *options,
    ]
    with _running(
        lambda port: [*command, f"--web.listen-address=127.0.0.1:{port}"], "/-/ready", folder
    ) as url:
        yield url


@contextlib.contextmanager
def alertmanager(folder: Path) -> Iterator[str]:
    """Yields its URL. Alerts are stored but not sent."""
    folder.mkdir()
    configuration = folder / "alertmanager.yml"
    configuration.write_text(
        "{route: {receiver: none}, receivers: [{name: none}]}", encoding="utf-8"
    )
    command = [
        "prometheus-alertmanager",
        f"--config.file={configuration}",
        f"--storage.path={folder / 'alerts'}",
    ]
    command += ["--cluster.listen-address=", "--log.level=error"]
    with _running(
        lambda port: [*command, f"--web.listen-address=127.0.0.1:{port}"], "/-/ready", folder
    ) as url:
        yield url


@contextlib.contextmanager
def victoria_metrics(
    folder: Path, points: Iterable[Point] = (), configuration: str = ""
) -> Iterator[str]:
    """Yields its URL. `configuration` is a Prometheus scrape configuration."""
    store = folder / "victoria"
    command = [
        "victoria-metrics",
        f"-storageDataPath={store}",
        "-retentionPeriod=10y",
        "-loggerLevel=WARN",
    ]
    if configuration:
        (folder / "scrape.yml").write_text(configuration, encoding="utf-8")
        command.append(f"-promscrape.config={folder / 'scrape.yml'}")
    with _running(
        lambda port: [*command, f"-httpListenAddr=127.0.0.1:{port}"], "/health", folder
    ) as url:
        text = exposition(points)
        if text:
            _ask(f"{url}/api/v1/import/prometheus", text.encode())
            _ask(f"{url}/internal/force_flush")
        yield url


@contextlib.contextmanager
def expositions_at(text_of: Callable[[str], str], away: Collection[str] = ()) -> Iterator[str]:
    """Yields HOST:PORT. Serves the text of each name at /NAME, and status 503 for names in
    `away`.
    """

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            name = self.path.strip("/")
            body = text_of(name).encode()
            self.send_response(503 if name in away else 200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

    with serving(Handler) as port:
        yield f"127.0.0.1:{port}"


def exposition(points: Iterable[Point]) -> str:
    return "".join(f"{_series(p)} {p.value!r} {round(p.at * 1000)}\n" for p in points)


def open_metrics(points: Iterable[Point]) -> str:
    return "".join(f"{_series(p)} {p.value!r} {round(p.at * 1000) / 1000:.3f}\n" for p in points)


def _series(point: Point) -> str:
    pairs = (f'{name}="{_escaped(value)}"' for name, value in point.labels.items())
    return f"{point.name}{{{','.join(pairs)}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


@contextlib.contextmanager
def _running(command_on: Callable[[int], list[str]], ready: str, folder: Path) -> Iterator[str]:
    """Tries another port if the free one was taken before the start."""
    for attempt in range(3):
        port = free_port()
        log = folder / f"log-{attempt}"
        with log.open("wb") as out:
            process = subprocess.Popen(command_on(port), stdout=out, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(
                lambda: process.poll() is not None or read_if_ready(url + ready) is not None,  # noqa: B023
                f"{url} is ready",
            )
            if process.poll() is None:
                yield url
                return
        finally:
            process.kill()  # no output after this point is needed
            process.wait()
    raise AssertionError(f"it does not start: {log.read_text(errors='replace')[-2000:]}")


def _ask(url: str, body: bytes | None = None) -> bytes:
    with urllib.request.urlopen(url, body, timeout=PATIENCE) as answer:
        content: bytes = answer.read()
        return content
