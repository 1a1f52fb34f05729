"""The certificate that podgpu creates, and the caBundle of its APIServices."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from podgpu.kube.client import ApiClient
from podgpu.kube.config import ApiConfig
from podgpu.scale.metrics_api import (
    MAX_CERTIFICATES,
    CaBundleUpdater,
    issue,
    merge_bundle,
    parse_bundle,
)
from podgpu.tls import load_pair

SERVED, HOST = "podgpu/podgpu-autoscale", "podgpu-autoscale.podgpu.svc"
NAMES = ("v1beta2.custom.metrics.k8s.io", "v1beta1.custom.metrics.k8s.io")
NOW = datetime(2026, 11, 1, tzinfo=UTC)


def issued(replica: str, age: int = 0) -> x509.Certificate:
    return issue(HOST, replica, NOW + timedelta(seconds=age))[0]


def pem(*certificates: x509.Certificate) -> str:
    return "".join(each.public_bytes(Encoding.PEM).decode() for each in certificates)


def test_a_client_with_the_bundle_accepts_the_certificate() -> None:
    own, certificate, key = issue(HOST, "replica")
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_pair(server_context, certificate.read(), key.read(), "podgpu's pair")
    client_context = ssl.create_default_context(cadata=merge_bundle(pem(issued("other")), own))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context.wrap_bio(incoming, outgoing, server_side=True)
    client = client_context.wrap_bio(outgoing, incoming, server_hostname=HOST)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    assert client.getpeercert()["subjectAltName"] == (("DNS", HOST),)  # type: ignore[index]


@pytest.mark.fault(
    "a replica of podgpu autoscale crashes repeatedly",
    "its previous certificate is removed from the APIServices' bundles; "
    "the healthy replica's stays",
)
def test_a_restarted_replica_replaces_its_own_certificate_only() -> None:
    healthy, bundle = issued("healthy"), ""
    bundle = merge_bundle(pem(healthy), issued("crashing"))
    for age in range(MAX_CERTIFICATES):
        last = issued("crashing", age)
        bundle = merge_bundle(bundle, last)
    assert parse_bundle(bundle) == [last, healthy]


def test_a_bundle_keeps_the_newest_certificates() -> None:
    others = [issued(f"pod-{age}", age) for age in range(MAX_CERTIFICATES + 5)]
    own = issued("own")
    kept = parse_bundle(merge_bundle(pem(*others), own))
    assert kept == [own, *reversed(others[6:])]
    assert parse_bundle(merge_bundle("garbage", own)) == [own]


_APISERVICES = "/apis/apiregistration.k8s.io/v1/apiservices/{name}"


@dataclass
class ApiDouble:
    """A simulated API server. Its attributes may be changed while it runs."""

    services: dict[str, dict[str, Any]] = field(default_factory=dict)
    """APIServices by name."""
    patches: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    changes_after_get: bool = False
    """Another client changes the APIService after each GET."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ApiClient]:
        app = web.Application()
        app.router.add_get(_APISERVICES, self._get)
        app.router.add_patch(_APISERVICES, self._patch)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            async with ApiClient(ApiConfig(url, "the test"), deadline=5.0) as client:
                yield client
        finally:
            await runner.cleanup()

    async def _get(self, request: web.Request) -> web.Response:
        found = self.services.get(request.match_info["name"])
        if found is None:
            raise web.HTTPNotFound(text='{"message":"not found"}')
        answer = web.json_response(found)
        if self.changes_after_get:
            found["metadata"]["resourceVersion"] += "0"
        return answer

    async def _patch(self, request: web.Request) -> web.Response:
        """Applies a merge patch. Rejects a patch of an older version."""
        name = request.match_info["name"]
        assert request.content_type == "application/merge-patch+json"
        patch, found = json.loads(await request.read()), self.services[name]
        self.patches.append((name, patch))
        version = patch["metadata"]["resourceVersion"]
        if version != found["metadata"]["resourceVersion"]:
            return web.json_response(
                {"message": "the object has been modified", "code": 409}, status=409
            )
        found["spec"] |= patch["spec"]
        found["metadata"]["resourceVersion"] = str(int(version) + 1)
        return web.json_response(found)


def api_service(namespace: str = "podgpu", name: str = "podgpu-autoscale") -> dict[str, Any]:
    spec = {"service": {"namespace": namespace, "name": name, "port": 443}}
    return {"metadata": {"resourceVersion": "1"}, "spec": spec}


class Replica:
    def __init__(self, api: ApiDouble, name: str = "first") -> None:
        self.api = api
        self.certificate = issue(HOST, name)[0]

    def update(self, times: int = 1) -> bool:
        """Returns True if the updater is ready after this number of updates."""

        async def run() -> bool:
            async with self.api.running() as client:
                updater = CaBundleUpdater(client, self.certificate, NAMES, SERVED)
                for _ in range(times):
                    await updater.update()
                return updater.ready

        return asyncio.run(run())


def make_api() -> ApiDouble:
    return ApiDouble(services={name: api_service() for name in NAMES})


def bundle_of(api: ApiDouble) -> set[x509.Certificate]:
    return {
        *parse_bundle(base64.b64decode(api.services[NAMES[0]]["spec"].get("caBundle", "")).decode())
    }


def test_the_certificate_is_added_to_the_apiservices_and_nothing_else_is_changed() -> None:
    replica = Replica(api := make_api())
    assert replica.update(2)
    assert [name for name, _ in api.patches] == list(NAMES)
    assert {*api.patches[0][1]["spec"]} == {"caBundle", "insecureSkipTLSVerify"}
    assert bundle_of(api) == {replica.certificate}


def test_an_apiservice_of_another_service_is_not_changed(caplog: pytest.LogCaptureFixture) -> None:
    api = make_api()
    api.services[NAMES[1]] = api_service("monitoring", "prometheus-adapter")
    assert Replica(api).update(2)
    assert [name for name, _ in api.patches] == [NAMES[0]]
    assert caplog.text.count("points to monitoring/prometheus-adapter") == 1


def test_two_replicas_are_both_in_the_bundle_after_a_conflict() -> None:
    first, second = Replica(api := make_api(), "first"), Replica(api, "second")
    first.update()
    api.changes_after_get = True
    assert not second.update()
    api.changes_after_get = False
    assert second.update()
    first.update()
    assert bundle_of(api) == {first.certificate, second.certificate}


@pytest.mark.fault(
    "somebody deletes podgpu's APIServices",
    "a replica that starts then is ready, and adds its certificate when they are back",
)
def test_a_missing_apiservice_does_not_prevent_readiness() -> None:
    api = make_api()
    del api.services[NAMES[1]]
    replica = Replica(api)
    assert replica.update()
    api.services[NAMES[1]] = api_service()
    assert replica.update()
    assert [name for name, _ in api.patches] == list(NAMES)
