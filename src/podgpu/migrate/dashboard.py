"""Rewrites the queries, legends and columns of a Grafana dashboard. Keeps the layout of the file."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from podgpu.errors import UsageError
from podgpu.migrate.promql import PromqlError
from podgpu.migrate.rewrite import (
    FileChange,
    MigratedFile,
    RewriteResult,
    apply_changes,
    renamed_labels,
    report_old_names,
    rewrite_expression,
    rewrite_query,
)

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"|[{}\[\],]')
_PROSE = frozenset({"title", "description", "content", "text", "label", "name", "displayName", "uid", "tags"})
_VARIABLE_KEYS = frozenset({"repeat", "scopedVars"})
"""Keys whose values are names of dashboard variables, which may equal the name of a label."""
_LEGENDS = frozenset({"legendFormat", "titleFormat", "textFormat"})
_PRINTED_LABEL = re.compile(r"\b[A-Za-z_]\w*(?==)")
_TEMPLATE = re.compile(r"\{\{\s*(\w+)\s*\}\}|\$\{__(?:field\.labels|data\.fields)\.(\w+)\b")


@dataclass(frozen=True, slots=True)
class _JsonString:
    """A key or string value in the file, with its path and position."""

    path: tuple[str | int, ...]
    value: str
    start: int
    end: int
    is_key: bool = False

    @property
    def key(self) -> str:
        """The last key of the path."""
        return next((str(part) for part in reversed(self.path) if isinstance(part, str)), "")

    @property
    def shown(self) -> str:
        parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path)
        return "".join(parts).lstrip(".")


def migrate_dashboard(text: str, origin: str) -> MigratedFile:
    """Rewrites a dashboard. Raises UsageError if the text is not a JSON object."""
    try:
        document = json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        place = f", at {error.lineno}:{error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UsageError(f"{origin}: not JSON: {getattr(error, 'msg', 'nested too deep')}{place}") from None
    if not isinstance(document, dict):
        raise UsageError(f"{origin}: not a dashboard, which must be a JSON object")
    texts = _find_strings(text)
    rewritten = {string: result for string in texts if (result := _rewrite_value(string)) is not None}
    # Panels and variables that read both names keep their legends.
    reading_both = {_owner_of(string) for string, result in rewritten.items() if result.reads_both}
    # Legends, columns and patterns of these panels and variables refer to the exporter's labels.
    to_rewrite = {_owner_of(string) for string, result in rewritten.items() if result.is_exporter} - reading_both
    for string in texts:
        if _owner_of(string) in to_rewrite and string not in rewritten:
            rewritten[string] = _rewrite_label_text(string)
    return apply_changes(text, [_make_change(string, result, text) for string, result in rewritten.items()])


def _owner_of(string: _JsonString) -> tuple[str | int, ...]:
    """Returns the path of the panel or variable that contains the string."""
    for length in range(len(string.path), 0, -1):
        if isinstance(string.path[length - 1], int) and length > 1 and string.path[length - 2] in ("panels", "list"):
            return string.path[:length]
    return string.path


def _make_change(string: _JsonString, rewritten: RewriteResult, text: str) -> FileChange:
    new = text[string.start : string.end]
    if rewritten.text != string.value:
        new = json.dumps(rewritten.text, ensure_ascii=new.isascii() or "\\u" in new)
    return FileChange(string.start, string.end, new, string.shown, rewritten)


def _rewrite_value(string: _JsonString) -> RewriteResult | None:
    """Rewrites a query. Reports metric names in any other string."""
    if _is_query(string):
        return _rewrite_query(string)
    if string.key in _PROSE or string.path[:1] == ("templating",):
        result = report_old_names(string.value, "mentioned in a text, which is not changed")
        return None if result is None else RewriteResult(string.value, notes=result.left)
    return report_old_names(string.value, "mentioned outside a query; check it manually")


def _is_query(string: _JsonString) -> bool:
    of_variable = string.path[:1] == ("templating",) and string.key in ("query", "definition")
    return not string.is_key and (string.key == "expr" or of_variable)


def _rewrite_label_text(string: _JsonString) -> RewriteResult:
    """Rewrites label names in legends, columns and patterns."""
    if not _VARIABLE_KEYS.isdisjoint(string.path):
        return RewriteResult(string.value)
    if string.key == "regex" and not string.is_key:  # matches series as text, such as `Hostname="…"`
        return RewriteResult(_PRINTED_LABEL.sub(lambda match: renamed_labels().get(match[0], match[0]), string.value))
    if string.key in _LEGENDS or "${__" in string.value:
        return RewriteResult(_TEMPLATE.sub(_rename_label, string.value))
    if string.is_key or string.key not in _PROSE:
        return RewriteResult(renamed_labels().get(string.value, string.value))
    return RewriteResult(string.value)


def _rewrite_query(string: _JsonString) -> RewriteResult | None:
    rewrite = rewrite_expression if string.key == "expr" else rewrite_query
    try:
        return rewrite(string.value)
    except PromqlError as error:  # the value of a variable may also be a list or a data source
        return report_old_names(string.value, f"cannot be parsed as PromQL: {error}")


def _rename_label(match: re.Match[str]) -> str:
    label = match[1] or match[2]
    return match[0].replace(label, renamed_labels().get(label, label))


def _find_strings(text: str) -> list[_JsonString]:
    """Finds all strings in valid JSON."""
    strings: list[_JsonString] = []
    path: list[str | int | None] = []  # key or index in each open container; None where a key is expected
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in "{[":
            path.append(None if token == "{" else 0)
        elif token in "}]":
            path.pop()
        elif token == ",":
            last = path[-1]
            path[-1] = last + 1 if isinstance(last, int) else None
        elif token.startswith('"'):
            value = json.loads(token, strict=False)
            is_key = bool(path) and path[-1] is None
            place = tuple(part for part in path if part is not None)
            strings.append(_JsonString(place, value, match.start(), match.end(), is_key))
            if is_key:
                path[-1] = value
    return strings
