"""This module rewrites Prometheus rules in place, plain or in a PrometheusRule: comments, order and layout stay. Pure.

Expressions are changed where they stand in the file, in whichever of YAML's styles. What comes out is read again: every
value must be what it was meant to be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import yaml

from podgpu.errors import UsageError
from podgpu.migrate.direction import Direction
from podgpu.migrate.questions import name_in, selectors
from podgpu.migrate.result import Change, Edit, Migrated, Rewritten, gather
from podgpu.migrate.rewrite import PromqlError, edited, rewrite_expression
from podgpu.migrate.syntax import parse_promql

_MOST_NODES = 200_000
_ROUNDS = 10
"""Recording rules of recording rules of recording rules."""
_BLOCKS = re.compile(r"\{\{.*?\}\}", re.DOTALL)
_LABELS = re.compile(r"(?:\$labels|\.Labels)\.(\w+)|index\s+\$labels\s+\"(\w+)\"")
_PROPERTIES = re.compile(r"(?:[&!]\S*[ \t]+)+")
"""An anchor or a tag before a value."""
_RULE_KINDS = ("alert", "record")
_READ = ("expr", "record")


@dataclass(frozen=True, slots=True, eq=False)
class _Scalar:
    node: yaml.ScalarNode
    path: str
    use: str
    """expr, template, record, or nothing."""
    rule: str = ""
    """Which it is part of."""


def migrate_rules(text: str, origin: str, direction: Direction) -> Migrated:
    """Raises UsageError for what is no YAML, or has no rules."""
    scalars = _scalars(text, origin)
    if not any(scalar.use == "expr" for scalar in scalars):
        raise UsageError(f"{origin}: no rules in it: what has an expr beside alert or record was expected")
    carriers = _carriers(scalars, direction)
    rewritten = {scalar: made for scalar in scalars if (made := _rewritten(scalar, direction, carriers)) is not None}
    theirs = {_rule(scalar) for scalar, made in rewritten.items() if made.is_theirs}
    """Rules of the exporter's series: their templates name its labels. Not those that read either name already."""
    moving = (
        (scalar, made) for scalar, made in rewritten.items() if scalar.use != "template" or _rule(scalar) in theirs
    )
    changes = [c for scalar, made in moving if (c := _change(text, scalar, made)) is not None]
    for quoted in (False, True):
        migrated = gather(text, [_quoted(c) for c in changes] if quoted else changes)
        if _is_as_meant(migrated.text, origin, scalars, {c.end: c for c in changes}):
            return migrated
    raise UsageError(f"{origin}: cannot be written back in its own layout: please report it, with the file")


def _scalars(text: str, origin: str) -> list[_Scalar]:
    found: list[_Scalar] = []
    try:
        for document in yaml.compose_all(text, Loader=yaml.SafeLoader):
            if document is not None:
                found += _walk(document)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
        raise UsageError(f"{origin}{place}: not YAML: {' '.join(str(error.problem).split())}") from None
    except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        raise UsageError(f"{origin}: not YAML that podgpu can read ({type(error).__name__})") from None
    if len(found) > _MOST_NODES:
        raise UsageError(f"{origin}: more than {_MOST_NODES} values: is it a rules file?")
    return found


def _walk(root: yaml.Node) -> Iterator[_Scalar]:
    """Each scalar once, however often it is referred to."""
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
        its = (
            {"annotations": "template", "labels": "template"}.get(name, name if name in _READ else "") if kind else use
        )
        yield value, f"{path}.{name}".lstrip("."), its, rule


def _carriers(scalars: Sequence[_Scalar], direction: Direction) -> frozenset[str]:
    """Recorded metrics that have the exporter's labels, for they are made of its figures."""
    found: frozenset[str] = frozenset()
    rules: dict[str, dict[str, str]] = {}
    for scalar in scalars:
        if scalar.use in ("expr", "record"):
            rules.setdefault(scalar.rule, {})[scalar.use] = str(scalar.node.value)
    for _ in range(_ROUNDS):
        before = found
        for rule in rules.values():
            if "record" in rule and _reads(rule.get("expr", ""), direction, found):
                found |= {rule["record"]}
        if found == before:
            break
    return found


def _reads(expression: str, direction: Direction, carriers: frozenset[str]) -> bool:
    try:
        return any(
            name in carriers or direction.carries(name) for name in map(name_in, selectors(parse_promql(expression)))
        )
    except PromqlError:
        return False


# One value


def _rule(scalar: _Scalar) -> str:
    return scalar.rule or scalar.path


def _change(text: str, scalar: _Scalar, rewritten: Rewritten) -> Change | None:
    value = str(scalar.node.value)
    if rewritten.text == value and not rewritten.left and not rewritten.notes:
        return None
    start, end = scalar.node.start_mark.index, scalar.node.end_mark.index
    if (prefix := _PROPERTIES.match(text, start, end)) is not None:
        start = prefix.end()
    place = f"line {scalar.node.start_mark.line + 1}, {scalar.path}"
    new = text[start:end] if rewritten.text == value else _in_style(text[start:end], scalar.node, rewritten)
    return Change(start, end, new, place, rewritten)


def _rewritten(scalar: _Scalar, direction: Direction, carriers: frozenset[str]) -> Rewritten | None:
    value = str(scalar.node.value)
    if scalar.use == "expr":
        try:
            return rewrite_expression(value, direction, carriers)
        except PromqlError as error:
            names = direction.mentions(value)
            said = f"{', '.join(names)}: not PromQL that can be read: {error}"
            return Rewritten(value, (said,)) if names else None
    if scalar.use == "template":
        return _as_template(value, direction)
    names = direction.mentions(value)
    said = f"{', '.join(names)}: named outside of a rule's expression: look at it yourself"
    return Rewritten(value, (said,)) if names else None


def _as_template(value: str, direction: Direction) -> Rewritten:
    edits: list[Edit] = []
    left: list[str] = []
    for block in _BLOCKS.finditer(value):
        for match in _LABELS.finditer(value, block.start(), block.end()):
            which = 1 if match[1] else 2
            new = direction.label(match[which])
            if new is not None and f".{new}" not in block[0]:  # who tries both already needs no change
                edits.append((match.start(which), match.end(which), new))
        if "query" in block[0] and (names := direction.mentions(block[0])):
            left.append(f"{', '.join(names)}: asked for in a template: look at it yourself")
    names = [] if left else [name for name in direction.mentions(_BLOCKS.sub("", value)) if direction.metric(name)]
    notes = [f"{', '.join(names)}: named in a text, which stays as it is"] if names else []
    return Rewritten(edited(value, edits), tuple(left), tuple(notes), tuple(edits))


# Back into the file


def _in_style(source: str, node: yaml.ScalarNode, rewritten: Rewritten) -> str:
    if node.style == "'":
        return "'" + rewritten.text.replace("'", "''") + "'" if "\n" not in rewritten.text else _double(rewritten.text)
    if node.style == '"':
        return _double(rewritten.text)
    header = source.index("\n") + 1 if node.style in ("|", ">") and "\n" in source else 0
    return source[:header] + _aligned(source[header:], str(node.value), rewritten)


def _aligned(source: str, value: str, rewritten: Rewritten) -> str:
    """YAML changes blanks and line ends only: the n-th other letter of the value is the n-th of the source."""
    places = [at for at, letter in enumerate(source) if not letter.isspace()]
    letters = [at for at, letter in enumerate(value) if not letter.isspace()]
    if len(places) != len(letters):
        return _double(rewritten.text)
    of_letter = dict(zip(letters, places, strict=True))

    def following(at: int) -> int:
        return next((of_letter[n] for n in range(at, len(value)) if n in of_letter), len(source))

    def behind(at: int) -> int:
        return next((of_letter[n] + 1 for n in range(at - 1, -1, -1) if n in of_letter), 0)

    moved: list[Edit] = []
    for start, end, new in rewritten.edits:
        if start == end:
            place = following(start) if new.startswith("(") else behind(start)
            moved.append((place, place, new))
        else:
            first = following(start) if start in of_letter else behind(start)
            last = behind(end) if end - 1 in of_letter else following(end)
            moved.append((first, max(first, last), new))
    return edited(source, moved)


def _double(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _quoted(change: Change) -> Change:
    """What does not come out right in its own style does in quotes."""
    if not change.rewritten.edits:
        return change
    return Change(change.start, change.end, _double(change.rewritten.text), change.place, change.rewritten)


def _is_as_meant(text: str, origin: str, before: Sequence[_Scalar], changes: dict[int, Change]) -> bool:
    try:
        after = _scalars(text, origin)
    except UsageError:
        return False
    meant = []
    for scalar in before:
        change = changes.get(scalar.node.end_mark.index)
        meant.append(str(scalar.node.value) if change is None else change.rewritten.text)
    return [str(scalar.node.value) for scalar in after] == meant
