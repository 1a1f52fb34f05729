"""Tests faults of the whole process: little memory, a full disk, a freeze, SIGTERM during a
reading.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from endurance.vitals import vitals_of
from podgpu.labs.simulate.simulated_kubelet import SimulatedPod
from tests.net import lines_of
from tests.nodes.clock import wait_until
from tests.process import EXPORTER, NO_LOGS, PODGPU, ROOT, Process, has_values, is_listening, podgpu
from tests.simulated import FaultyNvml
from tests.simulated_kubelet import FaultyKubelet

ENERGY = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
NODE = "gpu-1"
AILING = (sys.executable, "-m", "tests.faults.ailing_exporter")
"""Arguments that start the exporter with two GPUs that hang."""
SIMULATED = ("exporter", "--telemetry", "simulated", "-c", "1s", *NO_LOGS)
LARGEST, PODS = "16xH100/7x1g.10gb", 250
needs_dev_full = pytest.mark.skipif(
    not os.path.exists("/dev/full"), reason="there is no /dev/full here"
)


def memory_limit(component: str) -> float:
    """Returns the memory limit in the chart, in MiB."""
    values = yaml.safe_load(
        (ROOT / "deploy" / "helm" / "podgpu" / "values.yaml").read_text(encoding="utf-8")
    )
    text = values[component]["resources"]["limits"]["memory"]
    return float(text[:-2]) * {"Mi": 1.0, "Gi": 1024.0}[text[-2:]]


def pods_of_largest_node() -> list[SimulatedPod]:
    """Returns one pod per MIG instance, and pods without a GPU."""
    uuids = [i.uuid for gpu in FaultyNvml(LARGEST, node=NODE).gpus for i in gpu.instances]
    held = [
        SimulatedPod("research", f"job-{n}", {"main": {"nvidia.com/mig-1g.10gb": [u]}})
        for n, u in enumerate(uuids)
    ]
    return [
        *held,
        *(SimulatedPod("web", f"server-{n}", {"main": {}}) for n in range(PODS - len(uuids))),
    ]


@contextmanager
def largest_node(folder: Path) -> Iterator[Process]:
    """Runs the exporter with 16 GPUs, 112 MIG instances and 250 pods. Waits until every instance is
    in the metrics.
    """
    kubelet = str(folder / "kubelet.sock")
    arguments: tuple[str, ...] = (
        "-k",
        "--allocation",
        "kubelet",
        "--pod-resources-kubelet-socket",
        kubelet,
        "-f",
        "dcp",
    )
    arguments = (*EXPORTER, "--telemetry", f"simulated:{LARGEST}", *arguments)
    with (
        FaultyKubelet(kubelet, pods_of_largest_node()),
        podgpu(arguments, folder, variables={"NODE_NAME": NODE}) as exporter,
    ):
        wait_until(
            lambda: (
                len(lines_of(exporter.client.ask("/metrics").text, "podgpu_allocation_info")) >= 112
            )
        )
        yield exporter


@pytest.mark.fault(
    "the largest node (16 GPUs, 112 MIG instances, 250 pods) with the memory limit of the chart",
    "it stays within the limit, and every instance is in the metrics",
)
def test_largest_node_fits_the_memory_limit_of_the_chart(folder: Path) -> None:
    with largest_node(folder) as exporter:
        assert {exporter.client.ask("/metrics").status for _ in range(10)} == {200}
        assert exporter.popen.poll() is None
        assert vitals_of(exporter.popen.pid, 0.0).peak <= memory_limit("exporter")


@pytest.mark.fault(
    "SIGTERM during a turn, while calls into the driver hang",
    "the process ends within seconds, with exit code 0 and without a traceback",
)
def test_sigterm_during_a_turn(folder: Path) -> None:
    with podgpu(EXPORTER, folder, has_values) as healthy:
        healthy.stop()
    with podgpu(SIMULATED, folder, is_listening, program=AILING) as hanging:
        hanging.stop()


@pytest.mark.fault(
    "the process is frozen for some seconds (a suspended machine, a debugger) and goes on",
    "values are back after the next turn, and no counter has decreased",
)
def test_frozen_process_continues(folder: Path) -> None:
    with podgpu(EXPORTER, folder, has_values) as exporter:
        before = exporter.series(ENERGY)
        exporter.popen.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, exporter.popen.pid, os.WSTOPPED | os.WNOWAIT)
        with pytest.raises(subprocess.TimeoutExpired):
            exporter.popen.wait(3.2)  # longer than three intervals, so the last values are stale
        exporter.popen.send_signal(signal.SIGCONT)
        wait_until(lambda: exporter.series(ENERGY), "values are back")
        after = exporter.series(ENERGY)
        assert after.keys() == before.keys()
        assert all(after[uuid] >= before[uuid] for uuid in before)


@needs_dev_full
@pytest.mark.fault("the disk that the log goes to is full", "the exporter continues without a log")
def test_full_disk_of_the_log(folder: Path) -> None:
    with (
        open("/dev/full", "wb") as full,
        podgpu(EXPORTER, folder, has_values, stderr=full) as exporter,
    ):
        first = sum(exporter.series(ENERGY).values())
        wait_until(lambda: sum(exporter.series(ENERGY).values()) > first, "a later turn is served")
        assert exporter.popen.poll() is None


@needs_dev_full
@pytest.mark.fault(
    "the disk is full when --once writes the metrics to a file",
    "one line with the reason; exit code 1",
)
def test_full_disk_of_the_output(folder: Path) -> None:
    command = [*PODGPU, *EXPORTER, "--once"]
    with open("/dev/full", "wb") as file:
        done = subprocess.run(
            command, stdout=file, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("podgpu: ")
    assert "No space left on device" in last
