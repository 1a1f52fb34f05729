"""A pod's maker: its controller, and behind a ReplicaSet of a Deployment the Deployment."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.kube.pods import PodOwner, parse_owner


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
    [{}, {"metadata": None}, pod_of(), pod_of(owner("A", "a", "true")), pod_of(owner("", "a")), pod_of(None, 7)],
)
def test_without_a_controller_there_is_none(body: dict[str, Any]) -> None:
    assert parse_owner(body) is None


names = st.sampled_from(["metadata", "name", "ownerReferences", "kind", "controller", "labels", "pod-template-hash"])
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=15,
)


@given(st.dictionaries(names, anything), anything)
def test_any_object_gives_an_owner_or_none(body: dict[str, Any], owners: Any) -> None:
    for one in (body, {"metadata": {"name": "p", "ownerReferences": owners}}):
        found = parse_owner(one)
        assert found is None or "/".join(found).encode()
