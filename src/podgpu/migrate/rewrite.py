"""Converts a PromQL expression between the names of dcgm-exporter 4.8 and 4.9. The result of the query stays the same.

A metric whose unit changed is converted where it is read: `X` becomes `(Y * 100)`. A range vector cannot be multiplied,
so the result of its function is multiplied. If a part cannot be rewritten, the whole expression stays unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Literal as OneOf

from podgpu.metrics.counters import shipped_counters
from podgpu.metrics.names import HOST_LABELS, renames
from podgpu.migrate.promql import (
    LABEL_ARGUMENTS,
    LABEL_VALUES,
    NAME,
    Aggregation,
    Binary,
    FunctionCall,
    Literal,
    Node,
    PromqlError,
    VectorSelector,
    Word,
    Wrapped,
    find_labels,
    find_selectors,
    is_named_by_variable,
    name_of,
    name_word,
    parse_promql,
    requested_label,
    unquote,
    walk,
)

Generation = OneOf["4.9", "4.8"]
Edit = tuple[int, int, str]
"""Start, end, and the new text."""
_EXPORTER_METRICS = re.compile(r"(?:DCGM_|dcgm_|podgpu[_:]|ALERTS(?:_FOR_STATE)?$)")
"""Metrics with the exporter's labels: its own metrics, and the results of podgpu's rules."""
_WORDS = re.compile(r"[A-Za-z_:][\w:]*")
_LINEAR = frozenset(
    {
        *("rate", "irate", "increase", "delta", "idelta", "deriv", "predict_linear", "holt_winters"),
        *("double_exponential_smoothing", "avg_over_time", "min_over_time", "max_over_time", "sum_over_time"),
        *("quantile_over_time", "stddev_over_time", "last_over_time", "first_over_time", "mad_over_time"),
    }
)
"""Range functions whose result is proportional to the values."""
_SQUARE = frozenset({"stdvar_over_time"})
_UNITLESS = frozenset(
    {
        *("count_over_time", "present_over_time", "absent_over_time", "changes", "resets"),
        *("ts_of_min_over_time", "ts_of_max_over_time", "ts_of_first_over_time", "ts_of_last_over_time"),
    }
)
"""Range functions whose result does not depend on the unit."""
_UNITLESS_INSTANT = frozenset({"absent", "timestamp", "count", "group"})
"""Functions of instant vectors whose result does not depend on the unit."""


@dataclass(frozen=True, slots=True)
class RenamedMetric:
    name: str
    factor: Fraction  # old value = new value * factor
    is_default: bool  # dcgm-exporter exports it without a custom counter file
    is_inferred: bool  # no release has the new name yet


@dataclass(frozen=True)
class Direction:
    to: Generation

    def metric(self, name: str) -> RenamedMetric | None:
        return _renamed_metrics(self.to).get(name)

    def label(self, name: str) -> str | None:
        return _renamed_labels(self.to).get(name)

    @property
    def has_distinct_labels(self) -> bool:
        """True if other exporters rarely use the old label names (`Hostname`, but not `hostname`)."""
        return self.to == "4.9"

    def report(self, text: str, problem: str) -> RewriteResult | None:
        """Reports old names in a text that cannot be rewritten. Returns None if there are none."""
        names = self.mentions(text)
        return RewriteResult(text, (f"{', '.join(names)}: {problem}",)) if names else None

    def mentions(self, text: str) -> list[str]:
        """Finds old names in any text, except `Hostname`, which is too common."""
        words = dict.fromkeys(_WORDS.findall(text))
        return [w for w in words if self.metric(w) or (self.label(w) and w.startswith("DCGM_"))]


def has_exporter_labels(metric: str) -> bool:
    return _EXPORTER_METRICS.match(metric) is not None


@cache
def _renamed_metrics(to: Generation) -> dict[str, RenamedMetric]:
    default = {counter.name for counter in shipped_counters("default") or ()}
    renamed: dict[str, RenamedMetric] = {}
    for rename in renames():
        if rename.old.type == "text" or rename.new_name == rename.old.name:
            continue
        factor = Fraction(str(rename.factor))
        facts = rename.old.name in default, "infer" in rename.new.seen
        if to == "4.9":
            for name in rename.old_names:
                renamed[name] = RenamedMetric(rename.new_name, 1 / factor, *facts)
        else:
            renamed[rename.new_name] = RenamedMetric(rename.old.name, factor, *facts)
    return renamed


@cache
def _renamed_labels(to: Generation) -> dict[str, str]:
    old, new = HOST_LABELS["4.8"][0], HOST_LABELS["4.9"][0]
    pairs = {old: new} | {r.old.name: r.new_name for r in renames() if r.old.type == "text"}
    return pairs if to == "4.9" else {b: a for a, b in pairs.items()}


# Results


@dataclass(frozen=True, slots=True)
class RewriteResult:
    text: str  # unchanged if a part could not be rewritten
    left: tuple[str, ...] = ()  # messages about parts that could not be rewritten
    notes: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()  # changes by position in the old text
    reads_both: bool = False  # the expression already reads both names and stays unchanged
    is_exporter: bool = False  # the expression reads the exporter's series, so legends use its labels


@dataclass(frozen=True, slots=True)
class FileChange:
    start: int
    end: int
    text: str
    place: str  # position in the file, for messages
    result: RewriteResult


@dataclass(frozen=True, slots=True)
class MigratedFile:
    text: str
    changed: int = 0  # number of rewritten parts
    left: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def apply_changes(text: str, changes: Sequence[FileChange]) -> MigratedFile:
    parts: list[str] = []
    position = changed = 0
    for change in sorted(changes, key=lambda c: c.start):
        changed += text[change.start : change.end] != change.text
        parts += (text[position : change.start], change.text)
        position = change.end
    return MigratedFile(
        "".join((*parts, text[position:])),
        changed,
        tuple(f"{c.place}: {message}" for c in changes for message in c.result.left),
        tuple(f"{c.place}: {message}" for c in changes for message in c.result.notes),
    )


def apply_edits(text: str, edits: Sequence[Edit]) -> str:
    """Applies edits by position. Insertions at the same position keep their order."""
    for start, end, new in sorted(edits, key=lambda e: (e[0], e[1]), reverse=True):
        text = text[:start] + new + text[end:]
    return text


# Entry points


def rewrite_expression(text: str, direction: Direction, recorded: frozenset[str] = frozenset()) -> RewriteResult:
    """Rewrites an expression. `recorded` are recorded metrics with the exporter's labels. Raises PromqlError."""
    try:
        return _Rewriter(text, direction, recorded).rewrite()
    except RecursionError:  # a long chain of operators is a deep tree
        raise PromqlError("nested too deep") from None


def rewrite_query(text: str, direction: Direction) -> RewriteResult:
    """Rewrites the query of a Grafana variable: label_values(…), query_result(…), metrics(…), or PromQL."""
    stripped = text.strip()
    if stripped.startswith("label_names("):
        return RewriteResult(text)
    if stripped.startswith("metrics("):
        return RewriteResult(text, (f"{stripped}: selects metrics by a pattern; rewrite it manually",))
    return rewrite_expression(text, direction)


@dataclass
class _Rewriter:
    text: str
    direction: Direction
    recorded: frozenset[str]
    edits: list[Edit] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def rewrite(self) -> RewriteResult:
        tree = parse_promql(self.text)
        reads_both, single = self._compare_names(tree)
        if reads_both:
            problem = "only this name is read, while other parts read old and new names; rewrite it manually"
            return RewriteResult(self.text, tuple(f"{name}: {problem}" for name in single), reads_both=not single)
        is_exporter = any(self._has_labels(name_of(s)) for s in find_selectors(tree))
        if is_exporter:
            self._rewrite(tree)
        else:
            self._check_labels(tree)
        if self.left:
            return RewriteResult(self.text, tuple(dict.fromkeys(self.left)), is_exporter=is_exporter)
        edits = tuple(edit for edit in self.edits if edit[0] != edit[1] or edit[2])
        rewritten = apply_edits(self.text, edits)
        try:
            parse_promql(rewritten)
        except PromqlError as error:
            problem = f"{self._show(tree)}: rewriting it would give invalid PromQL ({error})"
            return RewriteResult(self.text, (problem,), is_exporter=is_exporter)
        notes = tuple(dict.fromkeys(self.notes))
        return RewriteResult(rewritten, notes=notes, edits=edits, is_exporter=is_exporter)

    def _compare_names(self, tree: Node) -> tuple[bool, list[str]]:
        """Returns whether any old name is read together with its new name, and the old names without their new name."""
        metrics = dict.fromkeys(map(name_of, find_selectors(tree)))
        labels = dict.fromkeys(find_labels(tree))
        has_new = {name: new.name in metrics for name in metrics if (new := self.direction.metric(name)) is not None}
        has_new |= {label: name in labels for label in labels if (name := self.direction.label(label)) is not None}
        return any(has_new.values()), [name for name, has in has_new.items() if not has]

    def _has_labels(self, metric: str) -> bool:
        return metric in self.recorded or has_exporter_labels(metric)

    def _fail(self, node: Node, problem: str) -> None:
        self.left.append(f"{self._show(node)}: {problem}")

    def _show(self, node: Node) -> str:
        text = " ".join(self.text[node.start : node.end].split())
        return text if len(text) <= 100 else f"{text[:99]}…"

    # The tree

    def _rewrite(self, node: Node) -> None:
        match node:
            case VectorSelector():
                self._rewrite_selector(node, wrap=node)
            case FunctionCall():
                self._rewrite_call(node)
            case Aggregation():
                self._rewrite_aggregation(node)
            case Binary():
                self._rewrite_binary(node)
            case Wrapped():
                if not (node.is_paren and self._remove_conversion(node.of, node)):
                    self._rewrite(node.of)

    def _rewrite_aggregation(self, node: Aggregation) -> None:
        for word in node.labels:
            if self.direction.label(word.text) and not self._has_exporter_label(node, word.text):
                self._fail(node, f"has the label {word.text}, which may belong to another exporter")
        self._rewrite_labels(node.labels)
        if NAME in (word.text for word in node.labels) and self._has_renamed(node):
            self._fail(node, f"groups by {NAME}, which the migration changes")
        for argument in node.arguments:
            self._rewrite_operand(argument, unitless=node.function in _UNITLESS_INSTANT)

    def _rewrite_operand(self, node: Node, *, unitless: bool) -> None:
        """Rewrites an operand. If only its labels are used (`unitless`), its values are not converted."""
        inner = node
        while isinstance(inner, Wrapped) and inner.is_paren:
            inner = inner.of
        if unitless and isinstance(inner, VectorSelector):
            self._rewrite_selector(inner, wrap=None)
        else:
            self._rewrite(node)

    def _rewrite_binary(self, node: Binary) -> None:
        if self._remove_conversion(node, node):
            return
        for word in node.labels:
            sides = (node.left, node.right)
            if self.direction.label(word.text) and not all(self._has_exporter_label(s, word.text) for s in sides):
                self._fail(node, f"joins on {word.text} with metrics of another exporter")
        self._rewrite_labels(node.labels)
        self._rewrite(node.left)
        self._rewrite_operand(node.right, unitless=node.operator in ("and", "unless"))

    def _has_exporter_label(self, node: Node, label: str) -> bool:
        """Returns True if the label is the exporter's, is set by label_replace or label_join, or no series is read."""
        selectors = list(find_selectors(node))
        if not selectors or any(self._has_labels(name_of(s)) for s in selectors):
            return True
        return any(isinstance(call, FunctionCall) and _sets_label(call, label) for call in walk(node))

    def _rewrite_call(self, node: FunctionCall) -> None:
        if node.function == LABEL_VALUES:
            for series in node.arguments[:-1]:
                self._rewrite_operand(series, unitless=True)
            self._rewrite_labels(requested_label(node))
            return
        if node.function in LABEL_ARGUMENTS:
            self._rewrite_label_arguments(node)
        for argument in node.arguments:
            if not (isinstance(argument, VectorSelector) and argument.is_range):
                self._rewrite_operand(argument, unitless=node.function in _UNITLESS_INSTANT)
        for selector in _ranges(node):
            if self._factor(selector) == 1 or node.function in _UNITLESS:
                self._rewrite_selector(selector, wrap=None)
            elif node.function in _LINEAR | _SQUARE:
                self._rewrite_selector(selector, wrap=node, power=2 if node.function in _SQUARE else 1)
            else:
                self._fail(node, f"the unit of the range changes, and its effect on {node.function}() is unknown")

    def _rewrite_label_arguments(self, node: FunctionCall) -> None:
        target, sources = LABEL_ARGUMENTS[node.function]
        last = sources + 1 if node.function == "label_replace" else len(node.arguments)
        for number, argument in enumerate(node.arguments):
            is_label = number == target or sources <= number < last
            if is_label and isinstance(argument, Literal) and argument.kind == "string":
                if unquote(argument.text) == NAME and self._has_renamed(node):
                    self._fail(node, f"uses {NAME}, which the migration changes")
                self._rewrite_labels((Word(unquote(argument.text), argument.start + 1, argument.end - 1),))

    def _rewrite_labels(self, words: Sequence[Word]) -> None:
        for word in words:
            new = self.direction.label(word.text.strip("\"'`"))
            if new is not None:
                quote = 1 if word.text[:1] in "\"'`" else 0
                self.edits.append((word.start + quote, word.end - quote, new))

    def _rewrite_selector(self, node: VectorSelector, wrap: Node | None, power: int = 1) -> None:
        """Renames the metric. `wrap` is the node whose result is converted; None if no conversion is needed."""
        if is_named_by_variable(node):
            self._fail(node, "the metric's name is a dashboard variable, in whole or in part")
            return
        if any(matcher.label.text == NAME and matcher.operator != "=" for matcher in node.matchers):
            self._fail(node, "selects metrics by a pattern of names: rewrite it by hand")
            return
        name = name_word(node)
        if node.is_range and wrap is node and name is not None and self._factor(node) != 1:
            self._fail(node, "a range without a function cannot be converted to another unit")
            return
        if name is not None and (renamed := self.direction.metric(name.text)) is not None:
            self._rename(name, renamed)
            if wrap is not None and renamed.factor != 1:
                self.edits.append((wrap.start, wrap.start, "("))
                self.edits.append((wrap.end, wrap.end, f"{_format_factor(renamed.factor**power)})"))
        if name is None or self._has_labels(name.text):
            self._rewrite_labels([m.label for m in node.matchers])
        elif self.direction.has_distinct_labels and any(self.direction.label(m.label.text) for m in node.matchers):
            self._fail(node, "has a label name that the exporter also uses; check which exporter sets it")

    def _rename(self, name: Word, renamed: RenamedMetric) -> None:
        self.edits.append((name.start, name.end, renamed.name))
        if not renamed.is_default:
            self.notes.append(
                f"{name.text} is not a default counter of dcgm-exporter: also rename it to {renamed.name} in your"
                " counter file"
            )
        if renamed.is_inferred:
            self.notes.append(f"{renamed.name}: this name is inferred; no release has it yet")

    def _factor(self, node: VectorSelector) -> Fraction:
        renamed = self.direction.metric(name_of(node))
        return Fraction(1) if renamed is None else renamed.factor

    def _has_renamed(self, node: Node) -> bool:
        return any(self.direction.metric(name_of(s)) for s in find_selectors(node))

    def _remove_conversion(self, node: Node, whole: Node) -> bool:
        """Rewrites `OLD * 1000000` to `NEW` if the renamed metric is already in the converted unit.

        This also reverts conversions added by this module.
        """
        if not isinstance(node, Binary) or node.operator not in "*/" or node.labels:
            return False
        operand, number = node.left, node.right
        if node.operator == "*" and isinstance(operand, Literal):
            operand, number = number, operand
        if not isinstance(number, Literal) or number.kind != "number":
            return False
        selector, value = _converted_selector(operand), _parse_number(number.text)
        if selector is None or value is None or selector.is_variable:
            return False
        factor = self._factor(selector) ** (
            2 if isinstance(operand, FunctionCall) and operand.function in _SQUARE else 1
        )
        if factor == 1 or factor * (value if node.operator == "*" else 1 / value) != 1:
            return False
        before, after = self.text[whole.start : operand.start], self.text[operand.end : whole.end]
        if "#" in before + after:
            return False
        self.edits.append((whole.start, operand.start, _separator(before, self.text[whole.start - 1 : whole.start])))
        if isinstance(operand, FunctionCall):
            for argument in operand.arguments:
                if argument is not selector:
                    self._rewrite(argument)
        self._rewrite_selector(selector, wrap=None)
        self.edits.append((operand.end, whole.end, _separator(after, self.text[whole.end : whole.end + 1])))
        return True

    def _check_labels(self, tree: Node) -> None:
        """Reports old labels in an expression without the exporter's metrics, because a rule may have copied them."""
        for node in walk(tree):
            words: Sequence[Word] = ()
            if isinstance(node, Aggregation | Binary):
                words = node.labels
            elif isinstance(node, FunctionCall):
                words = requested_label(node)
            elif isinstance(node, VectorSelector):
                words = [m.label for m in node.matchers]
                if is_named_by_variable(node):
                    self._fail(node, "the metric's name is a dashboard variable, in whole or in part")
                if any(m.label.text == NAME and m.operator != "=" and "DCGM" in m.value.text for m in node.matchers):
                    self._fail(node, "selects metrics by a pattern of names: rewrite it by hand")
            for word in words:
                if self.direction.has_distinct_labels and self.direction.label(word.text):
                    self._fail(node, f"has the label {word.text}, which may belong to another exporter")


def _ranges(call: FunctionCall) -> list[VectorSelector]:
    return [a for a in call.arguments if isinstance(a, VectorSelector) and a.is_range]


def _sets_label(call: FunctionCall, label: str) -> bool:
    target = call.arguments[1] if call.function in LABEL_ARGUMENTS and len(call.arguments) > 1 else call
    return isinstance(target, Literal) and target.kind == "string" and unquote(target.text) == label


def _converted_selector(operand: Node) -> VectorSelector | None:
    if isinstance(operand, VectorSelector) and not operand.is_range:
        return operand
    if isinstance(operand, FunctionCall) and operand.function in _LINEAR | _SQUARE:
        ranges = _ranges(operand)
        return ranges[0] if len(ranges) == 1 else None
    return None


def _parse_number(text: str) -> Fraction | None:
    """Parses a conversion factor. Returns None for zero, infinite, hexadecimal or huge numbers."""
    try:
        is_plausible = len(text) <= 40 and 1e-30 < abs(float(text)) < 1e30
    except ValueError:
        return None
    return Fraction(text.replace("_", "")) if is_plausible else None


def _format_factor(factor: Fraction) -> str:
    """Returns text such as ` * 100` or ` / 1048576`, or an empty text for 1."""
    if factor == 1:
        return ""
    operator, number = ("*", factor) if factor > 1 else ("/", 1 / factor)
    return f" {operator} {number.numerator if number.denominator == 1 else f'{float(number):.17g}'}"


def _separator(removed: str, neighbour: str) -> str:
    """Returns a space if the removed text separated two words, as in `and(X / 100)`."""
    return " " if removed and (neighbour.isalnum() or neighbour in ("_", ":", "$")) else ""
