"""This module has the table that names the allocation sources: `--allocation NAME[:ARGUMENT],…`, the most trusted
first."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from podgpu.errors import UsageError

if TYPE_CHECKING:  # every command has the table of options, which names the sources: each is imported when it is made
    from podgpu.agent.allocation_turn import ReadIdentities, ReadSigns
    from podgpu.compose.servers import ApiAccess
    from podgpu.gpu.source import Telemetry
    from podgpu.holders.dra import DraClaims
    from podgpu.holders.identity import IdentityReader
    from podgpu.holders.source import AllocationSource

_log = logging.getLogger("podgpu")


@dataclass(frozen=True)
class Surroundings:
    """What a source may be made from."""

    options: Mapping[str, Any]
    api: ApiAccess
    telemetry: Telemetry


@dataclass(frozen=True)
class Source:
    """One row of the table below."""

    make: Callable[[str, Surroundings], AllocationSource]
    present: Callable[[Surroundings], bool]
    """Whether `auto` takes it on this node."""
    argument: str = ""
    """How its argument is written in the help, such as [:PATH]."""


def resource_names(options: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(name.strip() for name in options["nvidia_resource_names"].split(",") if name.strip())


def _annotations(argument: str, around: Surroundings) -> AllocationSource:
    from podgpu.holders.annotations import AnnotationsAllocation

    _refuse(argument, "annotations")
    pods = around.api.pods()
    return AnnotationsAllocation(lambda: pods)


def _podlist(argument: str, around: Surroundings) -> AllocationSource:
    from podgpu.holders.podlist import PodlistAllocation

    return PodlistAllocation(argument or None, defaults=_podlist_paths(around))


def _podlist_present(around: Surroundings) -> bool:
    return any(os.path.exists(path) for path in _podlist_paths(around))


def _podlist_paths(around: Surroundings) -> tuple[str, ...]:
    """Beside the kubelet's socket. If that is named, nowhere else: what lies at the usual places may be another's."""
    from podgpu.holders.podlist import DEFAULT_PATHS

    beside = os.path.join(os.path.dirname(around.options["pod_resources_kubelet_socket"]), "podlist.json")
    return DEFAULT_PATHS if os.path.normpath(beside) == DEFAULT_PATHS[0] else (beside,)


def _kubelet(argument: str, around: Surroundings) -> AllocationSource:
    from podgpu.holders.kubelet import KubeletAllocation

    _refuse(argument, "kubelet (its socket: --pod-resources-kubelet-socket)")
    socket = around.options["pod_resources_kubelet_socket"]
    claims = _claims(around) if around.options["kubernetes_enable_dra"] else None
    return KubeletAllocation(socket, resource_names(around.options), claims=claims)


def _claims(around: Surroundings) -> DraClaims | None:
    """Without the API server, what the driver's checkpoint says: nothing where that is not mounted either."""
    from podgpu.compose.servers import unless_no_api
    from podgpu.holders.dra import DraClaims
    from podgpu.holders.dra_claims import NAME, ClaimReader, DriverCheckpoint

    path = os.path.join(_kubelet_directory(around), NAME)
    slices = unless_no_api("kubernetes-enable-dra", around.api.resource_slices)
    if slices is None and not os.path.exists(path):
        return None
    reader = None if slices is None else ClaimReader(around.api.config)
    return DraClaims(slices, checkpoint=DriverCheckpoint(path), reader=reader)


def _checkpoint(argument: str, around: Surroundings) -> AllocationSource:
    from podgpu.holders.checkpoint import CheckpointAllocation

    return CheckpointAllocation(argument or _checkpoint_path(around), resource_names(around.options))


def _checkpoint_present(around: Surroundings) -> bool:
    """It lags behind the kubelet: of use where the kubelet's socket is not mounted. Only that kubelet's own: what lies
    at the usual place may be another's, or be left over."""
    from podgpu.holders.checkpoint import NAME

    own = os.path.join(_kubelet_directory(around), NAME)
    return os.path.exists(own) and not os.path.exists(around.options["pod_resources_kubelet_socket"])


def _checkpoint_path(around: Surroundings) -> str:
    """In the directory of the kubelet whose socket is asked, if it is there, else where it usually is."""
    from podgpu.holders.checkpoint import DEFAULT_PATH, NAME

    beside = os.path.join(_kubelet_directory(around), NAME)
    return beside if os.path.exists(beside) else DEFAULT_PATH


def _kubelet_directory(around: Surroundings) -> str:
    socket: str = around.options["pod_resources_kubelet_socket"]
    return os.path.dirname(os.path.dirname(os.path.abspath(socket)))


def _hpc(argument: str, around: Surroundings) -> AllocationSource:
    from podgpu.holders.hpc import HpcAllocation

    directory = argument or around.options["hpc_job_mapping_dir"]
    if not directory:
        raise UsageError("--allocation hpc: name the directory of job files, as in hpc:/run/dcgm-job-map")
    return HpcAllocation(directory)


def _processes(argument: str, around: Surroundings) -> AllocationSource:
    from podgpu.holders.processes import ProcessHolders
    from podgpu.usage.containers import ContainerFinder

    _refuse(argument, "processes")
    return ProcessHolders(around.telemetry.processes, ContainerFinder(around.options["path_proc"]))


def _processes_present(around: Surroundings) -> bool:
    from podgpu.usage.containers import in_host_pid_namespace

    return in_host_pid_namespace(around.options["path_proc"]) is True


SOURCES: Mapping[str, Source] = {
    "annotations": Source(_annotations, lambda around: around.api.at_hand),
    "podlist": Source(_podlist, _podlist_present, "[:PATH]"),
    "kubelet": Source(_kubelet, lambda _around: True),
    "checkpoint": Source(_checkpoint, _checkpoint_present, "[:PATH]"),
    "hpc": Source(_hpc, lambda around: bool(around.options["hpc_job_mapping_dir"]), "[:DIR]"),
    "processes": Source(_processes, _processes_present),
}
"""In the order of precedence of `auto`: where a scheduler's word and the kubelet's differ, the scheduler's stands
(HAMi hands out another GPU than the one the kubelet notes)."""


def spellings() -> str:
    """How each is written after `--allocation`, for the help."""
    return ", ".join(f"{name}{source.argument}" for name, source in SOURCES.items())


def make_allocations(chosen: str, around: Surroundings) -> list[AllocationSource]:
    """The sources of `--allocation`. With `auto` and without -k there is no mapping, except HPC jobs if asked for."""
    from podgpu.compose.servers import unless_no_api

    if chosen != "auto":
        return [_make(entry, around) for entry in chosen.split(",")]
    names = SOURCES if around.options["kubernetes"] else {"hpc": SOURCES["hpc"]}
    found = [name for name in names if SOURCES[name].present(around)]
    if found:
        _log.info("holders come from: %s", ", ".join(found))
    made = (unless_no_api(f"allocation auto ({name})", partial(SOURCES[name].make, "", around)) for name in found)
    return [source for source in made if source is not None]


def _make(entry: str, around: Surroundings) -> AllocationSource:
    name, _, argument = entry.strip().partition(":")
    if name == "auto":
        raise UsageError(
            "--allocation: auto stands alone: it takes every source that is present; leave it or the others out"
        )
    if name not in SOURCES:
        raise UsageError(f"--allocation {entry!r}: unknown source; there are auto, {', '.join(SOURCES)}")
    return SOURCES[name].make(argument, around)


def _refuse(argument: str, name: str) -> None:
    if argument:
        raise UsageError(f"--allocation {name} takes no argument, not {argument!r}")


# All that an allocation turn asks


@dataclass(frozen=True)
class Holders:
    """What tells who holds what: the sources, who is who, and who is plainly there."""

    sources: list[AllocationSource]
    identities: ReadIdentities
    signs: ReadSigns | None = None


def make_holders(around: Surroundings) -> Holders:
    """Raises UsageError. Whatever else asks the API server is opened before: how all of it fares is a source too."""
    from podgpu.compose.servers import ApiHealth

    made = make_allocations(around.options["allocation"], around)
    if around.api.feeds:
        made.append(ApiHealth(around.api.feeds))
    return Holders(made, make_identities(around.options, around.api).read, _make_signs(around.options))


def make_identities(options: Mapping[str, Any], api: ApiAccess) -> IdentityReader:
    """Who is who, from the names of the kubelet's log files, and from the API server where it is asked anyway."""
    from podgpu.holders.identity import IdentityReader

    return IdentityReader(*_log_directories(options), pods=api.known_pods)


def _make_signs(options: Mapping[str, Any]) -> ReadSigns:
    """Who is plainly there, from the processes of the node and the names of the kubelet's log files."""
    from podgpu.holders.keeping import SignsOfLife
    from podgpu.usage.containers import read_living

    return SignsOfLife(*_log_directories(options), partial(read_living, options["path_proc"])).read


def _log_directories(options: Mapping[str, Any]) -> tuple[str, str]:
    varlog = options["path_varlog"]
    return os.path.join(varlog, "pods"), os.path.join(varlog, "containers")
