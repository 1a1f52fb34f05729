"""This module is the backend for clusters with a Prometheus, or anything that speaks its HTTP API: one round of queries
at a time.

The server's clock rules. A round begins by asking what time it is there; everything else is asked of that moment, the
rolling average of the last multiple of the interval before it. What the server does not tell any more (a target that is
gone) stays as it was, older every round, until the view drops it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from podgpu.cluster.prom import promql
from podgpu.cluster.prom.answer import MOST_NOTES, MOST_VALUES, Vector
from podgpu.cluster.prom.client import PrometheusClient
from podgpu.cluster.prom.idle import IdleDevices, IdleQuery
from podgpu.cluster.prom.instant import figures_at
from podgpu.cluster.prom.layouts import AllSeries, Round
from podgpu.cluster.prom.nodes import LayoutMemory, accepted, nodes_of
from podgpu.cluster.prom.owners import (
    OwnerQueries,
    Owners,
    OwnersOf,
    parse_pod_owners,
    parse_replica_set_owners,
    replica_sets_in,
    resolved,
)
from podgpu.cluster.prom.queries import Part, Queries
from podgpu.cluster.prom.rolling import RollingInstants, RollingQueries, figures_by_scope, last_instant
from podgpu.cluster.prom.series import KnownSeries, SeriesMemory
from podgpu.cluster.prom.slim import Answers, Slim, Told, WholeRound
from podgpu.cluster.prom.spellings import SpellingMemory
from podgpu.cluster.prom.targets import Targets, targets_of
from podgpu.cluster.reading import ClusterReading, NodeReading, Scope, TargetOutcome, moment
from podgpu.cluster.settings import ViewSettings, full_scale
from podgpu.errors import SourceError, UsageError
from podgpu.figures.device import has_identity
from podgpu.figures.from_exposition import NODE_LABELS
from podgpu.http_client import Access
from podgpu.metrics.fields import Field
from podgpu.metrics.names import meaning
from podgpu.metrics.parse import ParsedSample

_LOST = "Prometheus has no figures of it any more: see that its exporter runs and is scraped"
_SOON = 1 / 8
"""Of an interval. A round that begins so soon after an instant of the average, as rounds do, is asked as of the
instant: its samples are the average's then."""
_NO_UUID = "GPUs without a UUID label are in no rolling average"


@dataclass(frozen=True, slots=True)
class PrometheusPlace:
    """Where the server is and what of it is wanted."""

    url: str
    access: Access = field(default_factory=lambda: Access(prefix="prometheus", server="Prometheus"))
    match: str = ""
    """Label matchers for every selector."""
    node_labels: tuple[str, ...] = NODE_LABELS
    timeout: float = 10.0
    """Seconds for one query."""


class PrometheusBackend:
    def __init__(
        self,
        place: PrometheusPlace,
        settings: ViewSettings,
        owners_of: OwnersOf | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Needs no loop yet. `owners_of`: of pods that kube-state-metrics says nothing of. Raises UsageError."""
        self._client = PrometheusClient(place.url, place.access, place.timeout)
        self._settings = settings
        self._node_labels = check_node_labels(place.node_labels)
        self._field = _used_field(settings.used_field)
        self._match = promql.parse_matchers(place.match)
        self._queries = Queries(self._match, self._node_labels, self._field, settings.fields_beside)
        self._up_has_match = True
        self._idle = IdleDevices(settings.idle_after)
        self._spelt = SpellingMemory(self._node_labels, settings.window)
        self._instants = RollingInstants(settings)
        self._series = SeriesMemory()
        self._whole = WholeRound()
        self._layouts = LayoutMemory(), LayoutMemory()
        """Of whole rounds and of slim ones."""
        self._owners = Owners()
        self._owners_of = owners_of
        self._clock = clock
        self._errors: Counter[tuple[str, str]] = Counter()
        self._succeeded_at = self._averaged_at = float("-inf")
        self._reading = ClusterReading()
        self.asked_at: float | None = None
        """Unix time by the server's clock that the last whole round is of."""

    def reading(self) -> ClusterReading:
        return self._reading

    async def close(self) -> None:
        await self._client.close()

    async def turn(self) -> None:
        started = self._clock()
        round_ = _Asking(self._client)
        try:
            await self._turn(round_)
        except SourceError as error:
            self._fail(error, self._clock() - started)
        else:
            self._report(round_, self._clock() - started)

    async def _turn(self, round_: _Asking) -> None:
        """Nodes are told of as soon as they are known: averages take the server longest, and must not hold them up."""
        self._series.begin_round()
        of = await self._begin(round_)
        slim = self._whole.plan(of.at)
        told = await self._ask(round_, slim)
        oldest = of.at - self._settings.stale_after
        if slim is not None and not self._whole.explains(told, oldest):
            slim = None
            round_.failures.clear()
            round_.values_left = MOST_VALUES
            told = await self._ask(round_, slim)
        answers, targets, times, series = told
        of = of if slim is None else replace(of, totals=slim.totals)
        nodes, refused = accepted(nodes_of(series, times, targets, of, self._layouts_of(slim)))
        round_.notes += refused
        if slim is None and not round_.failures:
            self._whole.take(told, oldest, of.at, nodes)
        await self._take_nodes(round_, of, nodes, targets)
        averaged = [sample for part, of_part in answers if part.averaged for sample in of_part]
        rolling = await self._rolling(round_, targets, averaged)
        self._reading = replace(self._reading, rolling=rolling, notes=self._notes(round_))

    def _layouts_of(self, slim: Slim | None) -> LayoutMemory | None:
        """None where there are more labels than are remembered: layouts hold labels, and whoever makes series up would
        have them all kept, twice."""
        if self._series.is_full:
            self._layouts = LayoutMemory(), LayoutMemory()
            return None
        return self._layouts[slim is not None]

    async def _take_nodes(self, round_: _Asking, of: Round, nodes: Sequence[NodeReading], targets: Targets) -> None:
        await self._ask_owners(round_, nodes)
        self._idle.watch(nodes)
        self.asked_at, self._succeeded_at = of.at, of.at_monotonic
        self._reading = replace(
            self._reading,
            nodes=(*nodes, *self._lost(nodes, targets)),
            owners=self._owners.known(self._owners_of),
            idle_for=self._idle.idle_for(of.at),
        )

    # What is asked

    async def _begin(self, round_: _Asking) -> Round:
        """What time it is there; also shows at little cost whether anybody is."""
        before = self._clock()
        answer = await self._client.ask("time()")
        between = (before + self._clock()) / 2
        told = moment(answer.samples[0].value) if answer.samples else None
        if told is None:
            raise SourceError("malformed", f"{self._client.shown} does not answer the query time()")
        instant = last_instant(told, self._settings.interval)
        round_.at = instant if told - instant <= self._settings.interval * _SOON else told
        return Round(
            round_.at, between - (told - round_.at), self._node_labels, self._field, self._settings.fields_beside
        )

    async def _ask(self, round_: _Asking, slim: Slim | None) -> Told:
        names = () if slim is None else slim.finding
        targets = await self._targets(round_, names)
        answers, times, _ = await asyncio.gather(
            self._answers(round_, targets, slim),
            round_.need(self._queries.times(targets.copy_labels, names)),
            self._ask_idle(round_),
        )
        if round_.needed_failed is not None:
            raise round_.needed_failed
        series = AllSeries.of((sample for _, samples in answers for sample in samples), targets)
        return Told(answers, targets, targets.times(times.samples), series)

    async def _targets(self, round_: _Asking, names: Sequence[str]) -> Targets:
        answer = await round_.ask(self._queries.targets(self._up_has_match, names))
        if not answer.samples and self._match and self._up_has_match:
            # What --match asks for may be on the exporters' series only.
            answer = await round_.ask(self._queries.targets(with_match=False, names=names))
            self._up_has_match = not answer.samples
        return targets_of(answer.samples, self._node_labels)

    async def _answers(self, round_: _Asking, targets: Targets, slim: Slim | None) -> Answers:
        is_slim = slim is not None
        parts = self._queries.parts() if slim is None else self._queries.parts(slim.memory)
        known = {part: self._series.of(f"{part.name}, slim" if is_slim else part.name) for part in parts}

        async def ask(part: Part) -> Vector | None:
            text = self._queries.samples(part, targets.copy_labels, is_slim)
            if part.needed:
                return await round_.need(text, known[part])
            return await round_.may(part.name, text, known=known[part])

        # The longest answers first, so that in the end nothing is waited for that could have been begun before.
        in_order = sorted(parts, key=lambda part: (not part.needed, -len(known[part])))
        answers = dict(zip(in_order, await asyncio.gather(*map(ask, in_order)), strict=True))
        return [(part, answer.samples) for part in parts if (answer := answers[part]) is not None]

    async def _rolling(
        self, round_: _Asking, targets: Targets, samples: list[ParsedSample]
    ) -> Mapping[Scope, float] | None:
        """As it last was when not all of it can be had; None after a while: the view computes it from the rounds.

        In most rounds one instant is new, and the round's own. In the first all of them are: those that do not fit in
        are left to the next.
        """
        spelt = self._spelt.take(samples, self._field.id, round_.at)
        up_match = self._match if self._up_has_match else ()
        queries = RollingQueries(self._match, up_match, self._node_labels, self._field, self._settings, spelt)
        asked = queries.all()
        at = last_instant(round_.at, self._settings.interval)
        until = self._clock() + self._settings.interval / 2
        missing = self._instants.missing(asked, at)
        for number, instant in enumerate(missing):
            if number and self._clock() > until:
                break
            if instant == round_.at:
                figures: dict[Scope, float] | None = figures_at(samples, targets, queries)
            else:
                figures = await self._ask_instant(round_, asked, instant)
            if figures is None:
                break
            self._instants.take(instant, figures)
        if not self._instants.missing(asked, at):
            self._averaged_at = self._clock()
            return self._instants.averages(at)
        is_old = self._clock() - self._averaged_at > self._settings.stale_after
        return None if is_old else self._reading.rolling

    async def _ask_instant(
        self, round_: _Asking, asked: Mapping[str, str], instant: float
    ) -> dict[Scope, float] | None:
        answers = await asyncio.gather(
            *(round_.may(f"rolling average by {kind}", text, instant) for kind, text in asked.items())
        )
        samples = {kind: answer.samples for kind, answer in zip(asked, answers, strict=True) if answer is not None}
        return figures_by_scope(samples, self._node_labels) if len(samples) == len(asked) else None

    async def _ask_idle(self, round_: _Asking) -> None:
        if not self._idle.is_due(round_.at):
            return
        query = IdleQuery(self._match, self._settings.idle_after)
        at = query.instant(round_.at)
        answer = await round_.may("idle GPUs", query.text(), at)
        if answer is not None:
            self._idle.take(answer.samples, at)

    async def _ask_owners(self, round_: _Asking, nodes: Sequence[NodeReading]) -> None:
        now = self._clock()
        pods = self._owners.pods(nodes, now)
        if not pods:
            return
        queries = OwnerQueries(self._match)
        told = await round_.may("owners of pods", queries.pods(pods))
        owners = parse_pod_owners(told.samples) if told else {}
        sets = replica_sets_in(owners)
        if sets:
            made = await round_.may("owners of ReplicaSets", queries.replica_sets(sets))
            if made is None:  # a ReplicaSet kept for its Deployment's pod would stay so
                return
            owners = resolved(owners, parse_replica_set_owners(made.samples))
        self._owners.take(pods, owners, now)

    # What becomes of it

    def _lost(self, nodes: Sequence[NodeReading], targets: Targets) -> list[NodeReading]:
        """Nodes of earlier rounds that are in none of the answers, as they last were: for a while, or for as long as
        the server still has their exporter among its targets.

        One whose GPUs are all told of elsewhere now is not lost: it had another name, as while the server had taken in
        only a part of its first exposition.
        """
        names = {node.node for node in nodes}
        here = {device.uuid for node in nodes for device in node.devices}
        oldest = self._clock() - self._settings.drop_after
        scraped = {instance for _, instance in targets.own_pods}
        return [
            replace(node, notes=(_LOST,), listed=True if node.read_at < oldest else node.listed)
            for node in self._reading.nodes
            if node.node not in names
            and (node.read_at >= oldest or node.target in scraped)
            and any(device.uuid not in here for device in node.devices)
        ]

    def _notes(self, round_: _Asking) -> tuple[str, ...]:
        notes = list(dict.fromkeys(round_.notes))[:MOST_NOTES]
        if round_.failures:
            notes.append(f"not known, as Prometheus did not answer: {', '.join(what for what, _ in round_.failures)}")
        devices = [device for node in self._reading.nodes for device in node.devices]
        if not devices:
            and_match = " and that --match is right" if self._match else ""
            notes.append(f"Prometheus has no figures of GPUs: see that it scrapes the exporters{and_match}")
        elif not all(has_identity(device.uuid) for device in devices):
            notes.append(_NO_UUID)
        return tuple(notes)

    def _fail(self, error: SourceError, seconds: float) -> None:
        """All stays as it was and grows older, but for averages, which have no age to be seen."""
        self._count(error)
        reading = self._reading
        if self._clock() - self._succeeded_at > self._settings.stale_after:
            reading = replace(reading, rolling={}, idle_for={})
        outcome = TargetOutcome(self._client.shown, seconds, error.reason, str(error))
        self._reading = replace(reading, outcomes=(outcome,), errors=dict(self._errors), notes=())

    def _report(self, round_: _Asking, seconds: float) -> None:
        first: SourceError | None = None
        for what, error in round_.failures:
            self._count(error)
            first = first or SourceError(error.reason, f"{error} (asked for: {what})")
        outcome = TargetOutcome(self._client.shown, seconds, first.reason if first else "", str(first or ""))
        self._reading = replace(self._reading, outcomes=(outcome,), errors=dict(self._errors))

    def _count(self, error: SourceError) -> None:
        self._errors[self._client.shown, error.reason] += 1


class _Asking:
    """One round's queries, their warnings and what went wrong."""

    def __init__(self, client: PrometheusClient) -> None:
        self._client = client
        self.at = 0.0
        self.notes: list[str] = []
        self.failures: list[tuple[str, SourceError]] = []
        self.needed_failed: SourceError | None = None
        self.values_left = MOST_VALUES
        """Of answers whose samples are kept until the round ends."""

    async def ask(self, query: str, at: float | None = None, known: KnownSeries | None = None) -> Vector:
        """Raises SourceError."""
        when = self.at if at is None else at
        if known is None:
            answer = await self._client.ask(query, when)
        else:
            answer = await self._client.ask(query, when, known, lambda: self.values_left)
            self.values_left -= answer.values
        self.notes += answer.notes
        return answer

    async def need(self, query: str, known: KnownSeries | None = None) -> Vector:
        """Empty when it failed, and then the round has."""
        try:
            return await self.ask(query, known=known)
        except SourceError as error:
            self.needed_failed = self.needed_failed or error
            return Vector()

    async def may(
        self, what: str, query: str, at: float | None = None, known: KnownSeries | None = None
    ) -> Vector | None:
        """None when it failed. Not asked when the round is lost anyway."""
        if self.needed_failed is not None:
            return None
        try:
            return await self.ask(query, at, known)
        except SourceError as error:
            self.failures.append((what, error))
            return None


def check_node_labels(names: Sequence[str]) -> tuple[str, ...]:
    """The same, each once. Raises UsageError."""
    for name in names:
        if not promql.is_label(name):
            raise UsageError(f"--node-label: {name!r} is not the name of a label; write Hostname,node,instance")
    if not names:
        raise UsageError("--node-label names no label: write Hostname,node,instance")
    return tuple(dict.fromkeys(names))


def _used_field(name: str) -> Field:
    """In the older unit where there are two."""
    full_scale(name)
    found = meaning(name)
    if found is None:  # full_scale has refused it
        raise UsageError(f"--used-field {name}: there is no such field")
    return found.field
