"""Settings of the cluster view, and the interface that its collectors (`scrape`, `prometheus`)
implement.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import msgspec

from podgpu.errors import Note, UsageError
from podgpu.fleet.parts import ContainerName, EngineState, HeldPart, is_shown
from podgpu.fleet.prices import NO_PRICES, Prices
from podgpu.fleet.setup import SetupHint
from podgpu.metrics.fields import meaning, nearest_names
from podgpu.model import (
    DeviceState,
    NodeState,
    PodName,
    WorkloadKey,
    WorkloadOwner,
    group_by,
)

MAX_ROUNDS = 1000  # limit of --window divided by --interval; bounds the memory of the rolling means
_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1))


@dataclass(frozen=True)
class ViewSettings:
    """Options of the cluster view. Times are in seconds."""

    interval: float = 15.0
    # nodes with an older reading are stale: means and counts exclude them
    stale_after: float = 45.0
    # nodes with an older reading are dropped, unless their exporter is still listed
    drop_after: float = 300.0
    used_field: str = "DCGM_FI_DEV_MEM_COPY_UTIL"
    extra_fields: tuple[str, ...] = ()  # fields that `podgpu autoscale` needs
    window: float = 300.0
    # a holder idle for longer than this is wasteful; None disables the check
    idle_after: float | None = 1800.0
    # values of a job's GPUs are averaged over this time before they are compared
    compared_seconds: float = 60.0
    legacy_map_metrics: bool = False
    export_tokens: bool = False
    # fail if Prometheus has several clusters, because an HPA names no cluster
    one_cluster: bool = False
    max_gpus: float = math.inf  # with more GPUs in Prometheus, each round reads only totals
    hints: tuple[SetupHint, ...] = ()  # what the options leave out
    savings_skip_namespaces: frozenset[str] = frozenset()

    @cached_property
    def full(self) -> float:
        """Value of --used-field on a fully busy device: 100 for a percentage, 1 for a ratio."""
        return full_scale(self.used_field)

    @cached_property
    def keep_fields(self) -> frozenset[str]:
        """Names of the DCGM fields that collectors store."""
        return frozenset({self.used_field_name, *self.extra_fields})

    @cached_property
    def used_field_name(self) -> str:
        """Key of --used-field in `GpuOrInstance.fields`."""
        spec = meaning(self.used_field)
        if spec:
            return spec.field.name
        return self.used_field


def check_window(option: str, window: float, interval: float) -> None:
    """Raises UsageError if the window has too many readings."""
    if window / interval > MAX_ROUNDS:
        raise UsageError(
            f"{option} {duration_text(window)} has more than {MAX_ROUNDS} readings at --interval "
            f"{duration_text(interval)}: make the window shorter or the interval longer"
        )


def full_scale(field: str) -> float:
    """Returns the field's value on a fully busy device. Raises UsageError if the field is not a
    utilisation.
    """
    spec = meaning(field)
    if spec is None:
        near = nearest_names(field)
        raise UsageError(
            f"--used-field {field}: there is no such field{f'; is it {near[0]}?' if near else ''}"
        )

    if spec.field.unit.startswith("%"):
        return 100.0
    if spec.field.unit.startswith("ratio"):
        return 1.0

    raise UsageError(
        f"--used-field {field} is not a utilisation: choose a field in % or a ratio, such as "
        "DCGM_FI_DEV_GPU_UTIL"
    )


def duration_text(seconds: float) -> str:
    """Formats a duration like Prometheus: 5m, 1h30m, 500ms."""
    rest = round(seconds * 1000)
    text = ""
    for unit, length in _UNITS:
        count, rest = divmod(rest, length)
        text += f"{count}{unit}" if count else ""
    return text or "0s"


Owners = Mapping[PodName, WorkloadOwner]
NodeLabels = Mapping[str, Mapping[str, str]]  # node name -> labels of the node


class NodeReading(msgspec.Struct, frozen=True, gc=False):
    """The last state read from one target (an exporter). If two targets report the same node, only
    one is shown.

    If the target reports no node name, `state.node` is the target's address and `named` is False.
    """

    target: str  # URL of an exporter without secrets, or Prometheus' label `instance`
    state: NodeState
    read_at: float = 0.0  # monotonic time of the scrape, or of the newest sample in Prometheus
    skew_seconds: float | None = None  # node's clock minus ours; None if the node reports no time
    # False if the target was removed from the list of exporters; None with Prometheus
    listed: bool | None = None
    named: bool = True
    cluster: str = ""  # set only if Prometheus has metrics of several clusters
    owners: Owners = {}  # owners of the pods; set only with Prometheus
    # labels of the Kubernetes node; None if unknown or not needed
    labels: Mapping[str, str] | None = None

    @property
    def name(self) -> str:
        return self.state.node


class NodeEntry(msgspec.Struct, frozen=True, gc=False):
    """A node of a `ClusterState`: the reading that is shown, and the values computed from it."""

    reading: NodeReading
    state: NodeState  # `reading.state` with the GPUs and conditions that are shown
    age_seconds: float | None = None
    stale: bool = False  # the values are too old
    gone: bool = False  # its exporter has not answered for longer than --stale-after
    notes: tuple[str, ...] = ()
    # last reading of the podgpu that reported the holders and no longer answers
    silent: NodeReading | None = None
    # The GPUs (UUID -> node) that it took over while their own nodes did not answer.
    taken: Mapping[str, str] = {}
    prices: Prices = NO_PRICES  # the prices that apply to the labels of this node
    held: tuple[HeldPart, ...] = ()
    counted_at: float = 0.0  # monotonic time of the reading in which the counters last changed
    seconds: float = 0.0  # time since the last round that is charged; 0 if it is unknown
    # By device, if both rounds have it: joules that no holder used. None if they are not counted.
    rest: Mapping[str, float | None] = {}
    rejected: Mapping[str, int] = {}  # counter -> number of impossible increases

    @property
    def name(self) -> str:
        return self.state.node

    @property
    def gpus(self) -> Iterator[DeviceState]:
        """Yields the GPUs for which `is_shown` is True."""
        return (gpu for gpu in self.state.devices if is_shown(gpu))

    def held_by_holder(self) -> dict[tuple[str, WorkloadKey], HeldPart]:
        """The parts by device and holder."""
        return {(part.device_key, part.holder.key): part for part in self.held}

    def held_by_device(self) -> dict[str, list[HeldPart]]:
        return group_by(self.held, lambda part: part.device_key)


@dataclass(frozen=True, slots=True)
class TargetOutcome:
    """Result of the last request to a target, or to Prometheus."""

    target: str
    seconds: float
    error: str = ""  # short error code, used as the label `reason`; empty if the request succeeded
    message: str = ""

    @property
    def text(self) -> str:
        """The error message, with the target's name."""
        text = self.message or self.error
        if text.startswith(self.target.removesuffix("/metrics")):
            return text
        return f"{self.target}: {text}"


class FleetShare(NamedTuple):
    """The GPUs of one model that a namespace has."""

    cluster: str
    namespace: str
    model: str  # as it is billed: `<model>`, or `<model> MIG <profile>`
    allocated: float
    idle: float
    underused: float | None = None  # None if no exporter counts it


class FleetCounts(NamedTuple):
    """Totals that Prometheus computes. Used if the cluster has too many GPUs to read each of
    them.
    """

    gpus: int
    broken: int
    power_watts: float | None
    held: Sequence[FleetShare]
    models: Mapping[tuple[str, str], float] = {}  # cluster and model -> GPUs
    has_rule: bool = True  # without the recording rule, `held` is empty and `power_watts` is None
    has_clusters: bool = False  # Prometheus has several clusters
    kubernetes_unhealthy: int = 0


@dataclass(frozen=True, slots=True)
class ClusterReading:
    """The last state of every target, including targets that currently fail."""

    nodes: tuple[NodeReading, ...] = ()
    outcomes: tuple[TargetOutcome, ...] = ()
    # (target, reason) -> failures since the start
    errors: Mapping[tuple[str, str], int] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()  # warnings that do not belong to a node
    owners: Owners = field(default_factory=dict)
    kept_pods: frozenset[PodName] = frozenset()  # savings leave them out, by an annotation
    idle_for: Mapping[str, float] = field(default_factory=dict)  # `Device.key` -> idle seconds
    engines: Mapping[ContainerName, EngineState] = field(default_factory=dict)
    fleet: FleetCounts | None = None


class Collector(Protocol):
    async def run_round(self) -> ClusterReading:
        """Reads all targets once, within deadlines. The result lists failed requests; they raise no
        exception.
        """
        ...

    async def fetch(self, target: str, path: str) -> bytes:
        """Requests `path` (such as `api/v1/gpus/GPU-…`) from an exporter and returns the body.
        Raises SourceError.

        Called in the event loop of the web server, while `run_round` runs in another event loop.
        """

    async def close(self) -> None: ...
