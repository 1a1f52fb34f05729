"""values.schema.json, and values that are rejected with a message."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from deploy.render import CHART
from deploy.tables import fresh
from tests.deploy.chart import FOLDER, refusal, values_file

SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
DCGM_CHART = {
    name
    for name, one in SCHEMA["properties"].items()
    if "dcgm-exporter's chart" in one.get("description", "")
}
"""Values of dcgm-exporter's chart, tested in test_chart_dcgm_chart.py."""


MOVED = {"$ref": "#/definitions/moved"}
"""Values of chart 0.1, tested in test_chart_upgrade.py."""
REFUSED = yaml.load((FOLDER / "refused_values.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_wrong_values_are_refused(values: Mapping[str, Any], message: str) -> None:
    assert message in refusal(values)


def test_the_schema_describes_every_value_and_no_other() -> None:
    compare(values_file(), SCHEMA, "")


def compare(values: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> None:
    properties = dict(resolved(schema).get("properties", {}))
    if not path:
        properties = {
            name: one for name, one in properties.items() if name not in {"global", *DCGM_CHART}
        }
    properties = {name: one for name, one in properties.items() if one != MOVED}
    optional = {
        "rollingUpdate",
        "maxSurge",
        "currency",
        "models",
        "level",
        "role",
        "type",
        "user",
    } - values.keys()
    assert values.keys() == properties.keys() - optional or not properties, path
    for key, value in values.items():
        if isinstance(value, dict) and key in properties:
            compare(value, properties[key], f"{path}.{key}")


def resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref")
    return SCHEMA["definitions"][reference.rpartition("/")[2]] if reference else schema


def test_generated_files_are_fresh() -> None:
    for path, text in fresh():
        assert path.read_text(encoding="utf-8") == text, "run make manifests"


def test_the_schema_itself_is_one() -> None:
    Draft7Validator.check_schema(SCHEMA)
    validator = Draft7Validator(SCHEMA)
    assert not list(validator.iter_errors(values_file()))
