"""This module asks the kubelet's socket once, and judges its answer or its silence."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

from podgpu.doctor.findings import REPORT, Finding, note, ok, plural, wrong
from podgpu.errors import SourceError, StartError
from podgpu.holders.kubelet import OPTION, KubeletAllocation
from podgpu.model import Allocation, Device
from podgpu.workers import Workers

_MOUNT = (
    "mount the host's /var/lib/kubelet/pod-resources directory (not the socket in it: every kubelet restart makes a"
    f" new one), or name the socket with {OPTION} where the kubelet's root is another (k0s: /var/lib/k0s/kubelet,"
    " microk8s: /var/snap/microk8s/common/var/lib/kubelet)"
)
_ADVICE = {
    "socket_missing": ("{socket}: no such file", _MOUNT),
    "not_a_socket": ("{socket}: is not a socket", _MOUNT),
    "permission_denied": (
        "{socket}: permission denied",
        "the kubelet's socket is root's: set securityContext: {runAsUser: 0}, or run this as root; no capability is"
        " needed",
    ),
    "deadline": ("{socket}: no answer in time", "the kubelet hangs or is overloaded: look at its log on the host"),
    "unavailable": ("{socket}: nothing answers", "the kubelet is stopped or restarting: look at its log on the host"),
}
"""Reason -> what to say and what to do; other messages of the source speak for themselves."""


@dataclass(frozen=True, slots=True)
class KubeletAnswer:
    version: str
    """Of the pod-resources API."""
    pods: frozenset[tuple[str, str]]
    """Namespace and name of each, whatever it holds."""
    resources: frozenset[str]
    """Every resource some container holds devices of, GPUs or not."""
    allocation: Allocation


def ask(kubelet: KubeletAllocation, devices: tuple[Device, ...]) -> KubeletAnswer:
    """The exporter's own question; the doctor also wants what surrounds the assignments."""
    response = kubelet.client.list()
    return KubeletAnswer(
        kubelet.client.version or "",
        frozenset((pod.namespace, pod.name) for pod in response.pod_resources),
        _resources(response),
        kubelet.map(response, devices),
    )


def _resources(response: Any) -> frozenset[str]:
    containers = (container for pod in response.pod_resources for container in pod.containers)
    return frozenset(entry.resource_name for container in containers for entry in container.devices)


def ask_kubelet(
    kubelet: KubeletAllocation, devices: tuple[Device, ...], required: bool, isolation: Workers, deadline: float
) -> tuple[KubeletAnswer | None, list[Finding]]:
    """`required`: a socket that is not there is wrong, not just worth a note."""
    result = isolation.run({"kubelet": lambda: ask(kubelet, devices)}, deadline)["kubelet"]
    if result.value is not None:
        return result.value, [ok("kubelet", _describe(kubelet.client.socket, result.value))]
    return None, [_explain(result.error, kubelet.client.socket, required)]


def _describe(socket: str, answer: KubeletAnswer) -> str:
    allocation = answer.allocation
    who = chain((a.holder for a in allocation.assignments), (u.holder for u in allocation.unmapped))
    holders = {(holder.namespace, holder.pod) for holder in who}
    given = plural(len(allocation.assignments) + len(allocation.unmapped), "assignment")
    return f"{socket} answers ({answer.version}): {plural(len(answer.pods), 'pod')}, {len(holders)} with GPUs, {given}"


def _explain(error: SourceError | StartError | None, socket: str, required: bool) -> Finding:
    reason = getattr(error, "reason", "")
    if reason == "socket_missing" and not required:
        return note("kubelet", f"{socket}: no such file, so there are no pod labels here", f"on Kubernetes {_MOUNT}")
    if reason in _ADVICE:
        text, advice = _ADVICE[reason]
        return wrong("kubelet", text.replace("{socket}", socket), advice)
    return wrong("kubelet", str(error), REPORT if reason == "bug" else "")
