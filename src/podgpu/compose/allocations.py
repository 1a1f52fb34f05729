"""Assembles the sources of holders from the options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from podgpu.agent.allocation_turn import ReadIdentities, ReadLiveness
from podgpu.compose.servers import ApiAccess, ApiHealth
from podgpu.holders import AllocationSource
from podgpu.holders.cache import LivenessProbe
from podgpu.holders.identity import IdentityReader
from podgpu.holders.sources import SourceSettings, create_sources
from podgpu.usage.containers import read_living

if TYPE_CHECKING:
    from podgpu.gpu.source import Telemetry


@dataclass(frozen=True)
class Holders:
    """The sources of holders, their identities and the liveness of their containers."""

    sources: list[AllocationSource]
    identities: ReadIdentities
    liveness: ReadLiveness | None = None


def make_holders(options: Mapping[str, Any], api: ApiAccess, telemetry: Telemetry) -> Holders:
    """Raises UsageError. Must be called last, because it adds the health of all watches opened before."""
    sources = make_allocations(options, api, telemetry)
    if api.feeds:
        sources.append(ApiHealth(api.feeds))
    probe = LivenessProbe(*_log_directories(options), partial(read_living, options["path_proc"]))
    return Holders(sources, make_identities(options, api).read, probe.read)


def make_allocations(options: Mapping[str, Any], api: ApiAccess, telemetry: Telemetry) -> list[AllocationSource]:
    settings = SourceSettings(
        api=api,
        processes=telemetry.processes,
        kubelet_socket=options["pod_resources_kubelet_socket"],
        resource_names=resource_names(options),
        enable_dra=options["kubernetes_enable_dra"],
        job_directory=options["hpc_job_mapping_dir"],
        proc=options["path_proc"],
    )
    return create_sources(options["allocation"], settings, options["kubernetes"])


def resource_names(options: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(name.strip() for name in options["nvidia_resource_names"].split(",") if name.strip())


def make_identities(options: Mapping[str, Any], api: ApiAccess) -> IdentityReader:
    return IdentityReader(*_log_directories(options), pods=api.known_pods)


def _log_directories(options: Mapping[str, Any]) -> tuple[str, str]:
    return os.path.join(options["path_varlog"], "pods"), os.path.join(options["path_varlog"], "containers")
