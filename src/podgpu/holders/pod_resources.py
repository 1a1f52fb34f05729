"""PodResourcesClient asks the kubelet's pod-resources API over its Unix socket: one connection, kept and made again. It
never writes.

protobuf costs about 8 MiB of memory: it is imported at the first reading, not before.
"""

from __future__ import annotations

import os
import stat
import time
from typing import Any, NamedTuple

from podgpu.errors import SourceError
from podgpu.holders.unary import CallFailed, ChannelClosed, UnixChannel

OPTION = "--pod-resources-kubelet-socket"

# v1 since Kubernetes 1.20; v1alpha1 is all that 1.13 to 1.19 have.
API_VERSIONS = ("v1", "v1alpha1")

_LONGEST_SOCKET_PATH = 107  # sun_path holds 108 bytes, the last one zero
_MOST_BYTES = 64 * 1024 * 1024
"""Of an answer. A big node's is a few; the kubelet itself sets no limit."""


class PodResourcesClient:
    def __init__(self, socket: str, deadline: float = 5.0) -> None:
        self.socket = os.path.abspath(socket)
        self.deadline = deadline
        self._channel: UnixChannel | None = None
        self._connected_to: SocketIdentity | None = None
        self.life = 0
        """Another number for every kubelet that answers: a new one lists no pods at first, and says no error."""
        self.version: str | None = None
        """Which version of the API this kubelet has; None until it answered."""

    def close(self) -> None:
        """Drop the connection. A later reading would make a new one."""
        channel, self._channel, self.version = self._channel, None, None
        if channel is not None:
            channel.close()

    def list(self) -> Any:
        """The decoded answer of one List call. Raises SourceError."""
        return decode_list(self._list(), self.socket)

    def _list(self) -> bytes:
        channel = self._connect(_look_at_socket(self.socket))
        try:
            answer = self._ask(channel, time.monotonic() + self.deadline)
            self._meet(_look_at_socket(self.socket))  # it connects anew by itself: a new kubelet may have answered
            return answer
        except CallFailed as error:
            if error.code in ("UNAVAILABLE", "UNIMPLEMENTED"):
                self.close()
                self.life += 1
            raise _explain(error, self.socket, self.deadline) from error
        except ChannelClosed as error:
            raise SourceError("error", f"the connection to {self.socket} was closed: podgpu is stopping") from error

    def _connect(self, identity: SocketIdentity) -> UnixChannel:
        self._meet(identity)
        if self._channel is None:
            self._channel = UnixChannel(self.socket, _MOST_BYTES)
        return self._channel

    def _meet(self, identity: SocketIdentity) -> None:
        if identity != self._connected_to:
            # The kubelet restarted, and may have another version now.
            self.close()
            self.life += self._connected_to is not None
            self._connected_to = identity

    def _ask(self, channel: UnixChannel, give_up_at: float) -> bytes:
        """One List: a kubelet that does not have the version asked for refuses at once and lists nothing."""
        newest, oldest = API_VERSIONS
        if self.version != oldest:
            try:
                answer = _call_list(channel, newest, give_up_at)
                self.version = newest
                return answer
            except CallFailed as error:
                if error.code != "UNIMPLEMENTED":
                    raise
        answer = _call_list(channel, oldest, give_up_at)
        self.version = oldest
        return answer

    def allocatable_ids(self, deadline: float | None = None) -> tuple[str, ...]:
        """Ids of every healthy device of every plugin; none from a kubelet that does not tell (before 1.23)."""
        channel = self._channel
        if channel is None or self.version != API_VERSIONS[0]:
            return ()
        from google.protobuf.message import DecodeError

        from podgpu.holders import podresources_pb2

        try:
            answer = channel.call("/v1.PodResourcesLister/GetAllocatableResources", deadline or self.deadline)
            response = podresources_pb2.AllocatableResourcesResponse.FromString(answer)
        except (CallFailed, ChannelClosed, DecodeError, ValueError):
            return ()
        return tuple(text for entry in response.devices for text in entry.device_ids)


class SocketIdentity(NamedTuple):
    """Tells a socket from the one a restarted kubelet puts in its place, be it with the same inode."""

    filesystem: int
    inode: int
    changed_ns: int


def _look_at_socket(path: str) -> SocketIdentity:
    """See that the path can be connected to at all: the file system explains better than gRPC does."""
    if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
        raise SourceError(
            "path_too_long",
            f"the socket path {path} is longer than the {_LONGEST_SOCKET_PATH} bytes Linux allows:"
            f" mount the kubelet's pod-resources directory at a shorter path and name it with {OPTION}",
        )
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SourceError(
            "socket_missing",
            f"the kubelet's socket {path} is not there: mount the host's pod-resources directory (not the"
            f" socket itself: every kubelet restart makes a new one) or name another socket with {OPTION}",
        ) from error
    except PermissionError as error:
        raise _permission_denied(path) from error
    except (OSError, ValueError) as error:
        raise SourceError("error", f"cannot look at {path}: {error}: check {OPTION}") from error
    if not stat.S_ISSOCK(found.st_mode):
        raise SourceError(
            "not_a_socket",
            f"{path} is not a socket: name the kubelet's pod-resources socket with {OPTION}, and mount the"
            " directory it is in (mounting a socket that is not there yet makes a directory of its name)",
        )
    return SocketIdentity(found.st_dev, found.st_ino, found.st_ctime_ns)


def _permission_denied(path: str) -> SourceError:
    return SourceError(
        "permission_denied",
        f"not allowed to connect to {path}: the kubelet's socket is for uid 0 alone:"
        " set securityContext.runAsUser: 0 (no capability is needed)",
    )


def _call_list(channel: UnixChannel, version: str, give_up_at: float) -> bytes:
    return channel.call(f"/{version}.PodResourcesLister/List", give_up_at - time.monotonic())


def _explain(error: CallFailed, path: str, deadline: float) -> SourceError:
    """What a failed call means to the person who runs podgpu."""
    code = error.code
    details = " ".join(error.details.split())[:300]
    if code == "DEADLINE_EXCEEDED":
        return SourceError(
            "deadline",
            f"the kubelet did not answer on {path} within {deadline:g} s: it hangs or is overloaded;"
            " asked again at the next reading; if it lasts, look at the kubelet's log",
        )
    if code == "UNAVAILABLE" and "Permission denied" in details:
        return _permission_denied(path)
    if code == "UNAVAILABLE":
        return SourceError(
            "unavailable",
            f"no kubelet answers on {path} ({details}): it is stopped or restarting;"
            " asked again at the next reading; if it lasts, look at the kubelet's log",
        )
    if code == "RESOURCE_EXHAUSTED" and "rate limit" in details:
        return SourceError(
            "rate_limited",
            f"the kubelet refused List on {path}: its rate limit, one for all its clients, is used up;"
            " the last mapping is kept; if it lasts, find the client that asks too often",
        )
    if code == "RESOURCE_EXHAUSTED" and "larger than max" in details:
        return SourceError(
            "too_large",
            f"the kubelet's answer on {path} is larger than podgpu accepts ({details}):"
            " see that this is the kubelet's socket, and report it if it is",
        )
    if code == "UNIMPLEMENTED":
        return SourceError(
            "error",
            f"whatever answers on {path} does not have the pod-resources API ({code}: {details}): name the kubelet's"
            f" pod-resources socket with {OPTION}",
        )
    return SourceError("error", f"the kubelet failed List on {path} ({code}: {details}): look at the kubelet's log")


def decode_list(answer: bytes, path: str = "its socket") -> Any:
    """The message in the bytes of a List answer; v1alpha1 is a subset of v1 on the wire."""
    from google.protobuf.message import DecodeError

    from podgpu.holders import podresources_pb2

    try:
        return podresources_pb2.ListPodResourcesResponse.FromString(answer)
    except (DecodeError, ValueError) as error:  # ValueError: text that is not UTF-8, in pure-Python protobuf
        raise SourceError(
            "bad_answer",
            f"the kubelet's answer on {path}, {len(answer)} bytes, does not decode ({error}):"
            f" see that {OPTION} names the kubelet's pod-resources socket",
        ) from error
