"""ExpositionReader makes a `NodeReading` of one exporter's text, and refuses what is none: no metrics, no GPU, more
than any node could have.

Whoever answers at an exporter's address may write anything: what is kept of a text, and what it costs to look at it,
is bounded here. The bounds are some ten times what a node of 16 GPUs cut into slices has.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from sys import intern

from podgpu.cluster.reading import NamespaceCounters, NodeReading, is_about_now, moment
from podgpu.errors import SourceError
from podgpu.figures.device import DeviceFigures
from podgpu.figures.from_exposition import NODE_LABELS, figure_names, figures_of, samples_named
from podgpu.metrics import families as f
from podgpu.metrics.parse import BadExposition, ParsedSample, parse_text
from podgpu.model import parts_of

LEAST_SKEW_SECONDS = 5.0
USED_FIELD = "DCGM_FI_DEV_MEM_COPY_UTIL"
MOST_DEVICES = 1024
MOST_HOLDERS = 4096
MOST_NAMESPACES = 2048
"""With models: a namespace on two models counts twice."""
LONGEST_NAME = 256
"""Kubernetes allows 253 characters, and no driver's name of a GPU is longer."""
MOST_LINES = 250_000
"""And different labels, all together: each costs up to a kilobyte while the exposition is read."""
MOST_IN_ALL = {"devices": 50_000, "holders": 50_000, "namespaces": 20_000}
"""Of all expositions together: under 300 MiB of resident memory, measured."""
_COUNTERS = {f.NAMESPACE_ALLOCATED.name: 0, f.NAMESPACE_BUSY.name: 1, f.NAMESPACE_ENERGY.name: 2}
"""Name -> its place among the figures of `NamespaceCounters`."""
_OWN_NAMES = _COUNTERS.keys() | {f.SNAPSHOT_TIMESTAMP.name}
_MOST_NODES_SHOWN = 3


class ExpositionReader:
    """Reads the expositions of one target."""

    def __init__(
        self,
        target: str,
        address: str,
        measured: str = USED_FIELD,
        node_labels: Sequence[str] = NODE_LABELS,
        beside: tuple[int, ...] = (),
    ) -> None:
        """`target` names it in messages, without secrets; `address` stands for the node where the text has no name."""
        self._target = target
        self._address = address
        self._measured = measured
        self._beside = beside
        self._node_labels = node_labels

    def read(self, body: bytes, read_at: float, wall: float) -> NodeReading:
        """`read_at`, `wall`: monotonic and Unix time at which it came. Raises SourceError: malformed, no_gpu, too_much.

        The skew of the node's clock is told only where it cannot be the age of its figures: when they are from the
        future by more than LEAST_SKEW_SECONDS. Figures from the past may as well be old.
        """
        samples = self._samples(body)
        view, nodes, is_podgpu = figures_of(samples, self._measured, self._node_labels, self._address, self._beside)
        if not view.devices and not is_podgpu:
            raise SourceError("no_gpu", f"{self._target} has no GPU in its metrics: is it a GPU exporter?")
        namespaces = tuple(_namespaces(samples))
        self._check(nodes, view.devices, namespaces)
        told_at = next((s.value for s in samples if s.name == f.SNAPSHOT_TIMESTAMP.name), None)
        taken_at = moment(told_at)
        ahead = 0.0 if taken_at is None else taken_at - wall
        return NodeReading(
            target=self._target,
            node=intern(nodes[0] if nodes else self._address),
            named=bool(nodes),
            listed=True,
            devices=view.devices,
            namespaces=namespaces,
            read_at=read_at,
            taken_at=taken_at,
            dated=is_about_now(told_at, wall),
            skew_seconds=ahead if ahead > LEAST_SKEW_SECONDS else None,
            notes=(*_notes(nodes), *view.notes),
            trouble=view.trouble,
            simulated=view.simulated,
            tells_lost=is_podgpu,
        )

    def _samples(self, body: bytes) -> list[ParsedSample]:
        """Those that are looked at here."""
        lines = body.count(b"\n")
        if lines > MOST_LINES:
            raise self._too_much(self._node_in(body), lines, MOST_LINES, "lines")
        try:
            families = parse_text(body.decode())
        except UnicodeDecodeError as error:
            line = body.count(b"\n", 0, error.start) + 1
            raise self._malformed(f"line {line}: byte {error.start} is not UTF-8") from error
        except BadExposition as error:
            raise self._malformed(str(error)) from error
        return samples_named(families, figure_names(self._measured, self._beside) | _OWN_NAMES)

    def _malformed(self, why: str) -> SourceError:
        return SourceError("malformed", f"the metrics of {self._target} cannot be read: {why}")

    # Bounds

    def _check(
        self, nodes: Sequence[str], devices: Sequence[DeviceFigures], namespaces: Sequence[NamespaceCounters]
    ) -> None:
        for count, most, what in beyond(nodes, devices, namespaces):
            raise self._too_much(nodes[0] if nodes else self._address, count, most, what)

    def _node_in(self, body: bytes) -> str:
        """The node's name in an exposition that is not worth reading."""
        for label in self._node_labels:
            if found := re.search(rb'[{,]%s="([^"\\\n]{1,%d})"' % (re.escape(label.encode()), LONGEST_NAME), body):
                return found[1].decode(errors="replace")
        return self._address

    def _too_much(self, node: str, count: int, most: int, what: str) -> SourceError:
        return SourceError(
            "too_much",
            f"{self._target}: the exposition of node {node[:LONGEST_NAME]} has {count:,} {what}, and at most {most:,}"
            " are accepted from one exporter; the whole exposition is ignored: see what answers there",
        )


def beyond(
    nodes: Sequence[str], devices: Sequence[DeviceFigures], namespaces: Sequence[NamespaceCounters]
) -> Iterator[tuple[int, int, str]]:
    """What there is more of than one node has: how many, how many there may be, of what."""
    longest = max(map(len, (*nodes, *_names(devices, namespaces))), default=0)
    for count, most, what in (
        (len(devices), MOST_DEVICES, "devices"),
        (sum(map(_holders, devices)), MOST_HOLDERS, "holders"),
        (len(namespaces), MOST_NAMESPACES, "namespaces"),
        (longest, LONGEST_NAME, "characters in one name"),
    ):
        if count > most:
            yield count, most, what


class Shelf:
    """How much is kept of all expositions together. Who is there stays; who would not fit any more is refused."""

    def __init__(self, most: Mapping[str, int] = MOST_IN_ALL) -> None:
        self._most = most
        self._sizes: dict[str, Counter[str]] = {}
        """By target."""
        self._total: Counter[str] = Counter()

    def put(self, target: str, reading: NodeReading) -> None:
        """In the place of what the target told before. Raises SourceError: too_much."""
        size = Counter(
            devices=len(reading.devices),
            holders=sum(map(_holders, reading.devices)),
            namespaces=len(reading.namespaces),
        )
        before = self._sizes.get(target, Counter())
        if size == before:
            return
        for what, most in self._most.items():
            count = self._total[what] - before[what] + size[what]
            if count > most and size[what] > before[what]:
                raise SourceError(
                    "too_much",
                    f"{target}: with the {size[what]:,} {what} of node {reading.node} there would be {count:,} in all,"
                    f" and podgpu keeps at most {most:,}: give it part of the nodes, or ask Prometheus (--prometheus)",
                )
        self._total.subtract(before)
        self._total.update(size)
        self._sizes[target] = size

    def remove(self, target: str) -> None:
        self._total.subtract(self._sizes.pop(target, Counter()))


def _namespaces(samples: Iterable[ParsedSample]) -> Iterator[NamespaceCounters]:
    found: dict[tuple[str, str], list[float | None]] = {}
    for sample in samples:
        place = _COUNTERS.get(sample.name)
        if place is not None:
            key = intern(sample.labels.get("namespace", "")), intern(sample.labels.get("modelName", ""))
            found.setdefault(key, [None] * len(_COUNTERS))[place] = sample.value
    for (namespace, model), figures in found.items():
        yield NamespaceCounters(namespace, model, *figures)


def _holders(device: DeviceFigures) -> int:
    return len(device.holders) + len(device.last_holders)


def _names(devices: Iterable[DeviceFigures], namespaces: Iterable[NamespaceCounters]) -> Iterator[str]:
    """Every text that is kept."""
    for device in devices:
        yield from (device.uuid, device.model, device.node, device.instance, device.profile)
        for who in (*(of.holder for of in device.holders), *device.last_holders):
            yield from parts_of(who)
    for counters in namespaces:
        yield from counters[:2]


def _notes(nodes: Sequence[str]) -> Iterator[str]:
    if len(nodes) > 1:
        shown = ", ".join(nodes[:_MOST_NODES_SHOWN])
        yield f"its metrics name {len(nodes)} nodes ({shown}): they are taken for one"
