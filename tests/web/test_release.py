"""Tests POST /-/release, which closes the driver for some time. Only local requests are
accepted.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from podgpu.web.exporter_app import application
from tests.nodes.node import Description, Node, node_of
from tests.web.server import RELEASE, Client, running

DOWN = 'podgpu_exporter_source_up{source="nvml"} 0\n'
UP = 'podgpu_exporter_source_up{source="nvml"} 1\n'


def test_driver_is_released_and_opened_again(node: Node, client: Client) -> None:
    node.take_turns()
    answer = client.ask("/-/release?seconds=20", "POST", **RELEASE)
    assert (answer.status, answer.text) == (200, "driver released for 20 s\n")
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


def test_bad_seconds(node: Node, client: Client) -> None:
    node.take_turns()
    for seconds in ("0", "3601", "nan", "soon"):
        answer = client.ask(f"/-/release?seconds={seconds}", "POST", **RELEASE)
        assert (answer.status, repr(seconds) in answer.text) == (400, True)
    assert node.driver.calls["nvmlShutdown"] == 0


@pytest.mark.fault(
    "NVML's start hangs, and an operator requests the release of the driver",
    "POST /-/release answers 409; the exporter stays up",
)
def test_driver_that_hangs_at_its_start_is_not_released(folder: Path) -> None:
    short = Description(about="short deadlines", gpus="2xH100", arguments=["-c", "1s"])
    with node_of(short, folder) as node, running(node.agent) as client:
        node.take_turns()
        assert client.ask("/-/release?seconds=1", "POST", **RELEASE).status == 200
        node.clock.advance(2.0)
        hang = node.driver.faults.hang("nvmlInit")
        node.agent.read_telemetry()
        assert hang.entered.is_set()
        answer = client.ask("/-/release", "POST", **RELEASE)
        assert (answer.status, "has not returned" in answer.text) == (409, True)


@pytest.mark.fault(
    "A web page, a sidecar or a proxy requests the release of the driver",
    (
        "403: only requests from this machine with X-Podgpu-Request: release are allowed; all GPUs "
        "are still read"
    ),
)
def test_refused_requests(node: Node, client: Client) -> None:
    node.take_turns()
    wrong = ({"Host": "evil.example:9400"}, {"X_Forwarded_For": "10.0.0.7"}, {"Via": "1.1 envoy"})
    for headers in ({}, {"X_Podgpu_Request": "forget"}, *(RELEASE | each for each in wrong)):
        assert client.ask("/-/release", "POST", **headers).status == 403
    assert node.driver.calls["nvmlShutdown"] == 0


def test_option_turns_it_off(node: Node) -> None:
    node.take_turns()
    with running(node.agent, app=partial(application, lifecycle=False)) as client:
        answer = client.ask("/-/release", "POST", **RELEASE)
        assert (answer.status, "--web-enable-lifecycle=false" in answer.text) == (403, True)
        assert node.driver.calls["nvmlShutdown"] == 0
