"""This module says in the log what changed since the last round: once per change, not once per round."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from podgpu.clock import Faults
from podgpu.cluster.view import ClusterView

_log = logging.getLogger("podgpu")
MOST_LINES = 10
"""Of one kind at once: a rack that goes dark is a hundred nodes."""
SAY_SECONDS = 600.0
"""How often the same fault of the same target is worth a line, however often it comes and goes."""
LONGEST_LINE = 1000
"""Names of others are in it."""


class ChangeLog:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._faults: Faults[str] = Faults(clock, SAY_SECONDS)
        self._old: Faults[str] = Faults(clock, SAY_SECONDS)
        self._nodes: frozenset[str] = frozenset()
        self._notes: frozenset[str] = frozenset()

    def report(self, view: ClusterView) -> None:
        self._report_targets(view)
        self._report_nodes(view)
        notes = frozenset(view.notes) - {outcome.said for outcome in view.outcomes}
        _each(_log.warning, sorted(notes - self._notes))
        self._notes = notes

    def _report_targets(self, view: ClusterView) -> None:
        failing = [o for o in view.outcomes if o.error and self._faults.fails(o.target, o.error)]
        well = [o for o in view.outcomes if not o.error and self._faults.answers(o.target)]
        _each(_log.warning, [f"{outcome.said}; podgpu goes on and tries again" for outcome in failing])
        _each(_log.info, [f"{outcome.target}: answers again" for outcome in well])
        asked = {outcome.target for outcome in view.outcomes}
        self._faults.forget(lambda target: target not in asked)

    def _report_nodes(self, view: ClusterView) -> None:
        nodes = frozenset(node.name for node in view.nodes)
        new = [f"{node.name}: seen" for node in view.nodes if node.name not in self._nodes]
        old = [
            f"{node.name}: marked old: no news from it"
            for node in view.nodes
            if node.old and self._old.fails(node.name, "old")
        ]
        back = [f"{node.name}: fresh again" for node in view.nodes if not node.old and self._old.answers(node.name)]
        gone = [f"{name}: dropped" for name in sorted(self._nodes - nodes)]
        _each(_log.info, [*new, *back])
        _each(_log.warning, [*old, *gone])
        self._nodes = nodes
        self._old.forget(lambda name: name not in nodes)


def _each(log: Callable[[str, str], None], lines: Iterable[str]) -> None:
    lines = list(lines)
    for line in lines[:MOST_LINES]:
        log("%s", line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}…")
    if len(lines) > MOST_LINES:
        log("%s", f"and {len(lines) - MOST_LINES} more")
