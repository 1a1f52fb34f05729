"""Tests connections to DCGM: embedded or remote, incompatible versions, and engines that
restart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from podgpu.errors import DriverGone, SourceError, UsageError
from podgpu.node.gpu.dcgm.connection import EngineAddress, parse_address
from podgpu.node.gpu.nvml.nvml_telemetry import NvmlTelemetry
from tests.gpu.dcgm.double import GPU, PLAIN, Bench, Double, uuid_of
from tests.gpu.nvml_bench import of_gpu
from tests.simulated import FaultyNvml


def refusal(bench: Bench) -> SourceError:
    with pytest.raises(DriverGone) as caught:
        bench.telemetry.inventory()
    assert "\n" not in str(caught.value)
    return caught.value


def test_stale_values_are_not_repeated_after_a_reconnect(bench: Bench) -> None:
    """The engine has lost the driver, so it returns old values from its cache."""
    bench.read(*PLAIN)
    bench.double.call("disconnect")
    refusal(bench)
    bench.pass_time(30.0)
    answer = bench.read(*PLAIN)
    assert of_gpu(answer) == {}
    assert answer.errors == ("stale_data",)
    bench.double.tick()
    bench.double.speak(0)
    assert len(of_gpu(bench.read(*PLAIN))) == 4


def test_the_message_for_a_missing_library(double: Double, tmp_path: Path) -> None:
    error = refusal(Bench(double, library=str(tmp_path / "libdcgm.so.4")))
    assert error.reason == "library_not_found"
    assert "libdcgm.so.4 was not found" in str(error)
    assert "datacenter-gpu-manager" in str(error)
    assert "--telemetry nvml" in str(error)


@pytest.mark.parametrize(("library", "engine"), [("4.2.3", "3.3.9"), ("3.3.9", "4.2.3")])
def test_another_major_version_is_refused(double: Double, library: str, engine: str) -> None:
    double.call("versions", library, engine)
    error = refusal(Bench(double))
    assert error.reason == "version_mismatch"
    assert library in str(error)
    assert engine in str(error)
    assert (double.told("alive"), double.told("initialised")) == (0, 0)


def test_dcgm_3_works_too(bench: Bench) -> None:
    bench.double.call("versions", "3.3.9", "3.3.9")
    bench.double.call("gpu_link", 0, 0, 3)
    assert len(of_gpu(bench.read(*PLAIN, "DCGM_EXP_GPU_HEALTH_STATUS"))) == 4
    details = bench.read(*PLAIN, "DCGM_EXP_GPU_HEALTH_STATUS").details
    assert len(details) == 11


def test_without_an_address_the_engine_is_embedded(double: Double) -> None:
    double.gpu(0)
    double.speak(0)
    bench = Bench(double, address=None)
    assert len(of_gpu(bench.read(*PLAIN))) == 4
    assert (double.told("severity"), double.call("address")) == (0, b"")
    assert bench.telemetry.release(1.0)
    assert (double.told("alive"), double.told("initialised")) == (0, 0)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("localhost:5555", EngineAddress("localhost:5555", "localhost")),
        ("gpu-1", EngineAddress("gpu-1:5555", "gpu-1")),
        ("10.0.0.7:5556", EngineAddress("10.0.0.7:5556", "10.0.0.7")),
        ("[::1]:5555", EngineAddress("[::1]:5555", "::1")),
        ("[fe80::1]", EngineAddress("[fe80::1]:5555", "fe80::1")),
        ("unix:///run/nv-hostengine.sock", EngineAddress("/run/nv-hostengine.sock")),
        ("tcp://gpu-1:5556", EngineAddress("gpu-1:5556", "gpu-1")),
        ("vsock://2:5555", EngineAddress("vsock://2:5555", "localhost")),
        ("TCP://gpu-1:5556", EngineAddress("gpu-1:5556", "gpu-1")),
        ("UNIX:///run/engine.sock", EngineAddress("/run/engine.sock")),
        ("VSOCK://2:5555", EngineAddress("vsock://2:5555", "localhost")),
    ],
)
def test_valid_addresses(text: str, address: EngineAddress) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    ["", ":5555", "gpu-1:", "gpu-1:0", "gpu-1:70000", "::1:5555", "unix://x", "a b:1", "h/x"],
)
def test_invalid_addresses(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_address(text)
    assert "-r" in str(caught.value)


def test_an_xid_that_the_companion_driver_reports_too_is_counted_once(double: Double) -> None:
    class Sees(NvmlTelemetry):
        calls = 0

        def error_events(self) -> list[object]:  # type: ignore[override]
            Sees.calls += 1
            return ["the same one"]

    double.gpu(0)
    companion: Any = Sees(FaultyNvml("1xH100", uuids=[uuid_of(0)]), count_expected=lambda: 1)
    bench = Bench(double, companion)
    bench.read(*PLAIN)
    double.call("xid", GPU, 0, double.now, 79)
    bench.telemetry.inventory()
    assert [(e.device, e.code) for e in bench.telemetry.error_events()] == [(uuid_of(0), 79)]
    assert Sees.calls == 1
    assert bench.telemetry.release(2.0)
