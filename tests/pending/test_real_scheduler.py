"""Our explanations beside those of a real kube-scheduler, on nodes that are made by hand.

Needs PODGPU_KUBE_BIN, see tests/kube/real_api_server.py. With -s, prints how many of twenty planted
causes were explained right.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import pytest

from podgpu.clock import Clock
from podgpu.errors import SourceError
from podgpu.fleet.settings import ViewSettings
from podgpu.fleet.state import ClusterState
from podgpu.kube.config import load_config
from podgpu.kube.reflector import ReflectorSettings
from podgpu.pending.queue import QueueAnswer, QueueGroup, QueueQuery, make_queue
from podgpu.pending.queue_watch import QueueWatch
from tests.certificates import Certificates
from tests.deploy.chart import of_kind
from tests.kube.real_cluster import RealCluster, run_cluster
from tests.nodes.clock import wait_until
from tests.pending.situations import GPU, NOT_GPUS, TWENTY, WAITING, Object, Situation, node, pod
from tests.pending.test_quotas import LOCAL_QUEUE, SAYS, cluster_queue, workload

SECONDS = 25.0
# Kueue's API is added while podgpu runs.
_EAGER = ReflectorSettings(max_refused_delay=0.5)
_NAMESPACE = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "ml"}}


# Without a kept answer, and a minute ahead, so that a scheduler had time to look at each pod.
_CLOCK = Clock(monotonic=partial(next, itertools.count(0.0, 60.0)), wall=lambda: time.time() + 60.0)


class Lab(NamedTuple):
    cluster: RealCluster
    queue: QueueWatch

    def ask(self, name: str = WAITING) -> QueueAnswer:
        return make_queue(self.queue.read(), QueueQuery("ml", name))

    def explain(self, name: str = WAITING) -> list[str]:
        answer = self.ask(name)
        return [reason.key for group in answer.groups for reason in group.reasons]

    def play(self, situation: Situation) -> Outcome:
        for body in situation.objects:
            self.cluster.create(body)
        waiting = situation.objects[-1]
        message = self._wait_for_message(waiting, situation.scheduler)
        # The scheduler may have looked at the pod before it knew all objects.
        deadline = time.monotonic() + SECONDS
        while self.explain()[:1] != [situation.key] and time.monotonic() < deadline:
            time.sleep(0.2)
        answer = self.ask()
        self.clear()
        return Outcome(situation, answer, message)

    def _wait_for_message(self, waiting: Object, part: str) -> str:
        deadline = time.monotonic() + SECONDS
        message = ""
        while time.monotonic() < deadline:
            status = self.cluster.read(waiting)["status"]
            for condition in status.get("conditions") or ():
                if condition["type"] == "PodScheduled":
                    message = condition.get("message", "")
            if part in message and (message or not part):
                return message
            if not part:
                time.sleep(3.0)
                return message
            time.sleep(0.2)
        return message

    def clear(self) -> None:
        """Deletes all objects, and waits until the watches know it."""
        self.cluster.clear()

        def is_clear() -> bool:
            state = self.queue.read().queue
            return not state.waiting and not state.others and not state.free

        wait_until(is_clear)


class Outcome(NamedTuple):
    situation: Situation
    answer: QueueAnswer
    message: str

    @property
    def mistakes(self) -> list[str]:
        situation = self.situation
        if not self.answer.groups:
            return ["the pod is not listed"]
        (group,) = self.answer.groups
        keys = [reason.key for reason in group.reasons]
        mistakes = []
        if keys[0] != situation.key:
            mistakes.append(f"{keys} instead of {situation.key}")
        if situation.resource and group.reasons[0].resource != situation.resource:
            mistakes.append(f"{group.reasons[0].resource} instead of {situation.resource}")
        if situation.scheduler not in self.message:
            mistakes.append(f"the scheduler does not say {situation.scheduler!r}")
        mistakes += [f"without {key}" for key in situation.also if key not in keys]
        mistakes += [f"blames {key}" for key in situation.unlisted if key in keys]
        return mistakes

    def describe(self) -> str:
        says = " ".join(reason.says for group in self.answer.groups for reason in group.reasons)
        sign = "WRONG" if self.mistakes else "right"
        return (
            f"{sign}  {self.situation.name}\n       podgpu:    {says}\n"
            f"       scheduler: {self.message or '-'} {'; '.join(self.mistakes)}"
        )


@pytest.fixture
def lab(shared_lab: Lab) -> Iterator[Lab]:
    yield shared_lab
    shared_lab.clear()


@pytest.fixture(scope="module")
def shared_lab(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[Lab]:
    with run_cluster(tmp_path_factory.mktemp("kubernetes"), certificates) as cluster:
        cluster.request("POST", "/api/v1/namespaces", _NAMESPACE)
        state = ClusterState(ViewSettings(), None)
        config = load_config(cluster.kubeconfig)
        queue = QueueWatch(config, lambda: state, _EAGER, _CLOCK)
        yield Lab(cluster, queue)
        queue.close()


def test_twenty_planted_causes(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [lab.play(situation) for situation in TWENTY]
    right = [outcome for outcome in outcomes if not outcome.mistakes]
    with capsys.disabled():
        print()
        for outcome in outcomes:
            print(outcome.describe())
        print(f"{len(right)} of {len(outcomes)} explained right")
    assert len(outcomes) == 20
    assert [outcome.describe() for outcome in outcomes if outcome.mistakes] == []


@pytest.mark.parametrize("situation", NOT_GPUS, ids=lambda each: each.name)
def test_another_reason_is_not_blamed_on_gpus(
    lab: Lab, situation: Situation, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = lab.play(situation)
    with capsys.disabled():
        print(f"\n{outcome.describe()}")
    assert outcome.mistakes == []


def test_a_pod_that_fits_now_is_scheduled_next(lab: Lab) -> None:
    """The scheduler is paused while a GPU becomes free, so the pod is still pending."""
    holder = pod("old", on="a")
    objects = [node("a", gpus=1), holder, pod()]
    for body in objects:
        lab.cluster.create(body)
    wait_until(lambda: lab.explain() == ["in_use"])
    lab.cluster.pause_scheduler()
    lab.cluster.delete(lab.cluster.path(holder))
    wait_until(lambda: lab.explain() == ["fits"])
    reason = lab.ask().groups[0].reasons[0]
    assert (reason.resource, reason.free, reason.nodes) == (GPU, 1.0, 1)
    lab.cluster.resume_scheduler()
    waiting = objects[-1]
    wait_until(lambda: lab.cluster.read(waiting)["spec"].get("nodeName") == "a")
    wait_until(lambda: lab.explain() == ["starting"])


def test_a_resource_quota_rejects_pods_that_then_do_not_exist(lab: Lab) -> None:
    quota: Object = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "gpus", "namespace": "ml"},
        "spec": {"hard": {f"requests.{GPU}": "1"}},
    }
    spec = pod()["spec"] | {"restartPolicy": "Always"}
    template = {"metadata": {"labels": {"app": "chat"}}, "spec": spec}
    replicas: Object = {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {"name": "chat", "namespace": "ml"},
        "spec": {
            "replicas": 3,
            "selector": {"matchLabels": {"app": "chat"}},
            "template": template,
        },
    }
    with lab.cluster.running_controllers("resourcequota-controller", "replicaset-controller"):
        for body in (node("a"), quota):
            lab.cluster.create(body)
        wait_until(lambda: "hard" in lab.cluster.read(quota)["status"], "the quota is counted")
        lab.cluster.create(replicas)

        def find_rejected() -> list[QueueGroup]:
            """The pod that the quota admits waits for a GPU, in another group."""
            groups = lab.ask("chat").groups
            return [group for group in groups if group.examples[0].kind == "ReplicaSet"]

        wait_until(
            lambda: [group.pods for group in find_rejected()] == [2],
            "the quota admits one of three pods",
        )
        (group,) = find_rejected()
        assert group.gpus == 2.0
        assert [reason.key for reason in group.reasons] == ["quota"]
        assert group.reasons[0].names == ("ResourceQuota gpus",)
        conditions = lab.cluster.read(replicas)["status"]["conditions"]
        assert "exceeded quota: gpus" in conditions[0]["message"]


def _define(kind: str, plural: str, scope: str = "Namespaced") -> Object:
    """A custom resource of Kueue's API, without a schema."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": "v1beta1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.kueue.x-k8s.io",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": "kueue.x-k8s.io",
            "scope": scope,
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [version],
        },
    }


def test_a_workload_of_kueue_without_quota(lab: Lab) -> None:
    """Kueue does not run here: the objects are what it writes."""
    for definition in (
        _define("Workload", "workloads"),
        _define("LocalQueue", "localqueues"),
        _define("ClusterQueue", "clusterqueues", "Cluster"),
    ):
        lab.cluster.create(definition)
    path = "/apis/kueue.x-k8s.io/v1beta1/clusterqueues"

    def is_served() -> bool:
        with suppress(AssertionError):
            lab.cluster.request("GET", path)
            return True
        return False

    wait_until(is_served, "the API server has Kueue's API")
    for body in (node("a"), workload(), LOCAL_QUEUE, cluster_queue(quota=10, used=4)):
        lab.cluster.create(body)
    wait_until(lambda: lab.explain("job-train") == ["quota"], "the workload is in the queue")
    (group,) = lab.ask("job-train").groups
    assert (group.pods, group.gpus, group.message) == (4, 8.0, SAYS)


def test_the_permissions_of_the_chart_suffice(lab: Lab) -> None:
    """A user with nothing but the ClusterRole of the chart reads the whole queue."""
    (role,) = of_kind("ClusterRole", {"cluster": {"enabled": True, "queue": True}})
    user = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "allowed"}
    reference = {"kind": "ClusterRole", "name": role["metadata"]["name"]}
    binding: Object = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "queue"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", **reference},
        "subjects": [user],
    }
    state = ClusterState(ViewSettings(), None)
    config = load_config(lab.cluster.kubeconfig_of_user)
    watch = QueueWatch(config, lambda: state, _EAGER, _CLOCK)
    try:
        with pytest.raises(SourceError, match="forbidden"):
            watch.read()
        for body in (role, binding, node("a"), pod()):
            lab.cluster.create(body)

        def is_read() -> bool:
            with suppress(SourceError):
                snapshot = watch.read()
                return bool(snapshot.queue.free) and not snapshot.notes
            return False

        wait_until(is_read, "all collections are read")
    finally:
        watch.close()
