"""`kubectl exec POD -- podgpu doctor` checks the settings of the exporter that runs in the pod."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from podgpu.cli.main import run
from tests.cli.test_doctor import Tree
from tests.cli.test_doctor import socket as socket
from tests.cli.test_doctor import tree as tree
from tests.net import free_port
from tests.nodes.clock import PATIENCE

HERE, ELSEWHERE = "mnt:[4026531841]", "mnt:[4026532999]"
SECRET = "https://user:hunter2@otlp.example.com"


@pytest.fixture
def pod(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """A container with `hostPID`: it sees the processes of other containers."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    (tree.proc / "self/ns/mnt").symlink_to(HERE)
    add_process(tree, 1, ELSEWHERE, "/sbin/init")
    add_process(tree, 77, ELSEWHERE, "podgpu", "exporter", "--devices", "g:7")
    return tree


def add_process(tree: Tree, pid: int, namespace: str, *words: str) -> None:
    folder = tree.proc / str(pid)
    (folder / "ns").mkdir(parents=True)
    (folder / "ns/mnt").symlink_to(namespace)
    (folder / "cmdline").write_bytes("".join(f"{word}\0" for word in words).encode())


def examine(
    pod: Tree, socket: str, capsys: pytest.CaptureFixture[str], *more: str
) -> dict[tuple[str, str], str]:
    """Returns the texts of doctor's findings by level and subject."""
    words = ["doctor", "--json", "--pod-resources-kubelet-socket", socket, *pod.options, *more]
    run(words)
    out = capsys.readouterr().out
    assert "hunter2" not in out
    return {(f["level"], f["subject"]): f["text"] for f in json.loads(out)["findings"]}


def test_the_arguments_of_the_exporter_are_checked(
    pod: Tree, socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["-telemetry=simulated:2xT4", "-d", "g:5", "-k", "--otlp", SECRET]
    add_process(pod, 4711, HERE, "/usr/bin/python3", "/usr/bin/podgpu", "exporter", *flags)
    add_process(pod, 4712, HERE, "podgpu", "doctor", "--json")
    findings = examine(pod, socket, capsys)
    assert findings["ok", "options"].startswith("those of the exporter that runs here (pid 4711): ")
    names = {"--telemetry", "--devices", "--kubernetes", "--otlp"}
    assert set(findings["ok", "options"].partition("): ")[2].split()) == names
    assert findings["ok", "GPUs"] == "2 × Tesla T4"
    assert "5" in findings["wrong", "devices"]
    assert ("wrong", "kubelet") in findings, "the exporter runs with -k"


def test_flags_of_doctor_override_them(
    pod: Tree, socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    add_process(pod, 4711, HERE, "podgpu", "exporter", "--telemetry", "simulated:2xT4", "-k")
    findings = examine(pod, socket, capsys, "--telemetry", "simulated:4xH100", "-k=false")
    assert findings["ok", "GPUs"] == "4 × NVIDIA H100 80GB HBM3"
    assert ("note", "kubelet") in findings


def test_without_an_exporter_in_the_container_doctor_has_its_own_options(
    pod: Tree, socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    add_process(pod, 4711, HERE, "podgpu", "cluster", "--scrape", "a")
    add_process(pod, 4712, HERE, "exporter")
    (pod.proc / "4713").mkdir()  # ends while it is read
    findings = examine(pod, socket, capsys, "--telemetry", "simulated:1xT4")
    assert ("ok", "options") not in findings
    assert findings["ok", "GPUs"] == "1 × Tesla T4"


def test_outside_of_pods_other_exporters_do_not_count(
    pod: Tree, socket: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    add_process(pod, 4711, HERE, "podgpu", "exporter", "--devices", "g:5")
    findings = examine(pod, socket, capsys, "--telemetry", "simulated:1xT4")
    assert ("ok", "options") not in findings
    assert ("wrong", "devices") not in findings
    assert findings["ok", "GPUs"] == "1 × Tesla T4"


def test_a_real_exporter(tree: Tree, socket: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its command line and namespace are those that the kernel reports."""
    flags = ["--telemetry", "simulated:3xL4", "-a", f"127.0.0.1:{free_port()}"]
    words = [sys.executable, "-m", "podgpu", "exporter", *flags, "--usage-from", "none"]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as exporter:
        try:
            real = Path(f"/proc/{exporter.pid}")
            deadline = time.monotonic() + PATIENCE
            while b"exporter" not in (real / "cmdline").read_bytes():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            # Other exporters may run on this machine, so only this one is in the tree.
            (tree.proc / str(exporter.pid)).symlink_to(real)
            (tree.proc / "self/ns/mnt").symlink_to(os.readlink("/proc/self/ns/mnt"))
            environment = {**os.environ, "KUBERNETES_SERVICE_HOST": "10.0.0.1", "NODE_NAME": "n-1"}
            doctor = [sys.executable, "-m", "podgpu", "doctor", *tree.options]
            doctor += ["--pod-resources-kubelet-socket", socket]
            done = subprocess.run(
                doctor, env=environment, capture_output=True, text=True, check=False
            )
        finally:
            exporter.kill()
    assert f"(pid {exporter.pid}): " in done.stdout, done.stderr
    assert "3 × NVIDIA L4" in done.stdout
    assert "no problems" in done.stdout
