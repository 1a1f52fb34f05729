"""What somebody who mistyped a name may have meant. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection
from difflib import SequenceMatcher, get_close_matches

_MOST = 3
_SHORTEST_WORD = 4
"""Of letters behind one dash: fewer are short options in a row, or one with its value."""
_NEARLY = 0.85


def no_such(kind: str, name: str, names: Collection[str]) -> str:
    """`there is no option --colectors; did you mean --collectors?`"""
    close = close_to(name, names)
    return f"there is no {kind} {name}" + (f"; did you mean {' or '.join(close)}?" if close else "")


def close_to(name: str, names: Collection[str]) -> list[str]:
    """The nearest first; those that begin with it count as near, however much is missing."""
    begun = sorted(n for n in names if n.startswith(name) and len(name.strip("-")) >= _SHORTEST_WORD)
    return list(dict.fromkeys((*get_close_matches(name, names, _MOST), *begun)))[:_MOST]


def one_dash_typo(argument: str, long_names: Collection[str]) -> bool:
    """`-colectors x`: Go's way to write a long option, mistyped. click would take it for `-c olectors`."""
    match = re.fullmatch(r"-([a-z][a-z-]+)(?:=.*)?", argument, re.DOTALL)
    if match is None or len(match[1]) < _SHORTEST_WORD or f"--{match[1]}" in long_names:
        return False
    return any(SequenceMatcher(None, match[1], name.lstrip("-")).ratio() >= _NEARLY for name in long_names)
