"""Metric families: Prometheus' naming rules, and closed lists of label values in the help texts."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from podgpu.metrics import families as f
from podgpu.metrics.conditions import NODE_GONE, conditions
from podgpu.metrics.fields import fields
from podgpu.model import UsageMethod

OURS = (*f.OWN_FAMILIES, *f.CLUSTER_FAMILIES, *f.AUTOSCALE_FAMILIES, *f.HOOK_FAMILIES)


def test_names_and_help_texts() -> None:
    for family in OURS:
        assert family.name.startswith("podgpu_"), family
        assert (family.type == "counter") == family.name.endswith("_total"), family
        assert re.fullmatch(r"[A-Z0-9].*\.", family.help), family


@pytest.mark.parametrize(
    ("family", "words"),
    [
        (f.DEVICE_HEALTH, [name for name in conditions() if name != NODE_GONE]),
        (f.CLUSTER_DEVICE_HEALTH, [NODE_GONE]),
        (f.THROTTLED, sorted(f.THROTTLE_REASONS.values())),
        (f.DEVICE_USAGE_METHOD, list(get_args(UsageMethod))),
    ],
    ids=lambda part: getattr(part, "name", ""),
)
def test_help_texts_list_the_values_of_labels(family: f.FamilySpec, words: list[str]) -> None:
    assert re.search(r"\b.*?\b".join(map(re.escape, words)), family.help), family.help


def test_throttle_reasons_are_nanosecond_fields() -> None:
    assert all(fields()[number].unit == "ns" for number in f.THROTTLE_REASONS)
