"""This module rewrites a Grafana dashboard in place: only the strings that change are touched, every other letter
stays. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from podgpu.errors import UsageError
from podgpu.migrate.direction import Direction
from podgpu.migrate.result import Change, Migrated, Rewritten, gather
from podgpu.migrate.rewrite import PromqlError, rewrite_expression, rewrite_query

_DEEPEST = 200
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"')
_SPACE = re.compile(r"[ \t\r\n]*+")
_PLAIN = re.compile(r"[^,\]}\s]++")
_PROSE = frozenset({"title", "description", "content", "text", "label", "name", "displayName", "uid", "tags"})
_OF_VARIABLES = frozenset({"repeat", "scopedVars"})
"""What stands under these names the dashboard's variables, one of which may be called as a label is."""
_LEGENDS = frozenset({"legendFormat", "titleFormat", "textFormat"})
_PRINTED_LABEL = re.compile(r"\b[A-Za-z_]\w*(?==)")
_TEMPLATE = re.compile(r"\{\{\s*(\w+)\s*\}\}|\$\{__(?:field\.labels|data\.fields)\.(\w+)\b")


@dataclass(frozen=True, slots=True)
class _Text:
    """One string of the file, a key or a value, with the way to it."""

    path: tuple[str | int, ...]
    value: str
    start: int
    end: int
    is_key: bool = False

    @property
    def key(self) -> str:
        """The nearest name on the way, numbers left out."""
        return next((str(part) for part in reversed(self.path) if isinstance(part, str)), "")

    @property
    def shown(self) -> str:
        parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path)
        return "".join(parts).lstrip(".")


def migrate_dashboard(text: str, origin: str, direction: Direction) -> Migrated:
    """Raises UsageError for what is no JSON."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{origin}: not JSON: {getattr(error, 'msg', 'nested too deep')}{_place(error)}") from None
    if not isinstance(document, dict):
        raise UsageError(f"{origin}: not a dashboard: a JSON object was expected")
    texts = _texts(text, origin)
    rewritten = {string: made for string in texts if (made := _rewritten(string, direction)) is not None}
    settled = {_owner(string) for string, made in rewritten.items() if made.asks_both}
    """Panels and variables that read either name: what stands beside their queries goes with those."""
    theirs = {_owner(string) for string, made in rewritten.items() if made.is_theirs} - settled
    """Those whose labels are the exporter's: legends, columns and patterns there name these."""
    for string in texts:
        if _owner(string) in theirs and string not in rewritten:
            rewritten[string] = _beside_query(string, direction)
    for string in [string for string in rewritten if _owner(string) in settled]:
        rewritten[string] = _beside_either(string, rewritten[string])
    changes = (_change(string, made, text) for string, made in rewritten.items())
    return gather(text, [change for change in changes if change is not None])


def _owner(string: _Text) -> tuple[str | int, ...]:
    """The panel or the variable that a string belongs to."""
    for length in range(len(string.path), 0, -1):
        if isinstance(string.path[length - 1], int) and length > 1 and string.path[length - 2] in ("panels", "list"):
            return string.path[:length]
    return string.path


def _place(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f", at {error.lineno}:{error.colno}"
    return ""


def _change(string: _Text, rewritten: Rewritten, text: str) -> Change | None:
    if rewritten.text == string.value and not rewritten.left and not rewritten.notes:
        return None
    new = text[string.start : string.end]
    if rewritten.text != string.value:
        new = json.dumps(rewritten.text, ensure_ascii=new.isascii() or "\\u" in new)
    return Change(string.start, string.end, new, string.shown, rewritten)


def _rewritten(string: _Text, direction: Direction) -> Rewritten | None:
    """By itself: queries, and names of metrics where there should be none."""
    if _is_query(string):
        return _as_promql(string, direction) if string.key == "expr" else _as_variable(string, direction)
    names = direction.mentions(string.value)
    if not names:
        return None
    if string.key in _PROSE or string.path[:1] == ("templating",):
        return Rewritten(string.value, notes=(f"{', '.join(names)}: named in a text, which stays as it is",))
    return Rewritten(string.value, (f"{', '.join(names)}: named outside of a query: look at it yourself",))


def _is_query(string: _Text) -> bool:
    of_variable = string.path[:1] == ("templating",) and string.key in ("query", "definition")
    return not string.is_key and (string.key == "expr" or of_variable)


def _beside_query(string: _Text, direction: Direction) -> Rewritten:
    """In the panel or variable of a query: legends, columns by their labels' names, patterns of printed series."""
    if not _OF_VARIABLES.isdisjoint(string.path):
        return Rewritten(string.value)
    if string.key == "regex" and not string.is_key:
        return _as_pattern(string.value, direction)
    if string.key in _LEGENDS or "${__" in string.value:
        return _as_template(string.value, direction)
    if string.is_key or string.key not in _PROSE:
        return Rewritten(direction.label(string.value) or string.value)
    return Rewritten(string.value)


def _beside_either(string: _Text, made: Rewritten) -> Rewritten:
    """In a panel or variable that reads either name: legends and columns are shared, so another query stays as well."""
    if not _is_query(string):
        return Rewritten(string.value)
    said = "stands beside a query that reads either name: rewrite it by hand"
    return Rewritten(string.value, made.left or ((said,) if made.text != string.value else ()))


def _as_promql(string: _Text, direction: Direction) -> Rewritten | None:
    try:
        return rewrite_expression(string.value, direction)
    except PromqlError as error:
        return _unread(string, direction, error)


def _as_variable(string: _Text, direction: Direction) -> Rewritten | None:
    """What is no query (a list of values, a data source) is no PromQL either."""
    try:
        return rewrite_query(string.value, direction)
    except PromqlError as error:
        return _unread(string, direction, error)


def _unread(string: _Text, direction: Direction, error: PromqlError) -> Rewritten | None:
    names = direction.mentions(string.value)
    return Rewritten(string.value, (f"{', '.join(names)}: not PromQL that can be read: {error}",)) if names else None


def _as_template(value: str, direction: Direction) -> Rewritten:
    def renamed(match: re.Match[str]) -> str:
        label = match[1] or match[2]
        return match[0].replace(label, direction.label(label) or label)

    return Rewritten(_TEMPLATE.sub(renamed, value))


def _as_pattern(value: str, direction: Direction) -> Rewritten:
    """A variable's regex works on series as they are printed: `Hostname="…"`."""
    return Rewritten(_PRINTED_LABEL.sub(lambda match: direction.label(match[0]) or match[0], value))


# Where the strings stand


def _texts(text: str, origin: str) -> list[_Text]:
    """Every string of JSON that was read before: it is well formed."""
    walk = _Walk(text, origin)
    walk.value(0, 0)
    return walk.found


class _Walk:
    """Goes through JSON from left to right; each method is given where a part begins and says where it ended."""

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
        """Its value, and the comma behind it."""
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
