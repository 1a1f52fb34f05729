"""Checks the machine and this process: privileges, device files, PID namespace and host name."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

from podgpu.doctor.findings import Finding, note, ok, plural, wrong
from podgpu.errors import few_of

_HOST_PID_NAMESPACE = "pid:[4026531836]"  # inode of the initial PID namespace on every Linux (PROC_PID_INIT_INO)
_SYS_ADMIN = 1 << 21


def read_kernel_driver(proc: str) -> str:
    """Returns the version of the NVIDIA driver in the kernel, which containers see too. Empty if there is none."""
    version = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", _read(Path(proc, "driver/nvidia/version")))
    return version[1] if version else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def check_privileges(proc: str, exact_usage: bool) -> list[Finding]:
    status = _read(Path(proc, "self/status"))
    uid = re.search(r"^Uid:\s+\d+\s+(\d+)", status, re.MULTILINE | re.ASCII)
    capabilities = re.search(r"^CapEff:\s+([0-9a-f]+)$", status, re.MULTILINE)
    user = f"uid {uid[1]}" if uid else "unknown uid"
    needed = "CAP_SYS_ADMIN for --usage-from exact" if exact_usage else "none"
    text = f"running as {user}; only the kubelet socket needs root; capabilities needed: {needed}"
    findings = [ok("privileges", text)]
    if capabilities and int(capabilities[1], 16) & _SYS_ADMIN and not exact_usage:
        findings.append(
            note(
                "privileges",
                "this process has CAP_SYS_ADMIN, which podgpu does not need",
                "set securityContext: {privileged: false, capabilities: {drop: [ALL]}} in its pod",
            )
        )
    return findings


def check_device_files(dev: str) -> list[Finding]:
    """Returns no finding if there are no device files, because WSL works without them."""
    files = sorted([*Path(dev).glob("nvidiactl"), *Path(dev).glob("nvidia[0-9]*")])
    closed = [str(path) for path in files if not os.access(path, os.R_OK | os.W_OK)]
    if closed:
        advice = "use the NVIDIA runtime (runtimeClassName: nvidia), or allow this user to read and write them"
        return [wrong("device files", f"no permission to open {few_of(closed)}", advice)]
    return [ok("device files", f"{plural(len(files), 'file')}, all can be opened")] if files else []


def check_pid_namespace(proc: str) -> Finding:
    try:
        namespace = os.readlink(Path(proc, "self/ns/pid"))
    except OSError:
        return note("pid namespace", "unknown, because /proc/self/ns/pid cannot be read", "mount /proc")
    if namespace == _HOST_PID_NAMESPACE:
        return ok("pid namespace", "host PID namespace")
    text = "not in the host PID namespace: per-container usage is unavailable"
    return note("pid namespace", text, "set hostPID: true to enable it")


def check_host_name(no_hostname: bool) -> Finding:
    name, node_name = socket.gethostname(), os.environ.get("NODE_NAME")
    if no_hostname:
        return ok("host name", "not in the labels (--no-hostname)")
    if node_name:
        return ok("host name", f"{node_name}, from NODE_NAME")
    if is_in_pod():
        text = f"NODE_NAME is not set: the host label is the pod's name, {name}"
        advice = "env: [{name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]"
        return wrong("host name", text, advice)
    return ok("host name", name)


def is_in_pod() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ
