"""Everything that can be made to go wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pynvml
import pytest

from podgpu.simulate.driver import SimulatedNvml
from podgpu.simulate.gpu import SimulatedLoad

Start = Callable[..., SimulatedNvml]


def refusal(call: Callable[..., Any], *arguments: Any) -> int:
    with pytest.raises(pynvml.NVMLError) as raised:
        call(*arguments)
    return int(raised.value.value)


def in_thread(call: Callable[..., Any], *arguments: Any) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(call(*arguments)))
    thread.start()
    return thread, answers


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


def test_a_pid_namespace_of_ones_own(start: Start, clock: Any) -> None:
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


def test_many_threads_at_once(start: Start, clock: Any) -> None:
    driver = start("4xH100")
    handles = [driver.nvmlDeviceGetHandleByIndex(index) for index in range(4)]
    failures: list[BaseException] = []

    def read(handle: Any, pid: int) -> None:
        try:
            for turn in range(200):
                clock.now += 0.01
                driver.place(SimulatedLoad(pid % 4, 1000 * pid + turn, duty=0.1, memory=0))
                driver.nvmlDeviceGetTotalEnergyConsumption(handle)
                driver.nvmlDeviceGetComputeRunningProcesses(handle)
                driver.remove(1000 * pid + turn)
        except (pynvml.NVMLError, ValueError, RuntimeError) as error:
            failures.append(error)

    threads = [threading.Thread(target=read, args=(handles[pid % 4], pid)) for pid in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
    assert driver.calls["nvmlDeviceGetTotalEnergyConsumption"] == 1600
