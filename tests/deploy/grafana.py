"""Reads a dashboard's JSON as Grafana does: its panels, its variables, and each query as it is sent to Prometheus."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "deploy" / "helm" / "podgpu" / "files" / "dashboards"
DASHBOARDS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}
TIMES = {"__range": "30s", "__rate_interval": "4s", "__interval": "1s"}
"""As for half a minute on a screen, at four scrapes a second."""


@dataclass(frozen=True)
class Asked:
    dashboard: str
    row: str
    panel: str
    expr: str

    def __str__(self) -> str:
        return f"{self.dashboard}: {self.row}: {self.panel}: {self.expr}"


def panels(dashboard: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The title of its row, and the panel; those of closed rows too."""
    row = ""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
            yield from ((row, inside) for inside in panel["panels"])
        else:
            yield row, panel


def queries() -> list[Asked]:
    found = [
        Asked(name, row, panel["title"], target["expr"])
        for name, dashboard in DASHBOARDS.items()
        for row, panel in panels(dashboard)
        for target in panel["targets"]
    ]
    for name, dashboard in DASHBOARDS.items():
        found += [Asked(name, "annotations", one["name"], one["expr"]) for one in dashboard["annotations"]["list"]]
    return found


def variables(dashboard: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in dashboard["templating"]["list"]}


def everything_chosen(dashboard: Mapping[str, Any], single: Mapping[str, str]) -> dict[str, str]:
    """What the variables stand for with "All" everywhere; `single` for those that take one value."""
    chosen = {}
    for name, variable in variables(dashboard).items():
        if variable["type"] == "query":
            chosen[name] = variable["allValue"] if variable["includeAll"] else single[name]
        elif variable["type"] == "textbox":
            chosen[name] = variable["query"]
    return chosen


def as_sent(expr: str, chosen: Mapping[str, str]) -> str:
    """With every variable replaced. One that is not known is an error here; Grafana would send its name."""
    values = {**TIMES, **chosen, "1": "$1"}  # the last is label_replace's, and no variable
    return re.sub(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))", lambda m: values[m[1] or m[2]], expr)


def several(values: Sequence[str]) -> str:
    """Values picked from a list, as they are put between the quotes of a pattern."""
    return "({})".format("|".join(re.escape(value).replace("\\", "\\\\") for value in values))


def label_values(variable: Mapping[str, Any]) -> tuple[str, str]:
    """A query that has an element for each value of a variable, and the label that the value is in."""
    definition = variable["definition"]
    if match := re.fullmatch(r"label_values\((.+), (\w+)\)", definition):
        return f"group by ({match[2]}) ({match[1]})", match[2]
    query = re.fullmatch(r"query_result\((.+)\)", definition)
    label = re.fullmatch(r'/(\w+)="\(\[\^"\]\+\)"/', variable["regex"])
    assert query is not None, definition
    assert label is not None, variable["regex"]
    return query[1], label[1]
