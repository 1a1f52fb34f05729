"""Allocation sources of the command: invalid options, a failing kubelet, changes at run time."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from podgpu.cli.main import run
from podgpu.cli.sources import SOURCES
from podgpu.node.agent.agent import Agent
from tests.nodes.clock import wait_until
from tests.nodes.node import Description, Node, node_of, only_these_variables
from tests.process import EXPORTER, podgpu
from tests.simulated_kubelet import FaultyKubelet

UUID = "GPU-00000000-1111-2222-3333-444444444444"
QUICK = ["exporter", "--once", "--telemetry", "simulated:1xT4", "-c", "100"]
HELD = {"namespace": "ns", "name": "train", "containers": {"main": {"nvidia.com/gpu": [UUID]}}}


@pytest.fixture(autouse=True)
def _no_variables() -> Iterator[None]:
    """Removes the environment variables and restores the logging configuration, which the command
    changes.
    """
    handlers, level = list(logging.root.handlers), logging.root.level
    with only_these_variables({}):
        yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


def complaint(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Returns the only line of the error message for wrong arguments."""
    assert run(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("podgpu: ")
    return line


@pytest.mark.parametrize(
    ("chosen", "words"),
    [("crystal-ball", f"or some of {', '.join(SOURCES)}"), ("auto,kubelet", "write auto alone")],
)
def test_a_wrong_option_is_one_line(
    chosen: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = complaint([*QUICK, "--allocation", chosen], capsys)
    assert words in line
    assert "--allocation" in line
    monkeypatch.setenv("PODGPU_ALLOCATION", chosen)
    assert "(from the variable PODGPU_ALLOCATION)" in complaint(QUICK, capsys)


def test_annotations_need_the_node_and_the_api_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = [*QUICK, "--allocation", "annotations"]
    assert "NODE_NAME is not set" in complaint(asked, capsys)
    monkeypatch.setenv("NODE_NAME", "node-1")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "kubeconfig" in complaint(asked, capsys).lower()
    assert str(tmp_path / "none") in complaint(
        [*asked, "--kubeconfig", str(tmp_path / "none")], capsys
    )


@pytest.mark.parametrize(
    "wanted",
    [
        ["--kubernetes-enable-pod-labels"],
        ["-m", "monitoring:counters"],
        ["--allocation", "kubelet", "--kubernetes-enable-dra"],
    ],
    ids=lambda words: words[-1],
)
def test_what_is_nice_to_have_is_gone_without_and_said_once(
    wanted: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run([*QUICK, *wanted]) == 0
    output = capsys.readouterr()
    assert "DCGM_FI_DEV_GPU_TEMP{" in output.out
    assert output.err.count("continuing without it") == 1


@pytest.mark.parametrize("name", ["counters", "a:", "a/b:c"])
def test_a_configmap_is_named_by_namespace_and_name(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"-m {name!r}: write NAMESPACE:NAME" in complaint([*QUICK, "-m", name], capsys)


def exposition(agent: Agent) -> str:
    return agent.published.fresh.plain.decode()


def errors(agent: Agent, source: str) -> Mapping[str, int]:
    found = re.findall(
        rf'source_errors_total{{source="{source}",reason="(\w+)"}} (\d+)', exposition(agent)
    )
    return {reason: int(count) for reason, count in found}


# The kubelet and podlist.json fail. Series of the other sources stay.


@contextmanager
def two_sources(folder: Path, podlist: str, interval: str = "1s") -> Iterator[Node]:
    """The kubelet lists the holder of GPU 0, podlist.json that of GPU 1."""
    arguments = ["-k", "-f", "none", "--usage-from=none", "-c", interval]
    files = {"podlist.json": podlist}
    uuids = [UUID, UUID.replace("00000000", "00000001")]
    with node_of(
        Description("", "2xT4", arguments, uuids=uuids, pods=[HELD], files=files), folder
    ) as node:
        node.take_turns()
        yield node


GOOD = json.dumps([{"name": "chat", "namespace": "ns", "container": "c", "gpu_list": ["1"]}])
BY_KUBELET = 'pod="train",container="main",source="kubelet"} 1'
BY_PODLIST = 'pod="chat",container="c",source="podlist"} 1'


def _set(**what: Any) -> Callable[[FaultyKubelet], None]:
    def do(kubelet: FaultyKubelet) -> None:
        for name, value in what.items():
            setattr(kubelet, name, value)

    return do


@pytest.mark.parametrize(
    ("ill", "reason"),
    [
        (FaultyKubelet.stop, "socket_missing"),
        (lambda kubelet: kubelet.stop(leave_socket=True), "unavailable"),
        (_set(raw_answer=b"\xff" * 99), "bad_answer"),
        (_set(refusal=("PERMISSION_DENIED", "no")), "error"),
        (lambda kubelet: os.replace(kubelet.socket, kubelet.socket + ".old"), "socket_missing"),
        (_set(refusal=("RESOURCE_EXHAUSTED", "rejected by rate limit")), "rate_limited"),
    ],
    ids=["gone", "killed", "garbage", "refuses", "moved", "rate limit"],
)
def test_an_ill_kubelet_keeps_the_last_mapping_and_the_others(
    ill: Callable[[FaultyKubelet], None],
    reason: str,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with two_sources(folder, GOOD) as node:
        ill(node.kubelet)
        for turn in (1, 2, 3):
            node.clock.advance(5.0)
            node.agent.read_allocation()
            assert BY_KUBELET in exposition(node.agent)
            assert BY_PODLIST in exposition(node.agent)
            assert errors(node.agent, "kubelet") == {reason: turn}
        assert len([message for message in caplog.messages if message.startswith("kubelet: ")]) == 1
        node.clock.advance(60.0)
        node.agent.read_allocation()
        assert BY_KUBELET not in exposition(node.agent), "the mapping expires after a minute"
        assert BY_PODLIST in exposition(node.agent)


# Changes at run time


def test_sighup_takes_up_counters_podlist_and_jobs_without_an_empty_exposition(
    folder: Path,
) -> None:
    """The allocation interval is so long that only the signal can cause the change."""
    counters, podlist, jobs = folder / "counters.csv", folder / "podlist.json", folder / "jobs"
    temperature = "DCGM_FI_DEV_GPU_TEMP, gauge, t\n"
    counters.write_text(temperature)
    podlist.write_text("[]")
    jobs.mkdir()
    sources = f"podlist:{podlist},hpc:{jobs}"
    quiet = ["--allocation-interval", "10m", "--usage-from=none"]
    with podgpu(
        (*EXPORTER, "-f", str(counters), "--allocation", sources, *quiet), folder
    ) as exporter:
        process, client = exporter.popen, exporter.client
        wait_until(
            lambda: "DCGM_FI_DEV_GPU_TEMP{" in client.ask("/metrics").text, "the first figures"
        )
        counters.write_text(temperature + "DCGM_FI_DEV_SM_CLOCK, gauge, c\n")
        entry = {"name": "chat", "namespace": "ns", "container": "c", "gpu_list": ["0"]}
        podlist.write_text(json.dumps([entry]))
        (jobs / "0").write_text("4711\n")
        process.send_signal(signal.SIGHUP)
        seen: list[str] = []

        def taken_up() -> bool:
            seen.append(client.ask("/metrics").text)
            words = ("DCGM_FI_DEV_SM_CLOCK{", 'pod="chat"', 'hpc_job="4711"')
            return all(word in seen[-1] for word in words)

        wait_until(taken_up, "the changes are in the metrics")
        assert all("DCGM_FI_DEV_GPU_TEMP{" in text for text in seen), "no exposition was empty"
        counters.write_text("DCGM_FI_DEV_GPU_TEMPERATUR, gauge, t\n")
        process.send_signal(signal.SIGHUP)
        bad = 'source_errors_total{source="counters",reason="malformed"} 1'
        wait_until(lambda: bad in client.ask("/metrics").text, "the bad file is counted")
        assert "DCGM_FI_DEV_SM_CLOCK{" in client.ask("/metrics").text, (
            "the last valid counter file is used"
        )
        exporter.stop()
