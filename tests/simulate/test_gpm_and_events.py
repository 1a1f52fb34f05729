"""GPM between two samples, and XID events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pynvml
import pytest

from podgpu.simulate.driver import SimulatedNvml
from podgpu.simulate.gpu import SimulatedLoad

Start = Callable[..., SimulatedNvml]
XID = pynvml.nvmlEventTypeXidCriticalError


def refusal(call: Callable[..., Any], *arguments: Any) -> int:
    with pytest.raises(pynvml.NVMLError) as raised:
        call(*arguments)
    return int(raised.value.value)


def evaluate(driver: SimulatedNvml, first: Any, second: Any, metrics: Sequence[int]) -> dict[int, Any]:
    request = driver.c_nvmlGpmMetricsGet_t()
    request.version, request.numMetrics = driver.NVML_GPM_METRICS_GET_VERSION, len(metrics)
    request.sample1, request.sample2 = first, second
    for index, metric in enumerate(metrics):
        request.metrics[index].metricId = metric
    driver.nvmlGpmMetricsGet(request)
    found = [request.metrics[index] for index in range(len(metrics))]
    return {metric.metricId: None if metric.nvmlReturn else metric.value for metric in found}


def test_gpm_is_the_mean_between_two_samples(start: Start, clock: Any) -> None:
    driver = start("H100", unrest=0)
    handle = driver.nvmlDeviceGetHandleByIndex(0)
    assert driver.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice == 1
    first, second = driver.nvmlGpmSampleAlloc(), driver.nvmlGpmSampleAlloc()
    driver.nvmlGpmSampleGet(handle, first)
    clock.now += 5
    driver.place(SimulatedLoad(0, 11, duty=0.8, tensor=0.5, dram=0.25))
    clock.now += 5
    driver.nvmlGpmSampleGet(handle, second)
    values = evaluate(driver, first, second, [1, 2, 5, 7, 10, 11, 20, 21, 31, 37, 60, 62, 100, 248])
    assert values[1] == pytest.approx(40)
    assert values[5] == values[7] == pytest.approx(20)
    assert values[10] == pytest.approx(10)
    assert values[5] <= values[2] <= values[1]
    assert values[11] == values[31] == 0
    assert 0 < values[20] < values[21]
    assert [metric for metric, value in values.items() if value is None] == [37, 60, 62, 100, 248]


def test_gpm_of_one_instance(start: Start, clock: Any) -> None:
    driver = start("H100/2x3g.40gb", unrest=0)
    handle = driver.nvmlDeviceGetHandleByIndex(0)
    driver.place(SimulatedLoad(0, 11, gi_id=2, duty=0.7))
    samples = [driver.nvmlGpmSampleAlloc() for _ in range(6)]
    for turn in range(2):
        driver.nvmlGpmMigSampleGet(handle, 1, samples[turn])
        driver.nvmlGpmMigSampleGet(handle, 2, samples[2 + turn])
        driver.nvmlGpmSampleGet(handle, samples[4 + turn])
        clock.now += 1
    busy = [evaluate(driver, *samples[pair : pair + 2], [1])[1] for pair in (0, 2, 4)]
    assert busy == pytest.approx([0, 70, 30])
    assert refusal(driver.nvmlGpmMigSampleGet, handle, 9, samples[0]) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert refusal(evaluate, driver, samples[0], samples[2], [1]) == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_xids_reach_who_registered(start: Start) -> None:
    driver = start("2xH100/1g.10gb")
    handles = [driver.nvmlDeviceGetHandleByIndex(index) for index in range(2)]
    events = driver.nvmlEventSetCreate()
    deaf = driver.nvmlEventSetCreate()
    for handle in handles:
        driver.nvmlDeviceRegisterEvents(handle, XID, events)
    assert refusal(driver.nvmlEventSetWait_v2, events, 0) == pynvml.NVML_ERROR_TIMEOUT
    driver.faults.raise_xid(1, 79)
    driver.faults.raise_xid(0, 43, gi_id=7)
    first, second = driver.nvmlEventSetWait_v2(events, 0), driver.nvmlEventSetWait_v2(events, 0)
    assert (first.eventType, first.eventData, first.gpuInstanceId) == (8, 79, 0xFFFFFFFF)
    assert (second.eventData, second.gpuInstanceId, second.computeInstanceId) == (43, 7, 0)
    assert driver.nvmlDeviceGetUUID(first.device) == driver.nvmlDeviceGetUUID(handles[1])
    assert driver.nvmlDeviceGetIndex(second.device) == 0
    assert refusal(driver.nvmlEventSetWait_v2, deaf, 0) == pynvml.NVML_ERROR_TIMEOUT
    driver.nvmlEventSetFree(events)
    assert refusal(driver.nvmlEventSetWait_v2, events, 0) == pynvml.NVML_ERROR_INVALID_ARGUMENT
