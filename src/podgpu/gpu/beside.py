"""DriverBeside completes a feed by what it does not say (minors, MIG UUIDs, processes), if a driver answers here.

A driver that is missing or hangs costs the feed nothing: a thread of its own asks it, and is waited for briefly.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from podgpu.errors import SourceError, StartError, Unsupported
from podgpu.gpu.source import Telemetry, UsageFlaws
from podgpu.model import Device, DeviceUsage, ProcessUsage

_WAIT_SECONDS = 0.5


class DriverBeside:
    def __init__(self, driver: Telemetry | None) -> None:
        self._driver = driver
        self._known: Mapping[str, Device] = {}
        self._gpus: frozenset[str] = frozenset()
        self._look: threading.Thread | None = None

    def complete(self, devices: Iterable[Device]) -> tuple[Device, ...]:
        """The devices with what the driver knows of them."""
        self._look_again()
        return tuple(self._completed(device) for device in devices)

    def _completed(self, device: Device) -> Device:
        known = self._known.get(device.key)
        if known is None:
            return device
        return replace(
            device,
            minor=known.minor,
            pci_bus_id=device.pci_bus_id or known.pci_bus_id,
            model=device.model or known.model,
            mig_uuids=known.mig_uuids or device.mig_uuids,
        )

    def _look_again(self) -> None:
        """One look at a time: while one hangs, what was last known stands."""
        if self._driver is None or (self._look is not None and self._look.is_alive()):
            return
        self._look = threading.Thread(target=self._learn, args=(self._driver,), name="driver-beside", daemon=True)
        self._look.start()
        self._look.join(_WAIT_SECONDS)

    def _learn(self, driver: Telemetry) -> None:
        known: dict[str, Device] = {}
        gpus: tuple[Device, ...] = ()
        with suppress(SourceError, StartError):
            gpus = driver.inventory().gpus
        for gpu in gpus:
            with suppress(SourceError):
                known |= {reading.device.key: reading.device for reading in driver.read(gpu, ()).readings}
        self._known, self._gpus = known, frozenset(gpu.uuid for gpu in gpus)

    # Use

    def processes(self, gpu: Device) -> Sequence[ProcessUsage]:
        with self._asking(gpu) as driver:
            return driver.processes(gpu)

    def usage(self, gpu: Device, shared: Collection[str] = ()) -> tuple[DeviceUsage, ...]:
        with self._asking(gpu) as driver:
            return driver.usage(gpu, shared)

    def usage_flaws(self, gpu: Device) -> UsageFlaws:
        return UsageFlaws() if self._driver is None else self._driver.usage_flaws(gpu)

    @contextmanager
    def _asking(self, gpu: Device) -> Iterator[Telemetry]:
        if self._driver is None or gpu.uuid not in self._gpus:
            raise Unsupported(
                f"GPU {gpu.index}: no driver answers for it here, and an exporter's metrics say nothing about processes"
            )
        yield self._driver

    def release(self, wait: float) -> bool:
        return self._driver is None or self._driver.release(wait)


class AsksBeside:
    """A feed that says nothing about processes: the driver beside it is asked for them."""

    _beside: DriverBeside

    def processes(self, gpu: Device) -> Sequence[ProcessUsage]:
        return self._beside.processes(gpu)

    def usage(self, gpu: Device, shared: Collection[str] = ()) -> tuple[DeviceUsage, ...]:
        return self._beside.usage(gpu, shared)

    def usage_flaws(self, gpu: Device) -> UsageFlaws:
        return self._beside.usage_flaws(gpu)
