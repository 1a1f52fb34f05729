"""A container runtime as a plugin sees it: ttrpc and NRI from the runtime's side, in code of its own.

It shares nothing with the hook, not even the protobuf messages: field numbers and frames are written down here a second
time, from the protocol, so that a mistake in one place shows. It does nothing by itself: a test has it accept a plugin
and tell of one event after the other, and `expected()` is what podlist.json has to say after each.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

PLUGIN, RUNTIME = 1, 2
SERVICE = "nri.pkg.api.v1alpha1.Plugin"
STATE_CHANGE_ONLY = {
    "RunPodSandbox": 1,
    "StopPodSandbox": 2,
    "RemovePodSandbox": 3,
    "StartContainer": 6,
    "RemoveContainer": 11,
}
"""Events that runtimes before NRI 0.12 tell through StateChange."""
UNIMPLEMENTED = 12
STOPPED = 4
_PATIENCE = 60.0


# protobuf's wire format


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def number(key: int, value: int) -> bytes:
    return varint(key << 3) + varint(value) if value else b""


def data(key: int, value: bytes | str) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return varint(key << 3 | 2) + varint(len(content)) + content


def text_map(key: int, pairs: Mapping[str, str]) -> bytes:
    return b"".join(data(key, data(1, name) + data(2, value)) for name, value in pairs.items())


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0

    def take_varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        tag = take_varint()
        value = take_varint()
        if tag & 7 == 2:
            yield tag >> 3, message[at : at + value]
            at += value
        else:
            yield tag >> 3, value


def first(message: bytes, key: int) -> bytes:
    return next((value for name, value in fields(message) if name == key and isinstance(value, bytes)), b"")


def first_number(message: bytes, key: int) -> int:
    return next((value for name, value in fields(message) if name == key and isinstance(value, int)), 0)


# What there is


@dataclass(frozen=True)
class Pod:
    id: str
    name: str
    namespace: str = "ml"
    uid: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def message(self) -> bytes:
        known = data(1, self.id) + data(2, self.name) + data(3, self.uid or f"uid-{self.id}") + data(4, self.namespace)
        labels = text_map(5, {"app": self.name})
        return known + labels + text_map(6, self.annotations) + data(7, "runc") + number(9, 4711)


@dataclass(frozen=True)
class Container:
    id: str
    pod: Pod
    name: str = "main"
    env: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    devices: tuple[tuple[int, int], ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    state: int = 1
    created_at: int = 0
    gpus: tuple[str, ...] = ()
    """What podlist.json has to say."""

    @property
    def message(self) -> bytes:
        mounts = b"".join(data(9, data(1, one) + data(2, "bind") + data(3, "/dev/null")) for one in self.mounts)
        devices = b"".join(
            data(2, data(1, f"/dev/d{minor}") + data(2, "c") + number(3, major) + number(4, minor))
            for major, minor in self.devices
        )
        return (
            data(1, self.id)
            + data(2, self.pod.id)
            + data(3, self.name)
            + number(4, self.state)
            + text_map(6, self.annotations)
            + data(7, "sleep")
            + b"".join(data(8, one) for one in self.env)
            + mounts
            + data(11, devices + data(5, "/kubepods/x"))
            + number(14, self.created_at)
        )


class PluginError(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Ended(Exception):
    """The plugin closed the connection."""


class Runtime:
    def __init__(self, path: Path, dedicated: bool = True, piece: int = 65536, per_message: int = 10_000) -> None:
        """`dedicated`: tells each event by its own method, as NRI does since 0.12. `piece`: the most of one piece."""
        self.path = path
        self.dedicated = dedicated
        self.piece = piece
        self.per_message = per_message
        self.pods: dict[str, Pod] = {}
        self.containers: dict[str, Container] = {}
        self.registered: tuple[str, str] = ("", "")
        self.events = 0
        self.requests = 0
        self.connection: socket.socket | None = None
        self._stream = -1
        self._received = {PLUGIN: bytearray(), RUNTIME: bytearray()}
        self.listen()

    # The connection

    def listen(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen(8)
        self._listener.settimeout(_PATIENCE)

    def stop(self) -> None:
        self.drop()
        self._listener.close()
        self.path.unlink(missing_ok=True)

    def restart(self) -> None:
        self.stop()
        self.listen()

    def drop(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def accept(self) -> None:
        """A plugin from its connection to the end of its synchronisation."""
        self.take(self._listener.accept()[0])

    def take(self, connection: socket.socket) -> None:
        self.connected(connection)
        self.take_registration()
        self.configure()
        self.synchronize()

    def connected(self, connection: socket.socket | None = None) -> None:
        self.drop()
        self.connection = connection or self._listener.accept()[0]
        self.connection.settimeout(_PATIENCE)
        self._stream = -1
        self._received = {PLUGIN: bytearray(), RUNTIME: bytearray()}

    def take_registration(self, status: bytes = b"") -> None:
        stream, kind, request = self.receive(RUNTIME)
        assert (stream, kind) == (1, 1)
        assert first(request, 1) == b"nri.pkg.api.v1alpha1.Runtime"
        assert first(request, 2) == b"RegisterPlugin"
        told = first(request, 3)
        self.registered = first(told, 1).decode(), first(told, 2).decode()
        self.send(RUNTIME, stream, 2, data(1, status) if status else b"")

    def configure(self, request_timeout: int = 2000) -> None:
        told = (
            data(2, "containerd") + data(3, "v2.2.1") + number(4, 5000) + number(5, request_timeout) + data(6, "0.12")
        )
        self.events = first_number(self.call("Configure", told), 2)

    def synchronize(self) -> None:
        parts = [data(1, pod.message) for pod in self.pods.values()]
        parts += [data(2, one.message) for one in self.containers.values() if one.state != STOPPED]
        chunks = [parts[at : at + self.per_message] for at in range(0, len(parts), self.per_message)] or [[]]
        for place, chunk in enumerate(chunks, 1):
            more = place < len(chunks)
            answer = self.call("Synchronize", b"".join(chunk) + number(3, more))
            assert first_number(answer, 2) == more
            assert first(answer, 1) == b""

    # Frames

    def send(self, service: int, stream: int, kind: int, content: bytes) -> None:
        assert self.connection is not None
        whole = struct.pack(">IIBB", len(content), stream, kind, 0) + content
        for at in range(0, len(whole), self.piece):
            piece = whole[at : at + self.piece]
            self.connection.sendall(struct.pack(">II", service, len(piece)) + piece)

    def receive(self, service: int) -> tuple[int, int, bytes]:
        waiting = self._received[service]
        while len(waiting) < 10 or len(waiting) < 10 + struct.unpack_from(">I", waiting)[0]:
            name, length = struct.unpack(">II", self._exactly(8))
            assert length <= 4096, "Go's side could not read this"
            self._received[name] += self._exactly(length)
        length, stream, kind, flags = struct.unpack_from(">IIBB", waiting)
        assert flags == 0
        content = bytes(waiting[10 : 10 + length])
        del waiting[: 10 + length]
        return stream, kind, content

    def _exactly(self, size: int) -> bytes:
        assert self.connection is not None
        content = b""
        while len(content) < size:
            try:
                more = self.connection.recv(size - len(content))
            except ConnectionError:
                more = b""
            if not more:
                raise Ended
            content += more
        return content

    def call(self, method: str, request: bytes, service: str = SERVICE) -> bytes:
        self.requests += 1
        self._stream += 2
        self.send(PLUGIN, self._stream, 1, data(1, service) + data(2, method) + data(3, request) + number(4, 2 * 10**9))
        stream, kind, response = self.receive(PLUGIN)
        assert (stream, kind) == (self._stream, 2)
        status = first(response, 1)
        if first_number(status, 1):
            raise PluginError(first_number(status, 1), first(status, 2).decode())
        return first(response, 2)

    # Events

    def run_pod(self, pod: Pod) -> None:
        self.pods[pod.id] = pod
        self._tell("RunPodSandbox", pod)

    def create(self, container: Container) -> dict[str, str]:
        """The variables the plugin sets; what it marks for removal begins with a minus."""
        self.pods[container.pod.id] = container.pod
        answer = self.call("CreateContainer", data(1, container.pod.message) + data(2, container.message))
        self.containers[container.id] = container
        adjustment = first(answer, 1)
        pairs = [value for key, value in fields(adjustment) if key == 4 and isinstance(value, bytes)]
        return {first(pair, 1).decode(): first(pair, 2).decode() for pair in pairs}

    def start(self, container: Container) -> None:
        self.containers[container.id] = replace(container, state=3)
        self._tell("StartContainer", container.pod, self.containers[container.id])

    def update(self, container: Container) -> None:
        self.containers[container.id] = container
        answer = self.call("UpdateContainer", data(1, container.pod.message) + data(2, container.message))
        assert answer == b""

    def stop_container(self, container: Container) -> None:
        self.containers[container.id] = replace(container, state=STOPPED)
        self.call("StopContainer", data(1, container.pod.message) + data(2, self.containers[container.id].message))

    def remove(self, container: Container) -> None:
        self.containers.pop(container.id, None)
        self._tell("RemoveContainer", container.pod, container)

    def end_pod(self, pod: Pod, method: str = "RemovePodSandbox") -> None:
        self.forget_pod(pod)
        self._tell(method, pod)

    def forget_pod(self, pod: Pod) -> None:
        """Without a word."""
        self.pods.pop(pod.id, None)
        for one in [one for one in self.containers.values() if one.pod.id == pod.id]:
            del self.containers[one.id]

    def _tell(self, method: str, pod: Pod, container: Container | None = None) -> None:
        subject = data(2, container.message) if container else b""
        if self.dedicated:
            assert self.call(method, data(1, pod.message) + subject) == b""
            return
        event = number(1, STATE_CHANGE_ONLY[method]) + data(2, pod.message)
        assert self.call("StateChange", event + (data(3, container.message) if container else b"")) == b""

    # What has to come of it

    def expected(self) -> list[dict[str, object]]:
        held = (one for one in self.containers.values() if one.gpus and one.state != STOPPED)
        return [
            {"name": one.pod.name, "namespace": one.pod.namespace, "container": one.name, "gpu_list": list(one.gpus)}
            for one in sorted(held, key=lambda one: (one.pod.namespace, one.pod.name, one.name))
        ]


def read_podlist(path: Path) -> object:
    """None before there is one."""
    return json.loads(path.read_bytes()) if path.exists() else None


def uuid(number: int) -> str:
    return f"GPU-{number:08x}-0000-0000-0000-000000000000"


def gpu_pod(number: int, gpus: Iterable[int] = (0,), **more: str) -> Container:
    """A container as NVIDIA's device plugin makes them."""
    ids = tuple(uuid(one) for one in gpus)
    pod = Pod(f"sandbox-{number}", f"pod-{number}", **more)
    return Container(f"container-{number}", pod, env=(f"NVIDIA_VISIBLE_DEVICES={','.join(ids)}",), gpus=ids)
