"""What an API server, a credential plugin or a browser may send: objects, events, texts of refusals, logins."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from endurance.fuzz.mutate import Case, documents, texts
from endurance.fuzz.target import Target
from endurance.fuzz.targets_holders import PODS
from podgpu.configuration.pod_labels import LabelFilter
from podgpu.kube.client import api_sentence, parse_retry_after
from podgpu.kube.config import ExecPlugin
from podgpu.kube.events import Lines, is_older, parse_event, parse_list, uid
from podgpu.kube.exec_plugin import parse_credential
from podgpu.kube.objects import choose_version, parse_endpoint_slice, parse_owner, parse_pod
from podgpu.web.auth import parse_basic

_METADATA = {"name": "x", "namespace": "n", "uid": "u", "resourceVersion": "12"}
_EVENTS = (
    {"type": "ADDED", "object": {"metadata": _METADATA}},
    {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}},
    {"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too\nold"}},
)
_LIST = {"items": [{"metadata": _METADATA}], "metadata": {"resourceVersion": "5"}}
_OWNED = {
    "metadata": {
        **_METADATA,
        "labels": {"pod-template-hash": "5d9"},
        "ownerReferences": [{"kind": "ReplicaSet", "name": "web-5d9", "controller": True}],
    }
}
_ENDPOINTS = {
    "metadata": {**_METADATA, "labels": {"kubernetes.io/service-name": "podgpu"}},
    "ports": [{"name": "metrics", "port": 9400, "appProtocol": "https"}],
    "endpoints": [
        {
            "addresses": ["10.0.0.1", "fd00::1"],
            "conditions": {"ready": True},
            "nodeName": "n",
            "targetRef": {"uid": "u"},
        },
        {"addresses": ["10.0.0.2"], "conditions": {"ready": False}},
    ],
}
_GROUP = {"versions": [{"version": "v1"}, {"version": "v1beta1"}], "preferredVersion": {"version": "v1"}}
_PLUGIN = ExecPlugin("plugin", "client.authentication.k8s.io/v1")
_CREDENTIAL = {
    "kind": "ExecCredential",
    "apiVersion": "client.authentication.k8s.io/v1",
    "status": {"token": "t", "expirationTimestamp": "2030-01-01T00:00:00Z"},
}


def of_object(parse: Callable[[Mapping[str, Any]], object]) -> Callable[[Case], object]:
    """For what is given an object of the API and must never raise. Labels it yields can stand on an exposition."""

    def run(case: Case) -> object:
        try:
            body = json.loads(case)
        except (ValueError, RecursionError):
            return None
        found = parse(body) if isinstance(body, dict) else None
        if found is not None:
            hash(found)
        return found

    return run


def pod(case: Case) -> object:
    """Every text of a pod can be written as UTF-8, and every label it keeps has a label's name."""
    try:
        found = parse_pod(json.loads(case))
    except (ValueError, RecursionError):
        return None
    if found is None:
        return None
    named = LabelFilter().of([found])
    for pairs in named.values():
        assert len({name for name, _ in pairs}) == len(pairs), "one label twice"
        assert all(name.isidentifier() and name.isascii() for name, _ in pairs), "a name no label may have"
    repr(named).encode()
    "".join((found.namespace, found.name, found.uid, found.node)).encode()
    return found


def event(case: Case) -> object:
    """However the stream is cut, the same lines come out of it."""
    assert isinstance(case, bytes)
    whole, pieces = Lines(1 << 20), Lines(1 << 20)
    lines = whole.feed(case + b"\n")
    cut = [line for at in range(0, len(case), 7) for line in pieces.feed(case[at : at + 7])] + pieces.feed(b"\n")
    assert lines == cut, "how it was cut changes what it says"
    for line in lines:
        found = parse_event(line)
        is_older(found.version, "10")
    return lines or None


def listed(case: Case) -> object:
    """The objects handed on are those that JSON has."""
    assert isinstance(case, bytes)
    found: list[Mapping[str, Any]] = []
    assert parse_list(case, found.append).version
    try:
        whole = json.loads(case)
    except ValueError:
        return None
    assert repr(found) == repr(whole.get("items") or []), "other objects than the list has"
    return [uid(item) for item in found] or None


def refusal(case: Case) -> object:
    assert isinstance(case, bytes)
    sentence = api_sentence(case)
    sentence.encode()
    assert len(sentence) <= 600
    assert "\n" not in sentence
    return sentence or None


def retry_after(case: Case) -> object:
    assert isinstance(case, str)
    seconds = parse_retry_after(case)
    assert math.isfinite(seconds)
    assert 0 <= seconds < 3600
    return seconds or None


def login(case: Case) -> object:
    assert isinstance(case, str)
    found = parse_basic(case)
    return found


def credential(case: Case) -> object:
    assert isinstance(case, bytes)
    found = parse_credential(case, _PLUGIN)
    assert found.token or found.certificate
    return found


_LOGINS = [f"Basic {base64.b64encode(text).decode()}" for text in (b"a:b", b"a", b":", b"\xff:\xfe", b"a:" + b"x" * 99)]

API_TARGETS = (
    Target("pods", documents(PODS), pod),
    Target("watch-events", documents(_EVENTS), event),
    Target("lists", documents([_LIST]), listed),
    Target("owners", documents([_OWNED]), of_object(parse_owner)),
    Target("endpoint-slices", documents([_ENDPOINTS]), of_object(parse_endpoint_slice)),
    Target("api-versions", documents([_GROUP]), of_object(choose_version)),
    Target("api-refusals", documents([{"message": "a\nb", "reason": "Forbidden"}, "text"]), refusal),
    Target("retry-after", texts(["3", " 5 ", "Wed, 21 Oct 2026 07:28:00 GMT"]), retry_after),
    Target("exec-credential", documents([_CREDENTIAL]), credential),
    Target(
        "login-header",
        texts(
            _LOGINS,
            ("Basic ", "basic", "=="),
        ),
        login,
    ),
)
