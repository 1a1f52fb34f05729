"""Turns the cluster's state into records for SQLite, and reads the records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from sqlite3 import Connection

from podgpu.charge import UNALLOCATED, Amounts, Charge, Figures, HeldTime, charge, charge_rest
from podgpu.errors import Note
from podgpu.fleet.choose import describe_condition
from podgpu.fleet.hold import describe_idle, estimate_idle, wasteful_since
from podgpu.fleet.parts import (
    HeldPart,
    device_memory,
    device_price,
    device_utilization,
    divide_gpu,
    key_of,
)
from podgpu.fleet.read.pages import GpuQuery
from podgpu.fleet.readings import NodeEntry
from podgpu.fleet.round import Cluster, PublishedState
from podgpu.fleet.spent import MAX_WATTS
from podgpu.fleet.state import ClusterState
from podgpu.known import divide_known
from podgpu.metrics.conditions import NODE_GONE
from podgpu.model import DeviceState, MigInstance
from podgpu.past.advice import make_savings
from podgpu.past.bill import RangeAnswer, RangeQuery, account_of, read_range_answer
from podgpu.past.costs import CostsAnswer, CostsQuery, read_costs_answer
from podgpu.past.events import EventQuery, EventsAnswer, read_events
from podgpu.past.interface import Past
from podgpu.past.job import JobSummary, read_summary
from podgpu.past.loads import read_fleet_load
from podgpu.past.moment import read_past
from podgpu.past.recorder import HistoryRecorder
from podgpu.past.savings import SavingsAnswer, SavingsQuery
from podgpu.past.schema import COARSE, FINE, IDLE, floor_time
from podgpu.past.sqlite import (
    JSON,
    GpuHistory,
    JobHistory,
    PodHistory,
    make_pod_history,
    read_gpu,
    read_job,
    read_pod,
    read_utilization,
    sparkline_times,
    sparklines_json,
)
from podgpu.past.store import ConditionRecord, GpuSample

_log = logging.getLogger(__name__)
_MAX_SAVINGS = 16  # answers that are kept until the next step of 5 minutes
# Minimum difference from the GPU's utilisation for storing a sole holder's own values.
_OWN_DIFFERENCE = 0.05
MAX_GPUS = 8000  # limit of the SQLite history; measured with 1,000 nodes of 8 GPUs


def make_records(state: ClusterState) -> list[GpuSample]:
    """Returns the state of each GPU and MIG instance, with the charges since the last round.

    Skips GPUs without a UUID, because the UUID is the key in the history.
    """
    records: list[GpuSample] = []
    for node in state.nodes:
        held = {} if node.gone else node.held_by_device()
        for gpu in node.gpus:
            if gpu.uuid:
                records += _record_gpu(gpu, node, held, state)
    return records


def _record_gpu(
    gpu: DeviceState, node: NodeEntry, held: Mapping[str, list[HeldPart]], state: ClusterState
) -> Iterator[GpuSample]:
    users_joules = 0.0
    for instance, size in divide_gpu(gpu):
        key = key_of(gpu, instance)
        # Without reservations for unknown pods.
        parts = [part for part in held.get(key, ()) if part.holder.key]
        charges = list(_charge_holders(parts, node, state))
        for part, charged in zip(parts, charges, strict=True):
            if not part.holder.has_labels:
                users_joules += charged.amounts.energy_joules

        # If the node is silent, the holders are unknown.
        if key in node.rest and not node.silent:
            price = device_price(node.prices, gpu, instance, size)
            rest = _charge_rest(gpu, key, node, size, price, charges, users_joules)
            if any(rest):
                currency = "" if price is None else state.prices.currency
                charges.append(Charge(UNALLOCATED, amounts=rest, currency=currency))

        yield GpuSample(
            uuid=gpu.uuid,
            instance="" if instance is None else str(instance.id),
            node=node.name,
            gpu_index=gpu.index,
            figures=None if node.stale else _figures(gpu, instance),
            charges=charges,
            conditions=list(_record_conditions(gpu, parts, node, state)),
            holders_known=node.silent is None,
            taken_from=node.taken.get(gpu.uuid, ""),
        )


def _record_conditions(
    gpu: DeviceState, parts: Sequence[HeldPart], node: NodeEntry, state: ClusterState
) -> Iterator[ConditionRecord]:
    for condition in gpu.conditions:
        since = None if condition.name == NODE_GONE else condition.since
        yield ConditionRecord(condition.name, describe_condition(condition)[0], since)
    at = node.reading.read_at + state.clock_offset
    for part in parts:
        if wasteful_since(part, at, state.settings.idle_after):
            account = account_of(part, node.state.pod_labels)
            yield ConditionRecord(IDLE, describe_idle(part.holder), account=account)


def _charge_holders(
    parts: Sequence[HeldPart], node: NodeEntry, state: ClusterState
) -> Iterator[Charge]:
    has_own_figures = not node.stale and (len(parts) > 1 or any(map(_differs, parts)))
    for part in parts:
        usage = part.holder.usage
        figures = None
        if has_own_figures and usage:
            figures = Figures(usage.utilization_ratio, usage.memory_used_bytes)

        amounts = Amounts()
        if part.spent is not None:
            time = _complete(part.spent, part, node.reading.read_at + state.clock_offset)
            amounts = charge(time, part.device_size, part.price)

        yield Charge(
            account_of(part, node.state.pod_labels),
            part.holder.container,
            amounts,
            figures,
            currency="" if part.price is None else state.prices.currency,
        )


def _complete(spent: HeldTime, part: HeldPart, at: float) -> HeldTime:
    """Estimates what the exporter does not count. `at`: Unix time of the reading."""
    busy = spent.busy
    if part.holder.known_usage.busy_ns is None:
        ratio = _utilization(part)
        busy = None if ratio is None else min(1.0, ratio) * spent.held

    idle = spent.idle
    if idle is None:
        idle = estimate_idle(part, spent.held, at)

    joules = spent.joules
    if joules is None and part.gpu.usage is None:
        joules = _watts(part.gpu) * part.gpu_fraction * spent.held

    return spent._replace(busy=busy, idle=idle, joules=joules)


def _charge_rest(
    gpu: DeviceState,
    key: str,
    node: NodeEntry,
    size: float,
    price: float | None,
    charges: Sequence[Charge],
    users_joules: float,
) -> Amounts:
    """Charges what no holder had.

    `users_joules`: the energy of containers that use the GPU without holding it. It is a part of
    the unattributed energy.
    """
    held_seconds = sum(one.amounts.allocated_seconds for one in charges)
    rest = charge_rest(node.seconds, size, held_seconds, price)
    joules = node.rest[key]
    if gpu.usage is None:
        joules = _watts(gpu) * rest.allocated_seconds
    return rest._replace(energy_joules=max(0.0, (joules or 0.0) - users_joules))


def _watts(gpu: DeviceState) -> float:
    """Returns the power for estimates of energy. An exporter may report any number."""
    return min(MAX_WATTS, (gpu.power_mw or 0) / 1000)


def _utilization(part: HeldPart) -> float | None:
    """Returns the holder's utilisation, or the device's if no other holder shares it.

    None for a client of MPS.
    """
    if part.is_mps_client:
        return None
    own = part.holder.known_usage.utilization_ratio
    if own is None and part.share == 1:
        return device_utilization(part.device)
    return own


def _figures(gpu: DeviceState, instance: MigInstance | None) -> Figures | None:
    device = instance or gpu
    figures = Figures(device_utilization(device), device_memory(device))
    if instance is None:
        power = divide_known(gpu.power_mw, 1000)
        figures = figures._replace(power_watts=power, temperature_celsius=gpu.temperature_celsius)
    if figures == Figures():
        return None
    return figures


def _differs(part: HeldPart) -> bool:
    own = part.holder.known_usage.utilization_ratio
    if own is None:
        return False
    whole = device_utilization(part.device)
    return whole is None or abs(whole - own) > _OWN_DIFFERENCE


def _describe_limit(state: ClusterState) -> Iterator[Note]:
    gpus = sum(len(node.state.devices) for node in state.nodes)
    if gpus > MAX_GPUS:
        text = (
            f"history, waste and cost of {gpus:,} GPUs are stored in SQLite, which supports"
            f" {MAX_GPUS:,}: for larger clusters, use a Prometheus server (--prometheus)"
        )
        yield Note("history limit", text)


def cluster_recorder(cluster: Cluster, directory: str = "") -> HistoryRecorder:
    """Creates a recorder that gets every round of the cluster view."""
    recorder = HistoryRecorder(clock=cluster.clock, directory=directory)

    def add(state: ClusterState) -> None:
        if not state.nodes:
            return
        try:
            recorder.add(make_records(state))
        except Exception:  # noqa: BLE001 - the cluster view goes on without history
            _log.exception("unexpected error while recording a round; please report it")

    def warnings() -> list[Note]:
        return [*recorder.warnings(), *_describe_limit(cluster.published.state)]

    cluster.read_time = recorder.read_time
    cluster.recorded_nodes = recorder.list_nodes()
    cluster.readers.append(add)
    cluster.other_warnings = warnings
    return recorder


class SqlitePast(Past):
    """The past that a recorder stored."""

    has_summaries = True

    def __init__(self, recorder: HistoryRecorder, read_state: Callable[[], ClusterState]) -> None:
        """`read_state`: returns the current state."""
        self._recorder = recorder
        self._read_state = read_state
        # Start of the minute -> utilisation by device.
        self._points: dict[int, Mapping[str, float | None]] = {}
        # Every open page asks for the same savings. They change every 5 minutes.
        self._savings: dict[tuple[SavingsQuery, int], SavingsAnswer] = {}

    async def range(self, query: RangeQuery) -> RangeAnswer:
        answer = await self._recorder.ask(
            lambda db, now: read_range_answer(db, query, now, self._read_state())
        )
        answer.in_memory = self._recorder.is_in_memory
        return answer

    async def costs(self, query: CostsQuery) -> CostsAnswer:
        answer = await self._recorder.ask(
            lambda db, now: read_costs_answer(db, query, now, self._read_state())
        )
        answer.in_memory = self._recorder.is_in_memory
        return answer

    async def savings(self, query: SavingsQuery) -> SavingsAnswer:
        return await self._recorder.ask(partial(self._read_savings, query))

    def _read_savings(self, query: SavingsQuery, db: Connection, now: float) -> SavingsAnswer:
        key = query._replace(is_csv=False), floor_time(now, COARSE)
        known = self._savings.get(key)
        if known is not None:
            return known

        state = self._read_state()
        fleet = read_fleet_load(db, query, now, state)
        answer = make_savings(query, fleet, state.prices.currency)
        answer.prices = state.prices.source
        answer.simulated = state.simulated
        answer.in_memory = self._recorder.is_in_memory
        # Before the first round, no pod holds a GPU.
        if not fleet.pods:
            return answer
        if len(self._savings) >= _MAX_SAVINGS:
            self._savings = {}

        self._savings[key] = answer
        return answer

    async def find(self, query: GpuQuery) -> PublishedState:
        def read(db: Connection, now: float) -> PublishedState:
            at = now if query.at is None else query.at
            return PublishedState(read_past(db, at, self._read_state()))

        return await self._recorder.ask(read)

    async def sparklines(self) -> JSON:
        return await self._recorder.ask(self._read_sparklines)

    async def gpu(self, uuid: str, instance: str, seconds: int) -> GpuHistory | None:
        return await self._recorder.ask(
            lambda db, now: read_gpu(db, uuid, now - seconds, now, instance)
        )

    async def pod(
        self, namespace: str, pod: str, seconds: int, cluster: str | None = None
    ) -> PodHistory | None:
        def read(db: Connection, now: float) -> PodHistory | None:
            gpus = read_pod(db, namespace, pod, now - seconds, now)
            return make_pod_history(namespace, pod, gpus)

        return await self._recorder.ask(read)

    async def job(self, kind: str, namespace: str, name: str, seconds: int) -> JobHistory | None:
        return await self._recorder.ask(
            lambda db, now: read_job(db, kind, namespace, name, now - seconds, now)
        )

    async def events(self, query: EventQuery) -> EventsAnswer:
        return await self._recorder.ask(lambda db, now: read_events(db, query, now))

    async def summary(self, namespace: str, pod: str) -> JobSummary | None:
        return await self._recorder.ask(
            lambda db, now: read_summary(db, namespace, pod, now, self._read_state())
        )

    def _read_sparklines(self, db: Connection, now: float) -> JSON:
        """Builds the sparklines.

        Caches points of past minutes, because every open page requests them repeatedly.
        """
        times = sparkline_times(now)
        cached = self._points  # local, because another thread may replace self._points
        points: dict[int, Mapping[str, float | None]] = {}
        for at in times:
            is_final = at in cached and at + times.step <= now - FINE
            points[at] = cached[at] if is_final else read_utilization(db, at, at + times.step)

        self._points = points

        names = set().union(*points.values())
        lines = {}
        for name in sorted(names):
            lines[name] = [values.get(name) for values in points.values()]

        return sparklines_json(times, lines)
