"""Allocation sources that read files of the node.

These are podlist.json, the kubelet's checkpoint, job files of HPC schedulers, and processes.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import cache, partial
from typing import Annotated

from msgspec import Meta, Struct, field

from podgpu.decode import decode_json
from podgpu.errors import DeviceLost, SourceError, utc_text
from podgpu.files import (
    FileIdentity,
    ReadOnChange,
    explain_read_error,
    identify_file,
    read_bounded,
)
from podgpu.model import Allocation, Assignment, Device, ProcessUsage, Unmapped, Workload
from podgpu.node.holders import AllocationSource
from podgpu.node.holders.device_ids import (
    DeviceId,
    HeldId,
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
# devices, but no shares. `podgpu hook` also writes uids, and updates the file's time while it runs.

DEFAULT_PATHS = ("/var/lib/kubelet/pod-resources/podlist.json", "/podlist.json")
"""Directory of the kubelet's socket, and mount point in koordinator's manifest."""
_NonEmpty = Annotated[str, Meta(min_length=1)]


# Three times the interval in which `podgpu hook` updates the file's time.
_STALE_SECONDS = 60.0


class PodlistEntry(Struct, frozen=True, omit_defaults=True):
    name: _NonEmpty
    namespace: _NonEmpty
    container: str
    gpu_list: list[str] | None
    uid: str = ""  # koordinator's hook does not write it


class PodlistAllocation(AllocationSource):
    """Reads the first existing file of `paths`."""

    name = "podlist"

    def __init__(
        self,
        paths: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.paths = paths
        self._file = ReadOnChange(parse_podlist, MAX_BYTES)
        self._clock = clock
        self._identity: FileIdentity | None = None
        self._changed_at = 0.0  # monotonic

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        existing = [path for path in self.paths if os.path.exists(path)]
        # If there is none, reading the first one raises an error with its path.
        path = (existing or self.paths)[0]
        held = self._file.read(path)
        _warn_if_mounted(path)
        # Only `podgpu hook` writes uids and a heartbeat.
        if any(entry.holder.uid for entry in held):
            self._check_heartbeat(path)
        return map_held(self.name, held, devices, parse=parse_id_or_minor)

    def _check_heartbeat(self, path: str) -> None:
        """Raises SourceError if no hook has updated the file for a while."""
        now = self._clock()
        identity = identify_file(path)
        written_at = identity.modified_ns / 1e9
        if self._identity is None:
            # Only the file's own time says how old it is.
            self._changed_at = now - max(0.0, time.time() - written_at)
        elif identity != self._identity:
            # The monotonic time, because the clock of the node may be set.
            self._changed_at = now
        self._identity = identity

        if now - self._changed_at > _STALE_SECONDS:
            raise SourceError(
                "stale",
                f"{path} has not been updated since {utc_text(written_at)}, so its holders are not "
                "used: check that `podgpu hook` runs on this node and is connected, or delete the "
                "file if you uninstalled the hook",
            )


@cache  # logs once per path
def _warn_if_mounted(path: str) -> None:
    if os.path.ismount(path):
        _log.warning(
            "%s is mounted as a single file: if its writer replaces it, podgpu keeps reading the "
            "old file; mount its directory instead",
            path,
        )


def parse_podlist(content: bytes, path: str) -> tuple[HeldId, ...]:
    """Returns the held device ids.

    Raises SourceError if the file is empty or malformed. An empty list is valid.
    """
    entries: list[PodlistEntry] | None
    entries = decode_json(content, path, list[PodlistEntry] | None)  # type: ignore[arg-type]

    held = []
    for entry in entries or ():
        holder = Workload(entry.namespace, entry.name, entry.container, entry.uid)
        for text in entry.gpu_list or ():
            held.append(HeldId(holder, "podlist", text))
    return tuple(held)


# The kubelet's checkpoint contains pod UIDs and the replicas of shared GPUs, but no pod names. It
# can be outdated, because the kubelet removes finished pods only when it next allocates a device.

# Relative to the kubelet's root directory.
CHECKPOINT_NAME = "device-plugins/kubelet_internal_checkpoint"


class _PodDevices(Struct):
    uid: Annotated[str, Meta(min_length=1)] = field(name="PodUID")
    container: str = field(name="ContainerName")
    resource: str = field(name="ResourceName")
    # By NUMA node.
    device_ids: dict[str, list[str] | None] | None = field(name="DeviceIDs", default=None)


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
    content: bytes, path: str, resource_names: frozenset[str]
) -> tuple[list[HeldId], Mapping[DeviceId, Set[str]]]:
    """Returns the held GPU ids, and the registered replicas of shared GPUs.

    Raises SourceError if the checkpoint is malformed.
    """
    data = decode_json(content, path, _DeviceFile).data

    held = []
    for entry in data.entries or ():
        holder = Workload(container=entry.container, uid=entry.uid)
        for text in _list_ids(entry.device_ids):
            held.append(HeldId(holder, entry.resource, text))

    gpus = [held_id for held_id in held if is_gpu(held_id, resource_names)]
    return gpus, group_replicas(_list_ids(data.registered))


def _list_ids(groups: dict[str, list[str] | None] | None) -> Iterator[str]:
    for ids in (groups or {}).values():
        yield from ids or ()


# Job files in dcgm-exporter's format. The prolog of an HPC scheduler writes one file per device,
# with one job per line. The file's name is `<gpu index>` or `<gpu index>.<gpu instance id>`.

_JOB_FILE = re.compile(r"\d+(\.\d+)?", re.ASCII)


class HpcAllocation(AllocationSource):
    name = "hpc"

    def __init__(self, directory: str) -> None:
        self.directory = os.path.abspath(directory)

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        by_name = {_name_job_file(device): device for device in devices}
        try:
            names = [name for name in os.listdir(self.directory) if _JOB_FILE.fullmatch(name)]
        except OSError as error:
            raise explain_read_error(error, self.directory) from error

        assignments = []
        unmapped = []
        for name in names:
            path = os.path.join(self.directory, name)
            try:
                jobs = parse_jobs(read_bounded(path, _MAX_JOB_FILE_BYTES))
            except SourceError as error:
                # A missing file means that the job has just ended.
                if error.reason != "file_missing":
                    unmapped.append(Unmapped(self.name, error.reason, name, "hpc", Workload()))
                continue

            device = by_name.get(name)
            for job in jobs:
                holder = Workload(job=job)
                if device is not None:
                    assignments.append(Assignment(device.key, holder, self.name))
                else:
                    unmapped.append(Unmapped(self.name, "unknown_device", name, "hpc", holder))
        return sort_allocation(assignments, unmapped)


def _name_job_file(device: Device) -> str:
    """Returns the name of the device's file.

    Names are compared as text, as in dcgm-exporter, so the file `00` does not belong to GPU 0.
    """
    if device.gi_id is None:
        return str(device.index)
    return f"{device.index}.{device.gi_id}"


def parse_jobs(content: bytes) -> list[str]:
    """Returns the jobs, one per line. Only a line feed ends a line, as in dcgm-exporter."""
    lines = [line.strip() for line in content.decode(errors="replace").split("\n")]
    jobs = [line for line in lines if line]
    # Without duplicates.
    return list(dict.fromkeys(jobs))


# Processes: if no other source lists a holder of a device, containers with a process on the device
# count as its holders. A container without a GPU process is not found. Shares are known only with
# KAI Scheduler.


class ProcessHolders(AllocationSource):
    """Finds holders by their GPU processes.

    `processes` returns the processes of a GPU and may raise SourceError.
    """

    name = "processes"

    def __init__(
        self, processes: Callable[[Device], Sequence[ProcessUsage]], finder: ContainerFinder
    ) -> None:
        self._processes = processes
        self._finder = finder

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        proc = self._finder.proc
        require_host_pid_namespace(proc)
        processes = self._list_processes(devices)
        places = self._finder.find_all({process.pid for process in processes})
        require_permission(places, proc)

        keys = {device.key for device in devices}
        shares: dict[tuple[str, Workload], float | None] = {}
        unmapped = set()
        for process in processes:
            place = places[process.pid]
            if place.outcome in FAILED_LOOKUPS:
                unmapped.add(Unmapped(self.name, place.outcome, process.device, "pid", Workload()))
            elif place.outcome != "found":
                # a process outside containers, or one that has ended
                continue
            elif process.device in keys:
                key = process.device, place.workload
                # Any process of the container may have the variable.
                if shares.get(key) is None:
                    shares[key] = _read_share(f"{proc}/{process.pid}/environ")
            else:
                unmapped.add(
                    Unmapped(self.name, "unknown_device", process.device, "pid", place.workload)
                )

        assignments = []
        for (device_key, holder), share in shares.items():
            assignments.append(Assignment(device_key, holder, self.name, share=share))
        return sort_allocation(assignments, unmapped)

    def _list_processes(self, devices: Sequence[Device]) -> list[ProcessUsage]:
        processes: list[ProcessUsage] = []
        lost: DeviceLost | None = None
        answered = False
        for device in devices:
            if device.is_instance:
                continue
            try:
                processes += self._processes(device)
            except DeviceLost as e:
                lost = e  # a lost GPU must not hide the holders of the others
            else:
                answered = True

        if lost is not None and not answered:
            raise lost
        return processes


def _read_share(path: str) -> float | None:
    """Returns the GPU share that KAI Scheduler sets in a process's environment.

    Returns None if it is not set or not readable. Reading the environment of another process
    requires CAP_SYS_PTRACE.
    """
    with suppress(OSError, ValueError):
        with open(path, "rb") as file:
            variables = file.read(_MAX_ENVIRONMENT_BYTES).split(b"\0")
        for variable in variables:
            name, _, value = variable.partition(b"=")
            if name == b"GPU_PORTION" and 0 < float(value) <= 1:
                return float(value)
    return None
