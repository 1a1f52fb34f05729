"""`podgpu doctor` about shared GPUs: how they would be told apart, what better needs, and the probe of the register."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from podgpu.cli.main import run
from podgpu.doctor.examine import Question, examine
from podgpu.doctor.findings import Finding, Level
from podgpu.doctor.probe import probe_switches
from podgpu.doctor.probe_load import NoLoad, ProbeLoad
from podgpu.gpu.nvml import NvmlTelemetry
from podgpu.gpu.nvml.switch_attribution import SwitchLogError
from podgpu.gpu.nvml.switch_log import ContextSwitchLog, select_layout
from podgpu.gpu.nvml.switch_splitter import SwitchListener, SwitchLog, SwitchLogFactory
from podgpu.model import Device, UsageMethod
from podgpu.simulate.driver import SimulatedNvml
from podgpu.simulate.workload import SimulatedLoad
from podgpu.workers import Workers

NO_HOST: dict[str, Any] = dict.fromkeys(("proc", "sysfs", "dev"), "/nowhere")
OK, NOTE, WRONG = Level.OK, Level.NOTE, Level.WRONG


class Bench:
    """A simulated machine on which nothing runs, and loads that the probe can start on it."""

    def __init__(
        self,
        spec: str = "1xH200",
        wanted: UsageMethod = "exact",
        *,
        privileged: bool = True,
        driver_version: str = "580.159.04",
        log: Callable[[SwitchLog], Any] = lambda log: log,
        open_log: Callable[[Device, str], SwitchLog] | None = None,
    ) -> None:
        self.time = 1000.0
        self.random = random.Random(3)
        self.listeners: list[SwitchListener] = []
        self.loads: list[Load] = []
        self.opened = 0
        self.driver = SimulatedNvml(
            spec, clock=lambda: self.time, wall=self.wall, unrest=0, driver_version=driver_version
        )
        self._log = log
        switch_logs = SwitchLogFactory(wanted, open_log or self.open_log, lambda: privileged, self.listen)
        self.telemetry = NvmlTelemetry(
            self.driver, "simulated", lambda: None, lambda: self.time, self.wall, switch_logs=switch_logs
        )

    def wall(self) -> float:
        return 1_700_000_000 + self.time

    def open_log(self, device: Device, version: str) -> SwitchLog:
        select_layout(version)
        self.opened += 1
        found: SwitchLog = self._log(self.driver.switch_log(device.uuid))
        return found

    def listen(self, *arguments: Any, **named: Any) -> SwitchListener:
        self.listeners.append(SwitchListener(*arguments, **named, clock=lambda: self.time, in_background=False))
        return self.listeners[-1]

    def pause(self, seconds: float) -> None:
        """Listeners do what is due at moments nobody foresees."""
        end = self.time + seconds
        while (step := self.random.uniform(0.025, 0.075)) < end - self.time:
            self.time += step
            for listener in self.listeners:
                listener.step()
        self.time = end

    def start_load(self, gpu: Device) -> Load:
        self.loads.append(Load(self, 500 + len(self.loads)))
        return self.loads[-1]

    def probe(self, start_load: Callable[[Device], Any] | None = None) -> list[Finding]:
        isolation = Workers()
        try:
            gpus = self.telemetry.inventory().gpus
            for gpu in gpus:
                self.telemetry.read(gpu, ())
            gpus = self.telemetry.inventory().gpus
            start = start_load or self.start_load
            return probe_switches(self.telemetry, gpus, start, isolation, 5.0, self.pause, self.wall)
        finally:
            isolation.close()

    def examine(self, **asked: Any) -> list[Finding]:
        question = Question(usage_from=self.telemetry.switch_logs.wanted, no_hostname=True, **NO_HOST, **asked)
        found = examine(question, self.telemetry, 5.0, self.pause)
        return [one for one in found if one.subject in ("sharing", "probe")]


class Load:
    def __init__(self, bench: Bench, pid: int) -> None:
        self._bench = bench
        self.pid = pid
        self.stopped = self._placed = False

    def work(self, busy_ms: float, period_ms: float) -> tuple[float, float]:
        self._remove()
        if period_ms:
            self._placed = True
            load = SimulatedLoad(0, self.pid, busy_ms / period_ms, period=period_ms / 1000, bursts=True)
            self._bench.driver.place(load)
        engines = self._bench.driver.machine.gpus[0].engines.values()
        return self._bench.time, sum(engine.worked.get(self.pid, 0) for engine in engines) / 1e9

    def stop(self) -> None:
        self.stopped = True
        self._remove()

    def _remove(self) -> None:
        if self._placed:
            self._bench.driver.remove(self.pid)
        self._placed = False


@pytest.fixture
def make() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make_bench(*arguments: Any, **named: Any) -> Bench:
        benches.append(Bench(*arguments, **named))
        return benches[-1]

    yield make_bench
    for bench in benches:
        bench.driver.faults.unload_driver()


def texts(findings: list[Finding], level: Level) -> str:
    return "\n".join(f"{one.text} → {one.advice}" for one in findings if one.level is level)


# How a shared GPU would be told apart


def test_samples_are_said_to_be_samples(make: Callable[..., Bench]) -> None:
    bench = make(wanted="samples")
    (one,) = bench.examine()
    assert (one.level, "each given whole to one process" in one.text) == (OK, True)
    assert not bench.opened, "the log is nobody's business then"


def test_exact_where_it_is_exact(make: Callable[..., Bench]) -> None:
    bench = make("2xH200")
    (one,) = bench.examine()
    assert (one.level, one.text) == (OK, "GPUs 0, 1: divided exactly, by context switches and busy samples")


@pytest.mark.fault(
    "--usage-from exact, and the container has no CAP_SYS_ADMIN",
    "shared GPUs are divided by context switches, with bounds; `podgpu doctor` says what is missing, and the remedy",
)
def test_the_capability_is_missing(make: Callable[..., Bench]) -> None:
    (one,) = make(privileged=False).examine()
    assert one.level is WRONG
    assert "CAP_SYS_ADMIN is missing" in one.text
    assert "exporter.usage.from: exact" in one.advice


def test_an_architecture_that_nobody_measured_can_be_probed(make: Callable[..., Bench]) -> None:
    found = make("1xH200,1xB200").examine()
    assert [one.level for one in found] == [OK, NOTE]
    assert found[1].text.startswith(
        "GPU 1: divided by context switches, with bounds and not exactly: the busy register"
    )
    assert "--probe-switches" in found[1].advice


def test_switches_without_the_capability_do_not_see_other_users(make: Callable[..., Bench]) -> None:
    (one,) = make(wanted="switches", privileged=False).examine()
    assert (one.level, "processes of another user" in one.text) == (NOTE, True)
    (one,) = make(wanted="switches").examine()
    assert one.level is OK


def test_a_driver_too_old(make: Callable[..., Bench]) -> None:
    (one,) = make(wanted="switches", driver_version="470.223.02").examine()
    assert one.level is WRONG
    assert "driver 470.223.02 has no readable context-switch log" in one.text
    assert "515" in one.advice


class WithoutNodes:
    """A container that the NVIDIA runtime gave no device nodes."""

    def open(self, path: str) -> int:
        raise FileNotFoundError(2, "No such file or directory", path)

    def ioctl(self, fd: int, request: int, buffer: bytearray) -> None:
        raise AssertionError("nothing is open")

    def map(self, fd: int, length: int) -> Any:
        raise AssertionError("nothing is open")

    def close(self, fd: int) -> None:
        raise AssertionError("nothing is open")


def test_a_device_node_is_missing(make: Callable[..., Bench]) -> None:
    bench = make(
        open_log=lambda gpu, version: ContextSwitchLog(gpu.pci_bus_id, 0, select_layout(version), WithoutNodes())
    )
    (one,) = bench.examine()
    assert one.level is WRONG
    assert "/dev/nvidiactl cannot be opened: No such file or directory" in one.text
    assert "runtimeClassName: nvidia" in one.advice


def test_a_gpu_that_mig_cuts_is_not_said_to_be_exact(make: Callable[..., Bench]) -> None:
    (one,) = make("1xH200/2x1g.18gb").examine()
    assert (one.level, "MIG" in one.text) == (NOTE, True)


# The probe


@pytest.mark.parametrize(
    ("spec", "row"),
    [
        ("1xH200", '9: Architecture("Hopper (NVIDIA H200)", lead_ns={lead})'),
        ("1xB200", '10: Architecture("Blackwell (NVIDIA B200)", lead_ns={lead})'),
    ],
)
def test_a_register_that_is_right(make: Callable[..., Bench], spec: str, row: str) -> None:
    bench = make(spec, wanted="samples")
    found = bench.probe()
    assert [one.level for one in found] == [OK, OK]
    assert "none lost" in found[0].text
    lead = int(found[1].text.rpartition("lead_ns=")[2].rstrip(")").replace("_", ""))
    assert lead == pytest.approx(64_000, abs=3_000), "what the simulated engine takes"
    assert row.format(lead=f"{lead:_}") in found[1].text
    assert ("known of it already" in found[1].text) == (spec == "1xH200")
    assert len(bench.loads) == 2
    assert all(load.stopped for load in bench.loads)


class Lying:
    def __init__(self, answer: Callable[[bool], bool], log: SwitchLog) -> None:
        self._answer, self._log = answer, log
        self.drain_seconds = log.drain_seconds
        self.now, self.close, self.drain = log.now, log.close, log.drain

    def is_busy(self) -> bool:
        return self._answer(self._log.is_busy())


@pytest.mark.parametrize("answer", [lambda _: True, lambda _: False], ids=["always busy", "never busy"])
def test_a_register_that_means_something_else(make: Callable[..., Bench], answer: Callable[[bool], bool]) -> None:
    bench = make("1xB200", log=lambda log: Lying(answer, log))
    found = bench.probe()
    assert [one.level for one in found] == [OK, WRONG]
    assert "not to be trusted: the busy bit is" in found[1].text
    assert "MEASURED" not in found[1].text
    assert all(load.stopped for load in bench.loads)


class Broken:
    def __init__(self, fault: str, log: SwitchLog) -> None:
        self._fault, self._log = fault, log
        self.drain_seconds = log.drain_seconds
        self.now, self.close = log.now, log.close

    def drain(self) -> bytes:
        data = self._log.drain()
        return data[32:] if self._fault == "sequence_gap" else data

    def is_busy(self) -> bool:
        if self._fault == "register_value":
            raise SwitchLogError("register_value", "the busy register answered 0xbadf5040")
        return self._log.is_busy()


@pytest.mark.parametrize("fault", ["sequence_gap", "register_value"])
def test_a_log_that_cannot_be_trusted(make: Callable[..., Bench], fault: str) -> None:
    bench = make(log=lambda log: Broken(fault, log))
    (one,) = bench.probe()
    assert one.level is WRONG
    assert f"({fault})" in one.text
    assert [load.stopped for load in bench.loads] == [True, True]


def test_loads_that_do_not_share_the_gpu_prove_nothing(make: Callable[..., Bench]) -> None:
    class Idle(Load):
        def work(self, busy_ms: float, period_ms: float) -> tuple[float, float]:
            return self._bench.time, 0.0

    bench = make()
    found = bench.probe(lambda gpu: Idle(bench, 500))
    assert "0 stays are too few" in texts(found, WRONG)


def test_without_the_capability_nothing_is_begun(make: Callable[..., Bench]) -> None:
    bench = make(privileged=False, wanted="samples")
    (one,) = bench.probe()
    assert (one.level, "CAP_SYS_ADMIN only" in one.text) == (WRONG, True)
    assert (bench.opened, bench.loads) == (0, [])


def test_a_gpu_that_is_in_use_is_not_disturbed(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.driver.place(SimulatedLoad(0, 77, 0.1))
    (one,) = bench.probe()
    assert (one.level, "in use" in one.text, "-d" in one.advice) == (WRONG, True, True)
    assert bench.loads == []


def test_a_gpu_that_mig_cuts_is_not_probed(make: Callable[..., Bench]) -> None:
    bench = make("1xH200/2x1g.18gb")
    (one,) = bench.probe()
    assert (one.level, bench.loads) == (NOTE, [])


def test_one_gpu_of_each_architecture_is_enough(make: Callable[..., Bench]) -> None:
    started: list[str] = []

    def none(gpu: Device) -> Load:
        started.append(gpu.model)
        raise NoLoad("No module named 'torch'")

    found = make("2xH200,1xB200").probe(none)
    assert started == ["NVIDIA H200", "NVIDIA B200"]
    assert "No module named 'torch'" in texts(found, WRONG)
    assert "PyTorch or cuda-python" in found[0].advice


def test_no_gpu_at_all(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.driver.faults.unload_driver()
    found = bench.examine(start_load=bench.start_load)
    assert texts(found, WRONG).startswith("there is no GPU to probe")


def test_the_command_asks_for_a_probe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["doctor", "--telemetry", "simulated:1xH200", "--probe-switches", "--path-proc", str(tmp_path)]
    assert run([*arguments, "--path-sysfs", str(tmp_path), "--path-varlog", str(tmp_path), "-d", "i"]) == 1
    assert "there is no GPU to probe" in capsys.readouterr().out


# The load itself, as a process of its own

FAKE_TORCH = """
import time
class cuda:
    is_available = staticmethod(lambda: {there})
    synchronize = staticmethod(lambda: None)
def ones(*_, device): return None
def empty_like(_): return None
def mm(*_, out): time.sleep(0.0001)
"""


@pytest.fixture
def with_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    def write(there: bool) -> None:
        (tmp_path / "torch.py").write_text(FAKE_TORCH.format(there=there))
        (tmp_path / "cuda.py").write_text("raise ImportError('no cuda-python here')")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return write


def test_the_load_does_what_it_is_told_and_says_how_long_it_worked(with_torch: Callable[[bool], None]) -> None:
    with_torch(True)
    load = ProbeLoad("GPU-x")
    try:
        assert load.work(1000, 1000)[1] == 0.0
        began, some = load.work(1000, 1000)
        ended, more = load.work(0, 0)
        assert 0 <= some <= more
        assert began <= ended
        assert load.work(0, 0)[1] == more, "it rests"
    finally:
        load.stop()
    with pytest.raises(NoLoad):
        load.work(1, 2)


@pytest.mark.fault(
    "podgpu doctor --probe-switches where neither PyTorch nor cuda-python is there",
    "it says which is missing and what to do, starts nothing, and exits with 1",
)
def test_what_is_missing_is_said(with_torch: Callable[[bool], None]) -> None:
    with_torch(False)
    with pytest.raises(NoLoad, match="PyTorch is here, but it finds no GPU; no cuda-python here"):
        ProbeLoad("GPU-x")
