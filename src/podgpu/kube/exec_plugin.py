"""This module runs a credential plugin (client.authentication.k8s.io) within bounds of time and output. It starts
processes.

What a plugin prints is a secret: of its output only the last line of stderr is ever repeated.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from podgpu.errors import SourceError
from podgpu.kube.access import ExecPlugin

REASON = "exec_plugin"

_MOST_OUTPUT = 1024 * 1024
_STDERR_KEPT = 4096
_LOOK_UP_SECONDS = 0.1  # how soon a run that is no longer wanted notices


@dataclass(frozen=True, slots=True)
class PluginCredential:
    token: str = field(default="", repr=False)
    certificate: str = field(default="", repr=False)
    key: str = field(default="", repr=False)
    expires: float | None = None
    """Unix time; None: not said."""


def run_plugin(plugin: ExecPlugin, seconds: float, unwanted: threading.Event) -> PluginCredential:
    """Blocks until the plugin ended. `unwanted`, once set, ends it early."""
    info = {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": _spec(plugin)}
    environment = {**os.environ, "KUBERNETES_EXEC_INFO": json.dumps(info), **dict(plugin.env)}
    try:
        process = subprocess.Popen(
            [plugin.command, *plugin.args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # so that what it started can be ended with it
        )
    except (OSError, ValueError) as error:
        hint = plugin.install_hint or "install it, or put its full path into the kubeconfig"
        reason = getattr(error, "strerror", None) or error
        raise SourceError(REASON, f"cannot run the credential plugin {plugin.command}: {reason}: {hint}") from error
    try:
        output = _read_output(process, plugin.command, time.monotonic() + seconds, unwanted)
    finally:
        _end(process)
    return parse_credential(output, plugin)


def _spec(plugin: ExecPlugin) -> dict[str, Any]:
    spec: dict[str, Any] = {"interactive": False}
    return spec if plugin.cluster is None else spec | {"cluster": plugin.cluster}


def _read_output(process: subprocess.Popen[bytes], command: str, until: float, unwanted: threading.Event) -> bytes:
    assert process.stdout is not None
    assert process.stderr is not None
    output, complaint = bytearray(), bytearray()
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ, output)
        ready.register(process.stderr, selectors.EVENT_READ, complaint)
        # A grandchild may hold stderr open for ever: the answer is complete when stdout is.
        while process.stdout in ready.get_map():
            _give_up_if_due(command, until, unwanted, complaint)
            for found, _ in ready.select(_LOOK_UP_SECONDS):
                piece = os.read(found.fd, 65536)
                found.data.extend(piece)
                if not piece:
                    ready.unregister(found.fileobj)
            del complaint[:-_STDERR_KEPT]
            if len(output) > _MOST_OUTPUT:
                raise SourceError(REASON, f"the credential plugin {command} printed more than 1 MiB: not a credential")
        while process.poll() is None:
            _give_up_if_due(command, until, unwanted, complaint)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_UP_SECONDS)
        if process.stderr in ready.get_map() and ready.select(0):
            complaint.extend(os.read(process.stderr.fileno(), _STDERR_KEPT))
    if process.returncode != 0:
        raise SourceError(
            REASON, f"the credential plugin {command} failed with exit code {process.returncode}{_last_line(complaint)}"
        )
    return bytes(output)


def _give_up_if_due(command: str, until: float, unwanted: threading.Event, complaint: bytearray) -> None:
    if unwanted.is_set():
        raise SourceError(REASON, f"the credential plugin {command} was stopped: podgpu is stopping")
    if time.monotonic() >= until:
        raise SourceError(REASON, f"the credential plugin {command} took too long and was ended{_last_line(complaint)}")


def _last_line(complaint: bytearray) -> str:
    lines = complaint.decode("utf-8", "replace").strip().splitlines()
    text = "".join(letter for letter in lines[-1] if letter.isprintable())[:300] if lines else ""
    return f": {text}" if text else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave neither a zombie nor an open pipe; one that has not ended by itself is ended with what it started."""
    if process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    process.wait()


def parse_credential(output: bytes, plugin: ExecPlugin) -> PluginCredential:
    try:
        answer = json.loads(output)
    except (ValueError, RecursionError):
        raise _bad(plugin, "is not JSON") from None
    if not isinstance(answer, dict) or answer.get("kind") != "ExecCredential":
        raise _bad(plugin, "is not an ExecCredential")
    if answer.get("apiVersion") != plugin.api_version:
        raise _bad(plugin, f"is not of the version the kubeconfig asks for, {plugin.api_version}")
    status = answer.get("status")
    if not isinstance(status, dict):
        raise _bad(plugin, "has no status")
    words = ("token", "clientCertificateData", "clientKeyData", "expirationTimestamp")
    token, certificate, key, expires = _texts(status, words, plugin)
    if bool(certificate) != bool(key) or not (token or certificate):
        raise _bad(plugin, "has neither a token nor a certificate with its key")
    return PluginCredential(token, certificate, key, _unix_time(expires, plugin) if expires else None)


def _texts(status: dict[str, object], words: Sequence[str], plugin: ExecPlugin) -> list[str]:
    found = [status.get(word) or "" for word in words]
    if not all(isinstance(value, str) for value in found):
        raise _bad(plugin, f"has something other than a text in {', '.join(words)}")
    return [str(value) for value in found]


def _unix_time(text: str, plugin: ExecPlugin) -> float:
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise _bad(plugin, "has an expirationTimestamp that is not a time") from None


def _bad(plugin: ExecPlugin, problem: str) -> SourceError:
    return SourceError(
        REASON, f"what the credential plugin {plugin.command} printed {problem}: run it by hand, or update it"
    )
