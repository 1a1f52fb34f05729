"""What the collectors (`scrape`, `prometheus`) read in a round, and their interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from podgpu.errors import Note
from podgpu.fleet.parts import ContainerName, EngineState
from podgpu.model import NodeState, PodName, WorkloadOwner

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
        # Messages about a request begin with the target's URL.
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
    totals_only: FleetCounts | None = None


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
