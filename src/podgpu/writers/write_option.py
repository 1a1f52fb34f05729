"""Parses `--write`, and lists the permissions that its entries need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from podgpu.errors import UsageError

EVENTS = "events"
NODE_CONDITION = "condition"
TAINTS = "taints"
NVSENTINEL = "nvsentinel"
DEFAULT_SOCKET = "/var/run/nvsentinel/nvsentinel.sock"
"""NVSentinel mounts this directory of the host as its own /var/run."""


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
    for part in text.split(","):
        entry = part.strip()
        if not entry:
            continue

        name, _, argument = entry.partition(":")
        if name not in _ARGUMENTS:
            names = ", ".join(_ARGUMENTS)
            raise UsageError(f"--write {entry!r}: unknown; write some of {names}")

        possible = _ARGUMENTS[name]
        if argument and argument not in possible:
            choices = " or ".join(f"{name}:{choice}" for choice in possible)
            raise UsageError(f"--write {entry!r}: write {choices or name}")
        if name in arguments:
            raise UsageError(f"--write {text!r}: {name} is listed twice")

        arguments[name] = argument

    return WriterOptions(arguments)
