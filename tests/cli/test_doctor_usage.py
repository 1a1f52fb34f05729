"""`podgpu doctor` on shared GPUs: available usage methods, and the requirements of better ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from podgpu.cli.main import run
from podgpu.labs.simulate.gpu import SimulatedLoad
from podgpu.model import Device, WantedMethod
from podgpu.node.gpu.nvml.switch_attribution import SwitchLogError
from podgpu.node.gpu.nvml.switch_log import check_driver
from podgpu.node.gpu.nvml.switch_splitter import SwitchLog, SwitchLogFactory
from podgpu.tools.doctor.checks import Level
from tests.cli.test_doctor import Examined, Tree, _no_variables, clock, examined, tree
from tests.nodes.clock import FakeClock
from tests.simulated import FaultyNvml

__all__ = ["_no_variables", "clock", "examined", "tree"]
FIXTURES = Path(__file__).parents[1] / "fixtures"
Examine = Callable[..., list[tuple[Level, str, str]]]


@pytest.fixture
def examine(examined: Examined, clock: FakeClock) -> Examine:
    def run(
        spec: str = "1xH200",
        wanted: WantedMethod = "exact",
        *,
        privileged: bool = True,
        version: str = "580.159.04",
        error: SwitchLogError | None = None,
        mps_clients: int = 0,
    ) -> list[tuple[Level, str, str]]:
        driver = FaultyNvml(spec, driver_version=version, clock=clock.monotonic)
        for pid in range(mps_clients):
            driver.place(SimulatedLoad(0, 100 + pid, kind="mps"))

        def open_log(device: Device, driver_version: str) -> SwitchLog:
            check_driver(driver_version)
            if error is not None:
                raise error
            return driver.switch_log(device.uuid)

        factory = SwitchLogFactory(wanted, open_log, lambda: privileged)
        findings = examined(
            driver, "--usage-from", wanted, "-f", "none", kubernetes=False, switch_logs=factory
        )
        return [
            (one.level, one.text, one.advice)
            for one in findings
            if one.subject in ("MPS", "sharing")
        ]

    return run


def test_what_is_possible(examine: Examine) -> None:
    ((level, text, _),) = examine(wanted="samples")
    assert (level, "estimated from the driver's samples" in text) == (Level.OK, True)
    ((level, text, _),) = examine("2xH200")
    assert (level, text) == (
        Level.OK,
        "GPUs 0, 1: busy time is exact: it comes from context switches and busy samples",
    )
    ((level, text, _),) = examine(wanted="switches")
    assert (level, text.startswith("GPU 0: busy time comes from context switches")) == (
        Level.OK,
        True,
    )
    ((level, text, _),) = examine(wanted="switches", privileged=False)
    assert (level, "run as other users" in text) == (Level.NOTE, True)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("1xH200", "comes from context switches"),
        ("1xB200", "auto reads context switches only on"),
    ],
)
def test_auto_is_the_default(
    tree: Tree, capsys: pytest.CaptureFixture[str], spec: str, text: str
) -> None:
    assert run(["doctor", "--telemetry", f"simulated:{spec}", "-k", "false", *tree.options]) == 0
    assert text in capsys.readouterr().out


def test_auto_is_the_best_method_that_works(examine: Examine) -> None:
    ((level, text, _),) = examine(wanted="auto")
    assert (level, text.startswith("GPU 0: busy time is exact")) == (Level.OK, True)
    ((level, text, advice),) = examine(wanted="auto", privileged=False)
    assert (level, "context switches" in text, "CAP_SYS_ADMIN" in advice) == (
        Level.NOTE,
        True,
        True,
    )
    for unknown in ({"spec": "1xB200"}, {"version": "575.57.08"}, {"spec": "1xH200/2x1g.18gb"}):
        ((level, text, advice),) = examine(wanted="auto", **unknown)
        assert (level, "driver samples" in text, "--usage-from switches" in advice) == (
            Level.NOTE,
            True,
            True,
        )
    missing = SwitchLogError("no_device_node", "/dev/nvidiactl cannot be opened")
    ((level, text, _),) = examine(wanted="auto", error=missing)
    assert (level, "/dev/nvidiactl" in text) == (Level.NOTE, True)


@pytest.mark.parametrize("wanted", ["auto", "switches", "exact"])
def test_a_method_of_the_driver_beside_another_exporter_is_not_claimed(
    wanted: str, tree: Tree, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exporter = tmp_path / "dcgm.prom"
    shutil.copyfile(FIXTURES / "h200" / "default.prom", exporter)
    telemetry = ["--telemetry", f"exporter:{exporter}", "--usage-from", wanted]
    run(["doctor", *telemetry, *tree.options])
    text = capsys.readouterr().out
    assert f"note  sharing        --usage-from {wanted} cannot be checked with this" in text
    assert "podgpu_device_usage_method" in text
    assert "samples" not in text


def test_clients_of_mps(examine: Examine) -> None:
    (level, text, _), sharing = examine("2xH200", mps_clients=2)
    assert (level, text.startswith("GPU 0: used by clients of MPS")) == (Level.NOTE, True)
    assert sharing[0] == Level.OK


@pytest.mark.fault(
    "--usage-from exact, and the container has no CAP_SYS_ADMIN",
    (
        "busy time of shared GPUs is split by context switches, with bounds; `podgpu doctor` "
        "reports "
        "the remedy"
    ),
)
def test_the_capability_is_missing(examine: Examine) -> None:
    ((level, text, advice),) = examine(privileged=False)
    assert level is Level.WRONG
    assert "CAP_SYS_ADMIN is missing" in text
    assert "exporter.usage.from: exact" in advice


@pytest.mark.parametrize("spec", ["1xB200", "1xH200/2x1g.18gb"])
def test_gpus_that_were_not_measured(examine: Examine, spec: str) -> None:
    ((level, text, _),) = examine(spec)
    assert (level, "not exact: the busy register" in text) == (Level.NOTE, True)


def test_the_log_cannot_be_read(examine: Examine) -> None:
    ((level, text, advice),) = examine(wanted="switches", version="470.223.02")
    assert (level, "470.223.02" in text, "550" in advice) == (Level.WRONG, True, True)
    missing = SwitchLogError("no_device_node", "/dev/nvidiactl cannot be opened")
    ((level, text, advice),) = examine(error=missing)
    assert (level, "/dev/nvidiactl" in text, "runtimeClassName: nvidia" in advice) == (
        Level.WRONG,
        True,
        True,
    )
