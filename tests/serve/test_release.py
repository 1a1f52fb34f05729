"""POST /-/release: lets go of the driver for a while, for those on this machine only."""

from __future__ import annotations

from pathlib import Path

import pytest

from podgpu.serve.routes import _is_loopback
from tests.nodes.node import Description, Node, node_of
from tests.serve.server import Client, running

DOWN = 'podgpu_exporter_source_up{source="nvml"} 0\n'
UP = 'podgpu_exporter_source_up{source="nvml"} 1\n'


def test_the_driver_is_let_go_and_taken_up_again(node: Node, client: Client) -> None:
    node.take_turns()
    answer = client.ask("/-/release?seconds=20", "POST")
    assert (answer.status, answer.text) == (200, "driver let go for 20 s\n")
    assert node.driver.calls["nvmlShutdown"] == 1

    node.clock.advance(19.0)
    assert_released(node, client)

    node.clock.advance(1.0)
    node.agent.read_telemetry()
    assert node.driver.calls["nvmlInit"] == 2
    after = client.ask("/metrics").text
    assert UP in after
    assert "DCGM_FI_DEV_GPU_UTIL{" in after
    assert client.ask("/ready").status == 200


def assert_released(node: Node, client: Client) -> None:
    calls = node.driver.calls.copy()
    node.agent.read_telemetry()
    assert node.driver.calls == calls
    body = client.ask("/metrics").text
    assert DOWN in body
    assert "DCGM_FI_" not in body
    assert client.ask("/ready").status == 503
    health = client.ask("/health")
    assert health.status == 200
    assert "nvml: released: " in health.text


def test_a_minute_unless_told_otherwise(node: Node, client: Client) -> None:
    node.take_turns()
    assert client.ask("/-/release", "POST").text == "driver let go for 60 s\n"


@pytest.mark.parametrize("seconds", ["0", "-1", "3601", "nan", "inf", "soon", ""])
def test_bad_seconds(node: Node, client: Client, seconds: str) -> None:
    node.take_turns()
    answer = client.ask(f"/-/release?seconds={seconds}", "POST")
    assert answer.status == 400
    assert repr(seconds) in answer.text
    assert node.driver.calls["nvmlShutdown"] == 0


def test_a_call_in_flight_keeps_the_driver(folder: Path) -> None:
    patient_for_a_second = Description(about="short deadlines", gpus="2xH100", arguments=["-c", "1s"])
    with node_of(patient_for_a_second, folder) as node, running(node.agent) as client:
        node.take_turns()
        node.driver.faults.hang("nvmlDeviceGetPowerUsage", 0)
        node.agent.read_telemetry()
        assert client.ask("/-/release", "POST").status == 409
        assert node.driver.calls["nvmlShutdown"] == 0
        assert 'source_up{source="gpu1"} 1' in client.ask("/metrics").text


@pytest.mark.parametrize(
    ("remote", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.7", False),
        ("::ffff:10.0.0.7", False),
        ("fe80::1%eth0", False),
        ("2001:db8::1", False),
        ("localhost", False),
        ("", False),
        (None, False),
    ],
)
def test_who_is_on_this_machine(remote: str | None, loopback: bool) -> None:
    assert _is_loopback(remote) is loopback
