"""Converts a PromQL expression from the names of dcgm-exporter 4.8 to those of 4.9.

The result of the expression stays the same. If the unit of a metric changed, the expression
converts the value: `X` becomes `(Y * 100)`. A range vector cannot be multiplied, so `rate(X[5m])`
becomes `(rate(Y[5m]) * 100)`. Grafana variables are accepted. If a part of the expression cannot be
converted, the whole expression stays unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import NamedTuple, TypeVar

from podgpu.errors import PodgpuError
from podgpu.metrics.counters import shipped_counters
from podgpu.metrics.fields import HOST_LABELS, renames

_Item = TypeVar("_Item")
_NAME = "__name__"
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
    | (?P<unknown> .{{1,20}} )
    """,
    re.VERBOSE | re.DOTALL,
)
_COMPARISONS = frozenset({"==", "!=", "<=", "<", ">=", ">"})
_NEED_EXACT = _COMPARISONS | {"%"}
_PRECEDENCE = {
    "or": 0,
    "and": 1,
    "unless": 1,
    **dict.fromkeys(_COMPARISONS, 2),
    "+": 3,
    "-": 3,
    "*": 4,
    "/": 4,
    "%": 4,
    "atan2": 4,
    "^": 5,
}
"""Precedence of binary operators.

All are parsed as left-associative, because values are not computed.
"""
_EXPORTER_METRICS = re.compile(r"(?:DCGM_|dcgm_|podgpu[_:]|ALERTS(?:_FOR_STATE)?$)")
"""Matches metrics that have the exporter's labels.

These are the metrics of the exporter, and those that podgpu's rules record.
"""
_WORDS = re.compile(r"[A-Za-z_:][\w:]*")
_STEPS = frozenset({"count_values", "floor", "ceil", "round", "sgn"})
"""Functions whose result jumps: they must not get a value with a rounding error."""
_LINEAR = frozenset(
    {
        "rate",
        "irate",
        "increase",
        "delta",
        "idelta",
        "deriv",
        "predict_linear",
        "holt_winters",
        "double_exponential_smoothing",
        "avg_over_time",
        "min_over_time",
        "max_over_time",
        "sum_over_time",
        "quantile_over_time",
        "stddev_over_time",
        "last_over_time",
        "first_over_time",
        "mad_over_time",
    }
)
"""Range functions whose result scales with the values.

So the result can be converted instead of the range.
"""
_UNITLESS = frozenset(
    {
        "count_over_time",
        "present_over_time",
        "absent_over_time",
        "changes",
        "resets",
        "ts_of_min_over_time",
        "ts_of_max_over_time",
        "ts_of_first_over_time",
        "ts_of_last_over_time",
        "absent",
        "timestamp",
        "count",
        "group",
    }
)
"""Functions whose result does not depend on the unit."""


class PromqlError(PodgpuError):
    """The text is not PromQL that podgpu can parse."""


class RenamedMetric(NamedTuple):
    name: str
    factor: Fraction  # old value = new value * factor
    is_default: bool  # True if dcgm-exporter exports the metric by default


@cache
def renamed_metrics() -> Mapping[str, RenamedMetric]:
    """Returns old metric name -> new metric."""
    default = {counter.name for counter in shipped_counters("default") or ()}
    metrics: dict[str, RenamedMetric] = {}
    for rename in renames():
        old = rename.old
        # Fields that are texts are labels, see `renamed_labels`.
        if old.type == "text" or old.name == rename.new_name:
            continue
        factor = 1 / Fraction(str(rename.factor))
        for name in rename.old_names:
            metrics[name] = RenamedMetric(rename.new_name, factor, old.name in default)

    return metrics


@cache
def renamed_labels() -> Mapping[str, str]:
    """Returns old label name -> new label name."""
    labels = {HOST_LABELS["4.8"][0]: HOST_LABELS["4.9"][0]}
    for rename in renames():
        if rename.old.type == "text":
            labels[rename.old.name] = rename.new_name
    return labels


def find_old_names(text: str) -> list[str]:
    """Returns the old metric and label names in a text.

    Skips the label `Hostname`, because the word is too common.
    """
    old_names = []
    for word in dict.fromkeys(_WORDS.findall(text)):
        is_label = word in renamed_labels() and word.startswith("DCGM_")
        if is_label or word in renamed_metrics():
            old_names.append(word)
    return old_names


@dataclass(frozen=True, slots=True)
class RewriteResult:
    text: str
    # Messages about text that was not converted and needs a manual change.
    unconverted: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    # True if the expression reads the exporter's series, whose labels were renamed.
    reads_exporter: bool = False
    changed: int = 0  # number of rewritten strings


def rewrite_query(text: str, recorded: frozenset[str] = frozenset()) -> RewriteResult:
    """Rewrites a PromQL expression, or a query function of Grafana such as label_values(…).

    Metrics in `recorded` have the exporter's labels. Raises PromqlError if parsing fails.
    """
    if text.lstrip().startswith("metrics("):
        problem = f"{text.strip()}: selects metrics by a pattern; rewrite it manually"
        return RewriteResult(text, (problem,))

    rewriter = _Rewriter(text, recorded, _tokenize(text))
    try:
        reads_exporter = rewriter.parse()
    except RecursionError:
        raise PromqlError("nested too deep") from None

    if rewriter.unconverted:
        problems = tuple(dict.fromkeys(rewriter.unconverted))
        return RewriteResult(text, problems, reads_exporter=reads_exporter)

    new = apply_edits(text, rewriter.edits)
    return RewriteResult(
        new,
        notes=tuple(dict.fromkeys(rewriter.notes)),
        reads_exporter=reads_exporter,
        changed=int(new != text),
    )


class Edit(NamedTuple):
    """Replaces the characters from `start` to `end`."""

    start: int
    end: int
    text: str


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """Applies edits, which must not overlap. Insertions at one position keep their order."""
    parts: list[str] = []
    position = 0
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        parts += (text[position : edit.start], edit.text)
        position = edit.end
    return "".join(parts) + text[position:]


class _Token(NamedTuple):
    text: str
    start: int
    end: int
    kind: str  # group of _TOKEN, or `end`

    def unquote(self) -> _Token:
        """Removes the quotes of a string. Escapes stay, because names contain none."""
        if self.kind != "string":
            return self
        name = self.text[1:-1]
        return _Token(name, self.start + 1, self.end - 1, "")


_Matcher = tuple[_Token, str, _Token]  # label, operator, value


def _tokenize(text: str) -> list[_Token]:
    tokens = []
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or ""
        if kind == "unknown":
            raise PromqlError(f"cannot parse {match[0]!a} at character {match.start() + 1}")
        if kind != "space":
            tokens.append(_Token(match[0], match.start(), match.end(), kind))

    tokens.append(_Token("", len(text), len(text), "end"))
    return tokens


@dataclass(slots=True)
class _Expression:
    start: int
    end: int
    # First token of a string, number or selector; None for other expressions.
    token: _Token | None = None
    metrics: tuple[str, ...] = ()  # metric names in the subexpression's selectors
    set_labels: tuple[str, ...] = ()  # labels that label_replace and label_join set
    factor: Fraction = Fraction(1)  # unit conversion that the enclosing expression must apply
    is_range: bool = False
    is_exact: bool = False  # True if a rounding error of the value could change the result


class _QuotedLabels(NamedTuple):
    """Arguments that are names of labels, without their quotes."""

    targets: list[_Token]  # labels that the function sets
    sources: list[_Token]  # labels that it reads


def _find_quoted_labels(function: str, arguments: Sequence[_Expression]) -> _QuotedLabels:
    targets: Sequence[_Expression] = ()
    sources: Sequence[_Expression] = ()
    if function == "label_replace":
        # label_replace(vector, target, replacement, source, pattern)
        targets = arguments[1:2]
        sources = arguments[3:4]
    elif function == "label_join":
        # label_join(vector, target, separator, source, …)
        targets = arguments[1:2]
        sources = arguments[3:]
    elif function in ("sort_by_label", "sort_by_label_desc"):
        sources = arguments[1:]
    return _QuotedLabels(_unquote_all(targets), _unquote_all(sources))


def _unquote_all(arguments: Iterable[_Expression]) -> list[_Token]:
    return [argument.token.unquote() for argument in arguments if argument.token]


def _find_name(
    name: _Token | None, matchers: Iterable[_Matcher]
) -> tuple[_Token | None, list[str]]:
    """Returns the metric that the matchers name, and the patterns of further names."""
    patterns = []
    for label, operator, value in matchers:
        if label.text != _NAME:
            continue
        if operator == "=" and name is None:
            name = value.unquote()
        else:
            patterns.append(value.text)
    return name, patterns


def _join(start: int, end: int, parts: Iterable[_Expression]) -> _Expression:
    joined = _Expression(start, end)
    for part in parts:
        joined.metrics += part.metrics
        joined.set_labels += part.set_labels
    return joined


@dataclass
class _Rewriter:
    text: str
    recorded: frozenset[str]
    tokens: Sequence[_Token]
    position: int = 0
    edits: list[Edit] = field(default_factory=list)
    unconverted: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # Expressions whose values change their unit.
    conversions: list[_Expression] = field(default_factory=list)
    # Selectors that match the names of metrics by a regular expression, and this expression.
    patterns: list[tuple[_Expression, str]] = field(default_factory=list)

    def parse(self) -> bool:
        """Parses the expression and collects the edits.

        Returns True if the expression reads the exporter's series.
        """
        whole = self._parse_binary()
        self._request_conversion(whole)
        if self.next.kind != "end":
            raise _unexpected(self.next, "an operator or the end")

        for part in self.conversions:
            self._convert(part)

        reads_exporter = self._reads_exporter(whole)
        for selector, pattern in self.patterns:
            if reads_exporter or "DCGM" in pattern:
                self._fail(selector, "selects metrics by a pattern of names; rewrite it manually")

        return reads_exporter

    @property
    def next(self) -> _Token:
        return self.tokens[self.position]

    @property
    def _last_end(self) -> int:
        return self.tokens[self.position - 1].end

    def _take(self) -> _Token:
        token = self.next
        if token.kind != "end":
            self.position += 1
        return token

    def _take_kind(self, expected: str, *kinds: str) -> _Token:
        token = self._take()
        if token.kind not in kinds:
            raise _unexpected(token, expected)
        return token

    def _is_next(self, *texts: str) -> bool:
        if self.next.kind not in ("operator", "name"):
            return False
        return self.next.text.lower() in texts

    def _accept(self, *texts: str) -> bool:
        is_next = self._is_next(*texts)
        if is_next:
            self.position += 1
        return is_next

    def _expect(self, text: str) -> None:
        token = self._take()
        if token.text != text or token.kind != "operator":
            raise _unexpected(token, repr(text))

    def _fail(self, part: _Expression, problem: str) -> None:
        words = self.text[part.start : part.end].split()
        text = " ".join(words)
        if len(text) > 100:
            text = f"{text[:99]}…"
        self.unconverted.append(f"{text}: {problem}")

    def _parse_binary(self, level: int = 0) -> _Expression:
        """Parses operands and binary operators of at least this precedence."""
        left = self._parse_signed()
        while self._is_next(*_PRECEDENCE) and _PRECEDENCE[self.next.text.lower()] >= level:
            operator = self._take().text.lower()
            self._accept("bool")
            labels = self._accept_labels("on", "ignoring")
            if self._accept("group_left", "group_right") and self._is_next("("):
                labels += self._parse_labels()
            right = self._parse_binary(_PRECEDENCE[operator] + 1)
            left = self._combine(left, operator, labels, right)

        return left

    def _combine(
        self, left: _Expression, operator: str, labels: Iterable[_Token], right: _Expression
    ) -> _Expression:
        self._request_conversion(left)
        self._request_conversion(right)
        both = _join(left.start, right.end, (left, right))
        self._rename_labels(both, labels, operands=(left, right))
        if operator in _NEED_EXACT:
            self._require_exact(both)
        return both

    def _require_exact(self, whole: _Expression) -> None:
        """Marks the conversions inside an expression that was just parsed."""
        for part in self.conversions:
            if part.start >= whole.start:
                part.is_exact = True

    def _parse_signed(self) -> _Expression:
        start = self.next.start
        if not self._accept("+", "-"):
            return self._parse_modifiers(self._parse_primary())
        part = self._parse_signed()
        self._request_conversion(part)
        return _join(start, part.end, (part,))

    def _parse_modifiers(self, part: _Expression) -> _Expression:
        """Parses [range], [range:step], offset and @, in any order."""
        while True:
            if self._accept("["):
                if self._parse_range():
                    # The operand of a subquery is a vector, so it can be converted itself.
                    self._request_conversion(part)
                    part = _join(part.start, part.end, (part,))
                part.is_range = True
            elif self._accept("offset"):
                self._accept("-")
                self._take_kind("a duration", "duration", "number", "variable")
            elif self._accept("@"):
                self._parse_time()
            else:
                return part

            part.end = self._last_end

    def _parse_range(self) -> bool:
        """Parses a range after the opening bracket. Returns True if it is a subquery."""
        is_subquery = False
        while not self._is_next("]"):
            if not self._is_next(":", "+", "-", "*", "/"):
                self._take_kind("']'", "duration", "number", "variable")
            elif self._take().text == ":":
                is_subquery = True

        self._expect("]")
        return is_subquery

    def _parse_time(self) -> None:
        self._accept("-")
        if self._accept("start", "end"):
            self._expect("(")
            self._expect(")")
        else:
            self._take_kind("a time", "number", "variable")

    def _parse_primary(self) -> _Expression:
        token = self._take()
        if token.kind in ("number", "duration", "string"):
            return _Expression(token.start, token.end, token)

        if token.kind == "operator" and token.text == "(":
            part = self._parse_binary()
            self._expect(")")
            part.start = token.start
            part.end = self._last_end
            return part

        if token.kind == "operator" and token.text == "{":
            return self._parse_selector(token, None)
        if token.kind == "name" and self._is_next("(", "by", "without"):
            return self._parse_call(token)
        if token.kind == "name" and token.text.lower() in ("inf", "nan"):
            return _Expression(token.start, token.end)
        if token.kind not in ("name", "variable"):
            raise _unexpected(token, "an expression")

        return self._parse_selector(token, token)

    def _parse_call(self, token: _Token) -> _Expression:
        function = token.text.lower()
        labels = self._accept_labels("by", "without")
        self._expect("(")
        arguments = list(self._parse_list(")", self._parse_binary))
        labels += self._accept_labels("by", "without")
        call = _join(token.start, self._last_end, arguments)

        if function == "label_values":
            self._rename_queried_label(call, arguments)
            return call
        if function not in _UNITLESS:
            for argument in arguments:
                self._convert_argument(call, function, argument)

        if function in _STEPS:
            self._require_exact(call)

        quoted = _find_quoted_labels(function, arguments)
        call.set_labels += tuple(label.text for label in quoted.targets)

        self._rename_labels(call, labels, operands=(call,))
        # A label that the function sets belongs to no exporter.
        self._rename_labels(call, quoted.targets, operands=())
        self._rename_labels(call, quoted.sources, operands=arguments[:1])

        used = [word.unquote().text for word in labels + quoted.targets + quoted.sources]
        is_renamed = any(metric in renamed_metrics() for metric in call.metrics)
        if _NAME in used and is_renamed:
            self._fail(call, f"uses {_NAME}, which the migration changes")

        return call

    def _rename_queried_label(self, call: _Expression, arguments: Sequence[_Expression]) -> None:
        """Renames the label in label_values(label) or label_values(selector, label)."""
        words = [argument.token for argument in arguments[-1:] if argument.token]
        # label_values(label) has no selector and reads all series.
        all_series = _Expression(call.start, call.end, metrics=("",))
        self._rename_labels(call, words, operands=arguments[:-1] or [all_series])

    def _convert_argument(self, call: _Expression, function: str, argument: _Expression) -> None:
        if not argument.is_range:
            self._request_conversion(argument)
        elif argument.factor == 1 or function in _LINEAR:
            call.factor = argument.factor
        else:
            problem = f"the unit of the range changes, and its effect on {function}() is unknown"
            self._fail(call, problem)

    def _accept_labels(self, *keywords: str) -> list[_Token]:
        """Parses a keyword and its labels, such as `by (pod)`. Returns no labels without it."""
        if not self._accept(*keywords):
            return []
        return self._parse_labels()

    def _parse_labels(self) -> list[_Token]:
        self._expect("(")
        return list(self._parse_list(")", self._take_label))

    def _take_label(self) -> _Token:
        return self._take_kind("a label", "name", "variable", "string")

    def _parse_list(self, end: str, parse: Callable[[], _Item]) -> Iterator[_Item]:
        while not self._is_next(end):
            yield parse()
            if not self._accept(","):
                break
        self._expect(end)

    def _rename_labels(
        self, part: _Expression, words: Iterable[_Token], operands: Iterable[_Expression]
    ) -> None:
        """Renames labels.

        Reports a label if an operand reads metrics that may come from another exporter.
        """
        for word in words:
            label = word.unquote()
            new = renamed_labels().get(label.text)
            if new is None:
                continue

            self.edits.append(Edit(label.start, label.end, new))
            if any(self._may_be_foreign(label.text, operand) for operand in operands):
                problem = f"has the label {label.text}, which may belong to another exporter"
                self._fail(part, problem)

    def _may_be_foreign(self, label: str, operand: _Expression) -> bool:
        if not operand.metrics or label in operand.set_labels:
            return False
        return not self._reads_exporter(operand)

    def _reads_exporter(self, part: _Expression) -> bool:
        for metric in part.metrics:
            if metric in self.recorded or _EXPORTER_METRICS.match(metric):
                return True
        return False

    def _parse_selector(self, first: _Token, name: _Token | None) -> _Expression:
        """Parses `name`, `name{…}` or `{…}`. The range is parsed later."""
        matchers = []
        if name is None or self._accept("{"):
            matchers = list(self._parse_list("}", self._parse_matcher))

        labels = [label for label, _, _ in matchers]
        name, patterns = _find_name(name, matchers)
        metric = name.text if name else ""
        part = _Expression(first.start, self._last_end, first, (metric,))
        # A text that consists only of a variable may be a number.
        may_be_number = _VARIABLE.fullmatch(metric) and not labels and not self._is_next("[")
        if _VARIABLE.search(metric) and not may_be_number:
            self._fail(part, "the metric's name is or contains a dashboard variable")

        self.patterns += [(part, pattern) for pattern in patterns]
        if name:
            self._rename_metric(part, name)

        self._rename_labels(part, labels, operands=(part,))
        return part

    def _parse_matcher(self) -> _Matcher:
        """Parses the label, operator and value of one matcher in a selector."""
        label = self._take_label()
        if label.kind == "string" and self._is_next(",", "}"):
            # {"metric"} is short for {__name__="metric"}
            return label._replace(text=_NAME, kind="name"), "=", label

        operator = self._take()
        if operator.text not in ("=", "!=", "=~", "!~"):
            raise _unexpected(operator, "one of = != =~ !~")

        value = self._take_kind("a string", "string", "variable")
        return label, operator.text, value

    def _rename_metric(self, selector: _Expression, name: _Token) -> None:
        renamed = renamed_metrics().get(name.text)
        if renamed is None:
            return

        self.edits.append(Edit(name.start, name.end, renamed.name))
        selector.factor = renamed.factor
        if not renamed.is_default:
            self.notes.append(
                f"{name.text} is not a default counter of dcgm-exporter: "
                f"also rename it to {renamed.name} in your counter file"
            )

    def _request_conversion(self, part: _Expression) -> None:
        if part.factor == 1:
            return
        if part.is_range:
            self._fail(part, "a range without a function cannot be converted to another unit")
        else:
            self.conversions.append(part)

    def _convert(self, part: _Expression) -> None:
        """Adds edits that convert the value.

        Rounds products that must be exact, because 0.55 * 100 exceeds 55.
        """
        opening = "("
        if part.factor < 1:
            conversion = f" / {1 / part.factor}"
        elif part.is_exact:
            opening = "round("
            conversion = f" * {part.factor}, 0.0001"
        else:
            conversion = f" * {part.factor}"

        self.edits.append(Edit(part.start, part.start, opening))
        self.edits.append(Edit(part.end, part.end, f"{conversion})"))


def _unexpected(token: _Token, expected: str) -> PromqlError:
    actual = "the end"
    if token.kind != "end":
        actual = f"{token.text[:40]!a} at character {token.start + 1}"
    return PromqlError(f"expected {expected}, but got {actual}")
