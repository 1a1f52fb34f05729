"""This module has the words podgpu thinks in, as frozen dataclasses. It imports nothing of podgpu and nothing of the
world.

Readers make them, the agent gathers them into one `Snapshot`; the join makes families of it (`series.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Value = int | float | str
Name = Annotated[str, Meta(max_length=256)]
WorkloadKey = tuple[str, ...]
Who = WorkloadKey
_SHORT_ID = 12  # letters of a container id, as crictl shows it


@dataclass(frozen=True, slots=True)
class Device:
    """A physical GPU, or (with `gi_id`) one MIG GPU instance of it.

    `uuid` and `index` are always the physical GPU's, as on dcgm-exporter's series.
    """

    index: int | None
    uuid: str
    pci_bus_id: str
    model: str
    minor: int | None = None
    mig_enabled: bool = False
    gi_id: int | None = None
    profile: str = ""
    mig_uuids: tuple[str, ...] = ()
    """UUIDs of the MIG devices (compute instances) in this GPU instance; the kubelet names these."""
    maker: str = "nvidia"
    """What the names of its kind begin with."""

    @property
    def name(self) -> str:
        """Value of the label `device`, such as nvidia0. Empty if the index is unknown."""
        return "" if self.index is None else f"{self.maker}{self.index}"

    @property
    def number(self) -> str:
        """Value of the label `gpu`. Empty if the index is unknown."""
        return "" if self.index is None else str(self.index)

    @property
    def key(self) -> str:
        """What assignments and readings name this device by."""
        return device_key(self.uuid, self.gi_id)

    @property
    def is_instance(self) -> bool:
        return self.gi_id is not None


def device_key(uuid: str, gi_id: int | None) -> str:
    """Of a GPU, or of the GPU instance with this id on it."""
    return uuid if gi_id is None else f"{uuid}/gi{gi_id}"


def physical(key: str) -> str:
    """UUID of the physical GPU behind a device key."""
    return key.partition("/")[0]


class Document(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Base of all parts of a `NodeState`. `gc=False` is safe: documents are trees without reference cycles."""


class Workload(Document, frozen=True):
    """A container, or a job of an HPC scheduler. No source knows all members."""

    namespace: Name = ""
    pod: Name = ""
    container: Name = ""
    uid: Name = ""
    container_id: Name = ""
    job: Name = ""

    @property
    def key(self) -> WorkloadKey:
        """Equal for the same workload, whichever source reports it. Empty: not identified.

        Two pods with the same name have the same key. Code that knows the UIDs distinguishes them.
        """
        if self.job:
            return "job", self.job
        if self.pod:
            return "pod", self.namespace, self.pod, self.container
        return ("uid", self.uid, self.container or self.container_id) if self.uid or self.container_id else ()

    @property
    def who(self) -> WorkloadKey:
        """Old name of `key`, until all callers are converted."""
        return self.key

    @property
    def text(self) -> str:
        """Name to show to people. Empty: not identified."""
        if self.job:
            return f"job {self.job}"
        if self.pod:
            return "/".join(filter(None, (self.namespace, self.pod, self.container)))
        short_id = self.container_id[:_SHORT_ID]
        if self.uid:
            return "pod " + "/".join(filter(None, (self.uid, self.container or short_id)))
        container = short_id or self.container
        return f"container {container}" if container else ""


class WorkloadOwner(Document, frozen=True, order=True):
    """The object that created a pod: a Deployment, a Job, a StatefulSet, a notebook."""

    kind: Name
    name: Name


WORKLOAD_PARTS = Workload.__struct_fields__
parts_of = attrgetter(*WORKLOAD_PARTS)
"""Sort key of workloads."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One workload holds one device. Exclusive use is simply a device with one assignment."""

    device: str
    """`Device.key`."""
    holder: Workload
    source: str
    replica: str = ""
    """Number of the time-slice or vGPU replica when the id named one."""
    share: float | None = None
    """Part of the device given to the holder, where the source knows it."""
    attributes: tuple[tuple[str, str], ...] = ()
    """Labels the source adds to the device's series, such as dra_claim_name."""


@dataclass(frozen=True, slots=True)
class Unmapped:
    """An assignment that names a GPU podgpu does not know; counted and explained, never dropped silently."""

    source: str
    reason: str
    device_id: str
    resource: str
    holder: Workload


@dataclass(frozen=True, slots=True)
class VcudaRequest:
    """What a container asked gpu-manager for. Says nothing about which card it was given."""

    holder: Workload
    cores: int
    """Hundredths of a card."""
    memory_blocks: int
    """Of 256 MiB."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Who was given which device, as one source saw it in one reading."""

    assignments: tuple[Assignment, ...] = ()
    unmapped: tuple[Unmapped, ...] = ()
    vcuda: tuple[VcudaRequest, ...] = ()
    offered: frozenset[str] = frozenset()  # UUIDs of the GPUs that the source gives away, in anybody's hands or not
    source_instance: int = 0
    """Changes when the source restarts or the connection to it breaks."""


@dataclass(frozen=True, slots=True)
class Detail:
    """One of several values a device has for one field, with the labels that tell them apart."""

    field: int
    labels: tuple[tuple[str, str], ...]
    value: int | float


@dataclass(frozen=True, slots=True)
class Reading:
    """What one device said in one tick: field id -> value. What it did not say is not here."""

    device: Device
    values: Mapping[int, Value]
    details: tuple[Detail, ...] = ()


@dataclass(frozen=True, slots=True)
class OtherReading:
    """What something said that is no GPU: an NVSwitch, an NVLink, a CPU, a core. Nobody holds these."""

    kind: str
    """As in `Field.level`: SWITCH, LINK, CPU or CPU_CORE."""
    labels: tuple[tuple[str, str], ...]
    values: Mapping[int, Value]


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """One process on one device, as the driver sees it."""

    device: str
    """`Device.key`: the MIG instance where the process runs in one."""
    pid: int
    memory: int | None = None
    """Bytes; None where the driver does not tell."""
    mps: bool = False
    """A client of MPS, which the driver takes for one with all the others."""


UsageMethod = Literal["samples", "switches", "exact"]
"""How it is told which process kept a device busy: by the driver's samples, by who was resident on the engine, or by
that and samples of whether the engine was busy."""


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    """How one device was used in one window, as the driver tells it. None: the driver does not tell."""

    device: Device
    window_ns: int
    """Length of the window the busy times are about, by the driver's own timestamps."""
    busy_ns: int | None = None
    """Time within the window in which anything ran."""
    energy_mj: int | None = None
    """Energy since the previous reading of the counter. None if it was not read in this turn, or unknown."""
    memory_used: int | None = None
    processes: tuple[ProcessUsage, ...] | None = None
    """None: processes cannot be seen from here (not the host's PID namespace)."""
    process_busy_ns: Mapping[int, int | None] | None = None
    """Pid -> its part of the window, None for one of which the driver told nonsense. None as a whole where per-process
    utilisation does not exist (MIG, some drivers)."""
    method: UsageMethod = "samples"
    """How `process_busy_ns` came about."""
    resident_ns: Mapping[int, int] | None = None
    """Pid -> how long its context was on the engine, working or not, where the driver's context switches were read."""
    switching_ns: int = 0
    """Busy time in which contexts were switched: nobody's."""
    saving_ns: Mapping[int, int] = field(default_factory=dict)
    """Pid -> how much of its residency may have been part of a switch, too."""
    bounded: bool = False
    """Whether the least and the most each can have run is wanted beside the figure."""
    power_mw: int | None = None
    """Power at the end of the window: weights the turns between two readings of energy."""


PodLabels = Mapping[tuple[str, str], tuple[tuple[str, str], ...]]
"""(namespace, pod) -> the pod's labels the user wants to see, with names Prometheus accepts."""
