"""Who made which pod, for all pods of a cluster: small tuples, for there may be 100,000. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from sys import intern
from typing import Any, NamedTuple

PODS_PATH = "/api/v1/pods"
_HASH_LABEL = "pod-template-hash"


class PodOwner(NamedTuple):
    namespace: str
    pod: str
    kind: str
    name: str


def parse_owner(body: Mapping[str, Any]) -> PodOwner | None:
    """Of a Pod, or of its metadata alone; None: nothing controls it. Never raises."""
    metadata = _mapping(body.get("metadata"))
    namespace, pod = _text(metadata.get("namespace")), _text(metadata.get("name"))
    owners = metadata.get("ownerReferences")
    controllers = (o for o in map(_mapping, owners if isinstance(owners, list) else ()) if o.get("controller") is True)
    controller = next(controllers, {})
    kind, name = _text(controller.get("kind")), _text(controller.get("name"))
    if not pod or not kind or not name:
        return None
    template = _text(_mapping(metadata.get("labels")).get(_HASH_LABEL))
    if kind == "ReplicaSet" and template and name.removesuffix(f"-{template}") not in (name, ""):
        # A Deployment names its ReplicaSets so, and nobody else writes this label.
        kind, name = "Deployment", name.removesuffix(f"-{template}")
    return PodOwner(intern(namespace), pod, intern(kind), intern(name))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    """Half a surrogate pair is JSON, but no page could carry it."""
    return value if isinstance(value, str) and value.encode(errors="replace").decode() == value else ""
