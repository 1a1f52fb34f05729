"""`podgpu doctor --probe-switches` measures on the spot whether a GPU's busy register tells the truth.

Two loads of its own share an idle GPU: first in bursts, where the mean of the register's busy bit is compared with the
utilisation that NVML tells, then without a pause, where the time they were resident and did not work is what a switch
takes of every stay. The log is checked all the while. Nothing is changed but for the loads, which end with the probe.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from podgpu.doctor.findings import Finding, note, ok, plural, wrong
from podgpu.doctor.probe_load import NoLoad
from podgpu.doctor.sharing import ADD_CAPABILITY
from podgpu.gpu.nvml import NvmlTelemetry
from podgpu.gpu.nvml.switch_attribution import SwitchLogError
from podgpu.gpu.nvml.switch_splitter import MEASURED_ARCHITECTURES, Capability, SwitchListener
from podgpu.gpu.source import Telemetry
from podgpu.model import Device
from podgpu.workers import Workers

SUBJECT = "probe"
LOADS = 2
_RHYTHMS = ((40.0, 100.0), (10.0, 70.0))
"""Milliseconds of work and of the period, of each load: about half of the time, and never in step."""
_WITHOUT_PAUSE = (1.0, 1.0)
"""Each gives way to the other by itself: one that is stopped in the middle of its work takes longer to save."""
_REST = (0.0, 0.0)
_TURNS, _SATURATED_TURNS = 15, 5
"""Seconds of bursts and of work without a pause."""
_POINTS = 2.0
"""By how much the busy bit's mean and NVML's whole percents may differ beyond what chance does."""
_CHANCE = 3.0
"""Standard deviations."""
_MOST_UNKNOWN = 0.02
_LEAST_SWITCHES = 100
_LONGEST_LEAD_NS = 500_000
_PATIENCE = 300.0
_NAMES = {6: "Turing", 7: "Ampere", 8: "Ada", 9: "Hopper", 10: "Blackwell"}
_REPORT = "report this, with the GPU's model and the driver's version"


class Load(Protocol):
    pid: int

    def work(self, busy_ms: float, period_ms: float) -> tuple[float, float]:
        """Its rhythm from now on; answers a moment, and how many seconds it has worked until then. Raises NoLoad."""

    def stop(self) -> None: ...


StartLoad = Callable[[Device], Load]
"""Comes back when it is ready to work. Raises NoLoad."""


@dataclass(slots=True)
class Measured:
    """What was seen of one GPU."""

    nvml_busy_ns: int = 0
    nvml_window_ns: int = 0
    samples: list[bool] = field(default_factory=list)
    stays: int = 0
    window: int = 0
    switching: int = 0
    unknown: int = 0
    lead_ns: float | None = None

    @property
    def nvml_percent(self) -> float:
        return 100 * self.nvml_busy_ns / self.nvml_window_ns if self.nvml_window_ns else 0.0

    @property
    def bit_percent(self) -> float:
        return 100 * sum(self.samples) / len(self.samples) if self.samples else 0.0

    @property
    def tolerance(self) -> float:
        """Points by which two right figures may differ."""
        if not self.samples:
            return 0.0
        part = self.nvml_percent / 100
        return _POINTS + _CHANCE * 100 * math.sqrt(max(part * (1 - part), 0.01) / len(self.samples))


class Probe:
    """Of one GPU, while nobody else uses it."""

    def __init__(
        self,
        telemetry: NvmlTelemetry,
        start_load: StartLoad,
        pause: Callable[[float], object] = time.sleep,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._telemetry = telemetry
        self._opening = telemetry.switch_logs
        self._start_load = start_load
        self._pause = pause
        self._wall = wall

    def run(self, gpu: Device, outlook: Capability) -> list[Finding]:
        refused = self._refused(gpu, outlook)
        if refused is not None:
            return [refused]
        loads: list[Load] = []
        try:
            for _ in range(LOADS):
                loads.append(self._start_load(gpu))
            measured = self._measure(gpu, outlook, loads)
        except NoLoad as e:
            return [wrong(SUBJECT, f"GPU {gpu.index}: two loads are needed and cannot be made: {e}", _NEEDED)]
        except SwitchLogError as e:
            text = f"GPU {gpu.index}: the log or the register cannot be trusted here: {e} ({e.reason})"
            return [wrong(SUBJECT, text, _REPORT)]
        finally:
            for load in loads:
                load.stop()
        return judge(gpu, outlook, measured)

    def _refused(self, gpu: Device, outlook: Capability) -> Finding | None:
        if gpu.mig_enabled:
            return note(SUBJECT, f"GPU {gpu.index}: cut by MIG, which the probe cannot measure", "probe a whole GPU")
        if not outlook.privileged:
            text = f"GPU {gpu.index}: the busy register is read with CAP_SYS_ADMIN only, which this process has not"
            return wrong(SUBJECT, text, ADD_CAPABILITY)
        running = self._telemetry.processes(gpu)
        if running:
            text = f"GPU {gpu.index}: in use ({plural(len(running), 'pid')}), and the probe would disturb that"
            return wrong(SUBJECT, text, "name a GPU that nobody uses with -d")
        return None

    def _measure(self, gpu: Device, outlook: Capability, loads: Sequence[Load]) -> Measured:
        log = self._opening.open_log(gpu, outlook.driver_version)
        listener = self._opening.make_listener(log, sampled=True, lead=0, wall=self._wall)
        try:
            found = Measured()
            for load, rhythm in zip(loads, _RHYTHMS, strict=True):
                load.work(*rhythm)
            self._settle(gpu, listener)
            for _ in range(_TURNS):
                self._take(gpu, listener, found)
            found.lead_ns = self._lead(listener, loads)
            return found
        finally:
            listener.close()

    def _settle(self, gpu: Device, listener: SwitchListener) -> None:
        """The first second is not looked at: nobody knows yet who is resident."""
        self._pause(1.0)
        self._telemetry.usage(gpu)
        listener.take_window(self._wall())

    def _take(self, gpu: Device, listener: SwitchListener, found: Measured) -> None:
        self._pause(1.0)
        usage = self._telemetry.usage(gpu)[0]
        if usage.busy_ns is not None:
            found.nvml_busy_ns += usage.busy_ns
            found.nvml_window_ns += usage.window_ns
        residency, samples = listener.take_window(self._wall())
        found.samples += [busy for _, busy in samples]
        found.stays += len(residency.stays)
        found.window += residency.window
        found.switching += residency.switching
        found.unknown += residency.unknown

    def _lead(self, listener: SwitchListener, loads: Sequence[Load]) -> float | None:
        """Nanoseconds of every stay in which nothing is worked on."""
        for load in loads:
            load.work(*_WITHOUT_PAUSE)
        self._pause(1.0)
        before = [load.work(*_WITHOUT_PAUSE) for load in loads]
        listener.take_window(self._wall())
        resident = stays = window = 0
        for _ in range(_SATURATED_TURNS):
            self._pause(1.0)
            residency, _ = listener.take_window(self._wall())
            resident += sum(residency.sum_by_process().values())
            stays += len(residency.stays)
            window += residency.window
        after = [load.work(*_REST) for load in loads]
        part = sum((b[1] - a[1]) / (b[0] - a[0]) for a, b in zip(before, after, strict=True) if b[0] > a[0])
        return (resident - part * window) / stays if stays >= _LEAST_SWITCHES else None


_NEEDED = (
    "run it where PyTorch or cuda-python is installed beside podgpu, with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
)


def judge(gpu: Device, outlook: Capability, found: Measured) -> list[Finding]:
    """What was seen, the verdict, and the row for `MEASURED_ARCHITECTURES`."""
    off = abs(found.bit_percent - found.nvml_percent)
    seen = (
        f"GPU {gpu.index}: {found.stays} stays in {found.window / 1e9:.1f} s, none lost; a switch takes"
        f" {found.switching / max(1, found.stays) / 1e3:.0f} µs; busy bit {found.bit_percent:.1f} % in"
        f" {len(found.samples)} samples, NVML {found.nvml_percent:.1f} %"
    )
    faults = []
    if off > found.tolerance or not found.samples:
        faults.append(f"the busy bit is {off:.1f} points off (chance allows {found.tolerance:.1f})")
    if found.stays < _LEAST_SWITCHES:
        faults.append(f"{found.stays} stays are too few: the loads did not share the GPU")
    if found.unknown > _MOST_UNKNOWN * found.window:
        faults.append(f"{100 * found.unknown / max(1, found.window):.0f} % of the time nobody is said to be resident")
    if found.lead_ns is None or not 0 <= found.lead_ns <= _LONGEST_LEAD_NS:
        said = "not seen" if found.lead_ns is None else f"{found.lead_ns / 1e3:.0f} µs"
        faults.append(f"what a stay begins with before any work is not known ({said})")
    if faults:
        return [ok(SUBJECT, seen), wrong(SUBJECT, f"GPU {gpu.index}: not to be trusted: {'; '.join(faults)}", _REPORT)]
    known = "" if outlook.architecture not in MEASURED_ARCHITECTURES else ", as is known of it already"
    return [
        ok(SUBJECT, seen),
        ok(SUBJECT, f"GPU {gpu.index}: the busy register is right{known}; {_row(gpu, found, outlook)}"),
    ]


def _row(gpu: Device, found: Measured, outlook: Capability) -> str:
    name = _NAMES.get(outlook.architecture or 0, "?")
    lead = round((found.lead_ns or 0) / 1000) * 1000
    return f'its row: {outlook.architecture}: Architecture("{name} ({gpu.model})", lead_ns={lead:_})'


def probe_switches(
    telemetry: Telemetry,
    gpus: Sequence[Device],
    start_load: StartLoad,
    isolation: Workers,
    deadline: float,
    pause: Callable[[float], object] = time.sleep,
    wall: Callable[[], float] = time.time,
) -> list[Finding]:
    """One GPU of every architecture, one after the other."""
    if not isinstance(telemetry, NvmlTelemetry):
        return [wrong(SUBJECT, "--probe-switches needs the driver itself", "say --telemetry nvml")]
    if not gpus:
        return [wrong(SUBJECT, "there is no GPU to probe")]
    findings: list[Finding] = []
    done: set[int | None] = set()
    for gpu in gpus:
        known = isolation.run({"outlook": partial(telemetry.check_capability, gpu)}, deadline)["outlook"]
        if known.value is None:
            findings.append(wrong(SUBJECT, f"GPU {gpu.index}: {known.error}"))
        elif known.value.architecture not in done:
            done.add(known.value.architecture)
            probe = Probe(telemetry, start_load, pause, wall)
            result = isolation.run({"probe": partial(probe.run, gpu, known.value)}, _PATIENCE)["probe"]
            findings += result.value or [wrong(SUBJECT, f"GPU {gpu.index}: {result.error}")]
    return findings
