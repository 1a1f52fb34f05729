"""The simulated driver as pynvml: sessions, field values, processes, MIG, GPM, events and faults."""

from __future__ import annotations

import csv
import ctypes
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
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


def test_sessions() -> None:
    driver = FaultyNvml("H100")
    assert refusal(driver.nvmlDeviceGetCount) == pynvml.NVML_ERROR_UNINITIALIZED
    assert refusal(driver.nvmlShutdown) == pynvml.NVML_ERROR_UNINITIALIZED
    driver.nvmlInit()
    driver.nvmlInit()
    driver.nvmlShutdown()
    assert driver.nvmlDeviceGetCount() == 1
    handle = driver.nvmlDeviceGetHandleByIndex(0)
    driver.nvmlShutdown()
    assert refusal(driver.nvmlDeviceGetName, handle) == pynvml.NVML_ERROR_UNINITIALIZED


def test_every_function_of_fields_csv_can_be_called(start: Start) -> None:
    driver = start("2xH100,T4,RTX4090")
    rows = csv.DictReader(files("podgpu.metrics").joinpath("fields.csv").read_text().splitlines())
    asked = {row["nvml"] for row in rows if row["nvml"].startswith("nvml")}
    assert len(asked) > 100
    for index in range(4):
        handle = driver.nvmlDeviceGetHandleByIndex(index)
        for recipe in asked:
            name, written = re.match(r"(\w+)\((.*?)\)", recipe).groups()  # type: ignore[union-attr]
            arguments = [int(w) if w.isdigit() else getattr(driver, w) for w in written.split(",") if w]
            takes_device = not name.startswith("nvmlSystem") and name != "nvmlDeviceGetCount"
            try:
                getattr(driver, name)(*([handle] if takes_device else []), *arguments)
            except pynvml.NVMLError as error:
                assert error.value == pynvml.NVML_ERROR_NOT_SUPPORTED, recipe  # noqa: PT017


@pytest.mark.parametrize(
    ("model", "has", "lacks"),
    [
        ("H200", {82, 142, 74, 186}, {29, 30, 31, 138}),
        ("T4", {29, 83, 1}, {82, 142, 138}),
        ("L40S", {142, 197}, {82, 29, 139}),
        ("RTX4090", {83, 190}, {1, 3, 142, 29, 82}),
        ("2xA100", {82, 138, 139, 142}, {29}),
        ("2xH100", {1, 6, 78, 94, 145, 173, 183, 192, 198, 230, 271}, {170, 201, 235, 9999}),
    ],
)
def test_field_values_by_model(start: Start, model: str, has: set[int], lacks: set[int]) -> None:
    driver = start(model)
    handle = driver.nvmlDeviceGetHandleByIndex(0)
    values = driver.nvmlDeviceGetFieldValues(handle, sorted(has | lacks))
    assert isinstance(values, ctypes.Array)
    assert {value.fieldId for value in values if value.nvmlReturn == 0} == has
    assert {value.fieldId for value in values if value.nvmlReturn == pynvml.NVML_ERROR_NOT_SUPPORTED} == lacks


@pytest.mark.parametrize(
    ("model", "function", "arguments", "supported"),
    [
        ("RTX4090", "nvmlDeviceGetFanSpeed", (), True),
        ("H100", "nvmlDeviceGetFanSpeed", (), False),
        ("H100", "nvmlDeviceGetRetiredPages", (0,), False),
        ("V100", "nvmlDeviceGetRetiredPages", (0,), True),
        ("V100", "nvmlDeviceGetRemappedRows", (), False),
        ("A10", "nvmlDeviceGetRowRemapperHistogram", (), True),
        ("T4", "nvmlDeviceGetMigMode", (), False),
        ("T4", "nvmlDeviceGetMarginTemperature", (), False),
        ("L4", "nvmlDeviceGetMarginTemperature", (), True),
        ("RTX4090", "nvmlDeviceGetTotalEccErrors", (0, 0), False),
        ("RTX4090", "nvmlDeviceGetApplicationsClock", (0,), False),
        ("A100", "nvmlDeviceGetMemoryErrorCounter", (0, 0, 7), True),
        ("A100", "nvmlDeviceGetMemoryErrorCounter", (0, 0, 0), False),
        ("L40S", "nvmlDeviceGetTemperatureThreshold", (2,), False),
        ("A100", "nvmlDeviceGetTemperatureThreshold", (2,), True),
    ],
)
def test_functions_by_model(
    start: Start, model: str, function: str, arguments: tuple[int, ...], supported: bool
) -> None:
    driver = start(model)
    call = getattr(driver, function)
    handle = driver.nvmlDeviceGetHandleByIndex(0)
    if supported:
        call(handle, *arguments)
    else:
        assert refusal(call, handle, *arguments) == pynvml.NVML_ERROR_NOT_SUPPORTED


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


def test_a_gpu_in_mig_mode_has_no_rates(start: Start) -> None:
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
    driver = start("H100/2x3g.40gb", jitter=0)
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


def test_xid_events(start: Start) -> None:
    driver = start("2xH100/1g.10gb")
    handles = [driver.nvmlDeviceGetHandleByIndex(index) for index in range(2)]
    events = driver.nvmlEventSetCreate()
    other = driver.nvmlEventSetCreate()
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
    assert refusal(driver.nvmlEventSetWait_v2, other, 0) == pynvml.NVML_ERROR_TIMEOUT
    driver.nvmlEventSetFree(events)
    assert refusal(driver.nvmlEventSetWait_v2, events, 0) == pynvml.NVML_ERROR_INVALID_ARGUMENT


# Faults


def test_a_lost_gpu_that_is_still_counted(start: Start) -> None:
    driver = start("2xH100")
    first, second = (driver.nvmlDeviceGetHandleByIndex(index) for index in range(2))
    driver.faults.lose(0)
    assert driver.nvmlDeviceGetCount() == 2
    for call, argument in (
        (driver.nvmlDeviceGetPowerUsage, first),
        (driver.nvmlDeviceGetUUID, first),
        (driver.nvmlDeviceGetAccountingMode, first),
        (driver.nvmlDeviceGetHandleByIndex, 0),
        (driver.nvmlDeviceGetHandleByUUID, driver.gpu(0).uuid),
    ):
        assert refusal(call, argument) == pynvml.NVML_ERROR_GPU_IS_LOST
    assert driver.nvmlDeviceGetIndex(second) == 1
    driver.faults.recover(0)
    assert driver.nvmlDeviceGetPowerUsage(first) > 0


def test_a_reset_starts_counters_again(start: Start, clock: Any) -> None:
    driver = start("H100")
    old = driver.nvmlDeviceGetHandleByIndex(0)
    uuid = driver.nvmlDeviceGetUUID(old)
    driver.place(SimulatedLoad(0, 11))
    clock.now += 60
    assert driver.nvmlDeviceGetTotalEnergyConsumption(old) > 1_000_000
    driver.faults.lose(0)
    driver.faults.reset(0)
    assert refusal(driver.nvmlDeviceGetUUID, old) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    new = driver.nvmlDeviceGetHandleByIndex(0)
    assert driver.nvmlDeviceGetUUID(new) == uuid
    assert driver.nvmlDeviceGetTotalEnergyConsumption(new) == 0
    assert driver.nvmlDeviceGetComputeRunningProcesses(new) == []


def test_a_separate_pid_namespace(start: Start, clock: Any) -> None:
    driver = start("H100")
    handle = driver.nvmlDeviceGetHandleByIndex(0)
    driver.place(SimulatedLoad(0, 11))
    driver.faults.hide_processes()
    clock.now += 1
    assert driver.nvmlDeviceGetComputeRunningProcesses(handle) == []
    assert {sample.pid for sample in driver.nvmlDeviceGetProcessUtilization(handle, 0)} == {11}


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_UNINITIALIZED])
def test_a_reload_breaks_sessions_until_they_are_opened_again(start: Start, code: int) -> None:
    driver = start("H100/1g.10gb")
    old = driver.nvmlDeviceGetHandleByIndex(0)
    events = driver.nvmlEventSetCreate()
    driver.faults.reload_driver(code)
    assert refusal(driver.nvmlDeviceGetCount) == code
    assert refusal(driver.nvmlDeviceGetName, old) == code
    assert refusal(driver.nvmlEventSetWait_v2, events, 0) == code
    driver.nvmlInit()
    assert refusal(driver.nvmlDeviceGetCount) == code
    driver.nvmlShutdown()
    driver.nvmlShutdown()
    driver.nvmlInit()
    assert refusal(driver.nvmlDeviceGetName, old) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert driver.nvmlDeviceGetName(driver.nvmlDeviceGetHandleByIndex(0)) == "NVIDIA H100 80GB HBM3"
