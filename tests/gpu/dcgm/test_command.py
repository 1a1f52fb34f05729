"""`podgpu exporter` and `podgpu doctor` with DCGM."""

from __future__ import annotations

import json
import logging

import pytest

from podgpu.cli.main import run
from podgpu.cli.node import open_telemetry
from podgpu.cli.options import EXPORTER_OPTIONS
from podgpu.gpu.dcgm import DcgmTelemetry
from podgpu.gpu.dcgm.connection import parse_address
from podgpu.gpu.nvml import NvmlTelemetry
from tests.gpu.dcgm.double import GPU, Double
from tests.host.guard import NODE_PATHS


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in EXPORTER_OPTIONS:
        if option.env and option.env not in NODE_PATHS:
            monkeypatch.delenv(option.env, raising=False)
    monkeypatch.setenv("NODE_NAME", "node-1")


def execute(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Runs the command in this process and restores the logging."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        code = run(list(arguments))
    finally:
        root.handlers[:], root.level = handlers, level
    out, err = capfd.readouterr()
    return code, out, err


def test_a_host_engine_selects_dcgm() -> None:
    engine = {"host_engine": parse_address("gpu-1:5555")}
    assert isinstance(open_telemetry("auto", engine), DcgmTelemetry)
    assert isinstance(open_telemetry("auto", {"host_engine": None}), NvmlTelemetry)
    assert isinstance(open_telemetry("nvml", engine), NvmlTelemetry)
    assert isinstance(open_telemetry("dcgm"), DcgmTelemetry)


def test_the_exporter_reads_from_dcgm(double: Double, capfd: pytest.CaptureFixture[str]) -> None:
    double.gpu(0)
    double.speak(0)
    options = ("--telemetry", f"dcgm:{double.path}", "-r", "10.0.0.7:5556", "-s", "g", "-p", "g")
    code, out, err = execute(capfd, "exporter", "--once", "-c", "100", *options)
    assert (code, double.call("address")) == (0, b"10.0.0.7:5556"), err
    assert 'DCGM_FI_DEV_GPU_TEMP{gpu="0"' in out
    assert 'Hostname="node-1"' in out
    assert (double.told("alive"), double.told("initialised")) == (0, 0)


def test_hostname_is_the_host_of_a_remote_engine(
    double: Double, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NODE_NAME")
    double.gpu(0)
    double.speak(0)
    _, out, _ = execute(
        capfd, "exporter", "--once", "-c", "100", "--telemetry", f"dcgm:{double.path}", "-r", "gpu-7:5555"
    )
    assert 'Hostname="gpu-7"' in out


def findings(capfd: pytest.CaptureFixture[str], double: Double) -> dict[str, list[str]]:
    arguments = ("--json", "--kubernetes=false", "--telemetry", f"dcgm:{double.path}", "-r", "localhost:5555")
    _, out, _ = execute(capfd, "doctor", *arguments)
    found: dict[str, list[str]] = {}
    for finding in json.loads(out)["findings"]:
        found.setdefault(finding["subject"], []).append(f"{finding['level']}: {finding['text']}")
    return found


def test_the_doctor_shows_the_versions(double: Double, capfd: pytest.CaptureFixture[str]) -> None:
    double.gpu(0)
    double.speak(0)
    double.text((GPU, 0), 1, "580.105.08")
    found = findings(capfd, double)
    assert found["DCGM"] == ["ok: libdcgm 4.2.3, host engine 4.2.3"]
    assert "580.105.08" in found["driver"][0]
    assert "profiling" not in found
