"""A pod's maker: its controller, and behind a ReplicaSet of a Deployment the Deployment."""

from __future__ import annotations

from typing import Any

import pytest

from podgpu.kube.objects import PodOwner, parse_owner


def pod_of(*owners: Any, **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": "p", "namespace": "n", "labels": labels, "ownerReferences": list(owners)}}


def owner(kind: str, name: str, controller: Any = True) -> dict[str, Any]:
    return {"kind": kind, "name": name, "uid": "u", "controller": controller}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (pod_of(owner("StatefulSet", "db")), ("StatefulSet", "db")),
        (pod_of(owner("Job", "train")), ("Job", "train")),
        (pod_of(owner("ReplicaSet", "chat-7d9c"), **{"pod-template-hash": "7d9c"}), ("Deployment", "chat")),
        (pod_of(owner("ReplicaSet", "chat-7d9c")), ("ReplicaSet", "chat-7d9c")),
        (pod_of(owner("ReplicaSet", "chat-7d9c"), **{"pod-template-hash": "other"}), ("ReplicaSet", "chat-7d9c")),
        (pod_of(owner("ReplicaSet", "-7d9c"), **{"pod-template-hash": "7d9c"}), ("ReplicaSet", "-7d9c")),
        (pod_of(owner("Job", "chat-7d9c"), **{"pod-template-hash": "7d9c"}), ("Job", "chat-7d9c")),
        (pod_of(owner("A", "a", None), owner("B", "b", False), owner("C", "c")), ("C", "c")),
    ],
)
def test_owners(body: dict[str, Any], expected: tuple[str, str]) -> None:
    assert parse_owner(body) == PodOwner("n", "p", *expected)


@pytest.mark.parametrize(
    "body",
    [{"metadata": {"name": "p"}}, pod_of(), pod_of(owner("A", "a", False))],
)
def test_without_a_controller_there_is_none(body: dict[str, Any]) -> None:
    assert parse_owner(body) is None
