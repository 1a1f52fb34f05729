"""Tests `podgpu top` on a simulated node with driver, kubelet, /proc and /var/log."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from podgpu.cli.main import run
from podgpu.cli.sources import SOURCES, simulated_driver
from podgpu.fleet.view import decode_view
from podgpu.labs.simulate.simulated_node import create_host_files, pods, tenants
from tests.cli.test_doctor import _no_variables
from tests.simulated import FaultyProc
from tests.simulated_kubelet import FaultyKubelet
from tests.top.scene import HEADER

__all__ = ["_no_variables"]
GPUS = "8xH100,1xH100/7x1g.10gb"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Yields the arguments for a simulated node."""
    host: Path = tmp_path_factory.mktemp("host")
    on_node = tenants(simulated_driver(GPUS))
    create_host_files(host, on_node)
    socket = f"/tmp/pgtop{os.getpid()}.sock"
    with FaultyKubelet(socket, pods(on_node)):
        yield [
            *("--telemetry", f"simulated:{GPUS}", "--pod-resources-kubelet-socket", socket),
            *("--path-proc", str(host / "proc"), "--path-varlog", str(host), "--interval", "300ms"),
        ]


def once(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert run(["top", "--once", *arguments]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert "\x1b" not in output.out
    return output.out.splitlines()


def line_of(lines: list[str], holder: str) -> str:
    (found,) = (line for line in lines if holder in line)
    return found


def test_the_whole_table(node: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = once(capsys, *node)
    assert lines[0].split() == HEADER
    assert (
        len(lines) == 1 + 8 + 2 + 1 + 7
    )  # header, 8 GPUs, 2 holders of a shared GPU, MIG GPU, 7 instances
    assert re.match(r"4    H100 80GB HBM3 2 holders +\d+% 14.0/79.6 +\d+W +\d+C    2$", lines[5])
    assert re.search(r"^ {22}batch/embed-0/worker +\d+%  9.0 +\d+W {9}1     0s$", lines[6])
    assert re.search(
        r"chat-0/engine +\d+% 39.8/79.6 +\d+W +\d+C    1     0s$", line_of(lines, "engine")
    )
    assert re.search(r"^7 .* - +0%  0.0/79.6 +\d+W +\d+C    –$", lines[10])
    assert re.search(r"^8 .* 5 of 7 instances held +\d+% 15.0/79.6", lines[11])
    assert re.search(r"^8/7  1g.10gb +notebooks/jupyter-8-0/notebook +1[3-7]% +1.0/9.8", lines[12])
    assert re.search(r"0%  0.0/79.6 +\d+W +\d+C    0 +\d+s$", line_of(lines, "jupyter-ada-0"))
    whole, *parts = (int(re.search(r"(\d+)W", line)[1]) for line in lines[5:8])  # type: ignore[index]
    assert 0.7 * whole < sum(parts) <= whole + 2  # the rest is not attributed to a container


def test_sort_and_filter(node: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = once(capsys, *node, "--sort", "utilisation", "--filter", "research")
    numbers = [int(re.search(r"(\d+)%", line)[1]) for line in lines[1:]]  # type: ignore[index]
    assert len(numbers) == 3
    assert numbers == sorted(numbers, reverse=True)
    assert "jupyter-ada" in once(capsys, *node, "--sort", "idle")[1]


def test_json(node: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "--json", *node]) == 0
    shown = decode_view(capsys.readouterr().out.encode())
    assert shown.totals.gpus == 9
    assert {holder.pod for gpu in shown.nodes[0].gpus for holder in gpu.holders} >= {
        "embed-0",
        "ocr-0",
    }


def test_processes(node: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = once(capsys, *node, "--processes", "--filter", "batch")
    texts = [re.sub(r" +\d+% .*", "", line).rstrip() for line in lines[1:]]
    assert [text.split("HBM3 ")[-1].strip() for text in texts] == [
        "2 holders",
        "batch/embed-0/worker",
        "pid 4004",
        "batch/ocr-0/worker",
        "pid 4005",
    ]
    assert re.search(r"pid 4004 +3\d%  9.0$", lines[3])


def test_failing_sources_are_noted(
    node: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["top", "--once", *node, "--path-proc", str(tmp_path)]) == 0
    output = capsys.readouterr()
    assert "embed-0" in output.out
    assert output.err.startswith("podgpu: usage: processes on the GPUs are visible")


def test_the_use_of_simulated_pods_is_unknown_without_their_processes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The real /proc has no simulated process, so these pods would look idle."""
    socket = f"/tmp/pgtop{os.getpid()}-real.sock"
    with FaultyKubelet(socket, pods(tenants(simulated_driver("6xH100")))):
        arguments = ["--telemetry", "simulated:6xH100", "--pod-resources-kubelet-socket", socket]
        run(["top", "--once", *arguments, "--path-proc", "/proc", "--interval", "300ms"])
    lines = capsys.readouterr().out.splitlines()
    assert line_of(lines, "embed-0").split() == ["batch/embed-0/worker", *"–––––"]


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a driver here")
def test_without_a_driver(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "--once"]) == 1
    output = capsys.readouterr()
    assert output.err.startswith("podgpu: no GPU could be read: ")
    assert (output.out, output.err.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sort", "name"], "--sort"),
        (["--interval", "1ms"], "--interval"),
        (["--telemetry", "none"], "--telemetry"),
        (["--telemetry", "simulated:1xH100", "--allocation", "nobody"], "--allocation"),
        (["--telemetry", "simulated:1xH100", "--devices", "x"], "x"),
        (["--telemetry", "simulated:1xH100", "--devices", "g:7"], "7"),
        (["--url", "node"], "--url"),
        (["--url", "http://n", "--processes"], "--processes is for the local driver"),
        (["--url", "http://n", "--telemetry", "nvml"], "--telemetry is for the local driver"),
        (["--url", "http://n", "-k"], "--kubernetes is for the local driver"),
        (["--cluster", "x:99999"], "not the URL of an HTTP server; write HOST:PORT"),
        (["--cluster", "http://a", "--url", "http://b"], "give one of them"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_wrong_options(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["top", *arguments]) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert (output.out, output.err.count("\n")) == ("", 1)


@pytest.mark.parametrize("source", SOURCES)
def test_top_has_the_options_of_every_allocation_source(
    source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argument = f"{source}:/nowhere" if source in ("hpc", "podlist", "checkpoint") else source
    code = run(
        [
            "top",
            "--once",
            "--telemetry",
            "simulated:1xH100",
            "--allocation",
            argument,
            "--interval",
            "100ms",
        ]
    )
    output = capsys.readouterr()
    if source == "annotations":
        # Needs an API server.
        assert (code, "NODE_NAME" in output.err) == (2, True)
    else:
        assert (code, "H100 80GB HBM3" in output.out) == (0, True)


def test_processes_of_containers_without_a_pod(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proc = FaultyProc(tmp_path / "proc")
    for pid in range(4000, 4010):
        proc.run(
            pid, 0, "/usr/bin/python3", "train.py", cgroup=f"/system.slice/docker-{'ab' * 32}.scope"
        )
    options = (
        "--telemetry",
        "simulated:1xH100",
        "--path-proc",
        str(proc.root),
        "--path-varlog",
        str(tmp_path),
    )
    lines = once(capsys, "--processes", "--interval", "100ms", *options)
    assert "container abababababab" in lines[1]
    assert "pid 4000 python3 " in lines[2]


@pytest.mark.reads_host("the processes of simulated GPUs are not in the real /proc")
def test_simulated_processes_have_no_user(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(
            [
                "top",
                "--json",
                "--telemetry",
                "simulated:1xH100",
                "--path-proc",
                "/proc",
                "--interval",
                "100ms",
            ]
        )
        == 0
    )
    assert "unknown" not in capsys.readouterr().out.partition("nodes")[2]
