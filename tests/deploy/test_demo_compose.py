"""deploy/demo/compose.yaml: Prometheus accepts its configuration, and the files it mounts exist."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.test_promtool import needs_promtool, promtool

FILE = Path(__file__).parents[2] / "deploy" / "demo" / "compose.yaml"


@needs_promtool
def test_prometheus_accepts_the_configuration_with_the_rules_of_the_chart(tmp_path: Path) -> None:
    compose = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    rules, _, inside = (
        compose["services"]["prometheus"]["volumes"][0].removesuffix(":ro").partition(":")
    )
    text = compose["configs"]["prometheus"]["content"].replace(
        inside, str((FILE.parent / rules).resolve())
    )
    (tmp_path / "prometheus.yml").write_text(text, encoding="utf-8")
    output = promtool("check", "config", tmp_path / "prometheus.yml")
    files = list((FILE.parent / rules).resolve().glob("*.yaml"))
    assert f"{len(files)} rule files found" in output


def test_grafana_finds_the_dashboards_and_the_data_source() -> None:
    compose = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    folder, _, inside = (
        compose["services"]["grafana"]["volumes"][0].removesuffix(":ro").partition(":")
    )
    assert len(list((FILE.parent / folder).glob("*.json"))) == 4
    provided = yaml.safe_load(compose["configs"]["dashboards"]["content"])
    assert provided["providers"][0]["options"]["path"] == inside
    source = yaml.safe_load(compose["configs"]["datasource"]["content"])["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
