"""The simulated driver seen through pynvml's eyes: names, types, errors, identity, sessions, processes."""

from __future__ import annotations

import csv
import ctypes
import re
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pynvml
import pytest

from podgpu.simulate.driver import SimulatedNvml
from podgpu.simulate.gpu import SimulatedLoad

Start = Callable[..., SimulatedNvml]
GIB = 1024**3
UTILISATION = pynvml.NVML_GPU_UTILIZATION_SAMPLES


def refusal(call: Callable[..., Any], *arguments: Any) -> int:
    with pytest.raises(pynvml.NVMLError) as raised:
        call(*arguments)
    return int(raised.value.value)


def test_nothing_answers_outside_a_session() -> None:
    driver = SimulatedNvml("H100")
    assert refusal(driver.nvmlDeviceGetCount) == pynvml.NVML_ERROR_UNINITIALIZED
    assert refusal(driver.nvmlShutdown) == pynvml.NVML_ERROR_UNINITIALIZED
    driver.nvmlInit()
    driver.nvmlInit()
    driver.nvmlShutdown()
    assert driver.nvmlDeviceGetCount() == 1
    handle = driver.nvmlDeviceGetHandleByIndex(0)
    driver.nvmlShutdown()
    assert refusal(driver.nvmlDeviceGetName, handle) == pynvml.NVML_ERROR_UNINITIALIZED


def test_every_function_of_the_catalogue_is_callable(start: Start) -> None:
    """It answers or refuses with an NVML error; nothing else may come out of it."""
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
def test_a_model_has_what_it_has(
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


def test_samples_of_the_device_come_busy_or_not(start: Start, clock: Any) -> None:
    driver = start("H100", unrest=0)
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


def test_a_process_that_ended_is_not_listed_but_the_device_remembers(start: Start, clock: Any) -> None:
    driver = start("H100", unrest=0)
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
