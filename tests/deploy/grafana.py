"""Reads a dashboard's JSON as Grafana does: panels, variables, and the queries that are sent to
Prometheus.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "deploy" / "helm" / "podgpu" / "files" / "dashboards"
DASHBOARDS = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted(FOLDER.glob("*.json"))
}
TIMES = {"__range": "30s", "__rate_interval": "4s", "__interval": "1s"}
"""Grafana's values for a range of 30 s and four scrapes a second."""


@dataclass(frozen=True)
class Asked:
    dashboard: str
    row: str
    panel: str
    expr: str

    def __str__(self) -> str:
        return f"{self.dashboard}: {self.row}: {self.panel}: {self.expr}"


def panels(dashboard: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each panel with the title of its row, including panels in collapsed rows."""
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
        found += [
            Asked(name, "annotations", one["name"], one["expr"])
            for one in dashboard["annotations"]["list"]
        ]
    return found


def variables(dashboard: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in dashboard["templating"]["list"]}


def everything_chosen(dashboard: Mapping[str, Any], single: Mapping[str, str]) -> dict[str, str]:
    """Returns the values of the variables if "All" is selected. `single` has the values of
    variables without "All".
    """
    chosen = {}
    for name, variable in variables(dashboard).items():
        if variable["type"] == "query":
            chosen[name] = variable["allValue"] if variable["includeAll"] else single[name]
        elif variable["type"] == "textbox":
            chosen[name] = variable["query"]
    return chosen


def as_sent(expr: str, chosen: Mapping[str, str]) -> str:
    """Replaces every variable in the query. Raises KeyError for an unknown one, which Grafana would
    not replace.
    """
    values = {**TIMES, **chosen, "1": "$1"}  # $1 belongs to label_replace and is not a variable
    return re.sub(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))", lambda m: values[m[1] or m[2]], expr)


def several(values: Sequence[str]) -> str:
    """Returns selected values as Grafana writes them into a regular expression."""
    return "({})".format("|".join(re.escape(value).replace("\\", "\\\\") for value in values))


def label_values(variable: Mapping[str, Any]) -> tuple[str, str]:
    """Returns a query with one series per value of a variable, and the label that contains the
    value.
    """
    definition = variable["definition"]
    if match := re.fullmatch(r"label_values\((.+), (\w+)\)", definition):
        return f"group by ({match[2]}) ({match[1]})", match[2]
    query = re.fullmatch(r"query_result\((.+)\)", definition)
    label = re.fullmatch(r'/(\w+)="\(\[\^"\]\+\)"/', variable["regex"])
    assert query is not None, definition
    assert label is not None, variable["regex"]
    return query[1], label[1]
