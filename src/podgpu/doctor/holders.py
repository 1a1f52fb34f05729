"""Checks the API server, the kubelet and other allocation sources, and the device ids that they report."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from podgpu.device_selection import Selection
from podgpu.doctor.findings import Finding, note, ok, wrong
from podgpu.doctor.node import GpuReadings
from podgpu.errors import few_of, plural
from podgpu.holders import AllocationSource
from podgpu.holders.annotations import replace_reservations
from podgpu.holders.api import ApiAccess
from podgpu.holders.device_ids import DeviceId, parse_id_or_minor
from podgpu.holders.identity import Identities, IdentityReader
from podgpu.holders.kubelet import SOURCE, KubeletAllocation
from podgpu.holders.reader import describe, explain, merge
from podgpu.kube.reflector import Informer
from podgpu.model import Allocation, Unmapped
from podgpu.workers import Workers

_WATCH_REFUSED_S = 0.5
"""Seconds to wait for the API server, which reports a rejected watch but does not confirm an accepted one."""


def check_watches(watches: Sequence[Informer[Any]], timeout: float) -> list[Finding]:
    if not watches:
        return []
    end = time.monotonic() + timeout
    for watch in watches:
        watch.wait_synced(max(0.0, end - time.monotonic()))
    all_synced = all(watch.synced for watch in watches)
    if all_synced:
        time.sleep(_WATCH_REFUSED_S)
    errors = dict.fromkeys(str(watch.error) for watch in watches if watch.error is not None)
    if errors:
        return [wrong("API server", text) for text in errors]
    if not all_synced:
        return [wrong("API server", "timed out", "check that it is reachable from here, and network policies")]
    return [ok("API server", f"answers, {len(watches)} watch{'es' * (len(watches) > 1)}")]


# Sources


def check_holders(
    sources: Sequence[AllocationSource],
    readings: GpuReadings,
    selection: Selection,
    identities: IdentityReader,
    kubelet_required: bool,
    api: ApiAccess,
    workers: Workers,
    deadline: float,
) -> list[Finding]:
    """Reads and reports each source separately, then checks the merged allocation."""
    if not sources:
        return [note("kubelet", "not used, because --kubernetes (DCGM_EXPORTER_KUBERNETES) is false: no pod labels")]
    kubelet = next((source for source in sources if isinstance(source, KubeletAllocation)), None)
    responses: list[Any] = []  # of the kubelet

    def read(source: AllocationSource) -> Allocation:
        if not isinstance(source, KubeletAllocation):
            return source.assignments(readings.devices)
        response = source.list()
        responses.append(response)
        return source.map(response, readings.devices)

    allocations: dict[str, Allocation] = {}
    findings: list[Finding] = []
    for name, result in workers.run({source.name: partial(read, source) for source in sources}, deadline).items():
        if result.value is None:
            findings.append(_explain_error(name, result.error, kubelet_required))
            continue
        allocations[name] = result.value
        if kubelet is not None and name == SOURCE:
            findings += _check_kubelet(kubelet.socket, responses[0], result.value, api)
        else:
            findings.append(ok(name, plural(len(result.value.assignments) + len(result.value.unmapped), "assignment")))
    if not allocations:
        return findings
    names = workers.run({"names": identities.read}, deadline)["names"].value or Identities()
    allocations = replace_reservations(allocations, names.pods, readings.devices, names.complete)
    resource_names = kubelet.resource_names if kubelet is not None else frozenset()
    containers = [container for response in responses for pod in response.pod_resources for container in pod.containers]
    resources = {entry.resource_name for container in containers for entry in container.devices}
    return findings + check_mapping(
        merge(allocations, names.complete), readings, selection, resource_names, sorted(resources)
    )


def _check_kubelet(socket: str, response: Any, allocation: Allocation, api: ApiAccess) -> list[Finding]:
    responds = f"{socket} responds"
    pods = {(pod.namespace, pod.name) for pod in response.pod_resources}
    watched = api.watched_pods
    is_read = watched is not None and watched.synced and watched.error is None
    api_pods = {(pod.namespace, pod.name) for pod in api.known_pods()} if is_read else set()
    if not pods:
        return [_explain_no_pods(responds, len(api_pods))]
    workloads = [entry.holder for entry in allocation.assignments] + [entry.holder for entry in allocation.unmapped]
    holders = {(workload.namespace, workload.pod) for workload in workloads}
    text = f"{plural(len(pods), 'pod')}, {len(holders)} with GPUs, {plural(len(workloads), 'assignment')}"
    findings = [ok("kubelet", f"{responds}: {text}")]
    if is_read and not pods & api_pods:
        findings.append(_explain_node_name(len(pods), len(api_pods)))
    return findings


def _explain_no_pods(responds: str, api_pods: int) -> Finding:
    """Explains an empty list. After a restart, a kubelet lists no pods until it has read them from the API server."""
    advice = "run doctor again in a minute; if this persists, check the kubelet's log and the API server"
    if api_pods:
        text = f"{responds}, but lists no pods, and the API server has {plural(api_pods, 'pod')} on this node"
    elif "KUBERNETES_SERVICE_HOST" in os.environ:
        text = f"{responds}, but lists no pods, not even this one"
    else:
        return note("kubelet", f"{responds}: no pods; if some run here, the kubelet was just restarted", advice)
    return wrong("kubelet", f"{text}: it was restarted and does not know its pods yet", advice)


def _explain_node_name(kubelet_pods: int, api_pods: int) -> Finding:
    node = os.environ.get("NODE_NAME", "")
    return wrong(
        "node name",
        f"NODE_NAME is not this node: the API server has {plural(api_pods, 'pod')} on the node {node!r}, this node's"
        f" kubelet has {plural(kubelet_pods, 'pod')}, and none is in both lists, so data of the API server cannot be"
        " used",
        "set NODE_NAME from spec.nodeName by the downward API; outside a pod, to the name in `kubectl get nodes`",
    )


_ROOTS = "the kubelet's directory in k0s: /var/lib/k0s/kubelet, in microk8s: /var/snap/microk8s/common/var/lib/kubelet"


def _explain_error(name: str, error: Exception | None, kubelet_required: bool) -> Finding:
    """Reports the error without the worker's name. The error messages of sources already contain advice."""
    text = str(error).removeprefix(f"{name}: ")
    if name != SOURCE or getattr(error, "reason", "") != "socket_missing":
        return wrong(name, text)
    return (wrong if kubelet_required else note)("kubelet", f"no pod labels, because {text}", _ROOTS)


# Mapping

_GPU_RESOURCES = ("nvidia.com/gpu", "nvidia.com/mig-")


def check_mapping(
    allocation: Allocation,
    readings: GpuReadings,
    selection: Selection,
    resource_names: frozenset[str],
    resources: Sequence[str],
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
        text = f"no pod holds a known GPU resource; pods hold devices of {few_of(resources)}"
        findings.append(note("mapping", text, "if one of these contains GPUs, add it to --nvidia-resource-names"))
    elif not findings:
        findings.append(ok("mapping", "no pod holds a GPU"))
    unnamed = [entry for entry in allocation.assignments if not entry.holder.pod and not entry.holder.job]
    if unnamed:
        text = f"{plural(len(unnamed), 'assignment')} of pods with unknown names ({unnamed[0].holder.text})"
        advice = (
            "names come from the host's /var/log/pods and /var/log/containers: mount /var/log, or set --path-varlog"
        )
        findings.append(note("mapping", text, advice))
    shown = selection.select(readings.devices)
    hidden = [entry for entry in allocation.assignments if entry.device not in shown]
    if hidden:
        text = f"{plural(len(hidden), 'assignment')} on devices excluded by -d {selection}: they are not exported"
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
            advice = "report the id and its device plugin or scheduler; until then the pod's GPU has no pod labels"
            return wrong("mapping", f"{text}: the format of the id is not recognised", advice)
        return note("mapping", f"{text}: not a GPU", "nothing to do unless this resource contains GPUs")
    explanation = explain(unmapped)
    finding = note if explanation.harmless else wrong
    return finding("mapping", f"{text} ({unmapped.source}): {explanation.reason}", explanation.advice)


def _explain_unknown(device_id: DeviceId, readings: GpuReadings) -> tuple[str, str]:
    """Returns the reason why a well-formed id matches no device of this node, and the advice."""
    if not readings.is_complete:
        return "it may be a GPU that does not respond", "fix the problems of the GPUs first"
    if device_id.mig_uuid is not None or device_id.gi_id is not None:
        return (
            "this node has no such MIG instance",
            "the MIG layout was changed after the pod got the device: delete the pod, and restart the device plugin so"
            " that it offers the new instances",
        )
    return (
        "this node has no such GPU",
        "if the GPU was replaced, restart the device plugin and delete the pod; otherwise check that the socket belongs"
        " to this node's kubelet, and that this container gets all GPUs (NVIDIA_VISIBLE_DEVICES=all)",
    )
