"""Builds panels, variables and dashboards as Grafana JSON. `either` adds the names of dcgm-exporter
4.9 to queries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.dashboards.either import choice_query, either
from podgpu.fleet.read.prometheus import BROKEN as BROKEN

Json = dict[str, Any]
DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
SCHEMA_VERSION = 39
_WIDTH = 24


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str = ""
    """Legend of a time series, or heading of a table column."""
    unit: str = ""
    """Unit of a table column."""
    decimals: int | None = None


@dataclass(frozen=True)
class Panel:
    kind: str
    title: str
    queries: tuple[Query, ...]
    about: str
    unit: str = "none"
    width: int = 12
    height: int = 8
    steps: tuple[tuple[float | None, str], ...] = ((None, "green"),)
    """Thresholds: minimum value and colour."""
    stacked: bool = False
    top: float | None = None
    """Maximum of the scale; None for automatic."""
    decimals: int | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    """Columns of a table: label -> heading."""
    link: tuple[str, str, str] | None = None
    """Link in a table: heading of the column, text, URL."""


def stat(title: str, expr: str, about: str, unit: str = "none", **more: Any) -> Panel:
    return Panel("stat", title, (Query(expr),), about, unit, **{"width": 4, "height": 4, **more})


def graph(
    title: str, queries: Iterable[tuple[str, str]], about: str, unit: str = "none", **more: Any
) -> Panel:
    return Panel(
        "timeseries", title, tuple(Query(*query) for query in queries), about, unit, **more
    )


def table(
    title: str, queries: Sequence[Query], columns: Mapping[str, str], about: str, **more: Any
) -> Panel:
    return Panel(
        "table", title, tuple(queries), about, columns=columns, **{"width": 24, "height": 9, **more}
    )


LINES = 20
"""Maximum number of lines in a graph. More lines are hard to distinguish and slow down the browser.
"""


def largest(expr: str, count: int = LINES) -> str:
    """Returns a query for the series with the highest values. Large clusters have thousands of
    series.
    """
    return f"topk({count}, {expr})"


def largest_and_rest(expr: str, legend: str) -> list[tuple[str, str]]:
    """Like `largest`, but adds the sum of all other series, so that the total of a stacked graph is
    correct.
    """
    return [
        (largest(expr), legend),
        (f"clamp_min(sum({expr}) - sum({largest(expr)}), 0)", "all others"),
    ]


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]
    collapsed: bool = False


# --- variables


def datasource() -> Json:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "hide": 0,
    }


def choice(name: str, label: str, series: str, of: str, *, many: bool = True) -> Json:
    """Returns a dashboard variable with the values of a label. `many` allows selecting several or
    all values.
    """
    query, pattern = choice_query(series, of)
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": "StandardVariableQuery"},
        "regex": pattern,
        "refresh": 2,
        "sort": 3,
        "hide": 0,
        "multi": many,
        "includeAll": many,
        **({"allValue": ".*", "current": {"text": ["All"], "value": ["$__all"]}} if many else {}),
    }


def number(name: str, label: str, value: str) -> Json:
    current = {"text": value, "value": value, "selected": True}
    return {
        "name": name,
        "label": label,
        "type": "textbox",
        "query": value,
        "current": current,
        "options": [current],
        "hide": 0,
    }


# --- dashboards


def dashboard(
    uid: str, title: str, about: str, variables: Sequence[Json], rows: Sequence[Row]
) -> Json:
    return {
        "id": None,
        "uid": uid,
        "title": title,
        "description": about,
        "tags": ["podgpu", "gpu"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "links": [_siblings()],
        "annotations": {"list": [_alerts()]},
        "templating": {"list": [datasource(), *variables]},
        "panels": list(_laid_out(rows)),
    }


def _siblings() -> Json:
    """Returns links to all dashboards with podgpu's tag. They keep the time range and the
    variables.
    """
    return {
        "type": "dashboards",
        "title": "podgpu",
        "tags": ["podgpu"],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
    }


def _alerts() -> Json:
    return {
        "name": "Alerts",
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": either(
            "max by (alertname, Hostname, gpu, namespace, pod) "
            '(ALERTS{alertname=~"Podgpu.*",alertstate="firing"})'
        ),
        "step": "60s",
        "titleFormat": "{{alertname}}",
        "textFormat": "{{Hostname}} GPU {{gpu}} {{namespace}} {{pod}}",
    }


def _laid_out(rows: Sequence[Row]) -> Iterable[Json]:
    """Places panels from left to right and wraps lines. The panels of a collapsed row are nested in
    the row.
    """
    y, ids = 0, iter(range(1, 1000))
    for row in rows:
        head = {
            "id": next(ids),
            "type": "row",
            "title": row.title,
            "collapsed": row.collapsed,
            "gridPos": {"x": 0, "y": y, "w": _WIDTH, "h": 1},
            "panels": [],
        }
        y += 1
        inside, y = _lines(row.panels, y, ids)
        if row.collapsed:
            head["panels"] = inside
            yield head
        else:
            yield head
            yield from inside


def _lines(panels: Sequence[Panel], y: int, ids: Any) -> tuple[list[Json], int]:
    placed = []
    x = 0
    tallest = 0
    for panel in panels:
        if x + panel.width > _WIDTH:
            x = 0
            y += tallest
            tallest = 0
        where = {"x": x, "y": y, "w": panel.width, "h": panel.height}
        placed.append(_panel(panel, {"id": next(ids), "gridPos": where}))
        x += panel.width
        tallest = max(tallest, panel.height)
    return placed, y + tallest


def _panel(panel: Panel, place: Json) -> Json:
    made = {
        **place,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "targets": [
            _target(panel, query, letter)
            for query, letter in zip(panel.queries, "ABCDEFGH", strict=False)
        ],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _OPTIONS[panel.kind],
    }
    if panel.kind == "table":
        made["fieldConfig"]["overrides"] = list(_columns(panel))
        made["transformations"] = _one_table(panel)
    return made


def _target(panel: Panel, query: Query, letter: str) -> Json:
    target: Json = {
        "refId": letter,
        "datasource": DATASOURCE,
        "expr": either(query.expr),
        "editorMode": "code",
    }
    if panel.kind == "timeseries":
        return target | {"range": True, "legendFormat": query.legend or "__auto"}
    return target | {
        "instant": True,
        "range": False,
        "format": "table" if panel.kind == "table" else "time_series",
    }


def _defaults(panel: Panel) -> Json:
    defaults: Json = {
        "unit": panel.unit,
        "color": {"mode": "palette-classic" if panel.kind == "timeseries" else "thresholds"},
        "thresholds": {
            "mode": "absolute",
            "steps": [{"value": value, "color": colour} for value, colour in panel.steps],
        },
        "noValue": "no data",
    }
    if panel.kind == "timeseries":
        defaults["min"] = 0
        defaults["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 30 if panel.stacked else 0,
            "showPoints": "never",
            "spanNulls": False,  # missing data is shown as a gap
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
    if panel.top is not None:
        defaults["max"] = panel.top
    if panel.decimals is not None:
        defaults["decimals"] = panel.decimals
    return defaults


_OPTIONS: Mapping[str, Json] = {
    "timeseries": {
        "legend": {
            "displayMode": "table",
            "placement": "bottom",
            "calcs": ["mean", "max"],
            "showLegend": True,
        },
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "textMode": "value",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    },
    "table": {"showHeader": True, "cellHeight": "sm", "footer": {"show": False}},
}


def _columns(panel: Panel) -> Iterable[Json]:
    for query in panel.queries:
        properties: list[Json] = [{"id": "unit", "value": query.unit or "none"}]
        if query.decimals is not None:
            properties.append({"id": "decimals", "value": query.decimals})
        yield {"matcher": {"id": "byName", "options": query.legend}, "properties": properties}
    if panel.link is not None:
        column, text, url = panel.link
        link = {"title": text, "url": url, "targetBlank": False}
        yield {
            "matcher": {"id": "byName", "options": column},
            "properties": [{"id": "links", "value": [link]}],
        }


def _one_table(panel: Panel) -> list[Json]:
    """Merges the queries into one table with a row per label set, and renames the columns."""
    values = {
        f"Value #{letter}": query.legend
        for query, letter in zip(panel.queries, "ABCDEFGH", strict=False)
    }
    if (
        len(panel.queries) == 1
    ):  # with a single query, some versions of Grafana name the column Value
        values["Value"] = panel.queries[0].legend
    names = {**panel.columns, **values}
    order = {name: place for place, name in enumerate(names)}
    return [
        {"id": "merge", "options": {}},
        {
            "id": "organize",
            "options": {
                "excludeByName": {"Time": True},
                "indexByName": order,
                "renameByName": names,
            },
        },
    ]
