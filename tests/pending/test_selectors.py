"""Node selectors, affinity, taints and tolerations, as the Kubernetes API defines them."""

from __future__ import annotations

from typing import Any

import pytest

from podgpu.pending.selectors import (
    Requirement,
    Taint,
    list_unmet,
    list_untolerated,
    parse_node_selector,
    parse_pod_selectors,
    parse_taints,
    parse_tolerations,
)

LABELS = {"model": "H100", "gpus": "8", "field:metadata.name": "node-1"}


@pytest.mark.parametrize(
    ("operator", "values", "accepts_h100", "accepts_absent"),
    [
        ("In", ("H100", "H200"), True, False),
        ("In", ("H200",), False, False),
        ("In", (), False, False),
        ("NotIn", ("H100",), False, True),
        ("NotIn", ("H200",), True, True),
        ("Exists", (), True, False),
        ("DoesNotExist", (), False, True),
        ("Gt", ("1",), False, False),  # no number
        ("Unknown", ("H100",), False, False),
    ],
)
def test_operators(
    operator: str, values: tuple[str, ...], accepts_h100: bool, accepts_absent: bool
) -> None:
    assert Requirement("model", operator, values).accepts(LABELS) == accepts_h100
    assert Requirement("absent", operator, values).accepts(LABELS) == accepts_absent


@pytest.mark.parametrize(
    ("operator", "value", "expected"),
    [
        ("Gt", "7", True),
        ("Gt", "8", False),
        ("Lt", "9", True),
        ("Lt", "8", False),
        ("Gt", "many", False),
        ("Lt", None, False),
    ],
)
def test_numbers_are_compared(operator: str, value: str | None, expected: bool) -> None:
    values = () if value is None else (value,)
    assert Requirement("gpus", operator, values).accepts(LABELS) == expected


@pytest.mark.parametrize(
    ("requirement", "text"),
    [
        (Requirement("model", "In", ("H100",)), "model=H100"),
        (Requirement("model", "In", ("H100", "H200")), "model In (H100,H200)"),
        (Requirement("model", "NotIn", ("H100",)), "model NotIn (H100)"),
        (Requirement("model", "Exists"), "model Exists"),
        (Requirement("field:metadata.name", "In", ("node-1",)), "metadata.name=node-1"),
    ],
)
def test_text(requirement: Requirement, text: str) -> None:
    assert requirement.text == text


def expression(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"key": key, "operator": operator, "values": list(values)}


def test_one_term_must_be_met_completely() -> None:
    terms = [
        {"matchExpressions": [expression("model", "In", "H200")]},
        {
            "matchExpressions": [expression("model", "In", "H100")],
            "matchFields": [expression("metadata.name", "In", "node-1")],
        },
    ]
    selector = parse_node_selector({"nodeSelectorTerms": terms})
    assert selector.accepts(LABELS)
    assert not selector.accepts(LABELS | {"field:metadata.name": "node-2"})
    assert selector.accepts({"model": "H200"})
    assert not selector.accepts({})


def test_no_selector_accepts_all_and_an_empty_one_accepts_nothing() -> None:
    assert parse_node_selector(None).accepts({})
    assert not parse_node_selector({"nodeSelectorTerms": []}).accepts({})
    assert not parse_node_selector({"nodeSelectorTerms": [{}]}).accepts({})
    assert parse_pod_selectors({}) == ()


def test_a_node_must_meet_the_labels_and_the_affinity() -> None:
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression("gpus", "Gt", "4")]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    spec = {"nodeSelector": {"model": "H100"}, "affinity": {"nodeAffinity": required}}
    by_label, by_affinity = parse_pod_selectors(spec)
    assert by_label.accepts(LABELS)
    assert not by_label.accepts({"model": "H200"})
    assert by_affinity.accepts(LABELS)
    assert not by_affinity.accepts({"gpus": "4"})


def test_only_what_no_node_meets_is_named() -> None:
    selectors = parse_pod_selectors({"nodeSelector": {"model": "H100", "zone": "a"}})
    model, zone = selectors[0].terms[0]
    assert list_unmet(selectors, [{"model": "H100"}, {"model": "H200"}]) == [zone]
    # Each is met by a node, but no node meets both.
    assert list_unmet(selectors, [{"model": "H100"}, {"zone": "a"}]) == [model, zone]


# Taints

NO_SCHEDULE = Taint("gpu", "", "NoSchedule")
RESERVED = Taint("team", "vision", "NoExecute")


def test_taints_that_only_advise_are_left_out() -> None:
    entries = [
        {"key": "gpu", "effect": "NoSchedule"},
        {"key": "team", "value": "vision", "effect": "NoExecute"},
        {"key": "old", "effect": "PreferNoSchedule"},
    ]
    assert parse_taints(entries) == (NO_SCHEDULE, RESERVED)
    assert [taint.text for taint in parse_taints(entries)] == [
        "gpu:NoSchedule",
        "team=vision:NoExecute",
    ]


@pytest.mark.parametrize(
    ("toleration", "untolerated"),
    [
        ({}, [NO_SCHEDULE, RESERVED]),
        ({"operator": "Exists"}, []),
        ({"key": "gpu", "operator": "Exists"}, [RESERVED]),
        ({"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}, [RESERVED]),
        ({"key": "gpu", "operator": "Exists", "effect": "NoExecute"}, [NO_SCHEDULE, RESERVED]),
        ({"operator": "Exists", "effect": "NoExecute"}, [NO_SCHEDULE]),
        ({"key": "gpu"}, [RESERVED]),
        ({"key": "team", "value": "vision"}, [NO_SCHEDULE]),
        ({"key": "team", "value": "vision", "effect": "NoExecute"}, [NO_SCHEDULE]),
        ({"key": "team", "value": "speech"}, [NO_SCHEDULE, RESERVED]),
        ({"key": "team"}, [NO_SCHEDULE, RESERVED]),
    ],
)
def test_tolerations(toleration: dict[str, str], untolerated: list[Taint]) -> None:
    tolerations = parse_tolerations([toleration])
    assert list_untolerated([NO_SCHEDULE, RESERVED], tolerations) == untolerated


@pytest.mark.parametrize(
    ("operator", "value", "is_tolerated"),
    [
        ("Gt", "4", True),
        ("Gt", "5", False),
        ("Lt", "6", True),
        ("Lt", "5", False),
        ("Gt", "x", False),
    ],
)
def test_tolerations_of_numbers(operator: str, value: str, is_tolerated: bool) -> None:
    """The value of the taint is compared with that of the toleration."""
    taint = Taint("sla", "5", "NoSchedule")
    tolerations = parse_tolerations([{"key": "sla", "operator": operator, "value": value}])
    assert (list_untolerated([taint], tolerations) == []) == is_tolerated
    [other] = list_untolerated([taint._replace(key="other")], tolerations)
    assert other.key == "other"
