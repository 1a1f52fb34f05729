"""Evaluates the selectors of DRA requests: a subset of CEL, the Common Expression Language.

Supports comparisons, `&&`, `||`, `!`, `?:`, `in`, `has`, and the functions that selectors of GPUs
use. Other expressions raise `UnknownExpression`, so that nothing doubtful is reported. CEL's syntax
becomes Python's with a few replacements. Python then parses it; no Python code is run.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from podgpu.errors import PodgpuError
from podgpu.kube.objects import parse_quantity
from podgpu.pending.dra_objects import DraDevice

_MAX_LENGTH = 2000
# A quoted text, which stays as it is, or a word that Python writes in another way.
_TOKEN = re.compile(
    r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|&&|\|\||!(?!=)|[?:]|\btrue\b|\bfalse\b"""
)
# Python's `~` binds as tightly as CEL's `!`.
_WORDS = {"&&": " and ", "||": " or ", "!": "~", "true": "True", "false": "False"}
# CEL's `C ? A : B` becomes Python's `C if A else B`, whose operands have the same precedence.
# So Python calls the condition `body`, and the value if it is true `test`.
_WORDS |= {"?": " if ", ":": " else "}
_COMPARISONS = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class UnknownExpression(PodgpuError):
    """podgpu does not support the expression."""


class MissingValue(PodgpuError):
    """The device lacks an attribute that the expression reads: it does not match."""


class _DeviceMembers:
    """`device.attributes` and `device.capacity`, or their part with one domain."""

    def __init__(self, values: Mapping[str, Any], domain: str = "") -> None:
        self.values = values
        self.domain = domain

    def find(self, name: str) -> Any:
        """Returns the part with a domain, or from such a part, a value."""
        if not self.domain:
            return _DeviceMembers(self.values, name)
        value = self.values.get(f"{self.domain}/{name}")
        if value is None:
            raise MissingValue(f"{self.domain}/{name}")
        return value

    def __contains__(self, name: object) -> bool:
        if self.domain:
            return f"{self.domain}/{name}" in self.values
        prefix = f"{name}/"
        return any(key.startswith(prefix) for key in self.values)


def matches(expression: str, device: DraDevice) -> bool:
    """Raises UnknownExpression if podgpu cannot evaluate the expression."""
    try:
        value = _evaluate(_parse(expression), device)
    except MissingValue:
        return False
    except RecursionError as error:
        raise UnknownExpression("the expression is nested too deeply") from error

    if not isinstance(value, bool):
        raise UnknownExpression("the expression is no condition")

    return value


@lru_cache(maxsize=1024)
def _parse(expression: str) -> ast.expr:
    if len(expression) > _MAX_LENGTH:
        raise UnknownExpression("the expression is too long")

    python = _TOKEN.sub(lambda match: match[1] or _WORDS[match[0]], expression)
    # Brackets let an expression have several lines.
    try:
        return ast.parse(f"({python})", mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise UnknownExpression("the syntax is not supported") from error


def _evaluate(node: ast.expr, device: DraDevice) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | str):
        return node.value
    if isinstance(node, ast.BoolOp):
        return _evaluate_logic(node, device)
    if isinstance(node, ast.IfExp):
        return _choose(node, device)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return not _evaluate_condition(node.operand, device)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _negate(_evaluate(node.operand, device))
    if isinstance(node, ast.Compare):
        return _compare(node, device)
    if isinstance(node, ast.Attribute):
        return _find_member(node, device)
    if isinstance(node, ast.Subscript):
        return _find_item(node, device)
    if isinstance(node, ast.Call):
        return _call(node, device)
    if isinstance(node, ast.List):
        return [_evaluate(item, device) for item in node.elts]

    raise UnknownExpression("the expression is not supported")


def _negate(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UnknownExpression("the expression is not supported")
    return -value


def _evaluate_condition(node: ast.expr, device: DraDevice) -> bool:
    value = _evaluate(node, device)
    if not isinstance(value, bool):
        raise UnknownExpression("a condition is not a boolean")
    return value


def _evaluate_logic(node: ast.BoolOp, device: DraDevice) -> bool:
    """As in CEL, an error in one operand does not matter if another one decides the result."""
    decides = isinstance(node.op, ast.Or)
    failures: list[PodgpuError] = []
    for part in node.values:
        try:
            if _evaluate_condition(part, device) is decides:
                return decides
        except MissingValue as error:
            failures.append(error)
        except UnknownExpression as error:
            # First, because this operand might decide the result in spite of a missing value.
            failures.insert(0, error)

    if failures:
        raise failures[0]

    return not decides


def _choose(node: ast.IfExp, device: DraDevice) -> Any:
    """An error in the value that is not chosen does not matter."""
    condition = node.body
    if _evaluate_condition(condition, device):
        return _evaluate(node.test, device)
    return _evaluate(node.orelse, device)


def _compare(node: ast.Compare, device: DraDevice) -> bool:
    if len(node.ops) != 1:
        raise UnknownExpression("chained comparisons are not supported")

    left = _evaluate(node.left, device)
    right = _evaluate(node.comparators[0], device)
    [comparison] = node.ops
    if isinstance(comparison, ast.In) and isinstance(right, list | _DeviceMembers):
        return left in right

    compare = _COMPARISONS.get(type(comparison))
    if compare is None or isinstance(left, _DeviceMembers) or isinstance(right, _DeviceMembers):
        raise UnknownExpression("the comparison is not supported")

    # Python's True equals 1. In CEL, values of two types are never equal.
    if isinstance(left, bool) != isinstance(right, bool):
        raise UnknownExpression("values of two types are compared")

    try:
        return bool(compare(left, right))
    except TypeError as error:
        raise UnknownExpression("values of two types are compared") from error


def _find_member(node: ast.Attribute, device: DraDevice) -> Any:
    if not isinstance(node.value, ast.Name):
        owner = _evaluate(node.value, device)
        if not isinstance(owner, _DeviceMembers):
            raise UnknownExpression(f"{node.attr} is not supported")
        return owner.find(node.attr)

    if node.value.id != "device":
        raise UnknownExpression(f"{node.value.id} is not supported")
    if node.attr == "driver":
        return device.driver
    if node.attr == "attributes":
        return _DeviceMembers(device.attributes)
    if node.attr == "capacity":
        return _DeviceMembers(device.capacity)
    if node.attr == "allowMultipleAllocations":
        return device.is_shared

    raise UnknownExpression(f"device.{node.attr} is not supported")


def _find_item(node: ast.Subscript, device: DraDevice) -> Any:
    owner = _evaluate(node.value, device)
    key = _evaluate(node.slice, device)
    if not isinstance(owner, _DeviceMembers) or not isinstance(key, str):
        raise UnknownExpression("the index is not supported")
    return owner.find(key)


def _call(node: ast.Call, device: DraDevice) -> Any:
    if node.keywords:
        raise UnknownExpression("the call is not supported")
    if isinstance(node.func, ast.Name) and node.func.id == "has":
        return _has_field(node.args, device)

    arguments = [_evaluate(argument, device) for argument in node.args]
    if isinstance(node.func, ast.Name) and node.func.id == "quantity":
        return _make_quantity(arguments)
    if not isinstance(node.func, ast.Attribute):
        raise UnknownExpression("the function is not supported")

    owner = _evaluate(node.func.value, device)
    return _call_method(owner, node.func.attr, arguments)


def _has_field(arguments: Sequence[ast.expr], device: DraDevice) -> bool:
    """Evaluates `has(OWNER.NAME)`. The field itself is not read, so it may be missing."""
    match arguments:
        case [ast.Attribute() as field]:
            owner = _evaluate(field.value, device)
            # Kubernetes reads a domain that a device lacks as empty, so every domain exists.
            if isinstance(owner, _DeviceMembers) and owner.domain:
                return field.attr in owner

    raise UnknownExpression("has() supports only attributes and capacities")


def _call_method(owner: Any, name: str, arguments: Sequence[Any]) -> Any:
    match owner, arguments:
        case str(), []:
            if name == "lowerAscii":
                return owner.lower()
        case str(), [str() as other]:
            method = _TEXT_METHODS.get(name)
            if method is not None:
                return method(owner, other)
        case Fraction(), [Fraction() as other]:
            compare = _QUANTITY_METHODS.get(name)
            if compare is not None:
                return compare(owner, other)

    raise UnknownExpression(f"{name} is not supported")


def _compare_quantities(left: Fraction, right: Fraction) -> int:
    """Returns -1, 0 or 1."""
    return (left > right) - (left < right)


_PLAIN = re.compile(r"(?:[\w /:-]|\\[.\-])*", re.ASCII)
# Characters that are in no pattern. They make both ends of a text visible to a plain search.
_START = "\x02"
_END = "\x03"


def _matches_pattern(text: str, pattern: str) -> bool:
    """Supports only `^`, `$`, `.*` and plain characters.

    A tenant writes the pattern, and Python's `re` could take forever for it.
    """
    core = pattern.removeprefix("^").removesuffix("$")
    pieces = core.split(".*")
    for piece in pieces:
        if _PLAIN.fullmatch(piece) is None:
            raise UnknownExpression("the regular expression is not supported")

    pieces = [piece.replace("\\", "") for piece in pieces]
    if pattern.startswith("^"):
        pieces[0] = _START + pieces[0]
    if pattern.endswith("$"):
        pieces[-1] += _END

    # It matches if the text has all pieces, one after the other.
    marked = f"{_START}{text}{_END}"
    place = 0
    for piece in pieces:
        place = marked.find(piece, place)
        if place < 0:
            return False
        place += len(piece)
    return True


_TEXT_METHODS: Mapping[str, Callable[[str, str], bool]] = {
    "startsWith": str.startswith,
    "endsWith": str.endswith,
    "contains": str.__contains__,
    "matches": _matches_pattern,
}
_QUANTITY_METHODS: Mapping[str, Callable[[Fraction, Fraction], bool | int]] = {
    "compareTo": _compare_quantities,
    "isGreaterThan": operator.gt,
    "isLessThan": operator.lt,
}


def _make_quantity(arguments: list[Any]) -> Fraction:
    if len(arguments) != 1 or not isinstance(arguments[0], str):
        raise UnknownExpression("quantity needs one text")
    try:
        return parse_quantity(arguments[0])
    except ValueError as error:
        raise UnknownExpression(str(error)) from error
