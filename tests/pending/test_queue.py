"""The answer of `/api/v1/queue`: groups, hidden pods, costs and filters."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from podgpu.errors import UsageError
from podgpu.pending.explain import explain_queue
from podgpu.pending.queue import QueueQuery, QueueSnapshot, make_queue, parse_queue_query
from podgpu.pending.quotas import parse_job, parse_resource_quota
from tests.pending.situations import Object, node, pod
from tests.pending.test_explain import NOW, idle_pod, snapshot

BUSY = [node("a", gpus=2), pod("one", on="a"), pod("two", on="a", namespace="web")]


def ask(*objects: Object, costs: Any = (None, None), **held: Any) -> QueueSnapshot:
    cluster = dataclasses.replace(snapshot([*BUSY, *objects]), **held)
    one = idle_pod("one", NOW - 9000, costs[0])
    two = replace(idle_pod("two", NOW - 8000, costs[1]), namespace="web")
    idle = {("ml", "one"): one, ("web", "two"): two}
    return QueueSnapshot(NOW, explain_queue(cluster, idle, NOW), notes=("a note",))


@pytest.mark.parametrize(
    ("costs", "total"), [((None, None), None), ((2.0, None), 2.0), ((2.0, 0.5), 2.5)]
)
def test_the_cost_of_idle_holders_is_the_sum_of_what_is_known(costs: Any, total: Any) -> None:
    answer = make_queue(ask(pod(gpus=2), costs=costs), QueueQuery())
    [option] = answer.groups[0].unblock
    assert [each.pod for each in option.pods] == ["one", "two"]
    assert option.cost_per_hour == total


def test_namespaces_of_idle_holders_are_among_those_that_may_be_named() -> None:
    found = ask(pod(gpus=2, namespace="speech"))
    assert set(found.list_namespaces()) == {"speech", "ml", "web"}


def test_a_user_sees_the_idle_holders_of_his_namespaces() -> None:
    answer = make_queue(ask(pod(gpus=2)), QueueQuery(), visible={"ml"})
    [option] = answer.groups[0].unblock
    assert [(each.pod, each.hidden) for each in option.pods] == [("one", False), ("", True)]
    assert answer.notes == []
    assert make_queue(ask(pod(gpus=2)), QueueQuery()).notes == ["a note"]


def test_hidden_pods_are_counted_but_not_shown() -> None:
    found = ask(pod(gpus=2), pod("other", gpus=4, namespace="web"))
    answer = make_queue(found, QueueQuery(), visible={"ml"})
    assert (answer.pods, answer.gpus, answer.hidden_pods, answer.hidden_gpus) == (2, 6.0, 1, 4.0)
    assert [each.pod for group in answer.groups for each in group.examples] == ["waiting"]
    # A filter is about what the user may see.
    answer = make_queue(found, QueueQuery("web"), visible={"ml"})
    assert (answer.pods, answer.hidden_pods, answer.groups) == (0, 0, [])
    answer = make_queue(found, QueueQuery("", "other"), visible={"ml"})
    assert (answer.pods, answer.hidden_pods, answer.groups) == (0, 0, [])


def make_job(name: str, owner: str = "") -> Any:
    template = {"metadata": {}, "spec": pod(gpus=1)["spec"]}
    metadata: Object = {
        "name": name,
        "namespace": "ml",
        "uid": name,
        "creationTimestamp": "2026-11-19T12:00:00Z",
    }
    if owner:
        metadata["ownerReferences"] = [
            {"kind": "CronJob", "name": owner, "uid": owner, "controller": True}
        ]
    return parse_job({"metadata": metadata, "spec": {"parallelism": 3, "template": template}})


def test_pods_are_selected_by_their_name_or_that_of_the_owner() -> None:
    quota = parse_resource_quota(
        {
            "metadata": {"name": "gpus", "namespace": "ml"},
            "status": {"hard": {"requests.nvidia.com/gpu": "0"}},
        }
    )
    jobs = [make_job("alone"), make_job("run-1", "nightly")]
    of_a_job = pod("train-x7k2p")
    of_a_job["metadata"]["ownerReferences"] = [
        {"kind": "Job", "name": "train", "uid": "train", "controller": True}
    ]
    found = ask(pod(), pod("other"), of_a_job, workloads=jobs, quotas=[quota])

    def names(name: str, namespace: str = "") -> set[str]:
        answer = make_queue(found, QueueQuery(namespace, name))
        return {each.pod for group in answer.groups for each in group.examples}

    assert names("waiting") == {"waiting"}
    assert names("waiting", "ml") == {"waiting"}
    assert names("waiting", "web") == set()
    assert names("nobody") == set()
    assert names("alone") == {"alone"}
    assert names("run-1") == names("nightly") == {"run-1"}
    assert names("train") == names("train-x7k2p") == {"train-x7k2p"}
    assert names("") == {"waiting", "other", "train-x7k2p", "alone", "run-1"}


def test_names_are_limited() -> None:
    assert parse_queue_query({"ns": "ml", "pod": "x" * 256}) == QueueQuery("ml", "x" * 256)
    with pytest.raises(UsageError, match="pod= is longer than 256 characters"):
        parse_queue_query({"pod": "x" * 257})
