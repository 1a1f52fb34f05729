"""The interface between the agent and a source of GPU values, independent of library and vendor.

The interface covers devices, fields, error numbers and processes. Vendor-specific features belong to the vendor's
package. `CompanionDriver` adds details from the local driver to sources that read GPUs in another way.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, runtime_checkable

from podgpu.errors import SourceError, StartError, Unsupported
from podgpu.metrics.fields import Field
from podgpu.model import Detail, Device, DeviceUsage, EntityState, ProcessUsage, Value

Lack = Literal["no_process_utilization", "no_energy", "no_memory", "no_instance_utilization", "no_process_list"]
"""Error reason for a usage value that a GPU does not provide."""
EXPORTER_FIELDS = 9000  # fields from this id on are computed by dcgm-exporter or podgpu, not by DCGM
_COMPANION_WAIT = 0.5


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity, because sources use groups as cache keys
class FieldGroup:
    """Fields that are read together, at the same interval. DCGM has the same term."""

    fields: tuple[Field, ...]
    interval: float


@dataclass(frozen=True, slots=True)
class GpuReading:
    """The values of one physical GPU and of its MIG instances. Fields without a value have no entry."""

    values: Mapping[Device, Mapping[int, Value]]  # the GPU, then its instances -> field id -> value
    details: tuple[Detail, ...] = ()  # fields of the GPU that have several values, such as health checks
    unsupported: tuple[tuple[str, int], ...] = ()  # device key, field id
    dropped: tuple[
        int, ...
    ] = ()  # fields whose value was rejected (special code, NaN, impossible), once per occurrence
    errors: tuple[str, ...] = ()  # reasons of failed calls; the values above are valid
    entities: tuple[EntityState, ...] = ()  # the GPU's links, or switches and CPUs
    slow_values: Mapping[int, Value] = field(default_factory=dict)  # for the GPU's page, read less often; by field id
    reports_errors: bool = True  # False if the source cannot report errors (XIDs) of this GPU
    links_up: int | None = None  # number of NVLinks that are up; None if the GPU has none or does not report them


@dataclass(frozen=True, slots=True)
class SwitchStatus:
    """State of the context-switch log. The log is used only while a GPU is shared."""

    errors: tuple[str, ...] = ()
    """Reason words of the errors in this reading."""
    fallback_reason: str = ""
    """Why a shared GPU currently uses the driver's samples instead of the log; empty if the log is used."""
    fallback: str = ""
    """Message for `fallback_reason`."""


@dataclass(frozen=True, slots=True)
class UsageAnswer:
    """Usage of one GPU since the last call. A *part* is the source's name for a value or a driver function."""

    usages: tuple[DeviceUsage, ...]
    """The GPU, then each of its instances."""
    dropped: tuple[str, ...] = ()
    """Parts whose value was rejected (special code, NaN or impossible), once per occurrence."""
    errors: tuple[str, ...] = ()
    """Reason words of calls that failed."""
    lacks: tuple[tuple[str, Lack], ...] = ()
    """(unsupported part, value that is missing because of it). Such a part is not read until the MIG layout changes."""
    switches: SwitchStatus | None = None
    """None if context switches are not used."""


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """An error that a device reported."""

    device: str
    """`Device.key`."""
    code: int
    """The vendor's error number. NVIDIA's is the XID."""
    at: float
    """Unix time."""


class ErrorEvents:
    """Events that the agent has not read yet. Thread-safe. A broken GPU may report a thousand per second."""

    def __init__(self) -> None:
        self._events: deque[ErrorEvent] = deque(maxlen=100_000)
        self.add = self._events.append

    def drain(self) -> list[ErrorEvent]:
        return [self._events.popleft() for _ in range(len(self._events))]


@dataclass(frozen=True, slots=True)
class Inventory:
    """The GPUs of this node."""

    gpus: tuple[Device, ...]
    unreachable: dict[int, str] = field(default_factory=dict)
    """Index of a GPU that the driver lists but cannot read -> reason."""
    hung: frozenset[int] = frozenset()
    """Indices of unreachable GPUs whose first call has not returned yet."""


class Telemetry(Protocol):
    name: str
    expected: int | None
    """Number of GPUs on the PCI bus, with or without a driver; None if unknown."""

    def inventory(self) -> Inventory:
        """Returns the physical GPUs. Opens the driver if necessary. Raises SourceError."""

    def read(self, gpu: Device, fields: Sequence[Field]) -> GpuReading:
        """Reads one GPU and its instances. Called from that GPU's worker. Raises SourceError."""

    def processes(self, gpu: Device) -> Sequence[ProcessUsage]:
        """Lists the processes on one GPU and its instances. May run in a different worker than `read`.

        Raises SourceError.
        """

    def usage(self, gpu: Device, shared: Collection[str] = ()) -> UsageAnswer:
        """Returns the usage of one GPU and its instances.

        `shared`: keys of devices on which processes of several containers run.
        Each GPU has one worker for this method, which may differ from the worker for `read`. Raises SourceError.
        """

    def error_events(self) -> Sequence[ErrorEvent]:
        """Returns the events since the last call."""

    def release(self, wait: float) -> bool:
        """Closes podgpu's handles to the driver. Returns False if a call does not return within `wait` seconds.

        The next call of `inventory` opens the driver again.
        """


@runtime_checkable
class HostEngine(Protocol):
    """A source that reads GPUs at intervals of its own (DCGM). It also reads NVSwitches, NVLinks, CPUs and cores."""

    def schedule(self, groups: Sequence[FieldGroup]) -> None:
        """Sets the field groups. Later calls of `read` pass the fields of one group."""

    def read_others(self, fields: Sequence[Field]) -> GpuReading:
        """Returns an reading with `entities` only. Called from its own worker. Raises SourceError."""


class CompanionDriver:
    """Adds minor numbers, MIG UUIDs and processes from the local driver to an exporter's metrics or DCGM.

    The driver is read in its own thread with a short wait. So a missing or hanging driver does not affect the source.
    """

    def __init__(self, driver: Telemetry | None) -> None:
        self._driver = driver
        self._devices: Mapping[str, Device] = {}
        self._update: threading.Thread | None = None

    def update(self) -> None:
        """Reads the driver's details. While a reading hangs, the previous details are used."""
        if self._driver is not None and (self._update is None or not self._update.is_alive()):
            self._update = threading.Thread(
                target=self._read_driver, args=(self._driver,), name="companion-driver", daemon=True
            )
            self._update.start()
            self._update.join(_COMPANION_WAIT)

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
        with suppress(SourceError, StartError):
            for gpu in driver.inventory().gpus:
                devices[gpu.key] = gpu
                with suppress(SourceError):
                    devices |= {device.key: device for device in driver.read(gpu, ()).values}
        self._devices = devices

    def _find_driver(self, gpu: Device) -> Telemetry:
        if self._driver is None or gpu.uuid not in self._devices:
            raise Unsupported(
                f"GPU {gpu.index}: processes are read from the NVIDIA driver, which does not list this GPU here"
            )
        return self._driver

    def processes(self, gpu: Device) -> Sequence[ProcessUsage]:
        return self._find_driver(gpu).processes(gpu)

    def usage(self, gpu: Device, shared: Collection[str] = ()) -> UsageAnswer:
        return self._find_driver(gpu).usage(gpu, shared)

    def discard_error_events(self) -> None:
        """Discards the driver's XIDs, because the main source already reports them."""
        if self._driver is not None:
            self._driver.error_events()

    def release(self, wait: float) -> bool:
        return self._driver is None or self._driver.release(wait)
