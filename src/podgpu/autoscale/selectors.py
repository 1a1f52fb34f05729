"""This module reads Kubernetes' label selectors (`a=b,c in (d,e),!f`) and says which labels they match. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from podgpu.autoscale.refusal import bad_request, quoted

_LONGEST = 8192
_LONGEST_KEPT = 512
_MOST = 100
"""Requirements in one selector, and values in one of them."""
_KEY = r"(?:[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_VALUE = r"(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"
_EQUALITY = re.compile(rf"({_KEY})\s*(==|=|!=)\s*({_VALUE})", re.ASCII)
_COMPARISON = re.compile(rf"({_KEY})\s*([<>])\s*(\d{{1,18}})", re.ASCII)
_SET = re.compile(rf"({_KEY})\s+(in|notin)\s*\(([^()]*)\)", re.ASCII)
_PRESENCE = re.compile(rf"(!?)\s*({_KEY})", re.ASCII)
_WHOLE_VALUE = re.compile(_VALUE, re.ASCII)


class Requirement(NamedTuple):
    key: str
    operator: str
    """`in`, `notin`, `exists`, `!`, `>` or `<`."""
    values: tuple[str, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        value = labels.get(self.key)
        if self.operator == "in":
            return value is not None and value in self.values
        if self.operator == "notin":
            return value is None or value not in self.values
        if self.operator == "exists":
            return value is not None
        if self.operator == "!":
            return value is None
        number = _whole_number(value)
        if number is None:
            return False
        return number > int(self.values[0]) if self.operator == ">" else number < int(self.values[0])


class Selector(NamedTuple):
    text: str = ""
    requirements: tuple[Requirement, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        return all(requirement.matches(labels) for requirement in self.requirements)

    @property
    def pairs(self) -> tuple[tuple[str, str], ...] | None:
        """Where it is nothing but `key=value,…`: these, which can be looked for without a mapping being made of the
        labels of thousands of pods."""
        found = [(r.key, r.values[0]) for r in self.requirements if r.operator == "in" and len(r.values) == 1]
        return tuple(found) if len(found) == len(self.requirements) else None


EVERYTHING = Selector()


def parse_selector(text: str) -> Selector:
    """Empty: everything. Raises Refusal. Of those that come with every poll the same one is handed out again; long ones
    are not kept, whoever sends them."""
    return _parse_kept(text) if len(text) <= _LONGEST_KEPT else _parse(text)


@lru_cache(maxsize=1024)
def _parse_kept(text: str) -> Selector:
    return _parse(text)


def _parse(text: str) -> Selector:
    if len(text) > _LONGEST:
        raise bad_request(f"the label selector {quoted(text)} is longer than {_LONGEST} letters")
    if not text.strip():
        return EVERYTHING
    parts = _split(text)
    if len(parts) > _MOST:
        raise bad_request(f"the label selector {quoted(text)} has more than {_MOST} requirements")
    return Selector(text, tuple(_requirement(part.strip(), text) for part in parts))


def _split(text: str) -> list[str]:
    """At the commas outside of brackets."""
    parts, depth, begin = [], 0, 0
    for at, letter in enumerate(text):
        if letter == "(":
            depth += 1
        elif letter == ")":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append(text[begin:at])
            begin = at + 1
    return [*parts, text[begin:]]


def _requirement(part: str, whole: str) -> Requirement:
    if match := _EQUALITY.fullmatch(part):
        return Requirement(match[1], "notin" if match[2] == "!=" else "in", (match[3],))
    if match := _COMPARISON.fullmatch(part):
        return Requirement(match[1], match[2], (match[3],))
    if match := _SET.fullmatch(part):
        values = tuple(value.strip() for value in match[3].split(","))
        if len(values) <= _MOST and all(_WHOLE_VALUE.fullmatch(value) for value in values):
            return Requirement(match[1], match[2], values)
    elif match := _PRESENCE.fullmatch(part):
        return Requirement(match[2], "!" if match[1] else "exists")
    raise bad_request(
        f"{quoted(part)} in the label selector {quoted(whole)} cannot be read: write key=value, key!=value, "
        "key in (a,b), key notin (a,b), key or !key, with commas between them"
    )


def _whole_number(text: str | None) -> int | None:
    if text is None or not (text.isascii() and text.isdigit()) or len(text) > 18:
        return None
    return int(text)
