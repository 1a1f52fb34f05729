"""Tests NvmlTelemetry on the simulated driver: inventory, readings and driver reloads."""

from __future__ import annotations

import threading

import pynvml
import pytest

from podgpu.errors import SourceError
from podgpu.metrics.fields import field_named, fields
from podgpu.node.gpu.nvml.driver import FirmwarePhase
from tests.gpu.nvml_bench import DCP, NvmlBench, of_gpu


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> NvmlBench:
    return NvmlBench(getattr(request, "param", "2xH100"))


def the(name: str) -> int:
    field = field_named(name)
    assert field is not None
    return field.id


def test_a_slow_driver(bench: NvmlBench) -> None:
    """Without persistence mode the first calls are slow. `--once` must still report all GPUs."""
    hangs = [bench.faults.hang("nvmlDeviceGetUUID", gpu) for gpu in (0, 1)]
    for seconds, hang in zip((0.3, 0.6), hangs, strict=True):
        threading.Timer(seconds, hang.release).start()
    inventory = bench.telemetry.inventory()
    assert [gpu.index for gpu in inventory.gpus] == [0, 1]
    assert not inventory.unreachable


def test_unsupported_fields_are_not_read_again(bench: NvmlBench) -> None:
    bench.faults.unsupported("nvmlDeviceGetTotalEnergyConsumption", gpu=0)
    energy = the("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION")
    answer = bench.read()
    assert energy not in of_gpu(answer)
    assert (next(iter(answer.values)).key, energy) in answer.unsupported
    asked = bench.driver.calls["nvmlDeviceGetTotalEnergyConsumption"]
    bench.pass_time()
    assert (next(iter(answer.values)).key, energy) in bench.read().unsupported
    assert bench.driver.calls["nvmlDeviceGetTotalEnergyConsumption"] == asked
    assert energy in of_gpu(bench.read(1)), "the other GPU supports the field"


def test_a_failing_call_affects_only_its_fields(bench: NvmlBench) -> None:
    bench.faults.fail("nvmlDeviceGetPowerUsage", pynvml.NVML_ERROR_UNKNOWN, gpu=0)
    answer = bench.read()
    assert the("DCGM_FI_DEV_POWER_USAGE") not in of_gpu(answer)
    assert the("DCGM_FI_DEV_GPU_TEMP") in of_gpu(answer)
    assert answer.errors == ("unknown",)
    bench.faults.clear("nvmlDeviceGetPowerUsage", gpu=0)
    assert the("DCGM_FI_DEV_POWER_USAGE") in of_gpu(bench.read()), (
        "a field must be read again after an error"
    )


@pytest.mark.parametrize(
    "error",
    [
        pynvml.NVML_ERROR_UNKNOWN,
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
    ],
)
def test_a_reloaded_driver(bench: NvmlBench, error: int) -> None:
    gpus = bench.telemetry.inventory().gpus
    bench.read()
    bench.faults.reload_driver(error)
    for gpu in gpus:
        with pytest.raises(SourceError):
            bench.telemetry.read(gpu, DCP)
    bench.faults.load_driver()
    bench.pass_time(10)
    answer = bench.read()
    assert the("DCGM_FI_DEV_GPU_TEMP") in of_gpu(answer)
    assert not answer.unsupported, "invalid handles do not mean that a field is unsupported"


def test_every_field_can_be_read(bench: NvmlBench) -> None:
    everything = tuple(fields().values())
    bench.read(fields=everything)
    bench.pass_time()
    answer = bench.read(fields=everything)
    assert len(of_gpu(answer)) > 150
    assert not answer.errors


@pytest.mark.parametrize("busy_from", [0.0, 0.005, 0.02, 0.05, 0.08, 0.095])
@pytest.mark.parametrize(("cheap", "busy"), [(0.003, 0.015), (0.003, 0.008), (0.009, 0.02)])
def test_readings_leave_the_time_when_the_firmware_is_busy(
    busy_from: float, cheap: float, busy: float
) -> None:
    """The firmware is busy for 12 ms of every 100 ms. Readings are due at multiples of 100 ms."""
    delays: list[float] = []
    cpu = 0.0
    phase = FirmwarePhase(lambda: cpu, delays.append)
    costs = []
    for _ in range(100):
        with phase.avoid_busy_firmware():
            costs.append(busy if (delays[-1] - busy_from) % 0.1 < 0.012 else cheap)
            cpu += costs[-1]
    assert costs.count(busy) <= 2
    assert len(set(delays[10:])) == 1, "the delay does not change any more"


def test_an_nvlink_state_of_a_newer_driver_is_unknown() -> None:
    bench = NvmlBench("2xH100")
    bench.faults.answer("nvmlDeviceGetP2PStatus", 7, gpu=0)
    ((_, labels, state),) = bench.read(0, (fields()[9004],)).details
    assert (labels["link_status"], state) == ("Unknown", 7)


def test_a_lost_peer_does_not_matter_for_nvlink_states() -> None:
    bench = NvmlBench("3xH100")
    p2p = (fields()[9004],)
    assert [labels["peer_gpu"] for _, labels, _ in bench.read(0, p2p).details] == ["1", "2"]
    bench.driver.lose(1)
    assert [labels["peer_gpu"] for _, labels, _ in bench.read(0, p2p).details] == ["2"]
    assert bench.read(0, ()).details == ()
