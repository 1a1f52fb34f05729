"""This module assembles the view of the cluster from what a backend read: the one place where all its parts come
together.

Pure but for the memory it is given, which is what one round has to know of those before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from podgpu.clock import WallClock
from podgpu.cluster.bills import Amounts, BillLedger, Series
from podgpu.cluster.costs import CostKey, CostLedger
from podgpu.cluster.counts import Counts, count
from podgpu.cluster.forgotten import ForgottenGpus
from podgpu.cluster.idle import IdleHolder, IdleMemory, wasted
from podgpu.cluster.missing import MissingGpus
from podgpu.cluster.nodes import MOST_NOTES, Choices, NodeView, Settled, bounded, settle
from podgpu.cluster.pod_map import MapRow, map_rows
from podgpu.cluster.reading import ClusterReading, Scope, TargetOutcome
from podgpu.cluster.rolling import RollingMemory
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.used import CLUSTER, Used, used_by_scope
from podgpu.figures.alerts import NodeState, alerts_of
from podgpu.figures.device import Alert, Owner, device_model
from podgpu.figures.prices import NO_PRICES, Prices, PriceTags, unpriced_note
from podgpu.figures.waste import Holding, WasteLedger, WasteStatement, holdings
from podgpu.model import Who

if TYPE_CHECKING:  # only for those who keep it on disk
    from podgpu.history.waste_file import EarlierWaste


@dataclass(slots=True)
class Memory:
    """What is carried from round to round. All of it is bounded."""

    choices: Choices = field(default_factory=Choices)
    idle: IdleMemory = field(default_factory=IdleMemory)
    bills: BillLedger = field(default_factory=BillLedger)
    costs: CostLedger = field(default_factory=CostLedger)
    rolling: RollingMemory = field(default_factory=RollingMemory)
    clock: WallClock = field(default_factory=WallClock)
    missing: MissingGpus = field(default_factory=MissingGpus)
    forgotten: ForgottenGpus = field(default_factory=ForgottenGpus)
    waste: WasteLedger = field(default_factory=WasteLedger)
    wasted: WasteStatement = field(default_factory=WasteStatement)
    counting_since: float | None = None
    waste_since: float | None = None
    """Unix time from which on waste was counted, where that was before this podgpu was started."""

    def look_at_clock(self, now: float, wall: float) -> None:
        """Moments of the past stay as long ago as they were when the wall clock was set."""
        step = self.clock.step(now, wall)
        if self.waste_since is not None:
            self.waste_since += step
        if step:
            self.idle.clock_was_set(step)
            self.missing.clock_was_set(step)
        self.counting_since = wall if self.counting_since is None else self.counting_since + step

    def restore(self, earlier: EarlierWaste, now: float, wall: float) -> None:
        """What was counted as waste before podgpu was started anew."""
        self.look_at_clock(now, wall)
        self.waste.restore(earlier.statement, earlier.written_at, now, wall)
        self.waste_since = earlier.statement.counting_since


@dataclass(frozen=True, slots=True)
class ClusterView:
    settings: ViewSettings
    taken_at: float
    """Unix time."""
    nodes: tuple[NodeView, ...] = ()
    """By name, old ones too."""
    notes: tuple[str, ...] = ()
    rows: tuple[MapRow, ...] = ()
    used: Mapping[Scope, Used] = field(default_factory=dict)
    """By the field's own unit, of which `settings.full` is everything."""
    rolling: Mapping[Scope, float] = field(default_factory=dict)
    """As ratios."""
    idle: tuple[IdleHolder, ...] = ()
    """All of them, however short it may be, by node and device."""
    wasted: tuple[IdleHolder, ...] = ()
    """Those that have been idle for longer than `settings.idle_after`."""
    counts: Counts = field(default_factory=Counts)
    bills: Mapping[Series, Amounts] = field(default_factory=dict)
    costs: Mapping[CostKey, float] = field(default_factory=dict)
    unpriced: Mapping[str, float] = field(default_factory=dict)
    """Model -> GPU seconds."""
    waste: WasteStatement = field(default_factory=WasteStatement)
    """As of the last whole round."""
    prices: Prices = NO_PRICES
    owners: Mapping[tuple[str, str], Owner] = field(default_factory=dict)
    """(namespace, pod) -> what made the pod."""
    counting_since: float | None = None
    alerts: tuple[Alert, ...] = ()
    """What is serious, the worst first."""
    outcomes: tuple[TargetOutcome, ...] = ()
    """By target, each once."""
    errors: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @property
    def used_ratio(self) -> float | None:
        """Of the whole cluster; None without data."""
        used = self.used.get(CLUSTER)
        return None if used is None else used.mean / self.settings.full

    @property
    def has_fresh_nodes(self) -> bool:
        return any(not node.old for node in self.nodes)


class _Basis(NamedTuple):
    """What every view is made of."""

    settled: Settled
    outcomes: dict[str, TargetOutcome]
    used: dict[Scope, Used]
    idle: Sequence[IdleHolder]
    unread: tuple[str, ...]


def _basis(reading: ClusterReading, memory: Memory, settings: ViewSettings, now: float, wall: float) -> _Basis:
    memory.look_at_clock(now, wall)
    outcomes = {outcome.target: outcome for outcome in reading.outcomes}
    settled = settle(reading.nodes, outcomes, memory.choices, settings, now, wall)
    settled = memory.forgotten.leave_out(memory.missing.keep(settled, wall))
    used = used_by_scope(settled.nodes, settled.contested, reading.owners, settings)
    idle = memory.idle.turn(settled.nodes, reading.idle_for, now, wall)
    return _Basis(settled, outcomes, used, idle, tuple(_unread(outcomes, settled)))


def assemble_use(
    reading: ClusterReading, memory: Memory, settings: ViewSettings, now: float, wall: float, notes: Sequence[str] = ()
) -> ClusterView:
    """Who holds what and what they do on it, alone: neither bills nor waste nor the map's rows, which are kept and
    counted for the page and the metrics."""
    basis = _basis(reading, memory, settings, now, wall)
    return ClusterView(
        settings=settings,
        taken_at=wall,
        nodes=basis.settled.nodes,
        notes=bounded((*notes, *reading.notes, *basis.unread)),
        used=basis.used,
        idle=tuple(basis.idle),
        owners=reading.owners,
        outcomes=tuple(basis.outcomes[target] for target in sorted(basis.outcomes)),
        errors=reading.errors,
    )


def assemble(
    reading: ClusterReading,
    memory: Memory,
    settings: ViewSettings,
    now: float,
    wall: float,
    *,
    prices: Prices = NO_PRICES,
    notes: Sequence[str] = (),
    whole_round: bool = True,
) -> ClusterView:
    """`now` is monotonic, `wall` Unix time. `whole_round`: False in the middle of a round, which then is no instant of
    the rolling average. `notes` are put before what is found here."""
    settled, outcomes, used, idle, unread = _basis(reading, memory, settings, now, wall)
    too_long = wasted(idle, settings.idle_after, wall)
    memory.costs.charge(memory.bills.turn(settled, now), prices)
    bills = memory.bills.totals()
    memory.costs.keep(bills)
    unpriced = memory.costs.unpriced()
    alerts = (*alerts_of(map(_state, settled.nodes)), *(Alert("warning", text) for text in unread[:MOST_NOTES]))
    if whole_round:
        found = _holdings(settled, idle, prices, now)
        memory.waste.turn(found, now, settings.stale_after, reading.owners, prices)
        memory.wasted = memory.waste.statement(now, wall, memory.waste_since or memory.counting_since)
    return ClusterView(
        settings=settings,
        taken_at=wall,
        nodes=settled.nodes,
        notes=bounded((*notes, *reading.notes, *unread, *_without_price(settled, prices))),
        alerts=alerts,
        rows=map_rows(settled.nodes),
        used=used,
        rolling=_rolling(reading, memory.rolling, used, settings, wall, whole_round),
        idle=tuple(idle),
        wasted=tuple(too_long),
        counts=count(settled.nodes, settled.contested, too_long, settings),
        bills=bills,
        costs=memory.costs.totals(),
        unpriced=unpriced,
        waste=memory.wasted,
        prices=prices,
        owners=reading.owners,
        counting_since=memory.counting_since,
        outcomes=tuple(outcomes[target] for target in sorted(outcomes)),
        errors=reading.errors,
    )


def _holdings(settled: Settled, idle: Iterable[IdleHolder], prices: Prices, now: float) -> Iterator[Holding]:
    """What everybody holds, each GPU once; an old node's as it was when that was last heard of."""
    resting: dict[int, dict[Who, float]] = {}
    for idler in idle:
        resting.setdefault(id(idler.device), {})[idler.of.who] = idler.since
    tags, counted = PriceTags(prices) if prices.currency else None, set[str]()
    for node in settled.nodes:
        yield from holdings(node.name, node.devices, counted, now - node.age, resting, tags, old=node.old)


def _rolling(
    reading: ClusterReading,
    memory: RollingMemory,
    used: Mapping[Scope, Used],
    settings: ViewSettings,
    wall: float,
    whole_round: bool,
) -> dict[Scope, float]:
    if reading.rolling is not None:
        memory.clear()
        return {scope: min(value, 1.0) for scope, value in reading.rolling.items() if math.isfinite(value)}
    if whole_round:
        full = settings.full
        memory.add(wall, settings.interval, {scope: of.mean / full for scope, of in used.items()})
    return memory.averages(wall, settings.interval, settings.window)


def _unread(outcomes: Mapping[str, TargetOutcome], settled: Settled) -> Iterable[str]:
    """Targets that failed and are not behind any node, where the node would say so."""
    behind = {reading.target for reading in settled.chosen.values()}
    behind |= {reading.target for siblings in settled.siblings.values() for reading in siblings}
    for target in sorted(outcomes.keys() - behind):
        if outcomes[target].error:
            yield outcomes[target].said


def _state(node: NodeView) -> NodeState:
    return NodeState(node.name, node.devices, node.gone, node.trouble)


def _without_price(settled: Settled, prices: Prices) -> tuple[str, ...]:
    if not prices.currency:
        return ()
    models = {device_model(device) for node in settled.nodes for device in node.devices}
    return unpriced_note([model for model in models if prices.of(model).gpu_hour is None], prices)
