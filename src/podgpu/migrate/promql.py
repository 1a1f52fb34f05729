"""Parses PromQL that may contain Grafana variables. Each node of the tree has its position in the text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from podgpu.errors import PodgpuError

NAME = "__name__"
LABEL_VALUES = "label_values"
_MAX_LENGTH = 64 * 1024
_VARIABLE = re.compile(r"\$\{[^{}\n]{1,200}\}|\$\w+|\[\[\w+(?::\w+)?\]\]")
_TOKEN = re.compile(
    rf"""
    (?P<space> (?:\s+|\#[^\n]*)+ )
    | (?P<variable> (?:[A-Za-z_][\w:]*)? (?:{_VARIABLE.pattern}) (?:{_VARIABLE.pattern}|\w+)* )
    | (?P<string> "(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*' | `[^`]*` )
    | (?P<duration> (?:[0-9]+(?:ms|[smhdwy]))+(?![\w.]) )
    | (?P<number> 0[xX][0-9a-fA-F]+ | (?:[0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)? )
    | (?P<name> :?[A-Za-z_][\w:]* )
    | (?P<operator> ==|!=|=~|!~|<=|>=|[-+*/%^<>=()\{{\}}\[\],@:] )
    """,
    re.VERBOSE | re.DOTALL,
)
_PRECEDENCE = {
    "or": 0,
    **dict.fromkeys(("and", "unless"), 1),
    **dict.fromkeys(("==", "!=", "<=", "<", ">=", ">"), 2),
    **dict.fromkeys(("+", "-"), 3),
    **dict.fromkeys(("*", "/", "%", "atan2"), 4),
    "^": 5,
}
"""Precedence of binary operators. All are parsed as left-associative, because only the positions of operands matter."""


class PromqlError(PodgpuError):
    """The text is not PromQL that podgpu can parse."""


class Word(NamedTuple):
    """A token or a part of a string, with its position."""

    text: str
    start: int
    end: int
    kind: str = ""  # group of _TOKEN, or `end`


@dataclass(frozen=True, slots=True)
class LabelMatcher:
    label: Word
    operator: str
    value: Word  # with its quotes


@dataclass(slots=True)
class Node:
    start: int
    end: int


@dataclass(slots=True)
class Literal(Node):
    """A number, a duration or a string."""

    kind: str
    text: str


@dataclass(slots=True)
class VectorSelector(Node):
    name: Word | None
    matchers: tuple[LabelMatcher, ...] = ()
    is_variable: bool = False  # the name is a Grafana variable, in whole or in part
    is_range: bool = False


@dataclass(slots=True)
class Call(Node):
    """A function or an aggregation."""

    function: str
    arguments: list[Node]
    labels: tuple[Word, ...] = ()  # labels in by and without


@dataclass(slots=True)
class Binary(Node):
    operator: str
    left: Node
    right: Node
    labels: tuple[Word, ...] = ()  # labels in on, ignoring, group_left and group_right


@dataclass(slots=True)
class Wrapped(Node):
    """An expression in parentheses, or with a sign, an offset or a subquery."""

    of: Node


def tokenize(text: str) -> list[Word]:
    if len(text) > _MAX_LENGTH:
        raise PromqlError(f"longer than {_MAX_LENGTH} characters")
    tokens: list[Word] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise PromqlError(f"cannot parse {text[position : position + 20]!a} at character {position + 1}")
        if match.lastgroup != "space":
            tokens.append(Word(match[0], position, match.end(), match.lastgroup or ""))
        position = match.end()
    return [*tokens, Word("", len(text), len(text), "end")]


def parse_promql(text: str) -> Node:
    """Raises PromqlError if the text cannot be parsed."""
    parser = _PromqlParser(tokenize(text))
    try:
        tree = parser.parse_binary(0)
    except RecursionError:
        raise PromqlError("nested too deep") from None
    if parser.next.kind != "end":
        raise parser.unexpected(parser.next, "an operator or the end")
    return tree


class _PromqlParser:
    def __init__(self, tokens: list[Word]) -> None:
        self._tokens = tokens
        self._position = 0

    @property
    def next(self) -> Word:
        return self._tokens[self._position]

    def take(self) -> Word:
        token = self.next
        self._position += token.kind != "end"
        return token

    def is_next(self, *texts: str) -> bool:
        return self.next.kind in ("operator", "name") and self.next.text.lower() in texts

    def accept(self, *texts: str) -> bool:
        if self.is_next(*texts):
            self.take()
            return True
        return False

    def expect(self, text: str) -> Word:
        token = self.take()
        if token.text != text or token.kind != "operator":
            raise self.unexpected(token, repr(text))
        return token

    def take_word(self, expected: str, *kinds: str) -> Word:
        token = self.take()
        if token.kind not in kinds:
            raise self.unexpected(token, expected)
        return token

    @staticmethod
    def unexpected(token: Word, expected: str) -> PromqlError:
        what = "the end" if token.kind == "end" else f"{token.text[:40]!a} at character {token.start + 1}"
        return PromqlError(f"expected {expected}, but got {what}")

    def parse_binary(self, level: int) -> Node:
        left = self._parse_signed()
        while self.is_next(*_PRECEDENCE) and _PRECEDENCE[self.next.text.lower()] >= level:
            operator = self.take().text.lower()
            labels = self._parse_matching()
            right = self.parse_binary(_PRECEDENCE[operator] + 1)
            left = Binary(left.start, right.end, operator, left, right, labels)
        return left

    def _parse_signed(self) -> Node:
        first = self.next
        while self.accept("+", "-"):
            pass
        node = self._parse_modifiers(self._parse_primary())
        return node if first.start == node.start else Wrapped(first.start, node.end, node)

    def _parse_matching(self) -> tuple[Word, ...]:
        self.accept("bool")
        labels: tuple[Word, ...] = ()
        if self.accept("on", "ignoring"):
            labels += self._parse_labels()
        if self.accept("group_left", "group_right") and self.is_next("("):
            labels += self._parse_labels()
        return labels

    def _parse_labels(self) -> tuple[Word, ...]:
        self.expect("(")
        labels: list[Word] = []
        while not self.is_next(")"):
            labels.append(self.take_word("a label", "name", "variable", "string"))
            if not self.accept(","):
                break
        self.expect(")")
        return tuple(labels)

    def _parse_primary(self) -> Node:
        token = self.take()
        if token.kind in ("number", "duration", "string"):
            return Literal(token.start, token.end, token.kind, token.text)
        if token.kind == "operator" and token.text == "(":
            inner = self.parse_binary(0)
            return Wrapped(token.start, self.expect(")").end, inner)
        if token.kind == "operator" and token.text == "{":
            return self._parse_selector(token.start, None)
        if token.kind == "name":
            lower = token.text.lower()
            if self.is_next("(", "by", "without"):
                return self._parse_call(token)
            if lower in ("inf", "nan"):
                return Literal(token.start, token.end, "number", token.text)
        elif token.kind != "variable":
            raise self.unexpected(token, "an expression")
        selector = VectorSelector(token.start, token.end, token)
        if self.accept("{"):
            selector = self._parse_selector(token.start, selector.name)
        selector.is_variable = token.kind == "variable"
        return selector

    def _parse_call(self, token: Word) -> Node:
        labels = self._parse_labels() if self.accept("by", "without") else ()
        arguments = self._parse_arguments()
        if self.accept("by", "without"):
            labels = self._parse_labels()
        return Call(token.start, self._tokens[self._position - 1].end, token.text.lower(), arguments, labels)

    def _parse_arguments(self) -> list[Node]:
        self.expect("(")
        arguments: list[Node] = []
        while not self.is_next(")"):
            arguments.append(self.parse_binary(0))
            if not self.accept(","):
                break
        self.expect(")")
        return arguments

    def _parse_selector(self, start: int, name: Word | None) -> VectorSelector:
        matchers: list[LabelMatcher] = []
        while not self.is_next("}"):
            label = self.take_word("a label", "name", "variable", "string")
            if label.text[0] in "\"'`" and self.is_next(",", "}") and name is None:
                name = _unquote(label)  # {"metric"}
            else:
                operator = self.take()
                if operator.text not in ("=", "!=", "=~", "!~"):
                    raise self.unexpected(operator, "one of = != =~ !~")
                matchers.append(LabelMatcher(label, operator.text, self.take_word("a string", "string", "variable")))
            if not self.accept(","):
                break
        return VectorSelector(start, self.expect("}").end, name, tuple(matchers))

    def _parse_modifiers(self, node: Node) -> Node:
        """Parses [range], [range:step], offset and @, in any order."""
        while True:
            if self.accept("["):
                is_subquery = self._parse_range()
                if is_subquery or not isinstance(node, VectorSelector):
                    node = Wrapped(node.start, node.end, node)
                else:
                    node.is_range = True
            elif self.accept("offset"):
                self.accept("-")
                self.take_word("a duration", "duration", "number", "variable")
            elif self.accept("@"):
                self.accept("-")
                if self.accept("start", "end"):
                    self.expect("(")
                    self.expect(")")
                else:
                    self.take_word("a time", "number", "variable")
            else:
                return node
            node.end = self._tokens[self._position - 1].end

    def _parse_range(self) -> bool:
        """Returns True for a subquery."""
        is_subquery = False
        while self.next.kind in ("duration", "number", "variable") or self.is_next(":", "+", "-", "*", "/"):
            is_subquery |= self.take().text == ":"
        self.expect("]")
        return is_subquery


# Queries on the tree


def children(node: Node) -> Sequence[Node]:
    match node:
        case Call():
            return node.arguments
        case Binary():
            return (node.left, node.right)
        case Wrapped():
            return (node.of,)
    return ()


def walk(node: Node) -> Iterator[Node]:
    """Yields all nodes in the order of the text. Iterative, because a long chain of operators is a deep tree."""
    waiting = [node]
    while waiting:
        yield (current := waiting.pop())
        waiting += reversed(children(current))


def find_selectors(node: Node) -> Iterator[VectorSelector]:
    return (child for child in walk(node) if isinstance(child, VectorSelector))


def label_arguments(call: Call) -> Sequence[Word]:
    """Returns the arguments that are names of labels, without their quotes. The first one is the label that is set."""
    arguments = call.arguments
    match call.function:
        case "label_replace":
            labels = [*arguments[1:2], *arguments[3:4]]
        case "label_join":
            labels = [*arguments[1:2], *arguments[3:]]
        case "sort_by_label" | "sort_by_label_desc":
            labels = arguments[1:]
        case _:
            labels = []
    strings = [label for label in labels if isinstance(label, Literal) and label.kind == "string"]
    return [_unquote(Word(string.text, string.start, string.end)) for string in strings]


def _unquote(word: Word) -> Word:
    """Removes the quotes. Escapes stay, because names do not contain them."""
    return Word(word.text[1:-1], word.start + 1, word.end - 1)


def requested_label(node: Node) -> Sequence[Word]:
    """Returns the label argument of label_values(…)."""
    if isinstance(node, Call) and node.function == LABEL_VALUES and node.arguments:
        label = node.arguments[-1]
        if isinstance(label, VectorSelector) and label.name is not None:
            return (label.name,)
    return ()


def name_word(node: VectorSelector) -> Word | None:
    """Returns the metric name with its position: before the braces, or as __name__ inside them."""
    if node.name is not None:
        return node.name
    for matcher in node.matchers:
        if matcher.label.text == NAME and matcher.operator == "=":
            value = matcher.value
            if value.text[0] not in "\"'`":
                return value  # a Grafana variable that includes the quotes
            return _unquote(value)
    return None


def name_of(node: VectorSelector) -> str:
    word = name_word(node)
    return "" if word is None else word.text


def is_named_by_variable(node: VectorSelector) -> bool:
    """Returns True for names such as `DCGM_FI_DEV_$what`. A variable without other text may be a number."""
    name = name_of(node)
    if node.is_variable and _VARIABLE.fullmatch(name):
        return bool(node.matchers) or node.is_range
    return _VARIABLE.search(name) is not None
