"""Simulated GPUs that are scraped over real HTTP after every turn. Every scrape is checked."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from podgpu.labs.simulate.gpu import SimulatedLoad
from podgpu.metrics.counters import parse_counters
from podgpu.metrics.labels import Policy
from podgpu.model import Allocation, Assignment, Device, Workload
from podgpu.node.agent.agent import Settings
from podgpu.node.holders.identity import Identities
from tests.agent.simulated_node import SimulatedNode
from tests.nodes.clock import wait_until
from tests.simulated import FaultyNvml, FaultyProc, container_cgroup
from tests.web.server import Client, running

COUNTERS = parse_counters(
    "DCGM_FI_DEV_GPU_TEMP,gauge,t\nDCGM_FI_DEV_POWER_USAGE,gauge,w\nDCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION,counter,e\n"
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE,gauge,a\nDCGM_EXP_XID_ERRORS_COUNT,gauge,n\nDCGM_EXP_CLOCK_EVENTS_COUNT,gauge,c\n",
    "bench",
)
GIB = 1024**3
UID = "9f1f4ffc-0b8c-4d53-9b1e-6b2d0f9b8a1{}"
_SERIES = re.compile(r"^(\w+)\{(.*)\} (\S+)", re.MULTILINE)


class PodPerGpu:
    """A source in which pod `p0` holds GPU 0, `p1` holds GPU 1, and so on."""

    name = "kubelet"

    def __init__(self) -> None:
        self.crowds: dict[int, int] = {}
        """Number of holders by GPU. The default is 1."""
        self.offered: frozenset[str] = frozenset()

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        held = [d for d in devices if not d.is_instance]
        assignments = tuple(one for device in held for one in self._holders(device))
        return Allocation(assignments, offered=self.offered)

    def _holders(self, device: Device) -> Iterator[Assignment]:
        number = device.minor or 0
        crowd = self.crowds.get(number, 1)
        if crowd == 1:
            yield Assignment(device.uuid, holder(number), "kubelet", share=1.0)
            return
        for n in range(crowd):
            yield Assignment(
                device.uuid,
                Workload("ns", f"crowd-{n}", "main", f"u-{n}"),
                "kubelet",
                share=1 / crowd,
            )


def holder(number: int) -> Workload:
    return Workload("ns", f"p{number}", "main", UID.format(number), f"{number:x}" * 64)


NAMES = Identities(current=frozenset(holder(number) for number in range(8)))


class GpuBench(SimulatedNode):
    """H100s that are busy half of the time, with one pod on each. Deadlines are two seconds of real
    time (-c 2000).
    """

    def __init__(self, folder: Path, gpus: str) -> None:
        proc = FaultyProc(folder / "proc")
        self._holders = PodPerGpu()
        settings = Settings(interval=2.0, policy=Policy(counters=COUNTERS, hostname="h"))
        self.names = NAMES
        super().__init__(
            gpus, settings, sources=[self._holders], proc=proc, identities=lambda: self.names
        )
        for gpu in self.driver.gpus:
            proc.add(
                41 + gpu.number, container_cgroup(UID.format(gpu.number), f"{gpu.number:x}" * 64)
            )
            if not gpu.mig_enabled:
                self.driver.place(SimulatedLoad(gpu.number, 41 + gpu.number, duty=0.5, memory=GIB))
        self.client: Client
        self.scraped = ""
        self._highest: dict[str, float] = {}
        self._energy: dict[int, tuple[int, float]] = {}

    def crowd(self, gpu: int, holders: int) -> None:
        self._holders.crowds[gpu] = holders

    def offer(self, *gpus: int) -> None:
        """Sets the GPUs that the kubelet gives to new pods."""
        self._holders.offered = frozenset(map(self.uuid, gpus))

    def leap(self, seconds: float) -> None:
        """Moves the wall clock and the driver's timestamps."""
        self.leapt += seconds
        for gpu in self.driver.gpus:
            gpu.epoch += seconds

    def turn(self, *well: int, seconds: float = 1.0) -> str:  # type: ignore[override]
        """Runs the three loops once and scrapes. Checks all counters, and the values of the GPUs in
        `well`.
        """
        super().turn(seconds)
        self.scrape()
        self._check_counters()
        for number in well:
            self._check_device(number)
        return self.scraped

    def turns(self, seconds: int, *well: int) -> None:
        """Runs a turn every 5 s for `seconds`."""
        for _ in range(seconds // 5):
            self.turn(*well, seconds=5.0)

    def scrape(self) -> str:
        self.scraped = self.client.ask("/metrics").text
        return self.scraped

    def value(self, name: str, gpu: int, *labels: str) -> float | None:
        wanted = (f'UUID="{self.uuid(gpu)}"', *labels)
        lines = _families(self.scraped).get(name, ())
        found = [float(value) for pairs, value in lines if all(label in pairs for label in wanted)]
        assert len(found) <= 1, f"{name} of GPU {gpu} has {len(found)} series"
        return found[0] if found else None

    def shown(self, gpu: int) -> bool:
        return self.value("DCGM_FI_DEV_GPU_TEMP", gpu) is not None

    def energy_error(self, gpu: int) -> float:
        """Returns podgpu's energy minus the driver's energy in joules, both since the first call of
        this method.
        """
        told = self.value("podgpu_device_energy_joules_total", gpu)
        assert told is not None
        counted = self.driver.gpu(gpu).energy_mj
        first = self._energy.setdefault(gpu, (counted, told))
        return told - first[1] - (counted - first[0]) / 1000

    def _check_device(self, number: int) -> None:
        gpu = self.driver.gpu(number)
        assert self.value("DCGM_FI_DEV_POWER_USAGE", number) == gpu.milliwatts / 1000
        assert self.value("DCGM_FI_DEV_GPU_TEMP", number) == round(gpu.celsius)
        assert self.value("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", number) == gpu.energy_mj
        assert self.value("DCGM_FI_PROF_GR_ENGINE_ACTIVE", number) is not None
        assert -6_000 < self.energy_error(number) < 0.002, "podgpu's energy lags by at most 5 s"

    def _check_counters(self) -> None:
        """Checks that no counter is below its highest value in earlier scrapes, even if it was
        absent in between.
        """
        for family, lines in _families(self.scraped).items():
            for pairs, value in lines if family.endswith("_total") else ():
                series = f"{family}{{{pairs}}}"
                assert float(value) >= self._highest.get(series, 0.0), series
                self._highest[series] = float(value)


@lru_cache(maxsize=2)  # one exposition is searched about a dozen times
def _families(exposition: str) -> dict[str, list[tuple[str, str]]]:
    """Returns the labels and the value of each series, by metric name."""
    found: dict[str, list[tuple[str, str]]] = {}
    for family, pairs, value in _SERIES.findall(exposition):
        found.setdefault(family, []).append((pairs, value))
    return found


@contextmanager
def bench_of(
    folder: Path,
    gpus: str,
    *well: int,
    before: Callable[[FaultyNvml], object] = lambda faults: None,
) -> Iterator[GpuBench]:
    """Yields a bench after two readings, when rates are available. Checks that no thread and no
    open file is left.

    `before` injects faults before the start.
    """
    threads, files = set(threading.enumerate()), _open_files()
    bench = GpuBench(folder, gpus)
    before(bench.faults)
    with running(bench.agent) as bench.client:
        try:
            bench.turn()
            bench.turn(*well)
            yield bench
        finally:
            bench.stop()
    wait_until(lambda: set(threading.enumerate()) <= threads, "all threads have ended")
    wait_until(lambda: _open_files() <= files, "all files are closed")


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
