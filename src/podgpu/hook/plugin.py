"""Tracks the runtime's sandboxes and containers, and answers its requests. Adjusts containers only with --inject.

This module never waits for a disk, a driver or a lock, because the runtime waits for the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from podgpu.hook import HookCounters, nri_pb2
from podgpu.hook.devices import VISIBLE_DEVICES, Cards, Sandbox, find_assigned, read_variables

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
"""Subscribed events by number. Each one adds a request to every pod start."""
EVENTS = sum(1 << number - 1 for number in _METHODS)
_STOPPED = 4
_log = logging.getLogger("podgpu")


class Plugin:
    """State of one connection. After a reconnect, the runtime reports everything again to a new Plugin."""

    def __init__(
        self,
        on_change: Callable[[tuple[Sandbox, ...]], None],
        counters: HookCounters,
        cards: Callable[[], Cards] | None = None,
    ) -> None:
        """Calls `on_change` with all sandboxes after every change, once the runtime has reported all containers.

        With `cards`, sets NVIDIA_VISIBLE_DEVICES of new containers (--inject).
        """
        self._on_change = on_change
        self._cards = cards
        self._counters = counters
        self._sandboxes: dict[str, Sandbox] = {}
        self._reported_pods: list[Any] = []  # parts of an unfinished Synchronize
        self._reported_containers: list[Any] = []
        self.is_synchronised = False

    @property
    def containers(self) -> int:
        return sum(len(sandbox.containers) for sandbox in self.sandboxes)

    @property
    def sandboxes(self) -> tuple[Sandbox, ...]:
        return tuple(self._sandboxes.values())

    def answer(self, method: str, payload: bytes) -> bytes:
        """Returns the encoded response. Raises NotImplementedError, SourceError or protobuf's DecodeError."""
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
        _log.info("registered with %s %s", request.runtime_name or "the runtime", request.runtime_version)
        return _encode(nri_pb2.ConfigureResponse(events=EVENTS))

    def _synchronize(self, payload: bytes) -> bytes:
        request = nri_pb2.SynchronizeRequest.FromString(payload)
        self._reported_pods += request.pods
        self._reported_containers += request.containers
        if request.more:
            return _encode(nri_pb2.SynchronizeResponse(more=True))
        self._sandboxes = {}
        for pod in self._reported_pods:
            self._add(pod)
        # If two containers have the same name, the newer one is running.
        for container in sorted(self._reported_containers, key=lambda container: container.created_at):
            if container.pod_sandbox_id in self._sandboxes:
                self._put_container(self._sandboxes[container.pod_sandbox_id].pod, container)
        self._reported_pods, self._reported_containers = [], []
        self.is_synchronised = True
        self._counters.add("podgpu_hook_synchronisations_total")
        _log.info("the runtime reported all its containers: %d", self.containers)
        self._publish()
        return b""

    def _create(self, payload: bytes) -> bytes:
        subject = nri_pb2.Subject.FromString(payload)
        self._apply("CreateContainer", subject.pod, subject.container)
        sandbox = self._sandboxes.get(subject.pod.id)
        if self._cards is None or sandbox is None:
            return b""
        value = ",".join(find_assigned(sandbox.pod, self._cards()))
        if not value or value == read_variables(subject.container).get(VISIBLE_DEVICES, ""):
            return b""
        self._counters.add("podgpu_hook_adjustments_total")
        env = [nri_pb2.KeyValue(key=VISIBLE_DEVICES, value=value)]
        if any(variable.startswith(f"{VISIBLE_DEVICES}=".encode()) for variable in subject.container.env):
            # Another plugin may have set the variable. Without removal, the runtime would reject the container.
            env.insert(0, nri_pb2.KeyValue(key=f"-{VISIBLE_DEVICES}", value=""))
        return _encode(nri_pb2.CreateContainerResponse(adjust=nri_pb2.ContainerAdjustment(env=env)))

    def _apply(self, method: str, pod: Any, container: Any) -> None:
        if method == "RunPodSandbox":
            self._add(pod)
        elif method in ("StopPodSandbox", "RemovePodSandbox"):
            self._sandboxes.pop(pod.id, None)
        elif method in ("StopContainer", "RemoveContainer"):
            self._remove_container(container.id)
        elif method:  # start and update events make up for a missed creation
            self._put_container(pod, container)
        self._publish()

    def _add(self, pod: Any) -> None:
        """Adds a sandbox. Removes older sandboxes of the same pod, whose stop event may have been missed."""
        for sandbox in self.sandboxes:
            if pod.uid and sandbox.pod.uid == pod.uid and sandbox.pod.id != pod.id:
                del self._sandboxes[sandbox.pod.id]
        known = self._sandboxes.get(pod.id)
        self._sandboxes[pod.id] = Sandbox(pod, known.containers if known else ())

    def _put_container(self, pod: Any, container: Any) -> None:
        """Adds a container. Replaces an older one with the same name, whose stop event may have been missed."""
        self._remove_container(container.id)
        if container.state == _STOPPED:
            return
        known = self._sandboxes.get(pod.id, Sandbox(pod))
        others = (other for other in known.containers if other.name != container.name)
        # When a container ends, the runtime may send only the id of the pod.
        self._sandboxes[pod.id] = Sandbox(pod if pod.name else known.pod, (*others, container))

    def _remove_container(self, container_id: str) -> None:
        for sandbox in self.sandboxes:
            kept = tuple(container for container in sandbox.containers if container.id != container_id)
            if len(kept) < len(sandbox.containers):
                self._sandboxes[sandbox.pod.id] = Sandbox(sandbox.pod, kept)

    def _publish(self) -> None:
        if self.is_synchronised:
            self._on_change(self.sandboxes)


def _encode(message: Any) -> bytes:
    encoded: bytes = message.SerializeToString()
    return encoded
