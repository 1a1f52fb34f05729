"""`podgpu release` over real HTTP against an exporter with a simulated driver. A small program
takes the place of kubectl: it runs the command of `kubectl exec` on this machine.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from podgpu.cli.main import run
from podgpu.web.exporter_app import application
from tests.cli.fake_kubectl import Kubectl, pod
from tests.net import QuietHandler, serving
from tests.nodes.node import Node
from tests.web.conftest import client, node
from tests.web.server import Client, running

__all__ = ["client", "node"]


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Kubectl(tmp_path)


@pytest.mark.fault(
    "A GPU must be reset, but after `kubectl drain --ignore-daemonsets` podgpu has the driver open",
    "`podgpu release --node NODE` closes it for some minutes; then podgpu opens it again",
)
def test_the_exporter_of_a_node_releases_the_driver(
    node: Node, client: Client, kubectl: Kubectl, capfd: pytest.CaptureFixture[str]
) -> None:
    node.take_turns()
    port = client.address.port
    kubectl.has_pods(
        pod("other", port, container="web"), pod("old", 1, "Failed"), pod("exporter-x", port)
    )
    assert run(["release", "--node", "gpu-7", "--seconds", "120"]) == 0
    assert capfd.readouterr().out == "gpu-7: driver released for 120 s\n"
    assert node.driver.calls["nvmlShutdown"] == 1
    listed, executed = kubectl.commands
    assert "--field-selector spec.nodeName=gpu-7" in listed
    assert executed.startswith("exec --namespace monitoring exporter-x --container podgpu -- ")

    calls = node.driver.calls.copy()
    node.clock.advance(119.0)
    node.agent.read_telemetry()
    assert node.driver.calls == calls, "the driver is not touched meanwhile"
    node.clock.advance(1.0)
    node.agent.read_telemetry()
    assert "DCGM_FI_DEV_GPU_UTIL{" in client.ask("/metrics").text


def test_the_exporter_of_this_machine_releases_the_driver(
    node: Node, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    node.take_turns()
    assert run(["release", "--url", f"localhost:{client.address.port}"]) == 0
    assert capsys.readouterr().out == "driver released for 300 s\n"
    assert node.driver.calls["nvmlShutdown"] == 1


def test_a_refusal_of_the_exporter_is_shown(
    node: Node, kubectl: Kubectl, capfd: pytest.CaptureFixture[str]
) -> None:
    node.take_turns()
    with running(node.agent, app=partial(application, lifecycle=False)) as client:
        kubectl.has_pods(pod("exporter-x", client.address.port))
        assert run(["release", "--node", "gpu-7"]) == 1
    assert "kubectl exec: " in (error := capfd.readouterr().err)
    assert "--web-enable-lifecycle=false" in error
    assert node.driver.calls["nvmlShutdown"] == 0


@pytest.mark.parametrize(
    "pods", [[], [pod("exporter-x", 1, "Pending")], [pod("x", 1, container="web")]]
)
def test_a_node_without_an_exporter(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str], pods: list[dict[str, Any]]
) -> None:
    kubectl.has_pods(*pods)
    assert run(["release", "--node", "gpu-9"]) == 1
    error = capsys.readouterr().err
    assert "node gpu-9 has no running pod of podgpu's exporter" in error
    assert len(kubectl.commands) == 1


def test_kubectl_that_fails_or_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(["release", "--node", "gpu-7"]) == 1
    assert "needs kubectl, which is not in PATH" in capsys.readouterr().err
    program = tmp_path / "kubectl"
    program.write_text("#!/bin/sh\necho 'Error: you may not list pods' >&2\nexit 1\n")
    program.chmod(0o755)
    assert run(["release", "--node", "gpu-7"]) == 1
    assert "kubectl get: Error: you may not list pods" in capsys.readouterr().err
    log = 'E1119 22:18:31.871017    6770 memcache.go:265] "Unhandled Error" err="refused"'
    lines = f"echo '{log}' >&2\necho '{log}' >&2\necho 'The connection was refused' >&2"
    program.write_text(f"#!/bin/sh\n{lines}\nexit 1\n")
    assert run(["release", "--node", "gpu-7"]) == 1
    assert capsys.readouterr().err == "podgpu: kubectl get: The connection was refused\n"
    program.write_text(f"#!/bin/sh\necho '{log}' >&2\nexit 1\n")
    assert run(["release", "--node", "gpu-7"]) == 1
    assert "Unhandled Error" in capsys.readouterr().err, "it says nothing else"
    program.write_text("#!/bin/sh\necho '{}'\n")
    assert run(["release", "--node", "gpu-7"]) == 1
    assert "returned no list of pods" in capsys.readouterr().err


class _OtherServer(QuietHandler):
    """Answers as a server that is no podgpu."""

    def do_POST(self) -> None:
        self.send_error(404)


def test_another_server_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(_OtherServer) as port:
        assert run(["release", "--url", f"localhost:{port}"]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"podgpu: http://localhost:{port} answers 404: it is no exporter")

        assert run(["forget", "GPU-1", "--url", f"localhost:{port}"]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"podgpu: http://localhost:{port} answers 404: ")
        assert error.count("\n") == 1

    assert run(["forget", "GPU-1", "--url", f"localhost:{port}"]) == 1
    assert f"http://localhost:{port}: nothing listens there" in capsys.readouterr().err


def test_a_gpu_without_a_name_is_not_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["forget", ""]) == 2
    assert "forget needs the UUID of a GPU" in capsys.readouterr().err
