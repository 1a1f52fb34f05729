"""This module cuts the API server's pods down to what podgpu reads of them. Pure: objects in, small frozen records out.

A cluster's watcher holds thousands of these, and compares each with the one before to tell whether anything changed:
what nobody reads must not be in them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from sys import intern
from typing import Any, NamedTuple

# The API server's own uid of a static pod's image is known to nobody on the node. The kubelet names the pod's cgroups,
# logs and checkpoint entries by the uid it gave the pod itself, and notes that here.
_MIRROR = "kubernetes.io/config.mirror"

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ContainerRecord:
    name: str
    requests: Pairs = ()
    """Extended resources and their quantities as text, by name; the limit where there is one."""
    container_id: str = ""
    """Without the runtime's prefix; empty before it is made."""
    finished: bool = False
    """An init container that has done its work: it holds nothing any more."""

    def amount(self, resource: str) -> Fraction:
        """How much of a resource it asks for; 0 when it does not."""
        return next((_amount(text) for name, text in self.requests if name == resource), Fraction(0))


@dataclass(frozen=True, slots=True)
class PodRecord:
    namespace: str
    name: str
    uid: str
    """As the kubelet has it: of a static pod not the API server's, which nothing on the node goes by."""
    node: str = ""
    """Empty until it is bound to one."""
    phase: str = ""
    labels: Pairs = ()
    annotations: Pairs = ()
    """Only those the caller of `parse_pod` reads."""
    init_containers: tuple[ContainerRecord, ...] = ()
    containers: tuple[ContainerRecord, ...] = ()
    api_uid: str = ""
    """The API server's own uid of a static pod, which people know it by; empty where it is the same."""

    @property
    def is_finished(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    def annotation(self, key: str) -> str:
        """Empty when there is none."""
        return next((text for name, text in self.annotations if name == key), "")


def parse_pod(body: object, is_read: Callable[[str], bool] = lambda _: False) -> PodRecord | None:
    """A Pod object of the API; None when it is none. Parts that are not of the right type count as absent.

    `is_read`: which annotations to keep, by name.
    """
    whole = _object(body)
    metadata, spec, status = (_object(whole.get(key)) for key in ("metadata", "spec", "status"))
    name, uid = _text(metadata.get("name")), _text(metadata.get("uid"))
    if not name or not uid:
        return None
    annotations = dict(_texts(metadata.get("annotations")))
    on_node = annotations.get(_MIRROR) or uid
    return PodRecord(
        intern(_text(metadata.get("namespace"))),
        name,
        on_node,
        intern(_text(spec.get("nodeName"))),
        intern(_text(status.get("phase"))),
        tuple(sorted((intern(key), intern(text)) for key, text in _texts(metadata.get("labels")))),
        tuple(sorted((intern(key), text) for key, text in annotations.items() if is_read(key))),
        tuple(_containers(spec.get("initContainers"), status.get("initContainerStatuses"), ends=True)),
        tuple(_containers(spec.get("containers"), status.get("containerStatuses"))),
        uid if uid != on_node else "",
    )


def _containers(value: object, statuses: object, ends: bool = False) -> Iterator[ContainerRecord]:
    """One record for each, in their order: annotations name containers by their number."""
    status_of = {_text(status.get("name")): status for status in map(_object, _list(statuses))}
    for container in map(_object, _list(value)):
        name = _text(container.get("name"))
        status = status_of.get(name, {})
        yield ContainerRecord(
            intern(name),
            _requests(container.get("resources")),
            _text(status.get("containerID")).rpartition("://")[2],
            ends and _succeeded(status.get("state")),
        )


def _requests(value: object) -> Pairs:
    """Resources with a domain only: cpu and memory are not what podgpu is about."""
    resources = _object(value)
    asked = {**_object(resources.get("requests")), **_object(resources.get("limits"))}
    quantities = ((name, str(amount) if type(amount) is int else _text(amount)) for name, amount in asked.items())
    return tuple(sorted((intern(name), intern(text)) for name, text in quantities if "/" in _text(name) and text))


def _succeeded(state: object) -> bool:
    """One that failed is run again, or the pod fails."""
    terminated = _object(state).get("terminated")
    return isinstance(terminated, dict) and terminated.get("exitCode") == 0


def _object(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _texts(value: object) -> Iterator[tuple[str, str]]:
    return (
        (key, text) for key, text in _object(value).items() if _text(key) and isinstance(text, str) and _whole(text)
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) and _whole(value) else ""


def _whole(text: str) -> bool:
    """Half a surrogate pair is JSON, but no exposition could carry it."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


# Who made a pod

PODS_PATH = "/api/v1/pods"
_HASH_LABEL = "pod-template-hash"


class PodOwner(NamedTuple):
    """What made a pod. Small: there may be 100,000 of them."""

    namespace: str
    pod: str
    kind: str
    name: str


def parse_owner(body: Mapping[str, Any]) -> PodOwner | None:
    """Of a Pod, or of its metadata alone; None: nothing controls it. Never raises."""
    metadata = _object(body.get("metadata"))
    namespace, pod = _text(metadata.get("namespace")), _text(metadata.get("name"))
    owners = metadata.get("ownerReferences")
    controllers = (o for o in map(_object, owners if isinstance(owners, list) else ()) if o.get("controller") is True)
    controller = next(controllers, {})
    kind, name = _text(controller.get("kind")), _text(controller.get("name"))
    if not pod or not kind or not name:
        return None
    template = _text(_object(metadata.get("labels")).get(_HASH_LABEL))
    if kind == "ReplicaSet" and template and name.removesuffix(f"-{template}") not in (name, ""):
        # A Deployment names its ReplicaSets so, and nobody else writes this label.
        kind, name = "Deployment", name.removesuffix(f"-{template}")
    return PodOwner(intern(namespace), pod, intern(kind), intern(name))


# Quantities

_QUANTITY = re.compile(
    r"\+?(?P<whole>\d{0,30})(?:\.(?P<part>\d{0,30}))?(?:(?P<unit>[KMGTPE]i|[numkMGTPE])|[eE](?P<power>[+-]?\d{1,2}))?",
    re.ASCII,
)
_UNITS = {
    **{unit: Fraction(10) ** power for unit, power in zip("numkMGTPE", (-9, -6, -3, 3, 6, 9, 12, 15, 18), strict=True)},
    **{f"{unit}i": Fraction(1024) ** power for power, unit in enumerate("KMGTPE", 1)},
}


def parse_quantity(text: str) -> Fraction:
    """A quantity as Kubernetes writes it: `50`, `500m`, `8Gi`, `1e3`. ValueError for anything else, and below zero."""
    match = _QUANTITY.fullmatch(text)
    if match is None or not (match["whole"] or match["part"]):
        raise ValueError(f"{text[:40]!a} is not a quantity")
    digits = match["part"] or ""
    number = Fraction(int(match["whole"] + digits), 10 ** len(digits))
    return number * _UNITS.get(match["unit"], Fraction(1)) * Fraction(10) ** int(match["power"] or 0)


def _amount(text: str) -> Fraction:
    try:
        return parse_quantity(text)
    except ValueError:
        return Fraction(0)
