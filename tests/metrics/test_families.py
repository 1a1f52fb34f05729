"""HELP texts, read as one who meets the metric in Prometheus does: units, closed lists of words, what absent means."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from podgpu.cluster.costs import KINDS
from podgpu.metrics import cluster_families
from podgpu.metrics import families as f
from podgpu.metrics.autoscale_families import AUTOSCALE_FAMILIES
from podgpu.metrics.cluster_families import CLUSTER_FAMILIES
from podgpu.metrics.conditions import NODE_GONE, conditions
from podgpu.metrics.families import OWN_FAMILIES, FamilySpec
from podgpu.metrics.hook_families import HOOK_FAMILIES
from podgpu.model import UsageMethod

OURS = (*OWN_FAMILIES, *CLUSTER_FAMILIES, *AUTOSCALE_FAMILIES, *HOOK_FAMILIES)
UNITS = {
    "_timestamp_seconds": "Unix time in seconds",
    "_seconds": "seconds",
    "_bytes": "bytes",
    "_joules": "joules",
    "_ratio": "0 to 1",
}


def test_a_help_text_is_a_sentence() -> None:
    for family in OURS:
        assert re.fullmatch(r"[A-Z0-9].*\.", family.help), family
        assert "\n" not in family.help, family


def test_a_help_text_says_the_unit() -> None:
    """A counter's and a gauge's alike; podgpu_..._info and the like have none."""
    for family in OURS:
        name = family.name.removesuffix("_total").removesuffix("_min").removesuffix("_max")
        unit = next((words for suffix, words in UNITS.items() if name.endswith(suffix)), "")
        assert unit.lower() in family.help.lower(), family


def test_what_is_counted_is_said_to_be_a_number() -> None:
    for family in OURS:
        if family.type == "counter" and not re.search("_seconds|_joules|_cost", family.name):
            assert family.help.startswith("Number of"), family


@pytest.mark.parametrize(
    ("family", "words"),
    [
        (f.DEVICE_HEALTH, [name for name in conditions() if name != NODE_GONE]),
        (cluster_families.DEVICE_HEALTH, [NODE_GONE]),
        (f.THROTTLED, sorted(f.THROTTLE_REASONS.values())),
        (f.DEVICE_USAGE_METHOD, list(get_args(UsageMethod))),
        (f.DEVICE_COUNT, ["expected", "visible", "lost"]),
        (cluster_families.COST, list(KINDS)),
        (cluster_families.USED_UTILIZATION, ["cluster", "namespace", "node", "model", "owner"]),
    ],
    ids=lambda part: getattr(part, "name", ""),
)
def test_closed_lists_of_words_are_told(family: FamilySpec, words: list[str]) -> None:
    """In the order of the list, each of them."""
    assert re.search(r"\b.*?\b".join(map(re.escape, words)), family.help), family.help
