"""This module says what an assignment that came to nothing means to a person: who, what, why, and what to do. Pure.

The exporter's log and `podgpu doctor` say the same; the doctor, who knows the GPUs, says more of ids that name none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from podgpu.holders.device_ids import parse_device_id
from podgpu.model import Unmapped

_PROLOG = "see what the scheduler's prolog writes"
_SLICES = "see kubectl get resourceslices"


@dataclass(frozen=True, slots=True)
class Explanation:
    why: str
    advice: str
    harmless: bool = False
    """Nothing is wrong on this node, whatever it looks like."""


_OF_CLAIMS = {
    "slices_not_synced": Explanation(
        "the ResourceSlices that say which GPU that is were not read yet",
        "if this lasts, see that the API server can be reached and that podgpu may list and watch resourceslices",
    ),
    "unknown_pool": Explanation(
        "no ResourceSlice of this node has that pool",
        f"{_SLICES}: the DRA driver's pod may be gone from this node, or NODE_NAME may name another node",
    ),
    "unknown_claim_device": Explanation(
        "the pool has no device of that name",
        f"{_SLICES}: if the driver published the pool anew, delete the pod so that its claim is allocated again",
    ),
    "claim_device_without_uuid": Explanation(
        "its ResourceSlice has no UUID",
        "such a device (one lent to a virtual machine, say) cannot be mapped; if it is a GPU, update the DRA driver",
    ),
    "ambiguous_mig_device": Explanation(
        "its ResourceSlice has no UUID, and several MIG instances of that profile are in use on the GPU",
        "mount the DRA driver's directory plugins/gpu.nvidia.com beside the kubelet's socket: its checkpoint says"
        " which of them it made; an instance that is alone on its GPU is mapped without it",
        harmless=True,
    ),
    "claim_without_device_name": Explanation(
        "the kubelet does not say which device that is",
        "nothing to fix: Kubernetes says it from 1.31 on",
        harmless=True,
    ),
}
_OF_IDENTITIES = {
    "contradicted": Explanation(
        "a more trusted source says that it holds other GPUs, and that source counts",
        "nothing to do where a scheduler (HAMi, say) hands out other GPUs than the kubelet notes; if this source is"
        " right, put it first in --allocation",
        harmless=True,
    ),
    "identity_conflict": Explanation(
        "the parts of that name belong to different pods, so it has no holder",
        "nothing to do if a pod of that name was just recreated; if it lasts, compare the names under /var/log/pods and"
        " /var/log/containers with the pods of this node",
    ),
}
_OF_JOB_FILES = {
    "unknown_device": Explanation(
        "there is no such GPU or GPU instance here",
        f"files are named by nvidia-smi's index, or index.instance (2.1): {_PROLOG}",
    ),
    "bad_job_id": Explanation(
        "a line of it is not a job id (more than 256 characters, or some that cannot be printed) and is left out",
        _PROLOG,
    ),
    "too_many_jobs": Explanation("it has more than 64 jobs, and the others are left out", _PROLOG),
    "permission_denied": Explanation(
        "it may not be read", "let podgpu's user read it, or set securityContext.runAsUser to one that may"
    ),
}
_OF_PROCESSES = {
    "unknown_device": Explanation(
        "podgpu does not know that GPU or MIG instance yet", "wait for the next reading; if it lasts, report it"
    ),
    "not_permitted": Explanation(
        "the cgroup of a process there may not be read",
        "set securityContext.runAsUser: 0, and see that neither hidepid on /proc nor an AppArmor or SELinux profile"
        " forbids it",
    ),
    "unreadable": Explanation("the cgroup of a process there cannot be read", "see that /proc is the host's"),
}
_OF_IDS = {
    "unknown_device": Explanation(
        "it names no GPU of this node",
        "podgpu doctor says more: a GPU that was replaced or does not answer, or a MIG layout that was changed",
    ),
    "unrecognised_id": Explanation(
        "podgpu cannot read ids of this form",
        "nothing to do if the resource carries no GPUs; else report the id and the device plugin that makes it",
    ),
    "bad_annotation": Explanation(
        "it cannot be understood, so the pod's GPUs have no holder",
        "see kubectl get pod -o yaml, and the version of the scheduler that writes it",
    ),
}
_OF_SOURCES = {"hpc": _OF_JOB_FILES, "processes": _OF_PROCESSES}


def explain(unmapped: Unmapped) -> Explanation:
    of_source = _OF_SOURCES.get(unmapped.source, {})
    for table in (_OF_IDENTITIES, of_source, _OF_CLAIMS, _OF_IDS):
        if unmapped.reason in table:
            return table[unmapped.reason]
    return Explanation(f"it cannot be used ({unmapped.reason})", "look at the exporter's log")


def statement(unmapped: Unmapped) -> str:
    """What the source says, on one line: `ns/pod/main holds nvidia.com/gpu GPU-…`, `job 4711 is in the job file 9`."""
    text = _statement(unmapped)
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)


def _statement(unmapped: Unmapped) -> str:
    whose, what = unmapped.holder.text, unmapped.device_id
    if unmapped.source == "hpc":
        return f"{whose} is in the job file {what}" if whose else f"the job file {what} is there"
    if unmapped.reason == "bad_annotation":
        return f"{whose} has the annotation {what}"
    if not whose:
        return f"somebody works on {what}"
    held = " ".join(part for part in (unmapped.resource, what) if part and part not in (unmapped.source, "pid"))
    return f"{whose} {'works on' if unmapped.source == 'processes' else 'holds'} {held}"


def lost_gpus(offered: Iterable[str], unmapped: Iterable[Unmapped], some_lost: bool) -> set[str]:
    """UUIDs of GPUs that must be here: the kubelet gives them away, or a pod of its holds one while the PCI bus shows
    more GPUs than the driver answers for. An id of a pod alone may be of a GPU that was replaced long ago."""
    found = set(offered)
    if some_lost:
        ids = (parse_device_id(u.device_id) for u in unmapped if u.reason == "unknown_device" and u.source == "kubelet")
        found |= {device_id.gpu_uuid for device_id in ids if device_id is not None and device_id.gpu_uuid}
    return found
