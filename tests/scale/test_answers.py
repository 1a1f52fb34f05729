"""Values of workloads, pods and nodes, missing values, and the idle state of workloads."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from podgpu.fleet.readings import TargetOutcome
from podgpu.fleet.settings import ViewSettings
from podgpu.model import Condition, DeviceState, DeviceTotals, Holder, MigInstance
from podgpu.scale.answers import compute_pod_values, compute_value, is_active
from podgpu.scale.catalogue import METRICS, PROFILING_METRICS, UTILIZATION
from podgpu.scale.pods import PodSeen
from podgpu.scale.requests import MetricRequest, PodSelector, Refusal, find_metric, parse_selector
from tests.scale.scenes import (
    BEGIN,
    INFERENCE,
    INTERVAL,
    Stage,
    busy,
    figure,
    gpu,
    holder,
    pod,
    refused,
)


def pod_values(
    stage: Stage, metric: str = "gpu_utilization", **aggregation: float
) -> dict[str, float]:
    request = MetricRequest(find_metric(metric), INFERENCE, **{"window": INTERVAL, **aggregation})  # type: ignore[arg-type]
    try:
        values = compute_pod_values(stage.snapshot(), request)
    except Refusal:
        return {}
    return {name: value.value for name, value in values.items()}


def active(stage: Stage, idle_for: float) -> bool:
    return is_active(stage.snapshot(), MetricRequest(UTILIZATION, INFERENCE, idle_for=idle_for))


# Aggregation over pods and time


def three_pods() -> Stage:
    """Three pods with a GPU, one without, and one that has just started."""
    stage = Stage(
        [pod("a"), pod("b"), pod("c"), pod("frontend", asks=False), pod("new", started=10.0)]
    )
    stage.turn(n1=(busy("a", 0.2, 0), busy("b", 0.4, 1), busy("c", 0.9, 2)))
    return stage


@pytest.mark.parametrize(
    ("aggregate", "value"),
    [("mean", 50), ("max", 90), ("sum", 150), ("p50", 40), ("p0", 20), ("p100", 90), ("p75", 65)],
)
def test_aggregates_are_over_pods_with_gpus(aggregate: str, value: float) -> None:
    assert figure(three_pods(), aggregate=aggregate) == pytest.approx(value)


def test_the_window_is_over_each_pods_rounds() -> None:
    stage = Stage([pod("a")])
    for ratio in (1.0, 0.0, 0.5, 0.1):
        stage.turn(n1=(busy("a", ratio, 0),))
    assert figure(stage, window=15.0) == pytest.approx(10)
    assert figure(stage, window=30.0) == pytest.approx(30)
    assert figure(stage, window=60.0) == pytest.approx(40)
    value = compute_value(stage.snapshot(), MetricRequest(UTILIZATION, INFERENCE, window=90.0))
    assert (value.window, value.at) == (4 * INTERVAL, BEGIN + 4 * INTERVAL)


@pytest.mark.parametrize(("late", "value"), [(6.0, 60), (9.0, 20)])
def test_a_window_tolerates_half_an_interval(late: float, value: float) -> None:
    """A round of 15 s earlier belongs to a window of 30 s, even if it was 6 s early."""
    stage = Stage([pod("a")])
    stage.turn(n1=(busy("a", 1.0, 0),))
    stage.now += late
    stage.turn(n1=(busy("a", 0.2, 0),))
    assert figure(stage, window=30.0) == pytest.approx(value)


def test_the_window_of_a_workload_is_that_of_its_oldest_pod() -> None:
    stage = Stage([pod("a"), pod("b", started=35.0)])
    stage.turns(4, n1=(busy("a", 0.5, 0), busy("b", 0.5, 1)))
    value = compute_value(stage.snapshot(), MetricRequest(UTILIZATION, INFERENCE, window=60.0))
    assert value.window == 4 * INTERVAL


def test_less_than_half_of_a_window_is_no_value() -> None:
    """After a restart, two replicas would return different values, and one sample is not a mean."""
    stage, window = Stage([pod("a")]), 10 * INTERVAL
    stage.turns(4, n1=(busy("a", 0.2, 0),))
    assert refused(stage, window=window).status == 503
    assert pod_values(stage, window=window) == {}
    assert figure(stage, window=4 * INTERVAL) == pytest.approx(20)
    stage.turn(n1=(busy("a", 0.2, 0),))
    assert figure(stage, window=window) == pytest.approx(20)


def test_a_round_without_a_value_is_not_in_the_mean() -> None:
    """Two of five rounds are enough, because one round may be missing."""
    stage, window = Stage([pod("a")]), 5 * INTERVAL
    stage.turn(n1=(gpu(0, holder("a")),))
    stage.turn(n1=(busy("a", 0.2, 0),))
    stage.turns(2, n1=(gpu(0, holder("a")),))
    assert refused(stage, window=window).status == 503, "the last round has no value"
    stage.turn(n1=(busy("a", 0.6, 0),))
    assert figure(stage, window=window) == pytest.approx(40)
    assert refused(stage, window=window + INTERVAL).status == 503, "two of six are not"


def test_a_new_pod_of_the_same_name_has_none_of_the_previous_ones_rounds() -> None:
    stage, selector = (
        Stage([pod("a-0", owner="StatefulSet/a")]),
        PodSelector("serving", owner=("StatefulSet", "a")),
    )
    stage.turns(4, n1=(busy("a-0", 1.0, 0),))
    stage.pods = [pod("a-0", owner="StatefulSet/a", started=65.0)]
    stage.turns(2, n1=(busy("a-0", 0.2, 0),))
    assert figure(stage, selector=selector, window=120.0) == pytest.approx(20)


# Values of one pod

SM = "DCGM_FI_PROF_SM_ACTIVE"
REPLICA = replace(holder("a"), usage=None, replica="1")
"""The second time slice of the same container. A podgpu exporter reports the usage only once."""
UNMEASURED = replace(holder("a"), usage=None)
"""A holder as dcgm-exporter reports it."""


@pytest.mark.parametrize(
    ("metric", "devices", "value"),
    [
        ("gpu_utilization", (busy("a", 0.5, 0), busy("a", 1.0, 1)), 75),
        (
            "gpu_utilization",
            (gpu(0, holder("a"), holder("a", container="side"), utilization=0.7),),
            70,
        ),
        (
            "gpu_utilization",
            (gpu(0, holder("a", utilization=0.1), holder("b", utilization=0.6), utilization=0.7),),
            10,
        ),
        ("gpu_utilization", (gpu(0, holder("a"), holder("b"), utilization=0.7),), None),
        ("gpu_utilization", (gpu(0, holder("a", utilization=0.4), utilization=0.7),), 40),
        ("gpu_utilization", (gpu(0, UNMEASURED, utilization=0.7),), 70),
        ("gpu_utilization", (busy("a", 0.5, 0), gpu(1, holder("a"))), None),
        (
            "gpu_utilization",
            (gpu(0, holder("a", utilization=0.4), REPLICA, holder("b"), utilization=0.7),),
            40,
        ),
        (
            "gpu_power",
            (busy("a", 0.5, 0, power_watts=300.0), busy("a", 1.0, 1, power_watts=400.0)),
            700,
        ),
        (
            "gpu_memory_utilization",
            (
                gpu(0, holder("a", memory=10), memory_total=100),
                gpu(1, holder("a", memory=30), memory_total=300),
            ),
            10,
        ),
        ("gpu_memory_utilization", (gpu(0, holder("a", memory=120), memory_total=100),), 100),
        ("gpu_memory_utilization", (gpu(0, holder("a", memory=10)),), None),
        ("gpu_memory_utilization", (gpu(0, holder("a", memory=0), memory_total=0),), None),
        ("gpu_memory_utilization", (gpu(0, holder("a"), memory_total=100),), None),
        (
            "gpu_memory_utilization",
            (gpu(0, holder("a"), holder("b"), memory_used=50, memory_total=100),),
            None,
        ),
        (
            "gpu_sm_activity",
            (gpu(0, holder("a"), values={SM: 0.3}), gpu(1, holder("a"), values={SM: 0.5})),
            40,
        ),
        ("gpu_sm_activity", (gpu(0, holder("a"), values={SM: 1.01}),), 100),
        ("gpu_sm_activity", (gpu(0, holder("a"), values={SM: 1.02}),), None),
        (
            "avg_GPU_utilization",
            (gpu(0, holder("a"), measured=80.0), gpu(1, holder("a"))),
            None,
        ),
        ("avg_GPU_utilization", (gpu(0, holder("a"), measured=101.0),), 100),
        ("gpu_sm_activity", (gpu(0, holder("a"), holder("b"), values={SM: 0.3}),), None),
        ("gpu_busy", (busy("a", 0.5, 0),), None),
        ("gpu_wait", (busy("a", 0.5, 0),), 0.001),  # an active workload never has the value 0
        ("gpu_wait", (gpu(0, holder("a", utilization=0.1), holder("b", utilization=0.6)),), None),
    ],
)
def test_a_pods_value(metric: str, devices: tuple[DeviceState, ...], value: float | None) -> None:
    stage = Stage([pod("a")])
    stage.turn(n1=devices)
    if value is None:
        assert find_metric(metric).needs in str(refused(stage, metric))
    else:
        assert figure(stage, metric) == pytest.approx(value)


def test_busy_time_waiting_and_energy_are_rates_of_counters() -> None:
    stage = Stage([pod("a"), pod("b")])
    for step in range(3):
        a: dict[str, Any] = {
            "busy_seconds": 100 + 3.0 * step,
            "energy_joules": 1500.0 * step,
            "wait_seconds": 100 + 9.0 * step,
        }
        b: dict[str, Any] = {
            "busy_seconds": 7.5 * step,
            "energy_joules": 3000.0 * step,
            "wait_seconds": 1.5 * step,
        }
        holders = holder("a", utilization=0.2, **a), holder("b", utilization=0.5, **b)
        stage.turn(n1=(gpu(0, *holders, power_watts=300.0),))
    assert pod_values(stage, "gpu_wait") == {"a": pytest.approx(60), "b": pytest.approx(10)}
    assert pod_values(stage, "gpu_busy") == {"a": pytest.approx(20), "b": pytest.approx(50)}
    assert figure(stage, "gpu_power", window=30.0, aggregate="sum") == pytest.approx(300)


def test_a_counter_that_is_not_reported_has_no_rate() -> None:
    stage = Stage([pod("a"), pod("b")])
    shared = gpu(0, holder("a", utilization=0.1), holder("b", utilization=0.1))
    stage.turns(2, n1=(shared,))
    for metric in ("gpu_power", "gpu_wait"):
        assert refused(stage, metric).status == 503


def test_the_power_of_a_gpu_is_not_that_of_its_mig_instance() -> None:
    stage = Stage([pod("a")])
    instance = MigInstance(id=1, profile="1g.10gb", utilization_ratio=0.5, holders=(holder("a"),))
    stage.turn(n1=(replace(gpu(0, power_watts=300.0), instances=(instance,)),))
    assert figure(stage) == pytest.approx(50)
    assert refused(stage, "gpu_power").status == 503


@pytest.mark.parametrize("seconds", [(10.0, 12.0, 0.5), (10.0, 12.0, 1e9)])
def test_a_counter_that_was_reset_or_jumps_has_no_rate(seconds: tuple[float, ...]) -> None:
    stage = Stage([pod("a"), pod("b")])
    for value in seconds:
        own = holder("a", utilization=0.1, busy_seconds=value, energy_joules=1000 * value)
        stage.turn(n1=(gpu(0, own, holder("b", utilization=0.1)),))
    assert "a" not in pod_values(stage, "gpu_busy")
    assert "a" not in pod_values(stage, "gpu_power")


def document(stage: Stage, seconds: float, *, at: float, busy_seconds: float = 50.0) -> None:
    """Adds a round from a podgpu exporter whose counters were read at `at`."""
    idle = holder(
        "a",
        utilization=0.0,
        busy_seconds=busy_seconds,
        idle_seconds=seconds,
        idle_since=at - seconds,
    )
    stage.turn(n1=(gpu(0, idle, utilization=0.0),), exporter_id="e1", usage_at=at)


def test_rates_are_of_the_time_of_the_counters() -> None:
    stage = Stage([pod("a")])
    for at, seconds in ((10.0, 1.0), (10.0, 1.0), (34.0, 7.0)):
        document(stage, 0.0, at=BEGIN + at, busy_seconds=seconds)
    assert figure(stage, "gpu_busy") == pytest.approx(25)


@pytest.mark.fault(
    "the clock of a node is set, or its exporter stops counting (autoscale reads it)",
    "there is no rate of the counters until two readings agree with the time between them",
)
@pytest.mark.parametrize("jump", [-3600.0, 3600.0, None])
def test_a_nodes_clock_that_was_set_or_stands_still_gives_no_rate(jump: float | None) -> None:
    stage = Stage([pod("a")])
    for turn in range(3):
        document(stage, 0.0, at=BEGIN + 15.0 * turn, busy_seconds=15.0 * turn)
    assert figure(stage, "gpu_busy") == pytest.approx(100)
    if jump is not None:
        document(stage, 0.0, at=BEGIN + 45.0 + jump, busy_seconds=45.0)
    else:
        for _ in range(4):
            document(stage, 0.0, at=BEGIN + 30.0, busy_seconds=30.0)
    assert refused(stage, "gpu_busy").status == 503


# avg_GPU_utilization: the mean over the GPUs in use


def test_used_utilisation_leaves_out_gpus_that_are_not_in_use() -> None:
    stage = Stage([pod("a"), pod("b")])
    stage.turn(n1=(gpu(0, holder("a"), measured=80.0), gpu(1, holder("b"), measured=0.0)))
    assert figure(stage, "avg_GPU_utilization") == pytest.approx(80)
    stage.turn(n1=(gpu(0, holder("a"), measured=0.0), gpu(1, holder("b"), measured=0.0)))
    assert figure(stage, "avg_GPU_utilization", window=15.0) == 0.001
    assert figure(stage, "avg_GPU_utilization", window=30.0) == pytest.approx(40)


def test_used_utilisation_of_a_namespace_and_the_cluster() -> None:
    stage = Stage([pod("a"), pod("x", namespace="other", node="n2")])
    stage.turn(
        n1=(gpu(0, holder("a"), measured=80.0), gpu(1, measured=0.0)),
        n2=(gpu(0, holder("x", namespace="other"), uuid="GPU-9", measured=20.0),),
    )
    assert figure(stage, "avg_GPU_utilization", PodSelector("serving")) == pytest.approx(80)
    assert figure(stage, "avg_GPU_utilization", PodSelector("")) == pytest.approx(50)
    error = refused(stage, "avg_GPU_utilization", aggregate="p90")
    assert error.status == 400
    assert "does not support the aggregate p90" in str(error)


def used(name: str, measured: float, index: int = 0) -> DeviceState:
    """Returns a GPU that one pod holds, with a value of --used-field."""
    return gpu(index, holder(name), measured=measured)


def test_used_utilisation_has_none_of_the_rounds_before_a_pods_start() -> None:
    """They belong to another pod of the same name, such as the pod before in a StatefulSet."""
    stage = Stage([pod("a-0")])
    stage.turns(8, n1=(used("a-0", 100.0),))
    stage.pods = [pod("a-0", started=8 * INTERVAL + 1)]
    stage.turns(5, n1=(used("a-0", 10.0),))
    request = MetricRequest(find_metric("avg_GPU_utilization"), INFERENCE, window=180.0)
    value = compute_value(stage.snapshot(), request)
    assert value.value == pytest.approx(10)
    assert (value.window, value.at) == (5 * INTERVAL, BEGIN + 13 * INTERVAL)


def test_used_utilisation_has_a_value_soon_after_a_rollout() -> None:
    """The new pods have values of their whole life, so the window before it is not missing."""
    stage = Stage([pod("old")])
    stage.turns(20, n1=(used("old", 90.0),))
    stage.pods = [pod("new", started=20 * INTERVAL + 1)]
    stage.turns(3, n1=(used("new", 30.0),))
    assert figure(stage, "avg_GPU_utilization", window=300.0) == pytest.approx(30)


def test_used_utilisation_of_a_rolling_update_has_each_pod_from_its_start_on() -> None:
    stage = Stage([pod("a-0"), pod("a-1")])
    stage.turns(4, n1=(used("a-0", 100.0), used("a-1", 40.0, 1)))
    stage.pods = [pod("a-0", started=4 * INTERVAL + 1), pod("a-1")]
    stage.turns(4, n1=(used("a-0", 20.0), used("a-1", 40.0, 1)))
    # four rounds with a-1 alone, and four with both
    assert figure(stage, "avg_GPU_utilization", window=120.0) == pytest.approx(35)


def test_used_utilisation_of_a_namespace_includes_pods_that_ended() -> None:
    stage = Stage([pod("old")])
    stage.turns(4, n1=(used("old", 90.0),))
    stage.pods = [pod("new", started=4 * INTERVAL + 1)]
    stage.turns(4, n1=(used("new", 30.0),))
    namespace = PodSelector("serving")
    assert figure(stage, "avg_GPU_utilization", namespace, window=120.0) == pytest.approx(60)


def test_a_gpu_counts_once_for_a_namespace_and_for_each_pod_of_a_workload() -> None:
    stage = Stage([pod("a"), pod("b"), pod("c"), pod("d", owner="Deployment/other")])
    stage.turn(
        n1=(
            gpu(0, holder("a"), holder("b"), measured=80.0),
            gpu(1, holder("c"), measured=20.0),
            gpu(2, holder("d"), measured=5.0),
        )
    )
    assert figure(stage, "avg_GPU_utilization", PodSelector("serving")) == pytest.approx(35)
    assert figure(stage, "avg_GPU_utilization") == pytest.approx(60)


def test_a_job_is_not_a_pod() -> None:
    stage = Stage([pod("a")])
    job = Holder(job="7", source="slurm")
    stage.turn(n1=(gpu(0, holder("a"), measured=80.0), gpu(1, job, measured=20.0)))
    assert figure(stage, "avg_GPU_utilization", PodSelector("")) == pytest.approx(50)


def test_gpus_without_the_used_field_have_no_used_utilisation() -> None:
    stage, namespace = Stage([pod("a")]), PodSelector("serving")
    stage.turn(n1=(gpu(0, holder("a"), utilization=0.5),))
    assert figure(stage, selector=namespace) == pytest.approx(50)
    error = refused(stage, "avg_GPU_utilization", namespace)
    assert error.status == 503
    assert "avg_GPU_utilization of a for" in str(error)


@pytest.mark.parametrize("namespace", ["serving", ""])
def test_used_utilisation_of_a_scope_is_refused_while_one_of_its_nodes_is_stale(
    namespace: str,
) -> None:
    stage, selector = Stage([pod("a"), pod("b", node="n2")]), PodSelector(namespace)
    idle = gpu(0, holder("a"), measured=0.0)
    stage.turn(n1=(idle,), n2=(gpu(1, holder("b"), measured=90.0),))
    stage.turns(8, n1=(idle,))
    error = refused(stage, "avg_GPU_utilization", selector)
    assert error.status == 503
    assert "b on n2, last read 120 s ago" in str(error)
    assert figure(stage, "avg_GPU_utilization", selector, skip_missing=True) == 0.001
    stage.trouble = "the API server is away"
    stage.turn(n1=(idle,))
    assert "the API server is away" in str(refused(stage, "avg_GPU_utilization", selector))


def test_a_ratio_as_the_used_field_becomes_per_cent() -> None:
    stage = Stage([pod("a")], settings=ViewSettings(used_field="DCGM_FI_PROF_GR_ENGINE_ACTIVE"))
    stage.turn(n1=(gpu(0, holder("a"), values={"DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.25}),))
    assert figure(stage, "avg_GPU_utilization") == pytest.approx(25)


# The pods of a workload


def test_a_selector_is_of_one_namespace() -> None:
    stage = Stage([pod("a"), pod("a", namespace="other"), pod("web", labels="app=web", asks=False)])
    stage.turn(
        n1=(
            busy("a", 0.2, 0),
            gpu(1, holder("a", namespace="other", utilization=0.8), utilization=0.8),
        )
    )
    assert (
        figure(
            stage, selector=PodSelector("serving", labels=parse_selector("app in (inference,x)"))
        )
        == 20
    )
    for labels in ("app=nobody", "app=web"):
        error = refused(stage, selector=PodSelector("serving", labels=parse_selector(labels)))
        assert error.status == 404
        assert labels in str(error)


def test_a_pod_on_a_stale_node_has_no_value_unless_it_is_skipped() -> None:
    stage = Stage([pod("a"), pod("b", node="n2")])
    stage.turn(n1=(busy("a", 0.2, 0),), n2=(busy("b", 0.9, 1),))
    stage.turns(4, n1=(busy("a", 0.2, 0),))
    error = refused(stage)
    assert error.status == 503
    assert "b on n2, last read 60 s ago" in str(error)
    assert figure(stage, skip_missing=True) == pytest.approx(20)


def test_the_pods_without_a_value_are_named() -> None:
    stage = Stage([pod("a"), pod("b")])
    stage.turn(n1=(busy("a", 0.2, 0), gpu(1, holder("b"))))
    assert "gpu_utilization of b for" in str(refused(stage))


@pytest.mark.parametrize(
    ("pods", "status", "reason"),
    [
        ([], 404, "has no running pod"),
        ([pod("web", asks=False)], 404, "none of its 1 running pods holds a GPU"),
        ([pod("a")], 503, "1 of 1 pods request a GPU but are not reported"),
        ([pod("web", asks=False), pod("new", started=10.0)], 503, "have just started"),
        ([pod("a"), pod("new", started=10.0)], 503, "not reported by any exporter (a on n1)"),
    ],
)
def test_the_reason_why_there_is_no_value(pods: list[PodSeen], status: int, reason: str) -> None:
    stage = Stage(pods)
    stage.turn(n1=(gpu(0, utilization=0.0),))
    request = MetricRequest(UTILIZATION, INFERENCE)
    for compute in (compute_value, compute_pod_values):
        with pytest.raises(Refusal) as raised:
            compute(stage.snapshot(), request)
        assert raised.value.status == status
        assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("metric", "selector"),
    [
        ("gpu_utilization", INFERENCE),
        ("gpu_utilization", PodSelector("serving")),
        ("avg_GPU_utilization", INFERENCE),
    ],
)
def test_pods_that_have_just_started_have_no_value_yet(metric: str, selector: PodSelector) -> None:
    stage = Stage([pod("new", started=10.0)])
    stage.turn(n1=(gpu(0),))
    assert "have just started" in str(refused(stage, metric, selector))


def test_a_pod_is_starting_for_two_rounds_and_half_a_minute() -> None:
    for age, is_starting in ((59.0, True), (61.0, False)):
        stage = Stage([pod("a"), pod("new", started=INTERVAL - age)])
        stage.turn(n1=(busy("a", 0.2, 0),))
        if is_starting:
            assert figure(stage) == pytest.approx(20)
        else:
            assert "new on n1" in str(refused(stage))


def test_the_reason_includes_the_exporters_that_cannot_be_read() -> None:
    stage = Stage([pod("a", node="n2")])
    failed = [TargetOutcome(f"http://n{n}:9400", 1.0, "timeout", "no answer") for n in range(5)]
    stage.outcomes = (*failed, TargetOutcome("http://n9:9400", 1.0))
    stage.turn(n1=(gpu(0),))
    text = str(refused(stage))
    assert text.endswith(
        "check that podgpu's exporter runs on these nodes (http://n0:9400: no answer, "
        "http://n1:9400: no answer, http://n2:9400: no answer and 2 more)"
    )
    stage.outcomes = ()
    stage.turn(n1=(gpu(0),))
    assert str(refused(stage)).endswith("podgpu's exporter runs on these nodes")


def test_three_of_many_pods_without_a_value_are_named() -> None:
    stage = Stage([pod(f"a{n}") for n in range(5)])
    stage.turn(n1=(gpu(0),))
    assert "(a0 on n1, a1 on n1, a2 on n1 and 2 more)" in str(refused(stage))
    stage.turn(n1=tuple(gpu(n, holder(f"a{n}")) for n in range(5)))
    assert "of a0, a1, a2 and 2 more for" in str(refused(stage))


# The node of a pod


@pytest.mark.fault(
    "the former node of a pod still reports it",
    "autoscale uses only the values of the node that the API server names, "
    "and logs the other one once",
)
def test_values_of_a_pods_former_node_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage([pod("a", node="n2")])  # n1 is no longer in Kubernetes
    stage.turns(3, n1=(busy("a", 0.0, 0),), n2=(busy("a", 0.6, 0, uuid="GPU-b"),))
    assert figure(stage) == pytest.approx(60)
    assert (
        caplog.text.count("the exporter on n1 reports the pod serving/a, but that pod runs on n2")
        == 1
    )
    stage.turns(4, n1=(busy("a", 0.0, 0),))
    assert "a on n2" in str(refused(stage))


def test_an_exporter_that_names_its_node_differently_is_used_if_it_is_the_only_one() -> None:
    stage = Stage([pod("a", node="n1.example.com")])
    stage.turn(n1=(busy("a", 0.6, 0),))
    assert figure(stage) == pytest.approx(60)
    stage.turn(n1=(busy("a", 0.6, 0),), n2=(busy("a", 0.0, 0, uuid="GPU-b"),))
    assert refused(stage).status == 503


@pytest.mark.parametrize("node", ["n1", "n1.example.com"])
def test_no_warning_about_values_that_are_used_or_of_pods_that_do_not_run(
    node: str, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage([pod("a", node=node)])
    ended = busy("ended", 0.1, 1, uuid="GPU-1"), busy("ended", 0.1, 1, uuid="GPU-2")
    stage.turns(2, n1=(busy("a", 0.6, 0), ended[0]), n2=(ended[1],))
    assert figure(stage) == pytest.approx(60)
    assert "reports the pod" not in caplog.text


# Idleness


def counted(
    busy_seconds: float, idle_seconds: float, utilization: float | None = 0.0
) -> DeviceState:
    own = holder("a", utilization=utilization, busy_seconds=busy_seconds, idle_seconds=idle_seconds)
    return gpu(0, own, utilization=0.0)


def test_only_an_idle_workload_is_zero() -> None:
    stage = Stage([pod("a")])
    stage.turns(8, n1=(busy("a", 0.0, 0),))
    assert figure(stage, idle_for=300.0) == 0.001
    assert figure(stage, idle_for=60.0) == 0
    assert pod_values(stage, idle_for=300.0) == {"a": 0.001}
    assert pod_values(stage, idle_for=60.0) == {"a": 0}


@pytest.mark.parametrize("metric", [metric.name for metric in METRICS])
def test_no_metric_is_zero_if_idleness_is_not_proven(metric: str) -> None:
    stage = Stage([pod("a")])
    zeros: dict[str, Any] = {
        "measured": 0.0,
        "power_watts": 0.0,
        "memory_used": 0,
        "memory_total": 100,
    }
    values = {metric.field: 0.0 for metric in PROFILING_METRICS}
    own = holder("a", utilization=0.0, busy_seconds=5.0)
    stage.turns(8, n1=(gpu(0, own, utilization=0.0, values=values, **zeros),))
    assert figure(stage, metric, idle_for=300.0, window=60.0) == 0.001
    assert pod_values(stage, metric, window=60.0) == {"a": 0.001}


def test_utilisation_of_zero_does_not_prove_idleness() -> None:
    """dcgm-exporter reports only samples. The GPU may have been busy between two samples of 0."""
    stage = Stage([pod("a")], counts=False)
    stage.turns(40, n1=(busy("a", 0.0, 0),))
    assert active(stage, 60.0)
    assert figure(stage, idle_for=60.0) == 0.001


def test_counters_that_stand_still_do_not_prove_idleness() -> None:
    stage = Stage([pod("a")])
    stage.turns(40, n1=(counted(50.0, 900.0),))
    assert active(stage, 60.0)
    stage.turns(3, n1=(counted(50.0, 900.0, utilization=None),))
    assert refused(stage, "gpu_busy").status == 503
    assert active(stage, 15.0)


@pytest.mark.fault(
    "an exporter is away for minutes and comes back (KEDA polls)",
    "that time was not counted: its pods are idle from then on, not from before",
)
@pytest.mark.parametrize("reset", [False, True])
def test_idleness_does_not_include_time_that_was_not_counted(reset: bool) -> None:
    stage = Stage([pod("a")])
    for turn in range(20):
        stage.turn(n1=(counted(50.0, 15.0 * turn),))
    assert not active(stage, 120.0)
    stage.turns(10)
    before = 0.0 if reset else 285.0
    for turn in range(10):
        stage.turn(n1=(counted(0.0 if reset else 50.0, before + 15.0 * turn),))
        assert active(stage, 120.0) is (turn < 8)


def test_counters_that_grow_every_other_round_prove_idleness() -> None:
    stage = Stage([pod("a")])
    for turn in range(20):
        stage.turn(n1=(counted(50.0, 30.0 * (turn // 2)),))
    assert not active(stage, 240.0)
    assert active(stage, 300.0)


def test_podgpus_document_proves_idleness_at_once() -> None:
    stage = Stage([pod("a")])
    document(stage, 900.0, at=BEGIN)
    assert not active(stage, 600.0)
    assert active(stage, 1200.0)


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_our_clock_that_was_set_makes_no_pod_idle(step: float) -> None:
    stage = Stage([pod("a", started=-86_400.0)])
    for turn in range(14):
        stage.begin += step if turn == 10 else 0.0
        stage.turn(n1=(counted(50.0, 15.0 * turn),))
    assert active(stage, 600.0)


@pytest.mark.parametrize("containers", ["two GPUs", "one GPU"])
@pytest.mark.parametrize("last_to_work", ["main", "side"])
def test_a_pod_is_idle_as_long_as_its_least_idle_container(
    containers: str, last_to_work: str
) -> None:
    stage = Stage([pod("a")])
    for turn in range(12):
        ratios = {"main": 0.0, "side": 0.0}
        if turn <= 5:
            ratios[last_to_work] = 0.5
        first = holder("a", utilization=ratios["main"])
        second = holder("a", container="side", utilization=ratios["side"])
        if containers == "one GPU":
            stage.turn(n1=(gpu(0, first, second),))
        else:
            stage.turn(n1=(gpu(0, first), gpu(1, second)))
    assert not active(stage, 90.0)
    assert active(stage, 120.0)
    assert figure(stage, idle_for=120.0) == 0.001


def test_a_pod_is_not_idle_since_before_its_start() -> None:
    """The counters go on if a new pod has the same name."""
    stage = Stage([pod("a")])
    stage.turns(10, n1=(busy("a", 0.0, 0),))
    assert not active(stage, 120.0)
    stage.pods = [pod("a", started=100.0)]
    stage.turn(n1=(busy("a", 0.0, 0),))
    assert active(stage, 120.0)
    assert not active(stage, 60.0)


def test_a_pod_on_a_gpu_that_cannot_be_read_is_not_idle() -> None:
    stage = Stage([pod("a")])
    idle = busy("a", 0.0, 0)
    stage.turns(10, n1=(idle,))
    assert not active(stage, 60.0)
    stage.turn(n1=(replace(idle, conditions=(Condition("unreadable"),)),))
    assert active(stage, 60.0)


def test_a_pod_without_a_value_that_is_skipped_is_not_idle() -> None:
    stage = Stage([pod("a"), pod("b", node="n2")])
    stage.turns(10, n1=(busy("a", 0.0, 0),))
    assert figure(stage, idle_for=60.0, skip_missing=True) == 0.001
    stage.pods = [pod("a")]
    stage.turn(n1=(busy("a", 0.0, 0),))
    assert figure(stage, idle_for=60.0) == 0


def test_a_workload_is_idle_if_all_its_pods_are() -> None:
    stage = Stage([pod("a"), pod("b")])
    stage.turns(10, n1=(busy("a", 0.0, 0), busy("b", 0.0, 1)))
    assert active(stage, 300.0)
    assert not active(stage, 120.0)
    stage.pods.append(pod("starting", started=145.0))
    stage.turn(n1=(busy("a", 0.0, 0), busy("b", 0.0, 1)))
    assert active(stage, 120.0)


@pytest.mark.parametrize("requests_gpu", [True, False])
def test_a_workload_with_a_pod_on_a_stale_node_is_not_idle(requests_gpu: bool) -> None:
    """A pod without a GPU request counts too, because it held a GPU before."""
    stage = Stage([pod("a"), pod("b", node="n2", asks=requests_gpu)])
    idle = busy("a", 0.0, 0)
    stage.turns(10, n1=(idle,), n2=(busy("b", 0.9, 1),))
    pods, stage.pods, stage.trouble = stage.pods, [], "the running pods are not known"
    stage.turns(10, n1=(idle,))
    stage.pods, stage.trouble = pods, ""
    stage.turn(n1=(idle,))
    with pytest.raises(Refusal, match="b on n2") as raised:
        active(stage, 120.0)
    assert raised.value.status == 503
    stage.pods = [pod("a")]
    stage.turn(n1=(idle,))
    assert not active(stage, 120.0)


def test_a_workload_without_pods_is_neither_active_nor_idle() -> None:
    stage = Stage()
    stage.turn(n1=(gpu(0, utilization=0.0),))
    with pytest.raises(Refusal) as raised:
        active(stage, 60.0)
    assert raised.value.status == 404


def test_clients_of_mps_have_no_value_and_the_reason_is_said() -> None:
    stage = Stage([pod("a"), pod("b")])
    shared = gpu(0, holder("a", memory=1), holder("b", memory=1), utilization=0.72, memory_total=10)
    stage.turns(3, n1=(replace(shared, usage=DeviceTotals(method="mps")),))
    for metric in ("gpu_utilization", "gpu_busy", "gpu_power"):
        refusal = refused(stage, metric)
        assert refusal.status == 503
        assert f"{metric} of a, b is not known under MPS" in str(refusal)
    assert figure(stage, "gpu_memory_utilization") == pytest.approx(10), "memory has a value"
    assert active(stage, 15.0), "a workload that may be busy is not scaled to zero"


def test_mps_is_not_the_reason_for_a_missing_value_of_the_only_client() -> None:
    stage = Stage([pod("a")])
    only = gpu(0, holder("a", memory=1), utilization=0.72, memory_total=10)
    stage.turn(n1=(replace(only, usage=DeviceTotals(method="mps")),))
    assert figure(stage) == pytest.approx(72)
    assert find_metric("gpu_sm_activity").needs in str(refused(stage, "gpu_sm_activity"))


# Stored rounds


def answer(stage: Stage, later: float) -> tuple[float, float]:
    found = compute_value(stage.snapshot(later), MetricRequest(UTILIZATION, INFERENCE, window=60.0))
    return found.value, found.at


def test_there_is_no_answer_before_the_first_round_and_long_after_the_last() -> None:
    stage = Stage([pod("a")])
    with pytest.raises(Refusal, match="not read the nodes yet"):
        stage.snapshot()
    stage.turn(n1=(busy("a", 0.5, 0),))
    assert stage.snapshot(60.0).rounds
    with pytest.raises(Refusal) as raised:
        stage.snapshot(100.0)
    assert raised.value.status == 503


def test_a_clock_that_is_set_does_not_change_the_window() -> None:
    stage = Stage([pod("a")])
    stage.turns(4, n1=(busy("a", 1.0, 0),))
    stage.begin -= 3600.0
    stage.pods = [pod("a", started=-7200.0)]
    stage.turns(2, n1=(busy("a", 0.5, 0),))
    value, at = answer(stage, 6.0)
    assert value == pytest.approx(75)
    assert at == stage.begin + stage.now


def test_a_round_that_was_missed_is_not_zero() -> None:
    stage = Stage([pod("a")])
    stage.turn(n1=(busy("a", 0.5, 0),))
    stage.now += 2 * INTERVAL
    stage.turn(n1=(busy("a", 0.5, 0),))
    assert answer(stage, 6.0)[0] == pytest.approx(50)


def test_samples_are_stored_for_the_longest_window() -> None:
    stage = Stage([pod("a"), pod("b")], longest=60.0)
    stage.turns(3, n1=(busy("a", 0.5, 0), busy("b", 0.5, 1)))
    stage.turns(20, n1=(busy("b", 0.5, 1),))
    rounds = stage.snapshot().rounds
    assert len(rounds) == 4
    assert not any(("serving", "a") in one.rows for one in rounds)
