"""The interface between the collectors (`scrape`, `prometheus`) and the cluster view: the result of one round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from podgpu.metrics.adapter import PodName
from podgpu.model import NodeState, WorkloadOwner

Owners = Mapping[PodName, WorkloadOwner]


@dataclass(frozen=True, slots=True)
class NodeReading:
    """The last state read from one target. Several targets may report the same node; the view merges them.

    If the target reports no node name, `state.node` is the target's address and `named` is False.
    """

    target: str  # URL of an exporter without secrets, or Prometheus' label `instance`
    state: NodeState
    read_at: float = 0.0  # monotonic time of the scrape, or of the newest sample in Prometheus
    skew_seconds: float | None = None  # node's clock minus ours; None if the node reports no time
    listed: bool | None = None  # target is in the list of exporters; None for Prometheus, which has no list
    named: bool = True


@dataclass(frozen=True, slots=True)
class TargetOutcome:
    """Result of the last request to a target, or to Prometheus."""

    target: str
    seconds: float
    error: str = ""  # one word for the label `reason`; empty if the request succeeded
    message: str = ""

    @property
    def text(self) -> str:
        """The error message, with the target's name."""
        text = self.message or self.error
        return text if text.startswith(self.target.removesuffix("/metrics")) else f"{self.target}: {text}"


@dataclass(frozen=True, slots=True)
class ClusterReading:
    """The last state of every target, including targets that fail now."""

    nodes: tuple[NodeReading, ...] = ()
    outcomes: tuple[TargetOutcome, ...] = ()
    errors: Mapping[tuple[str, str], int] = field(default_factory=dict)  # (target, reason) -> failures since the start
    notes: tuple[str, ...] = ()  # warnings that belong to no node
    owners: Owners = field(default_factory=dict)
    idle_for: Mapping[tuple[str, str], float] = field(default_factory=dict)  # (UUID, MIG instance) -> idle seconds


class Collector(Protocol):
    async def run_round(self) -> None:
        """Reads all targets once, within deadlines. `reading()` reports failures; only a bug raises an exception."""

    def reading(self) -> ClusterReading:
        """Returns the results of the last round."""

    async def fetch(self, target: str, path: str) -> bytes:
        """Requests `path` (such as `api/v1/gpus/GPU-…`) from an exporter and returns the body. Raises SourceError.

        The event loop of the web server calls it, not that of the rounds.
        """

    async def close(self) -> None: ...
