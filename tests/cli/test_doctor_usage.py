"""`podgpu doctor` about shared GPUs: how their busy time can be split, and what a better method needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from podgpu.cli.doctor import command, examine_node
from podgpu.cli.exporter import merge_config_file
from podgpu.doctor.findings import Level
from podgpu.gpu.nvml.switch_attribution import SwitchLogError
from podgpu.gpu.nvml.switch_log import check_driver
from podgpu.gpu.nvml.switch_splitter import SwitchLog, SwitchLogFactory
from podgpu.gpu.nvml.telemetry import NvmlTelemetry
from podgpu.model import Device, UsageMethod
from podgpu.simulate.gpu import SimulatedLoad
from tests.simulated import FaultyNvml

Examine = Callable[..., list[tuple[Level, str, str]]]


@pytest.fixture
def examined() -> Iterator[Examine]:
    drivers: list[FaultyNvml] = []

    def run(
        spec: str = "1xH200",
        wanted: UsageMethod = "exact",
        *,
        privileged: bool = True,
        version: str = "580.159.04",
        error: SwitchLogError | None = None,
        mps_clients: int = 0,
    ) -> list[tuple[Level, str, str]]:
        driver = FaultyNvml(spec, driver_version=version)
        drivers.append(driver)
        for pid in range(mps_clients):
            driver.place(SimulatedLoad(0, 100 + pid, kind="mps"))

        def open_log(device: Device, driver_version: str) -> SwitchLog:
            check_driver(driver_version)
            if error is not None:
                raise error
            return driver.switch_log(device.uuid)

        factory = SwitchLogFactory(wanted, open_log, lambda: privileged)
        telemetry = NvmlTelemetry(driver, "nvml", lambda: None, switch_logs=factory)
        paths = ("--path-proc", "/nowhere", "--path-sysfs", "/nowhere")
        context = command.make_context("doctor", ["--usage-from", wanted, "--no-hostname", "-f", "none", *paths])
        options = {**merge_config_file(context, context.params), "check_kubernetes": False}
        findings = examine_node(options, telemetry, 5.0, lambda _: None, "/nowhere")
        return [(one.level, one.text, one.advice) for one in findings if one.subject in ("MPS", "sharing")]

    yield run
    for driver in drivers:
        driver.faults.unload_driver()


def test_what_is_possible(examined: Examine) -> None:
    ((level, text, _),) = examined(wanted="samples")
    assert (level, "estimated from the driver's samples" in text) == (Level.OK, True)
    ((level, text, _),) = examined("2xH200")
    assert (level, text) == (Level.OK, "GPUs 0, 1: busy time is exact: it comes from context switches and busy samples")
    ((level, text, _),) = examined(wanted="switches")
    assert (level, text.startswith("GPU 0: busy time comes from context switches")) == (Level.OK, True)
    ((level, text, _),) = examined(wanted="switches", privileged=False)
    assert (level, "processes of other users" in text) == (Level.NOTE, True)


def test_clients_of_mps(examined: Examine) -> None:
    (level, text, _), sharing = examined("2xH200", mps_clients=2)
    assert (level, text.startswith("GPU 0: used by clients of MPS")) == (Level.NOTE, True)
    assert sharing[0] == Level.OK


@pytest.mark.fault(
    "--usage-from exact, and the container has no CAP_SYS_ADMIN",
    "busy time of shared GPUs is split by context switches, with bounds; `podgpu doctor` reports the remedy",
)
def test_the_capability_is_missing(examined: Examine) -> None:
    ((level, text, advice),) = examined(privileged=False)
    assert level is Level.WRONG
    assert "CAP_SYS_ADMIN is missing" in text
    assert "exporter.usage.from: exact" in advice


@pytest.mark.parametrize("spec", ["1xB200", "1xH200/2x1g.18gb"])
def test_gpus_that_were_not_measured(examined: Examine, spec: str) -> None:
    ((level, text, _),) = examined(spec)
    assert (level, "not exact: the busy register" in text) == (Level.NOTE, True)


def test_the_log_cannot_be_read(examined: Examine) -> None:
    ((level, text, advice),) = examined(wanted="switches", version="470.223.02")
    assert (level, "470.223.02" in text, "550" in advice) == (Level.WRONG, True, True)
    missing = SwitchLogError("no_device_node", "/dev/nvidiactl cannot be opened")
    ((level, text, advice),) = examined(error=missing)
    assert (level, "/dev/nvidiactl" in text, "runtimeClassName: nvidia" in advice) == (Level.WRONG, True, True)
