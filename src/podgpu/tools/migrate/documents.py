"""Rewrites the queries in Grafana dashboards (JSON) and Prometheus rules (YAML).

Replaces only the strings that change, so that comments, order and layout of the file stay the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import yaml

from podgpu.errors import UsageError
from podgpu.tools.migrate.query_rewriter import (
    Edit,
    PromqlError,
    RewriteResult,
    apply_edits,
    find_old_names,
    renamed_labels,
    rewrite_query,
)


@dataclass(frozen=True, slots=True)
class FileChange:
    edit: Edit
    place: str  # position in the file, for messages
    result: RewriteResult


def _report_old_names(text: str, problem: str) -> RewriteResult | None:
    """Reports the old names in a text, without changing it. Returns None if there are none."""
    names = find_old_names(text)
    if not names:
        return None
    return RewriteResult(text, (f"{', '.join(names)}: {problem}",))


def _apply_changes(text: str, changes: Iterable[FileChange]) -> RewriteResult:
    edits = []
    unconverted = []
    notes = []
    changed = 0
    for change in sorted(changes, key=lambda change: change.edit.start):
        edit = change.edit
        edits.append(edit)
        unconverted += [f"{change.place}: {message}" for message in change.result.unconverted]
        notes += [f"{change.place}: {message}" for message in change.result.notes]
        if text[edit.start : edit.end] != edit.text:
            changed += 1

    new = apply_edits(text, edits)
    return RewriteResult(new, tuple(unconverted), tuple(notes), changed=changed)


# Dashboards

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"|[{}\[\],]')
_PROSE = frozenset(
    {"title", "description", "content", "text", "label", "name", "displayName", "uid", "tags"}
)
_VARIABLE_KEYS = frozenset({"repeat", "scopedVars"})
"""Keys whose values are names of dashboard variables.

These are not rewritten, even if they equal a label name.
"""
_LEGENDS = frozenset({"legendFormat", "titleFormat", "textFormat"})
_PRINTED_LABEL = re.compile(r"\b[A-Za-z_]\w*(?==)")
_TEMPLATE = re.compile(r"\{\{\s*(\w+)\s*\}\}|\$\{__(?:field\.labels|data\.fields)\.(\w+)\b")


@dataclass(frozen=True, slots=True)
class _JsonString:
    path: tuple[str | int, ...]
    value: str
    start: int
    end: int
    is_key: bool = False

    @property
    def key(self) -> str:
        """The last key in the path. List indices are skipped."""
        keys = [part for part in self.path if isinstance(part, str)]
        return keys[-1] if keys else ""

    @property
    def shown(self) -> str:
        text = ""
        for part in self.path:
            text += f"[{part}]" if isinstance(part, int) else f".{part}"
        return text.lstrip(".")


def migrate_dashboard(text: str, origin: str) -> RewriteResult:
    """Rewrites the queries of a dashboard, and the label names in panels.

    Raises UsageError if it is no JSON object.
    """
    try:
        document = json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{origin}: not JSON: {error}") from None

    if not isinstance(document, dict):
        raise UsageError(f"{origin}: not a dashboard, which must be a JSON object")

    strings = _find_strings(text)
    rewritten: dict[_JsonString, RewriteResult] = {}
    for string in strings:
        result = _rewrite_string(string)
        if result is not None:
            rewritten[string] = result

    # Legends, columns and patterns may contain label names. They are renamed where the exporter's
    # series are read.
    readers = set()
    for string, result in rewritten.items():
        if result.reads_exporter:
            readers.add(_owner_of(string))

    for string in strings:
        if string not in rewritten and _owner_of(string) in readers:
            rewritten[string] = _rewrite_label_text(string)

    changes = [_change_string(string, result, text) for string, result in rewritten.items()]
    return _apply_changes(text, changes)


def _owner_of(string: _JsonString) -> tuple[str | int, ...]:
    """Returns the path of the panel or variable that contains the string."""
    path = string.path
    # From the end, because rows of panels contain panels.
    for length in range(len(path), 1, -1):
        parent, entry = path[length - 2 : length]
        if isinstance(entry, int) and parent in ("panels", "list"):
            return path[:length]
    return path


def _change_string(string: _JsonString, rewritten: RewriteResult, text: str) -> FileChange:
    new = text[string.start : string.end]
    if rewritten.text != string.value:
        # Escapes other characters if the file does.
        is_ascii = new.isascii() or "\\u" in new
        new = json.dumps(rewritten.text, ensure_ascii=is_ascii)
    edit = Edit(string.start, string.end, new)
    return FileChange(edit, string.shown, rewritten)


def _rewrite_string(string: _JsonString) -> RewriteResult | None:
    """Rewrites a query. Reports old names in other strings, except in titles and descriptions."""
    is_variable = string.path[:1] == ("templating",)
    is_query = string.key == "expr"
    if is_variable:
        is_query = string.key in ("expr", "query", "definition")
    if is_query and not string.is_key:
        return _rewrite_promql(string.value)
    if string.key in _PROSE or is_variable:
        return None
    return _report_old_names(string.value, "mentioned outside a query; check it manually")


def _rewrite_promql(text: str, recorded: frozenset[str] = frozenset()) -> RewriteResult | None:
    try:
        return rewrite_query(text, recorded)
    except PromqlError as error:
        # The query of a dashboard variable need not be PromQL.
        return _report_old_names(text, f"cannot be parsed as PromQL: {error}")


def _rewrite_label_text(string: _JsonString) -> RewriteResult:
    """Rewrites label names in legends, columns and patterns."""
    text = string.value
    if not _VARIABLE_KEYS.isdisjoint(string.path):
        return RewriteResult(text)
    if string.key == "regex" and not string.is_key:
        # Grafana applies it to the text of series: `Hostname="…"`.
        return RewriteResult(_PRINTED_LABEL.sub(lambda match: _rename_label(match[0]), text))
    if string.key in _LEGENDS or "${__" in text:
        return RewriteResult(_TEMPLATE.sub(_rename_in_legend, text))
    if string.is_key or string.key not in _PROSE:
        return RewriteResult(_rename_label(text))

    return RewriteResult(text)


def _rename_in_legend(match: re.Match[str]) -> str:
    label = match[1] or match[2]
    return match[0].replace(label, _rename_label(label))


def _rename_label(name: str) -> str:
    return renamed_labels().get(name, name)


def _find_strings(text: str) -> list[_JsonString]:
    strings = []
    # The key or index at each nesting level; None where a key is expected.
    path: list[str | int | None] = []
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in "{[":
            path.append(None if token == "{" else 0)
        elif token in "}]":
            path.pop()
        elif token == "," and isinstance(path[-1], int):
            path[-1] += 1
        elif token == ",":
            path[-1] = None
        else:
            value = json.loads(token, strict=False)
            is_key = path[-1] is None
            place = tuple(part for part in path if part is not None)
            strings.append(_JsonString(place, value, match.start(), match.end(), is_key))
            if is_key:
                path[-1] = value

    return strings


# Rules

_BLOCKS = re.compile(r"\{\{.*?\}\}", re.DOTALL)
_LABELS = re.compile(r"((?:\$labels|\.Labels)\.|index\s+\$labels\s+\")(\w+)")
_PROPERTIES = re.compile(r"(?:[&!]\S*[ \t]+)+")
"""Matches the YAML anchors and tags in front of a value."""
_USES = {"expr": "expr", "record": "record", "annotations": "template", "labels": "template"}
"""Key of a rule -> `_Scalar.use`."""


@dataclass(frozen=True, slots=True, eq=False)
class _Scalar:
    node: yaml.ScalarNode
    path: str
    # determines how the value is rewritten: "expr", "template", "record" or "" (only reported)
    use: str
    rule: str = ""  # identifies the rule that contains the scalar

    @property
    def value(self) -> str:
        return str(self.node.value)


def migrate_rules(text: str, origin: str) -> RewriteResult:
    """Rewrites the expressions and templates of a rule file.

    Raises UsageError if it is not YAML or has no rules.
    """
    scalars = _find_scalars(text, origin)
    if not any(scalar.use == "expr" for scalar in scalars):
        raise UsageError(f"{origin}: has no rules. A rule needs expr, and either alert or record")

    results = _rewrite_scalars(scalars)
    intended = []
    for scalar in scalars:
        result = results.get(scalar)
        intended.append(scalar.value if result is None else result.text)

    # The second way is valid everywhere, but changes the style of what it writes.
    for write in (_write_in_style, _write_quoted):
        changes = [_make_change(text, scalar, result, write) for scalar, result in results.items()]
        migrated = _apply_changes(text, changes)
        with suppress(UsageError):
            values = [scalar.value for scalar in _find_scalars(migrated.text, origin)]
            if values == intended:
                return migrated

    raise UsageError(
        f"{origin}: cannot be rewritten without changing its formatting; "
        "please report this and attach the file"
    )


def _rewrite_scalars(scalars: Sequence[_Scalar]) -> dict[_Scalar, RewriteResult]:
    # Metrics that rules of this file record from the exporter's series. Rules may read the metrics
    # of other rules, so this repeats until there are no more such metrics.
    records = [scalar for scalar in scalars if scalar.use == "record"]
    recorded: frozenset[str] = frozenset()
    while True:
        results = _rewrite_values(scalars, recorded)
        readers = {scalar.rule for scalar, result in results.items() if result.reads_exporter}
        recorded_by_readers = frozenset(one.value for one in records if one.rule in readers)
        if recorded_by_readers == recorded:
            break
        recorded = recorded_by_readers

    # Templates of rules that do not read the exporter's series stay unchanged. Their labels come
    # from other exporters.
    for scalar in scalars:
        if scalar.use == "template" and scalar.rule not in readers:
            del results[scalar]

    return results


def _rewrite_values(
    scalars: Iterable[_Scalar], recorded: frozenset[str]
) -> dict[_Scalar, RewriteResult]:
    results = {}
    for scalar in scalars:
        result = _rewrite_value(scalar, recorded)
        if result is not None:
            results[scalar] = result
    return results


def _find_scalars(text: str, origin: str) -> list[_Scalar]:
    scalars: list[_Scalar] = []
    try:
        for document in yaml.compose_all(text, Loader=yaml.SafeLoader):
            if document is not None:
                scalars += _walk(document, set())
    except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        place = origin
        mark = getattr(error, "problem_mark", None)
        if mark:
            place += f":{mark.line + 1}:{mark.column + 1}"
        problem = getattr(error, "problem", type(error).__name__)
        raise UsageError(f"{place}: not YAML: {problem}") from None

    return scalars


def _walk(
    node: yaml.Node, seen: set[int], path: str = "", use: str = "", rule: str = ""
) -> Iterator[_Scalar]:
    """Yields the scalars below a node. Yields each scalar once, even if aliases refer to it."""
    if id(node) in seen:
        return

    seen.add(id(node))
    if isinstance(node, yaml.ScalarNode):
        yield _Scalar(node, path or "the document", use, rule)
    elif isinstance(node, yaml.SequenceNode):
        for number, child in enumerate(node.value):
            yield from _walk(child, seen, f"{path}[{number}]", use, rule)
    elif isinstance(node, yaml.MappingNode):
        yield from _walk_mapping(node, seen, path, use, rule)


def _walk_mapping(
    node: yaml.MappingNode, seen: set[int], path: str, use: str, rule: str
) -> Iterator[_Scalar]:
    children: dict[str, yaml.Node] = {}
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            children[str(key.value)] = value

    kind = _find_rule_kind(children)
    if kind:
        rule = f"{path} at {node.start_mark.index}"
        name = children[kind]
        if isinstance(name, yaml.ScalarNode):
            path = f"{kind} {name.value}"

    for key, value in children.items():
        child_path = f"{path}.{key}".lstrip(".")
        child_use = _USES.get(key, "") if kind else use
        yield from _walk(value, seen, child_path, child_use, rule)


def _find_rule_kind(children: Container[str]) -> str:
    """Returns `alert` or `record`, or an empty text if the mapping is not a rule."""
    if "expr" in children:
        for kind in ("alert", "record"):
            if kind in children:
                return kind
    return ""


def _rewrite_value(scalar: _Scalar, recorded: frozenset[str]) -> RewriteResult | None:
    if scalar.use == "expr":
        return _rewrite_promql(scalar.value, recorded)
    if scalar.use == "template":
        return _rewrite_template(scalar.value)
    return _report_old_names(scalar.value, "mentioned outside an expression; check it manually")


def _rewrite_template(value: str) -> RewriteResult:
    unconverted = []
    for block in _BLOCKS.findall(value):
        names = find_old_names(block)
        if names and "query" in block:
            unconverted.append(f"{', '.join(names)}: queried in a template; check it manually")

    text = _BLOCKS.sub(_rename_in_block, value)
    return RewriteResult(text, tuple(unconverted))


def _rename_in_block(block: re.Match[str]) -> str:
    return _LABELS.sub(lambda match: match[1] + _rename_label(match[2]), block[0])


def _make_change(
    text: str,
    scalar: _Scalar,
    result: RewriteResult,
    write: Callable[[str, yaml.ScalarNode, str], str],
) -> FileChange:
    node = scalar.node
    start = node.start_mark.index
    end = node.end_mark.index
    properties = _PROPERTIES.match(text, start, end)
    if properties is not None:
        start = properties.end()

    new = text[start:end]
    if result.text != scalar.value:
        new = write(new, node, result.text)

    place = f"line {node.start_mark.line + 1}, {scalar.path}"
    return FileChange(Edit(start, end, new), place, result)


def _write_in_style(source: str, node: yaml.ScalarNode, value: str) -> str:
    """Writes the value in the style of the source: quoted, plain or as a block."""
    if node.style == "'":
        return "'" + value.replace("'", "''") + "'"
    if node.style == '"':
        return _write_quoted(source, node, value)
    if node.style not in ("|", ">"):
        return value

    # The first line has the indicator, such as |-, which says how the block ends.
    block, _, lines = source.partition("\n")
    indent = lines[: len(lines) - len(lines.lstrip(" "))]
    for line in value.rstrip("\n").split("\n"):
        block += f"\n{indent}{line}" if line else "\n"

    return block + _find_blank_end(source)


def _write_quoted(source: str, _node: yaml.ScalarNode, value: str) -> str:
    return json.dumps(value, ensure_ascii=False) + _find_blank_end(source)


def _find_blank_end(source: str) -> str:
    """Returns the blanks and line breaks at the end. A block includes those that follow it."""
    return source[len(source.rstrip()) :]
