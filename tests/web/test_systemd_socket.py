"""Tests --web-systemd-socket with sockets that are already bound."""

from __future__ import annotations

import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from podgpu.web.app import Address
from tests.nodes.clock import PATIENCE, wait_until
from tests.web.server import Client

COMMAND = (
    sys.executable,
    "-m",
    "podgpu",
    "exporter",
    "--telemetry",
    "simulated:1xT4",
    "--web-systemd-socket",
)

_AS_SYSTEMD = """
import os, sys
pid, descriptors, *command = sys.argv[1:]
for place, descriptor in enumerate(descriptors.split(","), 3):
    os.dup2(int(descriptor), place)
os.environ |= {"LISTEN_PID": str(os.getpid()) if pid == "its own" else pid, "LISTEN_FDS": str(place - 2)}
os.execv(command[0], command)
"""


@contextmanager
def started(
    passed: Sequence[socket.socket], *arguments: str, log: Path, pid: str = "its own"
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts the exporter like systemd: with sockets from descriptor 3 on, LISTEN_PID and
    LISTEN_FDS.
    """
    descriptors = [str(one.fileno()) for one in passed]
    command = [sys.executable, "-c", _AS_SYSTEMD, pid, ",".join(descriptors), *COMMAND, *arguments]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, stdout=output, stderr=output, pass_fds=[s.fileno() for s in passed]
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def bound(number: int) -> Iterator[list[socket.socket]]:
    """Yields bound sockets. Their descriptors are high, so that `started` can use 3 and above."""
    spare = [socket.socket() for _ in range(8)]
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    for one in spare:
        one.close()
    try:
        yield sockets
    finally:
        for one in sockets:
            one.close()


def client_of(one: socket.socket, tls: ssl.SSLContext | None = None) -> Client:
    return Client(Address("127.0.0.1", one.getsockname()[1]), tls)


def test_all_sockets_are_served(folder: Path) -> None:
    log = folder / "log"
    with bound(2) as sockets, started(sockets, log=log) as process:
        # No wait is needed: the sockets are bound, so early connections are queued.
        for one in sockets:
            assert client_of(one).ask("/livez").status == 200
            wait_until(lambda one=one: client_of(one).ask("/ready").status == 200, ("it is ready"))  # type: ignore[misc]
            assert "DCGM_FI_DEV_GPU_UTIL" in client_of(one).ask("/metrics").text
        assert (
            f"listening on http://127.0.0.1:{sockets[0].getsockname()[1]}/metrics"
            in log.read_text()
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert "Traceback" not in log.read_text()
