"""Makes the queries of panels work with the metric names of dcgm-exporter 4.8 and of 4.9.

Panels use 4.8's names and units, and the label `Hostname`. Each metric name becomes `old or new`,
and the new metric is converted to the old unit. Queries that use the node also rename the label
`hostname` to `Hostname`. If an exporter has both metrics, their other labels are equal. Then `or`
returns only the old one.
"""

from __future__ import annotations

import re

from podgpu.metrics.encode import families_in
from podgpu.metrics.fields import rename_of

_SERIES = re.compile(
    r"(?P<call>\b(?:rate|increase|last_over_time)\()?"
    r"\b(?P<name>DCGM_FI_[A-Z0-9_]+|podgpu_[a-z0-9_]+|ALERTS)\b"
    r"(?:\{(?P<matchers>[^{}]*)\})?(?P<range>\[[^\]]+\])?(?(call)\))"
)
_NODE = re.compile(r"\bHostname(?==~|=)")
_WITH_NODE = {
    family.name for family in families_in("exporter").values() if "Hostname" in family.labels
} | {"ALERTS"}


def either(expr: str) -> str:
    by_node = "Hostname" in expr
    return _SERIES.sub(lambda series: _either(series, by_node), expr)


def choice_query(series: str, label: str) -> tuple[str, str]:
    """Returns the query of a variable and the regular expression that extracts its values, or "" if
    none is needed.
    """
    asked = either(series if label != "Hostname" else f"{series} Hostname").removesuffix(
        " Hostname"
    )
    if asked == series:
        return f"label_values({series}, {label})", ""
    return f"query_result(count by ({label}) ({asked}))", f'/{label}="([^"]+)"/'


def _either(series: re.Match[str], by_node: bool) -> str:
    name = series["name"]
    rename = rename_of(name)
    has_node = by_node and (name in _WITH_NODE or name.startswith("DCGM_"))
    each = _variants(series, name, "", has_node)
    if rename is not None:
        each += _variants(series, rename.new_name, _in_old_unit(rename.factor), has_node)
    return series[0] if len(each) == 1 else f"({' or '.join(each)})"


def _variants(series: re.Match[str], name: str, unit: str, has_node: bool) -> list[str]:
    matchers = series["matchers"] or ""
    if not has_node:
        return [_written(series, name, matchers) + unit]
    upper = ",".join(filter(None, (matchers, 'hostname=""')))
    lower = ",".join(filter(None, (_NODE.sub("hostname", matchers), 'hostname!=""')))
    renamed = (
        f'label_replace({_written(series, name, lower)}, "Hostname", "$1", "hostname", "(.+)")'
    )
    return [_written(series, name, upper) + unit, renamed + unit]


def _written(series: re.Match[str], name: str, matchers: str) -> str:
    call = series["call"] or ""
    selected = f"{name}{{{matchers}}}" if matchers else name
    selected += series["range"] or ""
    return f"{call}{selected})" if call else selected


def _in_old_unit(factor: float) -> str:
    """Returns the PromQL operation that converts a value from the new unit to the old one."""
    if factor == 1.0:
        return ""
    return f" / {factor:.10g}" if factor > 1 else f" * {1 / factor:.10g}"
