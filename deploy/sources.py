"""Writes the names of the allocation sources into the chart: `python -m deploy.sources`. What its value `allocation`
may say, and whose failure is the alert of a broken mapping, follow from the table that podgpu itself goes by."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from deploy.render import CHART, ROOT
from podgpu.holders.sources import SOURCES, SourceType

SCHEMA = CHART / "values.schema.json"
ALERTS = CHART / "files" / "rules" / "podgpu-alerts.yaml"
_PATTERN = re.compile(r'(?<="allocation": \{\n {14}"type": "string",\n {14}"pattern": ")[^"]+')
_WATCHED = re.compile(r'(?<=podgpu_exporter_source_up\{source=~")[^"]+(?=\|api-server"\})')


def pattern(sources: Mapping[str, SourceType] = SOURCES) -> str:
    """What `--allocation` takes, as far as a pattern can tell; nothing: the chart chooses."""
    any_of = "|".join(_spelling(name, source) for name, source in sources.items())
    return f"^(auto|({any_of})(,({any_of}))*)?$"


def _spelling(name: str, source: SourceType) -> str:
    if not source.argument:
        return name
    return f"{name}(:[^,]+)?" if source.argument.startswith("[") else f"{name}:[^,]+"


def fresh() -> Iterator[tuple[Path, str]]:
    """Each file with what it should be."""
    for path, place, text in ((SCHEMA, _PATTERN, pattern()), (ALERTS, _WATCHED, "|".join(SOURCES))):
        parts = place.split(path.read_text(encoding="utf-8"))
        assert len(parts) == 2, f"{path}: the place of the sources' names is not there once"
        yield path, text.join(parts)


def main() -> None:
    for path, text in fresh():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: rewritten")


if __name__ == "__main__":
    main()
