"""Enricher takes one turn: an exposition in, its holders put on, a file out; and what becomes of the file when that
fails."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace

from podgpu import __version__
from podgpu.atomic_file import AtomicFile, OutputError
from podgpu.clock import Clock
from podgpu.enrich.relabel import relabel
from podgpu.errors import SourceError
from podgpu.gpu.beside import DriverBeside
from podgpu.gpu.exposition import ParsedExposition
from podgpu.metrics.render import Policy, render_self
from podgpu.metrics.text import encode, encode_parsed
from podgpu.model import Allocation, Device, Outcome
from podgpu.node_state import NodeState, source_statuses
from podgpu.series import Family, Sample

_log = logging.getLogger("podgpu")
SOURCE = "exporter"
"""The exposition's name among the sources of podgpu's own metrics."""
OUTPUT = "textfile"


@dataclass(frozen=True)
class Held:
    """Who holds what, and how the sources that say so fared."""

    allocation: Allocation = field(default_factory=Allocation)
    outcomes: tuple[Outcome, ...] = ()
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)


Holders = Callable[[Sequence[Device]], Held]


@dataclass(frozen=True)
class Settings:
    policy: Policy = field(default_factory=Policy)
    stale_after: float | None = 75.0
    """Seconds after which figures that cannot be renewed are taken away; None: never."""
    self_metrics: bool = True
    device_name_ids: bool = False


class Enricher:
    def __init__(
        self,
        fetch: Callable[[], ParsedExposition],
        holders: Holders,
        textfile: AtomicFile,
        settings: Settings | None = None,
        beside: DriverBeside | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._fetch = fetch
        self._holders = holders
        self._file = textfile
        self._settings = settings or Settings()
        self._beside = beside or DriverBeside(None)
        self._clock = (clock or Clock()).monotonic
        self._wall = (clock or Clock()).wall
        self._errors: Counter[tuple[str, str]] = Counter()
        self._failing: dict[str, str] = {}
        self._answered: set[str] = set()
        age = textfile.age
        self._written_at = self._clock() - age if age is not None else None
        """When the figures in the file are from; None: there are none in it."""

    def turn(self) -> Sequence[Outcome]:
        """How the sources of holders fared. Raises SourceError when the text is no good, OutputError when the file
        cannot be written."""
        began = self._clock()
        try:
            exposition = self._fetch()
        except SourceError as e:
            self._note(SOURCE, e.reason, f"{e}; {self._fate()}")
            self._expire(Outcome(SOURCE, self._clock() - began, e.reason, str(e)))
            raise
        self._answers(SOURCE)
        held = self._holders(self._devices(exposition))
        self._report(held.outcomes)
        result = relabel(exposition, held.allocation.assignments, self._settings.policy)
        if result.ambiguous:
            self._errors[SOURCE, "copies_differ"] += result.ambiguous
        figures = encode_parsed(result.families)
        outcomes = (Outcome(SOURCE, self._clock() - began), *held.outcomes)
        there = {family.name for family in result.families}
        self._write(figures + self._about_itself(outcomes, held, self._wall(), there))
        self._written_at = self._clock()
        return held.outcomes

    def _devices(self, exposition: ParsedExposition) -> tuple[Device, ...]:
        by_name = self._settings.device_name_ids
        named = (replace(d, minor=d.index) if by_name else d for d in exposition.devices)
        return self._beside.complete(named)

    # The file

    def _write(self, content: bytes) -> None:
        try:
            self._file.write(content)
        except OutputError as e:
            self._note(OUTPUT, e.reason, str(e))
            if self._is_stale():
                self._take_away()
            raise
        self._answers(OUTPUT)

    def _take_away(self) -> None:
        """Nothing can be written, so not even that there is nothing: what is too old goes, as on a full disk it can."""
        if self._written_at is None:
            return
        try:
            self._file.remove()
        except OutputError as e:
            self._note(OUTPUT, "not_removed", f"its figures are too old, and {e}")
            return
        self._written_at = None
        _log.warning("%s: its figures are too old and no others can be written: it is removed", self._file.path)

    def _expire(self, failure: Outcome) -> None:
        """Old figures do not live for ever: past their time the file says only how podgpu fares."""
        if not self._is_stale():
            return
        had_figures = self._written_at is not None
        nothing = b"# The metrics these figures come from cannot be read: see podgpu's log.\n"
        self._write(nothing + self._about_itself((failure,), Held(), 0.0))
        self._written_at = None
        if had_figures:
            _log.warning("%s: its figures are too old and are removed", self._file.path)

    def _is_stale(self) -> bool:
        patience = self._settings.stale_after
        return patience is not None and (self._written_at is None or self._clock() - self._written_at > patience)

    def _fate(self) -> str:
        if self._written_at is None:
            return f"{self._file.path} has no figures until it can be read"
        patience = self._settings.stale_after
        return f"{self._file.path} keeps the last figures" + ("" if patience is None else f" for {patience:g} s in all")

    # podgpu on itself

    def _about_itself(
        self, outcomes: tuple[Outcome, ...], held: Held, taken_at: float, there: Set[str] = frozenset()
    ) -> bytes:
        """`there`: families that the exposition has already, being a podgpu's; a second HELP would break the file."""
        if not self._settings.self_metrics:
            return b""
        sources = source_statuses(outcomes, self._errors + held.errors, held.allocation.unmapped)
        state = NodeState(producer="podgpu", version=__version__, taken_at=taken_at or None, sources=tuple(sources))
        families = (family for family in render_self(state) if family.name not in there)
        return encode(_named(family, self._file.path.name) for family in families)

    def _note(self, source: str, reason: str, message: str) -> None:
        """Counted every time, said once."""
        self._errors[source, reason] += 1
        if self._failing.get(source) != reason:
            self._failing[source] = reason
            _log.warning("%s: %s", source, message)

    def _report(self, outcomes: Sequence[Outcome]) -> None:
        """The sources of holders count their own errors; here they are only said."""
        for outcome in outcomes:
            if outcome.ok:
                self._answers(outcome.source)
                self._answered.add(outcome.source)
            elif self._failing.get(outcome.source) != outcome.error:
                self._failing[outcome.source] = outcome.error
                known = (
                    "what it said last counts for another minute"
                    if outcome.source in self._answered
                    else "it has said nothing yet"
                )
                _log.warning("%s: %s; %s", outcome.source, outcome.message, known)

    def _answers(self, source: str) -> None:
        if self._failing.pop(source, None) is not None:
            _log.info("%s: works again", source)


def _named(family: Family, file: str) -> Family:
    """With the file's name on every series: two files in one directory must not have a series in common."""
    return family._replace(samples=tuple(Sample(s.labels.plus(("file", file)), s.value) for s in family.samples))
