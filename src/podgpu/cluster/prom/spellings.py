"""This module says which of the labels that may say a thing do say it here, so that Prometheus is not asked for the
others. Pure.

A subquery is evaluated once for every instant, with every alternative in it: at 8,000 GPUs each one that is empty costs
Prometheus 2 some tenths of a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from podgpu.metrics import families as f
from podgpu.metrics.names import generations, names_of
from podgpu.metrics.parse import ParsedSample

UUIDS = ("UUID", "uuid")
PODS = (f.EXPORTED["pod"], f.POD_LABELS[1], f.OLD_POD_LABELS[1], f.JOB_LABEL)


@dataclass(frozen=True, slots=True)
class Spellings:
    """Labels in use, in the order in which they count."""

    uuids: tuple[str, ...] = UUIDS
    nodes: tuple[str, ...] = ()
    """Each is the first that some series has."""
    pods: tuple[str, ...] = PODS
    has_allocations: bool = True
    """podgpu says who holds what, whatever the fields' own labels say."""
    generations: tuple[bool, bool] = (True, True)
    """Whether the field has names of dcgm-exporter 4.8 and before, and of 4.9."""


@dataclass(slots=True)
class SpellingMemory:
    """What was seen in the window: the past may have been spelt otherwise."""

    node_labels: tuple[str, ...]
    window: float
    _seen: dict[str, float] = field(default_factory=dict)
    """Label, or name of a family -> the server's time at which it was last met."""

    def take(self, samples: Iterable[ParsedSample], field_id: int, at: float) -> Spellings:
        """`field_id`: the measured field. `at`: now, by the server's clock."""
        own = (f.ALLOCATION_INFO.name, f.CONTAINER_PROCESSES.name)
        fields = names_of(field_id)
        told = (*fields, *own)
        for name, *labels in {(name, *labels) for name, labels, _, _ in samples if name in told}:
            if name in fields:
                self._seen[name] = at
                for names in (UUIDS, self.node_labels, PODS):
                    first = next((name for name in names if name in labels), None)
                    if first is not None:
                        self._seen[_key(names, first)] = at
            else:
                self._seen[own[0]] = at
                first = next((name for name in PODS if name in labels), None)
                if first is not None:
                    self._seen[_key(PODS, first)] = at
        self._seen = {name: then for name, then in self._seen.items() if abs(at - then) <= self.window}
        return Spellings(
            self._of(UUIDS) or UUIDS,
            self._of(self.node_labels) or self.node_labels,
            self._of(PODS),
            own[0] in self._seen,
            self._of_generations(field_id),
        )

    def _of_generations(self, field_id: int) -> tuple[bool, bool]:
        old, new = (any(name in self._seen for name in names) for names in generations(field_id))
        return (old, new) if old or new else (True, True)

    def _of(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in names if _key(names, name) in self._seen)


def _key(names: Sequence[str], name: str) -> str:
    """A label may be in two of the lists."""
    return f"{names[0]}: {name}"
