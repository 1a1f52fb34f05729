"""This module reads PromQL into a tree whose nodes know where they stand in the text. Depth and size are bounded. Pure.

What a number or a duration is worth does not matter here: they are kept as they are written.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from podgpu.migrate.tokens import PromqlError, Token, tokens_of, unquoted

_DEEPEST = 250
"""Levels of operators count: an expression in brackets takes five."""
_LONGEST = 200
AGGREGATIONS = frozenset(
    {
        *("sum", "min", "max", "avg", "group", "stddev", "stdvar", "count", "count_values", "bottomk", "topk"),
        *("quantile", "limitk", "limit_ratio"),
    }
)
_LEVELS: tuple[frozenset[str], ...] = (
    frozenset({"or"}),
    frozenset({"and", "unless"}),
    frozenset({"==", "!=", "<=", "<", ">=", ">"}),
    frozenset({"+", "-"}),
    frozenset({"*", "/", "%", "atan2"}),
)
"""Of binary operators, the weakest first; ^ is stronger, and binds to the right."""


@dataclass(frozen=True, slots=True)
class Word:
    """A name or a string with its place."""

    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Matcher:
    label: Word
    operator: str
    value: Word
    """As it is written, with its quotes."""


@dataclass(slots=True)
class Node:
    start: int
    end: int


@dataclass(slots=True)
class Literal(Node):
    """A number, a string, or a variable of Grafana's in an expression's place."""

    kind: str
    text: str


@dataclass(slots=True)
class Selector(Node):
    name: Word | None
    matchers: tuple[Matcher, ...] = ()
    is_variable: bool = False
    """Its name is Grafana's to tell."""
    is_range: bool = False


@dataclass(slots=True)
class Subquery(Node):
    of: Node


@dataclass(slots=True)
class Call(Node):
    function: str
    arguments: list[Node]


@dataclass(slots=True)
class Aggregation(Node):
    function: str
    labels: tuple[Word, ...]
    arguments: list[Node]


@dataclass(slots=True)
class Binary(Node):
    operator: str
    left: Node
    right: Node
    labels: tuple[Word, ...] = ()
    """Of on, ignoring, group_left and group_right."""


@dataclass(slots=True)
class Unary(Node):
    of: Node


@dataclass(slots=True)
class Paren(Node):
    of: Node


@dataclass
class _Reader:
    tokens: list[Token]
    at: int = 0
    depth: int = field(default=0)

    @property
    def next(self) -> Token:
        return self.tokens[self.at]

    def take(self) -> Token:
        token = self.tokens[self.at]
        self.at += token.kind != "end"
        return token

    def takes(self, text: str) -> bool:
        if self.next.text.lower() == text and self.next.kind in ("operator", "name"):
            self.take()
            return True
        return False

    def need(self, text: str) -> Token:
        token = self.take()
        if token.text != text or token.kind != "operator":
            raise _unexpected(token, f"{text!r} was expected")
        return token


def _unexpected(token: Token, why: str) -> PromqlError:
    what = "its end" if token.kind == "end" else f"{token.text[:40]!a} at letter {token.start + 1}"
    return PromqlError(f"{what}: {why}")


def parse_promql(text: str) -> Node:
    """The tree of one expression. Raises PromqlError."""
    reader = _Reader(tokens_of(text))
    try:
        tree = _expression(reader, 0)
    except RecursionError:  # whoever calls may be deep in the stack already
        raise PromqlError("nested too deep") from None
    if reader.next.kind != "end":
        raise _unexpected(reader.next, "an operator or the end was expected")
    return tree


def _expression(reader: _Reader, level: int) -> Node:
    reader.depth += 1
    if reader.depth > _DEEPEST:
        raise PromqlError("nested too deep")
    try:
        left = _operand(reader, level)
        for _ in range(_LONGEST):
            if not _is_operator(reader.next, _LEVELS[level]):
                return left
            operator = reader.take().text.lower()
            labels = _matching(reader)
            right = _operand(reader, level)
            left = Binary(left.start, right.end, operator, left, right, labels)
        raise PromqlError(f"more than {_LONGEST} operators in a row")
    finally:
        reader.depth -= 1


def _operand(reader: _Reader, level: int) -> Node:
    return _expression(reader, level + 1) if level + 1 < len(_LEVELS) else _unary(reader)


def _is_operator(token: Token, among: frozenset[str]) -> bool:
    return token.kind in ("operator", "name") and token.text.lower() in among


def _matching(reader: _Reader) -> tuple[Word, ...]:
    reader.takes("bool")
    labels: tuple[Word, ...] = ()
    if reader.takes("on") or reader.takes("ignoring"):
        labels += _labels(reader)
    if reader.takes("group_left") or reader.takes("group_right"):
        labels += _labels(reader) if reader.next.text == "(" else ()
    return labels


def _labels(reader: _Reader) -> tuple[Word, ...]:
    reader.need("(")
    found: list[Word] = []
    while reader.next.text != ")":
        token = reader.take()
        if token.kind not in ("name", "variable", "string"):
            raise _unexpected(token, "a label was expected")
        found.append(Word(token.text, token.start, token.end))
        if not reader.takes(","):
            break
    reader.need(")")
    return tuple(found)


def _unary(reader: _Reader) -> Node:
    signs = []
    while reader.next.kind == "operator" and reader.next.text in "+-":
        signs.append(reader.take())
        if len(signs) > _DEEPEST:
            raise PromqlError("nested too deep")
    node = _power(reader)
    return Unary(signs[0].start, node.end, node) if signs else node


def _power(reader: _Reader) -> Node:
    base = _with_ranges(reader, _primary(reader))
    if not (reader.next.kind == "operator" and reader.next.text == "^"):
        return base
    reader.take()
    labels = _matching(reader)
    reader.depth += 1
    if reader.depth > _DEEPEST:
        raise PromqlError("nested too deep")
    try:
        exponent = _unary(reader)
    finally:
        reader.depth -= 1
    return Binary(base.start, exponent.end, "^", base, exponent, labels)


def _primary(reader: _Reader) -> Node:
    token = reader.take()
    if token.kind in ("number", "duration", "string"):
        return Literal(token.start, token.end, token.kind, token.text)
    if token.text == "(" and token.kind == "operator":
        inner = _expression(reader, 0)
        return Paren(token.start, reader.need(")").end, inner)
    if token.text == "{" and token.kind == "operator":
        return _selector(reader, token.start, None)
    if token.kind in ("name", "variable"):
        return _named(reader, token)
    raise _unexpected(token, "an expression was expected")


def _named(reader: _Reader, token: Token) -> Node:
    following = reader.next.text.lower() if reader.next.kind in ("operator", "name") else ""
    lower = token.text.lower()
    if token.kind == "name" and lower in AGGREGATIONS and following in ("(", "by", "without"):
        return _aggregation(reader, token)
    if token.kind == "name" and following == "(":
        arguments, end = _arguments(reader)
        return Call(token.start, end, token.text, arguments)
    if token.kind == "name" and lower in ("inf", "nan"):
        return Literal(token.start, token.end, "number", token.text)
    name = Word(token.text, token.start, token.end)
    if following == "{":
        reader.take()
        made = _selector(reader, token.start, name)
    else:
        made = Selector(token.start, token.end, name)
    made.is_variable = token.kind == "variable"
    return made


def _aggregation(reader: _Reader, token: Token) -> Node:
    labels = _labels(reader) if reader.takes("by") or reader.takes("without") else ()
    arguments, end = _arguments(reader)
    if reader.takes("by") or reader.takes("without"):
        labels = _labels(reader)
        end = reader.tokens[reader.at - 1].end
    return Aggregation(token.start, end, token.text.lower(), labels, arguments)


def _arguments(reader: _Reader) -> tuple[list[Node], int]:
    reader.need("(")
    found: list[Node] = []
    while reader.next.text != ")" or reader.next.kind != "operator":
        found.append(_expression(reader, 0))
        if not reader.takes(","):
            break
    return found, reader.need(")").end


def _selector(reader: _Reader, start: int, name: Word | None) -> Selector:
    matchers: list[Matcher] = []
    while reader.next.text != "}":
        label = reader.take()
        if label.kind == "string" and reader.next.text in (",", "}") and name is None:
            name = Word(unquoted(label.text), label.start + 1, label.end - 1)  # {"metric"}
        else:
            matchers.append(_matcher(reader, label))
        if not reader.takes(","):
            break
    return Selector(start, reader.need("}").end, name, tuple(matchers))


def _matcher(reader: _Reader, label: Token) -> Matcher:
    if label.kind not in ("name", "variable", "string"):
        raise _unexpected(label, "a label was expected")
    operator, value = reader.take(), reader.take()
    if operator.text not in ("=", "!=", "=~", "!~"):
        raise _unexpected(operator, "one of = != =~ !~ was expected")
    if value.kind not in ("string", "variable"):
        raise _unexpected(value, "a string was expected")
    return Matcher(Word(label.text, label.start, label.end), operator.text, Word(value.text, value.start, value.end))


def _with_ranges(reader: _Reader, node: Node) -> Node:
    """What may stand behind: [range], [range:step], offset and @, in any order."""
    for _ in range(_DEEPEST):
        if reader.next.kind == "operator" and reader.next.text == "[":
            is_subquery = _bracket(reader)
            if is_subquery or not isinstance(node, Selector):
                node = Subquery(node.start, node.end, node)
            else:
                node.is_range = True
        elif reader.takes("offset"):
            _offset(reader)
        elif reader.takes("@"):
            _moment(reader)
        else:
            return node
        node.end = reader.tokens[reader.at - 1].end
    raise PromqlError("too many ranges and offsets")


def _bracket(reader: _Reader) -> bool:
    reader.need("[")
    is_subquery = False
    while reader.next.kind in ("duration", "number", "variable") or reader.next.text in (":", "+", "-", "*", "/"):
        is_subquery |= reader.take().text == ":"
    reader.need("]")
    return is_subquery


def _offset(reader: _Reader) -> None:
    reader.takes("-")
    token = reader.take()
    if token.kind not in ("duration", "number", "variable"):
        raise _unexpected(token, "a duration was expected")


def _moment(reader: _Reader) -> None:
    reader.takes("-")
    token = reader.take()
    if token.text in ("start", "end"):
        reader.need("(")
        reader.need(")")
    elif token.kind not in ("number", "variable"):
        raise _unexpected(token, "a time was expected")
