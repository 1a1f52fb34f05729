"""The shipped rules: promtool accepts them and passes their unit tests."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from podgpu.fleet.read.prometheus import BROKEN
from podgpu.metrics.conditions import xid_specs
from podgpu.metrics.engines import engines
from podgpu.past.busy_steps import CERTAINLY_IDLE
from tests.test_promtool import needs_promtool, promtool

ROOT = Path(__file__).parents[2]
RULES = sorted((ROOT / "deploy" / "helm" / "podgpu" / "files" / "rules").glob("*.yaml"))
UNIT_TESTS = sorted((Path(__file__).parent / "rules").glob("*_test.yaml"))


@cache
def rules() -> list[dict[str, Any]]:
    return [
        rule
        for file in RULES
        for group in yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader)["groups"]
        for rule in group["rules"]
    ]


ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}


def test_the_rules_count_the_same_gpus_as_broken_as_the_page() -> None:
    [rule] = [rule for rule in rules() if rule.get("labels") == {"kind": "broken_seconds"}]
    assert f"{{{BROKEN}}}" in rule["expr"]


@needs_promtool
@pytest.mark.parametrize("file", RULES, ids=lambda file: file.name)
def test_prometheus_accepts_them(file: Path) -> None:
    promtool("check", "rules", "--lint-fatal", file)


@needs_promtool
@pytest.mark.parametrize("file", UNIT_TESTS, ids=lambda file: file.stem)
def test_unit_tests_pass(file: Path) -> None:
    promtool("test", "rules", file)


def test_the_runbook_has_no_alert_too_many() -> None:
    page = (ROOT / "docs" / "alerts.md").read_text(encoding="utf-8")
    assert re.findall(r"^#+ (Podgpu\w+)$", page, re.MULTILINE) == list(ALERTS)


def test_xid_alerts_and_device_health_agree() -> None:
    (numbers,) = {
        match for rule in ALERTS.values() for match in re.findall(r'xid=~"([\d|]+)"', rule["expr"])
    }
    assert [int(number) for number in numbers.split("|")] == [
        xid for xid, spec in xid_specs().items() if spec.needs_action
    ]


def test_savings_of_all_sizes_of_clusters_call_the_same_steps_idle() -> None:
    (step,) = [rule for rule in rules() if rule.get("record") == "podgpu:savings:step5m"]
    assert f" {CERTAINLY_IDLE} * sum" in step["expr"]


def test_the_tokens_of_each_engine_are_recorded() -> None:
    recorded = {}
    for rule in rules():
        if rule.get("record") == "podgpu:pod_llm_tokens:rate5m":
            labels = rule["labels"]
            recorded[labels["engine"], labels["kind"]] = rule["expr"]
    assert len(recorded) == 2 * len(engines())
    for engine in engines():
        prompt = recorded[engine.name, "prompt"]
        assert f"rate({engine.prompt.name}{{" in prompt
        assert f"rate({engine.generated.name}{{" in recorded[engine.name, "generation"]
        if engine.transferred is not None:
            assert f'{engine.transferred.label}="{engine.transferred.value}"' in prompt
