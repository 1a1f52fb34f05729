"""Sums the usage and cost of each namespace over the cluster, from the counters of the nodes' exporters.

The counters of the first reading of a node are its baseline; every later increase is charged. A new exporter on a known
node started at 0, so its full counters are charged. Sums never decrease.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from podgpu.cluster.collect import NodeReading
from podgpu.cluster.nodes import NodeEntry
from podgpu.cluster.prices import Price, Prices
from podgpu.cluster.state import ClusterState
from podgpu.metrics.mig import billed_name
from podgpu.model import NodeState

NS_PER_HOUR = 3600 * 1_000_000_000
MJ_PER_KWH = 3_600_000 * 1000
COST_KINDS = ("allocated", "used", "energy")
_FORGET_SECONDS = 24 * 3600.0  # an exporter or node that was not read for longer gets a new baseline
_SLACK_SECONDS = 60.0
Counters = tuple[int | None, int | None, int | None]  # allocated ns, busy ns, energy mJ; None if not counted
_ZERO: Counters = (0, 0, 0)


class BillKey(NamedTuple):
    namespace: str
    model: str  # `<model>`, or `<model> MIG <profile>`


class CostKey(NamedTuple):
    namespace: str
    kind: str
    currency: str


@dataclass(frozen=True, slots=True)
class BillTotals:
    amounts: Mapping[BillKey, Counters] = field(default_factory=dict)
    costs: Mapping[CostKey, float] = field(default_factory=dict)
    unpriced: Mapping[str, float] = field(default_factory=dict)  # model -> GPU-seconds


class BillLedger:
    def __init__(self) -> None:
        self._exporters: dict[
            str, tuple[float, Mapping[BillKey, Counters]]
        ] = {}  # exporter -> monotonic time and counters of its last reading
        self._nodes: dict[str, float] = {}  # node -> monotonic time of its last reading
        self._amounts: dict[BillKey, Counters] = {}
        self._costs: dict[CostKey, float] = {}
        self._unpriced: dict[str, float] = {}

    def update(self, state: ClusterState, readings: Iterable[NodeReading], now: float) -> None:
        """Charges the nodes of a round. `readings` also contains duplicate exporters that were not chosen."""
        chosen = {(node.name, node.target) for node in state.nodes}
        for node in state.nodes:
            self._charge(node, state.prices)
        for reading in readings:
            if (reading.state.node, reading.target) not in chosen:
                # The baseline in case this exporter is used later. Until then, another exporter's counters are charged.
                key = _exporter_key(reading.state, reading.state.node, reading.target)
                self._exporters[key] = reading.read_at, counters_of(reading.state)
        for node in state.nodes:
            self._nodes[node.name] = max(node.read_at, self._nodes.get(node.name, node.read_at))
        oldest = now - _FORGET_SECONDS
        self._exporters = {key: exporter for key, exporter in self._exporters.items() if exporter[0] >= oldest}
        self._nodes = {name: at for name, at in self._nodes.items() if at >= oldest}

    def totals(self) -> BillTotals:
        return BillTotals(dict(self._amounts), dict(self._costs), dict(self._unpriced))

    def _charge(self, node: NodeEntry, prices: Prices) -> None:
        key, counters = _exporter_key(node.state, node.name, node.target), counters_of(node.state)
        read_at, before = self._exporters.get(key, (float("-inf"), {}))
        if node.read_at <= read_at:
            return
        restarted = any(_decreased(now, before.get(series, _ZERO)) for series, now in counters.items())
        if restarted or not before:
            before = counters if self._ran_before(node, counters) else {}
        self._grow(counters, before, prices)
        self._exporters[key] = node.read_at, {**before, **counters}

    def _ran_before(self, node: NodeEntry, counters: Mapping[BillKey, Counters]) -> bool:
        """Returns True if the node is new, or its counters are too large to have started after the last reading."""
        last = self._nodes.get(node.name)
        if last is None:
            return True
        most = (node.read_at - last + _SLACK_SECONDS) * max(1, len(node.state.devices)) * 1e9
        return any((allocated or 0) > most or (busy or 0) > most for allocated, busy, _ in counters.values())

    def _grow(self, counters: Mapping[BillKey, Counters], baseline: Mapping[BillKey, Counters], prices: Prices) -> None:
        for key, now in counters.items():
            before = baseline.get(key, _ZERO)
            growth = tuple(None if a is None else max(0, a - (b or 0)) for a, b in zip(now, before, strict=True))
            total = self._amounts.get(key, (None, None, None))
            allocated, busy, energy = (a if b is None else (a or 0) + b for a, b in zip(total, growth, strict=True))
            self._amounts[key] = allocated, busy, energy
            if prices.currency:
                self._price(key, growth, prices.of(key.model), prices.currency)

    def _price(self, key: BillKey, growth: Iterable[int | None], price: Price, currency: str) -> None:
        allocated, busy, energy = growth
        for kind, amount, unit_price, unit in (
            ("allocated", allocated, price.gpu_hour, NS_PER_HOUR),
            ("used", busy, price.gpu_hour, NS_PER_HOUR),
            ("energy", energy, price.kwh, MJ_PER_KWH),
        ):
            if amount is not None and unit_price is not None:
                cost = CostKey(key.namespace, kind, currency)
                self._costs[cost] = self._costs.get(cost, 0.0) + unit_price * amount / unit
        if price.gpu_hour is None and allocated is not None:
            self._unpriced[key.model] = self._unpriced.get(key.model, 0.0) + allocated / 1e9


def _exporter_key(state: NodeState, node: str, target: str) -> str:
    """Returns `exporter_id`, which changes when the counters restart. Without one, returns node and address."""
    return state.exporter_id or f"{node} {target}"


def counters_of(state: NodeState) -> dict[BillKey, Counters]:
    return {
        BillKey(usage.namespace, billed_name(usage.model, usage.profile) if usage.profile else usage.model): (
            usage.allocated_ns,
            usage.busy_ns,
            usage.energy_mj,
        )
        for usage in state.namespaces
    }


def _decreased(now: Counters, before: Counters) -> bool:
    return any(a is not None and b is not None and a < b for a, b in zip(now, before, strict=True))
