"""Records every access to node files of the machine that runs the tests, by a test or by a command
that it starts.

`sitecustomize.py` installs the audit hook (PEP 578) in every Python process that a test starts. The
hook detects opened files, listed folders, sockets and loaded libraries, but not os.stat.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable

# variable with the path of the file to which other processes write
NOTES = "TESTS_NOTE_WHAT_IS_READ_IN"
HOST_VARIABLES = (
    "DCGM_",
    "PODGPU_",
    "KUBE",
    "NODE_NAME",
    "NODE_IP",
    "NVIDIA_",
    "OTEL_",
    "HPC_",
    "NOTIFY_SOCKET",
    "LISTEN_",
)
NODE_PATHS = {
    "PODGPU_PATH_PROC": "proc",
    "PODGPU_PATH_KMSG": "dev/kmsg",
    "PODGPU_PATH_SYSFS": "sys",
    "PODGPU_PATH_VARLOG": "var/log",
    "DCGM_POD_RESOURCES_KUBELET_SOCKET": "var/lib/kubelet/pod-resources/kubelet.sock",
}

_HOST = re.compile(
    r"/(proc|sys|run|var/run|var/lib/kubelet|var/log|etc/kubernetes|etc/dcgm-exporter|etc/podgpu)(/|$)"
    r"|/dev/nvidia|" + re.escape(os.path.expanduser("~/.kube"))
)
_PROCESS = re.compile(r"/proc/(self|thread-self|\d+)(/|$)")
_ALLOWED = re.compile(  # the interpreter and libraries read these
    r"/proc/(cpuinfo|meminfo|stat|loadavg|sys/net/core/somaxconn|version)$"
    r"|/sys/devices/system/cpu(/|$)|/sys/fs/cgroup(/|$)"
)
_DRIVER, _DCGM = "libnvidia-ml", "libdcgm"  # prefixes; fake libraries of tests are loaded by path


def clear_environment(keep: tuple[str, ...] = ()) -> None:
    """Removes environment variables that change the behaviour of podgpu."""
    for name in list(os.environ):
        if name not in keep and (
            name.startswith(HOST_VARIABLES) or name.lower().endswith("_proxy")
        ):
            del os.environ[name]


def set_node_paths(folder: str) -> None:
    """Sets the paths of node files to an empty folder, because this machine may be a node."""
    for name, path in NODE_PATHS.items():
        os.environ[name] = os.path.join(folder, path)


def install_hook(note: Callable[[str], None]) -> None:
    """Installs the audit hook. It cannot be removed."""

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir"):
            path = arguments[0]
            if isinstance(path, str | bytes | os.PathLike) and is_host_path(os.fsdecode(path)):
                note(f"{event} {os.fsdecode(path)}")
        elif event == "socket.connect":
            address = arguments[1]
            if isinstance(address, str) and is_host_path(address):
                note(f"{event} {address}")
        elif event == "ctypes.dlopen" and str(arguments[0]).startswith(_DRIVER):
            raise OSError(f"{arguments[0]}: tests run as on a machine without a driver")
        elif event == "ctypes.dlopen" and str(arguments[0]).startswith(_DCGM):
            note(f"{event} {arguments[0]}")

    sys.addaudithook(hook)


def is_host_path(path: str) -> bool:
    if not _HOST.match(path) or _ALLOWED.match(path):
        return False
    process = _PROCESS.match(path)
    return process is None or not (process[1].endswith("self") or _is_descendant(int(process[1])))


def _is_descendant(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        try:
            with open(f"/proc/self/../{pid}/stat", encoding="utf-8", errors="replace") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
    return False
