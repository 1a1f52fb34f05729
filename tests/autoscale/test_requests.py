"""A ScaledObject's trigger, read key by key."""

from __future__ import annotations

import time

import pytest

from podgpu.autoscale.answers import Aggregation, PodSelector
from podgpu.autoscale.refusal import Refusal, RefusalKind
from podgpu.autoscale.requests import Trigger, parse_trigger
from podgpu.autoscale.selectors import parse_selector

GOOD = {"scalerAddress": "podgpu:9411", "owner": "Deployment/inference", "target": "60"}


def trigger(**changes: str) -> Trigger:
    return parse_trigger("serving", {**GOOD, **changes}, 600.0)


def refusal(metadata: dict[str, str], namespace: str = "serving") -> str:
    with pytest.raises(Refusal) as raised:
        parse_trigger(namespace, metadata, 600.0)
    assert raised.value.kind in (RefusalKind.BAD_REQUEST, RefusalKind.NOT_FOUND)
    return str(raised.value)


def test_what_is_not_said_is_as_usual() -> None:
    found = trigger()
    assert (found.metric.name, found.target, found.aggregation) == ("gpu_utilization", 60.0, Aggregation())
    assert found.pods == PodSelector("serving", owner=("Deployment", "inference"))


def test_everything_said() -> None:
    found = trigger(
        metric="gpu_busy",
        target="12.5",
        window="5m",
        aggregate="p90",
        idleFor="600",
        missing="leave-out",
        enableTLS="true",
    )
    assert (found.metric.name, found.target) == ("gpu_busy", 12.5)
    assert (
        found.aggregation.window,
        found.aggregation.aggregate.quantile,
        found.aggregation.skip_missing,
        found.aggregation.idle_for,
    ) == (
        300,
        0.9,
        True,
        600,
    )


def test_pods_by_selector_or_scope() -> None:
    rest = {"target": "60"}
    assert parse_trigger("a", {**rest, "selector": "app=x"}, 600.0).pods == PodSelector(
        "a", labels=parse_selector("app=x")
    )
    assert parse_trigger("a", {**rest, "scope": "namespace"}, 600.0).pods == PodSelector("a")
    assert parse_trigger("a", {**rest, "scope": "cluster"}, 600.0).pods == PodSelector("")


def test_a_kind_is_written_as_kubernetes_does() -> None:
    assert trigger(owner="statefulset/x").pods.owner == ("StatefulSet", "x")
    assert trigger(owner="Rollout/x").pods.owner == ("Rollout", "x")


def test_keda_puts_a_variables_value_under_the_key_that_names_it() -> None:
    metadata = {"owner": "Deployment/inference", "targetFromEnv": "45"}
    assert parse_trigger("serving", metadata, 600.0).target == 45


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("Target", "target"),
        ("targetValue", "target"),
        ("threshold", "target"),
        ("metricName", "metric"),
        ("windw", "window"),
        ("labelSelector", "selector"),
        ("idle_for", "idleFor"),
        ("agregate", "aggregate"),
        ("deployment", "owner"),
    ],
)
def test_a_misspelt_key_is_refused_and_the_right_one_named(key: str, meant: str) -> None:
    assert f"did you mean {meant}?" in refusal({**GOOD, key: "1"})


def test_a_key_like_none_of_them_is_refused_with_all_of_them() -> None:
    assert "metric, target, owner" in refusal({**GOOD, "zzz": "1"})


@pytest.mark.parametrize(
    "changes",
    [
        {"target": ""},
        {"target": "0"},
        {"target": "-5"},
        {"target": "sixty"},
        {"target": "nan"},
        {"target": "1e9"},
        {"metric": "gpu_utilisation"},
        {"metric": ""},
        {"window": "0s"},
        {"window": "soon"},
        {"window": "11m"},
        {"window": "٣m"},
        {"aggregate": "p101"},
        {"aggregate": "average"},
        {"owner": "inference"},
        {"owner": "Deployment/"},
        {"owner": "Deployment/a/b"},
        {"selector": "app=x"},
        {"owner": "", "selector": "app in"},
        {"owner": "", "scope": "world"},
        {"owner": ""},
        {"missing": "ignore"},
        {"targetFromEnv": "5"},
        {f"k{n}": "1" for n in range(70)},
    ],
)
def test_what_cannot_be_meant_is_refused(changes: dict[str, str]) -> None:
    assert len(refusal({**GOOD, **changes})) > 20


def test_no_namespace_is_refused() -> None:
    assert "namespace" in refusal(dict(GOOD), namespace="")


@pytest.mark.fault(
    "a trigger has a key, or names a metric, of tens of thousands of letters",
    "it is refused without being compared with what could be meant, which would keep all others waiting",
)
def test_a_key_of_any_length_is_refused_at_once() -> None:
    began = time.thread_time()
    for _ in range(50):
        refusal({**GOOD, "targets" * 9000: "1"})
        refusal({**GOOD, "metric": "gpu_utilization" * 4000})
    assert time.thread_time() - began < 1.0  # comparing them took some ten seconds
