"""This module answers what the runtime asks a plugin: keeps what it told, and adjusts a container only with --inject.

One object for each connection: a runtime that comes back tells everything anew. Nothing here waits for a disk, a driver
or a lock that is held while one is waited for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from podgpu.errors import SourceError
from podgpu.hook import nri_pb2
from podgpu.hook.cards import Cards
from podgpu.hook.gpus import wanted_variable
from podgpu.hook.sandboxes import MOST_CONTAINERS, VISIBLE_DEVICES, Sandbox, Sandboxes, container_facts, synchronised
from podgpu.hook.tallies import Tallies

SERVICE = "nri.pkg.api.v1alpha1.Plugin"
RUNTIME = "nri.pkg.api.v1alpha1.Runtime"

_RUN_POD, _STOP_POD, _REMOVE_POD, _CREATE, _START, _UPDATE, _STOP, _REMOVE = 1, 2, 3, 4, 6, 8, 10, 11
EVENTS = sum(1 << number - 1 for number in (_RUN_POD, _STOP_POD, _REMOVE_POD, _CREATE, _START, _UPDATE, _STOP, _REMOVE))
"""What is followed. Every event costs a pod's start a question and an answer."""

_log = logging.getLogger("podgpu")
Offer = Callable[["Plugin", tuple[Sandbox, ...]], None]


class NoSuchMethod(Exception):
    """Not ours to answer: the runtime is told so, and asks in another way or not at all."""


class Plugin:
    def __init__(
        self,
        offer: Offer,
        tallies: Tallies,
        cards: Callable[[], Cards] = Cards,
        inject: bool = False,
    ) -> None:
        """`offer` gets this plugin and the whole picture after every change, once the runtime has told all it has."""
        self._offer = offer
        self._cards = cards
        self._inject = inject
        self._tallies = tallies
        self._sandboxes = Sandboxes()
        self._told: tuple[list[Any], list[Any]] = ([], [])
        """Pods and containers of a synchronisation that is not over."""
        self.is_synchronised = False
        self.request_timeout: float | None = None
        """Seconds after which the runtime gives up on an answer, as it said."""
        self._methods: dict[str, Callable[[bytes], bytes]] = {
            "Configure": self._configure,
            "Synchronize": self._synchronize,
            "Shutdown": lambda payload: b"",
            "CreateContainer": self._create,
            "StateChange": self._state_change,
            **{name: self._about(event) for name, event in _EVENT_OF_METHOD.items()},
        }

    @property
    def containers(self) -> int:
        return self._sandboxes.containers

    def answer(self, method: str, payload: bytes) -> bytes:
        """The answer's bytes. Raises NoSuchMethod, SourceError, or protobuf's DecodeError for what is no message."""
        answer = self._methods.get(method)
        if answer is None:
            raise NoSuchMethod(method)
        return answer(payload)

    def _configure(self, payload: bytes) -> bytes:
        asked = nri_pb2.ConfigureRequest.FromString(payload)
        if asked.request_timeout > 0:
            self.request_timeout = asked.request_timeout / 1000
        _log.info("registered with %s %s", asked.runtime_name or "the runtime", asked.runtime_version)
        if asked.config:
            _log.warning("the runtime has a configuration for this plugin, which is not read: options are its own")
        return _bytes(nri_pb2.ConfigureResponse(events=EVENTS))

    def _synchronize(self, payload: bytes) -> bytes:
        told = nri_pb2.SynchronizeRequest.FromString(payload)
        pods, containers = self._told
        pods += told.pods
        containers += told.containers
        if len(pods) > MOST_CONTAINERS or len(containers) > MOST_CONTAINERS:
            self._told = ([], [])
            raise SourceError("too_many", f"the runtime lists more than {MOST_CONTAINERS:,} containers at once")
        if told.more:
            return _bytes(nri_pb2.SynchronizeResponse(more=True))
        self._told = ([], [])
        self._sandboxes = synchronised(pods, containers)
        self.is_synchronised = True
        self._tallies.synchronised()
        _log.info("the runtime has listed all its containers: %d", self.containers)
        self._changed()
        return b""

    def _create(self, payload: bytes) -> bytes:
        about = nri_pb2.Subject.FromString(payload)
        self._follow(_CREATE, about.pod, about.container)
        value = self._wanted(about) if self._inject else None
        if value is None:
            return b""
        self._tallies.adjusted()
        # One that is there already may be another plugin's: set without being removed it would be refused, and the
        # container with it.
        keys = (f"-{VISIBLE_DEVICES}", VISIBLE_DEVICES) if _has_variable(about.container) else (VISIBLE_DEVICES,)
        env = [nri_pb2.KeyValue(key=key, value="" if key.startswith("-") else value) for key in keys]
        return _bytes(nri_pb2.CreateContainerResponse(adjust=nri_pb2.ContainerAdjustment(env=env)))

    def _wanted(self, about: Any) -> str | None:
        sandbox = self._sandboxes.get(about.pod.id)
        return wanted_variable(sandbox, container_facts(about.container), self._cards()) if sandbox else None

    def _state_change(self, payload: bytes) -> bytes:
        change = nri_pb2.StateChangeEvent.FromString(payload)
        self._follow(change.event, change.pod, change.container)
        return b""

    def _about(self, event: int) -> Callable[[bytes], bytes]:
        """Every answer but CreateContainer's and Synchronize's has nothing in it."""

        def answer(payload: bytes) -> bytes:
            about = nri_pb2.Subject.FromString(payload)
            self._follow(event, about.pod, about.container)
            return b""

        return answer

    def _follow(self, event: int, pod: Any, container: Any) -> None:
        if event == _RUN_POD:
            self._sandboxes.run(pod)
        elif event in (_STOP_POD, _REMOVE_POD):
            self._sandboxes.end(pod.id)
        elif event in (_STOP, _REMOVE):
            self._sandboxes.drop(container.id)
        elif event in (_CREATE, _START, _UPDATE):  # the later ones heal an earlier one that was missed
            self._sandboxes.put(pod, container)
        else:
            return
        self._changed()

    def _changed(self) -> None:
        if self.is_synchronised:
            self._offer(self, self._sandboxes.picture)


def _has_variable(container: Any) -> bool:
    return any(variable.startswith(f"{VISIBLE_DEVICES}=".encode()) for variable in container.env)


def _bytes(message: Any) -> bytes:
    encoded: bytes = message.SerializeToString()
    return encoded


_EVENT_OF_METHOD = {
    "RunPodSandbox": _RUN_POD,
    "StopPodSandbox": _STOP_POD,
    "RemovePodSandbox": _REMOVE_POD,
    "StartContainer": _START,
    "UpdateContainer": _UPDATE,
    "StopContainer": _STOP,
    "RemoveContainer": _REMOVE,
}
