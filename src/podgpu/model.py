"""Defines the document that describes a node (`NodeState`), and the readings from which it is
built.

In documents, amounts are exact integers whose name ends with the unit: `_ns`, `_mj`, `_mw`,
`_bytes`. Times are Unix seconds of the node's clock. An unknown value is None, an empty text or an
empty collection, and is omitted from the JSON. A zero is a measured zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

K = TypeVar("K")
T = TypeVar("T")
W = TypeVar("W", bound="Workload")
NS = 1_000_000_000  # nanoseconds per second
MJ = 1000  # millijoules per joule
MIB = 1024 * 1024
# incremented if the meaning of a JSON key changes, but not for a new key, which old decoders ignore
SCHEMA = 1
Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=1024)]
Amount = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**32)]
# Limits of what is possible, so that one wrong number does not falsify sums over all nodes.
# A ratio can exceed 1 if its counter and its window are not read at the same time.
Ratio = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(ge=0, le=1000)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
UnixTime = Annotated[float, Meta(ge=0, le=4_102_444_800)]  # until the year 2100
Bytes = Annotated[int, Meta(ge=0, le=2**46)]  # 64 TiB
Millijoules = Annotated[int, Meta(ge=0, le=2**55)]  # 10 kW for 100 years
Milliwatts = Annotated[int, Meta(ge=0, le=10_000_000)]
Celsius = Annotated[int, Meta(ge=-100, le=200)] | Annotated[float, Meta(ge=-100, le=200)]
UpTo64 = Annotated[tuple[T, ...], Meta(max_length=64)]
UpTo256 = Annotated[tuple[T, ...], Meta(max_length=256)]
UpTo1024 = Annotated[tuple[T, ...], Meta(max_length=1024)]
UpTo4096 = Annotated[tuple[T, ...], Meta(max_length=4096)]
CountsByName = Annotated[dict[Name, Amount], Meta(max_length=256)]
LabelTexts = Annotated[dict[Name, Text], Meta(max_length=64)]
Value = int | float | str
Detail = tuple[Name, LabelTexts, int | float]  # field, labels, value
# name in fields.csv -> value
Fields = Annotated[dict[Name, int | float | Text], Meta(max_length=1024)]
WorkloadKey = tuple[str, ...]
FieldValues = Mapping[int, Value]  # by field id
PodName = tuple[str, str]  # namespace and name
Pairs = tuple[tuple[str, str], ...]  # names and values, such as those of labels
PodLabels = Mapping[PodName, Pairs]  # the selected labels
Lack = Literal[
    "no_process_utilization", "no_energy", "no_memory", "no_instance_utilization", "no_process_list"
]
"""Error reason for a usage value that a GPU does not provide."""
UsageMethod = Literal["samples", "switches", "exact", "mps"]
"""How busy time is split among processes. `samples`: by the driver's samples. `switches`: by
context switches. `exact`: by context switches and busy samples. `mps`: not split, because the
driver reports only the MPS server.
"""
WantedMethod = Literal["auto", "samples", "switches", "exact"]
"""Value of `--usage-from`. `auto`: the best method that works."""
HIDDEN_PID = 0
"""Stands for the processes of other users in the context-switch log, whose pids are hidden."""
_SHORT_ID = 12  # length of a container id in the output of crictl


@dataclass(frozen=True, slots=True)
class Device:
    """A physical GPU or, if `gi_id` is set, one of its MIG instances.

    `uuid` and `index` always identify the physical GPU, as in dcgm-exporter's labels.
    """

    index: int | None
    uuid: str
    pci_bus_id: str = ""
    model: str = ""
    minor: int | None = None
    mig_enabled: bool = False
    gi_id: int | None = None
    profile: str = ""
    # UUIDs of its compute instances; the kubelet uses them as device ids
    mig_uuids: tuple[str, ...] = ()
    maker: str = "nvidia"  # prefix of `name`
    # set only for allocation sources
    memory_bytes: float | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """Value of the label `device`, such as nvidia0. Empty if the index is unknown."""
        return device_name(self.maker, self.index)

    @property
    def text(self) -> str:
        """Name of the physical GPU in messages."""
        return f"GPU {self.index} ({self.uuid})"

    @property
    def key(self) -> str:
        """Text that identifies the device in assignments and readings."""
        return device_key(self.uuid, self.gi_id)

    @property
    def is_instance(self) -> bool:
        return self.gi_id is not None


def device_name(maker: str, index: int | None) -> str:
    """See `Device.name`."""
    if index is None:
        return ""
    return f"{maker}{index}"


def device_key(uuid: str, gi_id: int | None) -> str:
    if gi_id is None:
        return uuid
    return f"{uuid}/gi{gi_id}"


def split_key(key: str) -> tuple[str, int | None]:
    """Returns the UUID of the physical GPU and the id of the MIG instance. The reverse of
    `device_key`.
    """
    uuid, _, gi_id = key.partition("/gi")
    return uuid, int(gi_id) if gi_id.isdecimal() else None


def list_pod_names(holders: Iterable[Workload]) -> list[PodName]:
    """Returns each pod once. Omits other workloads."""
    names: dict[PodName, None] = {}
    for holder in holders:
        if holder.pod:
            names[holder.pod_name] = None
    return list(names)


def group_by_key(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """Groups values by key. Keys and values keep their order."""
    groups: dict[K, list[T]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def group_by(values: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Groups values by the key of each. Keys and values keep their order."""
    return group_by_key((key(value), value) for value in values)


def select_keys(values: Mapping[K, T], keys: Container[K]) -> dict[K, T]:
    """Returns the values of these keys. They keep their order."""
    return {key: value for key, value in values.items() if key in keys}


# The document


class Document(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Base class of `NodeState` and of the objects in it. `gc=False` is safe, because there are no
    reference cycles.
    """


class Workload(Document, frozen=True):
    """A container, a job of an HPC scheduler, or the processes of a user. Each source reports only
    some fields.
    """

    namespace: Name = ""
    pod: Name = ""
    container: Name = ""
    uid: Name = ""
    container_id: Name = ""
    job: Name = ""
    user: Name = ""  # set only on a node without Kubernetes

    @property
    def key(self) -> WorkloadKey:
        """Identifies the workload in all sources. Empty if no field is known.

        A pod and its replacement with the same name have the same key, but different UIDs.
        """
        if self.job:
            return "job", self.job
        if self.pod:
            return "pod", self.namespace, self.pod, self.container
        if self.uid or self.container_id:
            return "uid", self.uid, self.container or self.container_id
        if not self.user:
            return ()

        return "user", self.user

    @property
    def pod_name(self) -> PodName:
        return self.namespace, self.pod

    @property
    def is_reservation(self) -> bool:
        """Returns True for a pod of KAI Scheduler or Run:ai that only reserves a GPU. Other pods
        hold the GPU.
        """
        is_named = self.pod.startswith(("gpu-reservation-", "runai-reservation-gpu-"))
        return is_named and self.container in ("resource-reservation", "runai-reservation")

    @property
    def has_labels(self) -> bool:
        """Returns False for processes of a user that belong to no job. podgpu exports no series for
        them.
        """
        return bool(self.job or not self.user)

    @property
    def job_or_user(self) -> str:
        """The job, or `user NAME` if the workload has neither job nor container. Empty for pods and
        containers.
        """
        if not self.job and self.user and not self.container_id:
            return f"user {self.user}"
        return self.job

    @property
    def text(self) -> str:
        """The workload's name in messages. Empty if no field is known."""
        if self.job:
            if self.user:
                return f"job {self.job} ({self.user})"
            return f"job {self.job}"

        if self.pod:
            return "/".join(filter(None, (self.namespace, self.pod, self.container)))

        short_id = self.container_id[:_SHORT_ID]
        if self.uid:
            return "pod " + "/".join(filter(None, (self.uid, self.container or short_id)))

        container = short_id or self.container
        if container:
            return f"container {container}"
        if not self.user:
            return ""

        return f"user {self.user}"


class WorkloadOwner(Document, frozen=True, order=True):
    """The object that created a pod: a Deployment, a Job, a StatefulSet, a notebook."""

    kind: Name
    name: Name

    @property
    def text(self) -> str:
        return f"{self.kind}/{self.name}"


WORKLOAD_PARTS = Workload.__struct_fields__
parts_of = attrgetter(*WORKLOAD_PARTS)  # sort key of workloads


class WaitPart(Workload, frozen=True, kw_only=True):
    """A workload for which another workload waited. If all names are empty, it stands for processes
    outside pods.
    """

    seconds: Seconds = 0.0  # waiting time in the last usage window
    ratio: Ratio = 0.0  # waiting time as a fraction of the window


class HolderUsage(Document, frozen=True):
    """Usage of one device by one workload. Counters are 0 when the exporter first sees both."""

    utilization_ratio: Ratio | None = None
    memory_used_bytes: Bytes | None = None
    processes: Count | None = None
    allocated_ns: Amount | None = None  # multiplied by the share, as wasted times; others are not
    busy_ns: Amount | None = None
    busy_min_ns: Amount | None = None
    busy_max_ns: Amount | None = None
    idle_ns: Amount | None = None
    wasted_idle_ns: Amount | None = None
    wasted_underused_ns: Amount | None = None  # unused part of the share while not idle
    # time in which this workload had work, but another one occupied the GPU
    wait_ns: Amount | None = None
    wait_min_ns: Amount | None = None
    wait_max_ns: Amount | None = None
    wait_ratio: Ratio | None = None  # fraction of the last usage window spent waiting
    # workloads that ran meanwhile, largest ratio first
    waits_for: UpTo4096[WaitPart] = ()
    energy_mj: Millijoules | None = None
    # the workload's share of the device's energy in the last usage window
    power_ratio: Ratio | None = None
    idle_since: UnixTime | None = None  # None if the workload is or may be busy
    # set if the workload uses the device without an allocation
    unallocated_since: UnixTime | None = None
    counted_since: UnixTime | None = None  # when the counters were 0


class RunningProcess(Document, frozen=True):
    pid: Count
    memory_used_bytes: Bytes | None = None
    utilization_ratio: Ratio | None = None
    owner: Workload | None = None  # not set in documents, which list processes by holder
    # the program's name without arguments; set only on a node without Kubernetes
    command: Name = ""


# `Holder.source` if a scheduler reserved the device for pods that podgpu cannot find
RESERVATION = "reservation"
_NO_USAGE = HolderUsage()


class Holder(Workload, frozen=True):
    """A workload that has the device allocated, or uses it without an allocation (`source` is
    empty).
    """

    source: Name = ""
    share_ratio: Share | None = None
    replica: Name = ""  # number of the time slice or vGPU, if the device id names one
    labels: LabelTexts = {}  # additional labels from the source, such as dra_claim_name
    usage: HolderUsage | None = None  # None if it cannot be measured
    # only on a node without Kubernetes
    running: UpTo4096[RunningProcess] = ()

    @property
    def known_usage(self) -> HolderUsage:
        """The usage. Empty if it cannot be measured."""
        return self.usage or _NO_USAGE


class NamespaceUsage(Document, frozen=True):
    """Total usage of one GPU model by a namespace. Includes containers that have ended."""

    namespace: Name
    model: Name
    profile: Name = ""  # MIG profile; the label `modelName` is `<model> MIG <profile>`
    allocated_ns: Amount | None = None
    busy_ns: Amount | None = None
    energy_mj: Millijoules | None = None
    counted_since: UnixTime | None = None  # when the counters were 0
    wasted_idle_ns: Amount | None = None
    wasted_underused_ns: Amount | None = None


class Condition(Document, frozen=True):
    """A problem of a GPU. conditions.csv contains the severity and a description for each name."""

    name: Name
    since: UnixTime | None = None
    detail: Name = ""
    text: Text = ""  # set only for a condition of the history


class Orphan(Document, frozen=True, kw_only=True):
    """A process that holds memory of a device, although its container has ended or the device is
    free.
    """

    pid: Count
    memory_used_bytes: Bytes
    since: UnixTime
    program: Name = ""
    is_gone: bool = False  # the process does not exist, but the driver lists it
    former: Workload | None = None  # the container that has ended


class FailureCount(Document, frozen=True):
    """How often a GPU began to have a condition within 24 hours."""

    condition: Name
    count: Count
    first: UnixTime
    last: UnixTime


class XidCulprit(Workload, frozen=True, kw_only=True):
    """A workload whose processes caused an XID. If all names are empty, the process is outside pods
    and jobs.
    """

    total: Amount
    last_seen: UnixTime
    pid: Count | None = None  # the last process that caused it
    program: Name = ""
    affected: UpTo64[Workload] = ()  # other workloads that used the device then


class XidCount(Document, frozen=True):
    xid: Amount
    total: Amount
    last_seen: UnixTime
    in_window: Amount = 0  # number of occurrences within --xid-count-window-size
    # only XIDs that applications cause; omits those whose cause is unknown
    culprits: UpTo64[XidCulprit] = ()


class DeviceTotals(Document, frozen=True):
    """Total usage of a device. Each total is the sum of the holders' usage and the unattributed
    usage.

    Usage outside jobs and pods counts as unattributed, because it has no series of its own.
    """

    utilization_ratio: Ratio | None = None  # in the same time window as the holders' ratios
    memory_used_bytes: Bytes | None = None
    busy_ns: Amount | None = None
    energy_mj: Millijoules | None = None
    unattributed_memory_bytes: Bytes | None = None
    unattributed_busy_ns: Amount | None = None
    unattributed_energy_mj: Millijoules | None = None
    method: Name = ""  # samples, switches, exact or mps
    # why no better method is used on a shared device, see `metrics.usage_methods.IMPROVEMENTS`
    method_limit: Name = ""
    # fraction of the last usage window in which at least one workload waited
    pressure_ratio: Ratio | None = None
    counted_since: UnixTime | None = None  # when the counters were 0


_NO_TOTALS = DeviceTotals()


class GpuOrInstance(Document, frozen=True):
    """Fields that `DeviceState` (a GPU) and `MigInstance` have in common."""

    hidden: bool = False  # not selected by --devices; only identity, holders and health are set
    utilization_ratio: Ratio | None = None
    memory_used_bytes: Bytes | None = None
    memory_total_bytes: Bytes | None = None
    # measured at `usage_at`, while other values are from `taken_at`
    usage: DeviceTotals | None = None
    holders: UpTo4096[Holder] = ()
    fields: Fields | None = None  # None if the last reading of the device failed
    details: UpTo1024[Detail] = ()
    unsupported: UpTo1024[Name] = ()
    xids: UpTo256[XidCount] = ()
    orphans: UpTo64[Orphan] = ()  # processes that hold memory although their container has ended
    kubernetes_health: Name = ""  # `HEALTHY` or `UNHEALTHY`; empty if Kubernetes does not say
    last_xid: Amount | None = None
    # event -> number in the window, number since the start
    clock_events: Annotated[dict[Name, tuple[Amount, Amount]], Meta(max_length=256)] = {}

    @property
    def known_usage(self) -> DeviceTotals:
        """The total usage. Empty if it cannot be measured."""
        return self.usage or _NO_TOTALS


class MigInstance(GpuOrInstance, frozen=True, kw_only=True):
    id: Count
    profile: Name = ""
    # UUIDs of its compute instances, as the kubelet reports them
    uuids: UpTo64[Name] = ()


class DeviceState(GpuOrInstance, frozen=True, kw_only=True):
    """One physical GPU with its MIG instances."""

    uuid: Name = ""
    index: Count | None = None
    model: Name = ""
    pci_bus_id: Name = ""
    minor: Count | None = None
    maker: Name = "nvidia"
    mig_enabled: bool = False
    power_mw: Milliwatts | None = None
    power_limit_mw: Milliwatts | None = None  # enforced limit; set only by podgpu with NVML
    temperature_celsius: Celsius | None = None
    # reason -> total time, counted by the driver
    throttled_ns: Annotated[dict[Name, Amount], Meta(max_length=64)] = {}
    conditions: UpTo64[Condition] = ()  # a GPU that is `lost` has no values
    # conditions that were checked and are absent
    healthy: UpTo256[Name] = ()
    failures: UpTo64[FailureCount] = ()  # of the last 24 hours
    last_holders: UpTo4096[Workload] = ()  # set only for a lost GPU
    instances: UpTo64[MigInstance] = ()


class SourceStatus(Document, frozen=True):
    """The result of a source's last reading, and its failures since the exporter's start."""

    name: Name
    up: bool | None = None  # None if the source was not read; then only the counters are set
    seconds: Seconds | None = None
    error: Name = ""
    message: Text = ""
    device: Name = ""  # UUID of the GPU, if the source is a single GPU
    # number of failures since the start, by reason
    errors: CountsByName = {}
    # current number of unmapped assignments, by reason
    unmapped: CountsByName = {}


class EntityState(Document, frozen=True):
    """An NVSwitch, an NVLink, a CPU or a core."""

    kind: Name  # SWITCH, LINK, CPU or CPU_CORE
    labels: LabelTexts
    fields: Fields


class VcudaRequest(Workload, frozen=True):
    """Resources that a container requested from gpu-manager. It is unknown which card the container
    uses.
    """

    cores: Amount = 0  # hundredths of a card
    memory_blocks: Amount = 0  # blocks of 256 MiB

    @classmethod
    def for_holder(cls, holder: Workload, cores: int, memory_blocks: int) -> VcudaRequest:
        return cls(**msgspec.structs.asdict(holder), cores=cores, memory_blocks=memory_blocks)


class NodeState(Document, frozen=True, kw_only=True):
    """The state of one node. `GET /api/v1/node` returns it as JSON."""

    # `omit_defaults` omits plain defaults
    schema: int = msgspec.field(default_factory=lambda: SCHEMA)
    producer: Name  # podgpu or dcgm-exporter; dcgm-exporter does not report all values
    version: Name = ""
    node: Name = ""  # if empty, the cluster view uses the exporter's address as the node name
    exporter_id: Name = ""  # random; changes at each start, which resets all counters
    interval_seconds: Seconds | None = None
    # when the counters of XIDs and failed readings were 0
    counted_since: UnixTime | None = None
    # end of the last reading of GPU values; None before the first reading
    taken_at: UnixTime | None = None
    holders_at: UnixTime | None = None
    usage_at: UnixTime | None = None
    stale: bool = False  # True if values are omitted because they were too old
    simulated: bool = False
    gpus_expected: Count | None = None  # number of GPUs on the PCI bus
    gpus_visible: Count | None = None
    gpus_lost: Count | None = None
    devices: UpTo1024[DeviceState] = ()
    namespaces: Annotated[tuple[NamespaceUsage, ...], Meta(max_length=8192)] = ()
    sources: UpTo1024[SourceStatus] = ()
    entities: UpTo4096[EntityState] = ()  # NVSwitches, NVLinks, CPUs, cores
    vcuda: UpTo4096[VcudaRequest] = ()
    # namespace/pod -> labels of --kubernetes-enable-pod-labels
    pod_labels: Annotated[dict[Text, LabelTexts], Meta(max_length=8192)] = {}
    # DCGM field -> number of values rejected since the exporter's start; after decoding, also
    # member of `NodeState` -> number of impossible values that the decoder removed
    dropped: Annotated[dict[Name, Amount], Meta(max_length=1024)] = {}


def all_devices(state: NodeState) -> Iterator[tuple[DeviceState, GpuOrInstance]]:
    """Yields pairs of GPU and device. The device is the GPU itself or one of its MIG instances."""
    for gpu in state.devices:
        yield gpu, gpu
        for instance in gpu.instances:
            yield gpu, instance


def has_readings(state: NodeState) -> bool:
    """Returns True if the last reading of at least one GPU or MIG instance succeeded."""
    return any(device.fields is not None for _, device in all_devices(state))


encode_node = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(NodeState)
_MAX_COPIES = 256  # a pod that holds many slices of a GPU is listed once for each slice


@cache
def optional_numbers() -> Mapping[str, Any]:
    """Returns the numbers that a document may lack, and their types, which have limits.

    Members of several structs that have the same name also have the same limits.
    """
    numbers = {}
    for shape in (
        WaitPart,
        HolderUsage,
        RunningProcess,
        Holder,
        NamespaceUsage,
        Condition,
        FailureCount,
        XidCulprit,
        XidCount,
        DeviceTotals,
        MigInstance,
        DeviceState,
        SourceStatus,
        NodeState,
    ):
        for member in msgspec.structs.fields(shape):
            # The types of numbers allow 0, and others do not.
            if not member.required and _is_valid(0, member.type):
                numbers[member.name] = member.type

    return numbers


def decode_node(body: bytes) -> NodeState:
    """Decodes a NodeState. Raises msgspec.DecodeError if it is invalid or has a newer schema.

    Impossible numbers are removed, see `convert_node`.
    """
    try:
        state = _decoder.decode(body)
    except msgspec.ValidationError:
        return convert_node(msgspec.json.decode(body))
    _check(state)
    return state


def convert_node(document: Any) -> NodeState:
    """Converts a document of plain objects. Raises msgspec.ValidationError if it is invalid.

    Removes impossible `optional_numbers` and counts them in `NodeState.dropped`.
    """
    try:
        state = msgspec.convert(document, NodeState)
    except msgspec.ValidationError:
        dropped: Counter[str] = Counter()
        _drop_impossible(document, dropped)
        state = msgspec.convert(document, NodeState)
        state = msgspec.structs.replace(state, dropped={**state.dropped, **dropped})

    _check(state)
    return state


def _drop_impossible(value: Any, dropped: Counter[str]) -> None:
    """Removes impossible numbers from the objects and lists in `value`. Counts them by name."""
    if isinstance(value, list):
        for item in value:
            _drop_impossible(item, dropped)
    if not isinstance(value, dict):
        return

    for name, member in list(value.items()):
        if name not in optional_numbers():
            _drop_impossible(member, dropped)
        elif not _is_valid(member, optional_numbers()[name]):
            del value[name]
            dropped[name] += 1


def _is_valid(value: object, shape: Any) -> bool:
    try:
        msgspec.convert(value, shape)
    except msgspec.ValidationError:
        return False
    return True


def _check(state: NodeState) -> None:
    """Raises msgspec.ValidationError for a newer schema, or if two devices have the same name."""
    if state.schema > SCHEMA:
        raise msgspec.ValidationError(
            f"schema {state.schema} is newer than {SCHEMA}, so update this podgpu"
        )

    _check_unique("GPU", [gpu.uuid or gpu.index for gpu in state.devices])
    for gpu in state.devices:
        _check_holders(gpu)
        if gpu.instances:
            _check_unique("MIG instance", [instance.id for instance in gpu.instances])
        for instance in gpu.instances:
            _check_holders(instance)


def _check_unique(what: str, ids: list[Any]) -> None:
    if len(set(ids)) == len(ids):
        return
    [(repeated, count)] = Counter(ids).most_common(1)
    raise msgspec.ValidationError(f"the {what} {repeated!r} is listed {count} times")


def _check_holders(device: GpuOrInstance) -> None:
    if len(device.holders) <= _MAX_COPIES:
        return
    copies = Counter(holder.key for holder in device.holders)
    key, count = copies.most_common(1)[0]
    if count > _MAX_COPIES:
        raise msgspec.ValidationError(f"the holder {key!r} of one device is listed {count} times")


# Readings


@dataclass(frozen=True, slots=True)
class Inventory:
    gpus: tuple[Device, ...]
    # index and reason of GPUs that the driver cannot read
    unreachable: dict[int, str] = field(default_factory=dict)
    # indices of unreachable GPUs whose first driver call has not returned yet
    hung: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class GpuReading:
    """The values of one physical GPU and its MIG instances. Fields without a value are omitted."""

    values: Mapping[Device, FieldValues]  # the GPU comes before its instances
    # fields of the GPU that have several values, such as health checks
    details: tuple[Detail, ...] = ()
    unsupported: tuple[tuple[str, int], ...] = ()  # device key and field id
    # fields with an invalid value (special code, NaN, impossible), once per occurrence
    dropped: tuple[int, ...] = ()
    # reasons of failed calls; the values of other calls are still valid
    errors: tuple[str, ...] = ()
    # links of the GPU, or (in `read_others`) switches and CPUs
    entities: tuple[EntityState, ...] = ()
    # additional fields for the GPU's page
    slow_values: FieldValues = field(default_factory=dict)
    reports_errors: bool = True  # False if the source cannot report errors (XIDs) of this GPU
    # number of NVLinks that are up; None if the GPU has none or does not report them
    links_up: int | None = None


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    device: str  # `Device.key`
    code: int  # the vendor's error number; NVIDIA's is the XID
    at: float  # Unix time


@dataclass(frozen=True, slots=True)
class Assignment:
    """One workload holds one device. A device can have many assignments."""

    device: str  # `Device.key`
    holder: Workload
    source: str
    replica: str = ""  # number of the time slice or vGPU, if the device id names one
    share: float | None = None  # fraction of the device, if known
    attributes: Pairs = ()  # additional labels for the device's series, such as dra_claim_name
    # if True, an unknown share is not assumed to be 1, even for a sole holder
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class Unmapped:
    """An assignment that cannot be used, for example because its GPU is unknown. `reason` explains
    why.
    """

    source: str
    reason: str
    device_id: str
    resource: str
    holder: Workload


HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"


class KubernetesHealth(NamedTuple):
    """What Kubernetes thinks about a device."""

    health: str  # `HEALTHY` or `UNHEALTHY`
    message: str = ""


@dataclass(frozen=True, slots=True)
class Allocation:
    """The assignments of one or all allocation sources. `sources`, `api_uids` and `at` are set only
    for all sources, as is `kubernetes_health`.
    """

    assignments: tuple[Assignment, ...] = ()
    unmapped: tuple[Unmapped, ...] = ()
    vcuda: tuple[VcudaRequest, ...] = ()
    offered: frozenset[str] = frozenset()  # UUIDs of all allocatable GPUs
    # All pods that the kubelet lists, also those without a GPU. Empty for other sources.
    listed_pods: frozenset[PodName] = frozenset()
    source_instance: int = 0  # changes when the source restarts or the connection to it breaks
    sources: tuple[SourceStatus, ...] = ()
    # static pods: UID on the node -> UID in the API server
    api_uids: Mapping[str, str] = field(default_factory=dict)
    # By device key. Omits devices about which Kubernetes says nothing.
    kubernetes_health: Mapping[str, KubernetesHealth] = field(default_factory=dict)
    at: float | None = None  # Unix time

    @property
    def reserved(self) -> set[str]:
        """Keys of devices that a scheduler reserved for pods that podgpu may not know."""
        return {entry.device_id for entry in self.unmapped if entry.reason == "reserved"}

    def with_api_uid(self, workload: W) -> W:
        """Replaces the UID of a static pod by its UID in the API server, if that is known."""
        uid = self.api_uids.get(workload.uid)
        if uid is None:
            return workload
        return msgspec.structs.replace(workload, uid=uid)


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """One process on one device, as the driver reports it."""

    device: str  # `Device.key`
    pid: int
    memory: int | None = None
    # True for MPS clients; the driver attributes their busy time to the MPS server
    mps: bool = False


@dataclass(frozen=True, slots=True)
class ProcessWaits:
    """How long processes waited for a device in one time window. A process does not wait while it
    is resident.
    """

    processes: Mapping[int, tuple[int, int, int]]  # pid -> nanoseconds: estimate, minimum, maximum
    pairs: Mapping[tuple[int, int], int]  # (waiting pid, running pid) -> estimated nanoseconds
    pressure_ns: int  # time in which at least one process waited


@dataclass(frozen=True, slots=True)
class SwitchStatus:
    """State of the context-switch log. The log is used only while a GPU is shared."""

    errors: tuple[str, ...] = ()  # reasons of the errors in this reading
    # why usage comes from the driver's samples instead of the log; empty if it does not
    fallback_reason: str = ""
    fallback: str = ""  # message for `fallback_reason`


@dataclass(frozen=True, slots=True)
class UsageProblems:
    """What could not be read of a GPU's usage."""

    # driver functions that returned an invalid value, once per occurrence
    dropped: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()  # reasons of the calls that failed
    # unsupported driver functions, and the value that is missing
    lacks: tuple[tuple[str, Lack], ...] = ()
    switches: SwitchStatus | None = None  # None if context switches are not used


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    """Usage of one device since the previous reading. Unknown values are None."""

    device: Device
    # length of the time window by the driver's clock; 0 if the driver did not answer
    window_ns: int
    busy_ns: int | None = None
    energy_mj: int | None = None  # since the counter was last read; None if it was not read
    memory_used: int | None = None
    processes: tuple[ProcessUsage, ...] | None = None  # None if podgpu is in another PID namespace
    # by pid; None if the driver does not report it; see also `HIDDEN_PID`
    process_busy_ns: Mapping[int, int | None] | None = None
    method: UsageMethod = "samples"  # how `process_busy_ns` was measured
    method_limit: str = ""  # see `DeviceTotals.method_limit`
    # by pid: busy time in recent samples of the driver, if the log has times of hidden processes
    sampled_busy_ns: Mapping[int, int] = field(default_factory=dict)
    # by pid: time in which its context was on the engine, busy or idle
    resident_ns: Mapping[int, int] | None = None
    # by pid: Unix time at which its context was last on the engine; None without the log
    last_resident: Mapping[int, float] | None = None
    switching_ns: int = 0  # busy time spent on context switches; it is not attributed
    # by pid: maximum time for saving its context
    saving_ns: Mapping[int, int] = field(default_factory=dict)
    waits: ProcessWaits | None = None  # None if context switches are not read
    bounded: bool = False  # True if lower and upper bounds of the busy time are computed
    # at the end of the window; used to estimate energy while the counter is not read
    power_mw: int | None = None
    instances: tuple[DeviceUsage, ...] = ()  # usage of the GPU's MIG instances
    problems: UsageProblems = UsageProblems()  # of the GPU and its instances

    @property
    def own_processes(self) -> list[ProcessUsage]:
        """The processes on this device, without those of other devices. Empty if unknown."""
        processes = self.processes or ()
        return [process for process in processes if process.device == self.device.key]
