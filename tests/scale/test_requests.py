"""KEDA's triggers and label selectors."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.scale.catalogue import BUSY, UTILIZATION
from podgpu.scale.pods import PodSeen
from podgpu.scale.requests import MetricRequest, PodSelector, Refusal, parse_selector, parse_trigger

GOOD = {"scalerAddress": "podgpu:9411", "owner": "Deployment/inference", "target": "60"}


def trigger(**changes: str) -> tuple[MetricRequest, float]:
    return parse_trigger("serving", {**GOOD, **changes}, 600.0)


def refusal(metadata: dict[str, str]) -> str:
    with pytest.raises(Refusal) as raised:
        parse_trigger("serving", metadata, 600.0)
    assert raised.value.status in (400, 404)
    return str(raised.value)


def test_a_trigger_with_defaults() -> None:
    pods = PodSelector("serving", owner=("Deployment", "inference"))
    assert trigger() == (MetricRequest(UTILIZATION, pods), 60.0)


def test_a_trigger_with_all_keys() -> None:
    keys = {"aggregate": "p90", "idleFor": "600", "missing": "leave-out", "enableTLS": "true"}
    found, target = trigger(metric="gpu_busy", target="12.5", window="5m", **keys)
    assert target == 12.5
    assert found == MetricRequest(BUSY, found.pods, 300, "p90", skip_missing=True, idle_for=600)


def test_pods_of_a_trigger() -> None:
    def pods(**keys: str) -> PodSelector:
        return parse_trigger("a", {"target": "60", **keys}, 600.0)[0].pods

    assert pods(selector="app=x") == PodSelector("a", labels=parse_selector("app=x"))
    assert pods(scope="namespace") == PodSelector("a")
    assert pods(scope="cluster") == PodSelector("")
    assert pods(owner="Rollout/x").owner == ("Rollout", "x")


def test_keda_resolves_variables() -> None:
    assert parse_trigger("a", {"owner": "Deployment/x", "targetFromEnv": "45"}, 600.0)[1] == 45


@pytest.mark.parametrize("key", ["Target", "windw", "labelselector", "idle_for"])
def test_a_misspelt_key_is_refused_and_the_right_ones_named(key: str) -> None:
    assert "idleFor" in refusal({**GOOD, key: "1"})


@pytest.mark.parametrize(
    "changes",
    [
        {"target": ""},
        {"target": "0"},
        {"target": "-5"},
        {"target": "nan"},
        {"target": "1e9"},
        {"metric": "gpu_utilisation"},
        {"metric": "gpu_utilization" * 4000},
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
        {"zzz": "1"},
    ],
)
def test_a_wrong_trigger_is_refused(changes: dict[str, str]) -> None:
    assert 20 < len(refusal({**GOOD, **changes})) < 400


LABELS = {"app": "inference", "tier": "gpu", "size": "12", "example.com/team": "a"}


MATCHING = """
app=inference
app==inference
app!=web
app = inference , tier=gpu
app in (web, inference)
none notin (web)
none!=x
tier
! none
example.com/team=a
app in (inference),tier in (gpu,cpu),!none"""
OTHERS = "app=web;app!=inference;app in (web);app notin (inference);none;!app;x="


def matches(text: str, labels: dict[str, str]) -> bool:
    pod = PodSeen("a", "p", "n", 0.0, None, True, tuple(labels.items()))
    return PodSelector("a", labels=parse_selector(text)).matches(pod)


@pytest.mark.parametrize("text", MATCHING.splitlines())
def test_selectors_that_match(text: str) -> None:
    assert matches(text, LABELS)


@pytest.mark.parametrize("text", OTHERS.split(";"))
def test_selectors_that_do_not_match(text: str) -> None:
    assert not matches(text, LABELS)


def test_a_selector_may_have_an_empty_value() -> None:
    assert matches("x=", {"x": ""})
    assert matches("x in (,y)", {"x": ""})


MALFORMED = "=a;app in inference;app in (a;app in ((a));a,,b;app=größe;!app=a;app>x;app\x00=a"


@pytest.mark.parametrize("text", MALFORMED.split(";"))
def test_a_malformed_selector_is_refused(text: str) -> None:
    with pytest.raises(Refusal) as raised:
        parse_selector(text)
    assert raised.value.status == 400
    assert str(raised.value).isprintable()


@given(st.text(alphabet=st.sampled_from("ab=!<>(), innot/\x00é"), max_size=60))
def test_any_text_is_a_selector_or_refused(text: str) -> None:
    with suppress(Refusal):
        matches(text, LABELS)
