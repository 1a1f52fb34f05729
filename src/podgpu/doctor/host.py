"""Checks the machine and this process: privileges, device files, PID namespace and host name."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from podgpu.doctor.findings import Finding, note, ok, plural, wrong
from podgpu.errors import few_of
from podgpu.gpu.pci import count_pci_gpus

_HOST_PID_NAMESPACE = "pid:[4026531836]"  # inode of the initial PID namespace on every Linux (PROC_PID_INIT_INO)
_SYS_ADMIN = 1 << 21
_KERNEL_MODULE = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")
_NODE_NAME = "env: [{name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]"


@dataclass(frozen=True, slots=True)
class Host:
    """Facts about the machine and this process. None or empty if absent or unreadable."""

    uid: int | None = None
    capabilities: int | None = None  # effective capabilities, the kernel's bit mask
    pid_namespace: str = ""
    kernel_driver: str = ""  # version of the NVIDIA driver in the kernel, which is also visible in containers
    pci_gpus: int | None = None
    device_files: tuple[tuple[str, bool], ...] = ()
    """Paths of /dev/nvidiactl and /dev/nvidia<minor>, each with whether this process can open it."""
    name: str = ""
    node_name: str = ""  # environment variable NODE_NAME
    in_pod: bool = False


def read_host(proc: str, sysfs: str, dev: str, environment: Mapping[str, str]) -> Host:
    uid, capabilities = parse_status(_read(Path(proc, "self/status")))
    try:
        pid_namespace = os.readlink(Path(proc, "self/ns/pid"))
    except OSError:
        pid_namespace = ""
    files = sorted([*Path(dev).glob("nvidiactl"), *Path(dev).glob("nvidia[0-9]*")])
    return Host(
        uid=uid,
        capabilities=capabilities,
        pid_namespace=pid_namespace,
        kernel_driver=parse_kernel_driver(_read(Path(proc, "driver/nvidia/version"))),
        pci_gpus=count_pci_gpus(sysfs),
        device_files=tuple((str(path), os.access(path, os.R_OK | os.W_OK)) for path in files),
        name=socket.gethostname(),
        node_name=environment.get("NODE_NAME", ""),
        in_pod="KUBERNETES_SERVICE_HOST" in environment,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def parse_status(text: str) -> tuple[int | None, int | None]:
    """Returns the effective uid and capabilities in the text of /proc/<pid>/status."""
    uid = re.search(r"^Uid:\s+\d+\s+(\d+)", text, re.MULTILINE | re.ASCII)
    capabilities = re.search(r"^CapEff:\s+([0-9a-f]+)$", text, re.MULTILINE)
    return int(uid[1]) if uid else None, int(capabilities[1], 16) if capabilities else None


def parse_kernel_driver(text: str) -> str:
    """Returns the version in /proc/driver/nvidia/version. The open and closed modules use different wording."""
    match = _KERNEL_MODULE.search(text)
    return match[1] if match else ""


def check_host(host: Host, *, exact_usage: bool, device_files: bool, pid_namespace: bool) -> list[Finding]:
    findings = _check_privileges(host, exact_usage)
    if device_files:
        findings += _check_device_files(host)
    if pid_namespace:
        findings.append(_check_pid_namespace(host))
    return findings


def _check_privileges(host: Host, exact_usage: bool) -> list[Finding]:
    user = "unknown uid" if host.uid is None else f"uid {host.uid}"
    needed = "CAP_SYS_ADMIN for --usage-from exact" if exact_usage else "none"
    findings = [
        ok(
            "privileges",
            f"running as {user}; only the kubelet socket needs root; capabilities needed: {needed}",
        )
    ]
    if host.capabilities is not None and host.capabilities & _SYS_ADMIN and not exact_usage:
        findings.append(
            note(
                "privileges",
                "this process has CAP_SYS_ADMIN, which podgpu does not need",
                "set securityContext: {privileged: false, capabilities: {drop: [ALL]}} in its pod",
            )
        )
    return findings


def _check_device_files(host: Host) -> list[Finding]:
    """Returns no finding if there are no device files, because WSL works without them."""
    closed = [path for path, can_open in host.device_files if not can_open]
    if closed:
        return [
            wrong(
                "device files",
                f"no permission to open {few_of(closed)}",
                "use the NVIDIA runtime (runtimeClassName: nvidia), or allow this user to read and write them",
            )
        ]
    return (
        [ok("device files", f"{plural(len(host.device_files), 'file')}, all can be opened")]
        if host.device_files
        else []
    )


def _check_pid_namespace(host: Host) -> Finding:
    if host.pid_namespace == _HOST_PID_NAMESPACE:
        return ok("pid namespace", "host PID namespace")
    if not host.pid_namespace:
        return note("pid namespace", "unknown, because /proc/self/ns/pid cannot be read", "mount /proc")
    return note(
        "pid namespace",
        "not in the host PID namespace: per-container usage is unavailable",
        "set hostPID: true to enable it",
    )


def check_host_name(host: Host, no_hostname: bool) -> Finding:
    if no_hostname:
        return ok("host name", "not in the labels (--no-hostname)")
    if host.node_name:
        return ok("host name", f"{host.node_name}, from NODE_NAME")
    if host.in_pod:
        return wrong("host name", f"NODE_NAME is not set: the host label is the pod's name, {host.name}", _NODE_NAME)
    return ok("host name", host.name)
