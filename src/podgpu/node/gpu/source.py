"""Defines the interface through which the agent reads GPU values.

It does not depend on a library or vendor. `CompanionDriver` adds details from the local driver to
the values of DCGM or of another exporter.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, runtime_checkable

from podgpu.errors import SourceError, StartError, Unsupported
from podgpu.metrics.fields import P2P, P2P_STATES, Field
from podgpu.model import (
    Detail,
    Device,
    DeviceUsage,
    ErrorEvent,
    GpuReading,
    Inventory,
    ProcessUsage,
)

# dcgm-exporter or podgpu computes the fields from this id on. DCGM does not have them.
EXPORTER_FIELDS = 9000

FindProcesses = Callable[[Collection[int]], Collection[int]]
"""Finds the containers of new processes at once, because they may end before the next reading.

Returns the pids of those that exist. Thread-safe.
"""


def find_no_processes(pids: Collection[int]) -> Collection[int]:
    return ()


@dataclass(frozen=True, slots=True, eq=False)
class FieldGroup:
    """Fields that are read together, at the same interval. DCGM uses the same term.

    Groups are compared by identity, because sources use them as cache keys.
    """

    fields: tuple[Field, ...]
    interval: float


def list_peer_state(peer: int | None, state: int) -> list[Detail]:
    """Returns the state of the NVLink connection to the GPU with the index `peer`.

    A state that only newer drivers have is `Unknown`, as in dcgm-exporter. Returns an empty list
    for a negative state.
    """
    if state < 0:
        return []
    name = P2P_STATES[min(state, len(P2P_STATES) - 1)]
    return [(P2P, {"link_status": name, "peer_gpu": str(peer)}, state)]


class ErrorEvents:
    """A thread-safe queue of events.

    It is limited, because a broken GPU may report a thousand events per second.
    """

    def __init__(self) -> None:
        self._events: deque[ErrorEvent] = deque(maxlen=100_000)
        self.add = self._events.append

    def drain(self) -> list[ErrorEvent]:
        return [self._events.popleft() for _ in range(len(self._events))]


class Telemetry(Protocol):
    name: str
    expected: int | None  # number of GPUs on the PCI bus; None if unknown

    def inventory(self) -> Inventory:
        """Returns the physical GPUs. Opens the driver if necessary.

        Raises SourceError if this fails.
        """

    def read(self, gpu: Device, fields: Sequence[Field]) -> GpuReading:
        """Reads one GPU and its instances. Called from the GPU's worker.

        Raises SourceError if this fails.
        """

    def processes(self, gpu: Device) -> Sequence[ProcessUsage]:
        """Lists the processes on a GPU and its instances.

        May run in another worker than `read`. Raises SourceError.
        """

    def usage(
        self, gpu: Device, shared: Collection[str] = (), find: FindProcesses = find_no_processes
    ) -> DeviceUsage:
        """Returns the usage of one GPU and its instances since the last call.

        `shared`: keys of devices on which processes of several containers run. `find`: is called
        from other threads for processes that the driver does not list. All calls for a GPU come
        from the same worker, which may differ from the worker of `read`. Raises SourceError if the
        usage cannot be read.
        """

    def error_events(self) -> Sequence[ErrorEvent]:
        """Returns the errors (XIDs) since the last call."""

    def release(self, wait: float) -> bool:
        """Closes the driver until the next call of `inventory`.

        Returns False if this takes longer than `wait` seconds.
        """


@runtime_checkable
class HostEngine(Protocol):
    """A source that reads GPUs at its own intervals, such as DCGM.

    It can also read switches, links and CPUs.
    """

    def schedule(self, groups: Sequence[FieldGroup]) -> None:
        """Sets the groups of fields to read.

        Each later call of `read` passes the fields of one of these groups.
        """

    def read_others(self, fields: Sequence[Field]) -> GpuReading:
        """Reads switches, CPUs and cores. Only `entities` of the result is set.

        Raises SourceError.
        """


_COMPANION_WAIT = 0.5  # seconds for which a source waits for the driver


class CompanionDriver:
    """Adds details from the local driver to the devices of DCGM or another exporter.

    The details are minor numbers, MIG UUIDs and processes. The driver is read in a separate thread,
    so that a driver that hangs does not block the source.
    """

    def __init__(self, driver: Telemetry | None) -> None:
        self._driver = driver
        self._devices: Mapping[str, Device] = {}  # by device key
        self._reader: threading.Thread | None = None

    def update(self) -> None:
        """Reads the details from the driver.

        While the driver hangs, the previous details are used.
        """
        if self._driver is None:
            return
        if self._reader is not None and self._reader.is_alive():
            return

        target = partial(self._read_driver, self._driver)
        self._reader = threading.Thread(target=target, name="companion-driver", daemon=True)
        self._reader.start()
        self._reader.join(_COMPANION_WAIT)

    def complete(self, device: Device) -> Device:
        """Adds the driver's details.

        Model and PCI address are labels of the source's metrics, so they are kept. Minor number and
        MIG UUIDs of the driver are preferred, because not every source has them.
        """
        local = self._devices.get(device.key)
        if local is None:
            return device
        return replace(
            device,
            minor=local.minor,
            pci_bus_id=device.pci_bus_id or local.pci_bus_id,
            model=device.model or local.model,
            mig_uuids=local.mig_uuids or device.mig_uuids,
        )

    def _read_driver(self, driver: Telemetry) -> None:
        devices = {}
        with suppress(SourceError, StartError):
            for gpu in driver.inventory().gpus:
                devices[gpu.key] = gpu
                # Without fields, the reading only lists the GPU and its instances.
                with suppress(SourceError):
                    for device in driver.read(gpu, fields=()).values:
                        devices[device.key] = device
        self._devices = devices

    def _find_driver(self, gpu: Device) -> Telemetry:
        if self._driver is None or gpu.uuid not in self._devices:
            raise Unsupported(
                f"GPU {gpu.index}: processes are read from the NVIDIA driver, which does not "
                "list this GPU here"
            )
        return self._driver

    def processes(self, gpu: Device) -> Sequence[ProcessUsage]:
        return self._find_driver(gpu).processes(gpu)

    def usage(
        self, gpu: Device, shared: Collection[str] = (), find: FindProcesses = find_no_processes
    ) -> DeviceUsage:
        return self._find_driver(gpu).usage(gpu, shared, find)

    def discard_error_events(self) -> None:
        """Discards the driver's XIDs, because DCGM or the exporter reports them, too."""
        if self._driver is not None:
            self._driver.error_events()

    def release(self, wait: float) -> bool:
        return self._driver is None or self._driver.release(wait)
