"""This module judges whether every id that was given out names a GPU here, and says why one does not. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from podgpu.device_selection import Selection
from podgpu.doctor.findings import Finding, note, ok, plural, wrong
from podgpu.doctor.gpus import Gpus
from podgpu.errors import few_of
from podgpu.holders.device_ids import DeviceId, parse_id_or_minor
from podgpu.holders.unmapped import describe, explain
from podgpu.model import Allocation, Device, Unmapped

_GPU_RESOURCES = ("nvidia.com/gpu", "nvidia.com/mig-")
_RELAYOUT = (
    "the MIG layout was changed after the pod got it: delete the pod, and restart the device plugin so that it offers"
    " the new instances"
)
_SICK = ("it may be a GPU that does not answer", "fix that first: see the findings about the GPUs")


def judge_mapping(
    allocation: Allocation,
    gpus: Gpus,
    selection: Selection,
    resource_names: frozenset[str],
    resources: frozenset[str] = frozenset(),
) -> list[Finding]:
    """`resources`: everything the kubelet says is held, GPUs or not."""
    if gpus.inventory is None:
        given = plural(len(allocation.unmapped), "assignment")
        return [note("mapping", f"{given}; which GPUs they name cannot be known without the driver")]
    findings = [_explain(unmapped, gpus, resource_names) for unmapped in allocation.unmapped]
    if not findings:
        findings.append(_all_mapped(allocation, resources))
    return [*findings, *_judge_nameless(allocation), *_judge_hidden(allocation, gpus.devices, selection)]


def _all_mapped(allocation: Allocation, resources: frozenset[str]) -> Finding:
    if allocation.assignments:
        return ok("mapping", f"{plural(len(allocation.assignments), 'assignment')}, every id names a device here")
    if resources:
        return note(
            "mapping",
            f"no pod holds a GPU that podgpu recognises; devices are held of {few_of(sorted(resources))}",
            "if one of these carries GPUs, name it with --nvidia-resource-names",
        )
    return ok("mapping", "no pod holds a GPU now")


def _judge_nameless(allocation: Allocation) -> list[Finding]:
    nameless = [given for given in allocation.assignments if not given.holder.pod and not given.holder.job]
    if not nameless:
        return []
    return [
        note(
            "mapping",
            f"{plural(len(nameless), 'assignment')} of pods whose names are not known ({nameless[0].holder.text})",
            "podgpu finds them by the names under the host's /var/log/pods and /var/log/containers: mount /var/log, and"
            " name it with --path-varlog where it is elsewhere",
        )
    ]


def _judge_hidden(allocation: Allocation, devices: Sequence[Device], selection: Selection) -> list[Finding]:
    shown = selection.of(devices)
    hidden = [a for a in allocation.assignments if a.device not in shown]
    if not hidden:
        return []
    return [
        note(
            "mapping",
            f"{plural(len(hidden), 'assignment')} on devices that -d {selection.shown} leaves out: they have no series",
            "use -d f to show everything",
        )
    ]


def _explain(unmapped: Unmapped, gpus: Gpus, resource_names: frozenset[str]) -> Finding:
    said = describe(unmapped)
    device_id = parse_id_or_minor(unmapped.device_id)
    if unmapped.reason == "unknown_device" and device_id is not None and unmapped.source != "hpc":
        why, advice = explain_unknown(device_id, gpus)
        return wrong("mapping", f"{said}: {why}", advice)
    if unmapped.reason == "unrecognised_id":
        return _explain_unrecognised(unmapped, said, resource_names)
    words = explain(unmapped)
    told = note if words.harmless else wrong
    return told("mapping", f"{said} ({unmapped.source}): {words.reason}", words.advice)


def _explain_unrecognised(unmapped: Unmapped, said: str, resource_names: frozenset[str]) -> Finding:
    resource = unmapped.resource
    if unmapped.source != "kubelet" or resource in resource_names or resource.startswith(_GPU_RESOURCES):
        return wrong(
            "mapping",
            f"{said}: podgpu cannot read ids of this form",
            "report the id and what makes it (device plugin, scheduler); the pod has no labels on its GPU until then",
        )
    return note("mapping", f"{said}: names no GPU", "nothing to do unless this resource carries GPUs")


def explain_unknown(device_id: DeviceId, gpus: Gpus) -> tuple[str, str]:
    """Why a well-formed id names no device here, and what to do."""
    whole = [d for d in gpus.devices if not d.is_instance]
    if device_id.mig_uuid is not None:
        return _explain_mig_uuid(whole, gpus)
    gpu = next((g for g in whole if _is_meant(g, device_id)), None)
    if gpu is not None:
        return _explain_instance(gpu, device_id, gpus)
    if device_id.minor is not None:
        return _explain_minor(device_id.minor, whole, gpus)
    if device_id.gpu_uuid is None:
        return "there is no GPU here it could mean", "see the findings about the driver and the GPUs"
    if not gpus.are_all_known:
        return _SICK
    return (
        "no GPU of this node has this UUID",
        "if the GPU was replaced, restart the device plugin and delete the pod; if not, see that the socket is this"
        " node's kubelet's and that this container is given all GPUs (NVIDIA_VISIBLE_DEVICES=all)",
    )


def _is_meant(gpu: Device, device_id: DeviceId) -> bool:
    if device_id.gpu_uuid is not None:
        return gpu.uuid.lower() == device_id.gpu_uuid.lower()
    return device_id.minor is not None and gpu.minor == device_id.minor


def _explain_mig_uuid(whole: Sequence[Device], gpus: Gpus) -> tuple[str, str]:
    if not gpus.are_all_known:
        return "no MIG device has this UUID, but not every GPU answers", _SICK[1]
    if not any(g.mig_enabled for g in whole):
        return "no GPU here is in MIG mode", _RELAYOUT
    return "no MIG device has this UUID", _RELAYOUT


def _explain_instance(gpu: Device, device_id: DeviceId, gpus: Gpus) -> tuple[str, str]:
    if gpu in gpus.failures:
        return f"GPU {gpu.index} does not answer, so its instances are not known", _SICK[1]
    if not gpu.mig_enabled:
        return f"GPU {gpu.index} is not in MIG mode", _RELAYOUT
    return f"GPU {gpu.index} has no GPU instance {device_id.gi_id}", _RELAYOUT


def _explain_minor(minor: int, whole: Sequence[Device], gpus: Gpus) -> tuple[str, str]:
    if not gpus.are_all_known:
        return _SICK
    if all(g.minor is None for g in whole):
        return (
            "the driver gives no minor numbers here, and the id is one",
            "such ids cannot be mapped on this node; NVIDIA's device plugin gives out UUIDs, which can",
        )
    known = few_of(f"nvidia{g.minor} is GPU {g.index}" for g in whole if g.minor is not None)
    return (
        f"no GPU has the minor number {minor} ({known})",
        "such ids are minor numbers (/dev/nvidia<N>), not nvidia-smi's indices; if the GPU is gone, restart the device"
        " plugin and delete the pod",
    )
