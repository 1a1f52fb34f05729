"""Says in the log what changed since the last round: once per change, not once per round."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from podgpu.cluster.view import ClusterView

_log = logging.getLogger("podgpu")
MOST_LINES = 10
"""Of one kind at once: a rack that goes dark is a hundred nodes."""
LONGEST_LINE = 1000
"""Names of others are in it."""


class ChangeLog:
    def __init__(self) -> None:
        self._failing: dict[str, str] = {}
        self._nodes: dict[str, bool] = {}
        """Name -> whether it is old."""
        self._notes: frozenset[str] = frozenset()

    def report(self, view: ClusterView) -> None:
        self._report_targets(view)
        self._report_nodes(view)
        notes = frozenset(view.notes) - {outcome.said for outcome in view.outcomes}
        _each(_log.warning, sorted(notes - self._notes))
        self._notes = notes

    def _report_targets(self, view: ClusterView) -> None:
        failing = {o.target: o.error for o in view.outcomes if o.error}
        messages = {o.target: o.said for o in view.outcomes}
        begun = [target for target, error in failing.items() if self._failing.get(target) != error]
        ended = [target for target in self._failing if target in messages and target not in failing]
        _each(_log.warning, [f"{messages[target]}; podgpu goes on and tries again" for target in begun])
        _each(_log.info, [f"{target}: answers again" for target in ended])
        self._failing = failing

    def _report_nodes(self, view: ClusterView) -> None:
        nodes = {node.name: node.old for node in view.nodes}
        before = self._nodes
        new = [f"{name}: seen" for name in nodes if name not in before]
        old = [
            f"{name}: marked old, nothing new came from it"
            for name in nodes
            if nodes[name] and before.get(name) is False
        ]
        back = [f"{name}: fresh again" for name in nodes if before.get(name) and not nodes[name]]
        gone = [f"{name}: dropped" for name in before if name not in nodes]
        _each(_log.info, [*new, *back])
        _each(_log.warning, [*old, *gone])
        self._nodes = nodes


def _each(log: Callable[[str, str], None], lines: Iterable[str]) -> None:
    lines = list(lines)
    for line in lines[:MOST_LINES]:
        log("%s", line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}…")
    if len(lines) > MOST_LINES:
        log("%s", f"and {len(lines) - MOST_LINES} more")
