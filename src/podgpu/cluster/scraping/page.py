"""One exporter's page to a `NodeReading`; the next page of the same series costs its numbers only.

There are two ways through a page, as through the parser itself. The exact one parses every line and finds out which
series are figures. It leaves a layout, and a mark of the page without its numbers. A page with the same mark has the
same series in the same order, and its numbers go straight into the layout. Whatever else changed (a series more or
less, another order, a label, NaN where a number was, a number written in an unusual way) changes the mark, and the page
is learned anew: with `page_chunks.py` where other nodes have shown such pages, else the exact way. All say the same of
every page.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from sys import intern
from typing import NamedTuple

from podgpu.catalog import families as f
from podgpu.cluster.reading import NamespaceCounters, NodeReading, moment
from podgpu.cluster.scraping.page_chunks import HOLE, Chunks
from podgpu.errors import SourceError
from podgpu.exposition.parse import BadExposition, ParsedFamily, ParsedSample, parse_text
from podgpu.figures.from_page import NODE_LABELS, PageLayout, figure_names, samples_named

LEAST_SKEW_SECONDS = 5.0
USED_FIELD = "DCGM_FI_DEV_MEM_COPY_UTIL"
_COUNTERS = {f.NAMESPACE_ALLOCATED.name: 0, f.NAMESPACE_BUSY.name: 1, f.NAMESPACE_ENERGY.name: 2}
"""Name -> its place among the figures of `NamespaceCounters`."""
_OWN_NAMES = _COUNTERS.keys() | {f.SNAPSHOT_TIMESTAMP.name}
_NUMBER = re.compile(r" ([0-9.eE+-]+)\n")
"""A number at the end of a line. What float() takes of it, the parser takes too, and to the same effect."""
_NAME = re.compile(r"[ \t]*+([a-zA-Z_:][a-zA-Z0-9_:]*+)")
_MOST_NODES_SHOWN = 3


def names_read(measured: str = USED_FIELD) -> frozenset[str]:
    """Of all samples that a reader looks at."""
    return figure_names(measured) | _OWN_NAMES


class PageReader:
    """The pages of one target, one after the other."""

    def __init__(
        self,
        target: str,
        address: str,
        measured: str = USED_FIELD,
        node_labels: Sequence[str] = NODE_LABELS,
        chunks: Chunks | None = None,
    ) -> None:
        """`target` names it in messages, without secrets; `address` stands for the node where the page has no name.

        `chunks`: what is known of pages, shared by all readers of the same `names_read`. None: there is only the exact
        way.
        """
        self._target = target
        self._address = address
        self._measured = measured
        self._node_labels = node_labels
        self._chunks = chunks
        self._known: _Known | None = None

    def read(self, body: bytes, read_at: float, wall: float) -> NodeReading:
        """`read_at`, `wall`: monotonic and Unix time at which it came. Raises SourceError: malformed, no_gpu.

        The skew of the node's clock is told only where it cannot be the age of its figures: when they are from the
        future by more than LEAST_SKEW_SECONDS. Figures from the past may as well be old.
        """
        text = self._decode(body)
        holed = _Holed.of(text)
        known = self._known
        if known is not None and holed is not None and holed.mark == known.mark:
            return known.page.reading([holed.numbers[slot] for slot in known.slots], read_at, wall)
        page, values = self._learn(text, holed)
        return page.reading(values, read_at, wall)

    def forget(self) -> None:
        """The next page is read the exact way."""
        self._known = None

    def _decode(self, body: bytes) -> str:
        try:
            return body.decode()
        except UnicodeDecodeError as error:
            line = body.count(b"\n", 0, error.start) + 1
            raise self._malformed(f"line {line}: byte {error.start} is not UTF-8") from error

    def _learn(self, text: str, holed: _Holed | None) -> tuple[_Page, Sequence[float]]:
        self._known = None
        quick = self._chunks.samples(holed.text, holed.numbers) if self._chunks and holed else None
        samples, slots = quick or self._parse(text, holed)
        page = self._page(samples)
        if holed is not None and slots is not None:
            self._known = _Known(holed.mark, slots, page)
        return page, [sample.value for sample in samples]

    def _parse(self, text: str, holed: _Holed | None) -> tuple[list[ParsedSample], array[int] | None]:
        """The exact way. No slots: a sample's number cannot be told by its place."""
        try:
            families = parse_text(text)
        except BadExposition as error:
            raise self._malformed(str(error)) from error
        samples = samples_named(families, names_read(self._measured))
        slots = _slots(holed, families, samples) if holed else None
        if slots is None:
            return samples, None
        order = sorted(range(len(slots)), key=slots.__getitem__)
        return [samples[n] for n in order], array("I", [slots[n] for n in order])

    def _page(self, samples: Sequence[ParsedSample]) -> _Page:
        layout = PageLayout(samples, self._measured, self._node_labels, self._address)
        if not layout.has_devices and not layout.is_podgpu:
            raise SourceError("no_gpu", f"{self._target} has no GPU on its page: is it a GPU exporter?")
        return _Page(self._target, layout, self._address, samples)

    def _malformed(self, why: str) -> SourceError:
        return SourceError("malformed", f"{self._target} is no page of metrics: {why}")


class _Page:
    """What a page's values mean."""

    def __init__(self, target: str, layout: PageLayout, address: str, samples: Sequence[ParsedSample]) -> None:
        self._target = target
        self._layout = layout
        self._node = intern(layout.nodes[0] if layout.nodes else address)
        self._namespaces = _namespaces(samples)
        timestamps = (n for n, sample in enumerate(samples) if sample.name == f.SNAPSHOT_TIMESTAMP.name)
        self._taken_at = next(timestamps, None)
        self._notes: tuple[str, ...] = ()
        if len(layout.nodes) > 1:
            shown = ", ".join(layout.nodes[:_MOST_NODES_SHOWN])
            self._notes = (f"the page names {len(layout.nodes)} nodes ({shown}): they are taken for one",)

    def reading(self, values: Sequence[float], read_at: float, wall: float) -> NodeReading:
        view = self._layout.view(values)
        taken_at = None if self._taken_at is None else moment(values[self._taken_at])
        ahead = 0.0 if taken_at is None else taken_at - wall
        return NodeReading(
            target=self._target,
            node=self._node,
            named=bool(self._layout.nodes),
            devices=view.devices,
            namespaces=tuple(
                NamespaceCounters(namespace, model, *(None if slot is None else values[slot] for slot in slots))
                for namespace, model, slots in self._namespaces
            ),
            read_at=read_at,
            taken_at=taken_at,
            skew_seconds=ahead if ahead > LEAST_SKEW_SECONDS else None,
            notes=self._notes + view.notes,
        )


Slots = tuple[int | None, ...]


def _namespaces(samples: Sequence[ParsedSample]) -> tuple[tuple[str, str, Slots], ...]:
    found: dict[tuple[str, str], list[int | None]] = {}
    for slot, sample in enumerate(samples):
        place = _COUNTERS.get(sample.name)
        if place is not None:
            key = intern(sample.labels.get("namespace", "")), intern(sample.labels.get("modelName", ""))
            found.setdefault(key, [None] * len(_COUNTERS))[place] = slot
    return tuple((namespace, model, tuple(slots)) for (namespace, model), slots in found.items())


# The way without the parser

Mark = tuple[int, int, int]


class _Known(NamedTuple):
    """What is kept of a page: no text of it, or a thousand nodes' pages would be kept."""

    mark: Mark
    slots: array[int]
    """Sample -> which of the page's numbers it has."""
    page: _Page


class _Holed(NamedTuple):
    """A page with its numbers taken out."""

    text: str
    numbers: list[float]
    mark: Mark
    """Of the text. Equal marks of two pages in a row that differ: once in 2**64."""

    @classmethod
    def of(cls, text: str) -> _Holed | None:
        """None: there is something in it that the parser must look at."""
        if HOLE in text or not text.endswith("\n"):
            return None
        parts = _NUMBER.split(text)
        try:
            numbers = list(map(float, parts[1::2]))
        except ValueError:
            return None
        # Past the largest float is no number to the parser; a sum that is too large only takes the longer way.
        if not math.isfinite(sum(numbers)):
            return None
        holed = HOLE.join(parts[::2])
        return cls(holed, numbers, (hash(holed), len(holed), len(numbers)))


def _slots(holed: _Holed, families: Sequence[ParsedFamily], samples: Sequence[ParsedSample]) -> array[int] | None:
    """Which of the page's numbers is each sample's. None where that cannot be told by its place."""
    names = frozenset(sample.name for sample in samples)
    if _is_unusual(families, names):
        return None
    places = _places(holed.text, names)
    if {name: len(slots) for name, slots in places.items()} != Counter(sample.name for sample in samples):
        return None
    taken = {name: iter(slots) for name, slots in places.items()}
    slots = array("I", [next(taken[sample.name]) for sample in samples])
    same = all(holed.numbers[slot] == sample.value for slot, sample in zip(slots, samples, strict=True))
    return slots if same else None


def _is_unusual(families: Sequence[ParsedFamily], names: frozenset[str]) -> bool:
    """With a timestamp a line's last number is another one; a histogram's samples are named like other families."""
    split = (family.name for family in families if family.type in ("histogram", "summary"))
    if any(f"{name}_{part}" in names for name in split for part in ("bucket", "sum", "count")):
        return True
    return any(sample.timestamp is not None for family in families for sample in family.samples)


def _places(holed: str, names: frozenset[str]) -> Mapping[str, list[int]]:
    """Name of a sample -> which of the page's numbers are its, in the page's order."""
    places: dict[str, list[int]] = defaultdict(list)
    for slot, before in enumerate(holed.split(HOLE)[:-1]):
        name = _NAME.match(before, before.rfind("\n") + 1)
        if name is not None and name[1] in names:
            places[name[1]].append(slot)
    return places
