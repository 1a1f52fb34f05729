"""Says in the log what changed since the last snapshot: once per change, not once per tick."""

from __future__ import annotations

import logging
from collections import defaultdict

from podgpu.allocation.unmapped import explain, statement
from podgpu.catalog.fields import fields
from podgpu.model import Outcome, Snapshot, Unmapped

_log = logging.getLogger("podgpu")
MOST_LINES = 5
"""Of one kind at once: a full node may have a thousand."""


class ChangeLog:
    def __init__(self) -> None:
        self._failing: dict[str, str] = {}
        self._unsupported: set[tuple[str, int]] = set()
        self._unmapped: frozenset[Unmapped] = frozenset()

    def report(self, snapshot: Snapshot) -> None:
        for outcome in snapshot.outcomes:
            self._report_source(outcome)
        self._report_unsupported(snapshot)
        self._report_unmapped(snapshot)

    def _report_source(self, outcome: Outcome) -> None:
        before = self._failing.get(outcome.source)
        if outcome.ok:
            if before is not None:
                del self._failing[outcome.source]
                _log.info("%s: answers again", outcome.source)
        elif before != outcome.error:
            self._failing[outcome.source] = outcome.error
            message = outcome.message.removeprefix(f"{outcome.source}: ")
            _log.warning("%s: %s; podgpu goes on and tries again", outcome.source, message)

    def _report_unsupported(self, snapshot: Snapshot) -> None:
        new: dict[int, list[str]] = defaultdict(list)
        for key, field_id in snapshot.unsupported:
            if (key, field_id) not in self._unsupported:
                new[field_id].append(key)
        self._unsupported.update(snapshot.unsupported)
        for field_id, keys in new.items():
            _log.warning("%s: not given by %s; it has no series there", fields()[field_id].name, ", ".join(keys))

    def _report_unmapped(self, snapshot: Snapshot) -> None:
        unmapped = frozenset(snapshot.unmapped)
        new: dict[tuple[str, str], list[Unmapped]] = defaultdict(list)
        for one in sorted(unmapped - self._unmapped, key=lambda one: (one.device_id, statement(one))):
            new[one.source, one.reason].append(one)
        self._unmapped = unmapped
        for (source, reason), those in sorted(new.items()):
            why = explain(those[0])
            level = logging.INFO if why.harmless else logging.WARNING
            for one in those[:MOST_LINES]:
                _log.log(level, "%s: %s, but %s (%s): %s", source, statement(one), why.why, reason, why.advice)
            if len(those) > MOST_LINES:
                more = len(those) - MOST_LINES
                _log.log(level, "%s: and %d more of that kind (%s): podgpu doctor names all", source, more, reason)
