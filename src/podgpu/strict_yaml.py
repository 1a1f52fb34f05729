"""This module reads YAML strictly, for whatever podgpu is told in it: a key stands once, is a known one, its value is
of its type.

Complaints name file and key, those of a `PlacedMapping` line and column too. They quote no value that may be a secret.
Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from typing import ClassVar, Self, TypeVar

import yaml

from podgpu.errors import PodgpuError, UsageError, one_line

_STANDARD = "tag:yaml.org,2002:"
_NO_TEXT = {f"{_STANDARD}binary", f"{_STANDARD}merge"}
_TRUE = {"true", "yes", "on"}
_FALSE = {"false", "no", "off"}


_MOST_PLAIN = 10_000
"""Values in one part that is taken as it is: aliases of aliases of aliases are without end."""
_DEEPEST = 100


class TooDeep(yaml.composer.ComposerError):
    """It is YAML, and more of it than podgpu reads."""


class ShallowLoader(yaml.SafeLoader):
    """Reads no deeper than any file for podgpu goes: a thousand lists in each other are a second of work for PyYAML,
    and an error at the end of it."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        try:
            if self._depth > _DEEPEST:
                problem = f"it is nested deeper than {_DEEPEST} times"
                raise TooDeep(None, None, problem, self.peek_event().start_mark)  # type: ignore[no-untyped-call]
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


class StrictMapping:
    """Walks YAML's nodes rather than what PyYAML makes of them: a user may be called 0123 or on, and a key may not
    stand twice."""

    takes_merges: ClassVar[bool] = False
    """`<<` takes in another mapping, and of a key that stands twice the last one counts."""

    def __init__(
        self,
        file: str,
        where: str,
        entries: dict[str, yaml.Node],
        keys: dict[str, yaml.Node] | None = None,
        node: yaml.Node | None = None,
    ) -> None:
        self.file = file
        self.where = where
        """Path inside the file, as `users[alice].user`; empty for the whole."""
        self._entries = entries
        self._keys = keys or {}
        self._node = node

    @staticmethod
    def error(message: str) -> PodgpuError:
        """What is raised: a wrong option, unless it is somebody else's file."""
        return UsageError(one_line(message))

    @staticmethod
    def place(file: str, _node: yaml.Node | None) -> str:
        """What complaints begin with."""
        return file

    def complaint(self, name: str, problem: str) -> PodgpuError:
        """About what is written under a name; about the whole where the name is not there."""
        node = self._entries.get(name) or self._keys.get(name) or self._node
        return self.error(f"{self.place(self.file, node)}: {self._path(name)}: {problem}")

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def has(self, name: str) -> bool:
        """Something is written there, and not the empty text."""
        node = self._entries.get(name)
        return node is not None and not _is_null(node) and node.value != ""

    def allow(self, known: Iterable[str]) -> None:
        names = sorted(known)
        for name in self._entries:
            if name not in names:
                place, path = self.place(self.file, self._keys.get(name)), self._path(_short(name))
                raise self.error(f"{place}: {path}: there is no such key; there are {', '.join(names)}")

    def text(self, name: str) -> str:
        """Empty where nothing is written. A bare number or word is text too, as in Go's YAML."""
        node = self._entries.get(name)
        return "" if node is None or _is_null(node) else self._text(node, name)

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(self._text(node, name) for node in self._list(name))

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

    def mapping(self, name: str) -> Self:
        """An empty one where nothing is written."""
        return self._mapping(self._entries.get(name), name)

    def mappings(self, name: str) -> tuple[Self, ...]:
        return tuple(self._mapping(node, f"{name}[{number}]") for number, node in enumerate(self._list(name)))

    def called(self, where: str) -> Self:
        """The same under another name, for complaints."""
        return type(self)(self.file, where, self._entries, self._keys, self._node)

    def plain(self, name: str) -> object:
        """Whatever stands there, as JSON has it: only to be passed on."""
        left = _MOST_PLAIN

        def plain(node: yaml.Node) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise self.complaint(name, "is too large")
            if isinstance(node, yaml.MappingNode):
                return {str(key.value): plain(value) for key, value in node.value}
            if isinstance(node, yaml.SequenceNode):
                return [plain(value) for value in node.value]
            return _plain_scalar(node)

        node = self._entries.get(name)
        try:
            return None if node is None else plain(node)
        except RecursionError:
            raise self.complaint(name, "is nested too deep") from None

    def _path(self, name: str) -> str:
        return ".".join(part for part in (self.where, name) if part)

    def _list(self, name: str) -> list[yaml.Node]:
        node = self._entries.get(name)
        if node is None or _is_null(node):
            return []
        if not isinstance(node, yaml.SequenceNode) or node.tag != f"{_STANDARD}seq":
            raise self.complaint(name, "is not a list")
        return list(node.value)

    def _mapping(self, node: yaml.Node | None, name: str) -> Self:
        if node is None or _is_null(node):
            return type(self)(self.file, self._path(name), {}, node=node or self._node)
        return _mapping(node, self.file, self._path(name), type(self))

    def _text(self, node: yaml.Node, name: str) -> str:
        is_text = isinstance(node, yaml.ScalarNode) and node.tag.startswith(_STANDARD) and node.tag not in _NO_TEXT
        if not is_text:
            raise self.complaint(_short(name), "is not a text")
        value = str(node.value)
        if "\0" in value or _has_half_a_pair(value):  # NUL ends a path early
            raise self.complaint(_short(name), "holds a character that no text may have")
        return value


class PlacedMapping(StrictMapping):
    """The same, with file:line:column before every complaint."""

    @staticmethod
    def place(file: str, node: yaml.Node | None) -> str:
        if node is None:
            return f"{file}:1:1"
        return f"{file}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"

    def place_of(self, name: str) -> str:
        """Where a value is written, for complaints that are made later."""
        return self.place(self.file, self._entries.get(name) or self._node)


M = TypeVar("M", bound=StrictMapping)


def parse_strict(content: bytes, file: str) -> StrictMapping:
    """The whole file; an empty one is an empty mapping. Raises UsageError."""
    return parse_mapping(content, file, StrictMapping)


def parse_mapping(content: bytes, file: str, kind: type[M]) -> M:
    """The same, for files that are complained of in another way."""
    try:
        node = yaml.compose(content.decode("utf-8-sig"), Loader=ShallowLoader)
    except UnicodeDecodeError:
        raise kind.error(f"{file}: not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        raise kind.error(_what_is_wrong(error, file, kind)) from None
    except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        # All but the first from PyYAML's insides: an escape past Unicode's end.
        raise kind.error(f"{file}: not YAML that podgpu can read ({type(error).__name__})") from None
    if node is None or _is_null(node):
        return kind(file, "", {})
    return _mapping(node, file, "", kind)


def _what_is_wrong(error: yaml.MarkedYAMLError, file: str, kind: type[StrictMapping]) -> str:
    """Not str(error), which quotes the line; and without what the problem itself quotes: either may be a secret."""
    problem = re.sub(r"(['\"]).*\1", "…", error.problem or "it cannot be understood", flags=re.DOTALL)
    said, mark = " ".join(problem.split()), error.problem_mark
    said = said if isinstance(error, TooDeep) else f"not YAML: {said}"
    if mark is None:
        return f"{file}: {said}"
    if issubclass(kind, PlacedMapping):
        return f"{file}:{mark.line + 1}:{mark.column + 1}: {said}"
    return f"{file}: line {mark.line + 1}: {said}"


def _mapping(node: yaml.Node, file: str, where: str, kind: type[M]) -> M:
    def error(at: yaml.Node, problem: str) -> PodgpuError:
        place = kind.place(file, at)
        return kind.error(f"{place}: {where}: {problem}" if where else f"{place}: {problem}")

    if not isinstance(node, yaml.MappingNode) or node.tag != f"{_STANDARD}map":
        raise error(node, "not a mapping (write KEY: VALUE)")
    if kind.takes_merges:
        _take_in_merges(node, f"{file}: {where}" if where else file, kind)
    entries: dict[str, yaml.Node] = {}
    keys: dict[str, yaml.Node] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode) or _has_half_a_pair(key.value):
            raise error(key, f"the key in line {line} is not a text")
        if key.value in entries and not kind.takes_merges:
            raise error(key, f"{_short(key.value)} is there twice, again in line {line}")
        entries[key.value], keys[key.value] = value, key
    return kind(file, where, entries, keys, node)


def _take_in_merges(node: yaml.MappingNode, name: str, kind: type[M]) -> None:
    try:
        yaml.constructor.SafeConstructor().flatten_mapping(node)
    except (yaml.YAMLError, RecursionError):
        raise kind.error(f"{name}: what << includes is not a mapping") from None


def _plain_scalar(node: yaml.Node) -> object:
    text, tag = str(node.value), node.tag.removeprefix(_STANDARD)
    if tag == "null":
        return None
    if tag == "bool" and text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    if tag == "int" and re.fullmatch(r"-?(?:0|[1-9][0-9]{0,17})", text):
        return int(text)
    if tag == "float" and re.fullmatch(r"-?[0-9]{1,17}\.[0-9]{1,17}", text):
        return float(text)
    return text


def _has_half_a_pair(text: str) -> bool:
    """Half of a surrogate pair cannot be written as UTF-8 at all."""
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == f"{_STANDARD}null"


def _short(name: str) -> str:
    """On one line, and not much of it."""
    printable = "".join(letter if letter.isprintable() else "?" for letter in name)
    return printable if len(printable) <= 60 else f"{printable[:60]}…"
