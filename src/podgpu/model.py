"""This module has the words podgpu thinks in, as frozen dataclasses. It imports nothing of podgpu and nothing of the
world.

Readers make them, the agent gathers them into one `Snapshot`; the join makes families of it (`series.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Literal, NamedTuple

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

    index: int
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
        """What people and the label `device` call it: nvidia0. Empty where its number is not known (-1)."""
        return f"{self.maker}{self.index}" if self.index >= 0 else ""

    @property
    def number(self) -> str:
        """Its index as a label has it. Empty where nobody knows it: a GPU that is known by its UUID alone."""
        return str(self.index) if self.index >= 0 else ""

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


@dataclass(frozen=True, slots=True)
class ContainerUsage:
    """What one container used of one device. Counters since the exporter started; None: cannot be known here."""

    device: str
    holder: Workload
    utilization: float | None = None
    memory: int | None = None
    processes: int | None = None
    allocated_ns: int | None = None
    busy_ns: int | None = None
    idle_ns: int | None = None
    energy_mj: int | None = None
    power_part: float | None = None
    """Its part of the device's energy in the last window."""
    idle_run_ns: int | None = None
    """The part of `idle_ns` since it last ran anything: for how long it has been idle."""
    busy_min_ns: int | None = None
    busy_max_ns: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceTotals:
    """The device side to check containers against: its own figure, and what no container could be charged for."""

    device: str
    busy_ns: int | None = None
    energy_mj: int | None = None
    memory_used: int | None = None
    unattributed_busy_ns: int | None = None
    unattributed_energy_mj: int | None = None
    unattributed_memory: int | None = None
    method: UsageMethod | None = None
    """How its containers' busy time was told in the last turn; None: it is not told."""


@dataclass(frozen=True, slots=True)
class NamespaceTotals:
    """What a namespace's containers used in all, those that ended included."""

    namespace: str
    model: str
    """Of the GPU, or of the MIG instance: those are apart."""
    allocated_ns: int = 0
    busy_ns: int | None = None
    energy_mj: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """The ledger's statement at one moment: `at`, in Unix time; 0: not told."""

    containers: tuple[ContainerUsage, ...] = ()
    devices: tuple[DeviceTotals, ...] = ()
    namespaces: tuple[NamespaceTotals, ...] = ()
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one source fared in its last turn."""

    source: str
    seconds: float
    error: str = ""
    """Reason word, empty when all went well."""
    message: str = ""
    device: str = ""
    """UUID of the GPU that this is about: another may have its number tomorrow."""

    @property
    def ok(self) -> bool:
        return not self.error


@dataclass(frozen=True, slots=True)
class XidTally:
    """One XID on one device since podgpu started (and within the window dcgm-exporter counts over)."""

    device: str
    xid: int
    total: int
    last_seen: float
    in_window: int


@dataclass(frozen=True, slots=True)
class DeviceCount:
    """GPUs on the PCI bus, GPUs the driver answers for, and the difference. None: not known."""

    expected: int | None = None
    visible: int = 0
    lost: int = 0


class Finding(NamedTuple):
    """Something that is wrong with a GPU: a condition of the closed list, since when (Unix time), and what exactly."""

    condition: str
    since: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    device: Device
    findings: tuple[Finding, ...] = ()
    fine: tuple[str, ...] = ()  # conditions that were looked for and are not there
    last_holders: tuple[Workload, ...] = ()  # of one that is lost


PodLabels = Mapping[tuple[str, str], tuple[tuple[str, str], ...]]
"""(namespace, pod) -> the pod's labels the user wants to see, with names Prometheus accepts."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything one scrape is made of. Frozen; `snapshot_json` writes and reads it."""

    taken_at: float
    """Unix time at which telemetry was last read; 0 before the first reading."""
    devices: tuple[Device, ...] = ()
    readings: tuple[Reading, ...] = ()
    assignments: tuple[Assignment, ...] = ()
    unmapped: tuple[Unmapped, ...] = ()
    vcuda: tuple[VcudaRequest, ...] = ()
    pod_labels: PodLabels = field(default_factory=dict)
    outcomes: tuple[Outcome, ...] = ()
    errors: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(source, reason) -> how often since the start."""
    unsupported: tuple[tuple[str, int], ...] = ()
    """(device key, field id) that the device cannot give."""
    dropped: Mapping[int, int] = field(default_factory=dict)
    """Field id -> values refused at the door (sentinels, NaN, impossible figures) since the start."""
    xids: tuple[XidTally, ...] = ()
    last_xid: Mapping[str, int] = field(default_factory=dict)
    """Device key -> number of the newest XID; absent: none yet."""
    clock_events: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(device key, clock event) -> samples in the window with that bit set."""
    clock_event_totals: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """The same -> how often the bit was set anew since the start."""
    device_count: DeviceCount = DeviceCount()
    usage: Usage = Usage()
    others: tuple[OtherReading, ...] = ()
    health: tuple[DeviceHealth, ...] = ()
