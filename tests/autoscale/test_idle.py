"""When a workload is told as 0, or inactive: only when it is surely idle."""

from __future__ import annotations

import pytest

from podgpu.autoscale.answers import compute_scope_value, is_active
from podgpu.autoscale.metrics import METRICS, PROFILING_METRICS, find_metric
from podgpu.autoscale.refusal import Refusal, RefusalKind
from podgpu.model import DeviceState
from tests.autoscale.scenes import INFERENCE, INTERVAL, Stage, busy, figure, gpu, holder, pod, refused

PROFILING = [metric.field for metric in PROFILING_METRICS]


def test_zero_is_told_only_of_the_surely_idle() -> None:
    stage = Stage([pod("a")])
    stage.turns(8, n1=(busy("a", 0.0, 0),))
    assert figure(stage, idle_for=300.0) == 0.001
    assert figure(stage, idle_for=60.0) == 0


@pytest.mark.parametrize("metric", [metric.name for metric in METRICS])
def test_no_metric_is_zero_of_a_workload_that_is_not_surely_idle(metric: str) -> None:
    stage = Stage([pod("a")])
    nothing = {"measured": 0.0, "power_watts": 0.0, "memory_used": 0, "memory_total": 100}
    for _ in range(8):
        of = holder("a", utilization=0.0, busy_seconds=5.0)
        stage.turn(n1=(gpu(0, of, utilization=0.0, values=dict.fromkeys(PROFILING, 0.0), **nothing),))
    assert figure(stage, metric, idle_for=300.0, window=60.0) == 0.001
    assert compute_scope_value(stage.snapshot(), ("node", "n1"), find_metric(metric), 4 * INTERVAL).value == 0.001


def counted(busy_seconds: float, idle_seconds: float, utilization: float | None = 0.0) -> DeviceState:
    of = holder("a", utilization=utilization, busy_seconds=busy_seconds, idle_seconds=idle_seconds)
    return gpu(0, of, utilization=0.0)


def test_nobody_is_surely_idle_where_nobody_counts_it() -> None:
    """An exposition of dcgm-exporter's: samples of 0, between which anything may have run."""
    stage = Stage([pod("a")], counts=False)
    stage.turns(40, n1=(busy("a", 0.0, 0),))
    assert is_active(stage.snapshot(), INFERENCE, 60.0)
    assert figure(stage, idle_for=60.0) == 0.001


def test_counters_that_stand_still_are_no_idleness() -> None:
    stage = Stage([pod("a")])
    stage.turns(40, n1=(counted(50.0, 900.0),))
    assert is_active(stage.snapshot(), INFERENCE, 60.0)


def test_a_busy_counter_whose_use_nobody_sees_any_more_tells_no_rate() -> None:
    stage = Stage([pod("a")])
    stage.turns(3, n1=(counted(50.0, 900.0, utilization=None),))
    assert refused(stage, "gpu_busy").kind is RefusalKind.NO_DATA
    assert is_active(stage.snapshot(), INFERENCE, 15.0)


@pytest.mark.fault(
    "an exporter is away for minutes and comes back (KEDA asks)",
    "nobody counted meanwhile: its pods are idle from then on, not from before",
)
@pytest.mark.parametrize("counters", ["kept", "begun anew"])
def test_idleness_does_not_survive_time_that_nobody_counted(counters: str) -> None:
    stage = Stage([pod("a")])
    for turn in range(20):
        stage.turn(n1=(counted(50.0, 15.0 * turn),))
    assert not is_active(stage.snapshot(), INFERENCE, 120.0)
    stage.turns(10)
    before = 285.0 if counters == "kept" else 0.0
    for turn in range(10):
        stage.turn(n1=(counted(50.0 if before else 0.0, before + 15.0 * turn),))
        assert is_active(stage.snapshot(), INFERENCE, 120.0) is (turn < 8)


def test_expositions_that_are_made_seldom_tell_of_idleness_too() -> None:
    stage = Stage([pod("a")])
    for turn in range(20):
        stage.turn(n1=(counted(50.0, 30.0 * (turn // 2)),))
    assert not is_active(stage.snapshot(), INFERENCE, 240.0)
    assert is_active(stage.snapshot(), INFERENCE, 300.0)


def test_a_clock_that_is_set_makes_nobody_idle() -> None:
    for step in (-3600.0, 3600.0):
        stage = Stage([pod("a", started=-86_400.0)])
        for turn in range(10):
            stage.turn(n1=(counted(50.0, 15.0 * turn),))
        stage.begin += step
        for turn in range(10, 14):
            stage.turn(n1=(counted(50.0, 15.0 * turn),))
        assert is_active(stage.snapshot(), INFERENCE, 600.0)


def test_a_workload_is_idle_when_each_of_its_pods_surely_is() -> None:
    stage = Stage([pod("a"), pod("b")])
    stage.turns(10, n1=(busy("a", 0.0, 0), busy("b", 0.0, 1)))
    assert is_active(stage.snapshot(), INFERENCE, 300.0)
    assert not is_active(stage.snapshot(), INFERENCE, 120.0)
    stage.turn(n1=(busy("a", 0.0, 0), busy("b", 0.1, 1)))
    assert is_active(stage.snapshot(), INFERENCE, 120.0)


def test_beside_an_idle_pod_a_dark_one_is_no_idleness() -> None:
    stage = Stage([pod("a"), pod("b", node="n2")])
    stage.turns(20, n1=(busy("a", 0.0, 0),), n2=(busy("b", 0.9, 1),))
    stage.turns(30, n1=(busy("a", 0.0, 0),))
    with pytest.raises(Refusal) as raised:
        is_active(stage.snapshot(), INFERENCE, 120.0)
    assert raised.value.kind is RefusalKind.NO_DATA


def test_a_dark_pod_is_remembered_by_what_it_held_when_its_resource_is_unheard_of() -> None:
    stage = Stage([pod("a"), pod("b", node="n2", asks=False)])
    stage.turns(10, n1=(busy("a", 0.0, 0),), n2=(busy("b", 0.9, 1),))
    stage.turns(30, n1=(busy("a", 0.0, 0),))
    with pytest.raises(Refusal):
        is_active(stage.snapshot(), INFERENCE, 120.0)
    stage.pods = [pod("a")]
    stage.turn(n1=(busy("a", 0.0, 0),))
    assert not is_active(stage.snapshot(), INFERENCE, 120.0)


def test_what_a_dark_pod_held_is_not_forgotten_while_nobody_knows_which_pods_run() -> None:
    stage = Stage([pod("a"), pod("b", node="n2", asks=False)])
    stage.turns(10, n1=(busy("a", 0.0, 0),), n2=(busy("b", 0.9, 1),))
    pods, stage.pods, stage.trouble = stage.pods, [], "which pods run is not known any more"
    stage.turns(10, n1=(busy("a", 0.0, 0),))
    stage.pods, stage.trouble = pods, ""
    stage.turn(n1=(busy("a", 0.0, 0),))
    with pytest.raises(Refusal, match="b on n2"):
        is_active(stage.snapshot(), INFERENCE, 120.0)


def test_a_pod_that_has_just_begun_is_at_work() -> None:
    stage = Stage([pod("a"), pod("b", started=140.0)])
    stage.turns(10, n1=(busy("a", 0.0, 0),))
    assert is_active(stage.snapshot(), INFERENCE, 60.0)


def test_without_any_pod_nobody_says_inactive() -> None:
    stage = Stage()
    stage.turn(n1=(gpu(0, utilization=0.0),))
    with pytest.raises(Refusal) as raised:
        is_active(stage.snapshot(), INFERENCE, 60.0)
    assert raised.value.kind is RefusalKind.NOT_FOUND
