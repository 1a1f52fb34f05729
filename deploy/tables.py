"""Writes lists that podgpu defines into the chart: `python -m deploy.tables`.

These are the names of the allocation sources (schema of the values, alert about a broken mapping) and the XIDs that
mean a broken GPU (XID alerts).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from deploy.render import CHART, ROOT
from podgpu.holders.sources import SOURCES, SourceType
from podgpu.metrics.conditions import xid_needs_action, xid_specs

SCHEMA = CHART / "values.schema.json"
ALERTS = CHART / "files" / "rules" / "podgpu-alerts.yaml"
_ALLOCATION = re.compile(r'(?<="allocation": \{\n {14}"type": "string",\n {14}"pattern": ")[^"]+')
_SOURCES = re.compile(r'(?<=podgpu_exporter_source_up\{source=~")[^"]+(?=\|api-server"\})')
_XIDS = re.compile(r'(?<=podgpu_xid_last_seen_timestamp_seconds\{xid=~")[\d|]+(?="\})')


def pattern(sources: Mapping[str, SourceType] = SOURCES) -> str:
    """Values that `--allocation` accepts, as a regular expression. Empty: the chart chooses."""
    any_of = "|".join(_spelling(name, source) for name, source in sources.items())
    return f"^(auto|({any_of})(,({any_of}))*)?$"


def _spelling(name: str, source: SourceType) -> str:
    if not source.argument:
        return name
    return f"{name}(:[^,]+)?" if source.argument.startswith("[") else f"{name}:[^,]+"


def fresh() -> Iterator[tuple[Path, str]]:
    """Each file with its up-to-date content."""
    xids = "|".join(str(xid) for xid in xid_specs() if xid_needs_action(xid))
    yield SCHEMA, _replace(SCHEMA.read_text(encoding="utf-8"), _ALLOCATION, pattern(), 1)
    alerts = _replace(ALERTS.read_text(encoding="utf-8"), _SOURCES, "|".join(SOURCES), 1)
    yield ALERTS, _replace(alerts, _XIDS, xids, 2)


def _replace(text: str, place: re.Pattern[str], new: str, times: int) -> str:
    replaced, found = place.subn(lambda _: new, text)
    assert found == times, f"{place.pattern} was found {found} times instead of {times}"
    return replaced


def main() -> None:
    for path, text in fresh():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: rewritten")


if __name__ == "__main__":
    main()
