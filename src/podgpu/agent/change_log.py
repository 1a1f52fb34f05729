"""ChangeLog says in the log what changed since the last snapshot: once per change, not once per tick."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable

from podgpu.clock import Faults
from podgpu.errors import few_of
from podgpu.holders.unmapped import describe, explain
from podgpu.metrics.fields import fields
from podgpu.model import Outcome, Snapshot, Unmapped

_log = logging.getLogger("podgpu")
MOST_LINES = 5
"""Of one kind at once: a full node may have a thousand."""
SAY_SECONDS = 60.0
"""How often the same fault of the same source is worth a line, however often it comes and goes."""
_SAME_FAULT = {"hung": "deadline"}
"""A call that is late is `deadline` in the turn that began it and `hung` in the next."""


class ChangeLog:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._faults: Faults[tuple[str, str]] = Faults(clock, SAY_SECONDS)
        """By source and, for a GPU, its UUID: only the same one can answer again."""
        self._unsupported: set[tuple[str, int]] = set()
        self._unmapped: frozenset[Unmapped] = frozenset()

    def report(self, snapshot: Snapshot) -> None:
        for outcome in snapshot.outcomes:
            if outcome.ok:
                self._report_recovery(outcome)
            else:
                self._report_fault(outcome)
        self._forget_gone(snapshot)
        self._report_unsupported(snapshot)
        self._report_unmapped(snapshot)

    def _report_fault(self, outcome: Outcome) -> None:
        if self._faults.fails((outcome.source, outcome.device), _kind(outcome)):
            message = outcome.message.removeprefix(f"{outcome.source}: ")
            _log.warning("%s: %s; podgpu goes on and tries again", _name(outcome), message)

    def _report_recovery(self, outcome: Outcome) -> None:
        if self._faults.answers((outcome.source, outcome.device)):
            _log.info("%s: answers again", _name(outcome))

    def _forget_gone(self, snapshot: Snapshot) -> None:
        """GPUs that are listed no more. While no driver answers none is listed, and that says nothing of any."""
        here = {(o.source, o.device) for o in snapshot.outcomes}
        if any(device for _, device in here):
            self._faults.forget(lambda key: key not in here and key[0].startswith("gpu"))

    def _report_unsupported(self, snapshot: Snapshot) -> None:
        new: dict[int, list[str]] = defaultdict(list)
        for key, field_id in snapshot.unsupported:
            if (key, field_id) not in self._unsupported:
                new[field_id].append(key)
        self._unsupported.update(snapshot.unsupported)
        for field_id, keys in new.items():
            _log.warning("%s: %s does not provide it, so it has no series there", fields()[field_id].name, few_of(keys))

    def _report_unmapped(self, snapshot: Snapshot) -> None:
        unmapped = frozenset(snapshot.unmapped)
        new: dict[tuple[str, str], list[Unmapped]] = defaultdict(list)
        for assignment in sorted(unmapped - self._unmapped, key=lambda a: (a.device_id, describe(a))):
            new[assignment.source, assignment.reason].append(assignment)
        self._unmapped = unmapped
        for (source, reason), those in sorted(new.items()):
            explanation = explain(those[0])
            level = logging.INFO if explanation.harmless else logging.WARNING
            for assignment in those[:MOST_LINES]:
                _log.log(
                    level,
                    "%s: %s: %s (%s); %s",
                    *(source, describe(assignment), explanation.reason, reason, explanation.advice),
                )
            if len(those) > MOST_LINES:
                more = len(those) - MOST_LINES
                _log.log(level, "%s: and %d more of that kind (%s): podgpu doctor names all", source, more, reason)


def _kind(outcome: Outcome) -> str:
    return _SAME_FAULT.get(outcome.error, outcome.error)


def _name(outcome: Outcome) -> str:
    return f"{outcome.source} ({outcome.device})" if outcome.device else outcome.source
