"""Metric families: Prometheus' naming rules, and closed lists of label values in the help texts."""

from __future__ import annotations

import re

from podgpu.metrics import families as f
from podgpu.metrics.fields import fields

OURS = (*f.OWN_FAMILIES, *f.CLUSTER_FAMILIES, *f.AUTOSCALE_FAMILIES, *f.HOOK_FAMILIES)


def test_names_and_help_texts() -> None:
    for family in OURS:
        assert family.name.startswith("podgpu_"), family
        assert (family.type == "counter") == family.name.endswith("_total"), family
        assert re.fullmatch(r"[A-Z0-9].*\.", family.help), family


def test_throttle_reasons_are_nanosecond_fields() -> None:
    assert all(fields()[number].unit == "ns" for number in f.THROTTLE_REASONS)
