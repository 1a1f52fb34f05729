"""`podgpu trace`: the files are valid in the Trace Event Format and contain every recorded
switch.
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from podgpu.cli.main import run, run_kubectl
from podgpu.cli.trace import EngineTrace, Recording, Track, make_trace
from podgpu.errors import StartError
from podgpu.labs.simulate.gpu import SimulatedLoad
from podgpu.labs.simulate.simulated_driver import RoundRobinLog
from podgpu.labs.simulate.simulated_node import SimulatedProc
from podgpu.node.gpu.nvml.nvml_telemetry import NvmlTelemetry
from podgpu.node.gpu.nvml.switch_attribution import (
    RecordDecoder,
    SwitchCosts,
    SwitchLogError,
    Timeline,
)
from podgpu.node.gpu.nvml.switch_splitter import SwitchLogFactory
from tests.cli.fake_kubectl import Kubectl, pod
from tests.nodes.clock import PATIENCE
from tests.privilege import without_privilege
from tests.simulated import FaultyNvml

RECORDED = Path(__file__).parents[1] / "gpu" / "switches" / "recorded" / "h200-three-loads.bin.gz"
KEYS = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "pid", "tid", "ts", "dur"},
    "C": {"name", "pid", "tid", "ts", "args"},
    "i": {"name", "pid", "tid", "ts", "s"},
}
"""Members that each phase needs. See the Trace Event Format, sections "Metadata", "Complete",
"Counter", "Instant".
"""
SECOND = 10**9


@pytest.fixture(autouse=True)
def _restore_handlers() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


LATE = 5.0  # seconds by which a busy machine may read the log later than the clock


def check(trace: Mapping[str, Any], seconds: float) -> dict[str, dict[str, float]]:
    """Checks a trace of a GPU without MIG. Returns the seconds of each kind of slice, by process
    name.
    """
    assert json.loads(json.dumps(trace)) == trace
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = trace["traceEvents"]
    for event in events:
        assert KEYS[event["ph"]] == event.keys() - {"ph"}
        assert all(isinstance(event[member], int) for member in ("pid", "tid"))
    timed = [event for event in events if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    slices = [event for event in timed if event["ph"] == "X"]
    assert all(event["dur"] >= 0 for event in slices)
    assert all(0 <= event["ts"] <= seconds * 1e6 for event in timed)
    check_disjoint([event for event in slices if event["name"].startswith("run")])
    for track in {(event["pid"], event["tid"]) for event in slices}:
        check_disjoint([event for event in slices if (event["pid"], event["tid"]) == track])
    names = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    threads = {event["tid"] for event in events if event["name"] == "thread_name"}
    assert {event["tid"] for event in timed} <= threads
    sums: dict[str, dict[str, float]] = {}
    for event in slices:
        kinds = sums.setdefault(names[event["pid"]], {})
        kinds[event["name"]] = kinds.get(event["name"], 0.0) + event["dur"] / 1e6
    assert all(sum(kinds.values()) <= seconds for kinds in sums.values())
    return sums


def check_disjoint(slices: list[dict[str, Any]]) -> None:
    end = 0.0
    for event in slices:
        assert event["ts"] >= end - 0.01
        end = event["ts"] + event["dur"]


def test_a_trace_names_containers_and_shows_when_they_ran_and_waited(
    tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "trace.json.gz"
    assert (
        run(["trace", "--telemetry", "simulated", "--gpu", "4", "--seconds", "1", "-o", str(path)])
        == 0
    )
    trace = json.loads(gzip.decompress(path.read_bytes()))
    sums = check(trace, trace["otherData"]["seconds"] + LATE)
    gpu = "GPU 4: NVIDIA H100 80GB HBM3"
    assert sums.keys() == {gpu, "batch/embed-0/worker", "batch/ocr-0/worker"}
    assert sums[gpu].keys() == {"switch"}
    for container in sums.keys() - {gpu}:
        assert sums[container].keys() == {"run", "run (cut)", "wait"}
    assert any(event["ph"] == "C" for event in trace["traceEvents"])
    assert str(path) in capsys.readouterr().err


def test_a_recorded_log_becomes_a_valid_trace() -> None:
    """The log is from tests/gpu/switches/test_waiting.py: three loads that measured their waiting
    time.
    """
    ((_, _, times, pids),) = RecordDecoder().decode(gzip.decompress(RECORDED.read_bytes()))
    first, last = times[0], times[-1]
    timeline, engine = Timeline(first, SwitchCosts(64_000)), EngineTrace("GPU 0")
    timeline.add(times, pids)
    for end in range(first + SECOND, last, SECOND):
        engine.add(timeline.take_window(end), [], busy_share=0.74)
    seconds = (last - first) // SECOND
    tracks = {pid: Track(str(pid), "load") for pid in pids}
    sums = check(make_trace([engine], first, tracks, {}), seconds)
    for load, percent in {"684": 27.4, "685": 24.5, "686": 12.4}.items():
        assert 100 * sums[load]["wait"] / seconds == pytest.approx(percent, abs=6)
        assert sums[load]["run (cut)"] > 0


def open_recording(driver: FaultyNvml, folder: Path, open_log: Any) -> Recording:
    SimulatedProc(folder / "proc").add(101, "0::/user.slice\n", "trainer")
    (folder / "proc" / "101" / "status").write_text("Uid:\t1000\t1000\n")
    telemetry = NvmlTelemetry(driver, switch_logs=SwitchLogFactory("exact", open_log, lambda: True))
    (gpu,) = telemetry.inventory().gpus
    return Recording(
        telemetry, gpu, {"path_proc": str(folder / "proc"), "path_varlog": str(folder)}
    )


def make_driver(kind: Any = "compute") -> FaultyNvml:
    driver = FaultyNvml("1xH200")
    driver.place(SimulatedLoad(0, 101, duty=0.6, kind=kind))
    driver.place(SimulatedLoad(0, 102, duty=0.6, kind=kind))
    return driver


def test_xids_and_clock_events_are_marks_and_processes_have_names(tmp_path: Path) -> None:
    driver = make_driver()
    recording = open_recording(driver, tmp_path, lambda gpu, _: RoundRobinLog(driver, gpu.uuid))
    threading.Timer(0.8, driver.raise_xid, (0, 31)).start()
    assert recording.run(2, threading.Event()) == ""
    trace = recording.make_trace()
    assert check(trace, trace["otherData"]["seconds"] + LATE).keys() == {
        "GPU 0: NVIDIA H200",
        "trainer 101",
        "process 102",
    }
    assert trace["otherData"]["slice_ms"] == {"GPU 0: NVIDIA H200": pytest.approx(2.1, abs=0.1)}
    marks = [event["name"] for event in trace["traceEvents"] if event["ph"] == "i"]
    assert any(mark.startswith("clocks reduced by: ") for mark in marks)
    assert "XID 31" in marks


def test_the_length_of_a_slice_is_an_assumption_if_no_process_used_a_full_one(
    tmp_path: Path,
) -> None:
    driver = FaultyNvml("1xH200")
    driver.place(SimulatedLoad(0, 101, duty=0.6))
    recording = open_recording(driver, tmp_path, lambda gpu, _: RoundRobinLog(driver, gpu.uuid))
    assert recording.run(0.3, threading.Event()) == ""
    about = recording.make_trace()["otherData"]
    assert about["slice_ms"] == {}
    assert about["assumed_slice_ms"] == {"GPU 0: NVIDIA H200": 2.14}


def test_what_was_recorded_before_a_failure_is_kept(tmp_path: Path) -> None:
    driver = make_driver()

    class OverflowingLog(RoundRobinLog):
        began = time.monotonic()

        def drain(self) -> bytes:
            if time.monotonic() - self.began > 0.8:
                raise SwitchLogError(
                    "ring_overflow", "7 context switches were lost because the log was full"
                )
            return super().drain()

    recording = open_recording(driver, tmp_path, lambda gpu, _: OverflowingLog(driver, gpu.uuid))
    assert "7 context switches were lost" in recording.run(5, threading.Event())
    trace = recording.make_trace()
    assert check(trace, trace["otherData"]["seconds"] + 0.6)["trainer 101"]["run (cut)"] > 0


def test_a_log_that_cannot_be_opened_is_explained(tmp_path: Path) -> None:
    def fail(*_: Any) -> RoundRobinLog:
        raise SwitchLogError("old_driver", "version 550 or later is required")

    with pytest.raises(
        StartError,
        match="context switches of GPU 0 cannot be read: version 550 or later is required",
    ):
        open_recording(make_driver(), tmp_path, fail)


def test_mps_has_no_context_switches(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="shared by MPS"):
        open_recording(make_driver("mps"), tmp_path, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "9"], "--gpu 9: this node has no such GPU; it has 0, 1"),
        (["--gpu", "²"], "--gpu ²: this node has no such GPU"),
        (["--seconds", "0"], "--seconds: 0 is not in the range 1<=x<=60"),
        (["--seconds", "many"], "--seconds: 'many' is not a valid integer range"),
        (["-o", "/nowhere/trace.json"], "the directory /nowhere does not exist"),
        (["--telemetry", "exporter:localhost:1"], "podgpu trace needs nvml or simulated"),
    ],
)
def test_wrong_options_end_with_a_message(arguments: list[str], message: str, capsys: Any) -> None:
    assert run(["trace", "--telemetry", "simulated:2xH100", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_directory_that_cannot_be_written_is_found_before_the_recording(capsys: Any) -> None:
    with without_privilege():
        assert run(["trace", "--telemetry", "simulated", "-o", "/usr/trace.json"]) == 2
    assert "the directory cannot be written (Permission denied)" in capsys.readouterr().err


def test_ctrl_c_writes_what_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    command = [
        sys.executable,
        "-m",
        "podgpu",
        "trace",
        "--telemetry",
        "simulated",
        "--gpu",
        "4",
        "--seconds",
        "60",
    ]
    with subprocess.Popen(
        [*command, "-o", str(path)], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert "recording" in process.stderr.readline()
        time.sleep(1.2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, "Traceback" in errors) == (0, False)
    trace = json.loads(path.read_text())
    assert check(trace, trace["otherData"]["seconds"] + LATE)["batch/ocr-0/worker"]["run"] > 0


# On a node of Kubernetes


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program = Kubectl(tmp_path)
    program.has_pods(pod("exporter-x", 9400))
    return program


def test_a_trace_is_recorded_in_the_pod_of_the_exporter(
    tmp_path: Path, kubectl: Kubectl, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.json.gz"
    arguments = ["trace", "--node", "gpu-7", "--gpu", "4", "--seconds", "1", "--context", "lab"]
    arguments += ["--telemetry", "simulated", "-o", str(file)]
    assert run_kubectl(arguments) == 0
    listed, executed = kubectl.commands
    assert listed.startswith("--context lab get pods")
    assert "spec.nodeName=gpu-7" in listed
    assert executed.startswith("--context lab exec --namespace monitoring exporter-x ")

    trace = json.loads(gzip.decompress(file.read_bytes()))
    assert any(event["name"] == "run" for event in trace["traceEvents"])
    out, err = capfd.readouterr()
    assert out == ""
    recording, summary = err.splitlines()
    assert recording == "podgpu: recording GPU 4 for 1 s (Ctrl-C ends it)"
    assert "runs; open it in https://ui.perfetto.dev" in summary


def test_the_message_of_the_pod_is_shown(
    tmp_path: Path, kubectl: Kubectl, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["trace", "--node", "gpu-7", "--gpu", "99", "--telemetry", "simulated"]
    assert run([*arguments, "-o", str(tmp_path / "trace.json")]) == 1
    remote, local = capfd.readouterr().err.splitlines()
    assert remote.startswith("podgpu: --gpu 99: this node has no such GPU")
    assert local == "podgpu: kubectl exec: exit code 2"
    assert not (tmp_path / "trace.json").exists()


def test_the_kubectl_plugin_needs_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_kubectl(["trace"]) == 2
    assert capsys.readouterr().err.startswith("podgpu: --node is missing: name the node")
    assert run(["trace", "--context", "lab"]) == 2
    assert capsys.readouterr().err.startswith("podgpu: --context needs --node")
