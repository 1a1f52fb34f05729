"""What an API server's refusals and broken connections mean to the person who runs podgpu. Pure: touches nothing."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from podgpu.errors import SourceError

Object = dict[str, Any]
"""A JSON object, as the API has it."""

_LONGEST_WAIT = 300.0

_CERTIFICATE_PROBLEMS = {
    9: "is not valid yet: compare the clocks of both machines",
    10: "has expired: renew it (kubeadm certs renew apiserver), or compare the clocks of both machines",
    18: "is self-signed, and no certificate authority that podgpu was given: put it into certificate-authority",
    19: "comes from an authority that podgpu was not given: check certificate-authority",
    20: "comes from an authority that podgpu was not given: check certificate-authority",
    62: "is made out to another name: use a name it has in clusters[].cluster.server, or set tls-server-name",
    64: "is made out to another address: use one it has in clusters[].cluster.server, or set tls-server-name",
}
"""OpenSSL's verify codes -> what to do."""


class Refused(SourceError):
    """The server answered, and the answer is no. `retry_after`: seconds it asks us to stay away; 0: not said."""

    def __init__(self, reason: str, message: str, retry_after: float = 0.0) -> None:
        super().__init__(reason, message)
        self.retry_after = retry_after


def explain_status(
    status: int, body: bytes, headers: Mapping[str, str], path: str, origin: str, verbs: Sequence[str]
) -> Refused:
    """An answer other than 200. `verbs`: what the caller does with collections, for the rule to add."""
    said = api_sentence(body)
    quoted = f" ({said})" if said else ""
    wait = parse_retry_after(headers.get("Retry-After", ""))
    if status == 401:
        return Refused(
            "unauthorized", f"the API server does not know the credentials of {origin}{quoted}: renew or replace them"
        )
    if status == 403:
        return Refused("forbidden", f"{said or f'not allowed to read {path}'}: {rule_to_add(path, verbs)}")
    if status == 404:
        return Refused("not_found", f"the API server has no {path}{quoted}")
    if status == 410:
        return Refused(
            "gone", f"the API server has forgotten the version asked for of {path}{quoted}: it is listed anew"
        )
    if status == 429:
        return Refused("throttled", f"the API server has too much to do for {path}{quoted}: asked again later", wait)
    if status >= 500:
        return Refused("server_error", f"the API server failed on {path} with status {status}{quoted}", wait)
    if 300 <= status < 400:
        return Refused(
            "bad_answer", f"{path} is answered with a redirect, which is not followed: name the API server itself"
        )
    return Refused("bad_answer", f"the API server answered {path} with status {status}{quoted}")


def api_sentence(body: bytes) -> str:
    """The `message` of a Status object, or the beginning of whatever text came instead of one."""
    text = body[:2000].decode("utf-8", "replace")
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict):
        text = str(answer.get("message") or answer.get("reason") or "")
    words = " ".join("".join(one if one.isprintable() else " " for one in text).split())
    return words[:600]


def parse_retry_after(text: str) -> float:
    """API servers say seconds. A date, which HTTP allows too, counts as not said."""
    seconds = text.strip()
    if not seconds.isascii() or not seconds.isdigit():
        return 0.0
    return min(float(seconds[:9]), _LONGEST_WAIT)


def rule_to_add(path: str, verbs: Sequence[str]) -> str:
    """The RBAC rule without which `path` is refused."""
    parts = path.strip("/").split("/")
    group, rest = ("", parts[2:]) if parts[0] == "api" else ("/".join(parts[1:2]), parts[3:])
    role = "ClusterRole"
    if len(rest) > 2 and rest[0] == "namespaces":
        role, rest = f"Role in namespace {rest[1]}", rest[2:]
    if not rest:
        return f'add to podgpu\'s ClusterRole the rule {{nonResourceURLs: ["{path}"], verbs: ["get"]}}'
    allowed = ("get",) if len(rest) > 1 else verbs
    listed = ", ".join(f'"{verb}"' for verb in allowed)
    resource = "/".join([rest[0], *rest[2:]])
    return f'add to podgpu\'s {role} the rule {{apiGroups: ["{group}"], resources: ["{resource}"], verbs: [{listed}]}}'


def explain_failure(error: Exception, server: str, path: str) -> SourceError:
    """A request that got no answer, or half of one. `error` came from aiohttp, ssl or the operating system."""
    tls = _tls_error(error)
    if isinstance(tls, ssl.SSLCertVerificationError):
        problem = _CERTIFICATE_PROBLEMS.get(tls.verify_code, f"cannot be verified ({tls.verify_message})")
        return SourceError("tls", f"the certificate of {server} {problem}")
    if tls is not None:
        what = " ".join(str(tls.reason or tls).lower().replace("_", " ").split())[:200]
        return SourceError(
            "tls", f"no TLS connection to {server} ({what}): check the server's URL and port and the client certificate"
        )
    if isinstance(error, TimeoutError):
        return SourceError(
            "timeout", f"no answer from {server} for {path} in time: it hangs, or a firewall swallows what is sent"
        )
    if isinstance(error, aiohttp.ClientConnectorError):
        # asyncio's text tells the address; the system's tells why. Look-ups fail with numbers below zero.
        number = error.os_error.errno or 0
        why = os.strerror(number) if number > 0 else error.os_error.strerror or str(error.os_error)
        return SourceError(
            "unreachable", f"cannot connect to {server} ({why}): it is down, or a network policy is in the way"
        )
    if isinstance(error, aiohttp.InvalidURL | ValueError):
        return SourceError("bad_kubeconfig", f"{server} is no URL that can be asked: check clusters[].cluster.server")
    if isinstance(error, aiohttp.ClientResponseError):
        return SourceError("bad_answer", f"what answers at {server} does not speak HTTP as an API server does")
    why = " ".join(str(error).split())[:200] or type(error).__name__
    return SourceError("unreachable", f"the connection to {server} broke while reading {path} ({why})")


def _tls_error(error: BaseException) -> ssl.SSLError | None:
    """The TLS error in an exception of aiohttp, which keeps it in one of several places.

    aiohttp's own exceptions are named ssl errors too, but lack what an ssl error knows.
    """
    for one in (error, getattr(error, "certificate_error", None), getattr(error, "os_error", None), error.__cause__):
        if isinstance(one, ssl.SSLError) and not isinstance(one, aiohttp.ClientError):
            return one
    return None
