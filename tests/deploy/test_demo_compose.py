"""deploy/demo/compose.yaml: Prometheus accepts its configuration, and the files it mounts exist."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

FILE = Path(__file__).parents[2] / "deploy" / "demo" / "compose.yaml"


def test_prometheus_accepts_the_configuration_with_the_rules_of_the_chart(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool here (Debian's prometheus)")
    compose = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    rules, _, inside = compose["services"]["prometheus"]["volumes"][0].removesuffix(":ro").partition(":")
    text = compose["configs"]["prometheus"]["content"].replace(inside, str((FILE.parent / rules).resolve()))
    (tmp_path / "prometheus.yml").write_text(text, encoding="utf-8")
    done = subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files = list((FILE.parent / rules).resolve().glob("*.yaml"))
    assert f"{len(files)} rule files found" in done.stdout


def test_grafana_finds_the_dashboards_and_the_data_source() -> None:
    compose = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    folder, _, inside = compose["services"]["grafana"]["volumes"][0].removesuffix(":ro").partition(":")
    assert len(list((FILE.parent / folder).glob("*.json"))) == 4
    provided = yaml.safe_load(compose["configs"]["dashboards"]["content"])
    assert provided["providers"][0]["options"]["path"] == inside
    source = yaml.safe_load(compose["configs"]["datasource"]["content"])["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
