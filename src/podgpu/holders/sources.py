"""Lists all allocation sources and creates those that `--allocation` selects.

The kubelet's source is imported only when it is created, because importing protobuf, h2 and aiohttp is slow.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from podgpu.errors import UsageError
from podgpu.holders import AllocationSource
from podgpu.holders.annotations import AnnotationsAllocation
from podgpu.holders.node_files import (
    CHECKPOINT_NAME,
    DEFAULT_PATHS,
    CheckpointAllocation,
    HpcAllocation,
    PodlistAllocation,
    ProcessHolders,
)
from podgpu.model import Device, ProcessUsage
from podgpu.usage.containers import ContainerFinder, in_host_pid_namespace

if TYPE_CHECKING:
    from podgpu.holders.api import ApiAccess
    from podgpu.holders.dra import DraClaims

_log = logging.getLogger("podgpu")


@dataclass(frozen=True)
class SourceSettings:
    api: ApiAccess
    processes: Callable[[Device], Sequence[ProcessUsage]]
    kubelet_socket: str
    resource_names: frozenset[str] = frozenset()
    enable_dra: bool = False
    job_directory: str = ""
    proc: str = "/proc"

    @property
    def kubelet_directory(self) -> str:
        return os.path.dirname(os.path.dirname(os.path.abspath(self.kubelet_socket)))


@dataclass(frozen=True)
class SourceType:
    create: Callable[[str, SourceSettings], AllocationSource]
    is_present: Callable[[SourceSettings], bool]  # True if `--allocation auto` uses the source on this node
    argument: str = ""  # form of the argument in help texts, such as [:PATH]


def _podlist_paths(settings: SourceSettings) -> tuple[str, ...]:
    path = os.path.join(os.path.dirname(settings.kubelet_socket), "podlist.json")
    return DEFAULT_PATHS if os.path.normpath(path) == DEFAULT_PATHS[0] else (path,)


def _create_kubelet(argument: str, settings: SourceSettings) -> AllocationSource:
    from podgpu.holders.kubelet import KubeletAllocation

    claims = _create_claims(settings) if settings.enable_dra else None
    return KubeletAllocation(settings.kubelet_socket, settings.resource_names, claims=claims)


def _create_claims(settings: SourceSettings) -> DraClaims | None:
    """Creates the mapping of DRA claims. Without an API server, it uses the driver's checkpoint, or returns None."""
    from podgpu.holders.api import open_if_api
    from podgpu.holders.dra import DRIVER_CHECKPOINT, ClaimReader, DraClaims, DriverCheckpoint, watch_slices

    path = os.path.join(settings.kubelet_directory, DRIVER_CHECKPOINT)
    slices = open_if_api("kubernetes-enable-dra", lambda: watch_slices(settings.api))
    if slices is None:
        return DraClaims(None, DriverCheckpoint(path)) if os.path.exists(path) else None
    return DraClaims(slices, DriverCheckpoint(path), ClaimReader(settings.api.config), settings.api.known_pods)


def _checkpoint_path(settings: SourceSettings) -> str:
    return os.path.join(settings.kubelet_directory, CHECKPOINT_NAME)


def _create_hpc(argument: str, settings: SourceSettings) -> AllocationSource:
    directory = argument or settings.job_directory
    if not directory:
        raise UsageError("--allocation hpc: set the directory of the job files, as in hpc:/run/dcgm-job-map")
    return HpcAllocation(directory)


SOURCES: Mapping[str, SourceType] = {
    "annotations": SourceType(
        lambda argument, settings: AnnotationsAllocation(settings.api.pods()),
        lambda settings: settings.api.is_available,
    ),
    "podlist": SourceType(
        lambda argument, settings: PodlistAllocation([argument] if argument else _podlist_paths(settings)),
        lambda settings: any(map(os.path.exists, _podlist_paths(settings))),
        "[:PATH]",
    ),
    "kubelet": SourceType(_create_kubelet, lambda settings: True),
    "checkpoint": SourceType(
        lambda argument, settings: CheckpointAllocation(
            argument or _checkpoint_path(settings), settings.resource_names
        ),
        # The checkpoint can be outdated, so `auto` uses it only if the kubelet's socket does not exist.
        lambda settings: os.path.exists(_checkpoint_path(settings)) and not os.path.exists(settings.kubelet_socket),
        "[:PATH]",
    ),
    "hpc": SourceType(_create_hpc, lambda settings: bool(settings.job_directory), "[:DIR]"),
    "processes": SourceType(
        lambda argument, settings: ProcessHolders(settings.processes, ContainerFinder(settings.proc)),
        lambda settings: in_host_pid_namespace(settings.proc) is True,
    ),
}
"""Sources in order of precedence for `auto`. Schedulers come first, because HAMi assigns other GPUs than the kubelet
lists."""


def describe_sources() -> str:
    """Returns the names and arguments of all sources, for help texts."""
    return ", ".join(f"{name}{source.argument}" for name, source in SOURCES.items())


def create_sources(text: str, settings: SourceSettings, kubernetes: bool) -> list[AllocationSource]:
    """Creates the sources of `--allocation`. Raises UsageError if `text` is invalid. Without -k, `auto` means `hpc`."""
    if text != "auto":
        return [_create(entry.strip(), settings) for entry in text.split(",")]
    names = [name for name in (SOURCES if kubernetes else ["hpc"]) if SOURCES[name].is_present(settings)]
    if names:
        _log.info("allocation sources: %s", ", ".join(names))
    sources = []
    for name in names:
        try:
            sources.append(SOURCES[name].create("", settings))
        except UsageError as error:
            _log.warning("--allocation auto (%s): %s; continuing without it", name, error)
    return sources


def _create(entry: str, settings: SourceSettings) -> AllocationSource:
    name, _, argument = entry.partition(":")
    if name not in SOURCES:
        raise UsageError(f"--allocation {entry!r}: unknown source; write auto alone, or some of {', '.join(SOURCES)}")
    if argument and not SOURCES[name].argument:
        raise UsageError(f"--allocation {name} takes no argument, but {argument!r} was given")
    return SOURCES[name].create(argument, settings)
