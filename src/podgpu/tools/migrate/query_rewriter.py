"""Converts a PromQL expression from the names of dcgm-exporter 4.8 to those of 4.9, without
changing its result.

If the unit of a metric changed, the expression converts the value: `X` becomes `(Y * 100)`. A range
vector cannot be multiplied, so `rate(X[5m])` becomes `(rate(Y[5m]) * 100)`. Grafana variables are
accepted. If a part of the expression cannot be converted, the whole expression stays unchanged.
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
_COMPARISONS = ("==", "!=", "<=", "<", ">=", ">")
_PRECEDENCE = {
    "or": 0,
    **dict.fromkeys(("and", "unless"), 1),
    **dict.fromkeys(_COMPARISONS, 2),
    **dict.fromkeys(("+", "-"), 3),
    **dict.fromkeys(("*", "/", "%", "atan2"), 4),
    "^": 5,
}
"""Precedence of binary operators. All are parsed as left-associative, because values are not
computed.
"""
_EXPORTER_METRICS = re.compile(r"(?:DCGM_|dcgm_|podgpu[_:]|ALERTS(?:_FOR_STATE)?$)")
"""Matches metrics that have the exporter's labels: those of the exporter, and those that podgpu's
rules record.
"""
_WORDS = re.compile(r"[A-Za-z_:][\w:]*")
_PERCENT = Fraction(100)
_LINEAR = frozenset(
    {
        *(
            "rate",
            "irate",
            "increase",
            "delta",
            "idelta",
            "deriv",
            "predict_linear",
            "holt_winters",
        ),
        *(
            "double_exponential_smoothing",
            "avg_over_time",
            "min_over_time",
            "max_over_time",
            "sum_over_time",
        ),
        *(
            "quantile_over_time",
            "stddev_over_time",
            "last_over_time",
            "first_over_time",
            "mad_over_time",
        ),
    }
)
"""Range functions whose result scales with the values, so that the result can be converted instead
of the range.
"""
_UNITLESS = frozenset(
    {
        *("count_over_time", "present_over_time", "absent_over_time", "changes", "resets"),
        *(
            "ts_of_min_over_time",
            "ts_of_max_over_time",
            "ts_of_first_over_time",
            "ts_of_last_over_time",
        ),
        *("absent", "timestamp", "count", "group", "label_values"),
    }
)
"""Functions whose result does not depend on the unit."""
_LABEL_ARGUMENTS = {
    **{"label_replace": slice(1, 4, 2), "label_join": slice(1, None)},
    **dict.fromkeys(("sort_by_label", "sort_by_label_desc"), slice(1, None)),
}
"""Function -> positions of arguments that are label names. label_replace and label_join set the
first of them.
"""


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
    return {
        name: RenamedMetric(
            rename.new_name, 1 / Fraction(str(rename.factor)), rename.old.name in default
        )
        for rename in renames()
        if rename.old.type != "text" and rename.new_name != rename.old.name
        for name in rename.old_names
    }


@cache
def renamed_labels() -> Mapping[str, str]:
    """Returns old label name -> new label name."""
    old, new = HOST_LABELS["4.8"][0], HOST_LABELS["4.9"][0]
    return {old: new} | {
        rename.old.name: rename.new_name for rename in renames() if rename.old.type == "text"
    }


def find_old_names(text: str) -> list[str]:
    """Returns the old metric and label names in a text. Skips the label `Hostname`, because the
    word is too common.
    """
    words = dict.fromkeys(_WORDS.findall(text))
    return [
        w
        for w in words
        if w in renamed_metrics() or (w in renamed_labels() and w.startswith("DCGM_"))
    ]


@dataclass(frozen=True, slots=True)
class RewriteResult:
    text: str
    unconverted: tuple[
        str, ...
    ] = ()  # messages about text that was not converted and needs a manual change
    notes: tuple[str, ...] = ()
    reads_exporter: bool = (
        False  # True if the expression reads the exporter's series, whose labels were renamed
    )
    changed: int = 0  # number of rewritten strings


def rewrite_query(text: str, recorded: frozenset[str] = frozenset()) -> RewriteResult:
    """Rewrites a PromQL expression, or a query function of Grafana such as label_values(…).

    Metrics in `recorded` have the exporter's labels. Raises PromqlError if parsing fails.
    """
    if text.lstrip().startswith("metrics("):
        return RewriteResult(
            text, (f"{text.strip()}: selects metrics by a pattern; rewrite it manually",)
        )
    rewriter = _Rewriter(text, recorded, _tokenize(text))
    try:
        reads_exporter = rewriter.parse()
    except RecursionError:
        raise PromqlError("nested too deep") from None
    if rewriter.unconverted:
        return RewriteResult(
            text, tuple(dict.fromkeys(rewriter.unconverted)), reads_exporter=reads_exporter
        )
    new, notes = apply_edits(text, rewriter.edits), tuple(dict.fromkeys(rewriter.notes))
    return RewriteResult(new, (), notes, reads_exporter, int(new != text))


def apply_edits(text: str, edits: Iterable[tuple[int, int, str]]) -> str:
    """Applies edits of (start, end, new text), which must not overlap. Insertions at one position
    keep their order.
    """
    parts: list[str] = []
    position = 0
    for start, end, new in sorted(edits, key=lambda edit: (edit[0], edit[1])):
        parts += (text[position:start], new)
        position = end
    return "".join((*parts, text[position:]))


class _Token(NamedTuple):
    text: str
    start: int
    end: int
    kind: str  # group of _TOKEN, or `end`

    def unquote(self) -> _Token:
        """Removes the quotes of a string. Escapes stay, because names contain none."""
        return (
            _Token(self.text[1:-1], self.start + 1, self.end - 1, "")
            if self.kind == "string"
            else self
        )


@dataclass(slots=True)
class _Expression:
    start: int
    end: int
    token: _Token | None = (
        None  # first token of a string, number or selector; None for other expressions
    )
    metrics: tuple[str, ...] = ()  # metric names in the subexpression's selectors
    set_labels: tuple[str, ...] = ()  # labels that label_replace and label_join set
    factor: Fraction = Fraction(1)  # unit conversion that the enclosing expression must apply
    is_range: bool = False


def _tokenize(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    for match in _TOKEN.finditer(text):
        if match.lastgroup == "unknown":
            raise PromqlError(f"cannot parse {match[0]!a} at character {match.start() + 1}")
        if match.lastgroup != "space":
            tokens.append(_Token(match[0], match.start(), match.end(), match.lastgroup or ""))
    return [*tokens, _Token("", len(text), len(text), "end")]


@dataclass
class _Rewriter:
    text: str
    recorded: frozenset[str]
    tokens: Sequence[_Token]
    position: int = 0
    edits: list[tuple[int, int, str]] = field(default_factory=list)
    unconverted: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # Expressions whose values change their unit, and whether each value is compared with another
    # value.
    conversions: list[tuple[_Expression, bool]] = field(default_factory=list)
    patterns: list[tuple[_Expression, str]] = field(
        default_factory=list
    )  # selector, pattern of metric names

    def parse(self) -> bool:
        """Parses the expression and collects the edits. Returns True if the expression reads the
        exporter's series.
        """
        whole = self._parse_binary(0)
        self._write_conversion(whole)
        if self.next.kind != "end":
            raise _unexpected(self.next, "an operator or the end")
        for part, is_compared in self.conversions:
            self._convert(part, is_compared)
        reads_exporter = any(map(self._has_exporter_labels, whole.metrics))
        for selector, pattern in self.patterns:
            if reads_exporter or "DCGM" in pattern:
                self._fail(selector, "selects metrics by a pattern of names; rewrite it manually")
        return reads_exporter

    @property
    def next(self) -> _Token:
        return self.tokens[self.position]

    def _take(self) -> _Token:
        token = self.next
        self.position += token.kind != "end"
        return token

    def _is_next(self, *texts: str) -> bool:
        return self.next.kind in ("operator", "name") and self.next.text.lower() in texts

    def _accept(self, *texts: str) -> bool:
        is_next = self._is_next(*texts)
        self.position += is_next
        return is_next

    def _expect(self, text: str) -> None:
        token = self._take()
        if token.text != text or token.kind != "operator":
            raise _unexpected(token, repr(text))

    @property
    def _last_end(self) -> int:
        return self.tokens[self.position - 1].end

    def _take_kind(self, expected: str, *kinds: str) -> _Token:
        token = self._take()
        if token.kind not in kinds:
            raise _unexpected(token, expected)
        return token

    def _fail(self, part: _Expression, problem: str) -> None:
        text = " ".join(self.text[part.start : part.end].split())
        self.unconverted.append(f"{text if len(text) <= 100 else f'{text[:99]}…'}: {problem}")

    def _parse_binary(self, level: int) -> _Expression:
        left = self._parse_signed()
        while self._is_next(*_PRECEDENCE) and _PRECEDENCE[self.next.text.lower()] >= level:
            operator = self._take().text.lower()
            self._accept("bool")
            labels = self._parse_labels() if self._accept("on", "ignoring") else []
            if self._accept("group_left", "group_right") and self._is_next("("):
                labels += self._parse_labels()
            right = self._parse_binary(_PRECEDENCE[operator] + 1)
            self._write_conversion(left)
            self._write_conversion(right)
            both = _join(left.start, right.end, (left, right))
            self._rename_labels(both, labels, (left, right))
            if operator in _COMPARISONS:
                self.conversions = [
                    (part, old or part.start >= both.start) for part, old in self.conversions
                ]
            left = both
        return left

    def _parse_signed(self) -> _Expression:
        start = self.next.start
        if not self._accept("+", "-"):
            return self._parse_modifiers(self._parse_primary())
        part = self._parse_signed()
        self._write_conversion(part)
        return _join(start, part.end, (part,))

    def _parse_modifiers(self, part: _Expression) -> _Expression:
        """Parses [range], [range:step], offset and @, in any order."""
        while True:
            if self._accept("["):
                if self._parse_range():
                    self._write_conversion(part)
                    part = _join(part.start, part.end, (part,))
                part.is_range = True
            elif self._accept("offset"):
                self._accept("-")
                self._take_kind("a duration", "duration", "number", "variable")
            elif self._accept("@"):
                self._accept("-")
                if self._accept("start", "end"):
                    self._expect("(")
                    self._expect(")")
                else:
                    self._take_kind("a time", "number", "variable")
            else:
                return part
            part.end = self._last_end

    def _parse_range(self) -> bool:
        """Parses a range after the opening bracket. Returns True if it is a subquery."""
        is_subquery = False
        while self.next.kind in ("duration", "number", "variable") or self._is_next(
            ":", "+", "-", "*", "/"
        ):
            is_subquery |= self._take().text == ":"
        self._expect("]")
        return is_subquery

    def _parse_primary(self) -> _Expression:
        token = self._take()
        if token.kind in ("number", "duration", "string"):
            return _Expression(token.start, token.end, token)
        if token.kind == "operator" and token.text == "(":
            part = self._parse_binary(0)
            self._expect(")")
            part.start, part.end = token.start, self._last_end
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
        labels = self._parse_labels() if self._accept("by", "without") else []
        self._expect("(")
        arguments = list(self._parse_list(")", lambda: self._parse_binary(0)))
        if self._accept("by", "without"):
            labels = self._parse_labels()
        call = _join(token.start, self._last_end, arguments)
        for argument in arguments:
            if function in _UNITLESS:
                continue
            if argument.is_range and argument.factor != 1 and function not in _LINEAR:
                self._fail(
                    call,
                    f"the unit of the range changes, and its effect on {function}() is unknown",
                )
            elif argument.is_range:
                call.factor = argument.factor
            else:
                self._write_conversion(argument)
        if function == "label_values":
            words = [argument.token for argument in arguments[-1:] if argument.token]
            all_series = _Expression(
                call.start, call.end, metrics=("",)
            )  # label_values(label) has no selector and reads all series
            self._rename_labels(call, words, arguments[:-1] or [all_series])
            return call
        self._rename_labels(call, labels, (call,))
        named = [
            argument.token
            for argument in arguments[_LABEL_ARGUMENTS.get(function, slice(0))]
            if argument.token
        ]
        if function in ("label_replace", "label_join"):
            call.set_labels += tuple(word.unquote().text for word in named[:1])
        self._rename_labels(call, named, ())
        is_renamed = any(metric in renamed_metrics() for metric in call.metrics)
        if is_renamed and _NAME in (word.unquote().text for word in (*labels, *named)):
            self._fail(call, f"uses {_NAME}, which the migration changes")
        return call

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
        """Renames labels. Reports a label if an operand reads metrics that may come from another
        exporter.
        """
        for word in words:
            label = word.unquote()
            if new := renamed_labels().get(label.text):
                self.edits.append((label.start, label.end, new))
                unknown = (
                    one for one in operands if one.metrics and label.text not in one.set_labels
                )
                if not all(any(map(self._has_exporter_labels, one.metrics)) for one in unknown):
                    self._fail(
                        part, f"has the label {label.text}, which may belong to another exporter"
                    )

    def _has_exporter_labels(self, metric: str) -> bool:
        return metric in self.recorded or _EXPORTER_METRICS.match(metric) is not None

    def _parse_selector(self, first: _Token, name: _Token | None) -> _Expression:
        """Parses `name`, `name{…}` or `{…}`. The range is parsed later."""
        end, labels, patterns = first.end, [], []
        if name is None or self._accept("{"):
            for label in self._parse_list("}", self._take_label):
                if label.kind == "string" and self._is_next(",", "}") and name is None:
                    name = label.unquote()  # {"metric"}
                else:
                    operator = self._take()
                    if operator.text not in ("=", "!=", "=~", "!~"):
                        raise _unexpected(operator, "one of = != =~ !~")
                    value = self._take_kind("a string", "string", "variable")
                    labels.append(label)
                    if label.text == _NAME and operator.text == "=" and name is None:
                        name = value.unquote()
                    elif label.text == _NAME:
                        patterns.append(value.text)
            end = self._last_end
        part = _Expression(first.start, end, first, (name.text if name else "",))
        text = part.metrics[0]
        is_number = _VARIABLE.fullmatch(text) and not labels and not self._is_next("[")
        if (
            _VARIABLE.search(text) and not is_number
        ):  # a text that consists only of a variable may be a number
            self._fail(part, "the metric's name is or contains a dashboard variable")
        self.patterns += [(part, pattern) for pattern in patterns]
        if name and (renamed := renamed_metrics().get(text)):
            self.edits.append((name.start, name.end, renamed.name))
            part.factor = renamed.factor
            if not renamed.is_default:
                self.notes.append(
                    f"{text} is not a default counter of dcgm-exporter: also rename it to "
                    f"{renamed.name} in your"
                    " counter file"
                )
        self._rename_labels(part, labels, (part,))
        return part

    def _write_conversion(self, part: _Expression) -> None:
        if part.factor != 1 and part.is_range:
            self._fail(part, "a range without a function cannot be converted to another unit")
        elif part.factor != 1:
            self.conversions.append((part, False))

    def _convert(self, part: _Expression, is_compared: bool) -> None:
        """Adds edits that convert the value. Rounds percentages in comparisons, because 0.55 * 100
        exceeds 55.
        """
        operator, number = ("*", part.factor) if part.factor > 1 else ("/", 1 / part.factor)
        conversion = (
            f" {operator} "
            f"{number.numerator if number.denominator == 1 else f'{float(number):.17g}'}"
        )
        rounds = is_compared and part.factor == _PERCENT
        self.edits.append((part.start, part.start, "round(" if rounds else "("))
        self.edits.append(
            (part.end, part.end, f"{conversion}, 0.0001)" if rounds else f"{conversion})")
        )


def _join(start: int, end: int, parts: Iterable[_Expression]) -> _Expression:
    metrics = tuple(metric for part in parts for metric in part.metrics)
    return _Expression(
        start, end, None, metrics, tuple(label for part in parts for label in part.set_labels)
    )


def _unexpected(token: _Token, expected: str) -> PromqlError:
    what = (
        "the end" if token.kind == "end" else f"{token.text[:40]!a} at character {token.start + 1}"
    )
    return PromqlError(f"expected {expected}, but got {what}")
