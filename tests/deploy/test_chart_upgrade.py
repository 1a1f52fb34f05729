"""Values of chart 0.1.0 work, or are rejected with the value to use now."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from deploy.render import CHART
from tests.deploy.chart import FOLDER, objects, refusal, values_file

OLD = yaml.load((FOLDER / "values_0_1_0.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
TAKEN = {name: values for name, values in OLD["examples"].items() if name != "install-kubernetes"}


def _leaves(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        leaves |= (
            _leaves(value, f"{path}{key}.")
            if isinstance(value, dict) and value
            else {path + key: value}
        )
    return leaves


def _named(message: str) -> dict[str, str]:
    return dict(re.findall(r"^  (\S+) -> (.+)$", message, re.MULTILINE))


def _without(values: dict[str, Any], paths: set[str]) -> dict[str, Any]:
    left = copy.deepcopy(values)
    for path in paths:
        *parents, last = path.split(".")
        inner = left
        for parent in parents:
            inner = inner[parent]
        inner.pop(last, None)
    return left


def test_the_message_names_every_value_that_moved() -> None:
    named = _named(refusal(OLD["defaults"]))
    current, old = _leaves(values_file()), _leaves(OLD["defaults"])
    moved = [
        path
        for path, value in old.items()
        if path not in current and value not in ("", [], {}, False)
    ]
    assert len(moved) > 60
    assert not [
        path
        for path in moved
        if not any(path == name or path.startswith(f"{name}.") for name in named)
    ]


def test_values_that_did_not_move_are_accepted() -> None:
    left = _without(OLD["defaults"], set(_named(refusal(OLD["defaults"]))))
    assert {one["kind"] for one in objects(left)} >= {"DaemonSet", "Service"}


def test_new_places_exist() -> None:
    """Each line of the table starts with `remove it` or with a value of this chart."""
    text = (CHART / "templates" / "_moved.tpl").read_text(encoding="utf-8")
    places = re.findall(r'^[\w.]+: "?(?!remove it)([\w.]+)', text, re.MULTILINE)
    current = {path for leaf in _leaves(values_file()) for path in _prefixes(leaf)}
    assert len(places) > 10
    assert set(places) <= current


def _prefixes(path: str) -> Iterator[str]:
    names = path.split(".")
    yield from (".".join(names[:n]) for n in range(1, len(names) + 1))


@pytest.mark.parametrize("name", TAKEN)
def test_examples_of_0_1_still_work(name: str) -> None:
    assert objects(TAKEN[name])


def test_an_example_with_moved_values_is_refused_with_the_new_place() -> None:
    assert _named(refusal(OLD["examples"]["install-kubernetes"])) == {
        "cluster.monitor": "monitor",
        "exporter.monitor": "monitor",
    }


def test_a_config_map_of_counters_has_one_name_now() -> None:
    counters = {"configMap": {"namespace": "monitoring", "name": "counters"}}
    assert "exporter.counters.configMap -> a text, NAMESPACE:NAME" in refusal(
        {"exporter": {"counters": counters}}
    )
