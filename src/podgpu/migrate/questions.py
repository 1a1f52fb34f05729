"""This module answers what an expression reads: which series, under which names, with which labels. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from podgpu.migrate.direction import Direction
from podgpu.migrate.syntax import Aggregation, Binary, Call, Literal, Node, Paren, Selector, Subquery, Unary, Word
from podgpu.migrate.tokens import has_variable, is_variable, unquoted

NAME = "__name__"
_LONGEST_NUMBER = 40
_LARGEST_NUMBER = 1e30
LABEL_VALUES = "label_values"
LABEL_ARGUMENTS = {"label_replace": (1, 3), "label_join": (1, 3)}
"""Function -> the first argument that names a label, and where those begin that name the others."""


def children(node: Node) -> Sequence[Node]:
    match node:
        case Call() | Aggregation():
            return node.arguments
        case Binary():
            return (node.left, node.right)
        case Subquery() | Unary() | Paren():
            return (node.of,)
    return ()


def selectors(node: Node) -> Iterator[Selector]:
    return (found for found in every_node(node) if isinstance(found, Selector))


def every_node(node: Node) -> Iterator[Node]:
    """In the order of the text. No recursion: a tree is deeper than Python's stack where it has operators in a row."""
    waiting = [node]
    while waiting:
        yield (found := waiting.pop())
        waiting += reversed(children(found))


def labels_in(tree: Node) -> Iterator[str]:
    for node in every_node(tree):
        match node:
            case Aggregation() | Binary():
                yield from (word.text for word in node.labels)
            case Selector():
                yield from (matcher.label.text for matcher in node.matchers)
            case Call() if node.function in LABEL_ARGUMENTS:
                yield from (unquoted(a.text) for a in node.arguments if isinstance(a, Literal) and a.kind == "string")
            case Call():
                yield from (word.text for word in asked_label(node))


def asked_for(tree: Node, direction: Direction) -> tuple[bool, list[str]]:
    """Whether something is there under both names, which somebody has thought of; and what is under the one only."""
    metrics = dict.fromkeys(name_in(selector) for selector in selectors(tree))
    labels = dict.fromkeys(labels_in(tree))
    has_new = {name: new.name in metrics for name in metrics if (new := direction.metric(name)) is not None}
    has_new |= {label: name in labels for label in labels if (name := direction.label(label)) is not None}
    return any(has_new.values()), [name for name, has in has_new.items() if not has]


def asked_label(node: Node) -> Sequence[Word]:
    """Of label_values(…): the label whose values are asked for."""
    if isinstance(node, Call) and node.function == LABEL_VALUES and node.arguments:
        label = node.arguments[-1]
        if isinstance(label, Selector) and label.name is not None:
            return (label.name,)
    return ()


def name_of(node: Selector) -> Word | None:
    """Where the metric's name stands: before the braces, or as __name__ inside."""
    if node.name is not None:
        return node.name
    for matcher in node.matchers:
        if matcher.label.text == NAME and matcher.operator == "=":
            value = matcher.value
            if value.text[0] not in "\"'`":
                return value  # a variable of Grafana's, quotes and all
            return Word(unquoted(value.text), value.start + 1, value.end - 1)
    return None


def is_named_by_variable(node: Selector) -> bool:
    """`DCGM_FI_DEV_$what`. One that stands alone may be a number, or its metrics are seen in the variable's list."""
    name = name_in(node)
    if node.is_variable and is_variable(name):
        return bool(node.matchers) or node.is_range
    return has_variable(name)


def name_in(node: Selector) -> str:
    word = name_of(node)
    return "" if word is None else word.text


def makes_label(call: Call, label: str) -> bool:
    """Of label_replace and label_join: the label that they put on."""
    named = call.arguments[1] if len(call.arguments) > 1 else call
    return isinstance(named, Literal) and named.kind == "string" and unquoted(named.text) == label


def value_of(number: str) -> Fraction | None:
    """None for what no conversion is: zero, infinite, hexadecimal, or so large that it would fill the memory."""
    try:
        size = abs(float(number))
    except ValueError:
        return None
    if len(number) > _LONGEST_NUMBER or not 1 / _LARGEST_NUMBER < size < _LARGEST_NUMBER:
        return None
    return Fraction(number.replace("_", ""))
