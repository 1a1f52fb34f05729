"""Encodes the documents of nodes as OpenTelemetry metrics (OTLP, protobuf).

GPUs have the names of OpenTelemetry's conventions for hardware (`hw.*`). What containers and
namespaces use has podgpu's Prometheus names, with dots: `podgpu.container.gpu.busy`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Literal, NamedTuple

from podgpu import __version__
from podgpu.metrics import otlp_pb2 as pb
from podgpu.metrics.conditions import breaks_gpu, conditions, parse_xids, xid_spec
from podgpu.metrics.encode import FamilySpec, families_in
from podgpu.metrics.labels import visible_devices
from podgpu.metrics.mig import billed_name
from podgpu.model import (
    MJ,
    NS,
    Condition,
    DeviceState,
    DeviceTotals,
    GpuOrInstance,
    HolderUsage,
    MigInstance,
    NamespaceUsage,
    NodeState,
    Pairs,
    PodName,
    Workload,
    WorkloadOwner,
    device_key,
    device_name,
)

SERVICE_NAME = "service.name"
GPU = (("hw.type", "gpu"),)
STATES = ("ok", "degraded", "failed", "predicted_failure")
"""Values of `hw.state`."""
_STATE_OF_CONDITION = {
    "row_remap_pending": "predicted_failure",
    "recurring": "predicted_failure",
    "nvlink": "degraded",
}
"""Condition -> `hw.state`, if it does not follow from the severity."""
_STATE_OF_SEVERITY = {"broken": "failed", "warning": "degraded"}
_WORST_FIRST = ("failed", "predicted_failure", "degraded")
_ECC_ERRORS = {
    "corrected": "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL",
    "uncorrected": "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",
}
_CODEC_FIELDS = {"encoder": "DCGM_FI_DEV_ENC_UTIL", "decoder": "DCGM_FI_DEV_DEC_UTIL"}
_OWNER_ATTRIBUTES = {
    "Deployment": "k8s.deployment.name",
    "StatefulSet": "k8s.statefulset.name",
    "DaemonSet": "k8s.daemonset.name",
    "ReplicaSet": "k8s.replicaset.name",
    "Job": "k8s.job.name",
    "CronJob": "k8s.cronjob.name",
}
"""Kind of a pod's owner -> attribute of OpenTelemetry. Other kinds have none."""
Number = int | float | None
Instrument = Literal["gauge", "counter", "updowncounter"]
Counted = HolderUsage | DeviceTotals | NamespaceUsage


class PushedNode(NamedTuple):
    """A node whose document is sent, and what is known of it besides the document."""

    state: NodeState
    cluster: str = ""
    owners: Mapping[PodName, WorkloadOwner] = {}


class Metric(NamedTuple):
    name: str
    instrument: Instrument
    unit: str
    description: str


UTILIZATION = Metric(
    "hw.gpu.utilization",
    "gauge",
    "1",
    "Fraction of time in which the GPU (general), its encoder or its decoder was busy.",
)
MEMORY_USAGE = Metric("hw.gpu.memory.usage", "updowncounter", "By", "Memory in use.")
MEMORY_LIMIT = Metric("hw.gpu.memory.limit", "updowncounter", "By", "Total memory.")
MEMORY_UTILIZATION = Metric(
    "hw.gpu.memory.utilization", "gauge", "1", "Memory in use as a fraction of the total."
)
POWER = Metric("hw.power", "gauge", "W", "Power of the GPU.")
ENERGY = Metric("hw.energy", "counter", "J", "Energy of the GPU since the exporter started.")
TEMPERATURE = Metric("hw.temperature", "gauge", "Cel", "Temperature of the GPU.")
ERRORS = Metric(
    "hw.errors",
    "counter",
    "{error}",
    "Errors of the GPU by type: xid_N since the exporter started; corrected and uncorrected "
    "memory errors since the driver was loaded.",
)
STATUS = Metric(
    "hw.status",
    "updowncounter",
    "1",
    "1 for the current state of the GPU, 0 for the others. Absent if the state is unknown.",
)
HARDWARE = (
    UTILIZATION,
    MEMORY_USAGE,
    MEMORY_LIMIT,
    MEMORY_UTILIZATION,
    POWER,
    ENERGY,
    TEMPERATURE,
    ERRORS,
    STATUS,
)


# Metrics of containers, namespaces and unattributed usage. families.csv defines them.

_UNITS = {"ratio": "1", "seconds": "s", "bytes": "By", "joules": "J", "processes": "{process}"}
# The metrics `hw.energy` and `hw.gpu.memory.usage` have these values.
_SAME_AS_HARDWARE = ("energy_mj", "memory_used_bytes")


class _Member(NamedTuple):
    """A field of a struct that is sent as a metric."""

    metric: Metric
    name: str
    factor: int
    attributes: Pairs = ()


@cache
def own_metrics(part: str) -> tuple[_Member, ...]:
    """Returns the metrics of a struct: `holder_usage`, `device_totals` or `namespaces`."""
    members = []
    for spec in families_in("exporter").values():
        is_repeated = part == "device_totals" and spec.member in _SAME_AS_HARDWARE
        if spec.part != part or spec.is_text or is_repeated:
            continue

        metric = _name_metric(spec)
        for member, attributes in spec.list_members():
            members.append(_Member(metric, member, spec.factor, attributes))
    return tuple(members)


def _name_metric(spec: FamilySpec) -> Metric:
    """Returns the metric for a Prometheus family.

    The unit and `total` leave the name, because receivers such as Prometheus add them again:
    `podgpu_container_gpu_busy_seconds_total` is `podgpu.container.gpu.busy` in seconds.
    """
    unit = "1"
    words = []
    for word in spec.name.split("_"):
        unit = _UNITS.get(word, unit)
        is_suffix = word == "total" or word in _UNITS
        if not is_suffix or word == "processes":
            words.append(word)

    instrument: Instrument = "gauge"
    if spec.type == "counter":
        instrument = "counter"
    elif unit in ("By", "{process}"):
        instrument = "updowncounter"

    return Metric(".".join(words), instrument, unit, spec.help)


# Requests


def encode_metrics(
    nodes: Iterable[PushedNode], attributes: Mapping[str, str], now: float, *, kubernetes: bool
) -> Iterator[bytes]:
    """Yields a `ResourceMetrics` for each node, encoded as a part of a request.

    Parts can be joined to a request by concatenation. `attributes`: of the resource. `now`: the
    time of XIDs and conditions, which change between two readings of the GPUs.
    """
    for node in nodes:
        metrics = _Metrics()
        _add_node(metrics, node, now)
        if not metrics.messages:
            continue

        request = pb.MetricsRequest()
        message = request.resource_metrics.add()
        resource = make_resource(node, attributes, kubernetes=kubernetes)
        message.resource.CopyFrom(resource)
        scope = message.scope_metrics.add(scope=make_scope())
        scope.metrics.extend(metrics.messages.values())
        yield request.SerializeToString()


def make_scope() -> pb.Scope:
    return pb.Scope(name="podgpu", version=__version__)


def make_resource(
    node: PushedNode, attributes: Mapping[str, str], *, kubernetes: bool
) -> pb.Resource:
    """Returns the resource of a node. What is known of the node replaces `attributes`."""
    state = node.state
    own = {"host.name": state.node, "service.instance.id": state.node}
    if kubernetes:
        own["k8s.node.name"] = state.node
    if node.cluster:
        own["k8s.cluster.name"] = node.cluster

    defaults = {SERVICE_NAME: "podgpu", "service.version": __version__}
    named = {**defaults, **attributes, **own}
    return pb.Resource(attributes=make_attributes(named.items()))


def make_attributes(pairs: Iterable[tuple[str, str]]) -> list[pb.KeyValue]:
    """Omits empty values."""
    attributes = []
    for name, text in pairs:
        if text:
            value = pb.AnyValue(string_value=text)
            attributes.append(pb.KeyValue(key=name, value=value))
    return attributes


def unix_ns(seconds: float) -> int:
    return round(seconds * NS)


class _Metrics:
    """The metrics of one resource. A metric is a message with a data point per series."""

    def __init__(self) -> None:
        self.messages: dict[str, pb.Metric] = {}

    def add(
        self,
        metric: Metric,
        attributes: Iterable[pb.KeyValue],
        value: Number,
        at: float | None,
        since: float | None = None,
    ) -> None:
        """Adds a data point, unless its value or its time is unknown."""
        if value is None or at is None:
            return

        point = self._series_of(metric).data_points.add(time_unix_nano=unix_ns(at))
        point.attributes.extend(attributes)
        if isinstance(value, int):
            point.as_int = value
        else:
            point.as_double = value

        # A node's clock may have been set back since then.
        if since is not None and since <= at:
            point.start_time_unix_nano = unix_ns(since)

    def _series_of(self, metric: Metric) -> pb.Gauge | pb.Sum:
        message = self.messages.get(metric.name)
        if message is None:
            message = pb.Metric(name=metric.name, description=metric.description, unit=metric.unit)
            self.messages[metric.name] = message

        if metric.instrument == "gauge":
            return message.gauge
        message.sum.aggregation_temporality = pb.CUMULATIVE
        message.sum.is_monotonic = metric.instrument == "counter"
        return message.sum


# Values


def _add_node(metrics: _Metrics, node: PushedNode, now: float) -> None:
    state = node.state
    # Before the first reading, nothing is known.
    if state.taken_at is None:
        return

    for gpu in state.devices:
        _add_status(metrics, gpu, state, now)

    for gpu, device in visible_devices(state):
        pairs = device_attributes(gpu, device)
        _add_device(metrics, device, pairs, state)
        for xid in device.xids:
            attributes = make_attributes([*pairs, *GPU, ("error.type", f"xid_{xid.xid}")])
            metrics.add(ERRORS, attributes, xid.total, now, state.counted_since)

        if isinstance(device, DeviceState):
            _add_gpu(metrics, device, pairs, state)
        _add_holders(metrics, device, pairs, node)
        if device.usage is not None:
            _add_counted(metrics, "device_totals", device.usage, pairs, state)

    for usage in state.namespaces:
        model = billed_name(usage.model, usage.profile) if usage.profile else usage.model
        named = [("k8s.namespace.name", usage.namespace), ("hw.model", model)]
        _add_counted(metrics, "namespaces", usage, named, state)


def _add_holders(
    metrics: _Metrics, device: GpuOrInstance, pairs: list[tuple[str, str]], node: PushedNode
) -> None:
    for holder in device.holders:
        if holder.usage is None or not holder.has_labels:
            continue
        owner = node.owners.get(holder.pod_name)
        own = pairs + holder_attributes(holder, owner)
        _add_counted(metrics, "holder_usage", holder.usage, own, node.state)


def device_attributes(gpu: DeviceState, device: GpuOrInstance) -> list[tuple[str, str]]:
    """Returns the attributes that identify a GPU or a MIG instance. Values may be empty."""
    name = device_name(gpu.maker, gpu.index)
    vendor = "NVIDIA" if gpu.maker == "nvidia" else gpu.maker
    if not isinstance(device, MigInstance):
        return [
            ("hw.id", gpu.uuid),
            ("hw.name", name),
            ("hw.model", gpu.model),
            ("hw.vendor", vendor),
        ]

    # An instance with several compute instances has several UUIDs, and none of its own.
    key = device_key(gpu.uuid, device.id)
    if len(device.uuids) == 1 and device.uuids[0]:
        key = device.uuids[0]
    if name:
        name += f"/gi{device.id}"
    return [
        ("hw.id", key),
        ("hw.name", name),
        ("hw.model", billed_name(gpu.model, device.profile)),
        ("hw.vendor", vendor),
        ("hw.parent", gpu.uuid),
    ]


def holder_attributes(holder: Workload, owner: WorkloadOwner | None) -> list[tuple[str, str]]:
    """Returns the attributes of a container or an HPC job. Values may be empty."""
    if holder.job:
        return [("podgpu.hpc.job", holder.job)]
    pairs = [
        ("k8s.namespace.name", holder.namespace),
        ("k8s.pod.name", holder.pod),
        ("k8s.pod.uid", holder.uid),
        ("k8s.container.name", holder.container),
        ("container.id", holder.container_id),
    ]
    if owner is not None and owner.kind in _OWNER_ATTRIBUTES:
        pairs.append((_OWNER_ATTRIBUTES[owner.kind], owner.name))
    return pairs


def _add_device(
    metrics: _Metrics, device: GpuOrInstance, pairs: list[tuple[str, str]], state: NodeState
) -> None:
    at = state.taken_at
    attributes = make_attributes(pairs)
    ratio = device.utilization_ratio
    general = make_attributes([*pairs, ("hw.gpu.task", "general")])
    metrics.add(UTILIZATION, general, _as_float(ratio), at)

    used = device.memory_used_bytes
    total = device.memory_total_bytes
    metrics.add(MEMORY_USAGE, attributes, used, at)
    metrics.add(MEMORY_LIMIT, attributes, total, at)
    if used is not None and total:
        metrics.add(MEMORY_UTILIZATION, attributes, used / total, at)


def _add_gpu(
    metrics: _Metrics, gpu: DeviceState, pairs: list[tuple[str, str]], state: NodeState
) -> None:
    """Adds what only a whole GPU has."""
    at = state.taken_at
    attributes = make_attributes([*pairs, *GPU])
    if gpu.power_mw is not None:
        metrics.add(POWER, attributes, gpu.power_mw / 1000, at)

    usage = gpu.known_usage
    if usage.energy_mj is not None:
        joules = usage.energy_mj / MJ
        metrics.add(ENERGY, attributes, joules, state.usage_at, usage.counted_since)

    metrics.add(TEMPERATURE, attributes, _as_float(gpu.temperature_celsius), at)

    fields = gpu.fields or {}
    for task, field in _CODEC_FIELDS.items():
        percent = fields.get(field)
        if isinstance(percent, int | float):
            named = make_attributes([*pairs, ("hw.gpu.task", task)])
            metrics.add(UTILIZATION, named, percent / 100, at)

    for kind, field in _ECC_ERRORS.items():
        count = fields.get(field)
        if isinstance(count, int):
            # The driver does not report since when it counts.
            metrics.add(ERRORS, make_attributes([*pairs, *GPU, ("error.type", kind)]), count, at)


def _as_float(number: Number) -> float | None:
    """A series must not change between integers and floats."""
    return None if number is None else float(number)


def _add_status(metrics: _Metrics, gpu: DeviceState, state: NodeState, now: float) -> None:
    # The cluster view does not keep the list of healthy conditions. podgpu always checks some.
    is_checked = state.producer == "podgpu" and gpu.fields is not None
    current = find_state(gpu)
    if not current and is_checked:
        current = "ok"
    if not current:
        return
    pairs = device_attributes(gpu, gpu)
    for name in STATES:
        attributes = make_attributes([*pairs, *GPU, ("hw.state", name)])
        metrics.add(STATUS, attributes, int(name == current), now)


def find_state(gpu: DeviceState) -> str:
    """Returns the GPU's `hw.state`. Empty if nothing is known of its health."""
    if not gpu.conditions and not gpu.healthy:
        return ""

    states = set()
    for condition in gpu.conditions:
        if breaks_gpu(condition.name):
            states.add(_find_state_of(condition))

    for name in _WORST_FIRST:
        if name in states:
            return name

    return "ok"


def _find_state_of(condition: Condition) -> str:
    if condition.name == "xid":
        xids = parse_xids(condition.detail)
        # An unknown XID may need action.
        needs_action = not xids or any(xid_spec(xid).needs_action for xid in xids)
        return "failed" if needs_action else "degraded"

    state = _STATE_OF_CONDITION.get(condition.name)
    if state is not None:
        return state

    spec = conditions().get(condition.name)
    severity = "broken" if spec is None else spec.severity
    return _STATE_OF_SEVERITY[severity]


def _add_counted(
    metrics: _Metrics,
    part: str,
    struct: Counted,
    pairs: list[tuple[str, str]],
    state: NodeState,
) -> None:
    attributes = make_attributes(pairs)
    for member in own_metrics(part):
        value: Number = getattr(struct, member.name)
        if value is None:
            continue
        if member.factor == 0:
            value = _as_float(value)
        elif member.factor > 1:
            value = value / member.factor

        own = attributes
        if member.attributes:
            own = [*attributes, *make_attributes(member.attributes)]

        since = struct.counted_since if member.metric.instrument == "counter" else None
        metrics.add(member.metric, own, value, state.usage_at, since)
