"""This module says what came of rewriting an expression, a part of a file or a whole one: the new text, and everything
that a person has to know about it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Edit = tuple[int, int, str]
"""From, to, and what stands there instead."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    text: str
    """As before where something of it could not be rewritten."""
    left: tuple[str, ...] = ()
    """What could not be rewritten, each in a sentence."""
    notes: tuple[str, ...] = ()
    """What is worth knowing about what was."""
    edits: tuple[Edit, ...] = ()
    """What was done to the text, by places in the old one."""
    asks_both: bool = False
    """It reads either name already, and stays as it is."""
    is_theirs: bool = False
    """It reads the exporter's series: what names their labels beside it means these."""


@dataclass(frozen=True, slots=True)
class Change:
    """One part of a file, and what became of it."""

    start: int
    end: int
    text: str
    """What stands there from now on."""
    place: str
    """Where it is, for a person."""
    rewritten: Rewritten


@dataclass(frozen=True, slots=True)
class Migrated:
    text: str
    changed: int = 0
    """Parts that were rewritten."""
    left: tuple[str, ...] = ()
    """What could not be, each with its place."""
    notes: tuple[str, ...] = ()


def gather(text: str, changes: Sequence[Change]) -> Migrated:
    """The file with all of them."""
    parts: list[str] = []
    at = changed = 0
    for change in sorted(changes, key=lambda c: c.start):
        changed += text[change.start : change.end] != change.text
        parts += (text[at : change.start], change.text)
        at = change.end
    return Migrated(
        "".join((*parts, text[at:])),
        changed,
        tuple(f"{c.place}: {sentence}" for c in changes for sentence in c.rewritten.left),
        tuple(f"{c.place}: {sentence}" for c in changes for sentence in c.rewritten.notes),
    )
