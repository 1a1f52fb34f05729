"""This module says where an API server is and what proves who asks, in frozen dataclasses. Secrets never show in a
repr."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from podgpu.tls import NO_PEM, Pem


@dataclass(frozen=True, slots=True)
class ExecPlugin:
    """A command that prints a credential (`users[].user.exec` of a kubeconfig)."""

    command: str
    api_version: str
    args: tuple[str, ...] = field(default=(), repr=False)
    env: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    install_hint: str = ""
    cluster: Mapping[str, Any] | None = field(default=None, repr=False)
    """What the command is told about the cluster (`provideClusterInfo`); None: nothing."""


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """One API server and one way to be known to it."""

    server: str
    """URL without a slash at its end."""
    origin: str
    """Where all this was read, for messages: `the pod's service account`, `/root/.kube/config (context kind)`."""
    namespace: str = "default"
    ca: Pem = NO_PEM
    """None: the system's own certificate authorities."""
    verify: bool = True
    tls_server_name: str = ""
    certificate: Pem = NO_PEM
    key: Pem = NO_PEM
    token: str = field(default="", repr=False)
    token_file: str = ""
    """Wins over `token` once it could be read."""
    plugin: ExecPlugin | None = None
