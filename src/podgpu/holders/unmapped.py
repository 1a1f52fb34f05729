"""Explains unmapped assignments for the exporter's log and `podgpu doctor`: the reason and the advice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from podgpu.errors import one_line
from podgpu.holders.device_ids import parse_device_id
from podgpu.model import Unmapped

_SLICES = "check kubectl get resourceslices"


class Explanation(NamedTuple):
    reason: str
    advice: str
    harmless: bool = False


_BY_SOURCE = {
    ("hpc", "unknown_device"): Explanation(
        "no such GPU or GPU instance on this node",
        "files are named by nvidia-smi's index, or index.instance (2.1): check what the scheduler's prolog writes",
    ),
    ("hpc", "permission_denied"): Explanation(
        "no permission to read it", "make it readable for podgpu's user, or change securityContext.runAsUser"
    ),
    ("processes", "unknown_device"): Explanation(
        "the GPU or MIG instance is not known yet", "wait for the next reading; if this persists, report it"
    ),
    ("processes", "not_permitted"): Explanation(
        "no permission to read the cgroup of a process on it",
        "set securityContext.runAsUser: 0, and check hidepid on /proc and AppArmor or SELinux profiles",
    ),
}
_BY_REASON = {
    "contradicted": Explanation(
        "a source with higher precedence lists other GPUs for it",
        "nothing to do if a scheduler (such as HAMi) assigns other GPUs than the kubelet lists; if this source is"
        " right, put it first in --allocation",
        harmless=True,
    ),
    "identity_conflict": Explanation(
        "its name, uid and container id belong to different pods, so it has no holder",
        "nothing to do if a pod of that name was just recreated; if this persists, compare the names under"
        " /var/log/pods and /var/log/containers with the pods of this node",
    ),
    "slices_not_synced": Explanation(
        "ResourceSlices, which map it to a GPU, have not been read yet",
        "if this persists, check that the API server is reachable and that podgpu may list and watch resourceslices",
    ),
    "unknown_pool": Explanation(
        "no ResourceSlice of this node contains that pool",
        f"{_SLICES}: the DRA driver's pod may be missing on this node, or NODE_NAME may name another node",
    ),
    "unknown_claim_device": Explanation(
        "the pool has no device of that name",
        f"{_SLICES}: if the driver published the pool again, delete the pod so that its claim is allocated again",
    ),
    "claim_device_without_uuid": Explanation(
        "its ResourceSlice has no UUID",
        "mount the DRA driver's directory plugins/gpu.nvidia.com of the kubelet's directory: its checkpoint contains"
        " the UUIDs of MIG devices created for claims; a device passed to a virtual machine cannot be mapped",
    ),
    "unknown_device": Explanation(
        "no GPU of this node has that id",
        "run podgpu doctor for details: the GPU was replaced or does not respond, or the MIG layout changed",
    ),
    "unrecognised_id": Explanation(
        "the format of the id is not recognised",
        "nothing to do if the resource has no GPUs; otherwise report the id and its device plugin",
    ),
    "reserved": Explanation(
        "it reserves the GPU for pods that share it, which are unknown without the API server",
        "let podgpu list and watch pods (docs/holders.md#kai-scheduler-and-runai)",
    ),
    "unknown_group": Explanation(
        "the reservation pod of its group does not hold exactly one GPU of this node",
        "nothing to do if the pod is starting or ending; otherwise check the pods with the label runai-gpu-group",
    ),
    "bad_annotation": Explanation(
        "the annotation cannot be parsed, so the pod's GPUs have no holder",
        "check kubectl get pod -o yaml, and the version of the scheduler that writes it",
    ),
}


def explain(unmapped: Unmapped) -> Explanation:
    return (
        _BY_SOURCE.get((unmapped.source, unmapped.reason))
        or _BY_REASON.get(unmapped.reason)
        or Explanation(f"it cannot be used ({unmapped.reason})", "check the exporter's log")
    )


def describe(unmapped: Unmapped) -> str:
    """Describes the assignment on one line, such as `ns/pod/main holds nvidia.com/gpu GPU-…`."""
    holder, device_id = unmapped.holder.text, unmapped.device_id
    if unmapped.source == "hpc":
        return one_line(f"{holder} is in the job file {device_id}" if holder else f"job file {device_id}")
    if unmapped.reason == "bad_annotation":
        return one_line(f"{holder} has the annotation {device_id}")
    verb = "uses" if unmapped.source == "processes" else "holds"
    resource = "" if unmapped.resource in (unmapped.source, "pid") else unmapped.resource
    return one_line(" ".join(filter(None, (holder or "a process", verb, resource, device_id))))


def find_lost_gpus(offered: Iterable[str], unmapped: Iterable[Unmapped], some_lost: bool) -> set[str]:
    """Returns UUIDs of GPUs that must exist: those offered by the kubelet and, if the driver misses GPUs on the bus,
    those that are held. Otherwise a held id may belong to a GPU that was replaced."""
    uuids = set(offered)
    if some_lost:
        ids = (
            parse_device_id(entry.device_id)
            for entry in unmapped
            if entry.reason == "unknown_device" and entry.source == "kubelet"
        )
        uuids |= {device_id.gpu_uuid for device_id in ids if device_id is not None and device_id.gpu_uuid}
    return uuids
