"""Pods that a quota holds back: Kueue, KAI Scheduler, ResourceQuotas."""

from __future__ import annotations

from typing import Any

from podgpu.pending.explain import Explanation, explain_queue
from podgpu.pending.pending_objects import ClusterObjects
from podgpu.pending.queue import QueueQuery, QueueSnapshot, make_queue
from podgpu.pending.quotas import (
    parse_cluster_queue,
    parse_job,
    parse_kai_queue,
    parse_kueue_workload,
    parse_local_queue,
    parse_replicas,
    parse_resource_quota,
)
from podgpu.pending.reasons import describe
from tests.pending.situations import GPU, Object, node, pod
from tests.pending.test_explain import NOW, complete, fraction, snapshot

KUEUE_GATE = [{"name": "kueue.x-k8s.io/admission"}]
SAYS = "couldn't assign flavors to pod set main: insufficient unused quota for nvidia.com/gpu"


def named(name: str, namespace: str = "ml", **more: Any) -> Object:
    return {"name": name, "namespace": namespace, "uid": name, **more}


def owned_by(kind: str, name: str, uid: str = "job-uid") -> Object:
    owner = {"apiVersion": "v1", "kind": kind, "name": name, "uid": uid, "controller": True}
    return {"ownerReferences": [owner]}


def workload(
    name: str = "job-train", gpus: int = 2, count: int = 4, reserved: str = "False", **spec: Any
) -> Object:
    """Kueue's Workload of the Job `train`."""
    template = {"spec": pod(gpus=gpus)["spec"]}
    condition = {
        "type": "QuotaReserved",
        "status": reserved,
        "reason": "Pending",
        "message": SAYS,
        "lastTransitionTime": "2026-11-19T12:00:00Z",
    }
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta1",
        "kind": "Workload",
        "metadata": named(name, **owned_by("Job", "train")),
        "spec": {
            "queueName": "team",
            "podSets": [{"name": "main", "count": count, "template": template}],
            **spec,
        },
        "status": {"conditions": [condition]},
    }


def cluster_queue(quota: int, used: int) -> Object:
    flavor = {"name": "h100", "resources": [{"name": GPU, "nominalQuota": str(quota)}]}
    reserved = {"name": "h100", "resources": [{"name": GPU, "total": str(used)}]}
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta1",
        "kind": "ClusterQueue",
        "metadata": {"name": "research"},
        "spec": {"resourceGroups": [{"coveredResources": [GPU], "flavors": [flavor]}]},
        "status": {"flavorsReservation": [reserved]},
    }


LOCAL_QUEUE = {
    "apiVersion": "kueue.x-k8s.io/v1beta1",
    "kind": "LocalQueue",
    "metadata": named("team"),
    "spec": {"clusterQueue": "research"},
}


def resource_quota(hard: int, used: int, **spec: Any) -> Object:
    amounts = {"requests.nvidia.com/gpu": str(hard), "pods": "100"}
    taken = {"requests.nvidia.com/gpu": str(used), "pods": "3"}
    return {
        "kind": "ResourceQuota",
        "metadata": named("gpus"),
        "spec": spec,
        "status": {"hard": amounts, "used": taken},
    }


def replica_set(wanted: int, pods: int, gpus: int = 1) -> Object:
    return {
        "kind": "ReplicaSet",
        "metadata": named("chat-1", **owned_by("Deployment", "chat")),
        "spec": {"replicas": wanted, "template": {"spec": pod(gpus=gpus)["spec"]}},
        "status": {"replicas": pods},
    }


def job(**status: Any) -> Object:
    spec = {"parallelism": 3, "completions": 5, "template": {"spec": pod(gpus=2)["spec"]}}
    return {"kind": "Job", "metadata": named("train"), "spec": spec, "status": status}


PARSERS = {
    "Workload": ("workloads", parse_kueue_workload),
    "ReplicaSet": ("workloads", lambda body: parse_replicas("ReplicaSet", body)),
    "Job": ("workloads", parse_job),
    "ClusterQueue": ("quotas", parse_cluster_queue),
    "Queue": ("quotas", parse_kai_queue),
    "ResourceQuota": ("quotas", parse_resource_quota),
    "LocalQueue": ("local_queues", parse_local_queue),
}


def make_objects(*bodies: Object) -> ClusterObjects:
    rest = [body for body in bodies if body["kind"] not in PARSERS]
    plain = snapshot([node("a"), *rest])
    held: dict[str, list[Any]] = {"workloads": [], "quotas": [], "local_queues": []}
    for body in bodies:
        if body["kind"] in PARSERS:
            name, parse = PARSERS[body["kind"]]
            parsed = parse(complete(body))
            if parsed is not None:
                held[name].append(parsed)
    return ClusterObjects(plain.pods, plain.nodes, **held)


def explain(*bodies: Object) -> list[Explanation]:
    return explain_queue(make_objects(*bodies), {}, NOW).waiting


def test_a_workload_stands_for_pods_that_do_not_exist() -> None:
    (found,) = explain(workload(), LOCAL_QUEUE, cluster_queue(quota=10, used=4))
    assert (found.pod.kind, found.pod.name, found.pod.count) == ("Workload", "job-train", 4)
    assert found.gpus == 8.0
    (reason,) = found.reasons
    assert (reason.key, reason.needed, reason.free, reason.total) == ("quota", 8.0, 6.0, 10.0)
    assert describe(reason) == (
        "ClusterQueue research allows 10 nvidia.com/gpu, of which 6 are left. It needs 8"
        " nvidia.com/gpu."
    )
    assert found.pod.message == SAYS
    assert found.pod.owner is not None
    assert found.pod.owner.text == "Job/train"


def test_the_answer_counts_its_pods_and_finds_it_by_its_owner() -> None:
    objects = make_objects(workload(), LOCAL_QUEUE, cluster_queue(quota=10, used=4))
    state = QueueSnapshot(NOW, explain_queue(objects, {}, NOW))
    answer = make_queue(state, QueueQuery(pod="train"))
    assert (answer.pods, answer.gpus) == (4, 8.0)
    (group,) = answer.groups
    assert (group.pods, group.gpus) == (4, 8.0)
    (shown,) = group.examples
    assert (shown.kind, shown.pod, shown.pods) == ("Workload", "job-train", 4)
    assert make_queue(state, QueueQuery(pod="job-train")).pods == 4
    assert make_queue(state, QueueQuery(pod="other")).pods == 0


def test_a_workload_with_quota_or_without_gpus_does_not_wait() -> None:
    queue = [LOCAL_QUEUE, cluster_queue(quota=10, used=4)]
    assert explain(workload(reserved="True"), *queue) == []
    assert explain(workload(active=False), *queue) == []
    assert explain(workload(gpus=0), *queue) == []


def test_a_workload_with_several_kinds_of_pods() -> None:
    several = workload()
    launcher = {"name": "launcher", "template": {"spec": pod(gpus=0)["spec"]}}
    large = {"name": "large", "count": 1, "template": {"spec": pod(gpus=4)["spec"]}}
    none = {"name": "none", "count": 0, "template": {"spec": pod(gpus=1)["spec"]}}
    several["spec"]["podSets"] = [launcher, none, *several["spec"]["podSets"], large]
    (found,) = explain(several, LOCAL_QUEUE, cluster_queue(quota=11, used=0))
    assert (found.pod.count, found.gpus) == (6, 12.0)
    assert found.needs[0].gpus == 2.0, "of the first kind that requests GPUs"
    assert [reason.key for reason in found.reasons] == ["quota"]


def test_memory_of_gpus_is_no_number_of_gpus() -> None:
    """HAMi: pods request GPUs, and MiB of their memory."""
    body = workload(gpus=2, count=1)
    container = body["spec"]["podSets"][0]["template"]["spec"]["containers"][0]
    container["resources"]["requests"]["nvidia.com/gpumem"] = "8000"
    (found,) = explain(body, LOCAL_QUEUE, cluster_queue(quota=1, used=0))
    assert found.gpus == 2.0


def test_a_cluster_queue_that_nobody_uses_yet() -> None:
    fresh = cluster_queue(quota=8, used=0)
    fresh["status"] = {}
    fresh["spec"]["resourceGroups"][0]["flavors"].append(
        {"name": "h200", "resources": [{"name": GPU}]}
    )
    unexplained = workload()
    del unexplained["status"]["conditions"][0]["message"]
    (found,) = explain(unexplained, LOCAL_QUEUE, fresh)
    assert [reason.key for reason in found.reasons] == ["queued"]
    assert found.pod.message == ""


def test_a_gated_pod_has_the_reason_of_its_workload_and_counts_once() -> None:
    waiting = pod(schedulingGates=KUEUE_GATE)
    waiting["metadata"] |= owned_by("Job", "train")
    (found,) = explain(waiting, workload(), LOCAL_QUEUE, cluster_queue(quota=4, used=4))
    assert found.pod.kind == ""
    assert [reason.key for reason in found.reasons] == ["quota"]
    labelled = pod(schedulingGates=KUEUE_GATE)
    labelled["metadata"]["labels"] = {"kueue.x-k8s.io/pod-group-name": "job-train"}
    (found,) = explain(labelled, workload(), LOCAL_QUEUE, cluster_queue(quota=4, used=4))
    assert [reason.key for reason in found.reasons] == ["quota"]
    # Another gate, or no Kueue.
    (found,) = explain(pod(schedulingGates=KUEUE_GATE))
    assert [reason.key for reason in found.reasons] == ["gated"]


def test_a_queue_with_quota_left_and_a_missing_queue() -> None:
    (found,) = explain(workload(), LOCAL_QUEUE, cluster_queue(quota=12, used=4))
    assert [reason.key for reason in found.reasons] == ["queued"]
    (found,) = explain(workload(), LOCAL_QUEUE)
    assert [reason.key for reason in found.reasons] == ["queue_missing"]
    (found,) = explain(workload(), cluster_queue(quota=12, used=4))
    assert found.reasons[0].names == ("team",)


def test_a_resource_quota_rejects_pods_of_a_deployment() -> None:
    (found,) = explain(replica_set(wanted=3, pods=1), resource_quota(hard=4, used=4))
    assert (found.pod.kind, found.pod.count, found.gpus) == ("ReplicaSet", 2, 2.0)
    (reason,) = found.reasons
    assert (reason.key, reason.needed, reason.free) == ("quota", 1.0, 0.0)
    assert reason.names == ("ResourceQuota gpus",)
    # Quota is left: the controller is about to create the pods.
    assert explain(replica_set(wanted=3, pods=1), resource_quota(hard=5, used=4)) == []
    assert explain(replica_set(wanted=3, pods=3), resource_quota(hard=4, used=4)) == []
    by_priority = {"matchExpressions": [{"scopeName": "PriorityClass", "operator": "Exists"}]}
    for scope in ({"scopes": ["BestEffort"]}, {"scopeSelector": by_priority}):
        scoped = resource_quota(hard=4, used=4, **scope)
        assert explain(replica_set(wanted=3, pods=1), scoped) == []
    of_one = replica_set(wanted=1, pods=0)
    del of_one["spec"]["replicas"], of_one["status"]["replicas"]
    (found,) = explain(of_one, resource_quota(hard=4, used=4))
    assert found.pod.count == 1
    elsewhere = resource_quota(hard=4, used=4)
    elsewhere["metadata"]["namespace"] = "web"
    assert explain(replica_set(wanted=3, pods=1), elsewhere) == []


def test_a_resource_quota_rejects_pods_of_a_job() -> None:
    full = resource_quota(hard=5, used=4)
    (found,) = explain(job(active=1, succeeded=1), full)
    assert (found.pod.count, found.gpus) == (2, 4.0)
    (found,) = explain(job(active=0, succeeded=4), full)
    assert found.pod.count == 1
    (found,) = explain(job(active=1, terminating=1), full)
    assert found.pod.count == 1, "a pod that ends is replaced later"
    assert explain(job(active=3), full) == []
    assert explain(job(active=0, completionTime="2026-11-19T12:00:00Z"), full) == []
    for status, count in (("True", 0), ("False", 1)):
        conditions = [{"type": "Failed", "status": status}]
        assert len(explain(job(active=0, conditions=conditions), full)) == count
    suspended = job(active=0)
    suspended["spec"]["suspend"] = True
    assert explain(suspended, full) == []


def kai_queue(limit: float, allocated: str) -> Object:
    return {
        "kind": "Queue",
        "metadata": {"name": "team-a"},
        "spec": {"resources": {"gpu": {"quota": 1, "limit": limit}}},
        "status": {"allocated": {GPU: allocated, "cpu": "12"}},
    }


def test_the_limit_of_a_kai_queue() -> None:
    waiting = fraction("waiting", "0.5")
    waiting["metadata"]["labels"] = {"kai.scheduler/queue": "team-a"}
    (found,) = explain(waiting, kai_queue(limit=2, allocated="1.75"))
    (reason,) = found.reasons
    assert (reason.key, reason.needed, reason.free) == ("quota", 0.5, 0.25)
    (found,) = explain(waiting, kai_queue(limit=0, allocated="0"))
    assert [reason.key for reason in found.reasons] == ["quota"]
    for queue in (kai_queue(limit=2, allocated="1.5"), kai_queue(limit=-1, allocated="9")):
        (found,) = explain(waiting, queue)
        assert [reason.key for reason in found.reasons] == ["unchecked"]
