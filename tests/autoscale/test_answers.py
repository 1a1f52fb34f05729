"""What a workload's figure is, who is in it, and when there is none."""

from __future__ import annotations

import pytest

from podgpu.autoscale.answers import Aggregation, PodSelector, compute_pod_values, compute_scope_value, compute_value
from podgpu.autoscale.metrics import METRICS, PROFILING_METRICS, Aggregate, find_metric, parse_aggregate
from podgpu.autoscale.refusal import Refusal, RefusalKind
from podgpu.autoscale.selectors import parse_selector
from podgpu.cluster.settings import ViewSettings
from podgpu.model import MigInstance
from tests.autoscale.scenes import BEGIN, INFERENCE, INTERVAL, Stage, busy, figure, gpu, holder, pod, refused

# Aggregation pods and over time


def three_pods() -> Stage:
    stage = Stage([pod("a"), pod("b"), pod("c")])
    stage.turn(n1=(busy("a", 0.2, 0), busy("b", 0.4, 1), busy("c", 0.9, 2)))
    return stage


@pytest.mark.parametrize(
    ("aggregate", "value"),
    [("mean", 50), ("max", 90), ("sum", 150), ("p50", 40), ("p0", 20), ("p100", 90), ("p75", 65)],
)
def test_aggregates_are_over_pods(aggregate: str, value: float) -> None:
    assert figure(three_pods(), aggregate=parse_aggregate(aggregate)) == pytest.approx(value)


def test_the_window_is_over_each_pods_rounds() -> None:
    stage = Stage([pod("a")])
    for ratio in (1.0, 0.0, 0.5, 0.1):
        stage.turn(n1=(busy("a", ratio, 0),))
    assert figure(stage, window=15.0) == pytest.approx(10)
    assert figure(stage, window=30.0) == pytest.approx(30)
    assert figure(stage, window=60.0) == pytest.approx(40)


def test_the_window_told_is_the_one_that_was_had() -> None:
    stage = Stage([pod("a")])
    stage.turns(5, n1=(busy("a", 0.2, 0),))
    answer = compute_value(stage.snapshot(), INFERENCE, find_metric("gpu_utilization"), Aggregation(window=150.0))
    assert (answer.window, answer.at) == (5 * INTERVAL, BEGIN + 5 * INTERVAL)


def test_less_than_half_of_a_window_is_no_figure() -> None:
    """After a restart of ours: two replicas would answer differently, and one sample is no mean."""
    stage, whole = Stage([pod("a")]), {"window": 10 * INTERVAL}
    metric, node = find_metric("gpu_utilization"), ("node", "n1")
    stage.turns(4, n1=(busy("a", 0.2, 0),))
    assert "not yet for half of the window" in str(refused(stage, **whole))
    assert compute_pod_values(stage.snapshot(), stage.pods, metric, Aggregation(10 * INTERVAL)) == []
    with pytest.raises(Refusal, match="4 of 10 rounds"):
        compute_scope_value(stage.snapshot(), node, metric, 10 * INTERVAL)
    assert figure(stage, window=4 * INTERVAL) == pytest.approx(20)
    stage.turn(n1=(busy("a", 0.2, 0),))
    assert figure(stage, **whole) == pytest.approx(20)
    assert compute_scope_value(stage.snapshot(), node, metric, 10 * INTERVAL).value == pytest.approx(20)


def test_a_younger_pod_of_the_same_name_has_none_of_the_old_ones_rounds() -> None:
    stage = Stage([pod("a-0", owner="StatefulSet/a")])
    stage.turns(4, n1=(busy("a-0", 1.0, 0),))
    stage.pods = [pod("a-0", owner="StatefulSet/a", started=65.0)]
    stage.turns(2, n1=(busy("a-0", 0.2, 0),))
    assert figure(stage, selector=PodSelector("serving", owner=("StatefulSet", "a")), window=120.0) == pytest.approx(20)


def test_a_pod_on_several_gpus_is_their_mean_and_its_power_their_sum() -> None:
    stage = Stage([pod("a")])
    stage.turn(n1=(busy("a", 0.5, 0, power_watts=300.0), busy("a", 1.0, 1, power_watts=400.0)))
    assert figure(stage) == pytest.approx(75)
    assert figure(stage, "gpu_power") == pytest.approx(700)


def test_memory_is_of_all_that_its_gpus_have() -> None:
    stage = Stage([pod("a")])
    stage.turn(
        n1=(
            gpu(0, holder("a", memory=10), memory_total=100, memory_used=60),
            gpu(1, holder("a", memory=30), memory_total=300, memory_used=70),
        )
    )
    assert figure(stage, "gpu_memory_utilization") == pytest.approx(10)


def test_busy_time_and_energy_are_rates_of_counters() -> None:
    stage = Stage([pod("a"), pod("b")])
    for step in range(3):
        shared = gpu(
            0,
            holder("a", utilization=0.2, busy_seconds=100 + 3.0 * step, energy_joules=1500.0 * step),
            holder("b", utilization=0.5, busy_seconds=7.5 * step, energy_joules=3000.0 * step),
            power_watts=300.0,
        )
        stage.turn(n1=(shared,))
    assert figure(stage, "gpu_busy", window=30.0, aggregate=Aggregate("max")) == pytest.approx(50)
    assert figure(stage, "gpu_busy", window=30.0) == pytest.approx(35)
    assert figure(stage, "gpu_power", window=30.0, aggregate=Aggregate("sum")) == pytest.approx(300)


def test_a_counter_that_fell_tells_no_rate() -> None:
    stage = Stage([pod("a")])
    for seconds in (10.0, 12.0, 0.5):
        stage.turn(n1=(gpu(0, holder("a", utilization=0.1, busy_seconds=seconds)),))
    assert refused(stage, "gpu_busy").kind is RefusalKind.NO_DATA


@pytest.mark.parametrize(("metric", "field"), [(metric.name, metric.field) for metric in PROFILING_METRICS])
def test_activities_are_the_devices_where_a_pod_has_it_alone(metric: str, field: str) -> None:
    stage = Stage([pod("a"), pod("b")])
    stage.turn(n1=(gpu(0, holder("a"), values={field: 0.3}), gpu(1, holder("b"), values={field: 0.5})))
    assert figure(stage, metric) == pytest.approx(40)
    stage.turn(n1=(gpu(0, holder("a"), holder("b"), values={field: 0.3}),))
    assert "to itself" in str(refused(stage, metric))


def test_every_metric_has_an_answer_or_says_what_it_needs() -> None:
    stage = Stage([pod("a")])
    stage.turn(n1=(gpu(0, holder("a")),))
    for metric in METRICS:
        assert metric.needs in str(refused(stage, metric.name))


# Seed 003: the mean over the GPUs in use


def test_used_utilisation_leaves_out_what_is_not_in_use() -> None:
    stage = Stage([pod("a"), pod("b")])
    stage.turn(n1=(gpu(0, holder("a"), measured=80.0), gpu(1, holder("b"), measured=0.0)))
    assert figure(stage, "avg_GPU_utilization") == pytest.approx(80)
    stage.turn(n1=(gpu(0, holder("a"), measured=0.0), gpu(1, holder("b"), measured=0.0)))
    assert figure(stage, "avg_GPU_utilization", window=15.0) == 0.001
    assert figure(stage, "avg_GPU_utilization", window=30.0) == pytest.approx(40)


def test_used_utilisation_of_a_namespace_a_node_and_the_cluster() -> None:
    stage = Stage([pod("a"), pod("x", namespace="other")])
    stage.turn(
        n1=(gpu(0, holder("a"), measured=80.0), gpu(1, measured=0.0)),
        n2=(gpu(0, holder("x", namespace="other"), uuid="GPU-9", measured=20.0),),
    )
    scene, used = stage.snapshot(), find_metric("avg_GPU_utilization")
    for scope, value in ((("namespace", "serving"), 80), (("node", "n2"), 20), (("cluster", ""), 50)):
        assert compute_scope_value(scene, scope, used, INTERVAL).value == pytest.approx(value)


@pytest.mark.parametrize("namespace", ["serving", ""])
def test_used_utilisation_of_a_scope_is_refused_while_one_of_its_nodes_is_dark(namespace: str) -> None:
    stage, used = Stage([pod("a"), pod("b", node="n2")]), find_metric("avg_GPU_utilization")
    idle = gpu(0, holder("a"), measured=0.0)
    stage.turn(n1=(idle,), n2=(gpu(1, holder("b"), measured=90.0),))
    stage.turns(8, n1=(idle,))
    with pytest.raises(Refusal, match="b on n2, last read ") as raised:
        compute_value(stage.snapshot(), PodSelector(namespace), used, Aggregation(window=15.0))
    assert raised.value.kind is RefusalKind.NO_DATA
    assert (
        compute_value(stage.snapshot(), PodSelector(namespace), used, Aggregation(window=15.0, skip_missing=True)).value
        == 0.001
    )
    stage.trouble = "the API server is away"
    stage.turn(n1=(idle,))
    with pytest.raises(Refusal, match="the API server is away"):
        compute_value(stage.snapshot(), PodSelector(namespace), used, Aggregation(window=15.0))


@pytest.mark.parametrize("whom", [INFERENCE, PodSelector("serving")])
def test_of_used_utilisation_there_is_no_aggregate_but_the_mean(whom: PodSelector) -> None:
    stage = Stage([pod("a")])
    stage.turn(n1=(gpu(0, holder("a"), measured=80.0),))
    with pytest.raises(Refusal, match="aggregate p90") as raised:
        compute_value(
            stage.snapshot(), whom, find_metric("avg_GPU_utilization"), Aggregation(aggregate=parse_aggregate("p90"))
        )
    assert raised.value.kind is RefusalKind.BAD_REQUEST


def test_a_ratio_as_the_used_field_is_told_in_per_cent() -> None:
    stage = Stage([pod("a")], settings=ViewSettings(used_field="DCGM_FI_PROF_GR_ENGINE_ACTIVE"))
    stage.turn(n1=(gpu(0, holder("a"), values={"DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.25}),))
    assert figure(stage, "avg_GPU_utilization") == pytest.approx(25)


# Nodes


def test_a_node_is_the_mean_of_its_gpus_held_or_not() -> None:
    stage = Stage()
    stage.turn(n1=(busy("a", 1.0, 0, power_watts=500.0), gpu(1, utilization=0.0, power_watts=100.0)))
    scene = stage.snapshot()
    assert compute_scope_value(scene, ("node", "n1"), find_metric("gpu_utilization"), INTERVAL).value == pytest.approx(
        50
    )
    assert compute_scope_value(scene, ("node", "n1"), find_metric("gpu_power"), INTERVAL).value == pytest.approx(600)


def test_a_gpu_in_mig_mode_is_its_instances() -> None:
    stage = Stage()
    instances = tuple(MigInstance(id=n, utilization_ratio=ratio) for n, ratio in enumerate((0.2, 0.6)))
    stage.turn(n1=(gpu(0, instances=instances),))
    answer = compute_scope_value(stage.snapshot(), ("node", "n1"), find_metric("gpu_utilization"), INTERVAL)
    assert answer.value == pytest.approx(40)


def test_a_nodes_busy_time_is_the_mean_of_its_gpus_shared_ones_and_those_in_mig_mode_too() -> None:
    stage = Stage()
    for step in range(2):
        full, half = (15.0 * step, 7.5 * step)
        shared = gpu(0, *(holder(name, utilization=1.0, busy_seconds=full) for name in "ab"))
        instances = tuple(
            MigInstance(id=n, holders=(holder(f"m{n}", utilization=0.5, busy_seconds=seconds),))
            for n, seconds in enumerate((full, half))
        )
        stage.turn(n1=(shared, gpu(1, instances=instances), gpu(2)))
    answer = compute_scope_value(stage.snapshot(), ("node", "n1"), find_metric("gpu_busy"), INTERVAL)
    assert answer.value == pytest.approx((100 + 75 + 0) / 3)


# Shared GPUs


def test_of_a_shared_gpu_each_has_its_own_part() -> None:
    stage = Stage([pod("a"), pod("b")])
    stage.turn(n1=(gpu(0, holder("a", utilization=0.1), holder("b", utilization=0.6), utilization=0.7),))
    values = compute_pod_values(stage.snapshot(), stage.pods, find_metric("gpu_utilization"), Aggregation(INTERVAL))
    assert [pod.value for pod in values] == [pytest.approx(10), pytest.approx(60)]


def test_of_a_shared_gpu_without_own_figures_nothing_is_guessed() -> None:
    stage = Stage([pod("a"), pod("b")])
    stage.turn(n1=(gpu(0, holder("a"), holder("b"), utilization=0.7),))
    assert refused(stage).kind is RefusalKind.NO_DATA


def test_alone_on_a_gpu_its_figure_is_the_pods() -> None:
    stage = Stage([pod("a")])
    stage.turn(n1=(gpu(0, holder("a"), holder("a", container="side"), utilization=0.7),))
    assert figure(stage) == pytest.approx(70)


# Who is in it


def test_a_pod_without_a_gpu_is_left_out() -> None:
    stage = three_pods()
    stage.pods.append(pod("frontend", asks=False))
    stage.turn(n1=(busy("a", 0.2, 0), busy("b", 0.4, 1), busy("c", 0.9, 2)))
    assert figure(stage) == pytest.approx(50)


def test_a_selector_is_of_one_namespace() -> None:
    stage = Stage([pod("a"), pod("a", namespace="other")])
    stage.turn(n1=(busy("a", 0.2, 0), gpu(1, holder("a", namespace="other", utilization=0.8), utilization=0.8)))
    selector = PodSelector("serving", labels=parse_selector("app in (inference,x)"))
    assert figure(stage, selector=selector) == pytest.approx(20)


def test_a_selector_that_matches_nothing_is_not_found() -> None:
    error = refused(three_pods(), selector=PodSelector("serving", labels=parse_selector("app=nobody")))
    assert error.kind is RefusalKind.NOT_FOUND
    assert "app=nobody" in str(error)
    assert "wake" in str(error)


def test_pods_that_all_hold_no_gpu_are_not_found() -> None:
    stage = Stage([pod("web", asks=False)])
    stage.turn(n1=(busy("other", 0.5, 0),))
    assert refused(stage).kind is RefusalKind.NOT_FOUND


def test_a_pod_on_a_dark_node_refuses_the_figure_unless_it_is_to_be_left_out() -> None:
    stage = Stage([pod("a"), pod("b", node="n2")])
    stage.turn(n1=(busy("a", 0.2, 0),), n2=(busy("b", 0.9, 1),))
    stage.turns(4, n1=(busy("a", 0.2, 0),))
    error = refused(stage)
    assert error.kind is RefusalKind.NO_DATA
    assert "b on n2, last read 60 s ago" in str(error)
    assert figure(stage, skip_missing=True) == pytest.approx(20)


def test_a_pod_that_has_just_begun_does_not_stop_the_answer() -> None:
    stage = three_pods()
    stage.pods.append(pod("new", started=10.0))
    stage.turn(n1=(busy("a", 0.2, 0), busy("b", 0.4, 1), busy("c", 0.9, 2)))
    assert figure(stage) == pytest.approx(50)


def test_nothing_is_known_while_the_api_server_has_not_told_of_pods() -> None:
    stage = three_pods()
    stage.trouble = "the API server has not yet said which pods there are"
    stage.turn(n1=())
    assert refused(stage).kind is RefusalKind.NO_DATA
