"""Explanations of pending pods, made from objects of the API server."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from podgpu.errors import utc_text
from podgpu.model import PodName, WorkloadOwner
from podgpu.pending.cluster_index import FreeGpus
from podgpu.pending.cluster_objects import parse_node, parse_pod_state
from podgpu.pending.dra_objects import parse_claim, parse_device_class, parse_slice_record
from podgpu.pending.explain import Explainer, Explanation, explain_queue
from podgpu.pending.idle_pods import IdlePod
from podgpu.pending.pending_objects import ClusterObjects
from podgpu.pending.reasons import STAGES, Reason, advise, describe
from tests.pending.situations import (
    CLASS,
    DRIVER,
    GPU,
    H100,
    H200,
    NOT_GPUS,
    TWENTY,
    WAITING,
    Object,
    Situation,
    claim,
    device_class,
    node,
    pod,
    resource_slice,
    uses,
)

CREATED = "2026-11-19T12:00:00Z"
NOW = 1_795_093_200.0  # 12:20
MANY = 10_000


def complete(body: Object) -> Object:
    """Adds what the API server and a scheduler add."""
    body = copy.deepcopy(body)
    metadata = body["metadata"]
    metadata.setdefault("uid", f"{metadata.get('namespace', '')}/{metadata['name']}")
    metadata.setdefault("creationTimestamp", CREATED)
    is_seen = body["spec"].get("schedulerName") is None if "spec" in body else False
    if body["kind"] == "Pod" and not body["spec"].get("nodeName") and is_seen:
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        body["status"].setdefault("conditions", [condition])
    return body


def snapshot(objects: Iterable[Object]) -> ClusterObjects:
    bodies = [complete(body) for body in objects]

    def parse(kind: str, convert: Any) -> list[Any]:
        return [convert(body) for body in bodies if body["kind"] == kind]

    return ClusterObjects(
        pods=[state for state in parse("Pod", parse_pod_state) if state is not None],
        nodes=parse("Node", parse_node),
        claims=parse("ResourceClaim", parse_claim),
        classes=parse("DeviceClass", parse_device_class),
        slices=parse("ResourceSlice", parse_slice_record),
    )


def explain_one(
    *objects: Object, idle: dict[PodName, IdlePod] | None = None, name: str = WAITING
) -> Explanation:
    cluster = snapshot(objects)
    explainer = Explainer(cluster, idle or {}, NOW)
    (waiting,) = [each for each in cluster.pending if each.name == name]
    return explainer.explain(waiting)


def keys(explanation: Explanation) -> list[str]:
    return [reason.key for reason in explanation.reasons]


def idle_pod(name: str, since: float = NOW - 7200, cost: float | None = 2.5) -> IdlePod:
    owner = WorkloadOwner("Deployment", name)
    return IdlePod(
        namespace="ml", pod=name, owner=owner, gpus=1.0, idle_since=since, cost_per_hour=cost
    )


def nominate(body: Object, where: str) -> Object:
    return body | {"status": body["status"] | {"nominatedNodeName": where}}


@pytest.mark.parametrize("situation", [*TWENTY, *NOT_GPUS], ids=lambda each: each.name)
def test_a_planted_cause_is_the_first_reason(situation: Situation) -> None:
    objects = situation.objects
    if situation.key == "preempting":
        # The scheduler writes this.
        objects = [*objects[:-1], nominate(objects[-1], "a")]
    if situation.also == ("never_preempts",):
        # The API server copies both from the PriorityClass.
        waiting = objects[-1]
        spec = waiting["spec"] | {"priority": 1000, "preemptionPolicy": "Never"}
        objects = [*objects[:-1], waiting | {"spec": spec}]
    found = explain_one(*objects)
    assert keys(found)[0] == situation.key
    assert found.reasons[0].resource == situation.resource or not situation.resource
    assert set(situation.also) <= set(keys(found))
    assert not set(situation.unlisted) & set(keys(found))


def test_a_pod_that_fits_now() -> None:
    found = explain_one(node("a"), node("b", gpus=1), pod("old", on="b"), pod(gpus=2))
    assert found.reasons == (Reason(key="fits", resource=GPU, nodes=1, free=8.0),)


def test_each_node_with_gpus_counts_in_one_reason() -> None:
    taint = [{"key": "team", "value": "x", "effect": "NoExecute"}]
    found = explain_one(
        node("full", gpus=2),
        pod("old", gpus=2, on="full"),
        node("closed", unschedulable=True),
        node("tainted", taints=taint),
        node("both", taints=taint, unschedulable=True),
        node("small", gpus=1),
        node("other-model", model=H200),
        node("no-gpu", gpus=0),
        pod(gpus=2, nodeSelector={"nvidia.com/gpu.product": H100}),
    )
    counts = {reason.key: reason.nodes for reason in found.reasons}
    assert counts == {"in_use": 1, "cordoned": 2, "taint": 1, "too_large": 1, "selector": 1}
    assert keys(found)[0] == "in_use"
    alone = {reason.key: reason.alone for reason in found.reasons}
    assert alone == {
        "in_use": True,
        "cordoned": True,
        "taint": True,
        "too_large": True,
        "selector": True,
    }


def test_numbers_of_a_reason() -> None:
    found = explain_one(
        *(node(name) for name in "abc"),
        pod("old-a", gpus=7, on="a"),
        pod("old-b", gpus=6, on="b"),
        pod("old-c", gpus=5, on="c"),
        pod(gpus=4),
    )
    reason = Reason(
        key="fragmented",
        resource=GPU,
        needed=4.0,
        free=6.0,
        largest=3.0,
        total=24.0,
        nodes=3,
        alone=True,
    )
    assert found.reasons == (reason,)
    assert found.gpus == 4.0


def test_unhealthy_gpus_are_named() -> None:
    """A device plugin that reports a GPU as unhealthy takes it from `allocatable` alone."""
    offered = node("a", gpus=3, cpu="62")
    offered["status"]["capacity"] = offered["status"]["allocatable"] | {GPU: "4", "cpu": "64"}
    too_large = explain_one(offered, pod(gpus=4)).reasons[0]
    assert (too_large.key, too_large.largest, too_large.unhealthy) == ("too_large", 3.0, 1.0)
    text = "It needs 4 nvidia.com/gpu on one node; the node has 3."
    assert describe(too_large) == f"{text} Kubernetes calls 1 more unhealthy."
    otherwise = "Otherwise: request fewer, or use several pods."
    assert advise(too_large) == f"Repair the unhealthy GPUs. {otherwise}"

    in_use = explain_one(offered, pod("old", gpus=3, on="a"), pod()).reasons[0]
    assert (in_use.key, in_use.unhealthy) == ("in_use", 1.0)
    assert advise(in_use) == "Repair the unhealthy GPUs."

    reserved = explain_one(offered, pod(cpu="63")).reasons[0]
    assert (reserved.key, reserved.unhealthy) == ("other_too_large", None), "reserved CPUs"


def test_a_stopped_device_plugin_leaves_nothing_that_nodes_offer() -> None:
    """Such as all GPUs unhealthy: `capacity` still has them."""
    stopped = node("a")
    stopped["status"]["capacity"] = stopped["status"]["allocatable"]
    stopped["status"]["allocatable"] = stopped["status"]["capacity"] | {GPU: "0"}
    [reason] = explain_one(stopped, pod()).reasons
    assert (reason.key, reason.resource, reason.unhealthy) == ("not_offered", GPU, 8.0)
    text = "No node offers nvidia.com/gpu. Kubernetes calls 8 unhealthy."
    assert describe(reason) == text
    assert advise(reason).startswith("Repair the unhealthy GPUs. Otherwise: correct the name")

    other = node("b", gpus=0, resources={"amd.com/gpu": "4"})
    [reason] = explain_one(stopped, other, pod()).reasons
    assert reason.names == ("amd.com/gpu",), "not what it is missing"


def test_a_cluster_without_nodes() -> None:
    [reason] = explain_one(pod()).reasons
    assert (reason.key, describe(reason)) == ("no_nodes", "The cluster has no nodes.")


def test_a_selector_that_podgpu_cannot_evaluate_says_nothing_about_free_gpus() -> None:
    wanted = claim("c", **select("size(device.driver) == 1"))
    [reason] = explain_one(*dra(wanted), pod(gpus=0, claims=uses("c"))).reasons
    assert (reason.key, reason.nodes) == ("unchecked", 0)
    assert describe(reason).startswith("podgpu cannot check selectors or constraints of its claims")


def test_an_empty_term_of_the_affinity_is_named() -> None:
    """Kubernetes: a term without requirements matches no node."""
    terms: Object = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{}]}}
    [reason] = explain_one(node("a"), pod(affinity={"nodeAffinity": terms})).reasons
    assert reason.key == "selector"
    assert describe(reason).endswith(": a term without requirements accepts no node.")


def test_a_stage_that_excludes_the_last_node_comes_first() -> None:
    """The selector leaves a node that is too small: the size is the cause."""
    found = explain_one(
        node("a", gpus=4, model=H200),
        node("b", gpus=8),
        pod(gpus=8, nodeSelector={"nvidia.com/gpu.product": H200}),
    )
    assert keys(found) == ["too_large", "selector"]
    assert found.reasons[0].largest == 4.0
    assert found.reasons[1].free == 8.0


@pytest.mark.parametrize("is_alternative", [True, False])
def test_one_selector_of_several_that_podgpu_cannot_evaluate(is_alternative: bool) -> None:
    """Nothing is said about the others, although they alone do not fit."""
    unsupported = {"deviceClassName": CLASS} | select("size(device.driver) == 1")
    wanted = claim("c")
    requests = wanted["spec"]["devices"]["requests"]
    if is_alternative:
        large = {"name": "large", "deviceClassName": CLASS, "count": 9}
        requests[0] = {"name": "r", "firstAvailable": [large, {"name": "other"} | unsupported]}
    else:
        requests.append({"name": "other", "exactly": unsupported})

    [reason] = explain_one(*dra(wanted), pod(gpus=0, claims=uses("c"))).reasons
    assert (reason.key, reason.nodes) == ("unchecked", 0)


def test_an_alternative_that_podgpu_cannot_evaluate_and_does_not_need() -> None:
    wanted = claim("c")
    unsupported = {"deviceClassName": CLASS} | select("size(device.driver) == 1")
    small = {"name": "small", "deviceClassName": CLASS, "count": 1}
    alternatives = [small, {"name": "other"} | unsupported]
    wanted["spec"]["devices"]["requests"] = [{"name": "r", "firstAvailable": alternatives}]
    assert keys(explain_one(*dra(wanted), pod(gpus=0, claims=uses("c")))) == ["fits"]


def test_a_selector_names_what_no_node_has() -> None:
    wanted = {"nvidia.com/gpu.product": H100, "zone": "mars"}
    found = explain_one(node("a"), pod(nodeSelector=wanted))
    assert found.reasons[0].names == ("zone=mars",)


def test_taints_are_named_and_tolerated_ones_are_not() -> None:
    taints = [
        {"key": "gpu", "value": "train", "effect": "NoSchedule"},
        {"key": "soft", "effect": "PreferNoSchedule"},
        {"key": "night", "effect": "NoSchedule"},
    ]
    tolerations = [{"key": "night", "operator": "Exists"}]
    found = explain_one(node("a", taints=taints), pod(tolerations=tolerations))
    assert found.reasons[0].names == ("gpu=train:NoSchedule",)
    assert keys(
        explain_one(node("a", taints=taints), pod(tolerations=[{"operator": "Exists"}]))
    ) == ["fits"]


def make_many_taints(number: int) -> list[Object]:
    taints = [{"key": f"t{index}", "effect": "NoSchedule"} for index in range(number)]
    return [node("a", taints=taints), pod()]


def make_many_selectors(number: int) -> list[Object]:
    return [node("a"), pod(nodeSelector={f"label{index}": "x" for index in range(number)})]


def make_many_gates(number: int) -> list[Object]:
    return [node("a"), pod(schedulingGates=[{"name": f"gate{index}"} for index in range(number)])]


def make_many_waiting(number: int) -> list[Object]:
    body = pod(on="a")
    statuses = []
    for index in range(number):
        statuses.append({"name": f"c{index}", "state": {"waiting": {"reason": f"Reason{index}"}}})
    body["status"] = {"phase": "Pending", "containerStatuses": statuses}
    return [node("a"), body]


def make_many_resources(number: int) -> list[Object]:
    offered = {f"nvidia.com/mig-{index}g.10gb": "1" for index in range(1, number + 1)}
    return [node("a", gpus=0, resources=offered), pod(resource="nvidia.com/mig-9g.10gb")]


def make_many_expressions(number: int) -> list[Object]:
    selectors = []
    for index in range(number):
        selectors.append({"cel": {"expression": f"device.driver == 'other-{index}'"}})
    return dra(claim("c", selectors=selectors), pod(gpus=0, claims=uses("c")))


@pytest.mark.parametrize("number", [6, 7, 8])
@pytest.mark.parametrize(
    "make",
    [
        make_many_taints,
        make_many_selectors,
        make_many_gates,
        make_many_waiting,
        make_many_resources,
        make_many_expressions,
    ],
)
def test_names_that_are_left_out_are_counted(
    make: Callable[[int], list[Object]], number: int
) -> None:
    reason = explain_one(*make(number)).reasons[0]
    text = describe(reason)
    if number == 6:
        assert text.count(", ") == 5
        assert " more" not in text
    else:
        assert text.count(", ") == 4
        assert f" and {number - 5} more" in text
    assert reason.unnamed == number - 6
    # They are in the JSON, so a tenant must not make them long.
    assert len(reason.names) <= 7


def test_pods_that_end_free_their_gpus_soon() -> None:
    old = pod("old", gpus=2, on="a")
    old["metadata"]["deletionTimestamp"] = CREATED
    found = explain_one(node("a", gpus=2), old, pod())
    assert keys(found) == ["in_use", "ending"]
    assert found.reasons[1].free == 2.0


def test_gpus_of_two_resources_become_free() -> None:
    mig = "nvidia.com/mig-1g.10gb"
    ending = [
        pod("gpus", gpus=2, on="a"),
        pod("instances", gpus=3, on="b", resource=mig),
    ]
    for old in ending:
        old["metadata"]["deletionTimestamp"] = CREATED

    waiting = pod(gpus=1)
    waiting["spec"]["containers"][0]["resources"]["requests"][mig] = "1"
    nodes = [node("a", gpus=2, resources={mig: "3"}), node("b", gpus=2, resources={mig: "3"})]
    found = explain_one(*nodes, *ending, waiting)
    assert keys(found) == ["in_use", "in_use", "ending", "ending"]
    assert {reason.resource: reason.free for reason in found.reasons[2:]} == {GPU: 2.0, mig: 3.0}


def test_only_pods_with_gpus_can_free_them() -> None:
    busy = [node("a", gpus=1), pod("old", on="a")]
    assert keys(explain_one(*busy, pod(priority=1000))) == ["in_use"]
    without = pod("cpu", gpus=0, on="a")
    without["metadata"]["deletionTimestamp"] = CREATED
    assert keys(explain_one(*busy, without, pod())) == ["in_use"]
    below = pod("below", gpus=0, on="a")
    never = pod(priority=0, preemptionPolicy="Never")
    assert keys(explain_one(*busy, below, never)) == ["in_use"]


def test_a_node_that_is_too_small_names_neither_its_pods_nor_its_taints() -> None:
    ending = pod("old", on="a")
    ending["metadata"]["deletionTimestamp"] = CREATED
    taint = [{"key": "team", "value": "x", "effect": "NoSchedule"}]
    (reason,) = explain_one(node("a", gpus=1, taints=taint), ending, pod(gpus=2)).reasons
    assert (reason.key, reason.names) == ("too_large", ())


def test_reasons_of_more_nodes_come_first() -> None:
    taint = [{"key": "team", "value": "x", "effect": "NoSchedule"}]
    found = explain_one(
        node("a", unschedulable=True),
        node("b", taints=taint),
        node("c", taints=taint),
        node("d", gpus=1),
        pod("old", on="d"),
        pod(),
    )
    assert keys(found) == ["in_use", "taint", "cordoned"]


def test_resources_that_no_node_offers_and_that_no_node_offers_together() -> None:
    body = pod()
    for kind in ("requests", "limits"):
        body["spec"]["containers"][0]["resources"][kind]["amd.com/gpu"] = "1"
    found = explain_one(node("a"), body)
    assert [(each.key, each.resource) for each in found.reasons] == [("not_offered", "amd.com/gpu")]

    other = node("b", gpus=0, resources={"amd.com/gpu": "8"})
    found = explain_one(node("a"), other, body)
    assert {each.resource for each in found.reasons} == {"amd.com/gpu", GPU}


def test_a_node_without_a_slot_for_a_pod() -> None:
    found = explain_one(node("a", pods="1"), pod("old", gpus=0, on="a"), pod())
    (reason,) = found.reasons
    assert (reason.key, reason.resource) == ("other_in_use", "pods")
    assert (reason.needed, reason.total, reason.free) == (1.0, 1.0, 0.0)


def test_gpus_that_are_spread_over_nodes() -> None:
    objects = [node("a", gpus=2), node("b", gpus=2), pod("c", on="a"), pod("d", on="b")]
    assert keys(explain_one(*objects, pod(gpus=2))) == ["fragmented"]
    fuller = [*objects, pod("e", on="b")]
    assert keys(explain_one(*fuller, pod(gpus=2))) == ["in_use"], "one is free in total"
    one_node = [node("a", gpus=2), pod("c", on="a")]
    assert keys(explain_one(*one_node, pod(gpus=2))) == ["in_use"]
    # Parts of GPUs that are free together are no whole GPU.
    parts = [node("a", gpus=1), fraction("half", "0.6", on="a", group="g")]
    parts += [node("b", gpus=1), fraction("other", "0.6", on="b", group="h")]
    for name in ("a", "b"):
        parts.append(pod(f"reservation-{name}", on=name, namespace="kai-resource-reservation"))
    assert keys(explain_one(*parts, fraction(WAITING, "0.5"))) == ["in_use"]


def test_a_pod_that_no_scheduler_has_seen() -> None:
    """What nodes have does not matter then."""
    for body in (pod(schedulerName="gone"), pod(schedulerName="gone", priority=5)):
        assert keys(explain_one(node("a"), body)) == ["unseen"]
    taint = [{"key": "team", "value": "x", "effect": "NoSchedule"}]
    found = explain_one(node("a", taints=taint), pod(schedulerName="gone"))
    assert keys(found) == ["unseen", "taint"]

    new = pod(schedulerName="slow")
    new["metadata"]["creationTimestamp"] = utc_text(NOW - 30)
    assert keys(explain_one(node("a"), new)) == ["unchecked"], "it may be its turn soon"


def test_gpus_are_kept_for_pods_that_preempt() -> None:
    first = pod("first", gpus=2, priority=1000)
    found = explain_one(node("a", gpus=2), nominate(first, "a"), pod(priority=0))
    assert keys(found) == ["nominated"]
    above = explain_one(node("a", gpus=2), nominate(first, "a"), pod(priority=2000))
    assert keys(above) == ["fits"]


def test_a_pod_of_the_same_priority_does_not_take_what_is_kept() -> None:
    first = pod("first", gpus=2, priority=1000)
    same = explain_one(node("a", gpus=2), nominate(first, "a"), pod(priority=1000))
    assert keys(same) == ["nominated"]
    # A full node is in use, whoever waits for it.
    full = [node("a", gpus=2), pod("old", gpus=2, on="a"), nominate(first, "a")]
    (reason,) = explain_one(*full, pod()).reasons
    assert (reason.key, reason.alone) == ("in_use", True)


def test_a_pod_that_ends_does_not_wait() -> None:
    body = pod()
    body["metadata"]["deletionTimestamp"] = CREATED
    assert list(snapshot([node("a"), body]).pending) == []


def test_the_taint_of_a_controller_cordons_a_node() -> None:
    taint = [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}]
    assert keys(explain_one(node("a", taints=taint), pod())) == ["cordoned"]
    tolerations = [{"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}]
    assert keys(explain_one(node("a", taints=taint), pod(tolerations=tolerations))) == ["fits"]


@pytest.mark.parametrize(
    ("operator", "values", "fits"),
    [
        ("In", ["80", "141"], True),
        ("NotIn", ["80"], False),
        ("Exists", [], True),
        ("DoesNotExist", [], False),
        ("Gt", ["79"], True),
        ("Gt", ["80"], False),
        ("Lt", ["81"], True),
        ("Lt", ["much"], False),
    ],
)
def test_node_affinity(operator: str, values: list[str], fits: bool) -> None:
    expression = {"key": "memory", "operator": operator, "values": values}
    terms = [{"matchExpressions": [expression]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    found = explain_one(
        node("a", labels={"memory": "80"}), pod(affinity={"nodeAffinity": required})
    )
    assert keys(found) == ["fits" if fits else "selector"]


def test_a_node_by_its_name() -> None:
    fields = [{"key": "metadata.name", "operator": "In", "values": ["b"]}]
    terms = [{"matchFields": fields}, {"matchExpressions": []}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    wanted = pod(affinity={"nodeAffinity": required})
    assert explain_one(node("a"), node("b"), wanted).reasons[0].nodes == 1
    assert explain_one(node("a"), wanted).reasons[0].names == ("metadata.name=b",)


def test_a_pod_with_a_place_is_starting() -> None:
    body = pod(on="a")
    waiting = {"name": "main", "state": {"waiting": {"reason": "ImagePullBackOff"}}}
    body["status"] = {"phase": "Pending", "containerStatuses": [waiting]}
    found = explain_one(node("a", gpus=1), body)
    assert found.reasons == (Reason(key="starting", names=("a", "ImagePullBackOff")),)


def test_init_containers_and_overhead_count() -> None:
    body = pod(gpus=0, cpu="1")
    limits = {"cpu": "30", GPU: "3"}
    body["spec"]["initContainers"] = [{"name": "init", "resources": {"limits": limits}}]
    body["spec"]["overhead"] = {"cpu": "2"}
    found = explain_one(node("a", gpus=2, cpu="31"), body)
    assert [(reason.key, reason.needed) for reason in found.reasons] == [("too_large", 3.0)]
    assert dict(found.pod.needs.amounts)["cpu"] == 32_000


def test_sidecars_run_beside_containers() -> None:
    body = pod(gpus=2)
    limits = {GPU: "1"}
    sidecar = {"name": "side", "restartPolicy": "Always", "resources": {"limits": limits}}
    body["spec"]["initContainers"] = [sidecar]
    assert explain_one(node("a", gpus=2), body).reasons[0].needed == 3.0


# Idle holders


def test_idle_holders_that_would_unblock_it() -> None:
    idle = {("ml", f"idle-{n}"): idle_pod(f"idle-{n}", NOW - 3600 * n) for n in (1, 2, 3)}
    found = explain_one(
        node("a", gpus=4),
        *(pod(f"idle-{n}", on="a") for n in (1, 2, 3)),
        pod("busy", on="a"),
        node("b", gpus=4),
        pod("large", gpus=4, on="b"),
        pod(gpus=2),
        idle=idle,
    )
    (option,) = found.unblock
    assert option.node == "a"
    assert [each.pod for each in option.pods] == ["idle-3", "idle-2"]


def test_no_holder_unblocks_a_pod_that_lacks_cpu_as_well() -> None:
    idle = {("ml", "idle"): idle_pod("idle")}
    objects = [node("a", gpus=1, cpu="4"), pod("idle", on="a"), pod("old", gpus=0, cpu="3", on="a")]
    assert not explain_one(*objects, pod(cpu="3"), idle=idle).unblock
    assert explain_one(*objects, pod(cpu="1"), idle=idle).unblock


def test_many_nodes_without_an_idle_holder_do_not_end_the_search() -> None:
    objects = []
    for number in range(30):
        name = f"n{number:02}"
        objects += [node(name, gpus=1), pod(f"old-{name}", on=name)]
    found = explain_one(*objects, pod(), idle={("ml", "old-n29"): idle_pod("old-n29")})
    assert [option.node for option in found.unblock] == ["n29"]


def test_fewer_pods_come_first() -> None:
    names = ("one", "two", "large")
    idle = {("ml", name): idle_pod(name) for name in names}
    found = explain_one(
        node("a", gpus=2),
        pod("one", on="a"),
        pod("two", on="a"),
        node("b", gpus=2),
        pod("large", gpus=2, on="b"),
        pod(gpus=2),
        idle=idle,
    )
    assert [option.node for option in found.unblock] == ["b", "a"]


def test_an_idle_holder_of_a_claim_unblocks_it() -> None:
    held = claim("held", on="a", devices=(0,))
    held["status"]["reservedFor"] = [{"resource": "pods", "name": "idle", "uid": "ml/idle"}]
    objects = [node("a", gpus=0), device_class(), resource_slice("a", 1), held, claim("more")]
    idle = {("ml", "idle"): idle_pod("idle")}
    holder = pod("idle", gpus=0, on="a", claims=uses("held"))
    found = explain_one(*objects, holder, pod(gpus=0, claims=uses("more")), idle=idle)
    assert keys(found) == ["in_use"]
    assert [option.node for option in found.unblock] == ["a"]
    held["status"]["reservedFor"].append({"resource": "pods", "name": "b", "uid": "ml/busy"})
    found = explain_one(*objects, holder, pod(gpus=0, claims=uses("more")), idle=idle)
    assert not found.unblock


# Claims


def dra(*objects: Object, gpus: int = 2) -> list[Object]:
    return [node("a", gpus=0), device_class(), resource_slice("a", gpus), *objects]


def select(expression: str) -> Object:
    return {"selectors": [{"cel": {"expression": expression}}]}


@pytest.mark.parametrize(
    ("expression", "key"),
    [
        (f"device.attributes['{DRIVER}'].productName == '{H100}'", "fits"),
        (f"device.attributes['{DRIVER}'].productName.matches('^NVIDIA-H.*HBM3$')", "fits"),
        (f"device.attributes['{DRIVER}'].productName.lowerAscii().matches('a100')", "no_device"),
        (f"device.attributes['{DRIVER}'].type == 'mig' || device.driver == '{DRIVER}'", "fits"),
        (f"!(device.attributes['{DRIVER}'].type == 'gpu')", "no_device"),
        (f"'{DRIVER}' in device.attributes && true", "fits"),
        (f"device.attributes['{DRIVER}'].productName.matches('HBM3$')", "fits"),
        (f"device.attributes['{DRIVER}'].productName.matches('NVIDIA$')", "no_device"),
        (f"device.attributes['{DRIVER}'].productName.matches('^H100')", "no_device"),
        (f"device.capacity['{DRIVER}'].memory.isGreaterThan(quantity('79Gi'))", "fits"),
        (f"device.capacity['{DRIVER}'].memory.isLessThan(quantity('80Gi'))", "no_device"),
        (f"device.capacity['{DRIVER}'].memory.isLessThan(other('80Gi'))", "unchecked"),
        (f"device.attributes['{DRIVER}'].absent == 'x'", "no_device"),
        (f"!has(device.attributes['{DRIVER}'].absent)", "fits"),
        (f"has(device.capacity['{DRIVER}'].memory) ? false : true", "no_device"),
        (f"device.attributes['{DRIVER}'].productName.matches('^(a+)+$')", "unchecked"),
        (f"device.attributes['{DRIVER}'].productName.size() > 3", "unchecked"),
        ("__import__('os').system('true') == 0", "unchecked"),
        ("(" * 1000 + "true" + ")" * 1000, "unchecked"),
    ],
)
def test_selectors_of_claims(expression: str, key: str) -> None:
    objects = dra(claim("one", **select(expression)), pod(gpus=0, claims=uses("one")))
    assert keys(explain_one(*objects))[0] == key


def test_a_claim_of_more_devices_than_are_free() -> None:
    objects = [
        claim("held", on="a", devices=(1,)),
        claim("two", count=2),
        pod(gpus=0, claims=uses("two")),
    ]
    found = explain_one(*dra(*objects))
    reason = found.reasons[0]
    assert (reason.key, reason.needed, reason.free, reason.total) == ("in_use", 2.0, 1.0, 2.0)
    assert found.gpus == 2.0
    assert keys(explain_one(*dra(*objects, gpus=3))) == ["fits"]


def test_two_requests_of_a_claim_get_two_devices() -> None:
    """The scheduler does not give one device to both."""
    both = claim("both")
    (request,) = both["spec"]["devices"]["requests"]
    both["spec"]["devices"]["requests"] = [request, request | {"name": "second"}]
    waiting = pod(gpus=0, claims=uses("both"))
    assert keys(explain_one(*dra(both, waiting, gpus=1))) == ["too_large"]
    assert keys(explain_one(*dra(both, waiting, gpus=2))) == ["fits"]


def test_all_devices_and_alternatives_of_a_claim() -> None:
    everything = claim("all", allocationMode="All")
    waiting = pod(gpus=0, claims=uses("all"))
    assert keys(explain_one(*dra(everything, waiting))) == ["fits"]
    held = claim("held", on="a", devices=(0,))
    assert keys(explain_one(*dra(everything, held, waiting))) == ["in_use"]
    choice = claim("choice")
    (request,) = choice["spec"]["devices"]["requests"]
    first = request["exactly"] | {"name": "many", "count": 9}
    second = request["exactly"] | {"name": "one", "count": 1}
    choice["spec"]["devices"]["requests"] = [{"name": "g", "firstAvailable": [first, second]}]
    assert keys(explain_one(*dra(choice, pod(gpus=0, claims=uses("choice"))))) == ["fits"]


def test_an_alternative_that_does_not_suffice_takes_no_devices() -> None:
    held = claim("held", on="a", devices=(1,))
    choice = claim("choice")
    (request,) = choice["spec"]["devices"]["requests"]
    two = request["exactly"] | {"name": "two", "count": 2}
    one = request["exactly"] | {"name": "one", "count": 1}
    choice["spec"]["devices"]["requests"] = [{"name": "g", "firstAvailable": [two, one]}]
    assert keys(explain_one(*dra(held, choice, pod(gpus=0, claims=uses("choice"))))) == ["fits"]


def test_a_device_with_a_taint() -> None:
    body = resource_slice("a", 1)
    taint = {"key": "gpu.nvidia.com/xid", "effect": "NoSchedule"}
    body["spec"]["devices"][0]["taints"] = [taint]
    objects = [node("a", gpus=0), device_class(), body, pod(gpus=0, claims=uses("one"))]
    assert keys(explain_one(*objects, claim("one"))) == ["not_offered"]
    tolerant = claim("one", tolerations=[{"operator": "Exists"}])
    assert keys(explain_one(*objects, tolerant)) == ["fits"]


def test_a_claim_with_devices_elsewhere() -> None:
    shared = claim("shared", on="a", devices=(0,))
    objects = dra(shared, node("b"), pod(gpus=1, claims=uses("shared")))
    objects[0] = node("a", gpus=1)
    found = explain_one(*objects, pod("old", on="a"))
    assert keys(found) == ["in_use", "claim_node"]
    assert found.reasons[1].names == ("shared",)


def test_a_claim_that_was_not_created() -> None:
    template = [{"name": "gpus", "resourceClaimTemplateName": "one-gpu"}]
    found = explain_one(*dra(pod(gpus=0, claims=template)))
    assert found.reasons == (Reason(key="claim_not_created", names=("one-gpu",)),)


def test_a_claim_of_a_template() -> None:
    """The status of the pod names the claim. Without a name, the pod needs none."""
    waiting = pod(gpus=0, claims=[{"name": "gpus", "resourceClaimTemplateName": "four"}])
    entry = {"name": "gpus", "resourceClaimName": "waiting-gpus-x7"}
    waiting["status"]["resourceClaimStatuses"] = [entry]
    objects = dra(claim("waiting-gpus-x7", count=4), waiting)
    assert keys(explain_one(*objects)) == ["too_large"]
    waiting["status"]["resourceClaimStatuses"] = [{"name": "gpus"}]
    queue = explain_queue(snapshot(objects), {}, NOW)
    assert queue.waiting == [], "it needs no GPU"


def test_administrators_take_no_device() -> None:
    """A claim with adminAccess is for monitoring."""
    monitor = claim("monitor", on="a", devices=(0, 1))
    for result in monitor["status"]["allocation"]["devices"]["results"]:
        result["adminAccess"] = True
    waiting = pod(gpus=0, claims=uses("two"))
    assert keys(explain_one(*dra(monitor, claim("two", count=2), waiting))) == ["fits"]

    new_monitor = claim("new", adminAccess=True)
    with_gpu = pod(gpus=1, claims=uses("new"))
    assert keys(explain_one(*dra(node("b"), new_monitor, with_gpu))) == ["fits"]


def test_devices_that_several_nodes_reach() -> None:
    """A slice has a node, a selector of nodes, or neither."""
    body = resource_slice("fabric", 1)
    del body["spec"]["nodeName"]
    terms = [{"matchExpressions": [{"key": "rack", "operator": "In", "values": ["r1"]}]}]
    body["spec"]["nodeSelector"] = {"nodeSelectorTerms": terms}
    objects = [device_class(), body, claim("one"), pod(gpus=0, claims=uses("one"))]
    assert keys(explain_one(node("a", gpus=0, labels={"rack": "r1"}), *objects)) == ["fits"]
    assert keys(explain_one(node("a", gpus=0, labels={"rack": "r2"}), *objects)) == ["not_offered"]


def test_an_extended_resource_of_a_device_class() -> None:
    objects = dra(pod(gpus=3), gpus=2)
    objects[1]["spec"]["extendedResourceName"] = GPU
    assert explain_one(*objects).reasons[0].key == "too_large"


def test_partitions_of_one_gpu_exclude_each_other() -> None:
    body = resource_slice("a", 2)
    counters = {"memory": {"value": "80Gi"}}
    use = [{"counterSet": "gpu-0", "counters": {"memory": {"value": "60Gi"}}}]
    for device in body["spec"]["devices"]:
        device["consumesCounters"] = use
    body["spec"]["sharedCounters"] = [{"name": "gpu-0", "counters": counters}]
    objects = [node("a", gpus=0), device_class(), body, claim("held", on="a", devices=(0,))]
    found = explain_one(*objects, claim("one"), pod(gpus=0, claims=uses("one")))
    assert keys(found) == ["in_use"]
    assert found.reasons[0].free == 0.0

    # Two of them use the counters completely.
    use[0]["counters"] = {"memory": {"value": "40Gi"}}
    assert keys(explain_one(*objects, claim("one"), pod(gpus=0, claims=uses("one")))) == ["fits"]
    use[0]["counters"] = {"memory": {"value": f"{40 * 2**30 + 1}"}}
    assert keys(explain_one(*objects, claim("one"), pod(gpus=0, claims=uses("one")))) == ["in_use"]


def test_devices_that_several_claims_share() -> None:
    body = resource_slice("a", 1)
    body["spec"]["devices"][0]["allowMultipleAllocations"] = True
    body["spec"]["devices"][0]["capacity"]["memory"]["requestPolicy"] = {"default": "10Gi"}
    held = claim("held", on="a", devices=(0,))
    held["status"]["allocation"]["devices"]["results"][0] |= {
        "shareID": "1",
        "consumedCapacity": {"memory": "60Gi"},
    }
    objects = [node("a", gpus=0), device_class(), body, held, pod(gpus=0, claims=uses("one"))]
    small = claim("one", capacity={"requests": {"memory": "20Gi"}})
    large = claim("one", capacity={"requests": {"memory": "21Gi"}})
    assert keys(explain_one(*objects, small)) == ["fits"]
    assert keys(explain_one(*objects, large)) == ["in_use"]


def test_gpus_of_one_claim_that_must_have_the_same_attribute() -> None:
    body = resource_slice("a", 4)
    for index, device in enumerate(body["spec"]["devices"]):
        device["attributes"]["numa"] = {"int": index // 2}
    pair = claim("pair", count=2)
    pair["spec"]["devices"]["constraints"] = [{"matchAttribute": f"{DRIVER}/numa"}]
    objects = [node("a", gpus=0), device_class(), body, pair, pod(gpus=0, claims=uses("pair"))]
    one_of_each = claim("held", on="a", devices=(0, 2))
    assert keys(explain_one(*objects)) == ["fits"]
    assert keys(explain_one(*objects, one_of_each)) == ["in_use"]

    # All its GPUs have the same list.
    for device in body["spec"]["devices"]:
        device["attributes"]["numa"] = {"ints": [0, 1]}
    assert keys(explain_one(*objects)) == ["fits"]

    # A constraint on one of several requests is not checked.
    pair["spec"]["devices"]["constraints"][0]["requests"] = ["gpus"]
    found = explain_one(*objects, one_of_each)
    assert keys(found) == ["unchecked"]
    assert found.reasons[0].names == ("dra_selector",)


def test_a_claim_of_another_kind_of_device_is_no_gpu() -> None:
    nic = claim("nic", deviceClassName="rdma.example.com")
    rdma = device_class("rdma.example.com", "device.driver == 'rdma.example.com'")
    cluster = snapshot([node("a", gpus=0), rdma, nic, pod(gpus=0, claims=uses("nic"))])
    assert explain_queue(cluster, {}, NOW).waiting == []

    with_gpu = explain_one(node("a"), rdma, nic, pod(gpus=2, claims=uses("nic")))
    assert with_gpu.gpus == 2.0
    assert [(need.resource, need.gpus) for need in with_gpu.needs][:2] == [
        (GPU, 2.0),
        ("rdma.example.com", 0.0),
    ]


# Fractions (KAI Scheduler)


def fraction(name: str, text: str, on: str = "", group: str = "") -> Object:
    body = pod(name, gpus=0, on=on, **({} if on else {"schedulerName": "kai-scheduler"}))
    body["metadata"]["annotations"] = {"gpu-fraction": text}
    if group:
        body["metadata"]["labels"] = {"runai-gpu-group": group}
    if not on:
        condition = {"type": "PodScheduled", "status": "False"}
        body["status"]["conditions"] = [condition]
    return body


def test_a_fraction_of_a_gpu() -> None:
    objects = [
        node("a", gpus=1),
        pod("gpu-reservation-1", on="a", namespace="kai-resource-reservation"),
        fraction("half", "0.5", on="a", group="g"),
    ]
    found = explain_one(*objects, fraction(WAITING, "0.6"))
    assert keys(found) == ["in_use"]
    assert (found.reasons[0].needed, found.reasons[0].free) == (0.6, 0.5)
    assert found.gpus == 0.6
    assert keys(explain_one(*objects, fraction(WAITING, "1.5"))) == ["too_large"]
    two = fraction(WAITING, "0.5")
    two["metadata"]["annotations"]["gpu-fraction-num-devices"] = "2"
    found = explain_one(*objects, two)
    assert (found.gpus, found.reasons[0].needed) == (1.0, 1.0)
    fits = explain_one(*objects, fraction(WAITING, "0.5"))
    # Its scheduler has rules of its own, such as queues.
    assert keys(fits) == ["unchecked"]
    assert fits.reasons[0].names == ("scheduler",)


def test_memory_of_a_gpu() -> None:
    body = fraction(WAITING, "0")
    body["metadata"]["annotations"] = {"gpu-memory": "41000"}
    labels = {"nvidia.com/gpu.memory": "81559"}
    objects = [node("a", gpus=1, labels=labels), fraction("half", "0.5", on="a", group="g")]
    reserved = pod("gpu-reservation-1", on="a", namespace="kai-resource-reservation")
    found = explain_one(*objects, reserved, body)
    assert (found.reasons[0].key, found.reasons[0].needed) == ("in_use", 0.51)
    assert found.needs[0].resource == "gpu-memory"
    assert found.needs[0].amount == 41000 * 2**20
    body["metadata"]["annotations"]["gpu-fraction-num-devices"] = "2"
    assert explain_one(*objects, reserved, body).needs[0].amount == 82000 * 2**20


def test_what_only_another_scheduler_knows_is_not_checked() -> None:
    """HAMi: nodes do not offer nvidia.com/gpumem, its scheduler counts it."""
    body = pod(schedulerName="hami-scheduler")
    body["spec"]["containers"][0]["resources"]["requests"]["nvidia.com/gpumem"] = "8000"
    body["status"]["conditions"] = [{"type": "PodScheduled", "status": "False"}]
    found = explain_one(node("a", gpus=10), body)
    assert keys(found) == ["unchecked"]
    assert found.gpus == 1.0
    held = [node("a", gpus=1), pod("old", on="a")]
    assert keys(explain_one(*held, body)) == ["in_use"]
    plain = pod(resource="nvidia.com/gpumem")
    assert keys(explain_one(node("a"), plain)) == ["not_offered"]
    # No node offers anything that it requests.
    assert keys(explain_one(node("a", gpus=0), body))[0] == "not_offered"


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]}, "volumes"),
        ({"volumes": [{"name": "v", "ephemeral": {}}]}, "volumes"),
        ({"volumes": [{"name": "v", "emptyDir": {}}]}, ""),
        (
            {"topologySpreadConstraints": [{"whenUnsatisfiable": "DoNotSchedule"}]},
            "topology_spread",
        ),
        ({"topologySpreadConstraints": [{"whenUnsatisfiable": "ScheduleAnyway"}]}, ""),
        ({"schedulingGroup": {"podGroupName": "workers"}}, "gang"),
        ({"workloadRef": {"name": "train", "podGroup": "workers"}}, "gang"),
    ],
)
def test_rules_that_podgpu_does_not_know_are_named(more: Any, name: str) -> None:
    found = explain_one(node("a"), pod(**more))
    assert keys(found) == (["unchecked"] if name else ["fits"])
    assert found.reasons[0].names == ((name,) if name else ())


# All pods


def test_pods_without_a_gpu_are_not_listed() -> None:
    cluster = snapshot([node("a"), pod("cpu", gpus=0), pod("gpu")])
    assert [each.pod.name for each in explain_queue(cluster, {}, NOW).waiting] == ["gpu"]


def test_what_is_free() -> None:
    objects = [
        node("a"),
        node("b"),
        node("closed", unschedulable=True),
        node("c", gpus=4, model=H200),
        pod("old", gpus=3, on="a"),
        resource_slice("c", 2),
        claim("held", on="c", devices=(0,)),
    ]
    assert explain_queue(snapshot(objects), {}, NOW).free == [
        FreeGpus(resource=DRIVER, model=H200, total=2.0, free=1.0, largest=1.0, nodes=1),
        FreeGpus(resource=GPU, model=H100, total=16.0, free=13.0, largest=8.0, nodes=2, closed=8.0),
        FreeGpus(resource=GPU, model=H200, total=4.0, free=4.0, largest=4.0, nodes=1),
    ]


def test_every_reason_has_a_text() -> None:
    for key in (*STAGES, "fits", "unchecked", "unseen", "starting", "gated", "claim_missing"):
        reason = Reason(key=key, resource=GPU, names=("a",), nodes=1, free=1.0, largest=1.0)
        assert describe(reason).endswith(".")
        assert isinstance(advise(reason), str)


def test_many_pods_of_one_job_are_explained_once() -> None:
    objects = [node(f"n{number}") for number in range(10)]
    objects += [pod(f"old-{number}", gpus=8, on=f"n{number}") for number in range(10)]
    cluster = snapshot([*objects, *(pod(f"w-{number}") for number in range(MANY))])
    found = explain_queue(cluster, {}, NOW).waiting
    assert len(found) == MANY
    assert {keys(each)[0] for each in found} == {"in_use"}


def test_many_different_pods_are_bounded() -> None:
    objects = [node("a", gpus=1)]
    objects += [pod(f"w-{number}", cpu=f"{number + 1}m", gpus=2) for number in range(600)]
    found = explain_queue(snapshot(objects), {}, NOW).waiting
    kinds = [keys(each)[0] for each in found]
    assert kinds.count("too_large") == 500
    assert kinds.count("many") == 100
