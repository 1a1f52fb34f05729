"""MIG devices: their handles, what they answer, and what their parents stop answering."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml
import pytest

from podgpu.simulate.driver import SimulatedNvml
from podgpu.simulate.gpu import SimulatedLoad

Start = Callable[..., SimulatedNvml]
MIB = 1024**2


def refusal(call: Callable[..., Any], *arguments: Any) -> int:
    with pytest.raises(pynvml.NVMLError) as raised:
        call(*arguments)
    return int(raised.value.value)


def mig_handles(driver: SimulatedNvml, gpu: Any) -> list[Any]:
    """As every reader of MIG devices does it: try each slot, skip the empty ones."""
    found = []
    for slot in range(driver.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            found.append(driver.nvmlDeviceGetMigDeviceHandleByIndex(gpu, slot))
        except pynvml.NVMLError_NotFound:
            continue
    return found


def test_mixed_slices_get_the_ids_a_real_driver_gives(start: Start) -> None:
    driver = start("A100/2x1g.5gb+2g.10gb+3g.20gb", mig_uuids={(0, 1): "MIG-given"})
    handles = mig_handles(driver, driver.nvmlDeviceGetHandleByIndex(0))
    assert [driver.nvmlDeviceGetGpuInstanceId(handle) for handle in handles] == [7, 8, 3, 1]
    assert driver.nvmlDeviceGetUUID(handles[1]) == "MIG-given"


def test_processes_are_listed_with_their_instance(start: Start) -> None:
    driver = start("A100/2x3g.20gb")
    gpu = driver.nvmlDeviceGetHandleByIndex(0)
    first, second = mig_handles(driver, gpu)
    driver.place(SimulatedLoad(0, 11, gi_id=1))
    driver.place(SimulatedLoad(0, 12, gi_id=2))
    listed = driver.nvmlDeviceGetComputeRunningProcesses(gpu)
    assert [(process.pid, process.gpuInstanceId, process.computeInstanceId) for process in listed] == [
        (11, 1, 0),
        (12, 2, 0),
    ]
    assert [process.pid for process in driver.nvmlDeviceGetComputeRunningProcesses(second)] == [12]
    assert [process.pid for process in driver.nvmlDeviceGetComputeRunningProcesses(first)] == [11]


def test_the_parent_stops_giving_rates(start: Start) -> None:
    driver = start("H100/1g.10gb")
    gpu = driver.nvmlDeviceGetHandleByIndex(0)
    (instance,) = mig_handles(driver, gpu)
    for call in (driver.nvmlDeviceGetUtilizationRates, driver.nvmlDeviceGetDecoderUtilization):
        assert refusal(call, gpu) == pynvml.NVML_ERROR_NOT_SUPPORTED
        assert refusal(call, instance) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert refusal(driver.nvmlDeviceGetProcessUtilization, gpu, 0) == pynvml.NVML_ERROR_NOT_SUPPORTED
    samples = pynvml.NVML_GPU_UTILIZATION_SAMPLES
    assert refusal(driver.nvmlDeviceGetSamples, gpu, samples, 0) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert driver.nvmlDeviceGetPowerUsage(gpu) > 0


def test_another_layout_makes_old_handles_stale(start: Start) -> None:
    driver = start("H100/7x1g.10gb")
    gpu = driver.nvmlDeviceGetHandleByIndex(0)
    old = mig_handles(driver, gpu)
    before = {driver.nvmlDeviceGetUUID(handle) for handle in old}
    driver.place(SimulatedLoad(0, 11, gi_id=7))
    uuids = driver.faults.relayout(0, ["3g.40gb", "4g.40gb"])
    assert refusal(driver.nvmlDeviceGetUUID, old[0]) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert [driver.nvmlDeviceGetUUID(handle) for handle in mig_handles(driver, gpu)] == uuids
    assert not before & set(uuids)
    assert driver.nvmlDeviceGetComputeRunningProcesses(gpu) == []
