"""Tests signals to a real process."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from podgpu.web.app import parse_address
from tests.nodes.clock import PATIENCE, wait_until
from tests.web.server import Client

# Like `podgpu exporter --telemetry simulated -c 1s`, but the given driver functions hang.
SCRIPT = """
import logging
import sys
from podgpu.node.agent.agent import Agent, Settings
from podgpu.web.exporter_app import application
from podgpu.web.app import Address, Listener, run
from podgpu.node.gpu.nvml.nvml_telemetry import NvmlTelemetry
from tests.simulated import FaultyNvml

driver = FaultyNvml("2xH100")
for function in sys.argv[1:]:
    driver.faults.hang(function)
agent = Agent(NvmlTelemetry(driver, count_expected=lambda: 2), settings=Settings(interval=1.0))
logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
listener = Listener(application(agent), Address("127.0.0.1", 0), announcement="%s/metrics")
run([agent], [listener], release=lambda: agent.release(60.0))
"""


@contextmanager
def exporter(*hanging: str) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    command = [sys.executable, "-W", "error", "-c", SCRIPT, *hanging]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            address = re.search(r"http://(\S+)/metrics", process.stdout.readline())
            assert address is not None
            yield process, Client(parse_address(address[1]))
        finally:
            process.kill()


def assert_ends_cleanly(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert "Traceback" not in errors
    assert "Warning" not in errors


def wait_for(client: Client, path: str, words: str) -> None:
    wait_until(lambda: words in client.ask(path).text, f"{path} has {words!r}")


@pytest.mark.fault("SIGTERM arrives while the driver hangs", "podgpu ends at once and cleanly")
@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetFieldValues"])
def test_hanging_driver_does_not_prevent_the_stop(function: str) -> None:
    with exporter(function) as (process, client):
        wait_for(client, "/health", ": hung: ")
        process.send_signal(signal.SIGTERM)
        assert_ends_cleanly(process)


def test_sigusr1_releases_the_driver_and_sigint_ends_it() -> None:
    with exporter() as (process, client):
        wait_for(client, "/ready", "OK")
        process.send_signal(signal.SIGUSR1)
        wait_for(client, "/health", "nvml: released: released for 60 s")
        assert 'source_up{source="nvml"} 0' in client.ask("/metrics").text
        process.send_signal(signal.SIGINT)
        assert_ends_cleanly(process)


@pytest.mark.fault(
    "A GPU hangs, and SIGUSR1 requests the release of the driver again and again",
    "Only one release runs at a time: scrapes are answered meanwhile, and SIGTERM ends the process",
)
def test_many_sigusr1_while_a_gpu_hangs() -> None:
    with exporter("nvmlDeviceGetFieldValues") as (process, client):
        wait_for(client, "/health", ": hung: ")
        for _ in range(200):
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.005)  # the kernel merges pending signals
        assert client.ask("/api/v1/view").status == 200
        process.send_signal(signal.SIGTERM)
        assert_ends_cleanly(process)
