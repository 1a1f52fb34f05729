"""Converts a PromQL expression from the names of dcgm-exporter 4.8 to those of 4.9. Its result stays the same.

A metric whose unit changed is converted where it is read: `X` becomes `(Y * 100)`. A range vector cannot be multiplied,
so the result of its function is multiplied. If a part cannot be rewritten, the whole expression stays unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache

from podgpu.metrics.counters import shipped_counters
from podgpu.metrics.names import HOST_LABELS, renames
from podgpu.migrate.promql import (
    LABEL_VALUES,
    NAME,
    Binary,
    Call,
    Node,
    PromqlError,
    VectorSelector,
    Word,
    Wrapped,
    find_selectors,
    is_named_by_variable,
    label_arguments,
    name_of,
    name_word,
    parse_promql,
    requested_label,
    walk,
)

_EXPORTER_METRICS = re.compile(r"(?:DCGM_|dcgm_|podgpu[_:]|ALERTS(?:_FOR_STATE)?$)")
"""Metrics with the exporter's labels: its own metrics, and the results of podgpu's rules."""
_WORDS = re.compile(r"[A-Za-z_:][\w:]*")
_COMPARISONS = frozenset({"==", "!=", "<=", "<", ">=", ">"})
_PERCENT = Fraction(100)
_LINEAR = frozenset(
    {
        *("rate", "irate", "increase", "delta", "idelta", "deriv", "predict_linear", "holt_winters"),
        *("double_exponential_smoothing", "avg_over_time", "min_over_time", "max_over_time", "sum_over_time"),
        *("quantile_over_time", "stddev_over_time", "last_over_time", "first_over_time", "mad_over_time"),
    }
)
"""Range functions whose result is proportional to the values."""
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


@cache
def renamed_metrics() -> Mapping[str, RenamedMetric]:
    """Old name -> new name and unit."""
    default = {counter.name for counter in shipped_counters("default") or ()}
    return {
        name: RenamedMetric(rename.new_name, 1 / Fraction(str(rename.factor)), rename.old.name in default)
        for rename in renames()
        if rename.old.type != "text" and rename.new_name != rename.old.name
        for name in rename.old_names
    }


@cache
def renamed_labels() -> Mapping[str, str]:
    """Old label -> new label."""
    old, new = HOST_LABELS["4.8"][0], HOST_LABELS["4.9"][0]
    return {old: new} | {rename.old.name: rename.new_name for rename in renames() if rename.old.type == "text"}


def find_old_names(text: str) -> list[str]:
    """Finds old names in any text, except `Hostname`, which is too common."""
    words = dict.fromkeys(_WORDS.findall(text))
    return [w for w in words if w in renamed_metrics() or (w in renamed_labels() and w.startswith("DCGM_"))]


def has_exporter_labels(metric: str) -> bool:
    return _EXPORTER_METRICS.match(metric) is not None


# Results


@dataclass(frozen=True, slots=True)
class RewriteResult:
    text: str  # unchanged if a part could not be rewritten
    left: tuple[str, ...] = ()  # messages about parts that could not be rewritten
    notes: tuple[str, ...] = ()
    is_exporter: bool = False  # the expression reads the exporter's series, so legends use its labels


def apply_edits(text: str, edits: Sequence[tuple[int, int, str]]) -> str:
    """Applies edits (start, end, new text). Insertions at the same position keep their order."""
    parts: list[str] = []
    position = 0
    for start, end, new in sorted(edits, key=lambda edit: (edit[0], edit[1])):
        parts += (text[position:start], new)
        position = end
    return "".join((*parts, text[position:]))


# Entry points


def rewrite_expression(text: str, recorded: frozenset[str] = frozenset()) -> RewriteResult:
    """Rewrites an expression. `recorded` are recorded metrics with the exporter's labels. May raise PromqlError."""
    try:
        return _Rewriter(text, recorded).rewrite()
    except RecursionError:  # a long chain of operators is a deep tree
        raise PromqlError("nested too deep") from None


def rewrite_query(text: str) -> RewriteResult:
    """Rewrites the query of a Grafana variable: label_values(…), query_result(…), metrics(…), or PromQL."""
    stripped = text.strip()
    if stripped.startswith("label_names("):
        return RewriteResult(text)
    if stripped.startswith("metrics("):
        return RewriteResult(text, (f"{stripped}: selects metrics by a pattern; rewrite it manually",))
    return rewrite_expression(text)


@dataclass
class _Rewriter:
    text: str
    recorded: frozenset[str]
    is_exporter: bool = False  # the expression reads the exporter's series
    is_compared: bool = False  # the current node is an operand of a comparison
    edits: list[tuple[int, int, str]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def rewrite(self) -> RewriteResult:
        tree = parse_promql(self.text)
        self.is_exporter = any(self._has_labels(name_of(s)) for s in find_selectors(tree))
        self._rewrite(tree)
        if self.left:
            return RewriteResult(self.text, tuple(dict.fromkeys(self.left)), is_exporter=self.is_exporter)
        rewritten, notes = apply_edits(self.text, self.edits), tuple(dict.fromkeys(self.notes))
        return RewriteResult(rewritten, notes=notes, is_exporter=self.is_exporter)

    def _has_labels(self, metric: str) -> bool:
        return metric in self.recorded or has_exporter_labels(metric)

    def _fail(self, node: Node, problem: str) -> None:
        text = " ".join(self.text[node.start : node.end].split())
        self.left.append(f"{text if len(text) <= 100 else f'{text[:99]}…'}: {problem}")

    # The tree

    def _rewrite(self, node: Node, *, unitless: bool = False) -> None:
        """Rewrites a node. If only its labels are used (`unitless`), the values of a selector are not converted."""
        match node:
            case VectorSelector():
                self._rewrite_selector(node, None if unitless else node)
            case Call():
                self._rewrite_call(node)
            case Binary():
                self._rewrite_binary(node)
            case Wrapped():
                self._rewrite(node.of, unitless=unitless)

    def _rewrite_binary(self, node: Binary) -> None:
        self._check_labels(node, node.labels, [node.left, node.right])
        self._rewrite_labels(node.labels)
        was_compared = self.is_compared
        self.is_compared |= node.operator in _COMPARISONS
        self._rewrite(node.left)
        self._rewrite(node.right, unitless=node.operator in ("and", "unless"))
        self.is_compared = was_compared

    def _check_labels(self, node: Node, words: Iterable[Word], operands: Sequence[Node]) -> None:
        """Reports labels that may belong to another exporter, because an operand lacks the exporter's labels."""
        for word in words:
            if word.text in renamed_labels() and not all(self._has_label(o, word.text) for o in operands):
                self._fail(node, f"has the label {word.text}, which may belong to another exporter")

    def _has_label(self, node: Node, label: str) -> bool:
        """Returns True if the label is the exporter's, is set by label_replace or label_join, or no series is read."""
        selectors = list(find_selectors(node))
        if not selectors or any(self._has_labels(name_of(s)) for s in selectors):
            return True
        return any(
            isinstance(call, Call) and label in (word.text for word in label_arguments(call)[:1]) for call in walk(node)
        )

    def _rewrite_call(self, node: Call) -> None:
        if node.function == LABEL_VALUES:
            self._rewrite_label_values(node)
            return
        self._check_labels(node, node.labels, [node])
        labels = (*node.labels, *label_arguments(node))
        if NAME in (word.text for word in labels) and _has_renamed(node):
            self._fail(node, f"uses {NAME}, which the migration changes")
        self._rewrite_labels(labels)
        for argument in node.arguments:
            if not (isinstance(argument, VectorSelector) and argument.is_range):
                self._rewrite(argument, unitless=node.function in _UNITLESS_INSTANT)
                continue
            renamed = renamed_metrics().get(name_of(argument))
            if renamed is None or renamed.factor == 1 or node.function in _UNITLESS:
                self._rewrite_selector(argument, None)
            elif node.function in _LINEAR:
                self._rewrite_selector(argument, node)
            else:
                self._fail(node, f"the unit of the range changes, and its effect on {node.function}() is unknown")

    def _rewrite_label_values(self, node: Call) -> None:
        labels, series = requested_label(node), node.arguments[:-1]
        if not any(self._has_labels(name_of(s)) for argument in series for s in find_selectors(argument)):
            for word in labels:
                if word.text in renamed_labels():
                    self._fail(node, f"has the label {word.text}, which may belong to another exporter")
        self._rewrite_labels(labels)
        for argument in series:
            self._rewrite(argument, unitless=True)

    def _rewrite_labels(self, words: Iterable[Word]) -> None:
        for word in words:
            label = word.text.strip("\"'`")
            if label in renamed_labels():
                quote = 1 if label != word.text else 0
                self.edits.append((word.start + quote, word.end - quote, renamed_labels()[label]))

    def _rewrite_selector(self, node: VectorSelector, convert: Node | None) -> None:
        """Renames the metric. `convert` is the node whose result is converted; None if no conversion is needed."""
        if is_named_by_variable(node):
            self._fail(node, "the metric's name is a dashboard variable, in whole or in part")
            return
        patterns = [m.value.text for m in node.matchers if m.label.text == NAME and m.operator != "="]
        if any(self.is_exporter or "DCGM" in pattern for pattern in patterns):
            self._fail(node, "selects metrics by a pattern of names: rewrite it by hand")
            return
        name = name_word(node)
        renamed = renamed_metrics().get(name.text) if name is not None else None
        if name is not None and renamed is not None:
            if node.is_range and convert is node and renamed.factor != 1:
                self._fail(node, "a range without a function cannot be converted to another unit")
                return
            self._rename(name, renamed)
            if convert is not None and renamed.factor != 1:
                self._convert(convert, renamed.factor)
        if name is not None and self._has_labels(name.text):
            self._rewrite_labels([matcher.label for matcher in node.matchers])
        elif any(matcher.label.text in renamed_labels() for matcher in node.matchers):
            self._fail(node, "has a label name that the exporter also uses; check which exporter sets it")

    def _rename(self, name: Word, renamed: RenamedMetric) -> None:
        self.edits.append((name.start, name.end, renamed.name))
        if not renamed.is_default:
            self.notes.append(
                f"{name.text} is not a default counter of dcgm-exporter: also rename it to {renamed.name} in your"
                " counter file"
            )

    def _convert(self, node: Node, factor: Fraction) -> None:
        """Multiplies or divides the value of a node.

        In comparisons a percentage is rounded, because 0.55 * 100 is larger than 55.
        """
        operator, number = ("*", factor) if factor > 1 else ("/", 1 / factor)
        conversion = f" {operator} {number.numerator if number.denominator == 1 else f'{float(number):.17g}'}"
        rounds = self.is_compared and factor == _PERCENT
        self.edits.append((node.start, node.start, "round(" if rounds else "("))
        self.edits.append((node.end, node.end, f"{conversion}, 0.0001)" if rounds else f"{conversion})"))


def _has_renamed(node: Node) -> bool:
    return any(name_of(selector) in renamed_metrics() for selector in find_selectors(node))
