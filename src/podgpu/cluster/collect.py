"""The interface between collectors (`scrape`, `prometheus`) and the cluster view: what one round of reading returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from podgpu.model import NodeState, WorkloadOwner

Pod = tuple[str, str]  # namespace, name


class Scope(NamedTuple):
    """What a figure is about: the cluster, a namespace, a node, a model or an owner. Unused members are empty."""

    scope: str
    namespace: str = ""
    node: str = ""
    model: str = ""
    owner_kind: str = ""
    owner_name: str = ""


@dataclass(frozen=True, slots=True)
class NodeReading:
    """The last document of one target. Several targets may report the same node; the view merges them.

    `state.node` is never empty: without a name it is the target's address, and `named` is False.
    """

    target: str  # URL of an exporter without secrets, or Prometheus' label `instance`
    state: NodeState
    read_at: float = 0.0  # monotonic time of the scrape, or of the newest sample in Prometheus
    skew_seconds: float | None = None  # node's clock minus ours when it was read; None: it reports no time
    listed: bool | None = None  # target is still in the list of targets; None: there is no such list (Prometheus)
    named: bool = True
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TargetOutcome:
    """Result of the last request to a target, or to Prometheus."""

    target: str
    seconds: float
    error: str = ""  # reason as one word, for the label `reason`; empty: it succeeded
    message: str = ""

    @property
    def text(self) -> str:
        """The failure in words, with the target's name."""
        text = self.message or self.error
        return text if text.startswith(self.target.removesuffix("/metrics")) else f"{self.target}: {text}"


@dataclass(frozen=True, slots=True)
class ClusterReading:
    """The last document of every target, also of targets that fail now."""

    nodes: tuple[NodeReading, ...] = ()
    outcomes: tuple[TargetOutcome, ...] = ()
    errors: Mapping[tuple[str, str], int] = field(default_factory=dict)  # (target, reason) -> failures since the start
    notes: tuple[str, ...] = ()  # warnings that belong to no node
    owners: Mapping[Pod, WorkloadOwner] = field(default_factory=dict)
    idle_for: Mapping[tuple[str, str], float] = field(default_factory=dict)  # (UUID, MIG instance) -> at least seconds


class Collector(Protocol):
    async def run_round(self) -> None:
        """Reads all targets once, within its deadlines. Failures are in `reading()`; only bugs raise."""

    def reading(self) -> ClusterReading:
        """The state now, also in the middle of a round."""

    async def fetch(self, target: str, path: str) -> bytes:
        """Body of `path` (such as `api/v1/gpus/GPU-…`) of the target's exporter. Raises SourceError."""

    async def close(self) -> None: ...
