"""Choice between exporters of a node, location of GPUs, stale and gone nodes, lost GPUs, and idle
holders.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from podgpu.charge import HeldTime
from podgpu.errors import Note, texts_of
from podgpu.fleet.prices import Price, Prices
from podgpu.fleet.readings import ClusterReading, FleetCounts, TargetOutcome
from podgpu.fleet.settings import ViewSettings
from podgpu.fleet.state import ClusterState, build_cluster_state, build_single_node_state
from podgpu.metrics.parse import parse_text
from podgpu.model import (
    Condition,
    DeviceState,
    Holder,
    HolderUsage,
    MigInstance,
    SourceStatus,
    WorkloadOwner,
    XidCount,
)
from tests.fleet.states import (
    WALL,
    World,
    duplicates,
    gpu,
    holder,
    lost,
    mig,
    node,
    series,
    state_of,
    text_of,
    uuids,
    value,
)

# Two exporters of one node


def test_the_exporter_that_names_holders_counts_then_the_one_that_counted_before() -> None:
    without = node("n1", gpu(0, busy=0.1), target="http://a", read_at=2)
    names = node("n1", gpu(0, holder(), busy=0.2), target="http://b", read_at=1)
    for order in ((without, names), (names, without)):
        (entry,) = state_of(*order, at=3).nodes
        assert entry.reading.target == "http://b"
    world = World()
    world.round(node("n1", gpu(0, holder()), target="http://b"))
    for at in range(15, 90, 15):
        both = [node("n1", gpu(0, holder()), target=f"http://{name}", read_at=at) for name in "ab"]
        assert world.round(*both, at=at).nodes[0].reading.target == "http://b"
    silent = node("n1", gpu(0, holder()), target="http://b", read_at=75)
    state = world.round(silent, node("n1", gpu(0), target="http://a", read_at=130), at=131)
    assert state.nodes[0].reading.target == "http://a", "current values have priority"


def test_the_exporter_before_a_roll_out_is_no_second_exporter() -> None:
    old = node("n1", gpu(0, holder()), target="http://a", listed=False)
    state = state_of(
        old, node("n1", gpu(0, holder()), target="http://b", listed=True, read_at=15), at=15
    )
    assert (state.nodes[0].reading.target, state.alerts) == ("http://b", ())
    renamed = node("n2", gpu(0, holder()), target="http://b", listed=True, read_at=15)
    state = state_of(old, renamed, at=15)
    assert ([entry.name for entry in state.nodes], state.alerts) == (["n2"], ())
    twice = [node("n1", gpu(0), target=f"http://{name}", exporter_id="x") for name in "ab"]
    assert state_of(*twice).alerts == (), "the same exporter at two addresses"


def test_the_same_gpus_under_an_address_are_the_named_node() -> None:
    named = node("n1", gpu(0), gpu(1), read_at=1)
    address = node("10.0.0.1:9400", gpu(0), gpu(1), named=False, read_at=2)
    assert uuids(state_of(address, named, at=3)) == {"n1": ["GPU-0", "GPU-1"]}
    holding = node("10.0.0.1:9400", gpu(0, holder()), gpu(1), named=False, read_at=2)
    assert uuids(state_of(holding, named, at=3)) == {"10.0.0.1:9400": ["GPU-0", "GPU-1"]}, (
        "holders have priority"
    )


def test_nodes_of_a_cluster_that_became_too_large_are_not_gone() -> None:
    reading = ClusterReading(totals_only=FleetCounts(20_000, 0, None, ()))
    state = build_cluster_state(
        reading, state_of(node("n1", gpu(0))), ViewSettings(), 60.0, WALL + 60
    )
    assert (state.nodes, state.alerts) == ((), ())


def test_a_node_that_no_exporter_reports_any_more_keeps_its_last_reading_for_a_while() -> None:
    world = World()
    world.round(node("n1", gpu(0, holder()), listed=True), node("n2", gpu(1), listed=True))
    for at in (15.0, 60.0, 299.0):
        state = world.round(node("n2", gpu(1), read_at=at, listed=True), at=at)
        entry = state.nodes[0]
        assert (entry.name, entry.reading.read_at, entry.gone, len(entry.held)) == (
            "n1",
            0.0,
            at > 45,
            1,
        )
        assert [c.name for c in entry.state.devices[0].conditions] == ["node_gone"] * (at > 45)
        assert "http://n1:9400/metrics no longer reports this node" in entry.notes[0]
    assert uuids(world.round(node("n2", gpu(1), read_at=301, listed=True), at=301)) == {
        "n2": ["GPU-1"]
    }
    renamed = World()
    renamed.round(node("n1", gpu(0)))
    assert uuids(renamed.round(node("n2", gpu(0), read_at=15), at=15)) == {"n2": ["GPU-0"]}


# A GPU that several nodes report


def test_a_gpu_that_moved_is_where_it_was_seen_last() -> None:
    state = state_of(node("n1", gpu(0), gpu(1), read_at=0), node("n2", gpu(0), read_at=60), at=61)
    assert uuids(state) == {"n1": ["GPU-1"], "n2": ["GPU-0"]}


@pytest.mark.parametrize(("first", "then"), [("n1", "n2"), ("n2", "n1")])
def test_a_gpu_that_one_node_lost_is_where_it_answers(first: str, then: str) -> None:
    state = state_of(node(first, lost(0), gpu(1), gpus_lost=1), node(then, gpu(0, holder("a"))))
    assert uuids(state) == {first: ["GPU-1"], then: ["GPU-0"]}
    assert state.alerts == (), "the GPU is not reported as missing"


def test_a_gpu_that_two_nodes_claim_is_on_the_one_that_names_its_holder() -> None:
    world = World()
    for at, names in ((0, "n2"), (15, ""), (30, "")):
        nodes = [
            node(name, gpu(0, *([holder()] if name == names else []), used=50.0), read_at=at)
            for name in ("n1", "n2")
        ]
        state = world.round(*nodes, at=at)
        assert uuids(state) == {"n2": ["GPU-0"]}
        (alert,) = state.alerts
        assert alert.severity == "warning"
        assert (
            "http://n2:9400/metrics and http://n1:9400/metrics (node n1) report the same GPUs"
            in alert.text
        )
        assert value(state, "podgpu_used_gpus", scope="cluster") == 1


def test_a_gpu_that_is_hidden_on_one_node_does_not_answer_for_another_that_is_missing() -> None:
    """n1 also has a GPU that does not answer and cannot be identified."""
    one = node("n1", gpu(0), gpu(1), gpus_lost=1)
    state = state_of(one, node("n2", gpu(0, holder("a")), read_at=1), at=1)
    assert uuids(state) == {"n1": ["GPU-1"], "n2": ["GPU-0"]}
    [_, alert] = sorted(state.alerts, key=lambda alert: alert.severity == "broken")
    assert alert.text.startswith("node n1: 1 GPU on its PCI bus does not answer")


# Alerts


def with_conditions(index: int, *names: str) -> DeviceState:
    return gpu(index, conditions=tuple(Condition(name, 1.0) for name in names))


def test_a_node_without_a_driver_has_one_alert_for_all_its_gpus() -> None:
    away = with_conditions(0, "driver_away", "row_remap_failure")
    state = state_of(node("n1", away, with_conditions(1, "driver_away")))
    assert [alert.uuid for alert in state.alerts] == ["", "GPU-0"]
    assert "2 GPUs" in state.alerts[0].text
    other = with_conditions(1, "row_remap_failure")
    state = state_of(node("n1", away, other))
    assert [alert.uuid for alert in state.alerts] == ["GPU-0", "GPU-0", "GPU-1"]


def test_a_node_that_is_gone_is_one_alert() -> None:
    sources = (SourceStatus("kubelet", up=False),)
    gone = node("n1", gpu(0), gpu(1, hidden=True), sources=sources)
    [alert] = state_of(gone, at=46).alerts
    assert alert.text.startswith("node n1 does not answer, with its 1 GPU: ")
    [alert] = state_of(node("n1"), at=46).alerts
    assert alert.text.startswith("node n1 does not answer: ")


def test_alerts_of_one_node_do_not_displace_those_of_others() -> None:
    broken = [with_conditions(index, "unreadable") for index in range(50)]
    state = state_of(node("n1", *broken), node("n2", with_conditions(50, "unreadable")))
    assert [alert.node for alert in state.alerts] == ["n1"] * 40 + ["n2", ""]
    assert state.alerts[-1].text == "and 10 more"
    names = [f"n{number:03}" for number in range(201)]
    nodes = [node(name, with_conditions(number, "unreadable")) for number, name in enumerate(names)]
    state = state_of(*nodes)
    assert [alert.node for alert in state.alerts] == [*names[:200], ""]
    assert state.alerts[-1].text == "and 1 more"


# Stale, gone, dropped


def test_stale_nodes_are_marked_left_out_of_counts_and_dropped() -> None:
    held = gpu(0, holder(), used=80.0)
    assert value(state_of(node("n1", held), at=45), "avg_GPU_utilization") == 80
    state = state_of(node("n1", held), at=46)
    (entry,) = state.nodes
    assert (entry.stale, entry.gone) == (True, True)
    assert [c.name for c in entry.state.devices[0].conditions] == ["node_gone"]
    assert [part.use for part in entry.held] == ["unknown"]
    assert value(state, "avg_GPU_utilization") is None
    assert value(state, "podgpu_cluster_node_up", node="n1") == 0
    assert value(state, "podgpu_cluster_node_last_seen_timestamp_seconds", node="n1") == WALL
    assert "pod_and_gpu_map_info{" in text_of(state)
    assert "podgpu_node_gpus" not in text_of(state)
    assert state_of(node("n1", held), at=301).nodes == ()
    assert state_of(node("n1", held, listed=True), at=3600).nodes[0].gone, (
        "the node stays while its exporter is listed"
    )
    assert state.alerts[0].text.startswith("node n1 does not answer, with its 1 GPU: ")
    assert state_of(node("n1", listed=True), at=301).nodes == (), "it has no GPU"


def test_a_clock_that_is_ahead_is_a_note() -> None:
    state = state_of(node("n1", gpu(0), skew_seconds=90.0))
    assert state.nodes[0].notes == ("its clock is 90 s ahead",)


def test_an_exporter_that_withholds_its_figures_is_stale() -> None:
    busy = gpu(0, holder(utilization_ratio=0.5), busy=0.5)
    (entry,) = state_of(node("n1", busy, stale=True)).nodes
    assert (entry.stale, entry.gone) == (True, False)
    assert [part.use for part in entry.held] == ["unknown"]


def test_notes_and_alerts_name_what_fails() -> None:
    failed = TargetOutcome("http://n1:9400/metrics", 5.0, "timeout", "no answer within 5 s")
    unknown = TargetOutcome("http://n9:9400/metrics", 0.1, "refused", "connection refused")
    sources = (
        SourceStatus("kubelet", up=False),
        SourceStatus("gpu0", up=False),
        SourceStatus("switches", up=False, device="GPU-0"),
    )
    broken = gpu(0, conditions=(Condition("xid", 5.0, "79"),), xids=(XidCount(79, 2, 5.0),))
    state = state_of(
        node("n1", broken, sources=sources),
        outcomes=(failed, unknown),
        notes=(Note("a", "partial data"),),
    )
    assert state.nodes[0].notes == ("http://n1:9400/metrics: no answer within 5 s",)
    assert texts_of(state.notes) == [
        "partial data",
        "http://n9:9400/metrics: connection refused",
    ]
    assert [(alert.severity, alert.uuid) for alert in state.alerts] == [
        ("broken", "GPU-0"),
        ("warning", ""),
        ("warning", ""),
    ]
    assert "2 times: the error came back" in state.alerts[0].text
    assert "podgpu cannot read kubelet:" in state.alerts[1].text, (
        "the failure of gpu0 is already a condition"
    )
    many = state_of(
        outcomes=tuple(
            TargetOutcome(f"http://n{n}", 1.0, "refused", "refused") for n in range(1000)
        )
    )
    assert (len(many.notes), many.notes[-1].text) == (13, "and 988 more")


def test_at_most_twelve_exporters_that_cannot_be_read_are_alerts() -> None:
    failed = [TargetOutcome(f"http://n{n:02}", 1.0, "refused", "refused") for n in range(13)]
    state = state_of(outcomes=tuple(failed))
    assert [alert.text for alert in state.alerts] == [one.text for one in failed[:12]]


@pytest.mark.parametrize(("change", "kept"), [(1.9, True), (-1.9, True), (2.0, False)])
def test_a_small_change_of_the_wall_clock_is_ignored(change: float, kept: bool) -> None:
    world = World()
    world.round(node("n1", gpu(0)))
    state = world.round(node("n1", gpu(0), read_at=15), at=15, wall=WALL + 15 + change)
    assert state.clock_offset == (WALL if kept else WALL + change)


def test_a_field_above_its_full_value_counts_as_full() -> None:
    state = state_of(node("n1", gpu(0, holder(), used=100.9), gpu(1, used=0.0), gpu(2, used=102.0)))
    assert value(state, "avg_GPU_utilization") == 100, "the other values are 0 and impossible"
    assert value(state, "podgpu_used_gpus", scope="cluster") == 1


def test_a_device_without_a_device_in_use_has_the_mean_0() -> None:
    state = state_of(node("n1", gpu(0, holder(), used=0.0)))
    assert value(state, "avg_GPU_utilization") == 0
    assert value(state, "podgpu_used_gpus", scope="namespace", namespace="ml") == 0


def test_the_settings_say_how_long_a_gap_may_be() -> None:
    world = World(ViewSettings(interval=100.0, stale_after=300.0, drop_after=900.0))
    for at in (0.0, 100.0):
        state = world.round(node("n1", gpu(0, holder()), read_at=at), at=at)
    assert state.nodes[0].charged_seconds == 100.0
    short = World()
    for at in (0.0, 100.0):
        state = short.round(node("n1", gpu(0, holder()), read_at=at), at=at)
    assert state.nodes[0].charged_seconds == 0.0


def instance(number: int, *holders: Holder, used: float | None, **more: Any) -> MigInstance:
    fields: Any = {} if used is None else {"DCGM_FI_DEV_MEM_COPY_UTIL": used}
    return MigInstance(id=number, profile="1g.10gb", holders=holders, fields=fields, **more)


def test_the_mean_of_mig_instances_counts_each_for_its_own_holders() -> None:
    first = instance(1, holder("a", "ml"), used=80.0)
    second = instance(2, holder("b", "web"), used=20.0)
    hidden = instance(3, holder("c", "web"), used=100.0, hidden=True)
    cut = gpu(0, used=90.0, instances=(first, second, hidden))
    state = state_of(node("n1", cut))
    assert value(state, "podgpu_used_gpus", scope="cluster") == 2
    assert value(state, "podgpu_used_gpu_utilization_ratio", scope="cluster") == 0.5
    for namespace, mean in (("ml", 0.8), ("web", 0.2)):
        labels = {"scope": "namespace", "namespace": namespace}
        assert value(state, "podgpu_used_gpu_utilization_ratio", **labels) == mean


def test_the_mean_of_a_gpu_whose_instances_do_not_report_the_field() -> None:
    cut = gpu(0, used=90.0, instances=(instance(1, holder("a", "ml"), used=None),))
    state = state_of(node("n1", cut), node("n2", gpu(1, used=-1.0)))
    assert value(state, "podgpu_used_gpus", scope="cluster") == 1
    ratio = "podgpu_used_gpu_utilization_ratio"
    assert value(state, ratio, scope="node", node="n2") is None, "an impossible value"
    assert value(state, ratio, scope="namespace", namespace="ml") == 0.9, (
        "its instances have their holders"
    )


def test_a_job_without_a_namespace_has_a_mean_of_no_namespace() -> None:
    job = Holder(job="7", source="slurm")
    state = state_of(node("n1", gpu(0, job, used=50.0)))
    scopes = {dict(labels)["scope"] for labels in series(state, "podgpu_used_gpus")}
    assert scopes == {"cluster", "node", "model"}


def test_owners_of_a_cluster_in_prometheus_are_those_of_its_own_pods() -> None:
    """Prometheus has several clusters, in which pods may have the same name."""
    one, two = (
        replace(
            node(name, gpu(index, holder(), used=50.0)),
            cluster=name,
            owners={("ml", "train"): WorkloadOwner("Job", f"job-{name}")},
        )
        for index, name in enumerate(("a", "b"))
    )
    state = state_of(one, two, owners={("ml", "train"): WorkloadOwner("Job", "other")})
    owners = [part.owner and part.owner.name for entry in state.nodes for part in entry.held]
    assert owners == ["job-a", "job-b"]
    names = {dict(labels).get("owner_name") for labels in series(state, "podgpu_used_gpus")}
    assert names == {None, "job-a", "job-b"}


# GPUs that disappear


def foreign(*gpus: DeviceState, read_at: float, name: str = "n1", **more: Any) -> Any:
    return node(name, *gpus, read_at=read_at, producer="dcgm-exporter", **more)


@pytest.mark.fault(
    "A GPU vanishes from a dcgm-exporter's metrics",
    "podgpu cluster keeps it as lost, with its number, who held it last, since when and what to "
    "do, until it is back,"
    " has moved, or is removed",
)
def test_a_gpu_that_a_dcgm_exporter_does_not_report_any_more_is_lost() -> None:
    world = World()
    world.round(foreign(gpu(0), gpu(1, holder(), conditions=(Condition("xid", 5.0),)), read_at=0))
    for at in (15.0, 30.0):
        state = world.round(foreign(gpu(0), read_at=at), at=at)
    missing = state.nodes[0].state.devices[1]
    assert (missing.index, missing.conditions, missing.holders) == (
        1,
        (Condition("lost", WALL + 15),),
        (),
    )
    assert [workload.pod for workload in missing.last_holders] == ["train"]
    assert state.alerts[0].text.startswith("GPU 1 of node n1 (GPU-1): ")
    moved = world.round(foreign(gpu(0), read_at=45), node("n2", gpu(1), read_at=45), at=45)
    assert uuids(moved) == {"n1": ["GPU-0"], "n2": ["GPU-1"]}
    world.round(foreign(gpu(0), gpu(2), read_at=60), at=60)
    away = world.round(foreign(gpu(0), read_at=75), at=75)
    assert uuids(away)["n1"] == ["GPU-0", "GPU-2"]
    assert uuids(world.round(foreign(gpu(0), read_at=90), at=90, removed={"GPU-2"}))["n1"] == [
        "GPU-0"
    ]
    assert (
        uuids(world.round(foreign(gpu(0), gpu(2), read_at=99), at=99, removed={"GPU-2"}))["n1"][1]
        == "GPU-2"
    )


def test_a_gpu_that_was_lost_before_its_exporter_restarted_keeps_its_model() -> None:
    world = World()
    prices = Prices("EUR", {"H100": Price(4.0)}, "file")
    lost = Condition("lost", 5.0)
    seen = gpu(1, holder(), model="H100", memory_total_bytes=80)
    world.round(node("n1", gpu(0), seen, read_at=0, exporter_id="a"), prices=prices)
    # The new exporter knows it only from the kubelet.
    unseen = DeviceState(uuid="GPU-1", holders=(holder(),), conditions=(lost,))
    for at in (15.0, 30.0):
        restarted = node("n1", gpu(0), unseen, read_at=at, exporter_id="b")
        state = world.round(restarted, at=at, prices=prices)
        known = state.nodes[0].state.devices[1]
        assert (known.model, known.memory_total_bytes) == ("H100", 80)
        assert known.index is None, "the driver may have given its number to another GPU"
        assert [part.cost_per_hour for part in state.nodes[0].held] == [4.0]

    back = DeviceState(uuid="GPU-1", index=1)
    state = world.round(node("n1", gpu(0), back, read_at=45.0), at=45.0, prices=prices)
    assert state.nodes[0].state.devices[1] == back, "it is not lost any more"


def test_a_lost_gpu_in_mig_mode_and_one_without_a_number() -> None:
    world = World()
    cut = gpu(1, instances=(mig(1, holder("a")), mig(2, holder("b"), profile="2g.20gb")))
    unnumbered = [replace(gpu(index), index=None) for index in (5, 6)]
    world.round(foreign(gpu(0), cut, *unnumbered, read_at=0))
    state = world.round(foreign(gpu(0), unnumbered[0], read_at=15), at=15)
    assert uuids(state) == {"n1": ["GPU-5", "GPU-6", "GPU-0", "GPU-1"]}
    missing = state.nodes[0].state.devices[3]
    assert [workload.pod for workload in missing.last_holders] == ["a", "b"]
    assert missing.instances == (mig(1), mig(2, profile="2g.20gb"))


def test_a_lost_gpu_goes_with_its_node() -> None:
    world = World()
    world.round(foreign(gpu(0), gpu(1), read_at=0))
    world.round(foreign(gpu(0), read_at=15), at=15)
    later = world.round(foreign(gpu(0), read_at=15), at=30)
    assert later.nodes[0].state.devices[1].conditions == (Condition("lost", WALL + 15),)
    gone = world.round(foreign(gpu(0), read_at=15), at=90)
    assert [[c.name for c in g.conditions] for g in gone.nodes[0].state.devices] == [
        ["node_gone"],
        ["lost", "node_gone"],
    ]
    dropped = world.round(foreign(gpu(0), read_at=15), at=99, removed={"GPU-0", "GPU-1"})
    assert dropped.nodes == (), "a gone node is shown only because of its GPUs"


# Idle holders


class Watched(World):
    """Rounds every 15 s on one node whose exporter does not report idle times."""

    def __init__(self) -> None:
        super().__init__(ViewSettings(idle_after=60.0))
        self.at = -15.0

    def turn(self, *gpus: DeviceState, rounds: int = 1, **more: Any) -> float | None:
        """Returns the start of the holder's idle time, in seconds after the first round."""
        for _ in range(rounds):
            self.at += 15.0
            state = self.round(node("n1", *gpus, read_at=self.at), at=self.at, **more)
        return _since(state)


def _since(state: ClusterState) -> float | None:
    (part,) = state.nodes[0].held
    return None if part.idle_since is None else part.idle_since - WALL


def test_idle_since_it_was_last_seen_busy() -> None:
    world = Watched()
    assert world.turn(gpu(0, holder(utilization_ratio=0.0))) == 0
    world.turn(gpu(0, holder(utilization_ratio=0.5)), rounds=3)
    assert world.turn(gpu(0, holder(utilization_ratio=0.0)), rounds=4) == 45
    assert world.turn(gpu(0, holder(utilization_ratio=0.1))) is None


def test_work_between_two_rounds_is_no_idleness() -> None:
    world = Watched()
    world.turn(gpu(0, holder(utilization_ratio=0.0, busy_ns=10)), rounds=3)
    assert world.turn(gpu(0, holder(utilization_ratio=0.0, busy_ns=11))) is None
    assert world.turn(gpu(0, holder(utilization_ratio=0.0, busy_ns=11))) == 45
    assert world.turn(gpu(0, holder(utilization_ratio=0.0, busy_ns=0))) == 45, (
        "the exporter was restarted"
    )


def test_a_restart_of_podgpu_does_not_start_at_zero() -> None:
    assert Watched().turn(gpu(0, holder(), busy=0.0), idle_for={"GPU-0": 7200.0}) == -7200
    never = holder(utilization_ratio=0.0, busy_ns=0, idle_ns=500 * 10**9)
    assert Watched().turn(gpu(0, never)) == -500
    later = holder(utilization_ratio=0.0, busy_ns=1, idle_ns=100 * 10**9)
    assert Watched().turn(gpu(0, later), idle_for={"GPU-0": 7200.0}) == -100
    assert Watched().turn(gpu(0, later), idle_for={"GPU-0": 50.0}) == -50


def test_the_same_reading_again_proves_no_idle_time() -> None:
    world = Watched()
    world.turn(gpu(0, holder(utilization_ratio=0.0, busy_ns=10)))
    worked = gpu(0, holder(utilization_ratio=0.0, busy_ns=11))
    assert world.turn(worked) is None
    again = world.round(node("n1", worked, read_at=15.0), at=30.0)
    assert _since(again) is None
    assert _since(world.round(node("n1", worked, read_at=31.0), at=45.0)) == 15


def test_podgpus_own_idle_time_is_used_and_survives_a_restart_of_the_exporter() -> None:
    def reading(at: float, since: float, exporter_id: str, skew: float = 0.0) -> Any:
        idle = holder(utilization_ratio=0.0, idle_since=since)
        return node("n1", gpu(0, idle), read_at=at, exporter_id=exporter_id, skew_seconds=skew)

    world = World()
    assert _since(world.round(reading(0.0, WALL - 300, "a"))) == -300
    assert _since(world.round(reading(15.0, WALL + 10, "a"), at=15.0)) == 10, (
        "the holder was busy for a moment"
    )
    assert _since(world.round(reading(30.0, WALL + 29, "b"), at=30.0)) == 10, (
        "a new exporter resets no idle time"
    )
    assert _since(world.round(reading(45.0, WALL + 29.01, "b"), at=45.0)) == 10, (
        "the holder is still idle"
    )
    assert _since(world.round(reading(60.0, WALL + 47, "b"), at=60.0)) == 47, (
        "the holder was busy again"
    )
    assert _since(state_of(reading(0.0, WALL - 300 + 50, "a", skew=50.0))) == -300, (
        "the node's clock is ahead"
    )


@pytest.mark.parametrize(("skew", "since"), [(5.0, -300), (-5.0, -300), (5.1, -305.1)])
def test_a_small_skew_of_a_nodes_clock_is_ignored(skew: float, since: float) -> None:
    idle = holder(utilization_ratio=0.0, idle_since=WALL - 300)
    reading = node("n1", gpu(0, idle), exporter_id="a", skew_seconds=skew)
    assert _since(state_of(reading)) == pytest.approx(since)


def test_an_exporter_that_restarts_while_the_holder_is_busy() -> None:
    world = World()
    world.round(node("n1", gpu(0, holder(utilization_ratio=0.5)), exporter_id="a"))
    idle = holder(utilization_ratio=0.0, idle_since=WALL + 20)
    state = world.round(node("n1", gpu(0, idle), read_at=30, exporter_id="b"), at=30)
    assert _since(state) == 20


def test_idle_time_that_the_exporter_does_not_measure_for_a_while() -> None:
    world = World()

    def turn(at: float, **usage: Any) -> float | None:
        one = gpu(0, holder(processes=1, **usage), busy=0.0)
        return _since(world.round(node("n1", one, read_at=at, exporter_id="a"), at=at))

    assert turn(0.0, utilization_ratio=0.0, idle_since=WALL - 300) == -300
    assert turn(15.0) == -300, "the whole GPU is idle"
    assert turn(30.0, utilization_ratio=0.0, idle_since=WALL + 10) == 10
    assert turn(45.0, utilization_ratio=0.0, idle_since=WALL + 10) == 10


def test_what_a_holder_did_since_the_last_reading() -> None:
    world = World()

    def turn(at: float, busy: int | None, **more: Any) -> Any:
        ratio = more.pop("ratio", 0.5)
        ns: dict[str, Any] = {}
        if busy is not None:
            ns = {"busy_ns": busy, "idle_ns": 2 * busy, "wait_ns": 3 * busy}
        one = gpu(0, holder(utilization_ratio=ratio, **ns))
        more.setdefault("read_at", at)
        [part] = world.round(node("n1", one, exporter_id="a", **more), at=at).nodes[0].held
        return part.window

    assert turn(1000.0, 10**9) is None
    first = turn(1015.0, 2 * 10**9)
    assert first == HeldTime(15.0, busy=1.0, idle=2.0, waited=3.0)
    assert turn(1030.0, 2 * 10**9, read_at=1015.0) == first, "the same reading"
    assert turn(1045.0, None) == HeldTime(30.0), "the counters are gone"
    assert turn(1060.0, 3 * 10**9) == HeldTime(15.0)
    assert turn(1075.0, 3 * 10**9, ratio=None) == HeldTime(15.0, waited=0.0)
    assert turn(1090.0, 3 * 10**9) == HeldTime(15.0, waited=0.0), "not measured before"
    assert turn(1105.0, 3 * 10**9, usage_at=WALL + 1104.0) is None, "another clock"
    assert turn(1120.0, 4 * 10**9, usage_at=WALL + 1116.0) == HeldTime(
        12.0, busy=1.0, idle=2.0, waited=3.0
    )


def test_idle_time_that_counters_of_an_unknown_exporter_prove() -> None:
    """In Prometheus, the process of an exporter may be unknown."""

    def turn(world: World, at: float, idle: float, busy: int = 0) -> float | None:
        idle_ns = round(idle * 10**9)
        one = gpu(0, holder(utilization_ratio=0.0, busy_ns=busy, idle_ns=idle_ns), busy=0.0)
        [part] = world.round(node("n1", one, read_at=at), at=at).nodes[0].held
        return part.measured_idle

    world = World()
    assert turn(world, 0.0, 500.0) == 500.0
    assert turn(world, 15.0, 515.0) == 515.0
    assert turn(world, 115.0, 570.0) == 570.0, "45 s are not counted"
    assert turn(world, 215.0, 624.9) == pytest.approx(54.9), "45.1 s are not counted"
    assert turn(world, 230.0, 639.9, busy=10**9) is None
    assert turn(world, 245.0, 654.9, busy=10**9) == 15.0
    assert turn(World(), 0.0, 500.0, busy=10**9) == 0.0, "it was busy at an unknown time"


def test_the_state_of_a_single_node() -> None:
    state = node("n1", with_conditions(0, "unreadable"), gpu(1)).state
    notes = (Note("a", "the readings are too old"), Note("b", "another note"))
    fresh = build_single_node_state(state, ViewSettings(), 15.0, WALL + 15, notes=notes)
    assert [device.uuid for device in fresh.nodes[0].gpus] == ["GPU-0", "GPU-1"]
    assert [(alert.uuid, alert.severity) for alert in fresh.alerts] == [("GPU-0", "broken")]
    assert fresh.notes == notes
    stale = build_single_node_state(
        state, ViewSettings(), 15.0, WALL + 15, fresh=False, notes=notes
    )
    assert not list(stale.nodes[0].gpus)
    assert [(alert.text, alert.node) for alert in stale.alerts] == [(notes[0].text, "n1")]


@pytest.mark.parametrize(("ratio", "use"), [(None, "idle"), (0.0, "used")])
def test_podgpu_without_processes_has_no_idle_time_but_an_idle_gpu_has_an_idle_holder(
    ratio: float, use: str
) -> None:
    state = state_of(
        node(
            "n1", gpu(0, holder(allocated_ns=1, utilization_ratio=ratio), busy=0.0), exporter_id="a"
        )
    )
    assert state.nodes[0].held[0].use == use


def test_idle_times_move_with_the_wall_clock() -> None:
    world = Watched()
    world.turn(gpu(0, holder(utilization_ratio=0.0)), rounds=2)
    state = world.round(
        node("n1", gpu(0, holder(utilization_ratio=0.0)), read_at=30), at=30, wall=WALL + 3630
    )
    assert _since(state) == 3600


# Random input

HOLDERS = st.builds(
    Holder,
    namespace=st.sampled_from(["", "ml", "web"]),
    pod=st.sampled_from(["", "a", "b"]),
    job=st.sampled_from(["", "", "7"]),
    share_ratio=st.none() | st.floats(0, 2),
    source=st.sampled_from(["", "kubelet"]),
    usage=st.none()
    | st.builds(
        HolderUsage,
        utilization_ratio=st.none() | st.floats(0, 1),
        memory_used_bytes=st.none() | st.integers(0, 100),
        processes=st.none() | st.integers(0, 2),
        idle_since=st.none() | st.floats(0, WALL),
    ),
)
INSTANCES = st.builds(
    mig, st.integers(0, 6), HOLDERS, profile=st.sampled_from(["1g.10gb", "3g.40gb", "odd"])
)
GPUS = st.builds(
    lambda index, holders, instances, busy, used, conditions: gpu(
        index,
        *holders,
        busy=busy,
        used=used,
        instances=tuple({i.id: i for i in instances}.values()),
        conditions=conditions,
    ),
    st.integers(0, 3),
    st.lists(HOLDERS, max_size=3),
    st.lists(INSTANCES, max_size=3),
    st.none() | st.floats(0, 1),
    st.none() | st.floats(0, 1e9),
    st.sampled_from([(), (Condition("lost", 1.0),), (Condition("xid", 1.0, "79"),)]),
)
READINGS = st.builds(
    lambda name, gpus, read_at, more: node(name, *gpus, read_at=read_at, **more),
    st.sampled_from(["n1", "n2", "n3"]),
    st.lists(GPUS, max_size=4, unique_by=lambda gpu: gpu.uuid),
    st.sampled_from([-400.0, -50.0, -1.0, 0.0]),
    st.fixed_dictionaries(
        {
            "target": st.sampled_from(["http://a", "http://b", "http://c", "http://d"]),
            "producer": st.sampled_from(["podgpu", "dcgm-exporter"]),
            "exporter_id": st.sampled_from(["", "x", "y"]),
            "named": st.booleans(),
            "listed": st.sampled_from([True, False, None]),
        }
    ),
)


@given(st.lists(st.lists(READINGS, max_size=5), min_size=1, max_size=3))
@settings(max_examples=40)
def test_no_series_occurs_twice_and_parts_add_up(rounds: list[list[Any]]) -> None:
    world = World(ViewSettings(idle_after=1.0, legacy_map_metrics=True))
    for number, readings in enumerate(rounds):
        state = world.round(*readings, at=15.0 * number)
        assert duplicates(parse_text(text_of(state))) == []
        claimed = [gpu.uuid for entry in state.nodes for gpu in entry.state.devices]
        assert len(claimed) == len(set(claimed))
        for entry in state.nodes:
            for device in entry.state.devices:
                total = sum(part.gpu_fraction for part in entry.held if part.gpu is device)
                assert -1e-9 <= total <= 1 + 1e-9


@given(st.lists(READINGS, max_size=6), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_the_order_of_targets_does_not_matter(readings: list[Any], order: random.Random) -> None:
    once = list({(r.target, r.state.node): r for r in readings}.values())
    assert text_of(state_of(*once)) == text_of(state_of(*order.sample(once, len(once))))
