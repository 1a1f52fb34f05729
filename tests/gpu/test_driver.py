"""The seam to NVML: errors, older calls, and a shutdown that waits."""

from __future__ import annotations

import threading

import pynvml
import pytest

from podgpu.errors import DriverGone, Unsupported
from podgpu.gpu.nvml.driver import NvmlDriver
from tests.simulated import FaultyNvml


class OldDriver:
    """A driver from before the renamed clock event call."""

    def nvmlDeviceGetCurrentClocksEventReasons(self, device: object) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: object) -> int:
        return 4


def test_older_drivers_get_older_calls() -> None:
    driver = NvmlDriver(OldDriver())
    assert driver.call("nvmlDeviceGetCurrentClocksEventReasons", "gpu") == 4
    with pytest.raises(Unsupported, match="newer"):
        driver.call("nvmlDeviceGetSomethingNew", "gpu")


def test_shutdown_waits_for_calls_and_refuses_when_one_hangs() -> None:
    nvml = FaultyNvml("1xH100")
    driver = NvmlDriver(nvml)
    driver.open()
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with driver.hold():
            inside.set()
            leave.wait(30)

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    assert inside.wait(30)
    assert not driver.close(0.01)
    assert nvml.calls["nvmlShutdown"] == 0, "never while a call is in flight"
    leave.set()
    holder.join(30)
    assert driver.close(1.0)
    assert nvml.calls["nvmlShutdown"] == 1
    with pytest.raises(DriverGone), driver.hold():
        pass
