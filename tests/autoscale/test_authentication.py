"""Which callers the metrics API answers, over real TLS with a real chain of certificates."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from podgpu.autoscale.authentication import ApiGate, Reviews, TrustConfig, parse_trust_config
from podgpu.autoscale.metrics_api import MetricsApi
from podgpu.autoscale.server import make_api_tls
from podgpu.tls import Pem
from podgpu.web.app import Listener, listening
from podgpu.web.connections import ConnectionLimits
from podgpu.web.sockets import Address
from tests.autoscale.api_double import ApiDouble
from tests.autoscale.authorities import Authorities
from tests.autoscale.scenes import Stage, busy, pod

HPA = "system:serviceaccount:kube-system:horizontal-pod-autoscaler"
METRIC = "/apis/custom.metrics.k8s.io/v1beta2/namespaces/serving/pods/*/gpu_utilization?labelSelector=app%3Dinference"
DISCOVERY = "/apis/custom.metrics.k8s.io/v1beta2"
FROM_HPA = {
    "X-Remote-User": HPA,
    "X-Remote-Group": "system:serviceaccounts",
    "X-Remote-Extra-authentication.kubernetes.io%2Fcredential-id": "JTI=1",
}
FROM_AGGREGATOR = {"X-Remote-User": "system:kube-aggregator", "X-Remote-Group": "system:masters"}


def trust_of(authorities: Authorities, **changes: str) -> TrustConfig:
    data = {
        "client-ca-file": authorities.text("client-ca.crt"),
        "requestheader-client-ca-file": authorities.text("front-proxy.crt"),
        "requestheader-allowed-names": '["front-proxy-client"]',
        "requestheader-username-headers": '["X-Remote-User"]',
        "requestheader-group-headers": '["X-Remote-Group"]',
        "requestheader-extra-headers-prefix": '["X-Remote-Extra-"]',
        "requestheader-uid-headers": '["X-Remote-Uid"]',
    }
    trust = parse_trust_config({"data": {**data, **changes}})
    assert trust is not None
    return trust


@dataclass
class Site:
    """The metrics API and its API server."""

    authorities: Authorities
    folder: Path
    api: ApiDouble = field(default_factory=ApiDouble)
    url: str = ""
    now: float = 0.0
    contexts: dict[str, ssl.SSLContext] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.trust = trust_of(self.authorities)
        for name in ("crt", "key"):
            shutil.copy(self.authorities.path(f"server.{name}"), self.folder / f"tls.{name}")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        stage = Stage([pod("a")])
        stage.turns(4, n1=(busy("a", 0.735, 0),))
        stage.now += 6.0
        certificate, key = (Pem(file=str(self.folder / name)) for name in ("tls.crt", "tls.key"))
        tls = make_api_tls(lambda: (certificate, key), lambda: self.trust)
        async with self.api.running() as client:
            reviews = Reviews(client, lambda: self.now)
            app = MetricsApi(stage.store, ApiGate(lambda: self.trust, lambda: reviews)).application()
            listener = Listener(app, Address("127.0.0.1", 0), tls=tls)
            async with listening(listener, ConnectionLimits()) as bound:
                self.url = bound.url
                yield

    async def get(
        self,
        path: str = METRIC,
        shows: str = "",
        token: str = "",
        session: aiohttp.ClientSession | None = None,
        **headers: str,
    ) -> tuple[int, Any]:
        """Requests of one session with the same certificate share a connection."""
        if session is None:
            async with aiohttp.ClientSession() as own:
                return await self.get(path, shows, token, own, **headers)
        sent = {**headers, "Authorization": f"Bearer {token}"} if token else headers
        tls = self.contexts.setdefault(shows, self.authorities.client(shows))
        async with session.get(f"{self.url}{path}", headers=sent, ssl=tls) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text.startswith("{") else text

    async def status(self, *args: Any, **headers: Any) -> int:
        return (await self.get(*args, **headers))[0]

    def run(self, use: Callable[[], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            async with self.running():
                return await use()

        return asyncio.run(run())


@pytest.fixture
def site(authorities: Authorities, tmp_path: Path) -> Site:
    return Site(authorities, tmp_path)


# Through the API server


def test_requests_of_the_hpa_controller_through_the_aggregator(site: Site) -> None:
    """As recorded: first discovery, then a metric."""
    site.api.allowed = {(HPA, "pods")}

    async def use() -> list[tuple[int, Any]]:
        discovery = [await site.get(path, "aggregator", **FROM_AGGREGATOR) for path in ("/apis", DISCOVERY)]
        return [*discovery, await site.get(METRIC, "aggregator", **FROM_HPA)]

    answers = site.run(use)
    assert [status for status, _ in answers] == [200] * 3
    (item,) = answers[2][1]["items"]
    assert (item["value"], item["describedObject"]["name"], item["windowSeconds"]) == ("73500m", "a", 60)
    (review,) = site.api.reviews
    assert review["user"] == HPA
    assert review["extra"] == {"authentication.kubernetes.io/credential-id": ["JTI=1"]}
    assert review["resourceAttributes"] == {
        **{"verb": "get", "group": "custom.metrics.k8s.io", "version": "v1beta2"},
        **{"resource": "pods", "subresource": "gpu_utilization", "namespace": "serving", "name": "*"},
    }


def test_the_aggregator_without_a_group_is_authenticated(site: Site) -> None:
    """kube-apiserver 1.35 requests discovery so. The ClusterRole system:discovery allows authenticated users."""
    site.api.allowed = {("system:kube-aggregator", DISCOVERY)}

    async def use() -> list[int]:
        users = ("system:kube-aggregator", "system:anonymous")
        return [await site.status(DISCOVERY, "aggregator", **{"X-Remote-User": user}) for user in users]

    assert site.run(use) == [200, 403]
    assert [review["groups"] for review in site.api.reviews] == [["system:authenticated"], []]


@pytest.mark.parametrize(
    ("shows", "headers", "text"),
    [
        ("", FROM_HPA, "unknown caller"),
        ("", {}, "unknown caller"),
        ("other-proxy", FROM_HPA, "requestheader-allowed-names"),
        ("other-proxy", {}, "no longer trusts the CA"),
        ("alice", FROM_HPA, "without a certificate of the front proxy's CA"),
        ("alice", {"X-Remote-Uid": "0"}, "without a certificate of the front proxy's CA"),
        ("aggregator-of-clients", FROM_AGGREGATOR, "without a certificate of the front proxy's CA"),
        ("aggregator", {}, "has no user header"),
    ],
)
def test_unknown_callers_are_rejected(site: Site, shows: str, headers: dict[str, str], text: str) -> None:
    site.api.allowed = {(HPA, "pods"), ("alice", "pods")}
    status, body = site.run(lambda: site.get(METRIC, shows, **headers))
    assert (status, body["kind"], body["reason"]) == (401, "Status", "Unauthorized")
    assert text in body["message"]
    assert site.api.reviews == []


@pytest.mark.parametrize("shows", ["mallory", "late"])
def test_a_foreign_or_expired_certificate_fails_the_handshake(site: Site, shows: str) -> None:
    async def use() -> int:
        with pytest.raises(aiohttp.ClientError):
            await site.get(METRIC, shows, **FROM_HPA)
        return await site.status("/apis", "aggregator", **FROM_AGGREGATOR)

    assert site.run(use) == 200


@pytest.mark.fault(
    "the API server's front-proxy CA is changed",
    "the next request with the old one is rejected, also on an open connection; the new one counts at once",
)
def test_the_front_proxys_ca_may_change(site: Site) -> None:
    site.api.allowed = {(HPA, "pods")}

    async def use() -> list[int]:
        async with aiohttp.ClientSession() as session:
            before = await site.status(METRIC, "aggregator", session=session, **FROM_HPA)
            new = {"requestheader-client-ca-file": site.authorities.text("stranger.crt")}
            site.trust = trust_of(site.authorities, **new)
            after = await site.status(METRIC, "aggregator", session=session, **FROM_HPA)
        return [before, after, await site.status(METRIC, "mallory", **FROM_HPA)]

    assert site.run(use) == [200, 401, 200]


def test_with_one_ca_for_front_proxy_and_clients_the_name_decides(site: Site) -> None:
    site.trust = site.trust._replace(client_ca=site.trust.front_proxy_ca)
    site.api.allowed = {(HPA, "pods"), ("somebody-else", "pods")}

    async def use() -> list[int]:
        callers: list[tuple[str, dict[str, str]]] = [("aggregator", FROM_HPA), ("other-proxy", {})]
        callers.append(("other-proxy", FROM_HPA))
        return [await site.status(METRIC, shows, **headers) for shows, headers in callers]

    assert site.run(use) == [200, 200, 401]


@pytest.mark.parametrize(("names", "shows", "status"), [("{", "aggregator", 401), ("[]", "other-proxy", 200)])
def test_unreadable_names_of_front_proxies_allow_none_and_an_empty_list_any(
    site: Site, names: str, shows: str, status: int
) -> None:
    site.trust = trust_of(site.authorities, **{"requestheader-allowed-names": names})
    assert site.run(lambda: site.status("/apis", shows, **FROM_AGGREGATOR)) == status


def test_a_malformed_configmap_grants_nothing() -> None:
    assert parse_trust_config({}) is None
    assert parse_trust_config({"data": {"client-ca-file": "no PEM"}}) == TrustConfig()


# Other callers


def test_a_client_certificate_has_name_and_groups(site: Site) -> None:
    status, body = site.run(lambda: site.get(METRIC, "alice"))
    assert (status, body["reason"]) == (403, "Forbidden")
    assert 'resources: ["pods/gpu_utilization"], verbs: ["get"]' in body["message"]
    (review,) = site.api.reviews
    assert (review["user"], review["groups"]) == ("alice", ["dev", "ops", "system:authenticated"])


def test_a_token_is_reviewed_and_headers_without_a_certificate_are_ignored(site: Site) -> None:
    site.api.tokens = {"good": {"username": "bob", "groups": ["dev"], "extra": {"scopes": ["a"]}}}
    site.api.allowed = {("bob", "pods")}

    async def use() -> list[int]:
        headers = {"X-Remote-User": "root", "X-Remote-Group": "system:masters"}
        return [await site.status(METRIC, "", token, **headers) for token in ("good", "bad")]

    assert site.run(use) == [200, 401]
    assert site.api.reviews[1]["groups"] == ["dev", "system:authenticated"]


@pytest.mark.fault("the API server does not answer reviews", "requests are rejected with 503 and the reason")
def test_without_reviews_requests_are_rejected(site: Site) -> None:
    site.api.allowed, site.api.is_ill = {("alice", "pods"), (HPA, "pods")}, True

    async def use() -> list[int]:
        answers = [await site.status(METRIC, "alice"), await site.status(METRIC, token="t")]
        masters = await site.status("/apis", "aggregator", **FROM_AGGREGATOR)
        site.api.is_ill = False
        return [*answers, masters, await site.status(METRIC, "alice")]

    assert site.run(use) == [503, 503, 200, 200]


def test_reviews_are_cached_for_ten_seconds(site: Site) -> None:
    async def use() -> list[tuple[int, int]]:
        answers = []
        for site.now in (0.0, 9.0, 11.0):
            site.api.allowed = {("alice", "pods")} if site.now == 0 else set()
            answers.append((await site.status(METRIC, "alice"), len(site.api.reviews)))
        return answers

    assert site.run(use) == [(200, 1), (200, 1), (403, 2)]


def test_probes_need_no_authentication(site: Site) -> None:
    async def use() -> list[int]:
        return [await site.status(path) for path in ("/healthz", "/livez", "/readyz")]

    assert site.run(use) == [200] * 3


def test_a_replaced_server_certificate_is_used_for_the_next_connection(site: Site) -> None:
    site.authorities.sign("renewed", "stranger", names="IP:127.0.0.1", usage="serverAuth")

    async def use() -> int:
        (site.folder / "tls.key").write_text("half of a rotation")
        assert await site.status("/apis", "aggregator", **FROM_AGGREGATOR) == 200
        for name in ("crt", "key"):
            shutil.copy(site.authorities.path(f"renewed.{name}"), site.folder / f"tls.{name}")
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await site.get("/apis", "aggregator", **FROM_AGGREGATOR)
        site.contexts["aggregator"] = site.authorities.client("aggregator", trusts="stranger")
        return await site.status("/apis", "aggregator", **FROM_AGGREGATOR)

    assert site.run(use) == 200
