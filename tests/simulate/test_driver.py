"""The simulated driver as pynvml: sessions, field values, processes, MIG, GPM, events and faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pynvml
import pytest

from podgpu.simulate.gpu import SimulatedLoad
from tests.simulated import FaultyNvml

Start = Callable[..., FaultyNvml]
GIB = 1024**3
UTILISATION = pynvml.NVML_GPU_UTILIZATION_SAMPLES
XID = pynvml.nvmlEventTypeXidCriticalError


def refusal(call: Callable[..., Any], *arguments: Any) -> int:
    with pytest.raises(pynvml.NVMLError) as raised:
        call(*arguments)
    return int(raised.value.value)


def newest_sample(driver: Any, handle: Any, since: int) -> int:
    return int(max(s.timeStamp for s in driver.nvmlDeviceGetSamples(handle, UTILISATION, since)[1]))


def test_process_utilisation_adds_up_to_the_duty(start: Start, clock: Any) -> None:
    driver = start("H100")
    handle = driver.nvmlDeviceGetHandleByIndex(0)
    since = int(clock.wall() * 1e6)
    assert refusal(driver.nvmlDeviceGetProcessUtilization, handle, 0) == pynvml.NVML_ERROR_NOT_FOUND
    driver.place(SimulatedLoad(0, 11, duty=0.5))
    driver.place(SimulatedLoad(0, 12, duty=0.2))
    busy = {11: 0.0, 12: 0.0}
    for _ in range(40):
        clock.now += 0.77
        entries = driver.nvmlDeviceGetProcessUtilization(handle, since)
        assert all(isinstance(entry, pynvml.c_nvmlProcessUtilizationSample_t) for entry in entries)
        assert [entry.pid for entry in entries] == [11, 12], "each process once"
        newest = newest_sample(driver, handle, since)
        for entry in entries:
            assert since < entry.timeStamp <= newest
            busy[entry.pid] += entry.smUtil / 100 * (newest - since) / 1e6
        since = newest
    assert busy[11] == pytest.approx(0.5 * 30.8, rel=0.05)
    assert busy[12] == pytest.approx(0.2 * 30.8, rel=0.05)
    assert refusal(driver.nvmlDeviceGetProcessUtilization, handle, since) == pynvml.NVML_ERROR_NOT_FOUND


def test_samples_of_the_device(start: Start, clock: Any) -> None:
    driver = start("H100", jitter=0)
    handle = driver.nvmlDeviceGetHandleByIndex(0)
    since = int(clock.wall() * 1e6)
    clock.now += 2
    driver.place(SimulatedLoad(0, 11, duty=0.3))
    driver.place(SimulatedLoad(0, 12, duty=0.2))
    clock.now += 2
    kind, samples = driver.nvmlDeviceGetSamples(handle, UTILISATION, since)
    assert kind == pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
    assert [sample.sampleValue.uiVal for sample in samples] == [0] * 10 + [50] * 10
    entries = driver.nvmlDeviceGetProcessUtilization(handle, since)
    assert [entry.smUtil for entry in entries] == [15, 10]
    assert len(driver.nvmlDeviceGetSamples(handle, UTILISATION, 0)[1]) == 100, "20 seconds are kept"
    newest = samples[-1].timeStamp
    assert refusal(driver.nvmlDeviceGetSamples, handle, UTILISATION, newest) == pynvml.NVML_ERROR_NOT_FOUND
    power = pynvml.NVML_TOTAL_POWER_SAMPLES
    assert refusal(driver.nvmlDeviceGetSamples, handle, power, since) == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_samples_include_ended_processes(start: Start, clock: Any) -> None:
    driver = start("H100", jitter=0)
    handle = driver.nvmlDeviceGetHandleByIndex(0)
    since = int(clock.wall() * 1e6)
    driver.place(SimulatedLoad(0, 11))
    clock.now += 1
    driver.remove(11)
    clock.now += 2
    assert driver.nvmlDeviceGetComputeRunningProcesses(handle) == []
    assert refusal(driver.nvmlDeviceGetProcessUtilization, handle, 0) == pynvml.NVML_ERROR_NOT_FOUND
    samples = driver.nvmlDeviceGetSamples(handle, UTILISATION, since)[1]
    assert [sample.sampleValue.uiVal for sample in samples] == [50] * 5 + [0] * 10


# MIG


def mig_handles(driver: FaultyNvml, gpu: Any) -> list[Any]:
    found = []
    for slot in range(driver.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            found.append(driver.nvmlDeviceGetMigDeviceHandleByIndex(gpu, slot))
        except pynvml.NVMLError_NotFound:
            continue
    return found


def test_ids_of_mig_instances(start: Start) -> None:
    driver = start("A100/2x1g.5gb+2g.10gb+3g.20gb", mig_uuids={(0, 1): "MIG-given"})
    handles = mig_handles(driver, driver.nvmlDeviceGetHandleByIndex(0))
    assert [driver.nvmlDeviceGetGpuInstanceId(handle) for handle in handles] == [7, 8, 3, 1]
    assert driver.nvmlDeviceGetUUID(handles[1]) == "MIG-given"


# GPM and events


def evaluate(driver: FaultyNvml, first: Any, second: Any, metrics: Sequence[int]) -> dict[int, Any]:
    request = driver.c_nvmlGpmMetricsGet_t()
    request.version, request.numMetrics = driver.NVML_GPM_METRICS_GET_VERSION, len(metrics)
    request.sample1, request.sample2 = first, second
    for index, metric in enumerate(metrics):
        request.metrics[index].metricId = metric
    driver.nvmlGpmMetricsGet(request)
    found = [request.metrics[index] for index in range(len(metrics))]
    return {metric.metricId: None if metric.nvmlReturn else metric.value for metric in found}


def test_gpm_is_the_mean_between_two_samples(start: Start, clock: Any) -> None:
    driver = start("H100", jitter=0)
    handle = driver.nvmlDeviceGetHandleByIndex(0)
    first, second = driver.nvmlGpmSampleAlloc(), driver.nvmlGpmSampleAlloc()
    driver.nvmlGpmSampleGet(handle, first)
    clock.now += 5
    driver.place(SimulatedLoad(0, 11, duty=0.8, tensor=0.5, dram=0.25))
    clock.now += 5
    driver.nvmlGpmSampleGet(handle, second)
    values = evaluate(driver, first, second, [1, 2, 5, 10, 11, 20, 21, 37, 60, 62, 100, 248])
    assert values[1] == pytest.approx(40)
    assert values[5] == pytest.approx(20)
    assert values[10] == pytest.approx(10)
    assert values[5] <= values[2] <= values[1]
    assert values[11] == 0
    assert 0 < values[20] < values[21]
    assert [metric for metric, value in values.items() if value is None] == [37, 60, 62, 100, 248]
