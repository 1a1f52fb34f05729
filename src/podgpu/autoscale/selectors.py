"""Parses and matches Kubernetes' label selectors, such as `a=b,c in (d,e),!f`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from podgpu.autoscale.refusal import bad_request, quote

_MAX_LENGTH = 8192
_MAX_ITEMS = 100  # maximum number of requirements in a selector, and of values in a requirement
_KEY = r"(?:[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_VALUE = r"(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"
_EQUALITY = re.compile(rf"({_KEY})\s*(==|=|!=)\s*({_VALUE})", re.ASCII)
_COMPARISON = re.compile(rf"({_KEY})\s*([<>])\s*(\d{{1,18}})", re.ASCII)
_SET = re.compile(rf"({_KEY})\s+(in|notin)\s*\(([^()]*)\)", re.ASCII)
_PRESENCE = re.compile(rf"(!?)\s*({_KEY})", re.ASCII)
_WHOLE_VALUE = re.compile(_VALUE, re.ASCII)
_COMMA = re.compile(r",(?![^(]*\))")  # a comma that is not inside brackets


class Requirement(NamedTuple):
    key: str
    operator: str  # in, notin, exists, !, > or <
    values: tuple[str, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        value = labels.get(self.key)
        match self.operator:
            case "in":
                return value is not None and value in self.values
            case "notin":
                return value is None or value not in self.values
            case "exists":
                return value is not None
            case "!":
                return value is None
        if value is None or not (value.isascii() and value.isdigit()) or len(value) > 18:
            return False
        return int(value) > int(self.values[0]) if self.operator == ">" else int(value) < int(self.values[0])


class LabelSelector(NamedTuple):
    text: str = ""
    requirements: tuple[Requirement, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        return all(requirement.matches(labels) for requirement in self.requirements)


EVERYTHING = LabelSelector()


def parse_selector(text: str) -> LabelSelector:
    """An empty text selects everything. Raises Refusal."""
    if len(text) > _MAX_LENGTH:
        raise bad_request(f"the label selector {quote(text)} is longer than {_MAX_LENGTH} characters")
    if not text.strip():
        return EVERYTHING
    parts = _COMMA.split(text)
    if len(parts) > _MAX_ITEMS:
        raise bad_request(f"the label selector {quote(text)} has more than {_MAX_ITEMS} requirements")
    return LabelSelector(text, tuple(_parse_requirement(part.strip(), text) for part in parts))


def _parse_requirement(part: str, whole: str) -> Requirement:
    if match := _EQUALITY.fullmatch(part):
        return Requirement(match[1], "notin" if match[2] == "!=" else "in", (match[3],))
    if match := _COMPARISON.fullmatch(part):
        return Requirement(match[1], match[2], (match[3],))
    if match := _SET.fullmatch(part):
        values = tuple(value.strip() for value in match[3].split(","))
        if len(values) <= _MAX_ITEMS and all(_WHOLE_VALUE.fullmatch(value) for value in values):
            return Requirement(match[1], match[2], values)
    elif match := _PRESENCE.fullmatch(part):
        return Requirement(match[2], "!" if match[1] else "exists")
    raise bad_request(
        f"cannot parse {quote(part)} in the label selector {quote(whole)}: write key=value, key!=value,"
        " key in (a,b), key notin (a,b), key or !key, separated by commas"
    )
