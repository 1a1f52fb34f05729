"""Parses `--write`, and opens the writers that it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from podgpu.clock import Clock
from podgpu.errors import UsageError
from podgpu.kube.client import ApiClient
from podgpu.kube.config import ApiConfig
from podgpu.writers.device_taints import TAINTS, Effect, TaintWriter
from podgpu.writers.health_writer import Session, Writer
from podgpu.writers.node_condition import NODE_CONDITION, NodeConditionWriter
from podgpu.writers.nvsentinel import DEFAULT_SOCKET, NVSENTINEL, SentinelWriter
from podgpu.writers.pod_events import EVENTS, EventWriter

_DEADLINE = 8.0  # seconds of one request


class Permission(NamedTuple):
    """What a writer needs in the cluster. The chart's role of the writer grants exactly this."""

    verb: str
    group: str
    resource: str
    subresource: str = ""


def _permit(verbs: str, group: str, resource: str) -> tuple[Permission, ...]:
    name, _, subresource = resource.partition("/")
    return tuple(Permission(verb, group, name, subresource) for verb in verbs.split())


PERMISSIONS: dict[str, tuple[Permission, ...]] = {
    # `get` finds an Event that was written before a restart.
    EVENTS: _permit("create get patch", "", "events"),
    NODE_CONDITION: _permit("get", "", "nodes") + _permit("patch", "", "nodes/status"),
    TAINTS: (
        _permit("list create patch delete", "resource.k8s.io", "devicetaintrules")
        + _permit("list", "resource.k8s.io", "resourceslices")
        # The Node owns the rules.
        + _permit("get", "", "nodes")
    ),
    NVSENTINEL: (),
}
"""By writer."""


@dataclass(frozen=True)
class WriterOptions:
    """The writers of `--write`, in its order, with their arguments."""

    arguments: dict[str, str]

    @property
    def needs_api(self) -> bool:
        """Returns False if nothing is written to the API server."""
        return any(self.permissions.values())

    @property
    def permissions(self) -> dict[str, tuple[Permission, ...]]:
        return {name: PERMISSIONS[name] for name in self.arguments}


_ARGUMENTS: dict[str, tuple[str, ...]] = {
    EVENTS: (),
    NODE_CONDITION: (),
    TAINTS: ("None", "NoSchedule"),
    NVSENTINEL: ("STORE_ONLY", "EXECUTE_REMEDIATION"),
}
"""Writer -> its possible arguments."""


def parse_write(text: str) -> WriterOptions:
    """Parses the value of `--write`. Raises UsageError if it is invalid."""
    arguments: dict[str, str] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        name, _, argument = entry.partition(":")
        if name not in _ARGUMENTS:
            names = ", ".join(_ARGUMENTS)
            raise UsageError(f"--write {entry!r}: unknown; write some of {names}")
        if argument and argument not in _ARGUMENTS[name]:
            choices = " or ".join(f"{name}:{choice}" for choice in _ARGUMENTS[name])
            raise UsageError(f"--write {entry!r}: write {choices or name}")
        if name in arguments:
            raise UsageError(f"--write {text!r}: {name} is listed twice")
        arguments[name] = argument
    return WriterOptions(arguments)


def make_session_opener(
    wanted: WriterOptions,
    config: ApiConfig,
    node: str,
    clock: Clock,
    sentinel_socket: str = DEFAULT_SOCKET,
) -> Callable[[], Session]:
    """`sentinel_socket`: path of NVSentinel's socket."""

    def open_session() -> Session:
        client = ApiClient(config, _DEADLINE)
        writers: list[Writer] = []
        for name, argument in wanted.arguments.items():
            if name == EVENTS:
                writers.append(EventWriter(client, node, clock))
            elif name == NODE_CONDITION:
                writers.append(NodeConditionWriter(client, node, clock))
            elif name == TAINTS:
                effect: Effect = "NoSchedule" if argument == "NoSchedule" else "None"
                writers.append(TaintWriter(client, node, effect, clock))
            elif name == NVSENTINEL:
                writers.append(SentinelWriter(sentinel_socket, node, argument, clock))
        return Session(writers, client)

    return open_session
