"""Simulates a container runtime that talks to a plugin by NRI over ttrpc.

Tests make it accept a plugin and report events. `expected()` returns the content that podlist.json
must have.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from podgpu.node.hook import nri_pb2

PLUGIN, RUNTIME = 1, 2
SERVICE = "nri.pkg.api.v1alpha1.Plugin"
STATE_CHANGE_ONLY = {
    "RunPodSandbox": 1,
    "StopPodSandbox": 2,
    "RemovePodSandbox": 3,
    "StartContainer": 6,
    "RemoveContainer": 11,
}
"""Events that runtimes before NRI 0.12 report through StateChange."""
CREATED = 1
RUNNING = 3
STOPPED = 4
_PATIENCE = 60.0


@dataclass(frozen=True)
class Pod:
    id: str
    name: str
    namespace: str = "ml"
    uid: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def message(self) -> Any:
        return nri_pb2.PodSandbox(
            id=self.id,
            name=self.name,
            uid=self.uid or f"uid-{self.id}",
            namespace=self.namespace,
            annotations=self.annotations,
        )


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
    """The GPUs that podlist.json must list."""

    @property
    def message(self) -> Any:
        devices = [
            nri_pb2.LinuxDevice(path="/dev/d", major=major, minor=minor)
            for major, minor in self.devices
        ]
        return nri_pb2.Container(
            id=self.id,
            pod_sandbox_id=self.pod.id,
            name=self.name,
            state=self.state,
            annotations=self.annotations,
            env=[variable.encode() for variable in self.env],
            mounts=[nri_pb2.Mount(destination=mount.encode()) for mount in self.mounts],
            linux=nri_pb2.LinuxContainer(devices=devices),
            created_at=self.created_at,
        )


class PluginError(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Ended(Exception):
    """The plugin closed the connection."""


class Runtime:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.dedicated = True  # each event has its own method, as since NRI 0.12
        self.pods: dict[str, Pod] = {}
        self.containers: dict[str, Container] = {}
        self.registered: tuple[str, str] = ("", "")
        self.events = 0
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

    def drop(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def accept(self) -> None:
        """Accepts a connection and completes registration, configuration and synchronisation."""
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

    def take_registration(self, status: Any = None) -> None:
        stream, kind, content = self.receive(RUNTIME)
        assert (stream, kind) == (1, 1)
        request = nri_pb2.Request.FromString(content)
        assert (request.service, request.method) == (
            "nri.pkg.api.v1alpha1.Runtime",
            "RegisterPlugin",
        )
        plugin = nri_pb2.RegisterPluginRequest.FromString(request.payload)
        self.registered = plugin.plugin_name, plugin.plugin_idx
        self.send(RUNTIME, stream, 2, nri_pb2.Response(status=status).SerializeToString())

    def configure(self) -> None:
        request = nri_pb2.ConfigureRequest(
            runtime_name="containerd", runtime_version="v2.2.1", request_timeout=2000
        )
        self.events = nri_pb2.ConfigureResponse.FromString(self.call("Configure", request)).events

    def synchronize(self, more: bool = False) -> None:
        containers = [one.message for one in self.containers.values() if one.state != STOPPED]
        pods = [pod.message for pod in self.pods.values()]
        request = nri_pb2.SynchronizeRequest(pods=pods, containers=containers, more=more)
        assert (
            nri_pb2.SynchronizeResponse.FromString(self.call("Synchronize", request)).more == more
        )

    # Frames

    def send(self, service: int, stream: int, kind: int, content: bytes) -> None:
        assert self.connection is not None
        whole = struct.pack(">IIBB", len(content), stream, kind, 0) + content
        self.connection.sendall(struct.pack(">II", service, len(whole)) + whole)

    def receive(self, service: int) -> tuple[int, int, bytes]:
        waiting = self._received[service]
        while len(waiting) < 10 or len(waiting) < 10 + struct.unpack_from(">I", waiting)[0]:
            name, length = struct.unpack(">II", self._exactly(8))
            assert length <= 4096, "the Go implementation rejects longer frames"
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

    def call(self, method: str, request: Any, service: str = SERVICE) -> bytes:
        self._stream += 2
        payload = request if isinstance(request, bytes) else request.SerializeToString()
        message = nri_pb2.Request(service=service, method=method, payload=payload)
        self.send(PLUGIN, self._stream, 1, message.SerializeToString())
        stream, kind, content = self.receive(PLUGIN)
        assert (stream, kind) == (self._stream, 2)
        response = nri_pb2.Response.FromString(content)
        if response.status.code:
            raise PluginError(response.status.code, response.status.message)
        return bytes(response.payload)

    # Events

    def run_pod(self, pod: Pod) -> None:
        self.pods[pod.id] = pod
        self._report("RunPodSandbox", pod)

    def create(self, container: Container) -> dict[str, str]:
        """Creates a container. Returns the environment variables that the plugin sets. The names
        of those that it removes begin with a minus.
        """
        self.pods[container.pod.id] = container.pod
        answer = self.call("CreateContainer", _subject(container))
        self.containers[container.id] = container
        return {
            pair.key: pair.value
            for pair in nri_pb2.CreateContainerResponse.FromString(answer).adjust.env
        }

    def start(self, container: Container) -> None:
        self.containers[container.id] = replace(container, state=3)
        self._report("StartContainer", container.pod, self.containers[container.id])

    def update(self, container: Container) -> None:
        self.containers[container.id] = container
        assert self.call("UpdateContainer", _subject(container)) == b""

    def stop_container(self, container: Container) -> None:
        self.containers[container.id] = replace(container, state=STOPPED)
        self.call("StopContainer", _subject(self.containers[container.id]))

    def remove(self, container: Container) -> None:
        self.containers.pop(container.id, None)
        self._report("RemoveContainer", container.pod, container)

    def end_pod(self, pod: Pod, method: str = "RemovePodSandbox") -> None:
        self.forget_pod(pod)
        self._report(method, pod)

    def forget_pod(self, pod: Pod) -> None:
        """Removes a pod without reporting an event."""
        self.pods.pop(pod.id, None)
        for one in [one for one in self.containers.values() if one.pod.id == pod.id]:
            del self.containers[one.id]

    def _report(self, method: str, pod: Pod, container: Container | None = None) -> None:
        parts = {"pod": pod.message, "container": container.message if container else None}
        if self.dedicated:
            assert self.call(method, nri_pb2.Subject(**parts)) == b""
        else:
            assert (
                self.call(
                    "StateChange",
                    nri_pb2.StateChangeEvent(event=STATE_CHANGE_ONLY[method], **parts),
                )
                == b""
            )

    def expected(self) -> list[dict[str, object]]:
        held = (one for one in self.containers.values() if one.gpus and one.state != STOPPED)
        return [
            {
                "name": one.pod.name,
                "namespace": one.pod.namespace,
                "container": one.name,
                "gpu_list": list(one.gpus),
                "uid": one.pod.message.uid,
            }
            for one in sorted(held, key=lambda one: (one.pod.namespace, one.pod.name, one.name))
        ]


def _subject(container: Container) -> Any:
    return nri_pb2.Subject(pod=container.pod.message, container=container.message)


def read_podlist(path: Path) -> object:
    """Returns the parsed file, or None if it does not exist."""
    return json.loads(path.read_bytes()) if path.exists() else None


def uuid(number: int) -> str:
    return f"GPU-{number:08x}-0000-0000-0000-000000000000"


def gpu_pod(number: int, gpus: Iterable[int] = (0,), **more: Any) -> Container:
    """Returns a container with GPUs, configured as by NVIDIA's device plugin."""
    ids = tuple(uuid(one) for one in gpus)
    pod = Pod(f"sandbox-{number}", f"pod-{number}", **more)
    return Container(
        f"container-{number}", pod, env=(f"NVIDIA_VISIBLE_DEVICES={','.join(ids)}",), gpus=ids
    )
