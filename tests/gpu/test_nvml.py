"""NvmlTelemetry on the simulated driver: inventory, readings, and drivers that come and go."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pynvml
import pytest

from podgpu.errors import SourceError
from podgpu.metrics.fields import field_named, fields
from tests.gpu.nvml_bench import DCP, NvmlBench


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[NvmlBench]:
    bench = NvmlBench(getattr(request, "param", "2xH100"))
    yield bench
    bench.stop()


def the(name: str) -> int:
    field = field_named(name)
    assert field is not None
    return field.id


def test_a_driver_that_takes_long_for_every_gpu_is_waited_for(bench: NvmlBench) -> None:
    """As one that is not kept loaded (no persistence mode) does: `--once` has all GPUs all the same."""
    hangs = [bench.faults.hang("nvmlDeviceGetUUID", gpu) for gpu in (0, 1)]
    for seconds, hang in zip((0.7, 1.4), hangs, strict=True):
        threading.Timer(seconds, hang.release).start()
    inventory = bench.telemetry.inventory()
    assert [gpu.index for gpu in inventory.gpus] == [0, 1]
    assert not inventory.unreachable


def test_unsupported_fields_are_not_read_again(bench: NvmlBench) -> None:
    bench.faults.unsupported("nvmlDeviceGetTotalEnergyConsumption", gpu=0)
    energy = the("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION")
    answer = bench.read()
    assert energy not in answer.readings[0].values
    assert (answer.readings[0].device.key, energy) in answer.unsupported
    asked = bench.driver.calls["nvmlDeviceGetTotalEnergyConsumption"]
    bench.pass_time()
    assert (answer.readings[0].device.key, energy) in bench.read().unsupported
    assert bench.driver.calls["nvmlDeviceGetTotalEnergyConsumption"] == asked
    assert energy in bench.read(1).readings[0].values, "the other GPU is not affected"


def test_one_failing_call_costs_only_its_fields(bench: NvmlBench) -> None:
    bench.faults.fail("nvmlDeviceGetPowerUsage", pynvml.NVML_ERROR_UNKNOWN, gpu=0)
    answer = bench.read()
    assert the("DCGM_FI_DEV_POWER_USAGE") not in answer.readings[0].values
    assert the("DCGM_FI_DEV_GPU_TEMP") in answer.readings[0].values
    assert answer.errors == ("unknown",)
    bench.faults.clear("nvmlDeviceGetPowerUsage", gpu=0)
    assert the("DCGM_FI_DEV_POWER_USAGE") in bench.read().readings[0].values, "read again after an error"


@pytest.mark.parametrize(
    "error", [pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_INVALID_ARGUMENT]
)
def test_a_reloaded_driver_is_taken_up_again(bench: NvmlBench, error: int) -> None:
    gpus = bench.telemetry.inventory().gpus
    bench.read()
    bench.faults.reload_driver(error)
    for gpu in gpus:
        with pytest.raises(SourceError):
            bench.telemetry.read(gpu, DCP)
    bench.faults.load_driver()
    bench.pass_time(10)
    answer = bench.read()
    assert the("DCGM_FI_DEV_GPU_TEMP") in answer.readings[0].values
    assert not answer.unsupported, "refused handles must not be taken for missing features"


def test_every_recipe_of_the_catalogue_can_be_carried_out(bench: NvmlBench) -> None:

    everything = tuple(fields().values())
    bench.read(fields=everything)
    bench.pass_time()
    answer = bench.read(fields=everything)
    assert len(answer.readings[0].values) > 150
    assert not answer.errors
