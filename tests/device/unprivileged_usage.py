"""Compares ways to divide a shared GPU without CAP_SYS_ADMIN. Takes less than four minutes:

    python tests/device/unprivileged_usage.py [OUTPUT_DIRECTORY [WORD…]]

`switches` divides the busy time of each second by a fixed rule. The candidate learns how much each
process works after a switch-in, from the busy time of many short windows: those of the driver's
samples (about 200 ms), or those of GPM with random lengths. A process without any capability
records the log, the samples and GPM. All figures are compared with the busy time that the loads
recorded, and with the exporters `switches` (as it is) and `exact`. Writes the recordings to
OUTPUT_DIRECTORY.

With WORDs such as `random`, runs only scenarios whose names contain one of them. Needs root, one
Hopper GPU, cgroup v2, setpriv and PyTorch.
"""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pynvml
from shared_gpu import BUSY, Burst, SharedGpu, exposition, value

from podgpu.node.gpu.nvml.switch_attribution import (
    RecordDecoder,
    Residency,
    SwitchCosts,
    Timeline,
    estimate_without_samples,
)
from podgpu.node.gpu.nvml.switch_log import ContextSwitchLog, check_driver

METHODS = ("switches", "exact")
SECONDS = 36.0
WARM_UP_SECONDS = 8.0
SCENARIOS: dict[str, list[Burst]] = {
    "40/10/10 of 100, random pauses, cool": [(40, 100), (10, 100), (10, 100)],
    "500/1000, 250/1100, 100/1300, cool": [(500, 1000), (250, 1100), (100, 1300)],
    "0.5/5, 1/20, 20/100, cool": [(0.5, 5), (1, 20), (20, 100)],
    "37/97, 11/113, 7/131, cool": [(37, 97), (11, 113), (7, 131)],
}
COSTS = SwitchCosts(lead=64_000, slice_work=2_055_000)
NO_CAPABILITIES = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
SHIFTS_MS = (-200, -100, -50, 0, 50, 100, 200)
_GRAPHICS_UTIL = 1


class Window(NamedTuple):
    """A short time, in nanoseconds of the GPU's clock, and the fraction in which it was busy."""

    since: int
    until: int
    busy: float


# The recording, without any capability


def record(path: Path, seconds: float) -> None:
    """Writes the log, the driver's samples and GPM's windows of this time."""
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    check_driver(pynvml.nvmlSystemGetDriverVersion())
    capabilities = next(
        line.split()[1]
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("CapEff:")
    )
    records = bytearray()
    clocks: list[tuple[float, float, int]] = []
    samples: dict[int, int] = {}
    gpm: list[tuple[float, float]] = []
    gpm_cpu = 0.0
    older = pynvml.nvmlGpmSampleAlloc()
    newer = pynvml.nvmlGpmSampleAlloc()
    problem = ""
    with closing(ContextSwitchLog(pynvml.nvmlDeviceGetPciInfo(gpu).busId, 0)) as log:
        end = time.monotonic() + seconds
        since = int(time.time() * 1e6)
        drained_at = 0.0
        while time.monotonic() < end:
            before = time.thread_time()
            try:
                at = time.monotonic()
                pynvml.nvmlGpmSampleGet(gpu, newer)
                at = (at + time.monotonic()) / 2
                percent = _mean_of(older, newer) if gpm else 0.0
                gpm.append((at, percent))
                older, newer = newer, older
            except pynvml.NVMLError as error:
                problem = str(error)
            gpm_cpu += time.thread_time() - before
            if time.monotonic() - drained_at > 0.9:
                drained_at = time.monotonic()
                monotonic, wall = time.monotonic(), time.time()
                clocks.append((monotonic, wall, log.now()))
                records += log.drain()
                for sample in _read_samples(gpu, since):
                    samples[sample.timeStamp] = sample.sampleValue.uiVal
            time.sleep(random.uniform(0.105, 0.215))
        clocks.append((time.monotonic(), time.time(), log.now()))
        records += log.drain()
    facts = {
        "capabilities": capabilities,
        "clocks": clocks,
        "samples": sorted(samples.items()),
        "gpm": gpm,
        "gpm_problem": problem,
        "gpm_cpu_percent": 100 * gpm_cpu / seconds,
    }
    path.with_suffix(".json").write_text(json.dumps(facts))
    path.with_suffix(".bin.gz").write_bytes(gzip.compress(bytes(records)))


def _mean_of(older: Any, newer: Any) -> float:
    request = pynvml.c_nvmlGpmMetricsGet_t()
    request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics = 1
    request.sample1 = older
    request.sample2 = newer
    request.metrics[0].metricId = _GRAPHICS_UTIL
    pynvml.nvmlGpmMetricsGet(request)
    if request.metrics[0].nvmlReturn:
        raise pynvml.NVMLError(request.metrics[0].nvmlReturn)
    return float(request.metrics[0].value)


def _read_samples(gpu: Any, since: int) -> list[Any]:
    try:
        _, samples = pynvml.nvmlDeviceGetSamples(gpu, pynvml.NVML_GPU_UTILIZATION_SAMPLES, since)
    except pynvml.NVMLError:
        return []
    return [sample for sample in samples if sample.timeStamp > since]


# The candidate

_EDGES = [0] + [250_000 * 2**step for step in range(11)]
"""Lower bounds of the age classes: time since the switch-in, from 0.25 to 256 ms."""
_KEPT_WINDOWS = 400
_STEP = 0.5
_DAMPING_NS = 2_000_000
_Cell = tuple[int, int]  # pid, and class of the age


def iterate_cells(
    residency: Residency, level: float = float("inf")
) -> Iterator[tuple[_Cell, float]]:
    """Yields the resident time in each age class. Counts at most `level` of each period."""
    for pid, began, since, until in residency.periods:
        age = float(since - began)
        end = min(float(until - began), age + level)
        place = bisect_right(_EDGES, age) - 1
        while age < end:
            edge = _EDGES[place + 1] if place + 1 < len(_EDGES) else float("inf")
            following = min(end, edge)
            yield (pid, place), following - age
            age = following
            place += 1


@dataclass
class ShortWindowModel:
    """Learns the busy share of each process by its time since the switch-in.

    The shares must explain the busy time of the last windows. They begin with the rule of
    `switches`: each period begins with the same time of work. Each window then moves the shares of
    its processes, until the sum is its busy time (Kaczmarz's method).
    """

    shares: dict[_Cell, float] = field(default_factory=dict)
    windows: deque[tuple[dict[_Cell, float], float]] = field(
        default_factory=lambda: deque(maxlen=_KEPT_WINDOWS)
    )
    resident: defaultdict[_Cell, float] = field(default_factory=lambda: defaultdict(float))
    squares: float = 0.0  # of the last sweep, in milliseconds

    def add(self, residency: Residency, busy: int) -> dict[int, int]:
        """Returns the busy time of each process in this window, and learns from it later."""
        resident: defaultdict[_Cell, float] = defaultdict(float)
        for cell, ns in iterate_cells(residency):
            resident[cell] += ns
        if not resident:
            return {}
        self._begin_new(residency, resident, busy)
        for cell, ns in resident.items():
            self.resident[cell] += ns
        self.windows.append((dict(resident), float(busy)))
        return self._fit(resident, busy)

    def _begin_new(self, residency: Residency, resident: dict[_Cell, float], busy: int) -> None:
        new = resident.keys() - self.shares.keys()
        if not new:
            return
        worked: defaultdict[_Cell, float] = defaultdict(float)
        for cell, ns in iterate_cells(residency, _find_level(residency, busy)):
            worked[cell] += ns
        for cell in new:
            self.shares[cell] = worked[cell] / resident[cell]

    def learn(self, sweeps: int = 2) -> None:
        for _ in range(sweeps):
            order = list(self.windows)
            random.shuffle(order)
            self.squares = 0.0
            for resident, busy in order:
                self._learn_from(resident, busy)
            self.squares /= max(1, len(order))
        self._smooth()

    def _learn_from(self, resident: dict[_Cell, float], busy: float) -> None:
        gap = busy - sum(ns * self.shares[cell] for cell, ns in resident.items())
        self.squares += (gap / 1e6) ** 2
        weight = sum(ns * ns for ns in resident.values()) + len(resident) * _DAMPING_NS**2
        step = _STEP * gap / weight
        for cell, ns in resident.items():
            self.shares[cell] = min(1.0, max(0.0, self.shares[cell] + step * ns))

    def _smooth(self) -> None:
        """A process works first and is idle later, so an increase of its shares is noise."""
        for pid in {pid for pid, _ in self.shares}:
            levels: list[tuple[float, float, list[_Cell]]] = []
            for cell in sorted(cell for cell in self.shares if cell[0] == pid):
                share, weight, cells = self.shares[cell], self.resident[cell] + 1.0, [cell]
                while levels and levels[-1][0] < share:
                    before, weight_before, cells_before = levels.pop()
                    total = weight_before + weight
                    share = (before * weight_before + share * weight) / total
                    weight = total
                    cells = cells_before + cells
                levels.append((share, weight, cells))
            for share, _, cells in levels:
                self.shares.update(dict.fromkeys(cells, share))

    def _fit(self, resident: dict[_Cell, float], busy: int) -> dict[int, int]:
        """Moves the estimates until their sum is the busy time, uncertain ones most."""
        busy_by_pid: defaultdict[int, float] = defaultdict(float)
        doubt: defaultdict[int, float] = defaultdict(float)
        most: defaultdict[int, float] = defaultdict(float)
        for (pid, place), ns in resident.items():
            share = self.shares[pid, place]
            busy_by_pid[pid] += ns * share
            doubt[pid] += ns * (share * (1 - share) + 0.01)
            most[pid] += ns
        gap = busy - sum(busy_by_pid.values())
        total = sum(doubt.values())
        return {
            pid: int(min(most[pid], max(0.0, ns + gap * doubt[pid] / total)))
            for pid, ns in busy_by_pid.items()
        }


def _find_level(residency: Residency, busy: int) -> float:
    low, high = 0.0, float(residency.window)
    for _ in range(40):
        level = (low + high) / 2
        if residency.measure_up_to(level) < busy:
            low = level
        else:
            high = level
    return low


# The comparison


@dataclass
class Recording:
    """What a process without capabilities recorded, in nanoseconds of the GPU's clock."""

    facts: dict[str, Any]
    switches: bytes

    def to_gpu(self, column: int, moment: float) -> int:
        """Converts a monotonic time (column 0) or a Unix time (column 1)."""
        nearest = min(self.facts["clocks"], key=lambda one: abs(one[column] - moment))
        return int(nearest[2] + (moment - nearest[column]) * 1e9)

    def sample_windows(self, shift_ms: int = 0) -> list[Window]:
        """The driver's samples. `shift_ms`: how much later their windows are than their times."""
        samples = self.facts["samples"]
        windows = []
        for (before, _), (at, percent) in pairwise(samples):
            since = self.to_gpu(1, before / 1e6) + shift_ms * 1_000_000
            until = self.to_gpu(1, at / 1e6) + shift_ms * 1_000_000
            windows.append(Window(since, until, percent / 100))
        return windows

    def gpm_windows(self) -> list[Window]:
        gpm = self.facts["gpm"]
        windows = []
        for (before, _), (at, percent) in pairwise(gpm):
            windows.append(Window(self.to_gpu(0, before), self.to_gpu(0, at), percent / 100))
        return windows


def seconds_of(windows: Sequence[Window]) -> list[Window]:
    """Combines short windows to those of about one second, as the exporter reads them."""
    combined = []
    for place in range(0, len(windows), 5):
        part = windows[place : place + 5]
        length = part[-1].until - part[0].since
        busy = sum(one.busy * (one.until - one.since) for one in part)
        combined.append(Window(part[0].since, part[-1].until, busy / length))
    return combined


def divide(
    recording: Recording,
    windows: Sequence[Window],
    counted: tuple[int, int],
    estimate: Callable[[Residency, int], dict[int, int]],
) -> dict[int, float]:
    """Returns the busy time of each pid in % of the counted time."""
    ((_, _, times, pids),) = RecordDecoder().decode(recording.switches)
    timeline = Timeline(windows[0].since, COSTS)
    timeline.add(times, pids)
    worked: defaultdict[int, float] = defaultdict(float)
    length = 0
    for window in windows:
        residency = timeline.take_window(window.until)
        busy = max(0, int(window.busy * (window.until - window.since)) - residency.switching)
        figures = estimate(residency, busy)
        if counted[0] <= window.since and window.until <= counted[1]:
            length += window.until - window.since
            for pid, ns in figures.items():
                worked[pid] += ns
    return {pid: 100 * ns / max(1, length) for pid, ns in worked.items()}


def learn_and_divide(
    recording: Recording, windows: Sequence[Window], counted: tuple[int, int]
) -> tuple[dict[int, float], float]:
    """Returns the busy time by pid, and the mean error of a window in milliseconds."""
    random.seed(1)
    model = ShortWindowModel()
    learnt_at = 0

    def estimate(residency: Residency, busy: int) -> dict[int, int]:
        nonlocal learnt_at
        figures = model.add(residency, busy)
        if residency.until - learnt_at > 1e9:
            learnt_at = residency.until
            model.learn()
        return figures

    return divide(recording, windows, counted, estimate), model.squares**0.5


def compare(bench: SharedGpu, name: str, bursts: list[Burst], path: Path) -> dict[str, Any]:
    options = [word for word in ("random", "cool") if word in name]
    with bench.loads(bursts, *options) as tenants, bench.exporters(tenants, METHODS):
        command = [*NO_CAPABILITIES, sys.executable, __file__, "record", str(path), str(SECONDS)]
        recorder = subprocess.Popen(command)
        time.sleep(WARM_UP_SECONDS)
        texts = {method: exposition(method) for method in METHODS}
        began = time.monotonic()
        recorder.wait(SECONDS + 30)
        ended = time.monotonic()
        after = {method: exposition(method) for method in METHODS}
        time.sleep(1.2)  # the loads write twice a second
        truth = [100 * one.worked(began, ended) / (ended - began) for one in tenants]
    bench.check(f"{name}: recorded", recorder.returncode == 0)
    if recorder.returncode:
        return {"scenario": name}
    facts = json.loads(path.with_suffix(".json").read_text())
    recording = Recording(facts, gzip.decompress(path.with_suffix(".bin.gz").read_bytes()))
    counted = recording.to_gpu(0, began), recording.to_gpu(0, ended)
    pids = [one.process.pid for one in tenants if one.process]

    rows: dict[str, list[float]] = {"recorded": truth}
    for method in METHODS:
        rows[f"exporter {method}"] = [
            100
            * (value(after[method], BUSY, one.pod) - value(texts[method], BUSY, one.pod))
            / (ended - began)
            for one in tenants
        ]
    short = recording.sample_windows()
    found = divide(recording, seconds_of(short), counted, estimate_without_samples)
    rows["1 s, fixed rule (old)"] = [found.get(pid, 0.0) for pid in pids]
    found = divide(recording, short, counted, estimate_without_samples)
    rows["samples, fixed rule"] = [found.get(pid, 0.0) for pid in pids]
    for shift in SHIFTS_MS:
        windows = recording.sample_windows(shift)[2:-2]
        found, error = learn_and_divide(recording, windows, counted)
        rows[f"samples {shift:+d} ms, learnt (new), windows off {error:.1f} ms"] = [
            found.get(pid, 0.0) for pid in pids
        ]
    gpm = recording.gpm_windows()[1:]
    if len(gpm) > 10:
        found, error = learn_and_divide(recording, gpm, counted)
        rows[f"GPM, learnt (new), windows off {error:.1f} ms"] = [
            found.get(pid, 0.0) for pid in pids
        ]
    print(f"\n{name}: {len(recording.switches) // 32} records, capabilities "
          f"{facts['capabilities']}, GPM {len(gpm)} windows, {facts['gpm_cpu_percent']:.2f} % CPU "
          f"{facts['gpm_problem']}")  # fmt: skip
    for label, figures in rows.items():
        worst = max(abs(one - other) for one, other in zip(figures, truth, strict=True))
        print(f"  {' / '.join(f'{one:5.1f}' for one in figures)}   {worst:4.1f} off   {label}")
    return {"scenario": name, "pids": pids, "counted": counted, **rows}


def main() -> int:
    if sys.argv[1:2] == ["record"]:
        record(Path(sys.argv[2]), float(sys.argv[3]))
        return 0
    out = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    words = sys.argv[2:]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        bench = SharedGpu(Path(folder))
        for number, (name, bursts) in enumerate(SCENARIOS.items()):
            if not words or any(word in name for word in words):
                results.append(compare(bench, name, bursts, out / f"unprivileged-{number}"))
                (out / "unprivileged.json").write_text(json.dumps(results, indent=1))
    return bench.report()


if __name__ == "__main__":
    sys.exit(main())
