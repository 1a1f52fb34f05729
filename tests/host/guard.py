"""Notes whatever a test, or a command that it starts, reads of the machine it runs on: no result may hang on that.

`sitecustomize.py` beside it brings the same into every Python process that a test starts. The interpreter tells of
files that are opened, folders that are listed, sockets and libraries (PEP 578); it does not tell of os.stat.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable

NOTES = "TESTS_NOTE_WHAT_IS_READ_IN"
"""The variable that names the file in which other processes note it."""
MEANS_SOMETHING = ("DCGM_", "PODGPU_", "KUBE", "NODE_NAME", "NODE_IP", "NVIDIA_", "HPC_", "NOTIFY_SOCKET", "LISTEN_")
"""How the variables begin that change what podgpu does."""
NODES_PLACES = {
    "PODGPU_PATH_PROC": "proc",
    "PODGPU_PATH_SYSFS": "sys",
    "PODGPU_PATH_VARLOG": "var/log",
    "DCGM_POD_RESOURCES_KUBELET_SOCKET": "var/lib/kubelet/pod-resources/kubelet.sock",
}
"""The variables that say where a node's things are, and where they are in the folder of `on_no_node`."""

_OF_THE_HOST = re.compile(
    r"/(proc|sys|run|var/run|var/lib/kubelet|var/log|etc/kubernetes|etc/dcgm-exporter|etc/podgpu)(/|$)"
    r"|/dev/nvidia|" + re.escape(os.path.expanduser("~/.kube"))
)
_OF_PROCESSES = re.compile(r"/proc/(self|thread-self|\d+)(/|$)")
_NOT_A_NODES = re.compile(
    r"/proc/(cpuinfo|meminfo|stat|loadavg|sys/net/core/somaxconn|version)$"  # the interpreter's and libraries' own
    r"|/sys/devices/system/cpu(/|$)|/sys/fs/cgroup(/|$)"
)
_DRIVER, _DCGM = "libnvidia-ml", "libdcgm"
"""How the names begin by which the libraries of this machine are loaded: a test's own are loaded by a path."""


def without_what_means_something(keep: tuple[str, ...] = ()) -> None:
    """Takes the variables out of the environment that would change what podgpu does, or how it gets there."""
    for name in list(os.environ):
        if name not in keep and (name.startswith(MEANS_SOMETHING) or name.lower().endswith("_proxy")):
            del os.environ[name]


def on_no_node(folder: str) -> None:
    """Commands look for what a kubelet leaves on its node where nothing is, unless a test says where: this machine may
    be a node."""
    for name, place in NODES_PLACES.items():
        os.environ[name] = os.path.join(folder, place)


def watch(note: Callable[[str], None]) -> None:
    """From now on, and for good: a hook cannot be taken away."""

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir"):
            path = arguments[0]
            if isinstance(path, str | bytes | os.PathLike) and is_of_the_host(os.fsdecode(path)):
                note(f"{event} {os.fsdecode(path)}")
        elif event == "socket.connect":
            address = arguments[1]
            if isinstance(address, str) and is_of_the_host(address):
                note(f"{event} {address}")
        elif event == "ctypes.dlopen" and str(arguments[0]).startswith(_DRIVER):
            raise OSError(f"{arguments[0]}: not loaded, for tests run as on a machine without a driver")
        elif event == "ctypes.dlopen" and str(arguments[0]).startswith(_DCGM):
            note(f"{event} {arguments[0]}")

    sys.addaudithook(hook)


def is_of_the_host(path: str) -> bool:
    if not _OF_THE_HOST.match(path) or _NOT_A_NODES.match(path):
        return False
    process = _OF_PROCESSES.match(path)
    return process is None or not (process[1].endswith("self") or _is_ours(int(process[1])))


def _is_ours(pid: int) -> bool:
    """This process, or one that it has started, at whatever remove."""
    while pid > 1:
        if pid == os.getpid():
            return True
        try:
            with open(f"/proc/self/../{pid}/stat", encoding="utf-8", errors="replace") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
    return False
