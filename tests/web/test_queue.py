"""`/api/v1/queue`: pending pods of an API server, with reasons, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest

from podgpu.fleet.readings import ClusterReading
from podgpu.fleet.round import Cluster
from podgpu.fleet.settings import ViewSettings
from podgpu.kube.client import ApiClient
from podgpu.kube.config import ApiConfig
from podgpu.model import WorkloadOwner
from podgpu.pending.queue import QueueAnswer
from podgpu.pending.queue_watch import QueueWatch
from podgpu.web.access import KubernetesAccess, UserHeaders
from podgpu.web.cluster_app import cluster_application
from tests.fleet.states import gpu, holder
from tests.fleet.states import node as gpu_node
from tests.fleet.test_loop import Script, Time, tell
from tests.kube.api_server import SimulatedApiServer
from tests.kube.conftest import HURRY
from tests.nodes.clock import wait_until
from tests.pending.situations import Object, claim, device_class, node, pod, resource_slice, uses
from tests.pending.test_explain import complete
from tests.web.server import Client, running
from tests.web.test_access import GRANTS, USERS, prices

KINDS = {
    "Node": "nodes",
    "Pod": "pods",
    "ResourceClaim": "resourceclaims",
    "DeviceClass": "deviceclasses",
    "ResourceSlice": "resourceslices",
    "Workload": "workloads",
    "LocalQueue": "localqueues",
    "ClusterQueue": "clusterqueues",
}
HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m" + 10_000 * "x"


def reading(read_at: float) -> ClusterReading:
    """The pod `idle` of ml and the pod `secret` use none of their GPUs."""
    gpus = [
        gpu(0, holder("idle", "ml", utilization_ratio=0.0), busy=0.0),
        gpu(1, holder("secret", "secret-team", utilization_ratio=0.0), busy=0.0),
        gpu(2, holder("busy", "ml", utilization_ratio=0.5), busy=0.5),
    ]
    owners = {("ml", "idle"): WorkloadOwner("Deployment", "chat")}
    return ClusterReading((gpu_node("a", *gpus, read_at=read_at),), owners=owners)


# Ten thousand pods take a moment on a busy machine.
_PATIENT = replace(HURRY, request_seconds=60.0)


class NotYet(Exception):
    """The first list of pods is being read: on a busy machine, that of 10,000 takes long."""


class Place:
    def __init__(self, client: Client, server: SimulatedApiServer, time: Time) -> None:
        self.client = client
        self.server = server
        self.time = time

    def put(self, *objects: Object) -> None:
        for body in objects:
            self.server.put(KINDS[body["kind"]], complete(body))

    def ask(self, query: str = "", user: str = "") -> QueueAnswer:
        headers = {"Authorization": f"Bearer token-of-{user}"} if user else {}
        answer = self.client.ask(f"/api/v1/queue{query}", **headers)
        if answer.status == 503 and "has not answered yet" in answer.text:
            raise NotYet(answer.text)
        assert answer.status == 200, answer.text
        return msgspec.json.decode(answer.body, type=QueueAnswer)

    def ask_until(self, pods: int, query: str = "", user: str = "") -> QueueAnswer:
        """Asks until the watches have seen the pods."""

        def is_there() -> bool:
            self.time.now += 60
            try:
                return self.ask(query, user).pods == pods
            except NotYet:
                return False

        wait_until(is_there)
        return self.ask(query, user)


@contextmanager
def serving(checks_users: bool = False, *objects: Object) -> Iterator[Place]:
    time = Time()
    cluster = Cluster(Script, ViewSettings(idle_after=30.0), prices, clock=time.clock)
    script = Script(tell(reading(100.0)), tell(reading(160.0)))
    for _ in range(2):
        asyncio.run(cluster.round(script))
        time.now += 60
    with SimulatedApiServer() as server:
        server.users = USERS
        server.grants = GRANTS
        server.tokens = frozenset({"podgpu"})
        config = ApiConfig(server.url, "test", token="podgpu")
        server.has_kueue = True
        for body in objects:
            server.put(KINDS[body["kind"]], complete(body))
        watch = QueueWatch(config, lambda: cluster.published.state, _PATIENT, time.clock)
        access = None
        if checks_users:
            access = KubernetesAccess(ApiClient(config), UserHeaders(), lambda: time.now)
        app: Any = partial(cluster_application, access=access, read_queue=watch.read)
        try:
            with running(cluster, app=app) as client:  # type: ignore[arg-type]
                yield Place(client, server, time)
        finally:
            watch.close()


def full_node() -> list[Object]:
    return [
        node("a", gpus=3),
        pod("idle", on="a"),
        pod("secret", on="a", namespace="secret-team"),
        pod("busy", on="a"),
    ]


def test_pods_with_the_same_reasons_are_one_group() -> None:
    waiting = [pod(f"train-{number}", gpus=2) for number in range(30)]
    with serving(False, *full_node(), *waiting, pod("other", gpus=1, cpu="100")) as place:
        answer = place.ask_until(31)
    assert answer.gpus == 61.0
    large, other = sorted(answer.groups, key=lambda group: -group.pods)
    assert (large.pods, large.gpus, len(large.examples)) == (30, 60.0, 20)
    assert [reason.key for reason in large.reasons] == ["in_use"]
    assert large.reasons[0].says == (
        "It needs 2 nvidia.com/gpu; 0 of 3 are free on the node that it may use."
    )
    assert [need.says for need in large.needs] == [
        "2 nvidia.com/gpu",
        "1 CPU",
        "1 GiB of memory",
    ]
    assert other.reasons[0].key == "other_too_large"
    assert [(row.resource, row.total, row.free) for row in answer.free] == [
        ("nvidia.com/gpu", 3, 0)
    ]


def test_idle_holders_have_owner_and_cost() -> None:
    with serving(False, *full_node(), pod(gpus=1)) as place:
        (group,) = place.ask_until(1).groups
    (option,) = group.unblock
    assert option.node == "a"
    (holder_pod,) = option.pods
    assert holder_pod.pod in ("idle", "secret")
    assert holder_pod.cost_per_hour == option.cost_per_hour == 4.0
    with serving(False, *full_node(), pod(gpus=2)) as place:
        (group,) = place.ask_until(1).groups
    (option,) = group.unblock
    assert sorted(each.pod for each in option.pods) == ["idle", "secret"]
    assert [each.owner.text for each in option.pods if each.owner] == ["Deployment/chat"]
    assert option.cost_per_hour == 8.0


def test_names_that_an_answer_leaves_out_are_counted() -> None:
    taints = [{"key": f"t{number}", "effect": "NoSchedule"} for number in range(8)]
    with serving(False, node("a", taints=taints), pod()) as place:
        [group] = place.ask_until(1).groups
    [reason] = group.reasons
    assert len(reason.names) == 6
    assert reason.unnamed == 2
    assert "t3:NoSchedule, t4:NoSchedule and 3 more" in reason.says


def test_one_pod_is_selected() -> None:
    objects = [*full_node(), pod("one"), pod("two"), pod("no-gpu", gpus=0, cpu="500")]
    with serving(False, *objects) as place:
        place.ask_until(2)
        assert place.ask("?ns=ml&pod=two").groups[0].examples[0].pod == "two"
        assert place.ask("?ns=other").groups == []
        assert place.ask("?ns=ml").pods == 2
        # A pod without a GPU is not in the queue, and has an answer if it is asked for.
        (group,) = place.ask("?ns=ml&pod=no-gpu").groups
        assert [reason.key for reason in group.reasons] == ["no_gpu"]
        assert place.ask("?ns=ml&pod=absent").groups == []
        assert place.client.ask("/api/v1/queue?pod=" + 300 * "x").status == 400


def test_claims_are_watched() -> None:
    objects = [node("a", gpus=0), device_class(), resource_slice("a", 1)]
    waiting = pod(gpus=0, claims=uses("more"))
    with serving(False, *objects, claim("more"), waiting) as place:
        assert place.ask_until(1).groups[0].reasons[0].key == "fits"
        place.put(claim("held", on="a", devices=(0,)))

        def is_taken() -> bool:
            place.time.now += 60
            return place.ask().groups[0].reasons[0].key == "in_use"

        wait_until(is_taken)


def test_a_cluster_without_dra() -> None:
    with serving(False, node("a"), pod()) as place:
        place.server.resource_api_versions = ()
        place.server.has_kueue = False
        answer = place.ask_until(1)
    assert answer.notes == []
    assert answer.groups[0].reasons[0].key == "fits"


def test_apis_that_the_cluster_lacks_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Most clusters have neither Kueue nor KAI. The API server answers 404 at every retry."""
    groups = ("/apis/kueue.x-k8s.io", "/apis/scheduling.run.ai")
    with SimulatedApiServer() as server, caplog.at_level(logging.INFO):
        cluster = Cluster(Script, ViewSettings(), clock=Time().clock)
        config = ApiConfig(server.url, "test")
        watch = QueueWatch(config, lambda: cluster.published.state, HURRY)

        def is_retried() -> bool:
            paths = [request.path for request in server.requests]
            return min(paths.count(group) for group in groups) >= 5

        wait_until(is_retried)
        server.refusal = (500, "etcd is down")
        wait_until(lambda: "kueue.x-k8s.io with status 500 (etcd is down)" in caplog.text)
        server.refusal = None
        server.requests.clear()
        wait_until(is_retried)
        watch.close()
    infos = [record.message for record in caplog.records if record.levelno == logging.INFO]
    assert [text for text in infos if "kueue" in text or "scheduling.run.ai" in text] == []


def test_a_missing_permission_is_an_error() -> None:
    time = Time()
    with SimulatedApiServer() as server:
        server.forbidden_paths = frozenset({"/api/v1/nodes"})
        config = ApiConfig(server.url, "test")
        cluster = Cluster(Script, ViewSettings(), clock=time.clock)
        watch = QueueWatch(config, lambda: cluster.published.state, HURRY, time.clock)
        app: Any = partial(cluster_application, read_queue=watch.read)
        with running(cluster, app=app) as client:  # type: ignore[arg-type]
            answer = client.ask("/api/v1/queue")
        watch.close()
    assert answer.status == 503
    assert "the list of nodes is not known" in json.loads(answer.text)["error"]
    assert "ClusterRole" in answer.text


def test_without_the_option_the_answer_names_it() -> None:
    cluster = Cluster(Script, ViewSettings(), clock=Time().clock)
    with running(cluster, app=cluster_application) as client:  # type: ignore[arg-type]
        answer = client.ask("/api/v1/queue")
    assert answer.status == 404
    assert "--queue (chart: cluster.queue=true)" in json.loads(answer.text)["error"]


def test_users_see_the_queue_of_their_namespaces() -> None:
    objects = [
        *full_node(),
        pod("mine", gpus=2),
        pod("theirs", gpus=3, namespace="secret-team"),
        pod("cpu", gpus=0, cpu="900", namespace="secret-team"),
    ]
    with serving(True, *objects) as place:
        whole = place.ask_until(2, user="admin")
        assert {group.examples[0].pod for group in whole.groups} == {"mine", "theirs"}
        answer = place.ask(user="ann")
        assert (answer.pods, answer.gpus) == (2, 5.0)
        assert (answer.hidden_pods, answer.hidden_gpus) == (1, 3.0)
        (group,) = answer.groups
        assert group.examples[0].pod == "mine"
        shown = {(each.pod, each.hidden) for each in group.unblock[0].pods}
        assert shown == {("idle", False), ("", True)}
        assert group.unblock[0].cost_per_hour == 8.0
        for query in ("", "?ns=secret-team", "?ns=secret-team&pod=theirs", "?pod=cpu"):
            body = place.client.ask(
                f"/api/v1/queue{query}", Authorization="Bearer token-of-ann"
            ).text
            assert "theirs" not in body
            assert "secret" not in body
        selected = place.ask("?ns=secret-team&pod=theirs", user="ann")
        assert (selected.pods, selected.hidden_pods, selected.groups) == (0, 0, [])
        assert place.client.ask("/api/v1/queue").status == 401


def test_many_pods_and_hostile_texts_are_bounded() -> None:
    """A tenant writes messages, selectors and names. 10,000 pods wait for one reason."""
    size = 10_000
    objects = [*full_node(), *(pod(f"w-{number}", gpus=8) for number in range(size))]
    hostile = pod("hostile", nodeSelector={f"k{n}": HOSTILE[:60] for n in range(50)})
    condition = {"type": "PodScheduled", "status": "False", "message": HOSTILE}
    hostile["status"]["conditions"] = [condition]
    with serving(False, *objects, hostile) as place:
        answer = place.ask_until(size + 1)
        body = place.client.ask("/api/v1/queue").body
    assert len(answer.groups) == 2
    assert max(group.pods for group in answer.groups) == size
    assert len(body) < 20_000
