"""What came of rewriting a whole file: its new text, and everything that a person has to know about it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from podgpu.migrate.rewrite import Rewritten


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
    for change in sorted(changes, key=lambda one: one.start):
        changed += text[change.start : change.end] != change.text
        parts += (text[at : change.start], change.text)
        at = change.end
    return Migrated(
        "".join((*parts, text[at:])),
        changed,
        tuple(f"{c.place}: {said}" for c in changes for said in c.rewritten.left),
        tuple(f"{c.place}: {said}" for c in changes for said in c.rewritten.notes),
    )
