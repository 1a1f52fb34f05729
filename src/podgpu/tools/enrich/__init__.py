"""Reads another exporter's metrics text, adds pod labels, and writes the result to a file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain

from podgpu import __version__
from podgpu.clock import Clock, FaultLog
from podgpu.errors import SourceError
from podgpu.files import AtomicFile, OutputError, identify_file
from podgpu.metrics.adapter import LabelMap, read_device_key
from podgpu.metrics.encode import Family, Labels, Sample, encode
from podgpu.metrics.labels import HOLDER_LABELS, Policy, holder_pairs
from podgpu.metrics.parse import ParsedFamily, ParsedSample, encode_parsed
from podgpu.metrics.render import render_self
from podgpu.model import Allocation, Assignment, Device, NodeState, SourceStatus
from podgpu.node.gpu.remote_exporter import find_devices
from podgpu.node.gpu.source import CompanionDriver
from podgpu.node.holders.unmapped_log import UnmappedLog
from podgpu.workers import ErrorCounts

_log = logging.getLogger("podgpu")
# Value of the `source` label in podgpu's own metrics, for reads of the other exporter.
SOURCE = "exporter"
OUTPUT = "textfile"
_OWN_PREFIX = "podgpu_"
_LOG_AGAIN_SECONDS = 60.0


def relabel(
    exposition: Iterable[ParsedFamily], assignments: Iterable[Assignment], policy: Policy
) -> tuple[list[ParsedFamily], int]:
    """Replaces the pod labels of an exposition.

    Only series of devices with exactly one holder get new pod labels. Series that then have equal
    labels are merged, or dropped if their values differ. podgpu's own families stay unchanged.
    Returns the families and the number of dropped series.
    """
    holders = _find_sole_holders(assignments)
    families = []
    ambiguous = 0
    for family in exposition:
        if family.name.startswith(_OWN_PREFIX):
            families.append(family)
            continue

        relabelled: dict[object, _RelabelledSeries] = {}
        for sample in family.samples:
            labels = _make_labels(sample, holders, policy)
            key = sample.name, frozenset(labels.items())
            relabelled.setdefault(key, _RelabelledSeries(labels)).copies.append(sample)

        samples = []
        for series in relabelled.values():
            chosen = _select_copy(series.copies)
            if chosen is None:
                ambiguous += 1
            else:
                samples.append(ParsedSample(chosen.name, series.labels, chosen.value))

        families.append(ParsedFamily(family.name, family.type, family.help, samples))

    return families, ambiguous


@dataclass(slots=True)
class _RelabelledSeries:
    labels: LabelMap
    copies: list[ParsedSample] = field(default_factory=list)  # samples that get these labels


def _select_copy(copies: Sequence[ParsedSample]) -> ParsedSample | None:
    """Returns a copy that had no pod labels, or else any copy.

    Returns None if the values of these copies differ.
    """
    without_holder = [sample for sample in copies if HOLDER_LABELS.isdisjoint(sample.labels)]
    candidates = without_holder or copies
    # Compares texts, because NaN != NaN.
    values = {str(sample.value) for sample in candidates}
    if len(values) != 1:
        return None

    return candidates[0]


def _find_sole_holders(assignments: Iterable[Assignment]) -> dict[str, Assignment]:
    """Returns device -> assignment, for devices with exactly one holder."""
    sole: dict[str, Assignment] = {}
    shared = set()
    for assignment in assignments:
        first = sole.setdefault(assignment.device, assignment)
        if first.holder.key != assignment.holder.key:
            shared.add(assignment.device)

    for device in shared:
        del sole[device]

    return sole


def _make_labels(
    sample: ParsedSample, holders: Mapping[str, Assignment], policy: Policy
) -> LabelMap:
    device = read_device_key(sample.labels)
    if not device:
        return sample.labels

    labels = {name: value for name, value in sample.labels.items() if name not in HOLDER_LABELS}
    assignment = holders.get(device)
    if assignment is not None:
        added = [*holder_pairs(assignment.holder, policy), *assignment.attributes]
        labels |= dict(sorted(added))

    return labels


@dataclass
class Enricher:
    fetch: Callable[[], Sequence[ParsedFamily]]
    find_holders: Callable[[Sequence[Device]], Allocation]
    file: AtomicFile
    errors: ErrorCounts
    policy: Policy = field(default_factory=Policy)
    stale_after: float | None = None  # seconds after which old values are removed; None means never
    device_name_ids: bool = False
    companion: CompanionDriver = field(default_factory=lambda: CompanionDriver(None))
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self._faults: FaultLog[str] = FaultLog(self.clock.monotonic, _LOG_AGAIN_SECONDS)
        self._unmapped = UnmappedLog()
        self._written_at: float | None = None
        """Monotonic time when the values in the file were read; None if the file has no values."""
        # An earlier run may have left a file. Its age is known only by the wall clock.
        with suppress(SourceError):
            modified_at = identify_file(str(self.file.path)).modified_ns / 1e9
            age = max(0.0, self.clock.wall() - modified_at)
            self._written_at = self.clock.monotonic() - age

    def update_file(self) -> Sequence[SourceStatus]:
        """Reads the metrics, adds the labels and writes the file.

        Returns the status of the allocation sources. Raises SourceError if the metrics cannot be
        read, OutputError if the file cannot be written.
        """
        started = self.clock.monotonic()
        try:
            exposition = self.fetch()
            devices = self._find_devices(exposition)
        except SourceError as e:
            self._count_error(SOURCE, e.reason, str(e))
            if self._is_stale():
                seconds = self.clock.monotonic() - started
                failure = SourceStatus(SOURCE, False, seconds, e.reason, str(e))
                self._remove_values(failure)
            raise

        self._log_success(SOURCE)

        held = self.find_holders(devices)
        self._log_sources(held)

        assignments = []
        for assignment in held.assignments:
            holder = held.with_api_uid(assignment.holder)
            assignments.append(replace(assignment, holder=holder))

        families, ambiguous = relabel(exposition, assignments, self.policy)
        if ambiguous:
            self.errors.add(SOURCE, "copies_differ", ambiguous)

        seconds = self.clock.monotonic() - started
        sources = (SourceStatus(SOURCE, True, seconds), *held.sources)
        existing = {family.name for family in families}
        own_metrics = self._encode_self(sources, held, existing, taken_at=self.clock.wall())
        self._write(encode_parsed(families) + own_metrics)
        self._written_at = self.clock.monotonic()
        return held.sources

    def _find_devices(self, exposition: Sequence[ParsedFamily]) -> tuple[Device, ...]:
        samples = chain.from_iterable(family.samples for family in exposition)
        readings = find_devices(samples, SOURCE, self.device_name_ids)
        self.companion.update()
        return tuple(self.companion.complete(device) for device, _values in readings)

    def _remove_values(self, failure: SourceStatus) -> None:
        """Writes a file that has only podgpu's own metrics."""
        own_metrics = self._encode_self(
            (failure,), Allocation(), existing=frozenset(), taken_at=None
        )
        self._write(own_metrics)
        # Otherwise, an earlier update has removed them. This one only writes the error counts.
        if self._written_at is not None:
            _log.warning("%s: the values were removed, because they are stale", self.file.path)
        self._written_at = None

    def _write(self, content: bytes) -> None:
        try:
            self.file.write(content)
        except OutputError as e:
            self._count_error(OUTPUT, e.reason, str(e))
            if self._is_stale():
                self._remove_file()
            raise

        self._log_success(OUTPUT)

    def _remove_file(self) -> None:
        """Deletes a stale file that cannot be overwritten. Deletion works even on a full disk."""
        if self._written_at is None:
            return

        try:
            self.file.remove()
        except OutputError as e:
            self._count_error(OUTPUT, "not_removed", f"the file has stale values, but {e}")
            return

        self._written_at = None
        text = "%s: removed, because its values are stale and it cannot be written"
        _log.warning(text, self.file.path)

    def _is_stale(self) -> bool:
        """Returns True if the file has old values, or none."""
        if self.stale_after is None:
            return False
        if self._written_at is None:
            return True
        return self.clock.monotonic() - self._written_at > self.stale_after

    def _encode_self(
        self,
        sources: tuple[SourceStatus, ...],
        held: Allocation,
        existing: Set[str],
        *,
        taken_at: float | None,
    ) -> bytes:
        """Encodes podgpu's own metrics.

        Skips families in `existing`, because a second HELP line would be invalid.
        """
        state = NodeState(
            producer="podgpu",
            version=__version__,
            taken_at=taken_at,
            sources=self.errors.add_to(sources, held.unmapped),
        )
        families = []
        for family in render_self(state):
            if family.name not in existing:
                families.append(_add_file_label(family, self.file.path.name))

        return encode(families)

    def _count_error(self, source: str, reason: str, message: str) -> None:
        self.errors.add(source, reason)
        self._log_failure(source, reason, message)

    def _log_sources(self, held: Allocation) -> None:
        for source in held.sources:
            if source.up:
                self._log_success(source.name)
            else:
                self._log_failure(source.name, source.error, source.message)
        self._unmapped.report(held.unmapped)

    def _log_failure(self, source: str, reason: str, message: str) -> None:
        if self._faults.fail(source, reason):
            _log.warning("%s: %s", source, message)

    def _log_success(self, source: str) -> None:
        if self._faults.recover(source):
            _log.info("%s: works again", source)


def _add_file_label(family: Family, file: str) -> Family:
    """Adds the label `file`: node_exporter's directory must not contain the same series twice."""
    samples = []
    for sample in family.samples:
        labels = Labels((*sample.labels.pairs, ("file", file)))
        samples.append(Sample(labels, sample.value))
    return family._replace(samples=tuple(samples))
