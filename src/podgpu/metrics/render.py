"""This room is the join: one snapshot in, metric families out. Pure."""

from podgpu.metrics.dcgm import dcgm_families
from podgpu.metrics.own import device_families, health_families, self_families
from podgpu.metrics.policy import Policy
from podgpu.metrics.usage import usage_families
from podgpu.model import Snapshot
from podgpu.series import Family

__all__ = ["Policy", "figure_families", "join", "self_families"]


def join(snapshot: Snapshot, policy: Policy) -> list[Family]:
    return [*figure_families(snapshot, policy), *self_families(snapshot)]


def figure_families(snapshot: Snapshot, policy: Policy) -> list[Family]:
    """All but the exporter on itself: what is withheld once it is too old."""
    return [
        *dcgm_families(snapshot, policy),
        *usage_families(snapshot, policy),
        *health_families(snapshot, policy),
        *device_families(snapshot, policy.host),
    ]
