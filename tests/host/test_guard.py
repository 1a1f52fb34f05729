"""The guard records reads of the host, in this process and in commands that a test starts."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.host.guard import HOST_VARIABLES, NODE_PATHS, NOTES, is_host_path

HOST_PATHS = [
    "/var/lib/kubelet/pod-resources/kubelet.sock",
    "/var/log/containers/a.log",
    "/proc/1/cgroup",
    "/proc/driver/nvidia/version",
    "/sys/bus/pci/devices",
    "/var/run/secrets/kubernetes.io/serviceaccount/token",
    "/dev/nvidia0",
    os.path.expanduser("~/.kube/config"),
]


def test_host_paths() -> None:
    assert [path for path in HOST_PATHS if not is_host_path(path)] == []
    assert [path for path in ("/proc/self/fd", "/tmp/x/var/log", "/proc/meminfo") if is_host_path(path)] == []
    with subprocess.Popen(["sleep", "60"]) as child:
        assert not is_host_path(f"/proc/{child.pid}/status")
        child.kill()


def test_reads_of_a_command_are_recorded(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    subprocess.run(
        [sys.executable, "-c", "open('/proc/1/comm').close()"], env={**os.environ, NOTES: str(notes)}, check=True
    )
    assert "open /proc/1/comm" in notes.read_text(encoding="utf-8").splitlines()


def test_driver_of_the_host_is_not_loaded() -> None:
    with pytest.raises(OSError, match="without a driver"):
        ctypes.CDLL("libnvidia-ml.so.1")


def test_environment() -> None:
    left = [name for name in os.environ if name.startswith(HOST_VARIABLES) or name.lower().endswith("_proxy")]
    assert set(left) <= {"PODGPU_EXPLORE", *NODE_PATHS}
    assert not any(os.path.exists(os.environ[name]) for name in NODE_PATHS)
