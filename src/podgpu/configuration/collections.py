"""This module says which collection of the configuration file a field belongs to: by its name, or by a shell pattern.
Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from podgpu.configuration.bounded_pattern import BoundedPattern
from podgpu.configuration.config_file import Collection
from podgpu.errors import UsageError
from podgpu.metrics.counters import Counter
from podgpu.metrics.names import names_of, rename_of

_SPECIAL = set("*?[\\")


def collection_of_fields(
    counters: Sequence[Counter], collections: Sequence[Collection], pass_over: bool = False
) -> Mapping[int, Collection]:
    """Field id -> its collection; those of none are read with all the others.

    Patterns go by the names as the counters write them, as in dcgm-exporter; one that fits none of these is tried on
    every name of the same figures, so that a file written for 4.8's names has the same fields in a 4.9. Raises
    UsageError where a collection has no field, unless such are passed over, or two have the same one.
    """
    found: dict[int, Collection] = {}
    for collection in collections:
        fits = [_matcher(pattern, collection) for pattern in collection.include]
        chosen = [counter for fit in fits for counter in _chosen(counters, fit)]
        if not chosen and not pass_over:
            raise UsageError(
                f"{collection.place}: {collection.name}: none of the configured fields is called"
                f" {', '.join(collection.include[:5])}: add the field to the counters, or remove the collection"
            )
        for counter in _with_other_names(chosen, counters):
            other = found.setdefault(counter.field.id, collection)
            if other is not collection:
                raise UsageError(
                    f"{collection.place}: {collection.name}: {counter.name} is in the collection {other.name} too: a"
                    " field is read at one interval"
                )
    return found


def _with_other_names(chosen: Sequence[Counter], counters: Sequence[Counter]) -> list[Counter]:
    """With --dcgm-names both a figure stands under two names: it is read at one interval."""
    figures = {rename for counter in chosen if (rename := rename_of(counter.name)) is not None}
    return [counter for counter in counters if counter in chosen or rename_of(counter.name) in figures]


def _chosen(counters: Sequence[Counter], fits: Callable[[str], bool]) -> list[Counter]:
    as_written = [counter for counter in counters if fits(counter.name)]
    return as_written or [counter for counter in counters if any(map(fits, names_of(counter.field.id)))]


def _matcher(pattern: str, collection: Collection) -> Callable[[str], bool]:
    if not _SPECIAL & set(pattern):
        return lambda name: name == pattern
    try:
        return BoundedPattern(rf"\A(?:{_as_regex(pattern)})\Z").is_in
    except (re.error, ValueError, OverflowError):
        raise UsageError(
            f"{collection.place}: {collection.name}: {pattern[:80]!a} is not a pattern: * ? and [A-Z] stand for letters"
        ) from None


def _as_regex(pattern: str) -> str:
    """Go's path.Match. Names have no slash, which is all that * would stop at. Raises ValueError."""
    made, at = [], 0
    while at < len(pattern):
        letter = pattern[at]
        if letter == "[":
            text, at = _class(pattern, at + 1)
            made.append(text)
            continue
        if letter == "\\":
            at += 1
            if at == len(pattern):
                raise ValueError(pattern)
            made.append(re.escape(pattern[at]))
        else:
            made.append({"*": "[^/]*", "?": "[^/]"}.get(letter, re.escape(letter)))
        at += 1
    return "".join(made)


def _class(pattern: str, at: int) -> tuple[str, int]:
    """What stands between [ and ], and the place after it."""
    negated = pattern.startswith("^", at)
    at += negated
    parts: list[str] = []
    while at < len(pattern) and (pattern[at] != "]" or not parts):
        low, at = _letter(pattern, at)
        high = low
        if pattern.startswith("-", at):
            high, at = _letter(pattern, at + 1)
        if high < low:
            raise ValueError(pattern)
        parts.append(f"{re.escape(low)}-{re.escape(high)}")
    if at >= len(pattern):
        raise ValueError(pattern)
    return f"[{'^' if negated else ''}{''.join(parts)}]", at + 1


def _letter(pattern: str, at: int) -> tuple[str, int]:
    """One end of a range; neither - nor ] without a backslash before it."""
    if pattern.startswith("\\", at):
        at += 1
    elif at < len(pattern) and pattern[at] in "-]":
        raise ValueError(pattern)
    if at >= len(pattern):
        raise ValueError(pattern)
    return pattern[at], at + 1
