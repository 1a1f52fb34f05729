"""Debian's node_exporter reads the enriched file and prints seed 000's sample as it stands there."""

from __future__ import annotations

import shutil
import socket as sockets
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.enrich.test_command import BARE, SEED, enrich, exposition, out, socket

__all__ = ["exposition", "out", "socket"]
NODE_EXPORTER = shutil.which("prometheus-node-exporter") or shutil.which("node_exporter")
pytestmark = pytest.mark.skipif(NODE_EXPORTER is None, reason="prometheus-node-exporter is not installed")


@contextmanager
def node_exporter(directory: Path) -> Iterator[str]:
    with sockets.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    assert NODE_EXPORTER is not None
    process = subprocess.Popen(
        [
            NODE_EXPORTER,
            "--collector.disable-defaults",
            "--collector.textfile",
            f"--collector.textfile.directory={directory}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stderr=subprocess.PIPE,
    )
    try:
        yield f"http://127.0.0.1:{port}/metrics"
    finally:
        process.terminate()
        process.communicate(timeout=30)


def scrape(url: str) -> str:
    give_up = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                return str(response.read().decode())
        except urllib.error.URLError:
            assert time.monotonic() < give_up, "node_exporter does not answer"
            time.sleep(0.05)


def test_seed_000_through_node_exporter(exposition: Path, out: Path, socket: str) -> None:
    """Without the timestamps, because of which node_exporter would skip the file."""
    stamped = [f"{line} 1700000000000" if line[0] != "#" else line for line in BARE.splitlines()]
    exposition.write_text("\n".join(stamped) + "\n")
    assert enrich(exposition, out, socket, "--once", "-o").code == 0
    with node_exporter(out.parent) as url:
        text = scrape(url)
    assert "".join(line for line in text.splitlines(keepends=True) if "dcgm" in line) == SEED
    assert "node_textfile_scrape_error 0" in text
    assert 'podgpu_exporter_source_up{file="gpu.prom",source="exporter"} 1' in text
