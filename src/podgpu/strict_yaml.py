"""A YAML mapping read strictly: a key stands once, is a known one, and its value is of its type.

Complaints name file and key. They quote no value that may be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction

import yaml

from podgpu.errors import UsageError

_STANDARD = "tag:yaml.org,2002:"
_NO_TEXT = {f"{_STANDARD}binary", f"{_STANDARD}merge"}
_TRUE = {"true", "yes", "on"}
_FALSE = {"false", "no", "off"}


class StrictMapping:
    """Walks YAML's nodes rather than what PyYAML makes of them: a user may be called 0123 or on, and a key may not
    stand twice."""

    def __init__(self, file: str, where: str, entries: dict[str, yaml.Node]) -> None:
        self._file = file
        self._where = where
        self._entries = entries

    def complaint(self, name: str, problem: str) -> UsageError:
        path = ".".join(part for part in (self._where, name) if part)
        return UsageError(f"{self._file}: {path}: {problem}")

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def allow(self, known: Iterable[str]) -> None:
        names = sorted(known)
        for name in self._entries:
            if name not in names:
                raise self.complaint(_short(name), f"there is no such key; there are {', '.join(names)}")

    def text(self, name: str) -> str:
        """Empty where nothing is written. A bare number or word is text too, as in Go's YAML."""
        node = self._entries.get(name)
        return "" if node is None or _is_null(node) else self._text(node, name)

    def texts(self, name: str) -> tuple[str, ...]:
        node = self._entries.get(name)
        if node is None or _is_null(node):
            return ()
        if not isinstance(node, yaml.SequenceNode) or node.tag != f"{_STANDARD}seq":
            raise self.complaint(name, "is not a list")
        return tuple(self._text(one, name) for one in node.value)

    def flag(self, name: str) -> bool | None:
        """None where nothing is written."""
        node = self._entries.get(name)
        if node is None or _is_null(node):
            return None
        word = node.value.lower() if isinstance(node, yaml.ScalarNode) and node.tag == f"{_STANDARD}bool" else ""
        if word not in _TRUE | _FALSE:
            raise self.complaint(name, "is neither true nor false")
        return word in _TRUE

    def whole_number(self, name: str) -> int:
        """0 where nothing is written."""
        node = self._entries.get(name)
        if node is None or _is_null(node):
            return 0
        plain = isinstance(node, yaml.ScalarNode) and node.tag == f"{_STANDARD}int"
        if not plain or not re.fullmatch(r"0|[1-9][0-9]{0,8}", node.value):
            raise self.complaint(name, "is not a whole number from 0 to 999999999")
        return int(node.value)

    def amount(self, name: str) -> Fraction | None:
        """A number of 0 or more, to the last digit written. None where nothing is written."""
        node = self._entries.get(name)
        if node is None or _is_null(node):
            return None
        is_number = isinstance(node, yaml.ScalarNode) and node.tag in (f"{_STANDARD}int", f"{_STANDARD}float")
        if not is_number or not re.fullmatch(r"(?:0|[1-9][0-9]{0,11})(?:\.[0-9]{1,12})?", node.value):
            raise self.complaint(_short(name), "is not a number of 0 or more, written as in 2.5")
        return Fraction(node.value)

    def mapping(self, name: str) -> StrictMapping:
        """An empty one where nothing is written."""
        node = self._entries.get(name)
        where = ".".join(part for part in (self._where, name) if part)
        if node is None or _is_null(node):
            return StrictMapping(self._file, where, {})
        return _mapping(node, self._file, where)

    def _text(self, node: yaml.Node, name: str) -> str:
        is_text = isinstance(node, yaml.ScalarNode) and node.tag.startswith(_STANDARD) and node.tag not in _NO_TEXT
        if not is_text:
            raise self.complaint(_short(name), "is not a text")
        value = str(node.value)
        # NUL ends a path early; half of a surrogate pair cannot be written as UTF-8 at all.
        if "\0" in value or any("\ud800" <= one <= "\udfff" for one in value):
            raise self.complaint(_short(name), "holds a character that no text may have")
        return value


def parse_strict(content: bytes, file: str) -> StrictMapping:
    """The whole file; an empty one is an empty mapping."""
    try:
        node = yaml.compose(content.decode("utf-8-sig"), Loader=yaml.SafeLoader)
    except UnicodeDecodeError:
        raise UsageError(f"{file}: not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        raise UsageError(f"{file}: {_what_is_wrong(error)}") from None
    except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        # All but the first from PyYAML's insides: an escape past Unicode's end, lists nested a thousand deep.
        raise UsageError(f"{file}: not YAML that podgpu can read ({type(error).__name__})") from None
    if node is None or _is_null(node):
        return StrictMapping(file, "", {})
    return _mapping(node, file, "")


def _what_is_wrong(error: yaml.MarkedYAMLError) -> str:
    """Not str(error), which quotes the line; and without what the problem itself quotes: either may be a secret."""
    problem = re.sub(r"(['\"]).*\1", "…", error.problem or "it cannot be understood", flags=re.DOTALL)
    line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
    return f"{line}not YAML: {' '.join(problem.split())}"


def _mapping(node: yaml.Node, file: str, where: str) -> StrictMapping:
    name = f"{file}: {where}" if where else file
    if not isinstance(node, yaml.MappingNode) or node.tag != f"{_STANDARD}map":
        raise UsageError(f"{name}: not a mapping (write KEY: VALUE)")
    entries: dict[str, yaml.Node] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode) or any("\ud800" <= one <= "\udfff" for one in key.value):
            raise UsageError(f"{name}: the key in line {line} is not a text")
        if key.value in entries:
            raise UsageError(f"{name}: {_short(key.value)} stands twice, again in line {line}")
        entries[key.value] = value
    return StrictMapping(file, where, entries)


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == f"{_STANDARD}null"


def _short(name: str) -> str:
    """On one line, and not much of it."""
    printable = "".join(one if one.isprintable() else "?" for one in name)
    return printable if len(printable) <= 60 else f"{printable[:60]}…"
