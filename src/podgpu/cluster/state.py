"""Builds the `ClusterState` of each round from the collector's readings, or from one exporter for its own page.

Each round depends only on its readings and the previous state, which carries the idle times of foreign exporters, the
GPUs that disappeared, and the exporter chosen for each node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import Literal

import msgspec
from msgspec.structs import replace

from podgpu.cluster.alerts import Alert, describe_node, sort_alerts
from podgpu.cluster.collect import ClusterReading, NodeReading, Pod, Scope, TargetOutcome
from podgpu.cluster.parts import (
    HeldPart,
    classify_use,
    divide_gpu,
    divide_slot,
    holders_of,
    is_blind,
    is_lost,
    is_shown,
    runs_nothing,
    slot_model,
)
from podgpu.cluster.prices import NO_PRICES, Prices, describe_unpriced
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.used import UsedMean, mean_by_scope
from podgpu.errors import few_of
from podgpu.metrics.conditions import LOST, NODE_GONE
from podgpu.model import (
    RESERVATION,
    Condition,
    DeviceState,
    Holder,
    HolderUsage,
    MigInstance,
    NodeState,
    Slot,
    Workload,
    WorkloadOwner,
)

MAX_NOTES = 12
_CLOCK_STEP = 2.0  # smaller changes of the wall clock, in seconds, are ignored
_CLOCK_AHEAD, _CLOCK_BEHIND = 5.0, 60.0  # tolerated skew; larger behind, because figures are some seconds old
_CLOCK_UNSET = 86_400.0  # a larger skew means an unset clock; a wrong time zone is less than a day
_SAME_READING = 1e-6
_NS = 1_000_000_000


class NodeEntry(msgspec.Struct, frozen=True, gc=False):
    """One node: its last state, with data added by the cluster, and when and where the state was read."""

    name: str
    target: str
    state: NodeState
    read_at: float  # monotonic
    age_seconds: float | None = None
    stale: bool = False  # the figures are too old
    gone: bool = False  # its exporter has not answered for longer than --stale-after
    notes: tuple[str, ...] = ()
    held: tuple[HeldPart, ...] = ()

    @property
    def gpus(self) -> Iterator[DeviceState]:
        """Yields the GPUs that are shown."""
        return (gpu for gpu in self.state.devices if is_shown(gpu))

    def held_by_slot(self) -> dict[tuple[str, int | None], list[HeldPart]]:
        """Groups the held parts by GPU (`gpu_id`) and MIG instance."""
        by_slot: dict[tuple[str, int | None], list[HeldPart]] = {}
        for part in self.held:
            by_slot.setdefault((gpu_id(part.gpu), None if part.instance is None else part.instance.id), []).append(part)
        return by_slot


@dataclass(frozen=True, slots=True)
class ClusterState:
    """All nodes after one round. An exporter's own page uses one with a single node."""

    settings: ViewSettings
    taken_at: float | None
    scope: Literal["node", "cluster"] = "cluster"
    nodes: tuple[NodeEntry, ...] = ()  # sorted by name
    notes: tuple[str, ...] = ()
    alerts: tuple[Alert, ...] = ()  # most serious first
    used: Mapping[Scope, UsedMean] = field(default_factory=dict)
    owners: Mapping[Pod, WorkloadOwner] = field(default_factory=dict)
    prices: Prices = NO_PRICES
    outcomes: tuple[TargetOutcome, ...] = ()  # sorted by target
    errors: Mapping[tuple[str, str], int] = field(default_factory=dict)
    clock_offset: float = 0.0  # Unix time minus monotonic time, changed only when the wall clock is set

    @property
    def used_ratio(self) -> float | None:
        """Mean of --used-field over the GPUs in use. None if there is no data."""
        used = self.used.get(Scope("cluster"))
        return None if used is None else used.mean / self.settings.full

    @property
    def has_fresh_nodes(self) -> bool:
        return any(not node.stale for node in self.nodes)

    @property
    def simulated(self) -> bool:
        return any(node.state.simulated for node in self.nodes)


def build_cluster_state(
    reading: ClusterReading,
    previous: ClusterState | None,
    settings: ViewSettings,
    now: float,
    wall: float,
    *,
    prices: Prices = NO_PRICES,
    removed: Collection[str] = (),
    notes: Sequence[str] = (),
) -> ClusterState:
    """Builds the state of a round. `now` is monotonic, `wall` is Unix time.

    `removed` contains UUIDs of GPUs that an operator removed. They are hidden while they are missing.
    """
    offset = wall - now
    if previous is not None and abs(offset - previous.clock_offset) < _CLOCK_STEP:
        offset = previous.clock_offset
    outcomes = {outcome.target: outcome for outcome in reading.outcomes}
    before = {node.name: node for node in previous.nodes} if previous else {}
    chosen = _choose_readings(reading.nodes, before, outcomes, settings, now)
    _resolve_gpus(chosen, before, settings, now)
    round_ = _Round(settings, offset, reading.owners, prices, reading.idle_for)
    present = {gpu.uuid for node in chosen.values() for gpu in node.state.devices if not is_lost(gpu)}
    nodes = []
    for node in chosen.values():
        earlier = before.get(node.name)
        state = node.state
        if earlier is not None and state.producer == "dcgm-exporter":
            state = _keep_lost(state, earlier.state, present, wall)
        if removed:
            state = _hide_removed(state, removed, node.gone)
            if node.gone and node.state.devices and not state.devices:
                continue  # all GPUs of this missing node are removed, so it is hidden too
        nodes.append(round_.complete(node, state, earlier, now))
    unread = tuple(_describe_unread(outcomes, chosen.values()))
    alerts = (alert for node in nodes for alert in describe_node(node.name, node.state, node.gone))
    return ClusterState(
        settings=settings,
        taken_at=wall,
        nodes=tuple(nodes),
        notes=bound_notes((*notes, *reading.notes, *unread, *describe_unpriced(_models(nodes), prices))),
        alerts=(*sort_alerts(alerts), *(Alert("warning", text) for text in unread[:MAX_NOTES])),
        used=mean_by_scope(nodes, reading.owners, settings),
        owners=reading.owners,
        prices=prices,
        outcomes=tuple(outcomes[target] for target in sorted(outcomes)),
        errors=reading.errors,
        clock_offset=offset,
    )


def build_single_node_state(
    state: NodeState,
    settings: ViewSettings,
    now: float,
    wall: float,
    *,
    fresh: bool = True,
    prices: Prices = NO_PRICES,
    notes: Sequence[str] = (),
) -> ClusterState:
    """Builds the state of an exporter's own page. Outdated figures are omitted; the first note is then the alert."""
    round_ = _Round(settings, wall - now, {}, prices, {}, watched=False)
    shown = state if fresh else replace(state, devices=(), namespaces=())
    reading = NodeReading("", shown, read_at=now)
    node = round_.complete(_Candidate(state.node, reading, stale=not fresh, state=shown), shown, None, now)
    alerts = tuple(Alert("broken", text, state.node) for text in notes[:1])
    if fresh:
        alerts = sort_alerts(describe_node(state.node, node.state))
    return ClusterState(
        settings=settings,
        taken_at=state.taken_at,
        scope="node",
        nodes=(replace(node, age_seconds=None),),
        notes=(*notes, *describe_unpriced(_models([node]), prices)),
        alerts=alerts,
        prices=prices,
        clock_offset=wall - now,
    )


def _models(nodes: Iterable[NodeEntry]) -> set[str]:
    return {slot_model(gpu, slot) for node in nodes for gpu in node.gpus for slot in (None, *gpu.instances)}


def bound_notes(notes: Sequence[str], most: int = MAX_NOTES) -> tuple[str, ...]:
    return tuple(notes) if len(notes) <= most else (*notes[:most], f"and {len(notes) - most} more")


def gpu_id(gpu: DeviceState) -> str:
    """Returns the UUID, or `gpu <index>` if the exporter reports none."""
    return gpu.uuid or f"gpu {'?' if gpu.index is None else gpu.index}"


# Which exporter is used for a node, and which node has a GPU


@dataclass(slots=True)
class _Candidate:
    """A node of the state that is being built."""

    name: str
    reading: NodeReading
    stale: bool
    state: NodeState
    gone: bool = False
    notes: list[str] = field(default_factory=list)
    others: tuple[NodeReading, ...] = ()  # readings of the same node that are ignored

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _choose_readings(
    readings: Iterable[NodeReading],
    before: Mapping[str, NodeEntry],
    outcomes: Mapping[str, TargetOutcome],
    settings: ViewSettings,
    now: float,
) -> dict[str, _Candidate]:
    """Chooses one reading per node name. Prefers one that is current, names holders, and was used in the last round."""
    by_name: dict[str, list[NodeReading]] = {}
    for reading in readings:
        overdue = now - reading.read_at > settings.drop_after
        if not overdue or (reading.listed and reading.state.devices):
            by_name.setdefault(reading.state.node, []).append(reading)
    chosen = {}
    for name in sorted(by_name):
        candidates = by_name[name]
        if len(candidates) > 1:
            used = before[name].target if name in before else ""
            candidates.sort(key=lambda reading: _preference(reading, used, settings, now))
        best, others = candidates[0], tuple(candidates[1:])
        gone = now - best.read_at > settings.stale_after
        node = _Candidate(name, best, _is_stale(best, settings, now), best.state, gone, others=others)
        node.notes = list(_describe_reading(best, others, outcomes))
        chosen[name] = node
    return chosen


def _preference(
    reading: NodeReading, used: str, settings: ViewSettings, now: float
) -> tuple[bool, bool, bool, bool, bool, bool, float, str]:
    """Returns a sort key. The reading with the smallest key is used."""
    stale = _is_stale(reading, settings, now)
    return (
        stale,
        reading.listed is False,
        not reading.state.devices,
        not _names_holders(reading.state),
        reading.target != used,
        reading.state.producer != "podgpu",
        -reading.read_at if stale else 0.0,
        reading.target,
    )


def _names_holders(state: NodeState) -> bool:
    return any(gpu.holders or any(instance.holders for instance in gpu.instances) for gpu in state.devices)


def _is_stale(reading: NodeReading, settings: ViewSettings, now: float) -> bool:
    return reading.state.stale or _clock_is_unset(reading) or now - reading.read_at > settings.stale_after


def _clock_is_unset(reading: NodeReading) -> bool:
    return reading.skew_seconds is not None and abs(reading.skew_seconds) > _CLOCK_UNSET


def _describe_reading(
    reading: NodeReading, others: Sequence[NodeReading], outcomes: Mapping[str, TargetOutcome]
) -> Iterator[str]:
    yield from reading.notes
    for copy in (reading, *others):
        outcome = outcomes.get(copy.target)
        if outcome is not None and outcome.error:
            yield outcome.text
    ignored = sorted({other.target for other in others} - {reading.target})
    if ignored:
        yield f"read from {reading.target}; also reported by {few_of(ignored)}, which is ignored"
    if reading.listed is False:
        yield f"{reading.target} is no longer in the list of exporters"
    if reading.state.stale:
        yield "its exporter does not serve its figures, because they are too old"
    skew = reading.skew_seconds
    if _clock_is_unset(reading):
        yield "its clock is wrong by more than a day, so its figures are treated as stale; set the node's clock"
    elif skew is not None and skew > _CLOCK_AHEAD:
        yield f"its clock is {skew:.0f} s ahead"
    elif skew is not None and skew < -_CLOCK_BEHIND:
        yield f"its clock is {-skew:.0f} s behind, or its figures are that old"


def _resolve_gpus(
    chosen: dict[str, _Candidate], before: Mapping[str, NodeEntry], settings: ViewSettings, now: float
) -> None:
    """Assigns a GPU that several nodes report to one of them. The preferences are those between exporters."""
    _merge_addresses(chosen)
    nodes_of: dict[str, list[_Candidate]] = {}
    for node in chosen.values():
        for uuid in {gpu.uuid for gpu in node.state.devices if gpu.uuid}:
            nodes_of.setdefault(uuid, []).append(node)
    removed: dict[str, set[str]] = {}
    same: set[str] = set()  # names of nodes that are another node under a second address
    for uuid, claimants in nodes_of.items():
        if len(claimants) > 1:
            lost = {node.name for node in claimants if any(g.uuid == uuid and is_lost(g) for g in node.state.devices)}
            claimants.sort(key=lambda node: _claim(node, uuid, lost, before))
            for loser in claimants[1:]:
                removed.setdefault(loser.name, set()).add(uuid)
                _note_claim(uuid, claimants[0], loser, loser.name in lost, same)
    for name, uuids in removed.items():
        node = chosen[name]
        left = tuple(gpu for gpu in node.state.devices if gpu.uuid not in uuids)
        overdue = now - node.reading.read_at > settings.drop_after
        if not left and (name in same or overdue):
            del chosen[name]
            continue
        lost_count = sum(gpu.uuid in uuids and is_lost(gpu) for gpu in node.state.devices)
        node.state = replace(node.state, devices=left, gpus_lost=max(0, (node.state.gpus_lost or 0) - lost_count))


def _merge_addresses(chosen: dict[str, _Candidate]) -> None:
    """Merges nodes that are one exporter read under several addresses. Keeps the best entry."""
    by_id: dict[str, _Candidate] = {}
    for node in sorted(chosen.values(), key=lambda node: (node.stale, not node.reading.named, node.name)):
        if not node.state.exporter_id:
            continue
        kept = by_id.setdefault(node.state.exporter_id, node)
        if kept is not node:
            kept.note(f"also read as {node.name}, which is the same exporter under another address")
            kept.others = (*kept.others, node.reading)
            del chosen[node.name]


def _claim(
    node: _Candidate, uuid: str, lost: Collection[str], before: Mapping[str, NodeEntry]
) -> tuple[bool, bool, bool, bool, bool, float, str]:
    earlier = before.get(node.name)
    had_it = earlier is not None and any(gpu.uuid == uuid and not is_lost(gpu) for gpu in earlier.state.devices)
    return (
        node.stale,
        not node.reading.named,
        node.name in lost,
        not _names_holders(node.state),
        not had_it,
        -node.reading.read_at if node.stale else 0.0,
        node.name,
    )


def _note_claim(uuid: str, winner: _Candidate, loser: _Candidate, lost: bool, same: set[str]) -> None:
    if not (winner.reading.named and loser.reading.named):
        same.add(loser.name)
        winner.note(f"also read as {loser.name}, which has the same GPUs under another address")
    elif loser.stale or lost:
        winner.note(f"{uuid} was on {loser.name} before")
        loser.note(f"{uuid} is on {winner.name} now")
    else:
        winner.note(f"{uuid} is also reported by {loser.name}, which is ignored")
        loser.note(f"{uuid} is shown on {winner.name}, which reports it too")


def _describe_unread(outcomes: Mapping[str, TargetOutcome], nodes: Iterable[_Candidate]) -> Iterator[str]:
    """Describes failing targets that belong to no node. The notes of each node describe its own targets."""
    shown = {reading.target for node in nodes for reading in (node.reading, *node.others)}
    for target in sorted(outcomes.keys() - shown):
        if outcomes[target].error:
            yield outcomes[target].text


# GPUs that disappeared


def _keep_lost(state: NodeState, earlier: NodeState, present: Collection[str], wall: float) -> NodeState:
    """Adds the GPUs of the previous round as lost, because dcgm-exporter silently omits lost GPUs."""
    missing = [gpu for gpu in earlier.devices if gpu.uuid and gpu.uuid not in present]
    if not missing:
        return state
    here = {gpu.uuid for gpu in state.devices}
    lost = tuple(_lost(gpu, wall) for gpu in missing if gpu.uuid not in here)
    return replace(state, devices=(*state.devices, *lost))


def _lost(gpu: DeviceState, wall: float) -> DeviceState:
    since = next((c.since for c in gpu.conditions if c.name == LOST), None)
    holders: list[Workload] = [Workload(*_identity(h)) for slot in (gpu, *gpu.instances) for h in slot.holders]
    return DeviceState(
        uuid=gpu.uuid,
        index=gpu.index,
        model=gpu.model,
        memory_total_bytes=gpu.memory_total_bytes,
        conditions=(Condition(LOST, round(wall, 3) if since is None else since),),
        last_holders=gpu.last_holders or tuple(holders),
        instances=tuple(MigInstance(id=i.id, profile=i.profile) for i in gpu.instances),
    )


def _identity(holder: Workload) -> tuple[str, ...]:
    return holder.namespace, holder.pod, holder.container, holder.uid, holder.container_id, holder.job


def _hide_removed(state: NodeState, removed: Collection[str], gone: bool) -> NodeState:
    left = tuple(gpu for gpu in state.devices if gpu.uuid not in removed or not (gone or is_lost(gpu)))
    if len(left) == len(state.devices):
        return state
    removed = {gpu.uuid for gpu in state.devices} - {gpu.uuid for gpu in left}
    names = {f"gpu{gpu.index}" for gpu in state.devices if gpu.uuid in removed}
    return replace(
        state,
        devices=left,
        gpus_lost=max(0, (state.gpus_lost or 0) - len(removed)),
        sources=tuple(s for s in state.sources if s.device not in removed and s.name not in names),
    )


# Holders and their idle times


@dataclass(slots=True)
class _Round:
    """Data that all nodes of a round share."""

    settings: ViewSettings
    offset: float  # Unix time minus monotonic time
    owners: Mapping[Pod, WorkloadOwner]
    prices: Prices
    idle_for: Mapping[tuple[str, str], float]
    watched: bool = True  # idle times are tracked from round to round

    def complete(self, node: _Candidate, state: NodeState, earlier: NodeEntry | None, now: float) -> NodeEntry:
        age = max(0.0, now - node.reading.read_at)
        state = _sort_devices(state)
        if node.gone:
            since = Condition(NODE_GONE, round(now + self.offset - age, 3))
            gpus = tuple(replace(gpu, conditions=(*gpu.conditions, since)) for gpu in state.devices)
            state = replace(state, devices=gpus)
        return NodeEntry(
            name=node.name,
            target=node.reading.target,
            state=state,
            read_at=node.reading.read_at,
            age_seconds=age,
            stale=node.stale or node.gone,
            gone=node.gone,
            notes=bound_notes(node.notes),
            held=tuple(self._hold(node, state, earlier)),
        )

    def _hold(self, node: _Candidate, state: NodeState, earlier: NodeEntry | None) -> Iterator[HeldPart]:
        idle = _IdleTimes(self, node.reading, state, earlier)
        for gpu in state.devices:
            if not (gpu.holders or gpu.instances):
                continue
            blind = node.stale or node.gone or (bool(gpu.conditions) and is_blind(gpu))
            for instance, slot_part in divide_gpu(gpu):
                slot: Slot = instance or gpu
                holders = holders_of(gpu, slot)
                if not holders:
                    continue
                hour = self.prices.of(slot_model(gpu, instance)).gpu_hour if self.prices.currency else None
                for holder, share in zip(holders, divide_slot(holders), strict=True):
                    since, active_at = idle.of(gpu, instance, holder)
                    part = share * slot_part
                    yield HeldPart(
                        gpu,
                        instance,
                        holder,
                        part,
                        share,
                        "unknown" if blind else classify_use(slot, holder, since, self.watched),
                        None if blind else since,
                        active_at,
                        self.owners.get((holder.namespace, holder.pod)) if self.owners else None,
                        None if hour is None else hour * (part if instance is None else share),
                    )


class _IdleTimes:
    """Determines since when each holder of a node has been idle.

    podgpu's exporter reports this time. For other exporters, a holder is idle if its utilisation (or its device's) is 0
    and its busy time has not increased since the last reading.
    """

    def __init__(self, round_: _Round, reading: NodeReading, state: NodeState, earlier: NodeEntry | None) -> None:
        self._watched = round_.watched
        self._read_at = reading.read_at
        self._offset = round_.offset
        self._reported = bool(state.exporter_id)
        skew = reading.skew_seconds or 0.0
        self._skew = skew if abs(skew) > _CLOCK_AHEAD else 0.0
        self._idle_for = round_.idle_for
        self._is_new = earlier is None
        self._same = earlier is not None and reading.read_at <= earlier.read_at + _SAME_READING
        restarted = earlier is not None and earlier.state.exporter_id != state.exporter_id
        self._before: dict[tuple[str, int | None, tuple[str, ...]], HeldPart] = {}
        if earlier is not None and (restarted or not self._reported or _lacks_usage(earlier)):
            self._before = {_key(part.gpu, part.instance, part.holder): part for part in earlier.held}

    def of(self, gpu: DeviceState, instance: MigInstance | None, holder: Holder) -> tuple[float | None, float | None]:
        """Returns `idle_since` and `active_at` of the holder's part."""
        usage = holder.usage
        if holder.source == RESERVATION:
            return None, None
        if not self._watched:
            return None if usage is None else usage.idle_since, None
        before = self._before.get(_key(gpu, instance, holder)) if self._before else None
        if self._reported and usage is not None:
            return self._reported_since(usage.idle_since, before), None
        is_idle = runs_nothing(instance or gpu, holder)
        if before is None or before.active_at is None:
            active_at = self._read_at - (self._known_idle(gpu, instance, holder) if self._is_new else 0.0)
        elif self._same:
            active_at, is_idle = before.active_at, before.idle_since is not None
        elif is_idle and not _has_worked(usage, before.holder.usage):
            active_at = before.active_at
        else:
            active_at, is_idle = self._read_at, False
        return active_at + self._offset if is_idle else None, active_at

    def _reported_since(self, since: float | None, before: HeldPart | None) -> float | None:
        if since is None:
            return None
        since -= self._skew
        if before is not None and before.idle_since is not None:
            return min(since, before.idle_since)  # the exporter was restarted while the holder was idle
        return since

    def _known_idle(self, gpu: DeviceState, instance: MigInstance | None, holder: Holder) -> float:
        """Returns the idle seconds before the first reading, so that a restart of podgpu does not reset them to 0."""
        usage = holder.usage
        counted = None if usage is None or usage.idle_ns is None else usage.idle_ns / _NS
        if counted is not None and usage is not None and usage.busy_ns == 0:
            return counted
        observed = self._idle_for.get((gpu.uuid, "" if instance is None else str(instance.id)), 0.0)
        return observed if counted is None else min(observed, counted)


def _has_worked(usage: HolderUsage | None, before: HolderUsage | None) -> bool:
    busy = None if usage is None else usage.busy_ns
    busy_before = None if before is None else before.busy_ns
    return busy is not None and busy_before is not None and busy > busy_before


def _lacks_usage(node: NodeEntry) -> bool:
    return any(part.holder.usage is None for part in node.held)


def _key(gpu: DeviceState, instance: MigInstance | None, holder: Holder) -> tuple[str, int | None, tuple[str, ...]]:
    return gpu_id(gpu), None if instance is None else instance.id, holder.key


def _sort_devices(state: NodeState) -> NodeState:
    """Sorts GPUs by index and removes duplicates. Most states are sorted already."""
    order = [(-1 if gpu.index is None else gpu.index, gpu.uuid) for gpu in state.devices]
    if all(a < b for a, b in pairwise(order)):
        return state
    gpus = dict(sorted(zip(order, state.devices, strict=True), key=itemgetter(0)))
    return replace(state, devices=tuple(gpus.values()))
