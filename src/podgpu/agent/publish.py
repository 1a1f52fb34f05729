"""From snapshot to bytes, and the one reference a scrape reads."""

from __future__ import annotations

from dataclasses import dataclass

from podgpu.exposition.body import NO_METRICS, Exposition
from podgpu.exposition.text import encode
from podgpu.join import Policy, figure_families, gpu_manager_families, self_families
from podgpu.model import Snapshot


@dataclass(frozen=True, slots=True)
class Published:
    """All a request handler needs. Immutable; replaced as a whole."""

    snapshot: Snapshot
    fresh: Exposition
    stale: Exposition
    """Self-metrics only: what is served once the figures are too old."""
    read_at: float
    """Monotonic time of the last telemetry turn."""
    gpu_manager: Exposition = NO_METRICS
    """gpu-manager's metrics alone, where they are asked for. In stale times there are none."""


def publish(snapshot: Snapshot, policy: Policy, read_at: float) -> Published:
    own = encode(self_families(snapshot))
    fresh, stale = encode(figure_families(snapshot, policy)) + own, Exposition.of(own)
    if not policy.gpu_manager:
        return Published(snapshot, Exposition.of(fresh), stale, read_at)
    theirs = encode(gpu_manager_families(snapshot, policy))
    return Published(snapshot, Exposition.of(fresh + theirs), stale, read_at, Exposition.of(theirs))
