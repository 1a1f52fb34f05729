"""This module cuts PromQL into tokens, each with its place, with Grafana's variables among them. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from podgpu.errors import PodgpuError

MOST_LETTERS = 64 * 1024

_SPACE = re.compile(r"(?:\s+|#[^\n]*)+")
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'|`[^`]*`', re.DOTALL)
_DURATION = re.compile(r"(?:[0-9]+(?:ms|[smhdwy]))+(?![\w.])")
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]+|(?:[0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_VARIABLE = re.compile(r"\$\{[^{}\n]{1,200}\}|\$\w+|\[\[\w+(?::\w+)?\]\]")
_NAME = re.compile(r"[A-Za-z_:][\w:]*")
_WORD = re.compile(r"\w+")
_NAME_IN_BRACKETS = re.compile(r"[A-Za-z_]\w*")
_OPERATOR = re.compile(r"==|!=|=~|!~|<=|>=|[-+*/%^<>=(){}\[\],@:]")


class PromqlError(PodgpuError):
    """The text is no PromQL, or none that podgpu can read; with the place."""


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    """name, number, duration, string, variable, operator or end."""
    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


def tokens_of(text: str) -> list[Token]:
    """The last is of the kind `end`. Raises PromqlError."""
    if len(text) > MOST_LETTERS:
        raise PromqlError(f"longer than {MOST_LETTERS} letters")
    found: list[Token] = []
    at, brackets = 0, 0
    while True:
        space = _SPACE.match(text, at)
        at = space.end() if space else at
        if at >= len(text):
            return [*found, Token("end", "", len(text))]
        token = _token(text, at, brackets > 0)
        brackets += {"[": 1, "]": -1}.get(token.text, 0) if token.kind == "operator" else 0
        found.append(token)
        at = token.end


def _token(text: str, at: int, in_brackets: bool) -> Token:
    name = _NAME_IN_BRACKETS if in_brackets else _NAME
    for kind, pattern in (
        ("variable", _VARIABLE),
        ("string", _STRING),
        ("duration", _DURATION),
        ("number", _NUMBER),
        ("name", name),
        ("operator", _OPERATOR),
    ):
        match = pattern.match(text, at)
        if match is not None:
            return _with_variables(text, Token(kind, match[0], at))
    raise PromqlError(f"what stands at letter {at + 1} is not understood: {text[at : at + 20]!a}")


def _with_variables(text: str, token: Token) -> Token:
    """`DCGM_FI_DEV_$what` and `${prefix}_total` are one name, which nobody knows before Grafana does."""
    while token.kind in ("name", "variable"):
        more = _VARIABLE.match(text, token.end) or (_WORD.match(text, token.end) if token.kind == "variable" else None)
        if more is None:
            break
        token = Token("variable", text[token.start : more.end()], token.start)
    return token


def has_variable(text: str) -> bool:
    return _VARIABLE.search(text) is not None


def is_variable(text: str) -> bool:
    """It is one and nothing else."""
    return _VARIABLE.fullmatch(text) is not None


def unquoted(literal: str) -> str:
    """What a string stands for, but for letters written as numbers, which no name has."""
    if literal.startswith("`"):
        return literal[1:-1]
    return re.sub(r"\\(.)", _unescaped, literal[1:-1], flags=re.DOTALL)


def _unescaped(match: re.Match[str]) -> str:
    letter = match[1]
    known = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
    if letter in "xuU01234567":
        return match[0]
    return known.get(letter, letter)
