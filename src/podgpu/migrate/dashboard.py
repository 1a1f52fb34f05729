"""Rewrites a Grafana dashboard. Only the strings that change are touched; the layout stays."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from podgpu.errors import UsageError
from podgpu.migrate.promql import PromqlError
from podgpu.migrate.rewrite import (
    Direction,
    FileChange,
    MigratedFile,
    RewriteResult,
    apply_changes,
    rewrite_expression,
    rewrite_query,
)

_DEEPEST = 200
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"')
_SPACE = re.compile(r"[ \t\r\n]*+")
_PLAIN = re.compile(r"[^,\]}\s]++")
_PROSE = frozenset({"title", "description", "content", "text", "label", "name", "displayName", "uid", "tags"})
_OF_VARIABLES = frozenset({"repeat", "scopedVars"})
"""Keys whose values name dashboard variables, which may have the name of a label."""
_LEGENDS = frozenset({"legendFormat", "titleFormat", "textFormat"})
_PRINTED_LABEL = re.compile(r"\b[A-Za-z_]\w*(?==)")
_TEMPLATE = re.compile(r"\{\{\s*(\w+)\s*\}\}|\$\{__(?:field\.labels|data\.fields)\.(\w+)\b")


@dataclass(frozen=True, slots=True)
class _Text:
    """A string of the file, key or value, with its path."""

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


def migrate_dashboard(text: str, origin: str, direction: Direction) -> MigratedFile:
    """Raises UsageError if the text is not a JSON object."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{origin}: not JSON: {getattr(error, 'msg', 'nested too deep')}{_place(error)}") from None
    if not isinstance(document, dict):
        raise UsageError(f"{origin}: not a dashboard: a JSON object was expected")
    texts = _texts(text, origin)
    rewritten = {string: made for string in texts if (made := _rewritten(string, direction)) is not None}
    reading_both = {_owner(string) for string, made in rewritten.items() if made.reads_both}
    # Panels and variables that already read both names keep their legends, too.
    of_exporter = {_owner(string) for string, made in rewritten.items() if made.is_exporter} - reading_both
    # In the others, legends, columns and patterns refer to the exporter's labels.
    for string in texts:
        if _owner(string) in of_exporter and string not in rewritten:
            rewritten[string] = _beside_query(string, direction)
    for string in [string for string in rewritten if _owner(string) in reading_both]:
        rewritten[string] = _beside_either(string, rewritten[string])
    changes = (_change(string, made, text) for string, made in rewritten.items())
    return apply_changes(text, [change for change in changes if change is not None])


def _owner(string: _Text) -> tuple[str | int, ...]:
    """Path of the panel or variable that contains the string."""
    for length in range(len(string.path), 0, -1):
        if isinstance(string.path[length - 1], int) and length > 1 and string.path[length - 2] in ("panels", "list"):
            return string.path[:length]
    return string.path


def _place(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f", at {error.lineno}:{error.colno}"
    return ""


def _change(string: _Text, rewritten: RewriteResult, text: str) -> FileChange | None:
    if rewritten.text == string.value and not rewritten.left and not rewritten.notes:
        return None
    new = text[string.start : string.end]
    if rewritten.text != string.value:
        new = json.dumps(rewritten.text, ensure_ascii=new.isascii() or "\\u" in new)
    return FileChange(string.start, string.end, new, string.shown, rewritten)


def _rewritten(string: _Text, direction: Direction) -> RewriteResult | None:
    """Rewrites queries, and reports metric names elsewhere."""
    if _is_query(string):
        return _as_promql(string, direction) if string.key == "expr" else _as_variable(string, direction)
    names = direction.mentions(string.value)
    if not names:
        return None
    if string.key in _PROSE or string.path[:1] == ("templating",):
        return RewriteResult(string.value, notes=(f"{', '.join(names)}: mentioned in a text, which stays unchanged",))
    return RewriteResult(string.value, (f"{', '.join(names)}: mentioned outside of a query: check it by hand",))


def _is_query(string: _Text) -> bool:
    of_variable = string.path[:1] == ("templating",) and string.key in ("query", "definition")
    return not string.is_key and (string.key == "expr" or of_variable)


def _beside_query(string: _Text, direction: Direction) -> RewriteResult:
    """Rewrites legends, columns named by labels, and patterns in the panel or variable of a query."""
    if not _OF_VARIABLES.isdisjoint(string.path):
        return RewriteResult(string.value)
    if string.key == "regex" and not string.is_key:
        return _as_pattern(string.value, direction)
    if string.key in _LEGENDS or "${__" in string.value:
        return _as_template(string.value, direction)
    if string.is_key or string.key not in _PROSE:
        return RewriteResult(direction.label(string.value) or string.value)
    return RewriteResult(string.value)


def _beside_either(string: _Text, made: RewriteResult) -> RewriteResult:
    """Keeps other queries of a panel that reads both names, because they share its legends and columns."""
    if not _is_query(string):
        return RewriteResult(string.value)
    said = "is beside a query that reads both names: rewrite it by hand"
    return RewriteResult(string.value, made.left or ((said,) if made.text != string.value else ()))


def _as_promql(string: _Text, direction: Direction) -> RewriteResult | None:
    try:
        return rewrite_expression(string.value, direction)
    except PromqlError as error:
        return _unread(string, direction, error)


def _as_variable(string: _Text, direction: Direction) -> RewriteResult | None:
    """Values that are not queries (lists, data sources) are not PromQL either."""
    try:
        return rewrite_query(string.value, direction)
    except PromqlError as error:
        return _unread(string, direction, error)


def _unread(string: _Text, direction: Direction, error: PromqlError) -> RewriteResult | None:
    names = direction.mentions(string.value)
    return RewriteResult(string.value, (f"{', '.join(names)}: cannot be parsed as PromQL: {error}",)) if names else None


def _as_template(value: str, direction: Direction) -> RewriteResult:
    def renamed(match: re.Match[str]) -> str:
        label = match[1] or match[2]
        return match[0].replace(label, direction.label(label) or label)

    return RewriteResult(_TEMPLATE.sub(renamed, value))


def _as_pattern(value: str, direction: Direction) -> RewriteResult:
    """A variable's regex applies to printed series: `Hostname="…"`."""
    return RewriteResult(_PRINTED_LABEL.sub(lambda match: direction.label(match[0]) or match[0], value))


# Positions of strings


def _texts(text: str, origin: str) -> list[_Text]:
    """Finds all strings. The text is valid JSON."""
    walk = _Walk(text, origin)
    walk.value(0, 0)
    return walk.found


class _Walk:
    """Scans JSON. Each method gets the start of a part and returns its end."""

    def __init__(self, text: str, origin: str) -> None:
        self._text = text
        self._origin = origin
        self._path: list[str | int] = []
        self.found: list[_Text] = []

    def value(self, at: int, depth: int) -> int:
        if depth > _DEEPEST:
            raise UsageError(f"{self._origin}: nested too deep for a dashboard")
        at = self._skip(at)
        if self._text[at] == '"':
            return self._string(at, is_key=False)[1]
        if self._text[at] == "{":
            return self._members(self._skip(at + 1), depth)
        if self._text[at] == "[":
            return self._items(self._skip(at + 1), depth)
        match = _PLAIN.match(self._text, at)
        assert match is not None
        return match.end()

    def _members(self, at: int, depth: int) -> int:
        while self._text[at] != "}":
            key, at = self._string(self._skip(at), is_key=True)
            at = self._member(key, self._skip(at) + 1, depth)
        return at + 1

    def _items(self, at: int, depth: int) -> int:
        number = 0
        while self._text[at] != "]":
            at = self._member(number, at, depth)
            number += 1
        return at + 1

    def _member(self, name: str | int, at: int, depth: int) -> int:
        """Scans a value and the comma behind it."""
        self._path.append(name)
        at = self._skip(self.value(at, depth + 1))
        self._path.pop()
        return self._skip(at + 1) if self._text[at] == "," else at

    def _string(self, at: int, *, is_key: bool) -> tuple[str, int]:
        match = _STRING.match(self._text, at)
        assert match is not None
        value = json.loads(match[0], strict=False)
        self.found.append(_Text(tuple(self._path), value, at, match.end(), is_key))
        return value, match.end()

    def _skip(self, at: int) -> int:
        match = _SPACE.match(self._text, at)
        return match.end() if match else at
