"""This module has regular expressions whose time is bounded, as Go's is: each letter of a text is held against each
part of the pattern once. Python's own may take for ever: `(a+)+$` on sixty letters does, and the letters are any
tenant's. Pure.

Python reads the pattern, so that it means the same here. What cannot be had in bounded time (looking ahead, a group
that comes again) is refused; Go has none of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from re import _constants as c  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

_MOST_PARTS = 1000
_FOUND = 0
_REPEATS = (c.MAX_REPEAT, c.MIN_REPEAT)
_LETTERS = (c.LITERAL, c.NOT_LITERAL, c.ANY, c.IN)
_CATEGORIES: dict[Any, Callable[[str], object]] = {
    c.CATEGORY_DIGIT: str.isdecimal,
    c.CATEGORY_SPACE: str.isspace,
    c.CATEGORY_WORD: lambda letter: letter.isalnum() or letter == "_",
    c.CATEGORY_NOT_DIGIT: lambda letter: not letter.isdecimal(),
    c.CATEGORY_NOT_SPACE: lambda letter: not letter.isspace(),
    c.CATEGORY_NOT_WORD: lambda letter: not (letter.isalnum() or letter == "_"),
}


class _Part(NamedTuple):
    """What is looked for at one place: a letter, a place such as the end, or neither; and what comes after."""

    after: list[int]
    takes: Callable[[str], bool] | None = None
    place: Any = None


class BoundedPattern:
    def __init__(self, pattern: str) -> None:
        """Raises re.error for what is no pattern, or none that ends in bounded time."""
        self._pattern = pattern
        self._parts = [_Part([])]
        self._sequences = 0
        try:
            re.compile(pattern)
            tree = _parser.parse(pattern)
            self._first = self._sequence(tree, tree.state.flags, _FOUND)
        except (RecursionError, OverflowError) as e:
            raise re.error("too many brackets within brackets, or too large a number", pattern) from e

    def is_in(self, text: str) -> bool:
        """Whether it matches anywhere in the text."""
        reached: set[int] = set()
        for at in range(len(text) + 1):
            self._reach(self._first, text, at, reached)
            if _FOUND in reached:
                return True
            taken = (self._parts[number] for number in reached) if at < len(text) else ()
            following = {after for part in taken if part.takes and part.takes(text[at]) for after in part.after}
            reached = set()
            for number in following:
                self._reach(number, text, at + 1, reached)
        return False

    def _reach(self, first: int, text: str, at: int, reached: set[int]) -> None:
        """Adds the part, and those that come after it without taking a letter."""
        waiting = [first]
        while waiting:
            number = waiting.pop()
            if number not in reached:
                reached.add(number)
                part = self._parts[number]
                if part.takes is None and (part.place is None or _is_at(part.place, text, at)):
                    waiting += part.after

    # From a pattern to its parts, the last one first

    def _sequence(self, items: Iterable[tuple[Any, Any]], flags: int, after: int) -> int:
        self._sequences += 1  # nothing, a thousand million times, adds no part
        self._bound(self._sequences)
        for kind, value in reversed(list(items)):
            after = self._one(kind, value, flags, after)
        return after

    def _one(self, kind: Any, value: Any, flags: int, after: int) -> int:
        if kind in _LETTERS:
            return self._new(_Part([after], _letter(kind, value, bool(flags & re.IGNORECASE))))
        if kind is c.AT:
            return self._new(_Part([after], place=value))
        if kind is c.BRANCH:
            return self._new(_Part([self._sequence(branch, flags, after) for branch in value[1]]))
        if kind is c.SUBPATTERN:
            _, more, fewer, items = value
            return self._sequence(items, flags & ~fewer | more, after)
        if kind in _REPEATS:
            least, most, items = value
            return self._repeat(least, most, items, flags, after)
        raise re.error("look-around, back-references and possessive repeats are not allowed", self._pattern)

    def _repeat(self, least: int, most: Any, items: Sequence[tuple[Any, Any]], flags: int, after: int) -> int:
        first = after
        if most is c.MAXREPEAT:
            first = self._new(_Part([after]))
            self._parts[first].after.append(self._sequence(items, flags, first))
        else:
            for _ in range(most - least):
                first = self._new(_Part([after, self._sequence(items, flags, first)]))
        for _ in range(least):
            first = self._sequence(items, flags, first)
        return first

    def _new(self, part: _Part) -> int:
        self._bound(len(self._parts) + 1)
        self._parts.append(part)
        return len(self._parts) - 1

    def _bound(self, parts: int) -> None:
        if parts > _MOST_PARTS:
            raise re.error(f"more than {_MOST_PARTS} letters and repeats", self._pattern)


def _letter(kind: Any, value: Any, any_case: bool) -> Callable[[str], bool]:
    if kind is c.ANY:
        return lambda letter: letter != "\n"
    items = value if kind is c.IN else [(kind, value)]
    wanted = not any(kind is c.NEGATE or kind is c.NOT_LITERAL for kind, _ in items)
    tests = [_test(*item) for item in items if item[0] is not c.NEGATE]

    def takes(letter: str) -> bool:
        cases = {letter, letter.lower(), letter.upper()} if any_case else (letter,)
        return any(test(case) for test in tests for case in cases) is wanted

    return takes


def _test(kind: Any, value: Any) -> Callable[[str], object]:
    if kind is c.CATEGORY:
        return _CATEGORIES[value]
    if kind is c.RANGE:
        low, high = map(chr, value)
        return lambda letter: low <= letter <= high
    return chr(value).__eq__


def _is_at(place: Any, text: str, at: int) -> bool:
    if place in (c.AT_BEGINNING, c.AT_BEGINNING_STRING):
        return at == 0
    if place in (c.AT_END, c.AT_END_STRING):
        return at == len(text)
    before, behind = (
        letter != "" and _CATEGORIES[c.CATEGORY_WORD](letter) for letter in (text[:at][-1:], text[at : at + 1])
    )
    return (bool(before) != bool(behind)) is (place is c.AT_BOUNDARY)
