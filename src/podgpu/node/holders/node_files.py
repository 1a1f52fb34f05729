"""Allocation sources that read podlist.json, the kubelet's checkpoint, job files of HPC schedulers,
or processes.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import cache, partial
from typing import Annotated

from msgspec import Meta, Struct, field

from podgpu.decode import decode_json
from podgpu.errors import SourceError
from podgpu.files import ReadOnChange, explain_read_error, read_bounded
from podgpu.model import Allocation, Assignment, Device, ProcessUsage, Unmapped, Workload
from podgpu.node.holders import AllocationSource
from podgpu.node.holders.device_ids import (
    HeldId,
    SharedDevice,
    group_replicas,
    is_gpu,
    map_held,
    parse_id_or_minor,
    sort_allocation,
)
from podgpu.node.usage.containers import (
    FAILED_LOOKUPS,
    ContainerFinder,
    require_host_pid_namespace,
    require_permission,
)

MAX_BYTES = 16 * 1024 * 1024
_MAX_JOB_FILE_BYTES = 256 * 1024
_MAX_ENVIRONMENT_BYTES = 256 * 1024
_log = logging.getLogger(__name__)


# podlist.json: koordinator's hook or `podgpu hook` writes this file. It contains holders and
# devices, but no shares.

DEFAULT_PATHS = ("/var/lib/kubelet/pod-resources/podlist.json", "/podlist.json")
"""Directory of the kubelet's socket, and mount point in koordinator's manifest."""
_NonEmpty = Annotated[str, Meta(min_length=1)]


class PodlistEntry(Struct, frozen=True):
    name: _NonEmpty
    namespace: _NonEmpty
    container: str
    gpu_list: list[str] | None


class PodlistAllocation(AllocationSource):
    """Reads the first existing file of `paths`."""

    name = "podlist"

    def __init__(self, paths: Sequence[str] = DEFAULT_PATHS) -> None:
        self.paths = paths
        self._file = ReadOnChange(parse_podlist, MAX_BYTES)

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        path = next(filter(os.path.exists, self.paths), self.paths[0])
        held = self._file.read(path)
        _warn_if_mounted(path)
        return map_held(self.name, held, devices, parse=parse_id_or_minor)


@cache  # logs once per path
def _warn_if_mounted(path: str) -> None:
    if os.path.ismount(path):
        _log.warning(
            "%s is mounted as a single file: if its writer replaces it, podgpu keeps reading the "
            "old file; mount its"
            " directory instead",
            path,
        )


def parse_podlist(content: bytes, path: str = "podlist.json") -> tuple[HeldId, ...]:
    """Returns the held device ids. Raises SourceError if the file is empty or malformed. An empty
    list is valid.
    """
    entries: list[PodlistEntry] = decode_json(content, path, list[PodlistEntry] | None) or []  # type: ignore[arg-type]
    return tuple(
        HeldId(holder, "podlist", text)
        for entry in entries
        for holder in [Workload(entry.namespace, entry.name, entry.container)]
        for text in entry.gpu_list or ()
    )


# The kubelet's checkpoint contains pod UIDs and the replicas of shared GPUs, but no pod names. It
# can be outdated, because the kubelet removes finished pods only when it next allocates a device.

CHECKPOINT_NAME = (
    "device-plugins/kubelet_internal_checkpoint"  # relative to the kubelet's root directory
)


class _PodDevices(Struct):
    uid: Annotated[str, Meta(min_length=1)] = field(name="PodUID")
    container: str = field(name="ContainerName")
    resource: str = field(name="ResourceName")
    device_ids: dict[str, list[str] | None] | None = field(
        name="DeviceIDs", default=None
    )  # by NUMA node

    def held_ids(self) -> Iterator[HeldId]:
        holder = Workload(container=self.container, uid=self.uid)
        for text in (text for ids in (self.device_ids or {}).values() for text in ids or ()):
            yield HeldId(holder, self.resource, text)


class _DeviceData(Struct):
    entries: list[_PodDevices] | None = field(name="PodDeviceEntries", default=None)
    registered: dict[str, list[str] | None] | None = field(name="RegisteredDevices", default=None)


class _DeviceFile(Struct):
    data: _DeviceData = field(name="Data")


class CheckpointAllocation(AllocationSource):
    name = "checkpoint"

    def __init__(self, path: str, resource_names: frozenset[str] = frozenset()) -> None:
        self.path = os.path.abspath(path)
        self._file = ReadOnChange(
            partial(parse_checkpoint, resource_names=resource_names), MAX_BYTES
        )

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        held, registered = self._file.read(self.path)
        return map_held(self.name, held, devices, registered)


def parse_checkpoint(
    content: bytes, path: str = "the checkpoint", resource_names: frozenset[str] = frozenset()
) -> tuple[list[HeldId], Mapping[SharedDevice, Set[str]]]:
    """Returns the held GPU ids, and the registered replicas of shared GPUs. Raises SourceError if
    malformed.
    """
    data = decode_json(content, path, _DeviceFile).data
    held = [
        held
        for entry in data.entries or ()
        for held in entry.held_ids()
        if is_gpu(held, resource_names)
    ]
    registered = (text for ids in (data.registered or {}).values() for text in ids or ())
    return held, group_replicas(registered)


# Job files in dcgm-exporter's format. The prolog of an HPC scheduler writes one file per device,
# with one job per line. The file's name is `<gpu index>` or `<gpu index>.<gpu instance id>`.

_JOB_FILE = re.compile(r"\d+(\.\d+)?", re.ASCII)


class HpcAllocation(AllocationSource):
    name = "hpc"

    def __init__(self, directory: str) -> None:
        self.directory = os.path.abspath(directory)

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        # Compares names as text, as dcgm-exporter does, so the file `00` does not belong to GPU 0.
        by_name = {
            str(device.index) if device.gi_id is None else f"{device.index}.{device.gi_id}": device
            for device in devices
        }
        assignments: list[Assignment] = []
        unmapped: list[Unmapped] = []
        try:
            names = [name for name in os.listdir(self.directory) if _JOB_FILE.fullmatch(name)]
        except OSError as error:
            raise explain_read_error(error, self.directory) from error
        for name in names:
            try:
                jobs = parse_jobs(
                    read_bounded(os.path.join(self.directory, name), _MAX_JOB_FILE_BYTES)
                )
            except SourceError as error:
                if (
                    error.reason != "file_missing"
                ):  # a missing file means that the job has just ended
                    unmapped.append(Unmapped(self.name, error.reason, name, "hpc", Workload()))
                continue
            holders = [Workload(job=job) for job in jobs]
            if name in by_name:
                assignments += (
                    Assignment(by_name[name].key, holder, self.name) for holder in holders
                )
            else:
                unmapped += (
                    Unmapped(self.name, "unknown_device", name, "hpc", holder) for holder in holders
                )
        return sort_allocation(assignments, unmapped)


def parse_jobs(content: bytes) -> list[str]:
    """Returns the jobs, one per line. Only a line feed ends a line, as in dcgm-exporter."""
    lines = (line.strip() for line in content.decode(errors="replace").split("\n"))
    return list(dict.fromkeys(line for line in lines if line))


# Processes: if no other source lists a holder of a device, containers with a process on the device
# count as its holders. A container without a GPU process is not found. Shares are known only with
# KAI Scheduler.


class ProcessHolders(AllocationSource):
    """Finds holders by their GPU processes. `processes` returns the processes of a GPU and may
    raise SourceError.
    """

    name = "processes"

    def __init__(
        self, processes: Callable[[Device], Sequence[ProcessUsage]], finder: ContainerFinder
    ) -> None:
        self._processes = processes
        self._finder = finder

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        require_host_pid_namespace(self._finder.proc)
        processes = [
            process for gpu in devices if not gpu.is_instance for process in self._processes(gpu)
        ]
        places = self._finder.find_all({process.pid for process in processes})
        require_permission(places, self._finder.proc)
        keys = {device.key for device in devices}
        shares: dict[tuple[str, Workload], float | None] = {}
        unmapped: set[Unmapped] = set()
        for process in processes:
            place = places[process.pid]
            if place.outcome in FAILED_LOOKUPS:
                unmapped.add(Unmapped(self.name, place.outcome, process.device, "pid", Workload()))
            elif place.outcome != "found":
                continue  # a process outside containers, or one that has ended
            elif process.device in keys:
                key = process.device, place.workload
                shares[key] = shares.get(key) or _read_share(
                    f"{self._finder.proc}/{process.pid}/environ"
                )
            else:
                unmapped.add(
                    Unmapped(self.name, "unknown_device", process.device, "pid", place.workload)
                )
        return sort_allocation(
            (Assignment(*key, self.name, share=share) for key, share in shares.items()), unmapped
        )


def _read_share(path: str) -> float | None:
    """Returns the GPU share that KAI Scheduler sets in a process's environment. None if it is not
    set or not readable.

    Reading the environment of another process requires CAP_SYS_PTRACE.
    """
    with suppress(OSError, ValueError):
        with open(path, "rb") as file:
            variables = file.read(_MAX_ENVIRONMENT_BYTES).split(b"\0")
        shares = (
            float(text.partition(b"=")[2]) for text in variables if text.startswith(b"GPU_PORTION=")
        )
        return next((share for share in shares if 0 < share <= 1), None)
    return None
