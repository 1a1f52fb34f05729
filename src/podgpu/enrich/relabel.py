"""This module puts the holders in an exposition's series: every family as it came, other pod labels. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from podgpu.gpu.exposition import LabelSet, ParsedExposition, settled
from podgpu.metrics.families import HOLDER_LABELS
from podgpu.metrics.labels import Policy, holder_pairs
from podgpu.metrics.parse import ParsedFamily, ParsedSample
from podgpu.model import Assignment

_OWN = "podgpu_"


@dataclass(frozen=True, slots=True)
class Relabelled:
    families: tuple[ParsedFamily, ...]
    ambiguous: int
    """Series left out: the exposition had several for different holders of one device, with different figures."""


def relabel(exposition: ParsedExposition, assignments: Iterable[Assignment], policy: Policy) -> Relabelled:
    """Pod labels go on what names a device with exactly one holder; those the exposition came with are dropped.

    Copies of a figure for several holders of a device become one series again. podgpu's own families, on a podgpu's
    exposition, say by themselves whose they are: they are left as they came.
    """
    labels = _Labels(exposition, _sole_holders(assignments), policy)
    families = []
    ambiguous = 0
    for family in exposition.families:
        samples = list(family.samples if family.name.startswith(_OWN) else _samples(family, labels))
        kept = tuple(sample for sample in samples if sample is not None)
        ambiguous += len(samples) - len(kept)
        families.append(ParsedFamily(family.name, family.type, family.help, kept))
    return Relabelled(tuple(families), ambiguous)


def _sole_holders(assignments: Iterable[Assignment]) -> dict[str, Assignment]:
    """Device key -> its assignment, of devices that exactly one workload holds."""
    held: dict[str, Assignment | None] = {}
    for assignment in assignments:
        known = held.setdefault(assignment.device, assignment)
        if known is None or known.holder.who != assignment.holder.who:
            held[assignment.device] = None
    return {device: assignment for device, assignment in held.items() if assignment is not None}


def _samples(family: ParsedFamily, labels: _Labels) -> Iterator[ParsedSample | None]:
    """In the exposition's order; None where copies differ."""
    copies: dict[tuple[str, int], list[ParsedSample]] = {}
    new: dict[tuple[str, int], LabelSet] = {}
    for sample in family.samples:
        of = labels.of(sample)
        key = (sample.name, id(of))
        copies.setdefault(key, []).append(sample)
        new[key] = of
    for key, found in copies.items():
        figure = found[0] if len(found) == 1 else settled(found)
        yield None if figure is None else ParsedSample(figure.name, new[key], figure.value)


class _Labels:
    """New labels for old, each set made once: equal ones are the same object."""

    def __init__(self, exposition: ParsedExposition, holders: Mapping[str, Assignment], policy: Policy) -> None:
        self._exposition = exposition
        self._holders = holders
        self._policy = policy
        self._made: dict[int, LabelSet] = {}
        self._same: dict[frozenset[tuple[str, str]], LabelSet] = {}

    def of(self, sample: ParsedSample) -> LabelSet:
        made = self._made.get(id(sample.labels))
        if made is None:
            labels = self._make(sample)
            made = self._made[id(sample.labels)] = self._same.setdefault(frozenset(labels.items()), labels)
        return made

    def _make(self, sample: ParsedSample) -> LabelSet:
        device = self._exposition.device_of(sample)
        if device is None:
            return sample.labels
        labels = {name: value for name, value in sample.labels.items() if name not in HOLDER_LABELS}
        holder = self._holders.get(device.key)
        if holder is not None:
            labels |= dict(sorted((*holder_pairs(holder.holder, self._policy), *holder.attributes)))
        return labels
