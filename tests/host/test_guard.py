"""The guard sees what it must see, in this process and in those that a test starts; the rest it lets pass."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.host.guard import MEANS_SOMETHING, NODES_PLACES, NOTES, is_of_the_host


@pytest.mark.parametrize(
    "path",
    [
        "/var/lib/kubelet/pod-resources/kubelet.sock",
        "/var/log/pods",
        "/var/log/containers/a.log",
        "/proc/1/cgroup",
        "/proc/driver/nvidia/version",
        "/sys/class/drm",
        "/sys/bus/pci/devices",
        "/proc/4711",
        "/run/nvidia/driver",
        "/var/run/secrets/kubernetes.io/serviceaccount/token",
        "/dev/nvidia0",
        os.path.expanduser("~/.kube/config"),
    ],
)
def test_what_is_the_machines(path: str) -> None:
    assert is_of_the_host(path)


@pytest.mark.parametrize("path", ["/proc/self/fd", "/tmp/x/var/log", "/proc/meminfo"])
def test_what_is_not(path: str) -> None:
    assert not is_of_the_host(path)


def test_a_process_that_was_started_here_is_ours() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert not is_of_the_host(f"/proc/{child.pid}/status")
        assert not is_of_the_host(f"/proc/{os.getpid()}/status")
        child.kill()


def test_a_command_notes_what_it_reads(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    look = "import os; os.path.isdir('/var/log') and os.listdir('/var/log'); open('/proc/1/comm').close()"
    subprocess.run([sys.executable, "-c", look], env={**os.environ, NOTES: str(notes)}, check=True)
    assert "open /proc/1/comm" in notes.read_text(encoding="utf-8").splitlines()


def test_this_machines_driver_is_not_loaded(tmp_path: Path) -> None:
    """Whether there is one or not, here and in a command."""
    with pytest.raises(OSError, match="tests run as on a machine without a driver"):
        ctypes.CDLL("libnvidia-ml.so.1")
    ask = "import pynvml; pynvml.nvmlInit()"
    asked = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    assert "NVMLError_LibraryNotFound" in asked.stderr


def test_no_variable_that_means_something_is_left() -> None:
    left = [name for name in os.environ if name.startswith(MEANS_SOMETHING) or name.lower().endswith("_proxy")]
    assert set(left) <= {"PODGPU_EXPLORE", *NODES_PLACES}


def test_commands_look_for_a_kubelet_where_none_is() -> None:
    assert not any(os.path.exists(os.environ[name]) for name in NODES_PLACES)
