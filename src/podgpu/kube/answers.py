"""This module tells the person who runs podgpu what an API server's refusals and broken connections mean. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from podgpu.errors import SourceError
from podgpu.http_client import Failure

Object = dict[str, Any]
"""A JSON object, as the API has it."""

_LONGEST_WAIT = 300.0

_TLS_ADVICE = "check server, certificate-authority, tls-server-name and the client certificate of the kubeconfig"


class Refused(SourceError):
    """The server answered, and the answer is no. `retry_after`: seconds it asks us to stay away; 0: not said."""

    def __init__(self, reason: str, message: str, retry_after: float = 0.0) -> None:
        super().__init__(reason, message)
        self.retry_after = retry_after


def explain_status(
    status: int, body: bytes, headers: Mapping[str, str], path: str, origin: str, verbs: Sequence[str]
) -> Refused:
    """An answer other than 200. `verbs`: what the caller does with collections, for the rule to add."""
    sentence = api_sentence(body)
    quoted = f" ({sentence})" if sentence else ""
    wait = parse_retry_after(headers.get("Retry-After", ""))
    if status == 401:
        return Refused(
            "unauthorized", f"the API server does not know the credentials of {origin}{quoted}: renew or replace them"
        )
    if status == 403:
        return Refused("forbidden", f"{sentence or f'not allowed to read {path}'}: {rule_to_add(path, verbs)}")
    if status == 404:
        return Refused("not_found", f"the API server has no {path}{quoted}")
    if status == 410:
        return Refused(
            "gone", f"the API server no longer has the version asked for of {path}{quoted}: podgpu lists it again"
        )
    if status == 429:
        return Refused("throttled", f"the API server is too busy for {path}{quoted}: asked again later", wait)
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
    words = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
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


def explain_failure(failure: Failure, server: str, path: str) -> SourceError:
    """A request that got no answer, or half of one."""
    if failure.reason == "tls":
        return SourceError("tls", f"no TLS connection to {server} ({failure.why}): {_TLS_ADVICE}")
    if failure.reason == "timeout":
        return SourceError(
            "timeout", f"no answer from {server} for {path} in time: it hangs, or a firewall swallows what is sent"
        )
    if failure.reason == "bad_url":
        return SourceError(
            "bad_kubeconfig", f"{server} is not a URL that can be asked: check clusters[].cluster.server"
        )
    if failure.reason == "not_http":
        return SourceError("bad_answer", f"what answers at {server} does not speak HTTP as an API server does")
    if failure.reason in ("truncated", "malformed"):
        return SourceError("unreachable", f"the connection to {server} broke while reading {path} ({failure.why})")
    return SourceError(
        "unreachable", f"cannot connect to {server} ({failure.why}): it is down, or a network policy is in the way"
    )
