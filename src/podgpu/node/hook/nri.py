"""Handles one NRI connection: ttrpc frames, registration, and answers to the runtime's requests.

Two byte streams share the connection: one for requests of the runtime, one for requests of the
plugin. The runtime waits for each answer, so `Plugin` never waits for a disk, a driver or a lock.
After an internal error, the answer does not change the container. An answer with an error would
prevent the start of the container.
"""

from __future__ import annotations

import logging
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from podgpu.errors import SourceError
from podgpu.node.hook import HookCounters, nri_pb2
from podgpu.node.hook.devices import VISIBLE_DEVICES, Cards, Sandbox, find_assigned, read_variables

PLUGIN_SERVICE = 1  # stream of the runtime's requests
RUNTIME_SERVICE = 2  # stream of the plugin's requests
REQUEST = 1
RESPONSE = 2
PLUGIN_API = "nri.pkg.api.v1alpha1.Plugin"
RUNTIME_API = "nri.pkg.api.v1alpha1.Runtime"
MAX_MESSAGE = 4 * 1024 * 1024
_FRAME_HEADER = struct.Struct(">II")
_MESSAGE_HEADER = struct.Struct(">IIBB")
_MAX_FRAME = MAX_MESSAGE + _MESSAGE_HEADER.size
_MAX_SENT_FRAME = 4096  # Go's ttrpc has a read buffer of this size and rejects larger frames
_SEND_SECONDS = 5
_REGISTRATION_SECONDS = 60.0  # long, because the runtime registers plugins one after the other
_READ_BYTES = 256 * 1024
_UNIMPLEMENTED = 12
_METHODS = {
    1: "RunPodSandbox",
    2: "StopPodSandbox",
    3: "RemovePodSandbox",
    4: "CreateContainer",
    6: "StartContainer",
    8: "UpdateContainer",
    10: "StopContainer",
    11: "RemoveContainer",
}
"""Subscribed events: number -> method. There are few, because each one delays pod starts."""
EVENTS = sum(1 << number - 1 for number in _METHODS)
_RUNNING = 3
_STOPPED = 4
_log = logging.getLogger("podgpu")


class PluginName(NamedTuple):
    name: str = "podgpu"
    place: str = "90"  # the runtime calls plugins in the order of these two digits


class Message(NamedTuple):
    service: int
    stream: int
    kind: int
    data: bytes


def split_messages(received: Iterable[bytes]) -> Iterator[Message]:
    """Yields the messages in the received bytes.

    Raises SourceError if a length in the bytes exceeds the maximum.
    """
    frames = bytearray()
    streams = {PLUGIN_SERVICE: bytearray(), RUNTIME_SERVICE: bytearray()}
    for piece in received:
        frames += piece
        while frame := _cut(frames, _FRAME_HEADER, 1, _MAX_FRAME):
            (service, _length), content = frame
            # Unknown services are ignored, because NRI may add some.
            if service not in streams:
                continue
            streams[service] += content
            while message := _cut(streams[service], _MESSAGE_HEADER, 0, MAX_MESSAGE):
                (_length, stream, kind, _flags), data = message
                yield Message(service, stream, kind, data)


def _cut(
    buffer: bytearray, header: struct.Struct, length_position: int, limit: int
) -> tuple[tuple[int, ...], bytes] | None:
    """Removes a header and its content from the start of the buffer.

    Returns both, or None if they are incomplete.
    """
    if len(buffer) < header.size:
        return None

    fields = header.unpack_from(buffer)
    length = fields[length_position]
    if length > limit:
        raise SourceError(
            "bad_frame",
            f"the runtime sent data that is not valid NRI ({length:,} bytes; the maximum is "
            f"{limit:,})",
        )

    end = header.size + length
    if len(buffer) < end:
        return None

    content = bytes(buffer[header.size : end])
    del buffer[:end]
    return fields, content


def encode(message: Message) -> bytes:
    header = _MESSAGE_HEADER.pack(len(message.data), message.stream, message.kind, 0)
    content = header + message.data

    frames = bytearray()
    for start in range(0, len(content), _MAX_SENT_FRAME):
        frame = content[start : start + _MAX_SENT_FRAME]
        frames += _FRAME_HEADER.pack(message.service, len(frame))
        frames += frame
    return bytes(frames)


@dataclass
class Session:
    """Registers the plugin and answers requests until the connection ends."""

    connection: socket.socket
    # (method, payload) -> encoded response. May raise any exception.
    call: Callable[[str, bytes], bytes]
    name: PluginName
    counters: HookCounters
    is_registered: bool = False

    def run(self) -> None:
        """Returns when the runtime ends the connection.

        Raises SourceError if the connection or registration fails.
        """
        # Only sending has this limit. The next request may come at any time.
        send_timeout = struct.pack("@ll", _SEND_SECONDS, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, send_timeout)
        self.connection.settimeout(_REGISTRATION_SECONDS)
        try:
            self._register()
            for message in split_messages(iter(lambda: self.connection.recv(_READ_BYTES), b"")):
                self._handle(message)
        except TimeoutError as error:
            raise SourceError(
                "no_answer",
                f"the runtime did not answer the registration within {_REGISTRATION_SECONDS:.0f} s",
            ) from error
        except OSError as error:
            raise SourceError(
                "connection_lost", f"the connection to the runtime broke ({error.strerror})"
            ) from error
        finally:
            self.connection.close()

        if not self.is_registered:
            raise SourceError(
                "refused",
                "the runtime closed the connection before it registered the plugin: see its log; "
                "it may accept only plugins that it started itself (containerd: "
                "disable_connections)",
            )

    def _register(self) -> None:
        plugin = nri_pb2.RegisterPluginRequest(
            plugin_name=self.name.name, plugin_idx=self.name.place
        )
        request = nri_pb2.Request(
            service=RUNTIME_API, method="RegisterPlugin", payload=_serialize(plugin)
        )
        self._send(Message(RUNTIME_SERVICE, 1, REQUEST, _serialize(request)))

    def _send(self, message: Message) -> None:
        self.connection.sendall(encode(message))

    def _handle(self, message: Message) -> None:
        if message.service == RUNTIME_SERVICE and message.kind == RESPONSE:
            self._finish_registration(message.data)
        elif message.service == PLUGIN_SERVICE and message.kind == REQUEST:
            answer = self._answer(message.data)
            self._send(message._replace(kind=RESPONSE, data=answer))
        else:
            self.counters.error("unexpected_message")

    def _finish_registration(self, data: bytes) -> None:
        try:
            answer = nri_pb2.Response.FromString(data)
        except DecodeError as error:
            raise SourceError(
                "refused", "the runtime's answer to the registration is not an NRI message"
            ) from error

        if answer.status.code:
            raise SourceError(
                "refused",
                f"the runtime rejects the plugin {self.name.place}-{self.name.name} "
                f"({answer.status.message}): podgpu needs NRI version v1alpha1 (containerd 1.7 or "
                "later, CRI-O 1.26 or later); see the runtime's log",
            )

        self.is_registered = True
        self.connection.settimeout(None)

    def _answer(self, data: bytes) -> bytes:
        started = time.monotonic()
        request = nri_pb2.Request()
        response = nri_pb2.Response()
        method = "other"
        try:
            request.ParseFromString(data)
            method = request.method
            if request.service != PLUGIN_API:
                raise NotImplementedError
            response.payload = self.call(method, request.payload)
        except NotImplementedError:
            problem = f"podgpu implements {PLUGIN_API} only"
            self._failed(f"{request.service}/{method}", "other_protocol", problem)
            response.status.code = _UNIMPLEMENTED
            method = "other"
        except DecodeError:
            self._failed(method, "bad_request", "the request is not an NRI message")
        except SourceError as error:
            self._failed(method, error.reason, str(error))
        except Exception as error:  # noqa: BLE001 - a bug here must not fail a container
            _log.exception("unexpected error, please report it")
            self._failed(method, "bug", repr(error))

        self.counters.add("podgpu_hook_requests_total", method)
        self.counters.add("podgpu_hook_request_seconds_total", method, time.monotonic() - started)
        return _serialize(response)

    def _failed(self, method: str, reason: str, problem: str) -> None:
        self.counters.error(reason)
        _log.warning("NRI request %s failed, so the container is not changed: %s", method, problem)


def _serialize(message: Any) -> bytes:
    encoded: bytes = message.SerializeToString()
    return encoded


@dataclass
class Plugin:
    """Answers requests and tracks the containers.

    Lives as long as the connection, because the runtime reports all containers again after a
    reconnect.
    """

    # Called with all sandboxes after every change, after the first full report of the runtime.
    on_change: Callable[[tuple[Sandbox, ...]], None]
    counters: HookCounters
    # If given (--inject), the plugin sets NVIDIA_VISIBLE_DEVICES of new containers.
    cards: Callable[[], Cards] | None = None
    is_synchronised: bool = False
    # Pods by the id of their sandbox. A pod can have several sandboxes, of which one is live: after
    # a reboot, the runtime also reports the stopped ones.
    _pods: dict[str, Any] = field(default_factory=dict)
    # Running containers by the id of their sandbox and by name. Only live sandboxes have any.
    _containers: defaultdict[str, dict[str, Any]] = field(
        default_factory=partial(defaultdict, dict)
    )
    # Of a Synchronize request that has more messages to come.
    _reported_pods: list[Any] = field(default_factory=list)
    _reported_containers: list[Any] = field(default_factory=list)

    @property
    def container_count(self) -> int:
        return sum(len(sandbox.containers) for sandbox in self.sandboxes)

    @property
    def sandboxes(self) -> tuple[Sandbox, ...]:
        sandboxes = []
        for sandbox_id, pod in self._pods.copy().items():
            containers = self._containers.get(sandbox_id, {})
            sandboxes.append(Sandbox(pod, tuple(containers.values())))
        return tuple(sandboxes)

    def answer(self, method: str, payload: bytes) -> bytes:
        """Returns the encoded response.

        Raises NotImplementedError, SourceError or protobuf's DecodeError.
        """
        if method == "Configure":
            return self._configure(payload)
        if method == "Synchronize":
            return self._synchronize(payload)
        if method == "CreateContainer":
            return self._create(payload)
        if method == "StateChange":
            change = nri_pb2.StateChangeEvent.FromString(payload)
            self._apply(_METHODS.get(change.event, ""), change.pod, change.container)
        elif method in _METHODS.values():
            subject = nri_pb2.Subject.FromString(payload)
            self._apply(method, subject.pod, subject.container)
        elif method != "Shutdown":
            raise NotImplementedError(method)
        return b""

    def _configure(self, payload: bytes) -> bytes:
        request = nri_pb2.ConfigureRequest.FromString(payload)
        runtime = request.runtime_name or "the runtime"
        _log.info("registered with %s %s", runtime, request.runtime_version)
        return _serialize(nri_pb2.ConfigureResponse(events=EVENTS))

    def _synchronize(self, payload: bytes) -> bytes:
        request = nri_pb2.SynchronizeRequest.FromString(payload)
        self._reported_pods += request.pods
        self._reported_containers += request.containers

        if request.more:
            return _serialize(nri_pb2.SynchronizeResponse(more=True))

        self._pods = {pod.id: pod for pod in self._reported_pods}
        self._place(self._reported_containers)
        self._reported_pods = []
        self._reported_containers = []

        self.is_synchronised = True
        self.counters.add("podgpu_hook_synchronisations_total")
        _log.info("the runtime reported all its containers: %d", self.container_count)
        self.on_change(self.sandboxes)
        return b""

    def _place(self, reported: Iterable[Any]) -> None:
        """Assigns the reported containers to the live sandboxes of their pods.

        The live sandbox of a pod has a running container or, if none has, the newest container.
        """
        containers = []
        for container in reported:
            if container.state != _STOPPED and container.pod_sandbox_id in self._pods:
                containers.append(container)

        containers.sort(key=lambda container: (container.state == _RUNNING, container.created_at))
        # Sandbox id by pod UID. The last container of this order decides.
        live: dict[str, str] = {}
        for container in containers:
            pod = self._pods[container.pod_sandbox_id]
            # A pod without a UID is known by its sandbox only.
            live[pod.uid or pod.id] = pod.id

        self._containers.clear()
        # Of several containers with the same name, only the last one of the order above runs.
        for container in containers:
            pod = self._pods[container.pod_sandbox_id]
            if live[pod.uid or pod.id] == pod.id:
                self._containers[pod.id][container.name] = container

    def _create(self, payload: bytes) -> bytes:
        subject = nri_pb2.Subject.FromString(payload)
        self._apply("CreateContainer", subject.pod, subject.container)

        pod = self._pods.get(subject.pod.id)
        if self.cards is None or pod is None:
            return b""
        value = ",".join(find_assigned(pod, self.cards()))
        variables = read_variables(subject.container)
        if not value or value == variables.get(VISIBLE_DEVICES):
            return b""

        self.counters.add("podgpu_hook_adjustments_total")
        env = [nri_pb2.KeyValue(key=VISIBLE_DEVICES, value=value)]
        if VISIBLE_DEVICES in variables:
            # Another plugin may have set the variable. The runtime then accepts a new value only
            # after its removal.
            env.insert(0, nri_pb2.KeyValue(key=f"-{VISIBLE_DEVICES}", value=""))
        adjustment = nri_pb2.ContainerAdjustment(env=env)
        return _serialize(nri_pb2.CreateContainerResponse(adjust=adjustment))

    def _apply(self, method: str, pod: Any, container: Any) -> None:
        if method in ("StopPodSandbox", "RemovePodSandbox"):
            self._pods.pop(pod.id, None)
            self._containers.pop(pod.id, None)
        elif method in ("StopContainer", "RemoveContainer") or container.state == _STOPPED:
            self._remove_container(pod.id, container.id)
        elif method:
            # Also for later events, because earlier events may have been missed. The runtime may
            # send only the pod's id. The earlier pod, which has names, is then kept.
            if pod.name or pod.id not in self._pods:
                self._pods[pod.id] = pod
            self._remove_earlier(self._pods[pod.id])
            if method != "RunPodSandbox":
                # Replaces an older container of this name, in case its stop event was missed.
                self._containers[pod.id][container.name] = container

        if self.is_synchronised:
            self.on_change(self.sandboxes)

    def _remove_earlier(self, live: Any) -> None:
        """Removes containers in earlier sandboxes of the pod, in case their events were missed."""
        for sandbox_id in tuple(self._containers):
            uid = self._pods[sandbox_id].uid
            if uid and uid == live.uid and sandbox_id != live.id:
                del self._containers[sandbox_id]

    def _remove_container(self, sandbox_id: str, container_id: str) -> None:
        containers = self._containers.get(sandbox_id, {})
        for container in tuple(containers.values()):
            if container.id == container_id:
                del containers[container.name]
