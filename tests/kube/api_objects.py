"""What a simulated API server holds and how it shows it: objects, versions, a history, a cache that may lag. Pure."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Object = dict[str, Any]
Key = tuple[str, str, str]
"""Resource, namespace, name."""
Store = dict[Key, Object]

KINDS = {
    "pods": "Pod",
    "configmaps": "ConfigMap",
    "nodes": "Node",
    "endpointslices": "EndpointSlice",
    "resourceslices": "ResourceSlice",
    "resourceclaims": "ResourceClaim",
}

_PATH = re.compile(
    r"/(?:api/v1|apis/(?P<discovery>discovery\.k8s\.io)/v1|apis/resource\.k8s\.io/(?P<version>v1|v1beta2|v1beta1|v1alpha3))"
    r"(?:/namespaces/(?P<namespace>[^/]+))?/(?P<resource>[a-z]+)(?:/(?P<name>[^/]+))?"
)
_FIELDS = ("metadata.name", "metadata.namespace", "spec.nodeName", "spec.driver", "status.phase")


class Change(NamedTuple):
    version: int
    key: Key
    before: Object | None
    after: Object | None


@dataclass(frozen=True, slots=True)
class Asked:
    """A path and a selector taken apart."""

    version: str
    resource: str
    namespace: str
    name: str
    selector: tuple[tuple[str, str], ...]
    labels: tuple[tuple[str, str], ...] = ()

    def takes(self, resource: str, one: Object | None) -> bool:
        if one is None or resource != self.resource:
            return False
        metadata = one["metadata"]
        if self.namespace and metadata.get("namespace") != self.namespace:
            return False
        held = metadata.get("labels") or {}
        if any(held.get(name) != value for name, value in self.labels):
            return False
        return all(_field(one, path) == value for path, value in self.selector)


def parse_asked(path: str, query: Mapping[str, str], resource_api_versions: Sequence[str]) -> Asked | None:
    """None: there is nothing of that name. Raises ValueError for a selector the server does not know."""
    found = _PATH.fullmatch(path)
    if found is None or found["resource"] not in KINDS:
        return None
    version = found["version"] or ""
    if bool(version) != (found["resource"] in ("resourceslices", "resourceclaims")):
        return None
    if bool(found["discovery"]) != (found["resource"] == "endpointslices"):
        return None
    if version and version not in resource_api_versions:
        return None
    selector = tuple(_pairs(query.get("fieldSelector", "")))
    labels = tuple(_label_pairs(query.get("labelSelector", "")))
    return Asked(version, found["resource"], found["namespace"] or "", found["name"] or "", selector, labels)


class Collections:
    """All objects under one counter of versions, as in etcd."""

    def __init__(self) -> None:
        self.version = 100
        self.oldest = 0
        """Versions before this one are forgotten."""
        self._store: Store = {}
        self._cache: tuple[int, Store] | None = None
        self._history: list[Change] = []

    def change(self, key: Key, after: Object | None) -> Change:
        self.version += 1
        before = self._store.pop(key, None)
        if after is not None:
            after = copy.deepcopy(after)
            known = before["metadata"]["uid"] if before else f"uid-{key[2]}-{self.version}"
            after["metadata"] = {"uid": known} | after["metadata"] | {"resourceVersion": str(self.version)}
            self._store[key] = after
        change = Change(self.version, key, before, after)
        self._history.append(change)
        return change

    def get(self, key: Key) -> Object | None:
        return self._store.get(key)

    def select(self, asked: Asked, wanted: str) -> tuple[int, list[Object]]:
        """The objects asked for and their version. Version 0 may be answered from the cache, and be late."""
        version, store = self.version, self._store
        if wanted == "0" and self._cache is not None:
            version, store = self._cache
        chosen = [shown(one, asked.version) for key, one in sorted(store.items()) if asked.takes(key[0], one)]
        return version, chosen

    def since(self, version: int, asked: Asked) -> Iterable[bytes]:
        for change in self._history:
            if change.version > version:
                yield from event_lines(change, asked)

    def compact(self) -> None:
        self.oldest = self.version
        self._history.clear()

    def start_anew(self) -> None:
        """A server that starts writes something of its own, and knows no version from before that."""
        self.version += 1
        self.compact()

    def rewind(self, version: int) -> None:
        self.version, self.oldest = version, 0
        self._history.clear()

    def freeze_cache(self) -> None:
        self._cache = self.version, copy.deepcopy(self._store)


def key_of(resource: str, one: Object) -> Key:
    return resource, one["metadata"].get("namespace", ""), one["metadata"]["name"]


def _field(one: Object, path: str) -> str:
    value: Any = one
    for word in path.split("."):
        value = value.get(word) if isinstance(value, dict) else None
    return "" if value is None else str(value)


def _pairs(selector: str) -> Iterable[tuple[str, str]]:
    for term in filter(None, selector.split(",")):
        path, equals, value = term.partition("=")
        if not equals or path not in _FIELDS:
            raise ValueError(f"Unable to find field selector {term!r}: field label not supported")
        yield path, value.removeprefix("=")


def _label_pairs(selector: str) -> Iterable[tuple[str, str]]:
    """Equality only: what `key=value,key=value` says."""
    for term in filter(None, selector.split(",")):
        name, equals, value = term.partition("=")
        if not equals or not name or set(term) & set("()! "):
            raise ValueError(f"unable to parse requirement: {term!r}")
        yield name, value.removeprefix("=")


def event_lines(change: Change, asked: Asked) -> Iterable[bytes]:
    """A change as a watch with a selector sees it: what enters the selection is added, what leaves it is deleted."""
    was, stays = (asked.takes(change.key[0], one) for one in (change.before, change.after))
    if stays and change.after is not None:
        yield event_line("MODIFIED" if was else "ADDED", shown(change.after, asked.version))
    elif was and change.before is not None:
        # The last word on an object has the version of its leaving.
        metadata = change.before["metadata"] | {"resourceVersion": str(change.version)}
        yield event_line("DELETED", shown(change.before | {"metadata": metadata}, asked.version))


def event_line(kind: str, one: Object) -> bytes:
    return json.dumps({"type": kind, "object": one}).encode() + b"\n"


def shown(one: Object, version: str) -> Object:
    """Slices are stored as v1 has them; until v1beta1 what a device is stood one level down, under `basic`."""
    devices = one.get("spec", {}).get("devices") or []
    if version not in ("v1beta1", "v1alpha3") or not isinstance(devices, list):  # a claim has an object there
        return one
    old = [{"name": each["name"], "basic": {k: v for k, v in each.items() if k != "name"}} for each in devices]
    return one | {"spec": one["spec"] | {"devices": old}}


def group(versions: Iterable[str]) -> Object:
    listed = [{"groupVersion": f"resource.k8s.io/{one}", "version": one} for one in versions]
    return {"kind": "APIGroup", "name": "resource.k8s.io", "versions": listed, "preferredVersion": listed[0]}


def status_object(code: int, message: str) -> Object:
    reason = {401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 410: "Expired"}.get(code, "InternalError")
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }
