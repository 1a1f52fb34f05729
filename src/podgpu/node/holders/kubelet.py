"""Allocation source `kubelet`: calls the kubelet's pod-resources API on its Unix socket."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol
from urllib.parse import unquote

from google.protobuf.message import DecodeError
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import H2Error

from podgpu.errors import SourceError
from podgpu.files import explain_read_error
from podgpu.model import Allocation, Device, Workload
from podgpu.node.holders import KUBELET, AllocationSource, podresources_pb2
from podgpu.node.holders.device_ids import (
    DeviceId,
    HeldId,
    count_vcuda,
    group_replicas,
    is_gpu,
    map_held,
    parse_device_id,
    sort_allocation,
)

OPTION = "--pod-resources-kubelet-socket"
# Seconds until a List call times out. The allocation loop waits less and uses a late answer in its
# next reading.
DEADLINE = 30.0
# Interval of GetAllocatableResources calls. The answer changes only with the device plugin's
# configuration.
_ALLOCATABLE_SECONDS = 60.0
_ALLOCATABLE_DEADLINE = 1.0

# Device, inode and ctime of the socket. They change when a restarted kubelet creates a new socket.
SocketIdentity = tuple[int, int, int]


class ClaimMapping(Protocol):
    """Maps the DRA claims in the kubelet's decoded List answer to devices."""

    def held(self, response: Any, devices: Sequence[Device]) -> Allocation: ...


class KubeletAllocation(AllocationSource):
    """Calls List for each reading, and GetAllocatableResources about once a minute."""

    name = KUBELET

    def __init__(
        self,
        socket: str,
        resource_names: frozenset[str] = frozenset(),
        deadline: float = DEADLINE,
        clock: Callable[[], float] = time.monotonic,
        claims: ClaimMapping | None = None,
    ) -> None:
        """If `claims` is None, DRA claims are ignored."""
        self.socket = os.path.abspath(socket)
        self.deadline = deadline

        self._identity: SocketIdentity | None = None
        # Changes when the kubelet restarts. A restarted kubelet at first returns an empty list
        # without an error.
        self._source_instance = 0

        self.resource_names = resource_names
        self.claims = claims

        self._clock = clock
        self._allocatable_at = float("-inf")
        self._offered: frozenset[str] = frozenset()
        self._replicas: dict[DeviceId, set[str]] = {}
        self._held_shared: set[DeviceId] = set()  # at the last call

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        response = self.list_pods()
        self._update_allocatable(response)
        return replace(
            self.map_pods(response, devices),
            source_instance=self._source_instance,
            offered=self._offered,
        )

    def list_pods(self) -> Any:
        """Calls List and returns the decoded answer. Raises SourceError if the call fails.

        Counts restarts of the kubelet, see `Allocation.source_instance`.
        """
        self._check_identity()
        try:
            answer = call_unary(self.socket, "/v1.PodResourcesLister/List", self.deadline)
        except GrpcError as error:
            if error.status == "UNAVAILABLE":
                self._source_instance += 1
            raise _explain(error, self.socket) from error
        # The kubelet may have been restarted during the call.
        self._check_identity()
        return decode_list(answer, self.socket)

    def _check_identity(self) -> None:
        identity = _stat_socket(self.socket)
        if self._identity is not None and identity != self._identity:
            self._source_instance += 1
        self._identity = identity

    def map_pods(self, response: Any, devices: Sequence[Device]) -> Allocation:
        """Returns what the pods of a List answer hold."""
        held = list(_held_ids(response))
        gpus = [entry for entry in held if is_gpu(entry, self.resource_names)]
        allocation = map_held(KUBELET, gpus, devices, self._replicas)
        if self.claims is not None:
            claimed = self.claims.held(response, devices)
            allocation = _unite(allocation, claimed)

        listed = frozenset((pod.namespace, pod.name) for pod in response.pod_resources)
        return replace(allocation, vcuda=count_vcuda(held), listed_pods=listed)

    def _update_allocatable(self, response: Any) -> None:
        """Updates the offered GPUs, and the replicas of shared devices.

        Does so once a minute, and when a container holds a shared device that is not known.
        """
        gpus = [entry.text for entry in _held_ids(response) if is_gpu(entry, self.resource_names)]
        held = group_replicas(gpus).keys()
        is_due = self._clock() - self._allocatable_at >= _ALLOCATABLE_SECONDS
        are_known = held <= self._replicas.keys()
        if are_known and not is_due:
            return

        self._allocatable_at = self._clock()
        ids = self._list_allocatable()
        offered = set()
        for device_id in map(parse_device_id, ids):
            if device_id is not None and device_id.gpu_uuid:
                offered.add(device_id.gpu_uuid)
        self._offered = frozenset(offered)

        # The kubelet omits unhealthy devices, and all devices while the device plugin is
        # unavailable. So the replicas of a device are kept if a container holds the device now or
        # held it at the last call.
        replicas = group_replicas(ids)
        for shared in (held | self._held_shared) & self._replicas.keys():
            replicas[shared] = self._replicas[shared] | replicas.get(shared, set())
        self._replicas = replicas
        self._held_shared = set(held)

    def _list_allocatable(self) -> list[str]:
        """Returns the ids of all devices that can be allocated.

        Empty before Kubernetes 1.23, which cannot report them, and after an error.
        """
        ids: list[str] = []
        with suppress(GrpcError, DecodeError, ValueError):
            method = "/v1.PodResourcesLister/GetAllocatableResources"
            answer = call_unary(self.socket, method, _ALLOCATABLE_DEADLINE)
            for entry in podresources_pb2.AllocatableResourcesResponse.FromString(answer).devices:
                ids += entry.device_ids
        return ids


def _held_ids(response: Any) -> Iterator[HeldId]:
    for pod in response.pod_resources:
        for container in pod.containers:
            holder = Workload(pod.namespace, pod.name, container.name)
            for entry in container.devices:
                for text in entry.device_ids:
                    yield HeldId(holder, entry.resource_name, text)


def _unite(by_id: Allocation, by_claim: Allocation) -> Allocation:
    """Merges assignments.

    The kubelet can list a GPU both by id and by claim (feature gate DRAExtendedResource).
    """
    held = {(claim.device, claim.holder): claim for claim in by_claim.assignments}
    for assignment in by_id.assignments:
        key = assignment.device, assignment.holder
        if key in held:
            # Only the claim has labels.
            assignment = replace(assignment, attributes=held[key].attributes)
        held[key] = assignment

    unmapped = {*by_id.unmapped, *by_claim.unmapped}
    return sort_allocation(held.values(), unmapped)


def decode_list(answer: bytes, path: str = "its socket") -> Any:
    """Decodes the answer of a List call. Raises SourceError if the answer is malformed."""
    try:
        return podresources_pb2.ListPodResourcesResponse.FromString(answer)
    # Pure-Python protobuf raises ValueError for invalid UTF-8.
    except (DecodeError, ValueError) as error:
        raise SourceError(
            "bad_answer",
            f"cannot decode the kubelet's answer on {path}, {len(answer)} bytes ({error}): check "
            f"that {OPTION} is the kubelet's pod-resources socket",
        ) from error


def _stat_socket(path: str) -> SocketIdentity:
    """Checks that the socket exists, and returns its identity.

    File system errors are clearer than gRPC errors.
    """
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SourceError(
            "socket_missing",
            f"the kubelet's socket {path} does not exist: mount the host's pod-resources "
            "directory (not the socket itself, which every kubelet restart replaces) or set "
            f"{OPTION}",
        ) from error
    except (OSError, ValueError) as error:
        raise explain_read_error(error, path) from error

    if not stat.S_ISSOCK(status.st_mode):
        raise SourceError(
            "not_a_socket",
            f"{path} is not a socket: set {OPTION} to the kubelet's pod-resources socket, and "
            "mount its directory (mounting a missing socket creates a directory of that name)",
        )
    return status.st_dev, status.st_ino, status.st_ctime_ns


_ERRORS = {
    "DEADLINE_EXCEEDED": (
        "deadline",
        "it hangs or is overloaded; if this persists, check the kubelet's log",
    ),
    "UNAVAILABLE": (
        "unavailable",
        "it is stopped or restarting; if this persists, check the kubelet's log",
    ),
    "UNIMPLEMENTED": (
        "error",
        "before Kubernetes 1.20, the kubelet serves only v1alpha1, but podgpu needs v1: upgrade "
        f"Kubernetes; if it is newer, set {OPTION} to the kubelet's pod-resources socket",
    ),
}
"""Reason and advice by gRPC status."""


def _explain(error: GrpcError, path: str) -> SourceError:
    message = " ".join(error.message.split())[:300]
    reason, advice = _ERRORS.get(error.status, ("error", "check the kubelet's log"))
    if error.status == "UNAVAILABLE" and "Permission denied" in message:
        reason = "permission_denied"
        advice = "set securityContext.runAsUser: 0, because only uid 0 may connect"
    elif error.status == "RESOURCE_EXHAUSTED" and "rate limit" in message:
        reason = "rate_limited"
        advice = "the last mapping is used; if this persists, find the client that polls too often"

    return SourceError(
        reason, f"the kubelet did not answer List on {path} ({error.status}: {message}): {advice}"
    )


# gRPC client based on h2. grpcio would start threads and use 12 MiB more memory.

_STATUS_NAMES = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)
_STATUS_BY_NUMBER = {str(number): name for number, name in enumerate(_STATUS_NAMES)}


class GrpcError(Exception):
    """A gRPC call failed. `status` is the name of the gRPC status."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


def call_unary(path: str, method: str, timeout: float, request: bytes = b"") -> bytes:
    """Calls a method with an encoded request and returns the encoded answer.

    Raises GrpcError if the call fails.
    """
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout)
            connection.connect(path)
            return _exchange(connection, method, time.monotonic() + timeout, request)
    except TimeoutError as error:
        raise GrpcError("DEADLINE_EXCEEDED", f"no answer within {timeout:.1f} s") from error
    except (OSError, H2Error) as error:
        raise GrpcError("UNAVAILABLE", getattr(error, "strerror", None) or str(error)) from error


def _exchange(connection: socket.socket, method: str, deadline: float, request: bytes) -> bytes:
    http = H2Connection()
    http.initiate_connection()
    stream = _queue_request(http, method, _remaining(deadline), request)

    answer: dict[bytes, bytes] = {}
    body = bytearray()
    while True:
        connection.settimeout(_remaining(deadline))
        connection.sendall(http.data_to_send())
        received = connection.recv(256 * 1024)
        if not received:
            raise ConnectionError("the server closed the connection")
        for event in http.receive_data(received):
            match event:
                case ResponseReceived() | TrailersReceived():
                    answer.update(event.headers)
                case DataReceived():
                    body += event.data
                    http.acknowledge_received_data(event.flow_controlled_length, stream)
                case StreamReset() | ConnectionTerminated():
                    raise ConnectionError(
                        f"the server ended the call (HTTP/2 error {event.error_code})"
                    )
                case StreamEnded():
                    return _parse_answer(answer, body)


def _queue_request(http: H2Connection, method: str, seconds: float, request: bytes) -> int:
    """Adds a call to the data to send. Returns the id of its stream."""
    milliseconds = max(1, round(seconds * 1000))
    headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", method),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("grpc-timeout", f"{milliseconds}m"),
    ]

    stream = http.get_next_available_stream_id()
    http.send_headers(stream, headers)

    # one message that is not compressed
    message = b"\0" + len(request).to_bytes(4, "big") + request
    for start in range(0, len(message), http.max_outbound_frame_size):
        frame = message[start : start + http.max_outbound_frame_size]
        http.send_data(stream, frame)
    http.end_stream(stream)
    return stream


def _remaining(deadline: float) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def _parse_answer(headers: dict[bytes, bytes], body: bytearray) -> bytes:
    status = _read_header(headers, b"grpc-status", "missing")
    if status != "0":
        message = unquote(_read_header(headers, b"grpc-message", ""))
        if not message:
            http_status = _read_header(headers, b":status", "missing")
            message = f"gRPC status {status}, HTTP status {http_status}"
        raise GrpcError(_STATUS_BY_NUMBER.get(status, "UNKNOWN"), message)

    # A flag (0: not compressed) and four bytes with the length precede the message.
    prefix = body[:5]
    content = bytes(body[5:])
    length = int.from_bytes(prefix[1:], "big")
    if len(prefix) < 5 or prefix[0] or len(content) != length:
        raise GrpcError(
            "INTERNAL",
            f"malformed gRPC response: {len(body)} bytes do not contain exactly one uncompressed "
            "message",
        )
    return content


def _read_header(headers: dict[bytes, bytes], name: bytes, default: str) -> str:
    value = headers.get(name)
    if value is None:
        return default
    return value.decode(errors="replace")
