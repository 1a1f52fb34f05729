"""Exporters and owners from a simulated API server over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from podgpu.cluster.publish import Publisher
from podgpu.cluster.scraping.backend import ScrapeBackend
from podgpu.cluster.scraping.discover import ApiOwners, KubernetesTargets, Selection, check_port
from podgpu.cluster.settings import ViewSettings
from podgpu.errors import UsageError
from podgpu.figures.device import Owner
from podgpu.kube.config import ApiConfig
from tests.cluster.test_scrape import Ticking, exporters, exposition_of
from tests.kube.api_server import SimulatedApiServer
from tests.kube.conftest import HURRY, config, eventually, server
from tests.kube.test_endpoint_slices import endpoint, slice_of
from tests.kube.test_pod_owners import owner, pod_of

__all__ = ["config", "server"]
LABELS = {"app.kubernetes.io/name": "podgpu"}


def labelled(body: dict[str, Any], name: str, namespace: str = "monitoring", **labels: str) -> dict[str, Any]:
    return body | {"metadata": {"name": name, "namespace": namespace, "labels": LABELS | labels}}


@contextmanager
def targets(
    config: ApiConfig, selector: str = "app.kubernetes.io/name=podgpu", **options: Any
) -> Iterator[KubernetesTargets]:
    found = KubernetesTargets(config, Selection.parse(selector), settings=HURRY, **options)
    try:
        yield found
    finally:
        found.close()


def test_endpoints_come_and_go(server: SimulatedApiServer, config: ApiConfig) -> None:
    server.put("endpointslices", labelled(slice_of(endpoint("10.0.0.1", "a")), "one"))
    server.put("endpointslices", slice_of(endpoint("10.9.9.9", "x"), name="another-app"))
    with targets(config) as found:
        assert found.wait_synced(30)
        assert found.urls() == ("http://10.0.0.1:9400/metrics",)
        assert found.notes() == ()
        assert found.urls() is found.urls()
        server.put("endpointslices", labelled(slice_of(endpoint("10.0.0.2", "b")), "two", "elsewhere"))
        eventually(lambda: len(found.urls()) == 2)
        server.remove("endpointslices", "one", "monitoring")
        eventually(lambda: found.urls() == ("http://10.0.0.2:9400/metrics",))
        server.remove("endpointslices", "two", "elsewhere")
        eventually(lambda: found.urls() == ())
        assert "no Service with the labels app.kubernetes.io/name=podgpu has an endpoint" in found.notes()
    asked = server.requests[0]
    assert asked.path == "/apis/discovery.k8s.io/v1/endpointslices"
    assert asked.query["labelSelector"] == "app.kubernetes.io/name=podgpu"


def test_one_namespace(server: SimulatedApiServer, config: ApiConfig) -> None:
    for number, namespace in enumerate(("a", "b")):
        server.put("endpointslices", labelled(slice_of(endpoint(f"10.0.0.{number}", namespace)), "s", namespace))
    with targets(config, "b/app.kubernetes.io/name=podgpu", port="1234", https=True) as found:
        assert found.wait_synced(30)
        assert found.urls() == ("https://10.0.0.1:1234/metrics",)


def test_while_the_api_server_is_away_the_last_ones_stay(server: SimulatedApiServer, config: ApiConfig) -> None:
    server.put("endpointslices", labelled(slice_of(endpoint("10.0.0.1", "a")), "one"))
    with targets(config) as found:
        assert found.wait_synced(30)
        assert found.urls()
        server.stop()
        eventually(lambda: found.notes())
        assert found.urls() == ("http://10.0.0.1:9400/metrics",)
        assert found.notes()[0].startswith("the list of exporters may be out of date: ")
        server.start()
        eventually(lambda: not found.notes())


def test_what_the_server_refuses_is_told(server: SimulatedApiServer, config: ApiConfig) -> None:
    server.refusal = (403, "endpointslices.discovery.k8s.io is forbidden")
    with targets(config) as found:
        eventually(lambda: "out of date" in found.notes()[0])
        assert found.urls() == ()
        assert "endpointslices" in found.notes()[0]


def test_a_port_that_is_not_clear_is_a_note(server: SimulatedApiServer, config: ApiConfig) -> None:
    server.put("endpointslices", labelled(slice_of(endpoint("10.0.0.1", "a"), ports=[]), "one"))
    with targets(config) as found:
        assert found.wait_synced(30)
        assert found.urls() == ()
        assert "--discover-port" in found.notes()[0]


@pytest.mark.parametrize(
    ("text", "namespace", "labels"),
    [
        ("app=podgpu", "", "app=podgpu"),
        ("monitoring/app=podgpu", "monitoring", "app=podgpu"),
        ("app.kubernetes.io/name=podgpu", "", "app.kubernetes.io/name=podgpu"),
        ("monitoring/app.kubernetes.io/name=podgpu,x=y", "monitoring", "app.kubernetes.io/name=podgpu,x=y"),
        ("/team/name=podgpu", "", "team/name=podgpu"),
        ("app=a/b", "", "app=a/b"),
    ],
)
def test_selectors(text: str, namespace: str, labels: str) -> None:
    assert Selection.parse(text) == (namespace, labels)


@pytest.mark.parametrize("text", ["", " ", "monitoring/", "/", "a=\nb"])
def test_what_is_no_selector(text: str) -> None:
    with pytest.raises(UsageError, match="--discover-kubernetes"):
        Selection.parse(text)


def test_ports() -> None:
    assert [check_port(text) for text in ("metrics", "9400", "http-2")] == ["metrics", "9400", "http-2"]
    for text in ("", "0", "65536", "A", "a b", "a/b", "-", "-a"):
        with pytest.raises(UsageError, match="--discover-port"):
            check_port(text)


# Owners


def test_owners_of_all_pods(server: SimulatedApiServer, config: ApiConfig) -> None:
    server.put("pods", pod_of(owner("Job", "train")))
    owners = ApiOwners(config, HURRY)
    try:
        assert owners.wait_synced(30)
        assert owners.all() == {("n", "p"): Owner("Job", "train")}
        assert owners.all() is owners.all()
        assert owners.of([("n", "p"), ("n", "q")]) == {("n", "p"): Owner("Job", "train")}
        server.remove("pods", "p", "n")
        eventually(lambda: owners.all() == {})
        assert owners.notes() == ()
        server.stop()
        eventually(lambda: owners.notes())
    finally:
        owners.close()
    accepted = [request.headers["Accept"] for request in server.requests]
    assert "as=PartialObjectMetadataList;" in accepted[0]
    assert any("as=PartialObjectMetadata;" in accept for accept in accepted[1:])


def named(name: str) -> dict[str, Any]:
    body = pod_of(owner("Job", "train"))
    return body | {"metadata": body["metadata"] | {"name": name}}


def test_owners_are_listed_in_expositions(server: SimulatedApiServer, config: ApiConfig) -> None:
    server.put("pods", *(named(f"p-{n}") for n in range(7)))
    owners = ApiOwners(config, HURRY, page_size=3)
    try:
        assert owners.wait_synced(30)
        assert sorted(owners.all()) == [("n", f"p-{n}") for n in range(7)]
        server.put("pods", named("later"))
        eventually(lambda: ("n", "later") in owners.all())
    finally:
        owners.close()
    lists = [request.query for request in server.requests if not request.watches]
    assert [query["limit"] for query in lists] == ["3", "3", "3"]
    assert ["continue" in query for query in lists] == [False, True, True]
    assert not any("resourceVersion" in query for query in lists), "a server's cache would give all of it at once"


@pytest.mark.fault(
    "the API server forgets a list of pods between two of its pages (410)",
    "the list begins anew, at once; no owner is missing",
)
@pytest.mark.parametrize("times", [1, 2, 5])
def test_a_list_whose_expositions_are_forgotten_begins_anew(
    server: SimulatedApiServer, config: ApiConfig, times: int
) -> None:
    server.put("pods", *(named(f"p-{n}") for n in range(7)))
    server.forget_pages = times
    owners = ApiOwners(config, HURRY, page_size=3)
    try:
        assert owners.wait_synced(30)
        assert sorted(owners.all()) == [("n", f"p-{n}") for n in range(7)]
        eventually(lambda: owners.notes() == ())
    finally:
        owners.close()


# What becomes of one that is not ready, or gone


@pytest.mark.fault(
    "an exporter's endpoint is not ready, then gone from the EndpointSlices, then replaced at another address",
    "it is asked on, marked old (node_up 0) after --stale-after, dropped after --drop-after; idle-since goes on",
)
def test_a_roll_out_loses_no_node(server: SimulatedApiServer, config: ApiConfig) -> None:
    asyncio.run(_roll_out(server, config))


async def _roll_out(server: SimulatedApiServer, config: ApiConfig) -> None:
    def publish_slices(*there: tuple[str, bool]) -> None:
        """Addresses are all 127.0.0.1: an exporter is told by its port, one slice each."""
        for name in ("one", "two"):
            server.remove("endpointslices", name, "monitoring")
        for name, (url, ready) in zip(("one", "two"), there, strict=False):
            port = [{"name": "metrics", "port": int(url.split(":")[2].partition("/")[0])}]
            body = slice_of(endpoint("127.0.0.1", name, ready=ready), ports=port)
            server.put("endpointslices", labelled(body, name))

    time, publisher = Ticking(), Publisher(ViewSettings(interval=15.0, stale_after=45.0, drop_after=300.0))
    exposition = exposition_of(1, 0).replace(b"Hostname", b'namespace="n",pod="train",Hostname')
    async with exporters(exposition, exposition) as fleet:
        before, after = fleet.urls
        publish_slices((before, True))
        with targets(config) as found:
            assert found.wait_synced(30)
            backend = ScrapeBackend(found, clock=time.clock())

            async def turn() -> tuple[str, bool, float] | None:
                await backend.turn()
                time.now += 15.0
                view = publisher.publish(backend.reading(), time.now, time.now, whole_round=True).view
                (holder,) = view.idle or (None,)
                return None if holder is None else (holder.node.target, holder.node.old, holder.since)

            first = await turn()
            assert first is not None
            since = first[2]
            assert first == (before, False, since)
            publish_slices((before, False))
            await asyncio.to_thread(eventually, lambda: found.urls() == (before,))
            assert await turn() == (before, False, since), "not ready, and answers all the same"
            fleet.status[0] = 503
            assert [await turn() for _ in range(3)][-1] == (before, True, since)
            assert [outcome.error for outcome in backend.reading().outcomes] == ["http_503"]
            publish_slices()
            await asyncio.to_thread(eventually, lambda: found.urls() == ())
            assert await turn() == (before, True, since), "gone from the slices, and old"
            assert backend.reading().outcomes == ()
            publish_slices((after, True))
            await asyncio.to_thread(eventually, lambda: found.urls() == (after,))
            assert await turn() == (after, False, since), "its successor, and as idle as before"
            publish_slices()
            await asyncio.to_thread(eventually, lambda: found.urls() == ())
            seen = [await turn() for _ in range(25)]
            assert (after, True, since) in seen
            assert seen[-1] is None, "dropped"
            await backend.close()
