"""Tests `podgpu migrate` on dashboards and rules: it changes only what is necessary, and reports
errors.
"""

from __future__ import annotations

import io
import json
import os
import stat
import sys
from functools import reduce
from pathlib import Path

import pytest

from podgpu.cli.main import run
from podgpu.tools.migrate.documents import migrate_dashboard, migrate_rules

RULES = """\
# Kept: this comment, the order, the quotes.
groups:
- name: gpus   # and this one
  rules:
  - alert: Busy
    expr: DCGM_FI_DEV_GPU_UTIL{Hostname!=""} > 90
    for: 5m
    labels: {severity: exposition, node: "{{ $labels.Hostname }}"}
    annotations:
      summary: 'GPU {{ $labels.gpu }} on {{$labels.Hostname}} is busy'
  - record: gpu:energy:watts
    expr: |
      # Watts, from millijoules
      sum by (Hostname, gpu) (
        rate(DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION[5m])
      ) / 1000
  - record: node:energy:watts
    expr: >-
      sum by (Hostname)
      (gpu:energy:watts)
  - alert: Quoted
    expr: "DCGM_FI_DEV_FB_USED{pod=\\"a\\"} > 1000"
  - alert: Single
    expr: 'DCGM_FI_DEV_FB_USED{pod=''a''} > 1000'
  - alert: Long
    expr: DCGM_FI_DEV_GPU_UTIL
      > 95 and
      DCGM_FI_DEV_GPU_TEMP > 80
"""
CHANGES = {
    (
        'DCGM_FI_DEV_GPU_UTIL{Hostname!=""} > 90'
    ): 'round(DCGM_FI_DEV_GPU_UTIL_RATIO{hostname!=""} * 100, 0.0001) > 90',
    "$labels.Hostname": "$labels.hostname",
    "by (Hostname, gpu)": "by (hostname, gpu)",
    "rate(DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION[5m])": (
        "(rate(DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL[5m]) * 1000)"
    ),
    "sum by (Hostname)\n      (gpu:energy:watts)": "sum by (hostname) (gpu:energy:watts)",
    'DCGM_FI_DEV_FB_USED{pod=\\"a\\"}': '(DCGM_FI_DEV_FB_USED_BYTES{pod=\\"a\\"} / 1048576)',
    "DCGM_FI_DEV_FB_USED{pod=''a''}": "(DCGM_FI_DEV_FB_USED_BYTES{pod=''a''} / 1048576)",
    "DCGM_FI_DEV_GPU_UTIL\n      > 95 and\n      DCGM_FI_DEV_GPU_TEMP > 80": (
        "round(DCGM_FI_DEV_GPU_UTIL_RATIO * 100, 0.0001) > 95 and DCGM_FI_DEV_GPU_TEMP_CELSIUS > 80"
    ),
}
MIGRATED_RULES = reduce(lambda text, change: text.replace(*change), CHANGES.items(), RULES)
DASHBOARD = {
    "title": "GPUs é",
    "templating": {
        "list": [
            {
                "name": "node",
                "query": {"query": "label_values(DCGM_FI_DEV_GPU_TEMP, Hostname)", "refId": "A"},
            },
            {
                "name": "gpu",
                "query": "label_values(DCGM_FI_DEV_GPU_UTIL, gpu)",
                "definition": "label_values(gpu)",
            },
        ]
    },
    "panels": [
        {
            "title": "Hostname",
            "targets": [
                {
                    "expr": 'DCGM_FI_DEV_GPU_UTIL{Hostname="$node"}',
                    "legendFormat": "{{ Hostname }} {{gpu}}",
                }
            ],
            "transformations": [{"options": {"renameByName": {"Hostname": "Node"}}}],
            "links": [{"url": "/d/x?node=${__field.labels.Hostname}"}],
        }
    ],
}


def test_several_documents_anchors_and_what_is_no_rule() -> None:
    text = (
        "kind: PrometheusRule\nspec:\n  groups:\n  - rules:\n    - alert: A\n      expr: &e "
        "DCGM_FI_DEV_GPU_TEMP > 80\n"
        "    - alert: B\n      expr: *e\n---\nseriesQuery: DCGM_FI_DEV_GPU_UTIL\n"
    )
    migrated = migrate_rules(text, "r.yaml")
    assert "expr: &e DCGM_FI_DEV_GPU_TEMP_CELSIUS > 80" in migrated.text
    assert "seriesQuery: DCGM_FI_DEV_GPU_UTIL\n" in migrated.text
    assert [message.split(": ")[1] for message in migrated.unconverted] == ["DCGM_FI_DEV_GPU_UTIL"]


@pytest.mark.parametrize("indent", [None, 1, 4])
def test_a_dashboard_keeps_its_layout(indent: int | None) -> None:
    text = json.dumps(DASHBOARD, indent=indent, ensure_ascii=False) + "\n"
    there = migrate_dashboard(text, "d.json")
    assert there.unconverted == ()
    document = json.loads(there.text)
    assert there.text == json.dumps(document, indent=indent, ensure_ascii=False) + "\n"
    (panel,) = document["panels"]
    assert panel["targets"] == [
        {
            "expr": '(DCGM_FI_DEV_GPU_UTIL_RATIO{hostname="$node"} * 100)',
            "legendFormat": "{{ hostname }} {{gpu}}",
        }
    ]
    assert panel["title"] == "Hostname"
    assert panel["transformations"][0]["options"]["renameByName"] == {"hostname": "Node"}
    assert panel["links"][0]["url"] == "/d/x?node=${__field.labels.hostname}"
    node, gpu = document["templating"]["list"]
    assert node["query"]["query"] == "label_values(DCGM_FI_DEV_GPU_TEMP_CELSIUS, hostname)"
    assert gpu["query"] == "label_values(DCGM_FI_DEV_GPU_UTIL_RATIO, gpu)"


def test_a_variable_that_reads_printed_series() -> None:
    variable = {"query": "query_result(DCGM_FI_DEV_GPU_TEMP)", "regex": '/Hostname="([^"]+)"/'}
    migrated = migrate_dashboard(json.dumps({"templating": {"list": [variable]}}), "d.json")
    (found,) = json.loads(migrated.text)["templating"]["list"]
    assert found == {
        "query": "query_result(DCGM_FI_DEV_GPU_TEMP_CELSIUS)",
        "regex": '/hostname="([^"]+)"/',
    }


def test_columns_and_legends_of_others_are_theirs() -> None:
    ours = {
        "targets": [{"expr": "podgpu_device_count", "legendFormat": "{{Hostname}}"}],
        "sort": {"by": "Hostname"},
    }
    others = {
        "targets": [{"expr": "node_uname_info", "legendFormat": "{{Hostname}}"}],
        "sort": {"by": "Hostname"},
    }
    document = {"panels": [ours, others, {"panels": [ours], "type": "row"}]}
    first, second, row = json.loads(migrate_dashboard(json.dumps(document), "d.json").text)[
        "panels"
    ]
    assert (
        first["targets"][0]["legendFormat"]
        == row["panels"][0]["targets"][0]["legendFormat"]
        == "{{hostname}}"
    )
    assert first["sort"] == {"by": "hostname"}
    assert second == others


def test_a_variable_of_the_dashboards_called_as_a_label_keeps_its_name() -> None:
    of_variables = {
        "repeat": "Hostname",
        "scopedVars": {"Hostname": {"text": "Hostname", "value": "Hostname"}},
    }
    panel = {
        "targets": [{"expr": 'DCGM_FI_DEV_GPU_TEMP{Hostname="$Hostname"}'}],
        "sort": "Hostname",
        **of_variables,
    }
    migrated = migrate_dashboard(json.dumps({"panels": [panel]}), "d.json")
    (found,) = json.loads(migrated.text)["panels"]
    assert {key: found[key] for key in of_variables} == of_variables
    assert found["targets"] == [{"expr": 'DCGM_FI_DEV_GPU_TEMP_CELSIUS{hostname="$Hostname"}'}]
    assert found["sort"] == "hostname"


def test_a_byte_order_mark_stays() -> None:
    migrated = migrate_dashboard("\ufeff" + json.dumps(DASHBOARD), "d.json")
    assert migrated.text == "\ufeff" + migrate_dashboard(json.dumps(DASHBOARD), "d.json").text


def test_what_is_named_elsewhere_in_a_dashboard_is_said() -> None:
    document = {
        "panels": [
            {
                "description": "shows DCGM_FI_DEV_GPU_UTIL",
                "targets": [{"expr": "DCGM_FI_DEV_GPU_UTIL ] x"}],
            },
            {
                "fieldConfig": {
                    "overrides": [{"matcher": {"id": "byName", "options": "DCGM_FI_DEV_GPU_UTIL"}}]
                }
            },
        ],
        "templating": {
            "list": [{"type": "custom", "query": "DCGM_FI_DEV_GPU_UTIL,DCGM_FI_DEV_FB_USED"}]
        },
    }
    migrated = migrate_dashboard(json.dumps(document), "d.json")
    assert len(migrated.unconverted) == 3
    assert any("as PromQL" in message for message in migrated.unconverted)
    assert any("panels[1].fieldConfig" in message for message in migrated.unconverted)


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.yaml"
    path.write_text(RULES, encoding="utf-8")
    return path


def test_a_file_is_printed_and_stays(rules: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["migrate", str(rules)]) == 0
    out, err = capsys.readouterr()
    assert out == MIGRATED_RULES
    assert f"{rules}: 8 converted, 0 not" in err
    assert rules.read_text(encoding="utf-8") == RULES


def test_in_place_keeps_the_mode_and_leaves_nothing_beside(rules: Path) -> None:
    rules.chmod(0o640)
    assert run(["migrate", "--in-place", str(rules)]) == 0
    assert rules.read_text(encoding="utf-8") == MIGRATED_RULES
    assert stat.S_IMODE(rules.stat().st_mode) == 0o640
    assert os.listdir(rules.parent) == ["rules.yaml"]


@pytest.mark.fault(
    "One of the files that podgpu migrate --in-place is given cannot be rewritten as a whole",
    "None of them is written, what could not be rewritten is listed, the exit code is 1",
)
def test_nothing_is_written_when_something_is_left(
    rules: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.yaml"
    text = (
        "groups:\n- rules:\n  - alert: A\n    expr: '{__name__=~\"DCGM_.*\"} > 1'\n"
        "  - {alert: B, expr: DCGM_FI_DEV_GPU_TEMP}\n"
    )
    other.write_text(text, encoding="utf-8")
    assert run(["migrate", "--in-place", str(rules), str(other)]) == 1
    out, err = capsys.readouterr()
    assert (out, rules.read_text(encoding="utf-8"), other.read_text(encoding="utf-8")) == (
        "",
        RULES,
        text,
    )
    assert "line 4, alert A.expr" in err
    assert "nothing was written" in err
    assert run(["migrate", "--in-place", "--force", str(rules), str(other)]) == 0
    assert "expr: DCGM_FI_DEV_GPU_TEMP_CELSIUS" in other.read_text(encoding="utf-8")


def test_an_expression_and_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["migrate", "--expr", "avg(DCGM_FI_DEV_GPU_UTIL) > 90"]) == 0
    assert capsys.readouterr().out == "avg(round(DCGM_FI_DEV_GPU_UTIL_RATIO * 100, 0.0001)) > 90\n"
    for text in (RULES, json.dumps(DASHBOARD)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert run(["migrate", "-"]) == 0
        assert "DCGM_FI_DEV_GPU_UTIL_RATIO" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"a": ', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"groups: [", "not YAML"),
        (b"a: b\n", "has no rules"),
        (b"groups: " + b"[" * 2000, "file: not YAML"),
        (b"x" * (8 * 1024 * 1024 + 1), "larger than the limit of"),
    ],
    ids=lambda value: value[:20] if isinstance(value, bytes) else "",
)
def test_what_is_no_such_file_is_said(
    tmp_path: Path, content: bytes, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert run(["migrate", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give either files"),
        (["--expr", "x", "file"], "give either files"),
        (["--in-place", "-"], "--in-place"),
        (["a", "b"], "--in-place"),
        (["/nowhere/rules.yaml"], "does not exist"),
        (["--expr", "sum("], "not PromQL"),
    ],
)
def test_wrong_calls_are_named(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["migrate", *arguments]) == 2
    assert words in capsys.readouterr().err
