"""Tests `--auth kubernetes`: users see their namespaces, and one sum of everything else."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
from aiohttp import web

from podgpu.errors import Note
from podgpu.fleet.prices import Prices, parse_prices
from podgpu.fleet.readings import ClusterReading
from podgpu.fleet.round import Cluster
from podgpu.fleet.settings import ViewSettings
from podgpu.kube.client import ApiClient
from podgpu.kube.config import ApiConfig
from podgpu.model import Condition, WaitPart, WorkloadOwner
from podgpu.past.books.record import cluster_recorder
from podgpu.past.sqlite.sqlite_past import SqlitePast
from podgpu.web.access import KubernetesAccess, User, UserHeaders
from podgpu.web.cluster_app import cluster_application
from tests.fleet.states import gpu, holder, node
from tests.fleet.test_loop import Script, Time, tell
from tests.kube.api_server import SimulatedApiServer
from tests.web.server import Client, running

NO_HEADERS = UserHeaders()
SECRET = "secret-pod"
SECRETS = (SECRET, "secret-team", "secret-user", "secret-container", "secret-label", "secret-idle")
PRICES = "currency: USD\nmodels:\n  NVIDIA H100 80GB HBM3:\n    gpu_hour: 4\n"
USERS: dict[str, dict[str, Any]] = {
    "token-of-admin": {"username": "admin", "groups": ["system:masters"], "uid": "1"},
    "token-of-ann": {"username": "ann", "groups": ["ml-team"]},
    "token-of-bob": {"username": "bob", "extra": {"scopes": ["x"]}},
}
GRANTS = {
    "system:masters": frozenset({"*", "get /metrics", "get /metrics/nodes"}),
    "ml-team": frozenset({"ml"}),
    "prometheus": frozenset({"get /metrics"}),
}


def reading(read_at: float, busy_ns: int, cluster: str) -> ClusterReading:
    """Two pods of ml, one on a GPU that two hidden pods use too, and a GPU of a hidden pod."""
    waits = WaitPart(namespace="secret-team", pod=SECRET, seconds=1.0, ratio=0.2)
    mine = holder(
        "train", "ml", busy_ns=busy_ns, utilization_ratio=0.25, wait_ratio=0.2, waits_for=(waits,)
    )
    other = holder(SECRET, "secret-team", utilization_ratio=0.25, busy_ns=busy_ns)
    third = holder("secret-pod-2", "secret-user", utilization_ratio=0.125, busy_ns=2 * busy_ns)
    alone = holder(SECRET, "secret-team", "secret-container", utilization_ratio=0.5)
    unallocated = Condition("unallocated_use", 1.0, "secret-team/secret-pod")
    gpus = [
        gpu(0, mine, other, third, busy=0.75, power_mw=300_000, memory_total_bytes=1 << 36),
        gpu(1, alone, busy=0.5, conditions=(unallocated,)),
        gpu(2, holder("idle", "ml", utilization_ratio=0.0), busy=0.0),
        gpu(3, holder("secret-idle", "secret-team", utilization_ratio=0.0), busy=0.0),
    ]
    if busy_ns:
        gpus.append(gpu(4, holder("secret-pod-3", "secret-team"), busy=0.5))
    labels = {"secret-team/secret-pod": {"team": "secret-label"}}
    told = (Note("secret", "secret-pod has a problem"),)
    shown = node("n-1", *gpus, read_at=read_at, pod_labels=labels)
    shown = msgspec.structs.replace(shown, cluster=cluster)
    owners = {("ml", "train"): WorkloadOwner("Job", "train")}
    owners["secret-team", SECRET] = WorkloadOwner("Job", SECRET)
    return ClusterReading((shown,), notes=told, owners=owners)


def prices() -> tuple[Prices, tuple[Note, ...]]:
    return parse_prices(PRICES.encode(), "prices.yaml"), ()


@contextmanager
def serving(
    headers: UserHeaders = NO_HEADERS, cluster_name: str = ""
) -> Iterator[tuple[Client, SimulatedApiServer, Time]]:
    time = Time()
    cluster = Cluster(Script, ViewSettings(idle_after=30.0), prices, clock=time.clock)
    recorder = cluster_recorder(cluster)
    past = SqlitePast(recorder, lambda: cluster.published.state)
    first = reading(100.0, 0, cluster_name)
    script = Script(tell(first), tell(reading(160.0, 15 * 10**9, cluster_name)))
    for _ in range(2):
        asyncio.run(cluster.round(script))
        recorder.record()
        time.now += 60
    with SimulatedApiServer() as server:
        server.users = USERS
        server.grants = GRANTS
        server.tokens = frozenset({"podgpu"})
        config = ApiConfig(server.url, "test", token="podgpu")
        access = KubernetesAccess(ApiClient(config), headers, lambda: time.now)
        app: Any = partial(cluster_application, past=past, access=access)
        with running(cluster, app=app) as client:  # type: ignore[arg-type]
            yield client, server, time
    recorder.stop()


def ask(client: Client, path: str, user: str) -> Any:
    answer = client.ask(path, Authorization=f"Bearer token-of-{user}")
    assert answer.status == 200, answer.text
    return json.loads(answer.text)


PATHS = (
    "/api/v1/view",
    "/api/v1/gpus/GPU-0",
    "/api/v1/gpus/GPU-1",
    "/api/v1/pods",
    "/api/v1/pods/ml/train",
    "/api/v1/jobs",
    "/api/v1/jobs/Job/ml/train",
    "/api/v1/history",
    "/api/v1/history/gpus/GPU-0",
    "/api/v1/history/gpus/GPU-1",
    "/api/v1/history/pods/ml/train",
    "/api/v1/history/jobs/Job/ml/train",
    "/api/v1/range?range=1h",
    "/api/v1/range?range=1h&by=owner",
    "/api/v1/range?range=1h&by=namespace",
    "/api/v1/range?range=1h&by=label:team",
    "/api/v1/waste?range=1h",
    "/api/v1/costs?by=pod",
    "/api/v1/costs?by=owner&range=month",
    "/api/v1/costs?by=label:team&step=hour&range=24h",
    "/api/v1/events?range=24h",
    "/api/v1/summary/ml/train",
)

NAMELESS = (
    "/api/v1/jobs/Job/ml/train",
    "/api/v1/history",
    "/api/v1/history/pods/ml/train",
    "/api/v1/history/jobs/Job/ml/train",
    "/api/v1/summary/ml/train",
)
"""Answers that name no other pod to anybody."""


@pytest.mark.parametrize("user", ["ann", "bob"])
def test_no_answer_names_what_a_user_may_not_see(user: str) -> None:
    with serving() as (client, _, _):
        login = {"Authorization": f"Bearer token-of-{user}"}
        for path in (*PATHS, "/api/v1/range?range=1h&format=csv"):
            text = client.ask(path, **login).text
            assert not [name for name in SECRETS if name in text], path
            whole = client.ask(path, Authorization="Bearer token-of-admin")
            assert whole.status == 200, (path, whole.text)
            is_naming = any(name in whole.text for name in SECRETS)
            assert is_naming == (path not in NAMELESS), path
        hidden = [
            f"/api/v1/pods/secret-team/{SECRET}",
            f"/api/v1/history/pods/secret-team/{SECRET}",
            f"/api/v1/history/jobs/Job/secret-team/{SECRET}",
            f"/api/v1/summary/secret-team/{SECRET}",
        ]
        for path in hidden:
            unknown = client.ask(path.replace(SECRET, "nothing"), **login)
            answer = client.ask(path, **login)
            assert answer.status == unknown.status == 404
            assert answer.text == unknown.text.replace("nothing", SECRET)
            assert client.ask(path, Authorization="Bearer token-of-admin").status == 200


def test_hidden_holders_are_one_sum_for_each_gpu() -> None:
    with serving() as (client, _, _):
        whole = ask(client, "/api/v1/view", "admin")
        shown = ask(client, "/api/v1/view", "ann")
    assert shown["totals"] == whole["totals"]
    shared = shown["nodes"][0]["gpus"][0]
    own, rest = shared["holders"]
    assert (own["namespace"], own["pod"], own["wait_ratio"]) == ("ml", "train", 0.2)
    assert "waits_for" not in own
    assert rest["hidden"]
    assert rest["utilization_ratio"] == 0.375
    assert rest["busy_seconds"] == 45.0
    assert rest["part"] == pytest.approx(2 / 3, abs=1e-5)
    assert set(rest).isdisjoint({"namespace", "pod", "container", "uid", "container_id", "owner"})
    for before, after in zip(whole["nodes"][0]["gpus"], shown["nodes"][0]["gpus"], strict=True):
        for unit in ("gpus", "cost_per_hour"):
            idle = [
                sum(each["waste"][unit]["idle"] for each in of["holders"] if "waste" in each)
                for of in (before, after)
            ]
            assert idle[0] == pytest.approx(idle[1], abs=1e-3)
        for name in ("part", "cost_per_hour"):
            sums = [sum(each[name] for each in of["holders"]) for of in (before, after)]
            assert sums[0] == pytest.approx(sums[1])
    names = [(row["namespace"], row.get("hidden", False)) for row in shown["namespaces"]]
    assert names == [("ml", False), ("", True)]
    for name in ("allocated_gpus", "used_gpus", "idle_gpus", "unknown_gpus", "cost_per_hour"):
        sums = [sum(row.get(name, 0) for row in each["namespaces"]) for each in (whole, shown)]
        assert sums[0] == pytest.approx(sums[1]), name
    for unit in ("gpus", "cost_per_hour"):
        sums = [
            sum(row["waste"][unit].get("idle", 0) for row in each["namespaces"])
            for each in (whole, shown)
        ]
        assert sums[0] == pytest.approx(sums[1])


def test_the_parts_of_a_bill_are_the_same_for_everybody() -> None:
    with serving() as (client, _, _):
        for by in ("pod", "owner", "namespace", "label:team"):
            path = f"/api/v1/range?range=1h&by={by}"
            whole = ask(client, path, "admin")
            shown = ask(client, path, "ann")
            assert shown["totals"] == whole["totals"]
            assert sum(row.get("cost", 0) for row in shown["rows"]) == pytest.approx(
                shown["totals"]["cost"], abs=0.001
            )
            assert [row.get("hidden") for row in shown["rows"]].count(True) == 1
        text = client.ask(f"{path}&format=csv", Authorization="Bearer token-of-ann").text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert any("other namespaces" in row["ChargeDescription"] for row in rows)


def test_who_may_not_log_in() -> None:
    with serving() as (client, server, _):
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Bearer "},
            {"Authorization": "Basic YTpi"},
            {"Authorization": "Basic  token-of-ann"},
            {"X_Forwarded_User": "admin"},
        ):
            for path in ("/", "/api/v1/view", "/metrics", "/page/app.js", "/api/v1/nothing"):
                answer = client.ask(path, **headers)
                assert answer.status == 401, path
                assert answer.headers["WWW-Authenticate"].startswith("Bearer")
        server.refusal = (500, "etcd is gone")
        answer = client.ask("/api/v1/view", Authorization="Bearer token-of-ann")
        assert answer.status == 503
        assert "etcd is gone" in answer.text


def test_probes_need_no_login_and_name_nothing() -> None:
    with serving() as (client, server, _):
        for path in ("/livez", "/ready", "/health"):
            assert client.ask(path).text == "OK\n"
        assert server.requests == []


def test_metrics_need_a_permission_for_their_path() -> None:
    with serving() as (client, server, _):
        refused = client.ask("/metrics", Authorization="Bearer token-of-ann")
        assert refused.status == 403
        assert "nonResourceURL" in refused.text
        server.users = {**USERS, "token-of-prometheus": {"username": "prometheus"}}
        assert client.ask("/metrics", Authorization="Bearer token-of-prometheus").status == 200
        other = client.ask("/metrics/nodes", Authorization="Bearer token-of-prometheus")
        assert other.status == 403


def test_answers_of_the_api_server_are_remembered_for_a_minute() -> None:
    with serving() as (client, server, time):
        first = ask(client, "/api/v1/view", "ann")
        asked = len(server.requests)
        assert ask(client, "/api/v1/view", "ann") == first
        assert len(server.requests) == asked

        server.grants = {}
        time.now += 59.9
        assert ask(client, "/api/v1/view", "ann") == first
        time.now += 0.2
        later = ask(client, "/api/v1/view", "ann")
        [row] = later["namespaces"]
        assert row["hidden"]
        server.users = {}
        time.now += 60
        assert client.ask("/api/v1/view", Authorization="Bearer token-of-ann").status == 401


def test_an_unknown_token_is_remembered_too() -> None:
    with serving() as (client, server, time):
        for _ in range(3):
            assert client.ask("/", Authorization="Bearer wrong").status == 401
        assert len(server.requests) == 1
        time.now += 60
        assert client.ask("/", Authorization="bearer wrong").status == 401
        assert len(server.requests) == 2


class CountingReviews:
    """Answers each review, and counts them."""

    def __init__(self) -> None:
        self.created = 0
        self.is_closed = False

    async def create(self, path: str, document: Any) -> bytes:
        self.created += 1
        return b'{"status": {"allowed": true}}'

    async def close(self) -> None:
        self.is_closed = True


def test_the_oldest_of_20000_answers_is_forgotten() -> None:
    async def ask_often() -> int:
        reviews = CountingReviews()
        access = KubernetesAccess(reviews, NO_HEADERS)
        for number in range(20_001):
            assert await access.may_list_pods(User("ann"), str(number))
        assert reviews.created == 20_001
        await access.may_list_pods(User("ann"), "1")
        assert reviews.created == 20_001, "the second oldest is still known"
        await access.may_list_pods(User("ann"), "0")
        return reviews.created

    assert asyncio.run(ask_often()) == 20_002


def test_the_connection_to_the_api_server_is_closed_with_the_application() -> None:
    async def run() -> bool:
        reviews = CountingReviews()
        cluster = Cluster(Script, ViewSettings(), prices, clock=Time().clock)
        app = cluster_application(cluster, access=KubernetesAccess(reviews, NO_HEADERS))
        runner = web.AppRunner(app)
        await runner.setup()
        await runner.cleanup()
        return reviews.is_closed

    assert asyncio.run(run())


def test_the_api_server_decides_about_the_whole_user() -> None:
    with serving() as (client, server, _):
        server.users = {"token-of-eve": {"username": "eve", "uid": "7", "extra": {"b": ["x"]}}}
        server.grants = {"eve": frozenset({"ml"})}
        names = [row["namespace"] for row in ask(client, "/api/v1/view", "eve")["namespaces"]]
        assert names == ["ml", ""]
        token, *decisions = server.reviews
        assert token == {"token": "token-of-eve"}
        eve = {"user": "eve", "groups": [], "uid": "7", "extra": {"b": ["x"]}}
        for decision in decisions:
            attributes = decision.pop("resourceAttributes")
            assert (attributes["verb"], attributes["resource"]) == ("list", "pods")
            assert decision == eve


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"denied": True}, 200),  # an authorizer's denial counts more than a permission
        ({"authenticated": False}, 401),
        ({"user": {"username": ""}}, 401),
        ({"authenticated": "yes"}, 503),
        ({"allowed": "yes"}, 503),
    ],
)
def test_answers_of_the_api_server_that_grant_nothing(
    status: dict[str, Any], expected: int
) -> None:
    with serving() as (client, server, _):
        server.review_status = status
        answer = client.ask("/api/v1/view", Authorization="Bearer token-of-ann")
        assert answer.status == expected
        if expected == 200:
            [row] = json.loads(answer.text)["namespaces"]
            assert row["hidden"]


def test_limits_of_what_a_proxy_says() -> None:
    with serving(UserHeaders("X-User", "X-Groups")) as (client, server, _):
        assert client.ask("/", X_User="a" * 1024).status == 200
        assert client.ask("/", X_User="a" * 1025).status == 401
        assert client.ask("/", X_Groups="system:masters").status == 401
        many = ",".join([" ", *(f"g{number}" for number in range(300))])
        assert client.ask("/api/v1/view", X_User="ann", X_Groups=many).status == 200
        groups = server.reviews[-1]["groups"]
        assert groups == ["system:authenticated", *(f"g{number}" for number in range(256))]
    with serving(UserHeaders("X-User")) as (client, server, _):
        assert client.ask("/api/v1/view", X_User="ann", X_Groups="system:masters").status == 200
        assert server.reviews[-1]["groups"] == ["system:authenticated"]


def test_a_proxy_names_the_user() -> None:
    with serving(UserHeaders("X-Forwarded-User", "X-Forwarded-Groups")) as (client, _, _):
        answer = client.ask(
            "/api/v1/view", X_Forwarded_User="ann", X_Forwarded_Groups="devs, ml-team"
        )
        names = [row["namespace"] for row in json.loads(answer.text)["namespaces"]]
        assert names == ["ml", ""]
        assert client.ask("/api/v1/view", X_Forwarded_User=" ").status == 401


def test_a_hidden_job_does_not_exist() -> None:
    path = f"/api/v1/jobs/Job/secret-team/{SECRET}"
    with serving() as (client, _, _):
        login = {"Authorization": "Bearer token-of-ann"}
        assert client.ask(path, **login).status == 404
        assert len(ask(client, path, "admin")["devices"]) == 2
        assert [job["name"] for job in ask(client, "/api/v1/jobs", "ann")["jobs"]] == ["train"]
        assert len(ask(client, "/api/v1/jobs", "admin")["jobs"]) == 2


def test_several_clusters_are_only_for_users_who_see_everything() -> None:
    """The API server knows nothing of the namespace `ml` of another cluster."""
    with serving(cluster_name="west") as (client, _, _):
        for path in PATHS:
            refused = client.ask(path, Authorization="Bearer token-of-ann")
            assert refused.status == 403, path
            assert "several clusters are shown" in refused.text
        assert len(ask(client, "/api/v1/pods/ml/train", "admin")["nodes"]) == 1


def test_a_selection_does_not_tell_whether_a_hidden_pod_exists() -> None:
    with serving() as (client, _, _):
        login = {"Authorization": "Bearer token-of-ann"}
        for selection in ("pod=secret-pod", "q=secret", "ns=secret-team", "owner=Job/secret"):
            answer = client.ask(f"/api/v1/view?{selection}", **login)
            assert answer.status == 400, selection
            assert "add ns=" in answer.text
        assert client.ask("/api/v1/view?ns=ml&pod=train", **login).status == 200
