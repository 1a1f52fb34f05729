"""Defines the findings of `podgpu doctor`, and formats them as text and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial

from podgpu.errors import one_line, plural


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"  # information, not a problem
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    subject: str
    text: str
    advice: str = ""


ok, note, wrong = (partial(Finding, level) for level in Level)


def count(findings: Sequence[Finding], level: Level) -> int:
    return sum(finding.level is level for finding in findings)


_STYLES = {Level.OK: ("ok", "32"), Level.NOTE: ("note", "33"), Level.WRONG: ("WRONG", "1;31")}  # word and colour


def as_text(findings: Sequence[Finding], colour: bool = False) -> str:
    """Returns one line per finding, followed by its advice, and a summary at the end."""
    width = max((len(finding.subject) for finding in findings), default=0)
    lines: list[str] = []
    for finding in findings:
        word, code = _STYLES[finding.level]
        start = f"\x1b[{code}m{word:<5}\x1b[0m" if colour else f"{word:<5}"
        lines.append(f"{start} {finding.subject:<{width}}  {one_line(finding.text)}")
        if finding.advice:
            lines.append(f"{' ' * (width + 8)}→ {one_line(finding.advice)}")
    problems, notes = count(findings, Level.WRONG), count(findings, Level.NOTE)
    summary = plural(problems, "problem") if problems else "no problems" if notes else "no problems found"
    return "\n".join([*lines, "", f"{summary}, {plural(notes, 'note')}" if notes else summary])


def as_json(findings: Sequence[Finding]) -> str:
    counts = {"wrong": count(findings, Level.WRONG), "notes": count(findings, Level.NOTE)}
    return json.dumps({**counts, "findings": [asdict(f) for f in findings]}, indent=2, ensure_ascii=False)
