"""Chooses the exporter for each node and the node for each GPU, keeps GPUs that disappeared, and describes problems."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace as replace_fields

import msgspec
from msgspec.structs import replace

from podgpu.cluster.collect import NodeReading, TargetOutcome, ViewSettings
from podgpu.cluster.parts import HeldPart, SlotKey, group_held, is_lost, is_shown
from podgpu.errors import few_of
from podgpu.metrics.conditions import DRIVER_AWAY, LOST, NODE_GONE, UNREADABLE, conditions, words_for
from podgpu.model import Condition, DeviceState, MigInstance, NodeState, SourceStatus, Workload, parts_of

CLOCK_AHEAD, _CLOCK_BEHIND = 5.0, 60.0  # tolerated clock skew; old values look like a clock that is behind
_CLOCK_UNSET = 86_400.0  # a larger skew means that the clock is not set; a wrong time zone causes less than a day
MAX_ALERTS = 200
_NOT_ANSWERING = {LOST, UNREADABLE, DRIVER_AWAY}
_DRIVER_SOURCES = {"nvml", "dcgm", "exporter", "simulated", "usage", "switches"}


class NodeEntry(msgspec.Struct, frozen=True, gc=False):
    """One node: its last reading, and its state with data added by the cluster."""

    name: str
    reading: NodeReading
    state: NodeState
    age_seconds: float | None = None
    stale: bool = False  # the values are too old
    gone: bool = False  # its exporter has not answered for longer than --stale-after
    notes: tuple[str, ...] = ()
    held: tuple[HeldPart, ...] = ()

    @property
    def target(self) -> str:
        return self.reading.target

    @property
    def read_at(self) -> float:
        return self.reading.read_at

    @property
    def gpus(self) -> Iterator[DeviceState]:
        """Yields the GPUs that are shown."""
        return (gpu for gpu in self.state.devices if is_shown(gpu))

    def held_by_slot(self) -> dict[SlotKey, list[HeldPart]]:
        return group_held(self.held, lambda part: part.slot_key)


class Alert(msgspec.Struct, frozen=True, omit_defaults=True):
    """A problem in plain text, and the node and GPU that have it."""

    severity: str  # broken or warning
    text: str
    node: str = ""
    uuid: str = ""


def choose_nodes(
    readings: Sequence[NodeReading],
    before: Mapping[str, NodeEntry],
    outcomes: Mapping[str, TargetOutcome],
    settings: ViewSettings,
    now: float,
) -> tuple[list[NodeEntry], list[Alert]]:
    """Returns one entry per node (`held` is not set), and alerts about exporters that report the same GPUs.

    If several exporters report a node or a GPU, prefers a current one that names holders, then the one of the last
    round. A node that no exporter reports any more keeps its last reading for a while.
    """
    by_name: dict[str, list[NodeReading]] = defaultdict(list)
    reported = {reading.state.node for reading in readings}
    missing = [replace_fields(node.reading, listed=False) for node in before.values() if node.name not in reported]
    for reading in (*readings, *missing):
        if now - reading.read_at <= settings.drop_after or (reading.listed and reading.state.devices):
            by_name[reading.state.node].append(reading)
    chosen: dict[str, NodeReading] = {}
    notes: dict[str, list[str]] = {}
    alerts = []
    for name, copies in sorted(by_name.items()):
        used = before[name].target if name in before else ""
        copies.sort(key=lambda copy: (*_rank(copy, settings, now), copy.target != used, not _is_own(copy), copy.target))
        best = chosen[name] = copies[0]
        notes[name] = [*_describe_failures(copies, outcomes), *_describe_reading(best)]
        others = {copy.target for copy in copies if _is_another(copy, best) and _is_current(copy, settings, now)}
        if others:
            alerts.append(_describe_conflict(name, best.target, others, "this node"))
    hidden: dict[str, set[str]] = defaultdict(set)  # node name -> UUIDs that are shown on another node
    for (name, other), uuids in _find_claims(chosen, before, settings, now).items():
        hidden[other] |= uuids
        if not _is_another(chosen[other], chosen[name]):
            continue  # one exporter under two addresses
        if _is_current(chosen[other], settings, now) and not uuids <= _lost_gpus(chosen[other].state):
            others = {f"{chosen[other].target} (node {other})"}
            alerts.append(_describe_conflict(name, chosen[name].target, others, "the same GPUs"))
        else:
            notes[name].append(f"{few_of(sorted(uuids))} was on {other} before")
            notes[other].append(f"{few_of(sorted(uuids))} is on {name} now")
    nodes = []
    for name, reading in chosen.items():
        state = _remove_gpus(reading.state, hidden[name])
        if state.devices or not reading.state.devices:
            nodes.append(
                NodeEntry(
                    name=name,
                    reading=reading,
                    state=state,
                    age_seconds=max(0.0, now - reading.read_at),
                    stale=_is_stale(reading, settings, now),
                    gone=now - reading.read_at > settings.stale_after,
                    notes=tuple(notes[name]),
                )
            )
    return nodes, alerts


def _rank(reading: NodeReading, settings: ViewSettings, now: float) -> tuple[bool, bool, bool, bool, bool, float]:
    """Returns a sort key. The reading with the smallest key is preferred."""
    stale = _is_stale(reading, settings, now)
    names_holders = any(slot.holders for gpu in reading.state.devices for slot in (gpu, *gpu.instances))
    return (
        stale,
        reading.listed is False,
        not reading.state.devices,
        not names_holders,
        not reading.named,
        -reading.read_at if stale else 0.0,
    )


def _is_own(reading: NodeReading) -> bool:
    return reading.state.producer == "podgpu"


def _is_stale(reading: NodeReading, settings: ViewSettings, now: float) -> bool:
    return reading.state.stale or _clock_is_unset(reading) or now - reading.read_at > settings.stale_after


def _is_another(reading: NodeReading, other: NodeReading) -> bool:
    exporter_id = reading.state.exporter_id
    return reading.target != other.target and (not exporter_id or exporter_id != other.state.exporter_id)


def _is_current(reading: NodeReading, settings: ViewSettings, now: float) -> bool:
    return reading.listed is not False and not _is_stale(reading, settings, now)


def _clock_is_unset(reading: NodeReading) -> bool:
    return abs(reading.skew_seconds or 0.0) > _CLOCK_UNSET


def _describe_failures(copies: Iterable[NodeReading], outcomes: Mapping[str, TargetOutcome]) -> list[str]:
    targets = dict.fromkeys(copy.target for copy in copies)
    return [outcomes[target].text for target in targets if target in outcomes and outcomes[target].error]


def _describe_reading(reading: NodeReading) -> Iterator[str]:
    skew = reading.skew_seconds or 0.0
    if reading.listed is False:
        yield f"{reading.target} no longer reports this node: check that its exporter runs and is read"
    if reading.state.stale:
        yield "its exporter does not serve its figures, because they are too old"
    if _clock_is_unset(reading):
        yield "its clock is wrong by more than a day, so its figures are treated as stale; set the node's clock"
    elif skew > CLOCK_AHEAD:
        yield f"its clock is {skew:.0f} s ahead"
    elif skew < -_CLOCK_BEHIND:
        yield f"its clock is {-skew:.0f} s behind, or its figures are that old"


def _describe_conflict(node: str, used: str, others: Collection[str], what: str) -> Alert:
    text = (
        f"node {node}: {used} and {few_of(sorted(others))} report {what}: only the figures of {used} are shown;"
        " stop the other exporter, or leave it out of the sources of the cluster view"
    )
    return Alert("warning", text, node)


# A GPU that several nodes report


def _find_claims(
    chosen: Mapping[str, NodeReading], before: Mapping[str, NodeEntry], settings: ViewSettings, now: float
) -> dict[tuple[str, str], set[str]]:
    """Returns the UUIDs that two nodes report. Keys: name of the node that shows the GPUs, name of the other node."""
    nodes_of: dict[str, list[str]] = defaultdict(list)
    for name, reading in chosen.items():
        for uuid in {gpu.uuid for gpu in reading.state.devices if gpu.uuid}:
            nodes_of[uuid].append(name)
    claims: dict[tuple[str, str], set[str]] = defaultdict(set)
    for uuid, names in nodes_of.items():
        if len(names) == 1:
            continue

        def preference(name: str, uuid: str = uuid) -> tuple[object, ...]:
            stale, *others = _rank(chosen[name], settings, now)
            shown = before[name].state.devices if name in before else ()
            had_it = any(gpu.uuid == uuid and not is_lost(gpu) for gpu in shown)
            return stale, uuid in _lost_gpus(chosen[name].state), *others, not had_it, not _is_own(chosen[name]), name

        names.sort(key=preference)
        for other in names[1:]:
            claims[names[0], other].add(uuid)
    return claims


def _lost_gpus(state: NodeState) -> set[str]:
    return {gpu.uuid for gpu in state.devices if is_lost(gpu)}


def _remove_gpus(state: NodeState, uuids: Collection[str]) -> NodeState:
    if not uuids:
        return state
    removed = [gpu for gpu in state.devices if gpu.uuid in uuids]
    workers = {f"gpu{gpu.index}" for gpu in removed}
    return replace(
        state,
        devices=tuple(gpu for gpu in state.devices if gpu.uuid not in uuids),
        gpus_lost=max(0, (state.gpus_lost or 0) - sum(map(is_lost, removed))),
        sources=tuple(s for s in state.sources if s.device not in uuids and s.name not in workers),
    )


# GPUs that disappeared


def add_lost_gpus(state: NodeState, earlier: NodeState, reported: Collection[str], wall: float) -> NodeState:
    """Adds GPUs that no node reports any more as lost, because dcgm-exporter silently omits lost GPUs."""
    lost = [_make_lost(gpu, wall) for gpu in earlier.devices if gpu.uuid and gpu.uuid not in reported]
    if not lost:
        return state
    devices = sorted((*state.devices, *lost), key=lambda gpu: (-1 if gpu.index is None else gpu.index, gpu.uuid))
    return replace(state, devices=tuple(devices))


def _make_lost(gpu: DeviceState, wall: float) -> DeviceState:
    since = next((c.since for c in gpu.conditions if c.name == LOST), round(wall, 3))
    holders = [Workload(*parts_of(holder)) for slot in (gpu, *gpu.instances) for holder in slot.holders]
    return DeviceState(
        uuid=gpu.uuid,
        index=gpu.index,
        model=gpu.model,
        memory_total_bytes=gpu.memory_total_bytes,
        conditions=(Condition(LOST, since),),
        last_holders=gpu.last_holders or tuple(holders),
        instances=tuple(MigInstance(id=i.id, profile=i.profile) for i in gpu.instances),
    )


def hide_missing_gpus(node: NodeEntry, uuids: Collection[str]) -> NodeEntry | None:
    """Hides the GPUs in `uuids` (removed with `podgpu forget`) for as long as they are lost.

    Returns None if the node is gone and has no other GPU.
    """
    missing = {gpu.uuid for gpu in node.state.devices if gpu.uuid in uuids and (node.gone or is_lost(gpu))}
    state = _remove_gpus(node.state, missing)
    return None if node.gone and missing and not state.devices else replace(node, state=state)


# Alerts, shared by the web pages, `/health` and `top`


def severity_of(condition: Condition) -> str:
    spec = conditions().get(condition.name)
    return "broken" if spec is None else spec.severity


def sort_alerts(alerts: Iterable[Alert]) -> tuple[Alert, ...]:
    """Sorts "broken" before "warning" and keeps at most MAX_ALERTS."""
    ordered = sorted(alerts, key=lambda alert: alert.severity != "broken")
    if len(ordered) <= MAX_ALERTS:
        return tuple(ordered)
    return (*ordered[:MAX_ALERTS], Alert(ordered[MAX_ALERTS].severity, f"and {len(ordered) - MAX_ALERTS} more"))


def describe_node(name: str, state: NodeState, gone: bool = False) -> Iterator[Alert]:
    """Yields one alert per condition of a GPU, or one alert for the node if all its GPUs share the problem."""
    broken = [gpu for gpu in state.devices if gpu.conditions and is_shown(gpu)]
    silent = sum(any(c.name in _NOT_ANSWERING for c in gpu.conditions) for gpu in broken)
    lost = state.gpus_lost or 0
    if gone:
        gpus = sum(map(is_shown, state.devices))
        with_it = f", with its {count_gpus(gpus)}" if gpus else ""
        yield Alert("broken", f"node {name} does not answer{with_it}: {words_for(NODE_GONE)[1]}", name)
    elif lost > silent:
        verb = "does" if lost - silent == 1 else "do"
        yield Alert(
            "broken",
            f"node {name}: {count_gpus(lost - silent)} on its PCI bus {verb} not answer and cannot be identified: "
            "run nvidia-smi on the node and see dmesg",
            name,
        )
    without_driver = [c for gpu in broken for c in gpu.conditions if c.name == DRIVER_AWAY]
    if len(without_driver) > 1:
        says, do = words_for(DRIVER_AWAY, without_driver[0].detail)
        says = says.replace("for it", f"for its {count_gpus(len(without_driver))}")
        yield Alert("broken", f"node {name}: {says}: {do}", name)
    for gpu in broken:
        for condition in gpu.conditions:
            if condition.name != NODE_GONE and not (condition.name == DRIVER_AWAY and len(without_driver) > 1):
                yield _describe_gpu(name, gpu, condition)
    if not gone:
        yield from _describe_sources(name, state.sources, broken, bool(without_driver))


def count_gpus(number: int) -> str:
    return f"{number} GPU" if number == 1 else f"{number} GPUs"


def _describe_gpu(node: str, gpu: DeviceState, condition: Condition) -> Alert:
    says, do = describe_condition(condition)
    label = "a GPU" if gpu.index is None else f"GPU {gpu.index}"
    return Alert(
        severity_of(condition), f"{label} of node {node} ({gpu.uuid or 'no UUID'}): {says}: {do}", node, gpu.uuid
    )


def describe_condition(condition: Condition) -> tuple[str, str]:
    """Returns the problem and the advice. For an unknown condition of a newer exporter, returns only its name."""
    return words_for(condition.name, condition.detail) if condition.name in conditions() else (condition.name, "")


def _describe_sources(
    node: str, sources: Iterable[SourceStatus], broken: Sequence[DeviceState], driver_away: bool
) -> Iterator[Alert]:
    """Yields an alert about failing sources, unless a condition of a GPU already reports the failure."""
    named = {f"gpu{gpu.index}" for gpu in broken}
    uuids = {gpu.uuid for gpu in broken}
    failing = [
        source.name
        for source in sources
        if source.up is False
        and source.name not in named
        and not (source.device and source.device in uuids)
        and not (driver_away and source.name in _DRIVER_SOURCES)
    ]
    if failing:
        yield Alert(
            "warning", f"node {node}: podgpu cannot read {', '.join(failing)}: see the log of podgpu on this node", node
        )
