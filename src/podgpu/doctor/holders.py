"""Checks the API server, the kubelet and other allocation sources, and the device ids that they report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from podgpu.device_selection import Selection
from podgpu.doctor.findings import Finding, note, ok, plural, report_error, wrong
from podgpu.doctor.gpus import GpuReadings
from podgpu.errors import few_of
from podgpu.holders import AllocationSource
from podgpu.holders.device_ids import DeviceId, parse_id_or_minor
from podgpu.holders.identity import IdentityReader
from podgpu.holders.kubelet import OPTION, SOURCE, KubeletAllocation
from podgpu.holders.merge import merge
from podgpu.holders.unmapped import describe, explain
from podgpu.kube.objects import PodRecord
from podgpu.kube.reflector import Store
from podgpu.model import Allocation, Device, Unmapped
from podgpu.workers import Workers

_PAUSE_S = 0.02
_WATCH_REFUSED_S = 0.5
"""Longer than a round trip to the API server, which reports a rejected watch but does not confirm an accepted one."""


# API server


def check_watches(
    watches: Sequence[Store[Any]], timeout: float, pause: Callable[[float], object] = time.sleep
) -> list[Finding]:
    for _ in range(int(timeout / _PAUSE_S)):
        if all(watch.synced or watch.error is not None for watch in watches):
            break
        pause(_PAUSE_S)
    for _ in range(int(_WATCH_REFUSED_S / _PAUSE_S) if watches else 0):
        if any(watch.error is not None for watch in watches):
            break
        pause(_PAUSE_S)
    errors = dict.fromkeys(str(watch.error) for watch in watches if watch.error is not None)
    if errors:
        return [wrong("API server", text) for text in errors]
    if not all(watch.synced for watch in watches):
        return [wrong("API server", "timed out", "check that it is reachable from here, and network policies")]
    number = "1 watch" if len(watches) == 1 else f"{len(watches)} watches"
    return [ok("API server", f"answers, {number}")] if watches else []


# Sources


@dataclass(frozen=True, slots=True)
class KubeletAnswer:
    pods: frozenset[tuple[str, str]]  # namespace and name of every pod
    resources: frozenset[str]  # names of all resources whose devices are held by containers
    allocation: Allocation


def check_holders(
    sources: Sequence[AllocationSource],
    readings: GpuReadings,
    *,
    selection: Selection,
    identities: IdentityReader,
    kubelet_required: bool,
    pods: Store[PodRecord] | None,
    node_name: str,
    workers: Workers,
    deadline: float,
) -> list[Finding]:
    """Reads and reports each source separately, then checks the merged allocation."""
    if not sources:
        return [note("kubelet", "not used, because --kubernetes (DCGM_EXPORTER_KUBERNETES) is false: no pod labels")]
    kubelet = next((source for source in sources if isinstance(source, KubeletAllocation)), None)
    answer = None
    allocations: dict[str, Allocation] = {}
    findings: list[Finding] = []
    if kubelet is not None:
        read = partial(_read_kubelet, kubelet, readings.devices)
        result = workers.run({SOURCE: read}, deadline)[SOURCE]
        answer, socket = result.value, kubelet.client.socket
        if answer is not None:
            allocations[SOURCE] = answer.allocation
            findings.append(ok("kubelet", _describe_kubelet(socket, answer)))
        else:
            findings.append(_explain_kubelet_error(result.error, socket, kubelet_required))
    others = {source.name: partial(source.assignments, readings.devices) for source in sources if source is not kubelet}
    for name, other in workers.run(others, deadline).items():
        if other.value is not None:
            allocations[name] = other.value
            findings.append(ok(name, plural(_count(other.value), "assignment")))
        else:
            findings.append(_report_source_error(name, other.error))
    if answer is not None and pods is not None and pods.synced and pods.error is None:
        api_pods = frozenset((pod.namespace, pod.name) for pod in pods.items())
        findings += _check_node_name(node_name, answer.pods, api_pods)
    if not allocations:
        return findings
    names = workers.run({"names": identities.read}, deadline)["names"].value
    ordered = {source.name: allocations[source.name] for source in sources if source.name in allocations}
    allocation = merge(ordered, names.complete) if names is not None else merge(ordered)
    resource_names = kubelet.resource_names if kubelet is not None else frozenset()
    resources = answer.resources if answer is not None else frozenset()
    return findings + check_mapping(allocation, readings, selection, resource_names, resources)


def _count(allocation: Allocation) -> int:
    return len(allocation.assignments) + len(allocation.unmapped)


def _read_kubelet(kubelet: KubeletAllocation, devices: tuple[Device, ...]) -> KubeletAnswer:
    response = kubelet.client.list()
    containers = (container for pod in response.pod_resources for container in pod.containers)
    return KubeletAnswer(
        frozenset((pod.namespace, pod.name) for pod in response.pod_resources),
        frozenset(entry.resource_name for container in containers for entry in container.devices),
        kubelet.map(response, devices),
    )


def _describe_kubelet(socket: str, answer: KubeletAnswer) -> str:
    allocation = answer.allocation
    workloads = [entry.holder for entry in allocation.assignments] + [entry.holder for entry in allocation.unmapped]
    holders = {(workload.namespace, workload.pod) for workload in workloads}
    return (
        f"{socket} responds: {plural(len(answer.pods), 'pod')}, {len(holders)} with GPUs,"
        f" {plural(len(workloads), 'assignment')}"
    )


_MOUNT = (
    "mount the host's /var/lib/kubelet/pod-resources directory (not the socket itself, which every kubelet restart"
    f" replaces), or set {OPTION} if the kubelet has another root directory (k0s: /var/lib/k0s/kubelet, microk8s:"
    " /var/snap/microk8s/common/var/lib/kubelet)"
)


def _explain_kubelet_error(error: Exception | None, socket: str, required: bool) -> Finding:
    if getattr(error, "reason", "") != "socket_missing":
        return _report_source_error("kubelet", error)
    if required:
        return wrong("kubelet", f"{socket}: no such file", _MOUNT)
    return note("kubelet", f"{socket}: no such file, so there are no pod labels", f"on Kubernetes {_MOUNT}")


def _report_source_error(name: str, error: Exception | None) -> Finding:
    """Reports the error without the worker's name in front. The messages of sources contain the advice."""
    finding = report_error(name, error)
    return replace(finding, text=finding.text.removeprefix(f"{name}: "))


def _check_node_name(
    node: str, kubelet_pods: frozenset[tuple[str, str]], api_pods: frozenset[tuple[str, str]]
) -> list[Finding]:
    """Reports a wrong NODE_NAME if the kubelet and the API server have no pod in common for this node."""
    if not kubelet_pods or kubelet_pods & api_pods:
        return []
    in_api = plural(len(api_pods), "pod") if api_pods else "no pods"
    return [
        wrong(
            "node name",
            f"NODE_NAME is not this node: the API server has {in_api} on the node {node!r}, this node's kubelet has"
            f" {plural(len(kubelet_pods), 'pod')}, and none is in both lists, so data of the API server cannot be used",
            "set NODE_NAME from spec.nodeName by the downward API; outside a pod, to the name in `kubectl get nodes`",
        )
    ]


# Mapping

_GPU_RESOURCES = ("nvidia.com/gpu", "nvidia.com/mig-")
_MIG_CHANGED = (
    "the MIG layout was changed after the pod got the device: delete the pod, and restart the device plugin so that it"
    " offers the new instances"
)
_CHECK_GPUS = "fix the problems of the GPUs first"
_SICK = ("it may be a GPU that does not respond", _CHECK_GPUS)


def check_mapping(
    allocation: Allocation,
    readings: GpuReadings,
    selection: Selection,
    resource_names: frozenset[str],
    resources: frozenset[str] = frozenset(),
) -> list[Finding]:
    """Checks that each assigned id is a device of this node. `resources` are all resources that the kubelet lists."""
    if readings.inventory is None:
        assignments = plural(len(allocation.unmapped), "assignment")
        return [note("mapping", f"{assignments} cannot be mapped to GPUs without the driver")]
    findings = [_explain_unmapped(entry, readings, resource_names) for entry in allocation.unmapped]
    if not findings and allocation.assignments:
        text = f"{plural(len(allocation.assignments), 'assignment')}, all to devices of this node"
        findings.append(ok("mapping", text))
    elif not findings and resources:
        text = f"no pod holds a known GPU resource; pods hold devices of {few_of(sorted(resources))}"
        findings.append(note("mapping", text, "if one of these contains GPUs, add it to --nvidia-resource-names"))
    elif not findings:
        findings.append(ok("mapping", "no pod holds a GPU"))
    unnamed = [entry for entry in allocation.assignments if not entry.holder.pod and not entry.holder.job]
    if unnamed:
        findings.append(
            note(
                "mapping",
                f"{plural(len(unnamed), 'assignment')} of pods with unknown names ({unnamed[0].holder.text})",
                "names come from the host's /var/log/pods and /var/log/containers: mount /var/log, or set"
                " --path-varlog",
            )
        )
    shown = selection.select(readings.devices)
    hidden = [entry for entry in allocation.assignments if entry.device not in shown]
    if hidden:
        text = f"{plural(len(hidden), 'assignment')} on devices excluded by -d {selection.shown}: they are not exported"
        findings.append(note("mapping", text, "use -d f to export all devices"))
    return findings


def _explain_unmapped(unmapped: Unmapped, readings: GpuReadings, resource_names: frozenset[str]) -> Finding:
    text = describe(unmapped)
    device_id = parse_id_or_minor(unmapped.device_id)
    if unmapped.reason == "unknown_device" and device_id is not None and unmapped.source != "hpc":
        reason, advice = _explain_unknown(device_id, readings)
        return wrong("mapping", f"{text}: {reason}", advice)
    if unmapped.reason == "unrecognised_id":
        resource = unmapped.resource
        if unmapped.source != "kubelet" or resource in resource_names or resource.startswith(_GPU_RESOURCES):
            return wrong(
                "mapping",
                f"{text}: the format of the id is not recognised",
                "report the id and its device plugin or scheduler; until then the pod's GPU has no pod labels",
            )
        return note("mapping", f"{text}: not a GPU", "nothing to do unless this resource contains GPUs")
    explanation = explain(unmapped)
    finding = note if explanation.harmless else wrong
    return finding("mapping", f"{text} ({unmapped.source}): {explanation.reason}", explanation.advice)


def _explain_unknown(device_id: DeviceId, readings: GpuReadings) -> tuple[str, str]:
    """Returns the reason why a well-formed id matches no device of this node, and the advice."""
    gpus = [device for device in readings.devices if not device.is_instance]
    if device_id.mig_uuid is not None:
        if not readings.is_complete:
            return "no MIG device has this UUID, but not every GPU responds", _CHECK_GPUS
        if not any(gpu.mig_enabled for gpu in gpus):
            return "no GPU of this node is in MIG mode", _MIG_CHANGED
        return "no MIG device has this UUID", _MIG_CHANGED
    gpu = next((gpu for gpu in gpus if _is_named(gpu, device_id)), None)
    if gpu is not None:
        if gpu in readings.failures:
            return f"GPU {gpu.index} does not respond, so its instances are unknown", _CHECK_GPUS
        if not gpu.mig_enabled:
            return f"GPU {gpu.index} is not in MIG mode", _MIG_CHANGED
        return f"GPU {gpu.index} has no GPU instance {device_id.gi_id}", _MIG_CHANGED
    if device_id.minor is None and device_id.gpu_uuid is None:
        return "this node has no such GPU", "see the findings about the driver and the GPUs"
    if not readings.is_complete:
        return _SICK
    if device_id.minor is not None:
        return _explain_minor(device_id.minor, gpus)
    return (
        "no GPU of this node has this UUID",
        "if the GPU was replaced, restart the device plugin and delete the pod; otherwise check that the socket belongs"
        " to this node's kubelet, and that this container gets all GPUs (NVIDIA_VISIBLE_DEVICES=all)",
    )


def _is_named(gpu: Device, device_id: DeviceId) -> bool:
    if device_id.gpu_uuid is not None:
        return gpu.uuid.lower() == device_id.gpu_uuid.lower()
    return device_id.minor is not None and gpu.minor == device_id.minor


def _explain_minor(minor: int, gpus: Sequence[Device]) -> tuple[str, str]:
    minors = [f"nvidia{gpu.minor} is GPU {gpu.index}" for gpu in gpus if gpu.minor is not None]
    if not minors:
        return (
            "the id is a minor number, and the driver reports none",
            "minor numbers cannot be mapped on this node; use NVIDIA's device plugin, whose ids are UUIDs",
        )
    return (
        f"no GPU has the minor number {minor} ({few_of(minors)})",
        "such ids are minor numbers (/dev/nvidia<N>), not nvidia-smi's indices; if the GPU was removed, restart the"
        " device plugin and delete the pod",
    )
