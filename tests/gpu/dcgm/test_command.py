"""Tests `podgpu exporter` and `podgpu doctor` with DCGM."""

from __future__ import annotations

import json
import socket

import pytest

from podgpu.cli.sources import open_telemetry
from podgpu.node.gpu.dcgm.connection import parse_address
from podgpu.node.gpu.dcgm.dcgm_telemetry import DcgmTelemetry
from podgpu.node.gpu.nvml.nvml_telemetry import NvmlTelemetry
from tests.cli.test_option_table import execute
from tests.gpu.dcgm.double import GPU, Double


@pytest.fixture
def one_gpu(double: Double) -> Double:
    double.gpu(0)
    double.speak(0)
    return double


def test_a_host_engine_selects_dcgm() -> None:
    engine = {"host_engine": parse_address("gpu-1:5555")}
    assert isinstance(open_telemetry("auto", engine), DcgmTelemetry)
    assert isinstance(open_telemetry("auto", {"host_engine": None}), NvmlTelemetry)
    assert isinstance(open_telemetry("nvml", engine), NvmlTelemetry)
    assert isinstance(open_telemetry("dcgm", {}), DcgmTelemetry)


def test_the_exporter_reads_from_dcgm(one_gpu: Double) -> None:
    options = ["--telemetry", f"dcgm:{one_gpu.path}", "-r", "10.0.0.7:5556", "-s", "g", "-p", "g"]
    result = execute(["exporter", "--once", "-c", "1000", *options], NODE_NAME="node-1")
    assert (result.code, one_gpu.call("address")) == (0, b"10.0.0.7:5556"), result.err
    assert 'DCGM_FI_DEV_GPU_TEMP{gpu="0"' in result.out
    assert 'Hostname="node-1"' in result.out
    assert (one_gpu.told("alive"), one_gpu.told("initialised")) == (0, 0)


def test_hostname_is_the_host_of_a_remote_engine(one_gpu: Double) -> None:
    options = ["--telemetry", f"dcgm:{one_gpu.path}", "-r", "gpu-7:5555"]
    assert 'Hostname="gpu-7"' in execute(["exporter", "--once", "-c", "1000", *options]).out


def test_hostname_is_this_machine_if_the_engine_is_local(one_gpu: Double) -> None:
    for address in ("LOCALHOST:5555", "127.0.0.1", "[::1]"):
        options = ["--telemetry", f"dcgm:{one_gpu.path}", "-r", address]
        out = execute(["exporter", "--once", "-c", "1000", *options]).out
        assert f'Hostname="{socket.gethostname()}"' in out


def test_the_doctor_shows_the_versions(one_gpu: Double) -> None:
    one_gpu.text((GPU, 0), 1, "580.105.08")
    options = ["--kubernetes=false", "--telemetry", f"dcgm:{one_gpu.path}", "-r", "localhost:5555"]
    findings = json.loads(execute(["doctor", "--json", *options], NODE_NAME="node-1").out)[
        "findings"
    ]
    texts = {finding["subject"]: f"{finding['level']}: {finding['text']}" for finding in findings}
    assert texts["DCGM"] == "ok: libdcgm 4.2.3, host engine 4.2.3"
    assert "580.105.08" in texts["driver"]
    assert "profiling" not in texts
