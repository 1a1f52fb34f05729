"""Adds the driver's details to another source (an exporter's metrics or DCGM): minors, MIG UUIDs and processes.

The driver is read in its own thread with a short wait, so that a missing or hanging driver does not affect the source.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from podgpu.errors import SourceError, StartError, Unsupported
from podgpu.gpu.source import Telemetry, UsageAnswer
from podgpu.model import Device, ProcessUsage

_WAIT_SECONDS = 0.5


class CompanionDriver:
    def __init__(self, driver: Telemetry | None) -> None:
        self._driver = driver
        self._devices: Mapping[str, Device] = {}
        self._gpus: frozenset[str] = frozenset()
        self._update: threading.Thread | None = None

    def update(self) -> None:
        """Reads the driver's details. While a reading hangs, the previous details are used."""
        if self._driver is not None and (self._update is None or not self._update.is_alive()):
            self._update = threading.Thread(
                target=self._read_driver, args=(self._driver,), name="companion-driver", daemon=True
            )
            self._update.start()
            self._update.join(_WAIT_SECONDS)

    def complete(self, device: Device) -> Device:
        known = self._devices.get(device.key)
        if known is None:
            return device
        return replace(
            device,
            minor=known.minor,
            pci_bus_id=device.pci_bus_id or known.pci_bus_id,
            model=device.model or known.model,
            mig_uuids=known.mig_uuids or device.mig_uuids,
        )

    def _read_driver(self, driver: Telemetry) -> None:
        devices: dict[str, Device] = {}
        gpus: tuple[Device, ...] = ()
        with suppress(SourceError, StartError):
            gpus = driver.inventory().gpus
        for gpu in gpus:
            with suppress(SourceError):
                devices |= {reading.device.key: reading.device for reading in driver.read(gpu, ()).readings}
        self._devices, self._gpus = devices, frozenset(gpu.uuid for gpu in gpus)

    def _find_driver(self, gpu: Device) -> Telemetry:
        if self._driver is None or gpu.uuid not in self._gpus:
            raise Unsupported(
                f"GPU {gpu.index}: processes are read from the NVIDIA driver, which does not list this GPU here"
            )
        return self._driver

    def processes(self, gpu: Device) -> Sequence[ProcessUsage]:
        return self._find_driver(gpu).processes(gpu)

    def usage(self, gpu: Device, shared: Collection[str] = ()) -> UsageAnswer:
        return self._find_driver(gpu).usage(gpu, shared)

    def discard_error_events(self) -> None:
        """Discards the driver's XIDs, because the other source reports them, too."""
        if self._driver is not None:
            self._driver.error_events()

    def release(self, wait: float) -> bool:
        return self._driver is None or self._driver.release(wait)
