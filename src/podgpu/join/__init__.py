"""The join: one snapshot in, metric families out. Labels are put on here and nowhere else. Pure."""

from podgpu.join.dcgm import dcgm_families
from podgpu.join.gpu_manager import gpu_manager_families
from podgpu.join.own import own_families, self_families
from podgpu.join.policy import Policy
from podgpu.join.usage import usage_families
from podgpu.model import Family, Snapshot

__all__ = ["Policy", "gpu_manager_families", "join", "self_families"]


def join(snapshot: Snapshot, policy: Policy) -> list[Family]:
    return [
        *dcgm_families(snapshot, policy),
        *usage_families(snapshot, policy),
        *own_families(snapshot, policy.host),
    ]
