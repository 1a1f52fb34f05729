"""Exporters and owners from a simulated API server, over real HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from podgpu.errors import UsageError, texts_of
from podgpu.fleet.read.discover import ApiMap, KubernetesTargets, OwnerWatch, ServiceSelector
from podgpu.kube.config import ApiConfig
from podgpu.kube.objects import NODES_PATH, parse_node_labels
from podgpu.model import WorkloadOwner
from tests.kube.api_server import SimulatedApiServer
from tests.kube.conftest import HURRY, config, eventually, server
from tests.kube.test_objects import endpoint, endpoint_slice, owned_pod, owner

__all__ = ["config", "server"]
LABELS = {"app.kubernetes.io/name": "podgpu"}


def labelled(
    body: dict[str, Any], name: str, namespace: str = "monitoring", **labels: str
) -> dict[str, Any]:
    return body | {"metadata": {"name": name, "namespace": namespace, "labels": LABELS | labels}}


@contextmanager
def targets(
    config: ApiConfig, selector: str = "app.kubernetes.io/name=podgpu", **options: Any
) -> Iterator[KubernetesTargets]:
    found = KubernetesTargets(config, ServiceSelector.parse(selector), settings=HURRY, **options)
    try:
        yield found
    finally:
        found.close()


def test_endpoints_come_and_go(server: SimulatedApiServer, config: ApiConfig) -> None:
    server.put("endpointslices", labelled(endpoint_slice(endpoint("10.0.0.1", "a")), "one"))
    server.put("endpointslices", endpoint_slice(endpoint("10.9.9.9", "x"), name="another-app"))
    with targets(config) as found:
        assert found.wait_synced(30)
        assert found.urls() == ("http://10.0.0.1:9400/metrics",)
        assert not found.notes()
        server.put(
            "endpointslices",
            labelled(endpoint_slice(endpoint("10.0.0.2", "b")), "two", "elsewhere"),
        )
        eventually(lambda: len(found.urls()) == 2)
        server.remove("endpointslices", "one", "monitoring")
        eventually(lambda: found.urls() == ("http://10.0.0.2:9400/metrics",))
        server.remove("endpointslices", "two", "elsewhere")
        eventually(lambda: found.urls() == ())
        assert (
            "no Service with the labels app.kubernetes.io/name=podgpu has an endpoint"
            in texts_of(found.notes())
        )
    selectors = {request.path: request.query["labelSelector"] for request in server.requests}
    assert selectors["/apis/discovery.k8s.io/v1/endpointslices"] == "app.kubernetes.io/name=podgpu"


def test_a_hand_made_slice_without_the_services_labels(
    server: SimulatedApiServer, config: ApiConfig
) -> None:
    """The slice has only the label kubernetes.io/service-name. A slice of another Service of this
    name is ignored.
    """
    service = {"metadata": {"name": "exporters", "namespace": "monitoring", "labels": LABELS}}
    own = endpoint_slice(endpoint("10.0.0.7"), name="by-hand", service="exporters")
    other = labelled(own, "other", "elsewhere") | {"endpoints": [endpoint("10.9.9.9")]}
    other["metadata"]["labels"] = {"kubernetes.io/service-name": "exporters"}
    server.put("services", service)
    server.put("endpointslices", own, other)
    notes = set()
    with targets(config) as found:
        eventually(
            lambda: (
                notes.update(texts_of(found.notes()))
                or found.urls() == ("http://10.0.0.7:9400/metrics",)
            )
        )
        assert notes <= {"the API server has not yet returned the list of exporters"}
        server.put("endpointslices", labelled(endpoint_slice(endpoint("10.0.0.1", "a")), "one"))
        eventually(
            lambda: found.urls() == ("http://10.0.0.1:9400/metrics", "http://10.0.0.7:9400/metrics")
        )
        assert not found.notes()
        server.remove("services", "exporters", "monitoring")
        eventually(lambda: found.urls() == ("http://10.0.0.1:9400/metrics",))


def test_without_access_to_services_the_labels_of_slices_count(
    server: SimulatedApiServer, config: ApiConfig
) -> None:
    server.forbidden_paths = frozenset({"/api/v1/services"})
    server.put("endpointslices", labelled(endpoint_slice(endpoint("10.0.0.1", "a")), "one"))
    with targets(config) as found:
        eventually(lambda: found.urls() == ("http://10.0.0.1:9400/metrics",))
        assert not found.notes()


def test_one_namespace(server: SimulatedApiServer, config: ApiConfig) -> None:
    for number, namespace in enumerate(("a", "b")):
        server.put(
            "endpointslices",
            labelled(endpoint_slice(endpoint(f"10.0.0.{number}", namespace)), "s", namespace),
        )
    with targets(config, "b/app.kubernetes.io/name=podgpu", https=True) as found:
        assert found.wait_synced(30)
        assert found.urls() == ("https://10.0.0.1:9400/metrics",)


def test_while_the_api_server_is_away_the_last_list_stays(
    server: SimulatedApiServer, config: ApiConfig
) -> None:
    server.put("endpointslices", labelled(endpoint_slice(endpoint("10.0.0.1", "a")), "one"))
    with targets(config) as found:
        assert found.wait_synced(30)
        assert found.urls()
        server.stop()
        eventually(lambda: found.notes())
        assert found.urls() == ("http://10.0.0.1:9400/metrics",)
        assert found.notes()[0].text.startswith("the list of exporters may be out of date: ")
        server.start()
        eventually(lambda: not found.notes())


def test_a_missing_port_is_a_note(server: SimulatedApiServer, config: ApiConfig) -> None:
    server.put(
        "endpointslices", labelled(endpoint_slice(endpoint("10.0.0.1", "a"), ports=[]), "one")
    )
    with targets(config) as found:
        assert found.wait_synced(30)
        assert found.urls() == ()
        assert "no port named metrics" in found.notes()[0].text


@pytest.mark.parametrize(
    ("text", "namespace", "labels"),
    [
        ("app=podgpu", "", "app=podgpu"),
        ("monitoring/app=podgpu", "monitoring", "app=podgpu"),
        (
            "monitoring/app.kubernetes.io/name=podgpu,x=y",
            "monitoring",
            "app.kubernetes.io/name=podgpu,x=y",
        ),
        ("/team/name=podgpu", "", "team/name=podgpu"),
    ],
)
def test_selectors(text: str, namespace: str, labels: str) -> None:
    assert ServiceSelector.parse(text) == (namespace, labels)


@pytest.mark.parametrize("text", ["", "monitoring/", "a=\nb"])
def test_selectors_that_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--discover-kubernetes"):
        ServiceSelector.parse(text)


def test_owners_of_all_pods(server: SimulatedApiServer, config: ApiConfig) -> None:
    server.put("pods", owned_pod(owner("Job", "train")))
    kept = {"name": "kept", "namespace": "n", "annotations": {"podgpu.io/savings": "false"}}
    other = kept | {"name": "other", "annotations": {"podgpu.io/savings": "true"}}
    server.put("pods", {"metadata": kept})
    server.put("pods", {"metadata": other})
    owners = OwnerWatch(config, HURRY)
    try:
        assert owners.read() == {("n", "p"): WorkloadOwner("Job", "train")}
        assert owners.read_kept() == {("n", "kept")}
        server.remove("pods", "p", "n")
        eventually(lambda: owners.read() == {})
        assert not owners.notes()
        server.stop()
        eventually(lambda: owners.notes())
    finally:
        owners.close()
    accepted = [request.headers["Accept"] for request in server.requests]
    assert "as=PartialObjectMetadataList;" in accepted[0]
    assert any("as=PartialObjectMetadata;" in accept for accept in accepted[1:])


def test_labels_of_nodes(server: SimulatedApiServer, config: ApiConfig) -> None:
    server.put(
        "nodes",
        {"metadata": {"name": "n1", "labels": {"capacity": "spot"}}},
        {"metadata": {"name": "n2"}},
    )
    labels = ApiMap(config, NODES_PATH, parse_node_labels, "labels of nodes", HURRY)
    try:
        assert server.requests == [], "nodes are read only if prices need their labels"
        assert labels.read() == {"n1": {"capacity": "spot"}, "n2": {}}
        server.forbidden_paths = frozenset({"/api/v1/nodes"})
        server.stop()
        server.start()
        eventually(lambda: labels.notes())
        assert labels.read()["n2"] == {}
    finally:
        labels.close()
    server.stop()
    labels = ApiMap(config, NODES_PATH, parse_node_labels, "labels of nodes", HURRY)
    try:
        assert labels.read() == {}, "the first round does not wait for a failed server"
    finally:
        labels.close()


# A rollout
