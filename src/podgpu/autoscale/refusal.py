"""This module holds why an autoscaler gets no figure: one error, whose kind becomes a status of gRPC or of HTTP where
it leaves."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import Enum

from podgpu.errors import PodgpuError


class Kind(Enum):
    BAD_REQUEST = "BadRequest"
    """The question is wrong, and will be as wrong the next time."""
    FORBIDDEN = "Forbidden"
    NOT_FOUND = "NotFound"
    """There is nothing of that name: no such metric, no pod that matches, none that holds a GPU."""
    NO_DATA = "ServiceUnavailable"
    """It is there, and its figures are not, or not all of them: later they may be."""


class Refusal(PodgpuError):
    """`str()` says what is wrong, of what, and what to do."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def bad_request(message: str) -> Refusal:
    return Refusal(Kind.BAD_REQUEST, message)


def not_found(message: str) -> Refusal:
    return Refusal(Kind.NOT_FOUND, message)


def no_data(message: str) -> Refusal:
    return Refusal(Kind.NO_DATA, message)


# How the message says it

_LONGEST = 80
_MOST_NAMED = 3


def quoted(text: str) -> str:
    """What somebody wrote, short and on one line."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text[:_LONGEST])
    return f"'{shown}…'" if len(text) > _LONGEST else f"'{shown}'"


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that was probably meant; empty: none. Comparing takes longer than a word is long: a tenth of a
    second for a key of 60 KB, in which nobody else would be answered."""
    if len(word) > _LONGEST:
        return ""
    by_lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`: did you mean X?`, or what there is."""
    names = tuple(known)
    near = nearest(word, names)
    return f": did you mean {near}?" if near else f"; there are {', '.join(names)}"


def some_of(names: Iterable[str]) -> str:
    """The first few, and how many more."""
    listed = list(names)
    rest = len(listed) - _MOST_NAMED
    return ", ".join(listed[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
