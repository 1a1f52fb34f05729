"""This module rewrites one PromQL expression: names, labels, and the unit of every figure, so that its result stays the
same. Pure.

A figure whose unit changed is converted where it is read: `X` becomes `(Y * 100)`. A range of it cannot be multiplied;
then what the function makes of it is. An expression of which a part cannot be rewritten stays as it is, as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from podgpu.migrate.direction import Direction, conversion
from podgpu.migrate.questions import (
    LABEL_ARGUMENTS,
    LABEL_VALUES,
    NAME,
    asked_for,
    asked_label,
    every_node,
    is_named_by_variable,
    makes_label,
    name_in,
    name_of,
    selectors,
    value_of,
)
from podgpu.migrate.result import Edit, Rewritten
from podgpu.migrate.syntax import (
    Aggregation,
    Binary,
    Call,
    Literal,
    Node,
    Paren,
    Selector,
    Subquery,
    Unary,
    Word,
    parse_promql,
)
from podgpu.migrate.tokens import PromqlError, unquoted

_LINEAR = frozenset(
    {
        *("rate", "irate", "increase", "delta", "idelta", "deriv", "predict_linear", "holt_winters"),
        *("double_exponential_smoothing", "avg_over_time", "min_over_time", "max_over_time", "sum_over_time"),
        *("quantile_over_time", "stddev_over_time", "last_over_time", "first_over_time", "mad_over_time"),
    }
)
"""Functions of a range that give twice as much for figures twice as large."""
_SQUARE = frozenset({"stdvar_over_time"})
_BLIND = frozenset(
    {
        *("count_over_time", "present_over_time", "absent_over_time", "changes", "resets"),
        *("ts_of_min_over_time", "ts_of_max_over_time", "ts_of_first_over_time", "ts_of_last_over_time"),
    }
)
"""Functions of a range that do not look at how large a figure is."""
_BLIND_TO_ONE = frozenset({"absent", "timestamp", "count", "group"})
"""The same of a vector; `absent` and `timestamp` mean something else of anything but a plain selector."""


@dataclass
class _Work:
    text: str
    direction: Direction
    carriers: frozenset[str]
    edits: list[Edit] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def carries(self, metric: str) -> bool:
        return metric in self.carriers or self.direction.carries(metric)


def rewrite_expression(text: str, direction: Direction, carriers: frozenset[str] = frozenset()) -> Rewritten:
    """`carriers`: recorded metrics that have the exporter's labels. Raises PromqlError for what cannot be read."""
    try:
        return _rewritten(text, direction, carriers)
    except RecursionError:  # operators in a row are a tree as deep as they are many
        raise PromqlError("nested too deep") from None


def _rewritten(text: str, direction: Direction, carriers: frozenset[str]) -> Rewritten:
    tree = parse_promql(text)
    both, alone = asked_for(tree, direction)
    if both:
        said = "under one name only, beside what is asked for under both: rewrite it by hand"
        return Rewritten(text, tuple(f"{name}: {said}" for name in alone), asks_both=not alone)
    work = _Work(text, direction, carriers)
    is_theirs = any(work.carries(name_in(s)) for s in selectors(tree))
    if is_theirs:
        _rewrite(tree, work)
    else:
        _look_for_labels(tree, work)
    if work.left:
        return Rewritten(text, tuple(dict.fromkeys(work.left)), is_theirs=is_theirs)
    edits = tuple(edit for edit in work.edits if edit[0] != edit[1] or edit[2])
    made = edited(text, edits)
    try:
        parse_promql(made)
    except PromqlError as error:
        return Rewritten(text, (f"{_shown(tree, work)}: would be no PromQL: {error}",), is_theirs=is_theirs)
    return Rewritten(made, notes=tuple(dict.fromkeys(work.notes)), edits=edits, is_theirs=is_theirs)


def rewrite_query(text: str, direction: Direction) -> Rewritten:
    """A query of a Grafana variable: label_values(…), query_result(…), metrics(…), or plain PromQL."""
    stripped = text.strip()
    if stripped.startswith("label_names("):
        return Rewritten(text)
    if stripped.startswith("metrics("):
        return Rewritten(text, (f"{stripped}: chooses metrics by a pattern: rewrite it by hand",))
    return rewrite_expression(text, direction)


def edited(text: str, edits: Sequence[Edit]) -> str:
    """Of edits at one place, the later made comes behind: brackets open before what they hold."""
    for start, end, new in sorted(edits, key=lambda e: (e[0], e[1]), reverse=True):
        text = text[:start] + new + text[end:]
    return text


# The tree, from the top


def _rewrite(node: Node, work: _Work) -> None:
    match node:
        case Selector():
            _rewrite_selector(node, work, wrap=node)
        case Call():
            _rewrite_call(node, work)
        case Aggregation():
            for word in node.labels:
                if work.direction.label(word.text) and not _has(node, word.text, work):
                    work.left.append(
                        f"{_shown(node, work)}: has the label {word.text}, and it is not clear whose it is"
                    )
            _rewrite_labels(node.labels, work)
            if NAME in (word.text for word in node.labels) and _renamed_inside(node, work):
                work.left.append(f"{_shown(node, work)}: groups by {NAME}, which is another")
            for argument in node.arguments:
                _rewrite_operand(argument, work, blind=node.function in _BLIND_TO_ONE)
        case Binary():
            _rewrite_binary(node, work)
        case Paren():
            if not _undone(node.of, work, node):
                _rewrite(node.of, work)
        case Subquery() | Unary():
            _rewrite(node.of, work)


def _rewrite_operand(node: Node, work: _Work, *, blind: bool) -> None:
    """One whose size nobody looks at needs no conversion."""
    inner = node
    while isinstance(inner, Paren):
        inner = inner.of
    if blind and isinstance(inner, Selector):
        _rewrite_selector(inner, work, wrap=None)
    else:
        _rewrite(node, work)


def _rewrite_binary(node: Binary, work: _Work) -> None:
    if _undone(node, work, node):
        return
    for word in node.labels:
        if work.direction.label(word.text) and not all(_has(side, word.text, work) for side in (node.left, node.right)):
            work.left.append(f"{_shown(node, work)}: joins by {word.text} with what is not the exporter's")
    _rewrite_labels(node.labels, work)
    _rewrite(node.left, work)
    _rewrite_operand(node.right, work, blind=node.operator in ("and", "unless"))


def _has(node: Node, label: str, work: _Work) -> bool:
    """It is the exporter's label: of its metrics, or put on to be joined with them; or there are no series at all."""
    found = list(selectors(node))
    if not found or any(work.carries(name_in(s)) for s in found):
        return True
    return any(
        isinstance(call, Call) and call.function in LABEL_ARGUMENTS and makes_label(call, label)
        for call in every_node(node)
    )


def _rewrite_call(node: Call, work: _Work) -> None:
    if node.function == LABEL_VALUES:
        _rewrite_label_values(node, work)
        return
    if node.function in LABEL_ARGUMENTS:
        _rewrite_label_arguments(node, work)
    ranges = [a for a in node.arguments if isinstance(a, Selector) and a.is_range]
    for argument in node.arguments:
        if argument not in ranges:
            _rewrite_operand(argument, work, blind=node.function in _BLIND_TO_ONE)
    for selector in ranges:
        _rewrite_range(node, selector, work)


def _rewrite_range(call: Call, selector: Selector, work: _Work) -> None:
    worth = _worth(selector, work)
    name = call.function
    if worth == 1 or name in _BLIND:
        _rewrite_selector(selector, work, wrap=None)
    elif name in _LINEAR:
        _rewrite_selector(selector, work, wrap=call)
    elif name in _SQUARE:
        _rewrite_selector(selector, work, wrap=call, power=2)
    else:
        work.left.append(f"{_shown(call, work)}: a range in another unit, and what {name}() makes of it is not known")


def _rewrite_label_values(node: Call, work: _Work) -> None:
    for series in node.arguments[:-1]:
        _rewrite_operand(series, work, blind=True)
    _rewrite_labels(asked_label(node), work)


def _rewrite_label_arguments(node: Call, work: _Work) -> None:
    one, others = LABEL_ARGUMENTS[node.function]
    last = others + 1 if node.function == "label_replace" else len(node.arguments)
    for number, argument in enumerate(node.arguments):
        if isinstance(argument, Literal) and argument.kind == "string" and (number == one or others <= number < last):
            if unquoted(argument.text) == NAME and _renamed_inside(node, work):
                work.left.append(f"{_shown(node, work)}: works on {NAME}, which is another")
            _rewrite_labels((Word(unquoted(argument.text), argument.start + 1, argument.end - 1),), work)


def _rewrite_labels(words: Sequence[Word], work: _Work) -> None:
    for word in words:
        new = work.direction.label(word.text.strip("\"'`"))
        if new is not None:
            quote = 1 if word.text[:1] in "\"'`" else 0
            work.edits.append((word.start + quote, word.end - quote, new))


# One selector


def _rewrite_selector(node: Selector, work: _Work, wrap: Node | None, power: int = 1) -> None:
    if is_named_by_variable(node):
        work.left.append(_by_variable(node, work))
        return
    for matcher in node.matchers:
        if matcher.label.text == NAME and matcher.operator != "=":
            work.left.append(f"{_shown(node, work)}: chooses metrics by a pattern of names: rewrite it by hand")
            return
    name = name_of(node)
    if node.is_range and wrap is node and name is not None and _worth(node, work) != 1:
        work.left.append(f"{_shown(node, work)}: a range by itself cannot be converted to another unit")
        return
    if name is not None and (renamed := work.direction.metric(name.text)) is not None:
        work.edits.append((name.start, name.end, renamed.name))
        if not renamed.is_default:
            work.notes.append(
                f"{name.text} is none of dcgm-exporter's default counters: call it {renamed.name} in your counter"
                " file too"
            )
        if renamed.is_inferred:
            work.notes.append(f"{renamed.name}: nobody has seen this name yet, it is inferred from the others")
        if wrap is not None and renamed.worth != 1:
            work.edits.append((wrap.start, wrap.start, "("))
            work.edits.append((wrap.end, wrap.end, f"{conversion(renamed.worth**power)})"))
    if name is None or work.carries(name.text):
        _rewrite_labels([m.label for m in node.matchers], work)
    elif work.direction.is_telling and any(work.direction.label(m.label.text) for m in node.matchers):
        work.left.append(f"{_shown(node, work)}: has a label that is the exporter's elsewhere; look whose it is")


def _by_variable(node: Selector, work: _Work) -> str:
    return f"{_shown(node, work)}: the metric's name is a variable of the dashboard's, in whole or in part"


def _worth(node: Selector, work: _Work) -> Fraction:
    renamed = work.direction.metric(name_in(node))
    return Fraction(1) if renamed is None else renamed.worth


def _renamed_inside(node: Node, work: _Work) -> bool:
    return any(work.direction.metric(name_in(s)) for s in selectors(node))


# A conversion that is there already, the other way round


def _undone(node: Node, work: _Work, whole: Node) -> bool:
    """`X * 1000000`, where the new name is in that unit, becomes `Y`; so does what this module itself wrapped."""
    if not isinstance(node, Binary) or node.operator not in "*/" or node.labels:
        return False
    figure, number = node.left, node.right
    if node.operator == "*" and isinstance(figure, Literal):
        figure, number = number, figure
    if not isinstance(number, Literal) or number.kind != "number":
        return False
    selector = _converted(figure)
    factor = value_of(number.text)
    if selector is None or factor is None or selector.is_variable:
        return False
    power = 2 if isinstance(figure, Call) and figure.function in _SQUARE else 1
    worth = _worth(selector, work) ** power
    if worth == 1 or worth * (factor if node.operator == "*" else 1 / factor) != 1:
        return False
    before, after = work.text[whole.start : figure.start], work.text[figure.end : whole.end]
    if "#" in before + after:
        return False
    work.edits.append((whole.start, figure.start, _apart(before, work.text[whole.start - 1 : whole.start])))
    if isinstance(figure, Call):
        for argument in figure.arguments:
            if argument is not selector:
                _rewrite(argument, work)
    _rewrite_selector(selector, work, wrap=None)
    work.edits.append((figure.end, whole.end, _apart(after, work.text[whole.end : whole.end + 1])))
    return True


def _apart(taken: str, neighbour: str) -> str:
    """What stands instead of what is taken away: a blank where a word came right up to it, as in `and(X / 100)`."""
    return " " if taken and (neighbour.isalnum() or neighbour in ("_", ":", "$")) else ""


def _converted(figure: Node) -> Selector | None:
    if isinstance(figure, Selector) and not figure.is_range:
        return figure
    if isinstance(figure, Call) and figure.function in _LINEAR | _SQUARE:
        ranges = [a for a in figure.arguments if isinstance(a, Selector) and a.is_range]
        return ranges[0] if len(ranges) == 1 else None
    return None


# Expressions that read nothing of the exporter's by name


def _look_for_labels(tree: Node, work: _Work) -> None:
    """What another rule or program made of it may have the exporter's labels; that cannot be seen here."""
    for node in every_node(tree):
        words: Sequence[Word] = ()
        if isinstance(node, Aggregation | Binary):
            words = node.labels
        elif isinstance(node, Call):
            words = asked_label(node)
        elif isinstance(node, Selector):
            words = [m.label for m in node.matchers]
            if is_named_by_variable(node):
                work.left.append(_by_variable(node, work))
            if any(m.label.text == NAME and m.operator != "=" and "DCGM" in m.value.text for m in node.matchers):
                work.left.append(f"{_shown(node, work)}: chooses metrics by a pattern of names: rewrite it by hand")
        for word in words:
            if work.direction.is_telling and work.direction.label(word.text):
                work.left.append(f"{_shown(node, work)}: has the label {word.text}, and it is not clear whose it is")


def _shown(node: Node, work: _Work) -> str:
    text = " ".join(work.text[node.start : node.end].split())
    return text if len(text) <= 100 else f"{text[:99]}…"


__all__ = ["Edit", "PromqlError", "Rewritten", "edited", "rewrite_expression", "rewrite_query"]
