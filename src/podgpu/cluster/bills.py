"""This module says what namespaces used in the whole cluster, from the nodes' own counters, which begin anew, vanish
and come back.

A node's counters are a baseline when it is first seen. After that every growth counts; a series that is new on a known
node counts from 0; one that went down began anew and counts from 0; a node that comes back counts from where it was.
Sums are whole nanoseconds and millijoules, and never go down. What is older than what was billed already (one of two
servers behind one address lags behind the other) is passed over: it would look as if counters had begun anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from podgpu.cluster.nodes import Settled
from podgpu.cluster.reading import NamespaceCounters, NodeReading

NS = 1_000_000_000
MJ = 1000
FORGET_SECONDS = 24 * 3600.0
"""Who was away for longer begins with a new baseline."""
MOST_ACCOUNTS = 20_000
"""Past that, those of namespaces that are on no node any more are closed, the longest unchanged first."""
MOST_SERIES = 4096
"""Of one node. Past that, those that are not told any more are forgotten, the longest absent first: an exporter
that tells of other namespaces every time would fill the memory."""
_MOST = 1e15
"""Seconds or joules: 30 million years. What says more is no counter."""
_SLACK_SECONDS = 60.0
_SAME_MOMENT = 1.0
"""Seconds. Two readings no further apart may be in either order: an exporter takes longer to begin anew."""
Series = tuple[str, str]
"""(namespace, model)."""


class Amounts(NamedTuple):
    """Nanoseconds, nanoseconds, millijoules. None: nobody counts it."""

    allocated: int | None = None
    busy: int | None = None
    energy: int | None = None

    def or_else(self, before: Amounts) -> Amounts:
        """A counter that is not told this time stands where it stood."""
        return Amounts(*(b if a is None else a for a, b in zip(self, before, strict=True)))

    def no_less(self, billed: Amounts, now: Amounts) -> Amounts:
        """What was billed up to, where that lies on the way from here to now: the same counters, read a moment apart
        at two addresses, and that moment is not billed twice."""
        return Amounts(*(_between(*three) for three in zip(self, billed, now, strict=True)))


_ZERO = Amounts(0, 0, 0)
Standings = dict[Series, Amounts]
Sums = dict[Series, list[int | None]]
"""Amounts that grow."""


def _add_growth(sums: Sums, series: Series, now: Amounts, before: Amounts) -> None:
    """This is done for each series of each node in each round."""
    found = sums.get(series)
    if found is None:
        found = sums[series] = [None, None, None]
    for place, amount in enumerate(now):
        if amount is not None:
            known = before[place]
            growth = amount - known if known is not None and amount >= known else amount
            found[place] = growth + (found[place] or 0)


def _plus(one: Amounts, other: Amounts) -> Amounts:
    return Amounts(*(a if b is None else (a or 0) + b for a, b in zip(one, other, strict=True)))


def _between(low: int | None, middle: int | None, high: int | None) -> int | None:
    is_between = low is not None and middle is not None and high is not None and low <= middle <= high
    return middle if is_between else low


@dataclass(slots=True)
class _Book:
    """One node: where its counters stand."""

    target: str
    """Who told it last."""
    began: float
    series: Standings
    read_at: float
    """Monotonic time at which its counters stood so."""
    taken_at: float | None
    """The same by the node's clock, where that is told."""
    absent: dict[Series, float] = field(default_factory=dict)
    """Series that were not told lately -> since when; the longest first."""
    others: dict[str, Standings] = field(default_factory=dict)
    """Where the counters of targets stand that tell of the node too: two exporters need not agree."""


class BillLedger:
    def __init__(self, most_accounts: int = MOST_ACCOUNTS) -> None:
        self._most_accounts = most_accounts
        self._books: dict[str, _Book] = {}
        """By the node's name. A node that goes by several has one book."""
        self._seen: dict[str, float] = {}
        self._told: dict[str, dict[str, Standings]] = {}
        """Target -> node -> where its counters stood in the last turn."""
        self._accounts: dict[Series, Amounts] = {}
        """In the order in which they grew last: to sort twenty thousand holds up every other thread for 80 ms."""

    def turn(self, settled: Settled, now: float) -> Standings:
        """What was used since the last turn, for every series that there is. `now` is monotonic."""
        for name, of in sorted(settled.same.items()):
            self._share_book(name, of)
        self._part_ways(settled)
        sums: Sums = {}
        told: dict[str, dict[str, Standings]] = {}
        for name, reading in settled.chosen.items():
            self._seen[name] = now
            if name not in settled.same:
                standings = told.setdefault(reading.target, {})[name] = _standings(reading.namespaces)
                self._bill(name, reading, standings, sums, now)
        self._told = told
        self._note_others(settled)
        gains = {series: Amounts(*amounts) for series, amounts in sums.items()}
        self._enter(gains)
        self._forget(now)
        return gains

    def totals(self) -> dict[Series, Amounts]:
        return dict(self._accounts)

    # -- one node ------------------------------------------------------------------------------------------------

    def _bill(self, name: str, reading: NodeReading, told: Standings, sums: Sums, now: float) -> None:
        book = self._books.get(name)
        if book is None:
            if told or reading.devices:  # an exporter with nothing to say yet may have a past to tell of
                self._books[name] = _Book(reading.target, now, dict(told), reading.read_at, reading.taken_at)
                _take_baseline(sums, told)
            return
        _follow(book, reading.target, told)
        renamed = self._told.get(reading.target, {})
        if len(renamed) == 1 and name not in renamed:
            _go_on_from(book, next(iter(renamed.values())), told)
        if _is_older(reading, told, book):
            return
        book.read_at, book.taken_at = reading.read_at, reading.taken_at
        if not book.series and _have_a_past(told, (now - book.began) * max(1, len(reading.devices))):
            _take_baseline(sums, told)
            book.series.update(told)
        standing = book.series
        for series, amounts in told.items():
            before = standing.get(series, _ZERO)
            _add_growth(sums, series, amounts, before)
            standing[series] = amounts if None not in amounts else amounts.or_else(before)
        _forget_absent(book, told, now)

    def _share_book(self, name: str, of: str) -> None:
        """Both are one node: whichever has a book, it is the book of both."""
        book = self._books.get(of) or self._books.get(name)
        if book is not None:
            self._books[name] = self._books[of] = book

    def _part_ways(self, settled: Settled) -> None:
        """Names that shared a book and are two nodes now: the book is whose target it was; the other begins anew."""
        owners: dict[int, str] = {}
        for name, reading in sorted(settled.chosen.items()):
            book = self._books.get(name)
            if book is None or name in settled.same:
                continue
            other = owners.setdefault(id(book), name)
            if other != name:
                leaves = other if reading.target == book.target else name
                owners[id(book)] = name if leaves == other else other
                del self._books[leaves]

    def _note_others(self, settled: Settled) -> None:
        others: dict[int, dict[str, Standings]] = {}
        told = [(name, reading) for name, siblings in settled.siblings.items() for reading in siblings]
        told += [(name, settled.chosen[name]) for name in settled.same]
        for name, reading in told:
            book = self._books.get(name)
            if book is not None and reading.target != book.target:
                others.setdefault(id(book), {})[reading.target] = _standings(reading.namespaces)
        for book in self._books.values():
            book.others = others.get(id(book), {})

    # -- all of them ---------------------------------------------------------------------------------------------

    def _enter(self, gains: Standings) -> None:
        for series, gain in gains.items():
            account = self._accounts.get(series)
            if account is None:
                self._accounts[series] = gain
            elif (amounts := _plus(account, gain)) != account:
                del self._accounts[series]
                self._accounts[series] = amounts
        too_many = len(self._accounts) - self._most_accounts
        if too_many > 0:
            gone = (series for series in self._accounts if series not in gains)
            for series in list(islice(gone, too_many)):
                del self._accounts[series]

    def _forget(self, now: float) -> None:
        for name in [name for name, seen in self._seen.items() if now - seen > FORGET_SECONDS]:
            del self._seen[name]
            self._books.pop(name, None)


def _take_baseline(sums: Sums, told: Standings) -> None:
    """Their growth is 0, and is told as that: a counter that begins at 0 hides nothing from increase()."""
    for series, amounts in told.items():
        _add_growth(sums, series, amounts, amounts)


def _have_a_past(told: Standings, device_seconds: float) -> bool:
    """Counters that were not there when the node was first seen may be new, or were not read then. Those that say more
    than its devices can have done since are not new."""
    most = round((device_seconds + _SLACK_SECONDS) * NS)
    return any((a.allocated or 0) > most or (a.busy or 0) > most for a in told.values())


def _follow(book: _Book, target: str, told: Standings) -> None:
    """Another target tells of the node now. One that did so beside the last one has counters of its own; one never
    heard of is taken for the same exporter at another address, or its successor."""
    if target == book.target:
        return
    own, last = book.others.pop(target, None), book.series
    if own is not None:
        now = ((series, told.get(series, amounts)) for series, amounts in own.items())
        book.series = {series: own[series].no_less(last.get(series, _ZERO), amounts) for series, amounts in now}
        book.absent = {}
    book.target = target


def _go_on_from(book: _Book, before: Standings, told: Standings) -> None:
    """The target told of a node by another name before. Where its counters went on from there, that was billed."""
    for series, now in told.items():
        if series in book.series and series in before:
            known, other = book.series[series], before[series]
            book.series[series] = Amounts(*(_nearest_below(*three) for three in zip(known, other, now, strict=True)))


def _nearest_below(known: int | None, other: int | None, now: int | None) -> int | None:
    if known is None or other is None or now is None or other > now:
        return known
    return other if known > now else max(known, other)


def _is_older(reading: NodeReading, told: Standings, book: _Book) -> bool:
    """Whether its counters stood so before those in the book did."""
    newer = reading.read_at - book.read_at
    if newer < 0:
        return True
    is_before = reading.taken_at is not None and book.taken_at is not None and reading.taken_at < book.taken_at
    return (newer <= _SAME_MOMENT or is_before) and _went_down(told, book.series)


def _went_down(told: Standings, standing: Standings) -> bool:
    return any(
        now is not None and known is not None and now < known
        for series, amounts in told.items()
        for now, known in zip(amounts, standing.get(series, _ZERO), strict=True)
    )


def _forget_absent(book: _Book, told: Standings, now: float) -> None:
    if len(told) == len(book.series) and not book.absent:
        return
    known = {series: since for series, since in book.absent.items() if series not in told}
    book.absent = known | {s: now for s in book.series if s not in told and s not in known}
    too_many = len(book.series) - MOST_SERIES
    for number, (series, since) in enumerate(list(book.absent.items())):
        if number < too_many or now - since > FORGET_SECONDS:
            del book.absent[series], book.series[series]


def _standings(counters: Iterable[NamespaceCounters]) -> Standings:
    """Each series once, the first where an exposition has it twice."""
    found: Standings = {}
    for namespace, model, allocated, busy, energy in counters:
        series = namespace, model
        if series not in found:
            found[series] = Amounts(_units(allocated, NS), _units(busy, NS), _units(energy, MJ))
    return found


def _units(value: float | None, units: int) -> int | None:
    return round(value * units) if value is not None and 0 <= value <= _MOST else None
