"""Who is answered by the metrics API, over real TLS with a real chain of certificates."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from podgpu.autoscale.authentication import ApiGate, Reviews, TrustConfig, parse_trust_config
from podgpu.autoscale.metrics_api import MetricsApi
from podgpu.autoscale.server import ApiTlsContexts, read_from_files
from podgpu.tls import Pem
from podgpu.web.app import Listener, listening
from podgpu.web.connections import ConnectionLimits
from podgpu.web.sockets import Address
from tests.autoscale.api_double import ApiDouble
from tests.autoscale.authorities import Authorities
from tests.autoscale.scenes import Stage, gpu, holder, pod

HPA = "system:serviceaccount:kube-system:horizontal-pod-autoscaler"
METRIC = "/apis/custom.metrics.k8s.io/v1beta2/namespaces/serving/pods/*/gpu_utilization?labelSelector=app%3Dinference"
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
    found = parse_trust_config({"data": {**data, **changes}})
    assert found is not None
    return found


@dataclass
class Site:
    """The metrics API, and who asks it."""

    authorities: Authorities
    url: str
    api: ApiDouble
    trust: TrustConfig
    now: float = 0.0
    contexts: dict[str, ssl.SSLContext] = field(default_factory=dict)

    async def get(self, path: str = METRIC, shows: str = "", token: str = "", **headers: str) -> tuple[int, Any]:
        async with aiohttp.ClientSession() as session:
            return await self.get_with(session, path, shows, token, **headers)

    async def get_with(
        self, session: aiohttp.ClientSession, path: str, shows: str, token: str = "", **headers: str
    ) -> tuple[int, Any]:
        """Of one session, the same certificate's requests share a connection."""
        carried = {**headers, "Authorization": f"Bearer {token}"} if token else dict(headers)
        tls = self.contexts.setdefault(shows, self.authorities.client(shows))
        async with session.get(f"{self.url}{path}", headers=carried, ssl=tls) as answer:
            return answer.status, json.loads(await answer.text())


@asynccontextmanager
async def site_of(authorities: Authorities, folder: Path) -> AsyncIterator[Site]:
    stage = Stage([pod("a")])
    stage.turns(4, n1=(gpu(0, holder("a", utilization=0.735), utilization=0.735),))
    stage.now += 6.0
    for name in ("crt", "key"):
        shutil.copy(authorities.path(f"server.{name}"), folder / f"tls.{name}")
    api = ApiDouble()
    site = Site(authorities, "", api, trust_of(authorities))
    pair = read_from_files(Pem(file=str(folder / "tls.crt")), Pem(file=str(folder / "tls.key")))
    contexts = ApiTlsContexts(pair, lambda: site.trust)
    async with api.running() as client:
        reviews = Reviews(client, lambda: site.now)
        app = MetricsApi(stage.store, ApiGate(lambda: site.trust, lambda: reviews)).application()
        listener = Listener(app, Address("127.0.0.1", 0), tls=contexts.current)
        async with listening(listener, ConnectionLimits()) as bound:
            site.url = bound.url
            yield site


def on_site(authorities: Authorities, folder: Path, ask: Any) -> Any:
    async def run() -> Any:
        async with site_of(authorities, folder) as site:
            return await ask(site)

    return asyncio.run(run())


# Through the API server


def test_what_the_hpa_controller_asks_through_the_aggregator(authorities: Authorities, tmp_path: Path) -> None:
    """As recorded: the aggregator's probes and discovery, and then the controller's questions."""

    async def ask(site: Site) -> list[tuple[int, Any]]:
        site.api.allowed = {(HPA, "pods")}
        discovery = [
            await site.get(path, "aggregator", **FROM_AGGREGATOR)
            for path in ("/apis", "/apis/custom.metrics.k8s.io/v1beta2", "/apis/custom.metrics.k8s.io/v1beta1")
        ]
        answers = [*discovery, await site.get(METRIC, "aggregator", **FROM_HPA)]
        (review,) = site.api.reviews
        assert review["user"] == HPA
        assert review["extra"] == {"authentication.kubernetes.io/credential-id": ["JTI=1"]}
        assert review["resourceAttributes"] == {
            **{"verb": "get", "group": "custom.metrics.k8s.io", "version": "v1beta2"},
            **{"resource": "pods", "subresource": "gpu_utilization", "namespace": "serving", "name": "*"},
        }
        return answers

    answers = on_site(authorities, tmp_path, ask)
    assert [status for status, _ in answers] == [200] * 4
    assert [body["kind"] for _, body in answers] == ["APIGroupList", *["APIResourceList"] * 2, "MetricValueList"]
    (item,) = answers[3][1]["items"]
    assert (item["value"], item["describedObject"]["name"], item["windowSeconds"]) == ("73500m", "a", 60)


def test_the_aggregator_without_a_group_is_somebody_who_is_known(authorities: Authorities, tmp_path: Path) -> None:
    """kube-apiserver 1.35 asks for discovery so; Kubernetes' own role system:discovery lets authenticated users."""

    async def ask(site: Site) -> list[Any]:
        path = "/apis/custom.metrics.k8s.io/v1beta2"
        site.api.allowed = {("system:kube-aggregator", path)}
        status, _ = await site.get(path, "aggregator", **{"X-Remote-User": "system:kube-aggregator"})
        anonymous, _ = await site.get(path, "aggregator", **{"X-Remote-User": "system:anonymous"})
        return [status, anonymous, *(review["groups"] for review in site.api.reviews)]

    assert on_site(authorities, tmp_path, ask) == [200, 403, ["system:authenticated"], []]


@pytest.mark.parametrize(
    ("shows", "headers", "words"),
    [
        ("", FROM_HPA, "unknown caller"),
        ("", {}, "unknown caller"),
        ("other-proxy", FROM_HPA, "requestheader-allowed-names"),
        ("alice", FROM_HPA, "only a front proxy may"),
        ("alice", {"X-Remote-Uid": "0"}, "only a front proxy may"),
        ("aggregator-of-clients", FROM_AGGREGATOR, "only a front proxy may"),
        ("aggregator", {}, "names no user"),
        ("other-proxy", {}, "no longer trusts the CA"),
    ],
)
def test_who_is_not_known_is_refused(
    authorities: Authorities, tmp_path: Path, shows: str, headers: dict[str, str], words: str
) -> None:
    async def ask(site: Site) -> tuple[int, Any]:
        site.api.allowed = {(HPA, "pods"), ("alice", "pods")}
        answer = await site.get(METRIC, shows, **headers)
        assert site.api.reviews == []
        return answer

    status, body = on_site(authorities, tmp_path, ask)
    assert (status, body["kind"], body["reason"]) == (401, "Status", "Unauthorized")
    assert words in body["message"]


@pytest.mark.parametrize("shows", ["mallory", "late"])
def test_a_strangers_or_expired_certificate_fails_the_handshake(
    authorities: Authorities, tmp_path: Path, shows: str
) -> None:
    async def ask(site: Site) -> None:
        with pytest.raises(aiohttp.ClientError):
            await site.get(METRIC, shows, **FROM_HPA)
        assert (await site.get("/apis", "aggregator", **FROM_AGGREGATOR))[0] == 200

    on_site(authorities, tmp_path, ask)


@pytest.mark.fault(
    "the API server's front-proxy CA is changed",
    "the next request by the old one is refused, on a connection that stands too; the new one counts at once",
)
def test_the_front_proxys_authority_may_change_while_it_runs(authorities: Authorities, tmp_path: Path) -> None:
    async def ask(site: Site) -> list[int]:
        site.api.allowed = {(HPA, "pods")}
        async with aiohttp.ClientSession() as session:
            before = (await site.get_with(session, METRIC, "aggregator", **FROM_HPA))[0]
            new = {"requestheader-client-ca-file": authorities.text("stranger.crt")}
            site.trust = trust_of(authorities, **new)
            kept = (await site.get_with(session, METRIC, "aggregator", **FROM_HPA))[0]
        return [before, kept, (await site.get(METRIC, "mallory", **FROM_HPA))[0]]

    before, kept, new = on_site(authorities, tmp_path, ask)
    assert (before, kept, new) == (200, 401, 200)


def test_an_authority_that_signs_for_both_goes_by_the_name(authorities: Authorities, tmp_path: Path) -> None:
    """Some clusters have one authority for the front proxy and for clients."""

    async def ask(site: Site) -> list[int]:
        site.trust = replace(site.trust, client_ca=site.trust.front_proxy_ca)
        site.api.allowed = {(HPA, "pods"), ("somebody-else", "pods")}
        asked = [("aggregator", FROM_HPA), ("other-proxy", {}), ("other-proxy", FROM_HPA)]
        return [(await site.get(METRIC, shows, **headers))[0] for shows, headers in asked]

    assert on_site(authorities, tmp_path, ask) == [200, 200, 401]


# Others


def test_a_client_certificate_is_its_name_and_its_groups(authorities: Authorities, tmp_path: Path) -> None:
    async def ask(site: Site) -> dict[str, Any]:
        site.api.allowed = {("alice", "pods")}
        assert (await site.get(METRIC, "alice"))[0] == 200
        return site.api.reviews[0]

    review = on_site(authorities, tmp_path, ask)
    assert (review["user"], review["groups"]) == ("alice", ["dev", "ops", "system:authenticated"])


def test_a_token_is_whose_the_api_server_says(authorities: Authorities, tmp_path: Path) -> None:
    async def ask(site: Site) -> list[int]:
        site.api.tokens = {"good": {"username": "bob", "groups": ["dev"], "extra": {"scopes": ["a"]}}}
        site.api.allowed = {("bob", "pods")}
        headers = {"X-Remote-User": "root", "X-Remote-Group": "system:masters"}  # without a certificate: nobody's word
        found = [(await site.get(token=token, **headers))[0] for token in ("good", "bad", "x" * 8000)]
        assert site.api.reviews[1]["groups"] == ["dev", "system:authenticated"]
        return found

    assert on_site(authorities, tmp_path, ask) == [200, 401, 401]


def test_who_may_not_is_told_which_rule_is_missing(authorities: Authorities, tmp_path: Path) -> None:
    async def ask(site: Site) -> tuple[int, Any]:
        return await site.get(METRIC, "alice")

    status, body = on_site(authorities, tmp_path, ask)
    assert (status, body["reason"]) == (403, "Forbidden")
    assert 'resources: ["pods/gpu_utilization"], verbs: ["get"]' in body["message"]


@pytest.mark.fault("the API server answers no reviews", "requests are refused with 503 and the reason: it fails closed")
def test_without_reviews_nobody_is_let_in(authorities: Authorities, tmp_path: Path) -> None:
    async def ask(site: Site) -> list[int]:
        site.api.allowed, site.api.is_ill = {("alice", "pods"), (HPA, "pods")}, True
        ill = [(await site.get(METRIC, "alice"))[0], (await site.get(METRIC, token="t"))[0]]
        masters = (await site.get("/apis", "aggregator", **FROM_AGGREGATOR))[0]
        site.api.is_ill = False
        return [*ill, masters, (await site.get(METRIC, "alice"))[0]]

    assert on_site(authorities, tmp_path, ask) == [503, 503, 200, 200]


def test_reviews_are_remembered_for_a_while_and_no_longer(authorities: Authorities, tmp_path: Path) -> None:
    async def ask(site: Site) -> list[tuple[int, int]]:
        site.api.allowed = {("alice", "pods")}
        found = []
        for step in (0.0, 9.0, 11.0):
            site.now = step
            site.api.allowed = {("alice", "pods")} if step == 0 else set()
            found.append(((await site.get(METRIC, "alice"))[0], len(site.api.reviews)))
        return found

    assert on_site(authorities, tmp_path, ask) == [(200, 1), (200, 1), (403, 2)]


def test_probes_are_answered_to_anybody(authorities: Authorities, tmp_path: Path) -> None:
    async def ask(site: Site) -> list[int]:
        async with aiohttp.ClientSession() as session:
            found = []
            for path in ("/healthz", "/livez", "/readyz"):
                async with session.get(site.url + path, ssl=site.authorities.client()) as answer:
                    found.append(answer.status)
            return found

    assert on_site(authorities, tmp_path, ask) == [200] * 3


# The certificate that is shown


def test_a_certificate_that_is_replaced_is_shown_to_the_next(authorities: Authorities, tmp_path: Path) -> None:
    authorities.sign("renewed", "stranger", names="IP:127.0.0.1", usage="serverAuth")

    async def ask(site: Site) -> None:
        assert (await site.get("/apis", "aggregator", **FROM_AGGREGATOR))[0] == 200
        (tmp_path / "tls.key").write_text("half of a rotation")
        assert (await site.get("/apis", "aggregator", **FROM_AGGREGATOR))[0] == 200
        for name in ("crt", "key"):
            shutil.copy(authorities.path(f"renewed.{name}"), tmp_path / f"tls.{name}")
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await site.get("/apis", "aggregator", **FROM_AGGREGATOR)
        tls = authorities.client("aggregator", trusts="stranger")
        async with (
            aiohttp.ClientSession(headers=FROM_AGGREGATOR) as session,
            session.get(f"{site.url}/apis", ssl=tls) as answer,
        ):
            assert answer.status == 200

    on_site(authorities, tmp_path, ask)


# The ConfigMap


@pytest.mark.parametrize("names", ["{", "5", "[1]", '"x"'])
def test_allowed_names_that_cannot_be_read_allow_none(authorities: Authorities, tmp_path: Path, names: str) -> None:
    async def ask(site: Site) -> int:
        site.trust = trust_of(authorities, **{"requestheader-allowed-names": names})
        return (await site.get("/apis", "aggregator", **FROM_AGGREGATOR))[0]

    assert on_site(authorities, tmp_path, ask) == 401


def test_no_allowed_names_are_any_of_that_authority(authorities: Authorities, tmp_path: Path) -> None:
    async def ask(site: Site) -> int:
        site.trust = trust_of(authorities, **{"requestheader-allowed-names": "[]"})
        return (await site.get("/apis", "other-proxy", **FROM_AGGREGATOR))[0]

    assert on_site(authorities, tmp_path, ask) == 200


def test_what_is_no_configmap_is_nothing() -> None:
    assert parse_trust_config({}) is None
    assert parse_trust_config({"data": {"client-ca-file": "no PEM"}}) == TrustConfig()
