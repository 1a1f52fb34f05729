"""`podgpu exporter` and `podgpu doctor` on the double: options that select DCGM, and its versions."""

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
    """`podgpu ...` in this process, its logging undone afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        code = run(list(arguments))
    finally:
        root.handlers[:], root.level = handlers, level
    out, err = capfd.readouterr()
    return code, out, err


def test_a_named_host_engine_means_dcgm() -> None:
    engine = {"host_engine": parse_address("gpu-1:5555")}
    assert isinstance(open_telemetry("auto", engine), DcgmTelemetry)
    assert isinstance(open_telemetry("auto", {"host_engine": None}), NvmlTelemetry)
    assert isinstance(open_telemetry("nvml", engine), NvmlTelemetry)
    assert isinstance(open_telemetry("dcgm"), DcgmTelemetry)


def test_the_exporter_reads_from_dcgm(double: Double, capfd: pytest.CaptureFixture[str]) -> None:
    double.gpu(0)
    double.speak(0)
    arguments = (
        "--once",
        "-c",
        "1000",
        "--telemetry",
        f"dcgm:{double.path}",
        "-r",
        "10.0.0.7:5556",
        "-s",
        "g",
        "-p",
        "g",
    )
    code, out, err = execute(capfd, "exporter", *arguments)
    assert (code, double.call("address")) == (0, b"10.0.0.7:5556"), err
    assert 'DCGM_FI_DEV_GPU_TEMP{gpu="0"' in out
    assert 'Hostname="node-1"' in out
    assert (double.told("alive"), double.told("initialised")) == (0, 0)


def test_the_host_of_another_engine_names_its_figures(
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
