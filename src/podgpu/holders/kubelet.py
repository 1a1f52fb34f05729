"""Allocation source `kubelet`: the kubelet's pod-resources API on its Unix socket."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from podgpu.errors import SourceError
from podgpu.holders import AllocationSource, podresources_pb2
from podgpu.holders.device_ids import (
    HeldId,
    SharedDevice,
    count_vcuda,
    group_replicas,
    is_gpu,
    map_held,
    parse_device_id,
    sort_allocation,
)
from podgpu.holders.grpc_client import GrpcError, UnixGrpcClient
from podgpu.model import Allocation, Device, Workload

if TYPE_CHECKING:
    from podgpu.holders.dra import DraClaims

SOURCE = "kubelet"
OPTION = "--pod-resources-kubelet-socket"
DEADLINE = 30.0
"""Deadline of one List call, in seconds. A turn waits less; a late answer is used in a later turn."""
_ALLOCATABLE_SECONDS = 60.0
"""Interval of GetAllocatableResources. Its answer changes only with the device plugin's configuration."""
_ALLOCATABLE_DEADLINE = 1.0

SocketIdentity = tuple[int, int, int]
"""Device, inode and ctime. Changes when a restarted kubelet creates its socket again."""


class KubeletAllocation(AllocationSource):
    """Makes one List call per reading, and about once a minute one GetAllocatableResources call."""

    name = SOURCE

    def __init__(
        self,
        socket: str,
        resource_names: frozenset[str] = frozenset(),
        deadline: float = DEADLINE,
        clock: Callable[[], float] = time.monotonic,
        claims: DraClaims | None = None,
    ) -> None:
        """Without `claims`, DRA claims are ignored."""
        self.client = PodResourcesClient(socket, deadline)
        self.resource_names = resource_names
        self.claims = claims
        self._clock = clock
        self._allocatable_at = float("-inf")
        self._offered: frozenset[str] = frozenset()
        self._replicas: dict[SharedDevice, frozenset[str]] = {}
        self._held_replicas: frozenset[SharedDevice] = frozenset()

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        response = self.client.list()
        self._update_allocatable(response)
        return replace(self.map(response, devices), source_instance=self.client.source_instance, offered=self._offered)

    def map(self, response: Any, devices: Sequence[Device]) -> Allocation:
        """Maps a decoded List answer to the devices."""
        by_id = parse_assignments(response, devices, self.resource_names, self._replicas)
        return by_id if self.claims is None else _unite(by_id, self.claims.held(response, devices))

    def _update_allocatable(self, response: Any) -> None:
        """Reads the offered GPUs and the replicas of shared ones, immediately if a held replica is not known yet.

        The kubelet reports healthy devices only, and none while the device plugin is unavailable. Replicas of a device
        that is held, or was held at the last call, are therefore never removed.
        """
        held = frozenset(
            entry.device_id.shared
            for entry in _held_ids(response)
            if entry.device_id is not None and entry.device_id.replica and is_gpu(entry, self.resource_names)
        )
        is_due = self._clock() - self._allocatable_at >= _ALLOCATABLE_SECONDS
        if not is_due and held <= self._replicas.keys():
            return
        self._allocatable_at = self._clock()
        ids = self.client.allocatable_ids(_ALLOCATABLE_DEADLINE)
        parsed = map(parse_device_id, ids)
        self._offered = frozenset(device_id.gpu_uuid for device_id in parsed if device_id and device_id.gpu_uuid)
        registered = group_replicas(ids)
        kept = {shared: self._replicas[shared] for shared in (held | self._held_replicas) & self._replicas.keys()}
        self._replicas = kept | {shared: kept.get(shared, frozenset()) | registered[shared] for shared in registered}
        self._held_replicas = held

    def close(self) -> None:
        self.client.close()


def parse_assignments(
    response: Any,
    devices: Sequence[Device],
    resource_names: frozenset[str] = frozenset(),
    replicas: Mapping[SharedDevice, Set[str]] | None = None,
) -> Allocation:
    """Maps the device ids of a decoded List answer. `replicas` are the known replicas of shared devices."""
    held = list(_held_ids(response))
    gpus = [entry for entry in held if is_gpu(entry, resource_names)]
    mapped = map_held(SOURCE, gpus, devices, replicas or {})
    return replace(mapped, vcuda=count_vcuda(held))


def _held_ids(response: Any) -> Iterator[HeldId]:
    for pod in response.pod_resources:
        for container in pod.containers:
            holder = Workload(pod.namespace, pod.name, container.name)
            for entry in container.devices:
                for text in entry.device_ids:
                    yield HeldId(holder, entry.resource_name, text, parse_device_id(text))


def _unite(by_id: Allocation, by_claim: Allocation) -> Allocation:
    """Keeps one assignment, with the labels, of a GPU that the kubelet lists both ways (gate DRAExtendedResource)."""
    held = {(assignment.device, assignment.holder): assignment for assignment in by_claim.assignments}
    for assignment in by_id.assignments:
        key = assignment.device, assignment.holder
        held[key] = replace(assignment, attributes=held[key].attributes) if key in held else assignment
    return replace(sort_allocation(held.values(), {*by_id.unmapped, *by_claim.unmapped}), vcuda=by_id.vcuda)


class PodResourcesClient:
    """Reads the pod-resources API. Detects restarts of the kubelet."""

    def __init__(self, socket: str, deadline: float = 5.0) -> None:
        self.socket = os.path.abspath(socket)
        self.deadline = deadline
        self._grpc = UnixGrpcClient(self.socket)
        self._identity: SocketIdentity | None = None
        self.source_instance = 0
        """Changes when the kubelet restarts. A restarted kubelet lists no pods at first, without an error."""

    def close(self) -> None:
        self._grpc.close()

    def list(self) -> Any:
        """Returns a decoded List answer. Raises SourceError."""
        self._check_identity()
        try:
            answer = self._grpc.call("/v1.PodResourcesLister/List", self.deadline)
        except GrpcError as error:
            if error.status == "UNAVAILABLE":
                self.source_instance += 1
            raise _explain(error, self.socket) from error
        self._check_identity()  # the client reconnects by itself, so a new kubelet may have answered
        return decode_list(answer, self.socket)

    def _check_identity(self) -> None:
        identity = _stat_socket(self.socket)
        if self._identity is not None and identity != self._identity:
            self.source_instance += 1
        self._identity = identity

    def allocatable_ids(self, deadline: float) -> tuple[str, ...]:
        """Returns the ids of all healthy devices, or none if the kubelet does not report them (before 1.23)."""
        try:
            answer = self._grpc.call("/v1.PodResourcesLister/GetAllocatableResources", deadline)
            response = podresources_pb2.AllocatableResourcesResponse.FromString(answer)
        except (GrpcError, DecodeError, ValueError):
            return ()
        return tuple(text for entry in response.devices for text in entry.device_ids)


def decode_list(answer: bytes, path: str = "its socket") -> Any:
    """Raises SourceError."""
    try:
        return podresources_pb2.ListPodResourcesResponse.FromString(answer)
    except (DecodeError, ValueError) as error:  # ValueError: text that is not UTF-8, in pure-Python protobuf
        raise SourceError(
            "bad_answer",
            f"cannot decode the kubelet's answer on {path}, {len(answer)} bytes ({error}): check that {OPTION} is the"
            " kubelet's pod-resources socket",
        ) from error


def _stat_socket(path: str) -> SocketIdentity:
    """Checks the path before connecting, because file system errors are clearer than gRPC errors."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SourceError(
            "socket_missing",
            f"the kubelet's socket {path} does not exist: mount the host's pod-resources directory (not the socket"
            f" itself, which every kubelet restart replaces) or set {OPTION}",
        ) from error
    except PermissionError as error:
        raise SourceError("permission_denied", f"no permission to connect to {path}: {_PERMISSION_DENIED}") from error
    except (OSError, ValueError) as error:
        raise SourceError("error", f"cannot access {path} ({error}): check {OPTION}") from error
    if not stat.S_ISSOCK(status.st_mode):
        raise SourceError(
            "not_a_socket",
            f"{path} is not a socket: set {OPTION} to the kubelet's pod-resources socket, and mount its directory"
            " (mounting a missing socket creates a directory of that name)",
        )
    return status.st_dev, status.st_ino, status.st_ctime_ns


_PERMISSION_DENIED = (
    "only uid 0 can use the kubelet's socket: set securityContext.runAsUser: 0 (no capability is needed)"
)
_ERRORS = {
    "CANCELLED": ("error", "podgpu is stopping"),
    "DEADLINE_EXCEEDED": ("deadline", "it hangs or is overloaded; if this persists, check the kubelet's log"),
    "UNAVAILABLE": ("unavailable", "it is stopped or restarting; if this persists, check the kubelet's log"),
    "UNIMPLEMENTED": ("error", f"set {OPTION} to the kubelet's pod-resources socket"),
}
"""Reason and advice by gRPC status."""


def _explain(error: GrpcError, path: str) -> SourceError:
    message = " ".join(error.message.split())[:300]
    reason, advice = _ERRORS.get(error.status, ("error", "check the kubelet's log"))
    if error.status == "UNAVAILABLE" and "Permission denied" in message:
        reason, advice = "permission_denied", _PERMISSION_DENIED
    elif error.status == "RESOURCE_EXHAUSTED" and "rate limit" in message:
        reason = "rate_limited"
        advice = "the last mapping is used; if this persists, find the client that polls too often"
    return SourceError(reason, f"the kubelet did not answer List on {path} ({error.status}: {message}): {advice}")
