"""This module says what the doctor must know of the machine and of this process on it, and what it makes of that.

`read_host` touches /proc, /sys and /dev, whose places are given; the rest is pure.
"""

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

_HOST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO: the first PID namespace has this inode on every Linux
_SYS_ADMIN = 1 << 21
_KERNEL_MODULE = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")
_NODE_NAME = "env: [{name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]"


@dataclass(frozen=True, slots=True)
class Host:
    """What was read of the machine. None or empty: could not be read, or is not there."""

    uid: int | None = None
    """The effective one."""
    capabilities: int | None = None
    """The effective ones, as the kernel's bit mask."""
    pid_namespace: str = ""
    kernel_driver: str = ""
    """Version of the NVIDIA driver in the kernel; containers see it too."""
    pci_gpus: int | None = None
    device_files: tuple[tuple[str, bool], ...] = ()
    """/dev/nvidiactl and /dev/nvidia<minor>, and whether this process may open each."""
    name: str = ""
    node_name: str = ""
    """The variable NODE_NAME."""
    in_pod: bool = False


def read_host(proc: str, sysfs: str, dev: str, environment: Mapping[str, str]) -> Host:
    uid, capabilities = parse_status(_read(Path(proc, "self/status")))
    return Host(
        uid=uid,
        capabilities=capabilities,
        pid_namespace=_read_link(Path(proc, "self/ns/pid")),
        kernel_driver=parse_kernel_driver(_read(Path(proc, "driver/nvidia/version"))),
        pci_gpus=count_pci_gpus(sysfs),
        device_files=_read_device_files(Path(dev)),
        name=socket.gethostname(),
        node_name=environment.get("NODE_NAME", ""),
        in_pod="KUBERNETES_SERVICE_HOST" in environment,
    )


def parse_status(text: str) -> tuple[int | None, int | None]:
    """Effective uid and capabilities from /proc/<pid>/status."""
    uid = re.search(r"^Uid:\s+\d+\s+(\d+)", text, re.MULTILINE | re.ASCII)
    capabilities = re.search(r"^CapEff:\s+([0-9a-f]+)$", text, re.MULTILINE)
    return int(uid[1]) if uid else None, int(capabilities[1], 16) if capabilities else None


def parse_kernel_driver(text: str) -> str:
    """The version in /proc/driver/nvidia/version, which the open and the closed module word differently."""
    found = _KERNEL_MODULE.search(text)
    return found[1] if found else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _read_device_files(dev: Path) -> tuple[tuple[str, bool], ...]:
    found = sorted([*dev.glob("nvidiactl"), *dev.glob("nvidia[0-9]*")])
    return tuple((str(path), os.access(path, os.R_OK | os.W_OK)) for path in found)  # NVML opens them for both


def judge_privileges(host: Host, exact: bool = False) -> list[Finding]:
    """`exact`: busy samples are wanted, which is what CAP_SYS_ADMIN is for."""
    who = "uid not known" if host.uid is None else f"uid {host.uid}"
    for_what = "CAP_SYS_ADMIN for busy samples" if exact else "capabilities for nothing"
    findings = [ok("privileges", f"{who}; root is needed for the kubelet's socket alone, {for_what}")]
    if host.capabilities is not None and host.capabilities & _SYS_ADMIN and not exact:
        findings.append(
            note(
                "privileges",
                "this process has CAP_SYS_ADMIN, which podgpu does not need",
                "in its pod: securityContext: {privileged: false, capabilities: {drop: [ALL]}}",
            )
        )
    return findings


def judge_device_files(host: Host) -> list[Finding]:
    """Nothing when there are none: where NVML works all the same (WSL has /dev/dxg) none are needed."""
    closed = [path for path, may_open in host.device_files if not may_open]
    if closed:
        return [
            wrong(
                "device files",
                f"this process may not open {few_of(closed)}",
                "let the NVIDIA runtime hand them in (runtimeClassName: nvidia), or allow this user to read and write",
            )
        ]
    if host.device_files:
        return [ok("device files", f"{plural(len(host.device_files), 'file')}, all can be opened")]
    return []


def judge_pid_namespace(host: Host) -> list[Finding]:
    if host.pid_namespace == _HOST_PID_NAMESPACE:
        return [ok("pid namespace", "the host's")]
    if not host.pid_namespace:
        return [note("pid namespace", "not known: /proc/self/ns/pid cannot be read", "mount /proc")]
    return [
        note(
            "pid namespace",
            "not the host's: figures per process and per container cannot be had, everything else works",
            "set hostPID: true on the pod if you want them",
        )
    ]


def judge_host_name(host: Host, left_out: bool) -> list[Finding]:
    if left_out:
        return [ok("host name", "left out of the labels (--no-hostname)")]
    if host.node_name:
        return [ok("host name", f"{host.node_name}, from NODE_NAME")]
    if host.in_pod:
        return [wrong("host name", f"NODE_NAME is not set: the host label is {host.name}, the pod's name", _NODE_NAME)]
    return [ok("host name", host.name)]
