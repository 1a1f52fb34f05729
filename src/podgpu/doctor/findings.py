"""A finding is what the doctor has to say; this module tells findings to people and to programs. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing fails because of it."""
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    subject: str
    text: str
    advice: str = ""
    """What the person can do; empty where there is nothing to do or `text` says it."""


REPORT = "this is a mistake in podgpu: run it again with --debug and report what it says"


def ok(subject: str, text: str) -> Finding:
    return Finding(Level.OK, subject, text)


def note(subject: str, text: str, advice: str = "") -> Finding:
    return Finding(Level.NOTE, subject, text, advice)


def wrong(subject: str, text: str, advice: str = "") -> Finding:
    return Finding(Level.WRONG, subject, text, advice)


def count(findings: Sequence[Finding], level: Level) -> int:
    return sum(f.level is level for f in findings)


_WORDS = {Level.OK: "ok", Level.NOTE: "note", Level.WRONG: "WRONG"}
_COLOURS = {Level.OK: "\x1b[32m", Level.NOTE: "\x1b[33m", Level.WRONG: "\x1b[1;31m"}
_PLAIN = "\x1b[0m"
_WORD_WIDTH = max(map(len, _WORDS.values()))


def as_text(findings: Sequence[Finding], colour: bool = False) -> str:
    """Aligned lines, one or two for each finding, and a closing line."""
    subject_width = max((len(f.subject) for f in findings), default=0)
    margin = " " * (_WORD_WIDTH + 1 + subject_width + 2)
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{_word(finding.level, colour)} {finding.subject:<{subject_width}}  {_one_line(finding.text)}")
        if finding.advice:
            lines.append(f"{margin}→ {_one_line(finding.advice)}")
    return "\n".join([*lines, "", closing_line(findings)])


def as_json(findings: Sequence[Finding]) -> str:
    counts = {"wrong": count(findings, Level.WRONG), "notes": count(findings, Level.NOTE)}
    return json.dumps({**counts, "findings": [asdict(f) for f in findings]}, indent=2, ensure_ascii=False)


def closing_line(findings: Sequence[Finding]) -> str:
    wrongs, notes = count(findings, Level.WRONG), count(findings, Level.NOTE)
    if not wrongs and not notes:
        return "all well"
    things = {0: "nothing is wrong", 1: "1 thing is wrong"}.get(wrongs, f"{wrongs} things are wrong")
    return f"{things}, {plural(notes, 'note')}" if notes else things


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _word(level: Level, colour: bool) -> str:
    padded = f"{_WORDS[level]:<{_WORD_WIDTH}}"
    return f"{_COLOURS[level]}{padded}{_PLAIN}" if colour else padded


def _one_line(text: str) -> str:
    """Ids and names come from others: nothing in them may move the cursor or break the alignment."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
