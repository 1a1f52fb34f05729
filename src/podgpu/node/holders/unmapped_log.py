"""Logs allocations that identify no device of the node."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from podgpu.errors import few_of
from podgpu.model import Unmapped, group_by
from podgpu.node.holders.reader import describe, explain

_log = logging.getLogger(__name__)


class UnmappedLog:
    """Logs each allocation once, until it is mapped and then unmapped again."""

    def __init__(self) -> None:
        self._unmapped: frozenset[Unmapped] = frozenset()

    def report(self, unmapped: Iterable[Unmapped]) -> None:
        current = frozenset(unmapped)
        new = sorted(current - self._unmapped, key=describe)
        self._unmapped = current

        by_reason = group_by(new, lambda entry: (entry.source, entry.reason))
        for (source, reason), entries in sorted(by_reason.items()):
            explanation = explain(entries[0])
            level = logging.INFO if explanation.harmless else logging.WARNING
            what = few_of(map(describe, entries))
            why = f"{explanation.reason} ({reason})"
            _log.log(level, "%s: %s: %s; %s", source, what, why, explanation.advice)
