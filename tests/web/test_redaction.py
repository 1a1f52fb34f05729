"""What a user may not see is left out of answers. test_access.py tests the same over HTTP."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from podgpu.fleet.repair import Repair
from podgpu.fleet.view import GpuResponse, SourceView, XidView, make_view
from podgpu.model import Condition, Workload, XidCulprit
from podgpu.past.events import Event, EventsAnswer
from podgpu.past.gpu_history import DeviceHistory, GpuHistory, HolderSpan, Mark, PodHistory
from podgpu.web.redaction import (
    hide_in_events,
    hide_in_gpu,
    hide_in_history,
    hide_in_pod_history,
    hide_in_view,
)
from tests.fleet.states import gpu, holder, lost, mig, node, state_of

VISIBLE = frozenset({"ml"})


def test_last_holders_and_texts_of_a_lost_gpu() -> None:
    last = (Workload("ml", "mine", "main"), Workload("web", "secret", "main"))
    cut = gpu(1, instances=(mig(1, holder("secret", "web")),))
    state = state_of(node("n1", msgspec.structs.replace(lost(0), last_holders=last), cut))
    view = hide_in_view(make_view(state), VISIBLE)
    [missing, shared] = view.nodes[0].gpus
    assert [one.pod for one in missing.last_holders] == ["mine"]
    assert [each.condition for each in missing.conditions] == ["lost"]
    assert [(one.pod, one.hidden) for one in shared.instances[0].holders] == [("", True)]
    assert b"secret" not in msgspec.json.encode(view)


def test_namespaces_of_each_cluster_are_one_sum() -> None:
    waste = [holder(name, name, utilization_ratio=0.0) for name in ("a", "b")]
    state = state_of(node("n1", gpu(0, waste[0], busy=0.0), gpu(1, waste[1], busy=0.0)))
    [row] = hide_in_view(make_view(state), frozenset()).namespaces
    assert (row.namespace, row.hidden, row.allocated_gpus, row.idle_gpus) == ("", True, 2.0, 2.0)
    assert row.waste is not None
    assert row.waste.gpus.idle == 2.0


def make_culprit(namespace: str, *affected: Workload) -> XidCulprit:
    return XidCulprit(namespace, "secret", total=1, last_seen=5.0, affected=affected)


def test_only_culprits_of_visible_namespaces_are_named() -> None:
    own = make_culprit("ml", Workload("web", "secret"), Workload("ml", "mine"))
    xid = XidView(xid=31, total=2, culprits=(own, make_culprit("web")))
    [device] = make_view(state_of(node("n1", gpu(0)))).nodes[0].gpus
    source = SourceView(source="kubelet", ok=False, message="secret pod")
    answer = GpuResponse(node="n1", gpu=device, xids=[xid], sources=[source])
    hidden = hide_in_gpu(answer, VISIBLE)
    assert hidden.xids is not None
    [shown] = hidden.xids
    assert (shown.xid, shown.total) == (31, 2)
    assert [culprit.namespace for culprit in shown.culprits] == ["ml"]
    assert [each.pod for each in shown.culprits[0].affected] == ["mine"]
    assert [(each.source, each.message) for each in hidden.sources] == [("kubelet", "")]
    assert hide_in_gpu(GpuResponse(node="n1", gpu=device, sources=[]), VISIBLE).xids is None


def test_a_repair_names_only_visible_pods() -> None:
    [device] = make_view(state_of(node("n1", gpu(0)))).nodes[0].gpus
    device.repair = Repair(action="reset", commands=(), evicts=("ml/mine", "web/secret", "m/l"))
    hidden = hide_in_gpu(GpuResponse(node="n1", gpu=device, sources=[]), VISIBLE)
    assert hidden.gpu.repair is not None
    assert (hidden.gpu.repair.action, hidden.gpu.repair.evicts) == ("reset", ("ml/mine",))


@pytest.mark.parametrize(
    ("parts", "is_shown"),
    [
        ({"kind": "started", "namespace": "ml", "pod": "a"}, True),
        ({"kind": "started", "namespace": "web", "pod": "a"}, False),
        ({"kind": "started", "pod": "job 7"}, False),
        ({"kind": "ended"}, False),
        ({"kind": "idle"}, False),
        ({"kind": "idle", "namespace": "ml"}, True),
        ({"kind": "xid", "namespace": "web"}, False),
        ({"kind": "xid"}, True),
        ({"kind": "xid", "pod": "a"}, False),
        ({"kind": "recovered", "condition": "xid"}, True),
        ({"kind": "recovered", "condition": "unallocated_use"}, False),
        ({"kind": "unallocated_use"}, False),
    ],
)
def test_events_of_visible_pods_and_of_gpus(parts: dict[str, Any], is_shown: bool) -> None:
    one = Event(at=1.0, text="text", **parts)
    answer = EventsAnswer(from_=0.0, to=2.0, events=[one])
    assert hide_in_events(answer, VISIBLE).events == ([one] if is_shown else [])


def test_past_holders_and_marks() -> None:
    spans = [
        HolderSpan("ml", "mine", from_=1.0, to=2.0),
        HolderSpan("web", "secret", "main", from_=3.0, to=4.0),
    ]
    marks = [Mark(at=1.0, condition=name) for name in ("xid", "idle", "unallocated_use")]
    device = DeviceHistory(uuid="GPU-0", series={}, holders=spans)
    whole = GpuHistory(
        uuid="GPU-0", series={}, holders=spans, from_=0.0, to=5.0, step_seconds=15, marks=marks
    )
    pod = PodHistory(
        from_=0.0,
        to=5.0,
        step_seconds=15,
        namespace="ml",
        pod="mine",
        devices=[device],
        marks=marks,
    )
    shown = [spans[0], HolderSpan(from_=3.0, to=4.0, hidden=True)]
    assert hide_in_history(whole, VISIBLE).holders == shown
    assert [mark.condition for mark in hide_in_history(whole, VISIBLE).marks] == ["xid"]
    hidden = hide_in_pod_history(pod, VISIBLE)
    assert hidden.devices[0].holders == shown
    assert [mark.condition for mark in hidden.marks] == ["xid"]


def test_a_condition_that_names_a_pod_is_left_out() -> None:
    used = gpu(0, conditions=(Condition("unallocated_use", 1.0, "web/secret"),))
    view = hide_in_view(make_view(state_of(node("n1", used))), VISIBLE)
    assert view.nodes[0].gpus[0].conditions == []
    assert view.alerts == []
