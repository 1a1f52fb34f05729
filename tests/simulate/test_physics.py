"""Tests the effect of simulated loads on utilisation, power, energy, clocks and samples."""

from __future__ import annotations

from typing import Any

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.labs.simulate.gpu import SimulatedLoad
from tests.simulated import FaultyNvml


def ready() -> tuple[list[float], FaultyNvml, Any]:
    """Returns the time (in a list, so that tests can change it), a driver and its first handle."""
    now = [50.0]
    driver = FaultyNvml("H100", clock=lambda: now[0], wall=lambda: now[0])
    driver.nvmlInit()
    return now, driver, driver.nvmlDeviceGetHandleByIndex(0)


def test_samples_and_utilisation() -> None:
    now, driver, handle = ready()
    now[0] += 2
    driver.place(SimulatedLoad(0, 11, duty=0.3))
    driver.place(SimulatedLoad(0, 12, duty=0.2))
    now[0] += 2
    driver.place(SimulatedLoad(0, 13, duty=0.9))
    assert driver.nvmlDeviceGetUtilizationRates(handle).gpu == 100
    driver.remove(13)
    assert driver.nvmlDeviceGetUtilizationRates(handle).gpu == 50
    _, samples = driver.nvmlDeviceGetSamples(
        handle, pynvml.NVML_GPU_UTILIZATION_SAMPLES, 50_000_000
    )
    assert [sample.sampleValue.uiVal for sample in samples] == [0] * 10 + [50] * 10
    entries = driver.nvmlDeviceGetProcessUtilization(handle, 50_000_000)
    assert [(entry.pid, entry.smUtil) for entry in entries] == [(11, 15), (12, 10)]


LOADS = st.lists(
    st.builds(
        SimulatedLoad,
        gpu=st.just(0),
        pid=st.integers(1, 9),
        duty=st.floats(0, 1),
        sway=st.floats(0, 1),
        phase=st.floats(0, 60),
    ),
    max_size=4,
)


@given(LOADS, st.lists(st.floats(0.01, 5), min_size=1, max_size=20))
def test_energy_is_the_integral_of_power(loads: list[SimulatedLoad], steps: list[float]) -> None:
    """A second driver is read only at the end. Its energy must be the same."""
    now, driver, handle = ready()
    later, unread, other_handle = ready()
    for load in loads:
        driver.place(load)
        unread.place(load)
    summed, before = 0.0, driver.nvmlDeviceGetTotalEnergyConsumption(handle)
    for step in steps:
        # Power is constant within a second, so each step is split at whole seconds.
        end = now[0] + step
        while now[0] < end:
            piece = min(end, float(int(now[0]) + 1)) - now[0]
            summed += driver.nvmlDeviceGetPowerUsage(handle) * piece
            now[0] = min(end, float(int(now[0]) + 1))
        energy = driver.nvmlDeviceGetTotalEnergyConsumption(handle)
        assert energy >= before
        before = energy
    assert before == pytest.approx(summed, rel=0.01, abs=2)
    later[0] = now[0]
    assert abs(unread.nvmlDeviceGetTotalEnergyConsumption(other_handle) - before) <= 1
