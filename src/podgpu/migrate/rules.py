"""Rewrites Prometheus rules in a rule file or a PrometheusRule. Keeps comments, order and layout.

Expressions are edited in place, in any YAML style. The result is parsed again to verify every value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import yaml

from podgpu.errors import UsageError
from podgpu.migrate.promql import PromqlError, find_selectors, name_of, parse_promql
from podgpu.migrate.rewrite import (
    Direction,
    Edit,
    FileChange,
    MigratedFile,
    RewriteResult,
    apply_changes,
    apply_edits,
    has_exporter_labels,
    rewrite_expression,
)

_BLOCKS = re.compile(r"\{\{.*?\}\}", re.DOTALL)
_LABELS = re.compile(r"(?:\$labels|\.Labels)\.(\w+)|index\s+\$labels\s+\"(\w+)\"")
_PROPERTIES = re.compile(r"(?:[&!]\S*[ \t]+)+")
"""Matches anchors and tags before a value."""
_RULE_KINDS = ("alert", "record")
_USES = ("expr", "record")


@dataclass(frozen=True, slots=True, eq=False)
class _Scalar:
    node: yaml.ScalarNode
    path: str
    use: str  # "expr", "template", "record" or empty
    rule: str = ""  # the rule that contains it


def migrate_rules(text: str, origin: str, direction: Direction) -> MigratedFile:
    """Rewrites a rule file. Raises UsageError if the text is not YAML or has no rules."""
    scalars = _find_scalars(text, origin)
    if not any(scalar.use == "expr" for scalar in scalars):
        raise UsageError(f"{origin}: has no rules, which are entries with expr and alert or record")
    recorded = _find_recorded(scalars)
    rewritten = {
        scalar: result for scalar in scalars if (result := _rewrite_value(scalar, direction, recorded)) is not None
    }
    of_exporter = {_rule_of(scalar) for scalar, result in rewritten.items() if result.is_exporter}
    # Templates of these rules use the exporter's labels.
    relevant = (
        (scalar, result)
        for scalar, result in rewritten.items()
        if scalar.use != "template" or _rule_of(scalar) in of_exporter
    )
    changes = [c for scalar, result in relevant if (c := _make_change(text, scalar, result)) is not None]
    for quoted in (False, True):
        migrated = apply_changes(text, [_in_quotes(c) for c in changes] if quoted else changes)
        if _has_intended_values(migrated.text, origin, scalars, {c.end: c for c in changes}):
            return migrated
    raise UsageError(f"{origin}: cannot be rewritten without changing its layout; please report this with the file")


def _find_scalars(text: str, origin: str) -> list[_Scalar]:
    scalars: list[_Scalar] = []
    try:
        for document in yaml.compose_all(text, Loader=yaml.SafeLoader):
            if document is not None:
                scalars += _walk(document)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
        raise UsageError(f"{origin}{place}: not YAML: {' '.join(str(error.problem).split())}") from None
    except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        raise UsageError(f"{origin}: cannot be parsed as YAML ({type(error).__name__})") from None
    return scalars


def _walk(root: yaml.Node) -> Iterator[_Scalar]:
    """Yields each scalar once, even if aliases refer to it."""
    seen: set[int] = set()
    waiting: list[tuple[yaml.Node, str, str, str]] = [(root, "", "", "")]
    while waiting:
        node, path, use, rule = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.ScalarNode):
            yield _Scalar(node, path or "the whole", use, rule)
        elif isinstance(node, yaml.SequenceNode):
            waiting += [(child, f"{path}[{n}]", use, rule) for n, child in enumerate(node.value)][::-1]
        elif isinstance(node, yaml.MappingNode):
            waiting += list(_members(node, path, use, rule))[::-1]


def _members(node: yaml.MappingNode, path: str, use: str, rule: str) -> Iterator[tuple[yaml.Node, str, str, str]]:
    names = {str(key.value): value for key, value in node.value if isinstance(key, yaml.ScalarNode)}
    kind = next((kind for kind in _RULE_KINDS if kind in names and "expr" in names), "")
    if kind:
        rule = f"{path} at {node.start_mark.index}"
        path = f"{kind} {names[kind].value}" if isinstance(names[kind], yaml.ScalarNode) else path
    for key, value in node.value:
        name = str(key.value) if isinstance(key, yaml.ScalarNode) else "?"
        member_use = (
            {"annotations": "template", "labels": "template"}.get(name, name if name in _USES else "") if kind else use
        )
        yield value, f"{path}.{name}".lstrip("."), member_use, rule


def _find_recorded(scalars: Sequence[_Scalar]) -> frozenset[str]:
    """Returns recorded metrics that have the exporter's labels because they are computed from its metrics."""
    rules: dict[str, dict[str, str]] = {}
    for scalar in scalars:
        if scalar.use in _USES:
            rules.setdefault(scalar.rule, {})[scalar.use] = str(scalar.node.value)
    reads = {rule["record"]: _find_metrics(rule.get("expr", "")) for rule in rules.values() if "record" in rule}
    recorded: set[str] = set()
    for _ in reads:  # recording rules may use recording rules
        recorded |= {
            record for record, names in reads.items() if any(n in recorded or has_exporter_labels(n) for n in names)
        }
    return frozenset(recorded)


def _find_metrics(expression: str) -> set[str]:
    try:
        return set(map(name_of, find_selectors(parse_promql(expression))))
    except PromqlError:
        return set()


# One value


def _rule_of(scalar: _Scalar) -> str:
    return scalar.rule or scalar.path


def _make_change(text: str, scalar: _Scalar, rewritten: RewriteResult) -> FileChange | None:
    value = str(scalar.node.value)
    if rewritten.text == value and not rewritten.left and not rewritten.notes:
        return None
    start, end = scalar.node.start_mark.index, scalar.node.end_mark.index
    if (prefix := _PROPERTIES.match(text, start, end)) is not None:
        start = prefix.end()
    place = f"line {scalar.node.start_mark.line + 1}, {scalar.path}"
    new = text[start:end] if rewritten.text == value else _write_in_style(text[start:end], scalar.node, rewritten)
    return FileChange(start, end, new, place, rewritten)


def _rewrite_value(scalar: _Scalar, direction: Direction, recorded: frozenset[str]) -> RewriteResult | None:
    value = str(scalar.node.value)
    if scalar.use == "expr":
        try:
            return rewrite_expression(value, direction, recorded)
        except PromqlError as error:
            return direction.report(value, f"cannot be parsed as PromQL: {error}")
    if scalar.use == "template":
        return _rewrite_template(value, direction)
    return direction.report(value, "mentioned outside an expression; check it manually")


def _rewrite_template(value: str, direction: Direction) -> RewriteResult:
    edits: list[Edit] = []
    left: list[str] = []
    for block in _BLOCKS.finditer(value):
        for match in _LABELS.finditer(value, block.start(), block.end()):
            which = 1 if match[1] else 2
            new = direction.label(match[which])
            if new is not None and f".{new}" not in block[0]:  # otherwise the template already reads both names
                edits.append((match.start(which), match.end(which), new))
        if "query" in block[0] and (names := direction.mentions(block[0])):
            left.append(f"{', '.join(names)}: queried in a template; check it manually")
    names = [] if left else [name for name in direction.mentions(_BLOCKS.sub("", value)) if direction.metric(name)]
    notes = [f"{', '.join(names)}: mentioned in a text, which is not changed"] if names else []
    return RewriteResult(apply_edits(value, edits), tuple(left), tuple(notes), tuple(edits))


# Back into the file


def _write_in_style(source: str, node: yaml.ScalarNode, rewritten: RewriteResult) -> str:
    if node.style == "'" and "\n" not in rewritten.text:
        return "'" + rewritten.text.replace("'", "''") + "'"
    if node.style in ("'", '"'):
        return _double_quoted(rewritten.text)
    header = source.index("\n") + 1 if node.style in ("|", ">") and "\n" in source else 0
    return source[:header] + _edit_in_place(source[header:], str(node.value), rewritten)


def _edit_in_place(source: str, value: str, rewritten: RewriteResult) -> str:
    """Applies the edits to the source. YAML changes only white space, so all other characters keep their order."""
    places = [at for at, letter in enumerate(source) if not letter.isspace()]
    letters = [at for at, letter in enumerate(value) if not letter.isspace()]
    if len(places) != len(letters):
        return _double_quoted(rewritten.text)
    of_letter = dict(zip(letters, places, strict=True))

    def following(at: int) -> int:
        return next((of_letter[n] for n in range(at, len(value)) if n in of_letter), len(source))

    def preceding(at: int) -> int:
        return next((of_letter[n] + 1 for n in range(at - 1, -1, -1) if n in of_letter), 0)

    moved: list[Edit] = []
    for start, end, new in rewritten.edits:
        if start == end:
            place = following(start) if new.startswith("(") else preceding(start)
            moved.append((place, place, new))
        else:
            first = following(start) if start in of_letter else preceding(start)
            last = preceding(end) if end - 1 in of_letter else following(end)
            moved.append((first, max(first, last), new))
    return apply_edits(source, moved)


def _double_quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _in_quotes(change: FileChange) -> FileChange:
    """Writes the value in double quotes, which works for every value."""
    if not change.result.edits:
        return change
    return FileChange(change.start, change.end, _double_quoted(change.result.text), change.place, change.result)


def _has_intended_values(text: str, origin: str, before: Sequence[_Scalar], changes: dict[int, FileChange]) -> bool:
    try:
        after = _find_scalars(text, origin)
    except UsageError:
        return False
    meant = []
    for scalar in before:
        change = changes.get(scalar.node.end_mark.index)
        meant.append(str(scalar.node.value) if change is None else change.result.text)
    return [str(scalar.node.value) for scalar in after] == meant
