"""Devices with figures of a moment, a clock moved by hand, and a process that keeps history."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from podgpu.clock import Clock
from podgpu.figures.device import Condition, DeviceFigures, HolderFigures
from podgpu.history.answering import RingHistory
from podgpu.history.asking import JSON, RANGES
from podgpu.history.keeper import Keeper
from podgpu.history.ring import Told
from podgpu.history.rows import Key
from podgpu.model import Workload

NOON = 1_794_744_000.0
MIB = 1024 * 1024


@dataclass
class HandClock:
    """`now` goes on by `pass_`, the wall clock is besides set by `jump`."""

    now: float = 1000.0
    unix: float = NOON
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = Clock(lambda: self.now, lambda: self.unix)

    def pass_(self, seconds: float) -> None:
        self.now += seconds
        self.unix += seconds

    def jump(self, seconds: float) -> None:
        self.unix += seconds


def pod(name: str, namespace: str = "research", container: str = "main") -> Workload:
    return Workload(namespace, name, container)


def holder(workload: Workload, utilization: float | None = None, memory: int | None = None) -> HolderFigures:
    return HolderFigures(workload, utilization, memory)


def gpu(
    number: int = 0,
    utilization: float | None = 0.5,
    *holders: HolderFigures,
    instance: str = "",
    conditions: tuple[Condition, ...] = (),
    memory: int | None = 1024 * MIB,
    watts: float | None = 300.0,
    temperature: float | None = 55.0,
    node: str = "node-1",
) -> DeviceFigures:
    return DeviceFigures(
        uuid=f"GPU-{number}",
        index=number,
        node=node,
        instance=instance,
        utilization=utilization,
        memory_used=memory,
        power_watts=watts,
        temperature=temperature,
        holders=holders,
        conditions=conditions,
    )


def wrong(name: str = "xid", since: float | None = None, says: str = "XID 79") -> Condition:
    return Condition(name, since, says, "reset it")


class Run:
    """One life of a process that keeps history; it ends without saying so."""

    def __init__(self, directory: Path, hand: HandClock) -> None:
        self.hand = hand
        self._now: list[Told] = []
        self.keeper = Keeper(lambda: self._now, hand.clock, str(directory))
        self.keeper.write()

    def tell(self, *devices: DeviceFigures, times: int = 1, pause: float = 15) -> None:
        for _ in range(times):
            self.hand.pass_(pause)
            self._now = [Told(devices)]
            self.keeper.take()
            self.keeper.write()

    def gpu(self, number: int = 0, asked: str = "1h") -> JSON | None:
        return RingHistory(self.keeper.ring, self.keeper.clock).gpu_now(Key(f"GPU-{number}"), RANGES[asked])

    def pod(self, name: str, asked: str = "1h") -> JSON | None:
        return RingHistory(self.keeper.ring, self.keeper.clock).pod_now("research", name, RANGES[asked])

    def line(self, number: int = 0, asked: str = "1h") -> list[float | None]:
        found = self.gpu(number, asked)
        assert found is not None
        values: list[float | None] = found["series"]["utilization_ratio"]
        return values

    def dies(self) -> None:
        """What the kernel does for a process that is killed: its locks go with it."""
        self.keeper.stop()


def fill(disk: Path) -> Path:
    """A file that takes all there is left of it."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            return ballast
