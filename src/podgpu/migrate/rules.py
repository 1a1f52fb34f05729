"""Rewrites Prometheus rules in a rule file or a PrometheusRule. Keeps comments, order and layout.

Only the scalars that change are written again. The result is parsed to verify every value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import yaml

from podgpu.errors import UsageError
from podgpu.migrate.promql import PromqlError, find_selectors, name_of, parse_promql
from podgpu.migrate.rewrite import (
    FileChange,
    MigratedFile,
    RewriteResult,
    apply_changes,
    find_old_names,
    has_exporter_labels,
    renamed_labels,
    renamed_metrics,
    report_old_names,
    rewrite_expression,
)

_BLOCKS = re.compile(r"\{\{.*?\}\}", re.DOTALL)
_LABELS = re.compile(r"((?:\$labels|\.Labels)\.|index\s+\$labels\s+\")(\w+)")
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

    @property
    def value(self) -> str:
        return str(self.node.value)


def migrate_rules(text: str, origin: str) -> MigratedFile:
    """Rewrites a rule file. Raises UsageError if the text is not YAML or has no rules."""
    scalars = _find_scalars(text, origin)
    if not any(scalar.use == "expr" for scalar in scalars):
        raise UsageError(f"{origin}: has no rules, which are entries with expr and alert or record")
    recorded = _find_recorded(scalars)
    results = {scalar: result for scalar in scalars if (result := _rewrite_value(scalar, recorded)) is not None}
    of_exporter = {scalar.rule for scalar, result in results.items() if result.is_exporter}
    for scalar in list(results):
        if scalar.use == "template" and scalar.rule not in of_exporter:  # its labels are not the exporter's
            del results[scalar]
    intended = [results[scalar].text if scalar in results else scalar.value for scalar in scalars]
    for write in (_write_in_style, _write_quoted):
        migrated = apply_changes(text, [_make_change(text, s, result, write) for s, result in results.items()])
        if _read_values(migrated.text, origin) == intended:
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


def _read_values(text: str, origin: str) -> list[str] | None:
    try:
        return [scalar.value for scalar in _find_scalars(text, origin)]
    except UsageError:
        return None


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
            rules.setdefault(scalar.rule, {})[scalar.use] = scalar.value
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


def _rewrite_value(scalar: _Scalar, recorded: frozenset[str]) -> RewriteResult | None:
    if scalar.use == "expr":
        try:
            return rewrite_expression(scalar.value, recorded)
        except PromqlError as error:
            return report_old_names(scalar.value, f"cannot be parsed as PromQL: {error}")
    if scalar.use == "template":
        return _rewrite_template(scalar.value)
    return report_old_names(scalar.value, "mentioned outside an expression; check it manually")


def _rewrite_template(value: str) -> RewriteResult:
    left: list[str] = []

    def rewrite_block(block: re.Match[str]) -> str:
        if "query" in block[0] and (names := find_old_names(block[0])):
            left.append(f"{', '.join(names)}: queried in a template; check it manually")
        return _LABELS.sub(lambda match: match[1] + _rename_label(match[2], block[0]), block[0])

    text = _BLOCKS.sub(rewrite_block, value)
    names = [] if left else [name for name in find_old_names(_BLOCKS.sub("", value)) if name in renamed_metrics()]
    notes = [f"{', '.join(names)}: mentioned in a text, which is not changed"] if names else []
    return RewriteResult(text, tuple(left), tuple(notes))


def _rename_label(label: str, block: str) -> str:
    """Returns the new label, unless the template already reads both names."""
    new = renamed_labels().get(label, label)
    return label if f".{new}" in block else new


# Back into the file


def _make_change(
    text: str, scalar: _Scalar, result: RewriteResult, write: Callable[[str, yaml.ScalarNode, str], str]
) -> FileChange:
    start, end = scalar.node.start_mark.index, scalar.node.end_mark.index
    if (prefix := _PROPERTIES.match(text, start, end)) is not None:
        start = prefix.end()
    source = text[start:end]
    new = source if result.text == scalar.value else write(source, scalar.node, result.text)
    return FileChange(start, end, new, f"line {scalar.node.start_mark.line + 1}, {scalar.path}", result)


def _write_in_style(source: str, node: yaml.ScalarNode, value: str) -> str:
    """Writes the value in the style of the source. A folded or plain value of several lines becomes one line."""
    if node.style == "'":
        return "'" + value.replace("'", "''") + "'"
    if node.style == '"':
        return _write_quoted(source, node, value)
    if node.style not in ("|", ">"):
        return value
    header, _, lines = source.partition("\n")
    indent = lines[: len(lines) - len(lines.lstrip(" "))]
    block = "".join(f"\n{indent}{line}" if line else "\n" for line in value.rstrip("\n").split("\n"))
    return header + block + source[len(source.rstrip()) :]


def _write_quoted(source: str, _node: yaml.ScalarNode, value: str) -> str:
    return json.dumps(value, ensure_ascii=False) + source[len(source.rstrip()) :]
