"""Chooses one exporter per node and one node per GPU, keeps GPUs that disappeared, and describes
problems.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
from msgspec.structs import replace

from podgpu.errors import few_of, plural
from podgpu.fleet.parts import is_lost, is_shown
from podgpu.fleet.readings import NodeEntry, NodeReading, TargetOutcome, ViewSettings
from podgpu.metrics.conditions import (
    DRIVER_AWAY,
    LOST,
    NODE_GONE,
    UNREADABLE,
    conditions,
    words_for,
)
from podgpu.model import (
    Condition,
    DeviceState,
    MigInstance,
    NodeState,
    Workload,
    XidCount,
    group_by_key,
    parts_of,
)

CLOCK_AHEAD, _CLOCK_BEHIND = (
    5.0,
    60.0,
)  # tolerated clock skew, seconds; 60, because late values look like a slow clock
MAX_ALERTS = 200
_NOT_ANSWERING = {LOST, UNREADABLE, DRIVER_AWAY}
_DRIVER_SOURCES = {"nvml", "dcgm", "exporter", "simulated", "usage", "switches"}


class Alert(msgspec.Struct, frozen=True, omit_defaults=True):
    """A problem of a node or a GPU, described in plain text."""

    severity: str  # broken or warning
    text: str
    node: str = ""
    uuid: str = ""


class RecordedCondition(Condition, frozen=True):
    """A condition of a past time. The history has its text."""

    says: str = ""


def choose_nodes(
    readings: Sequence[NodeReading],
    before: Mapping[str, NodeEntry],
    outcomes: Mapping[str, TargetOutcome],
    settings: ViewSettings,
    now: float,
) -> tuple[list[NodeEntry], list[Alert]]:
    """Returns one entry per node (with `held` still empty), and alerts about nodes or GPUs with two
    exporters.

    `before`: the nodes of the last round. If a node is no longer reported, its last reading is kept
    for a while.
    """
    chooser = _Chooser(readings, before, settings, now)
    copies = chooser.group_by_node()
    chosen = {name: min(copies[name], key=chooser.rank_exporter) for name in sorted(copies)}
    hidden, same_gpus = chooser.share_out_gpus(chosen)
    nodes = []
    for name, reading in chosen.items():
        state = _remove_gpus(reading.state, hidden[name])
        if reading.state.devices and not state.devices:
            continue  # other nodes show all its GPUs
        age = now - reading.read_at
        nodes.append(
            NodeEntry(
                reading,
                state,
                age_seconds=max(0.0, age),
                stale=chooser.is_stale(reading),
                gone=age > settings.stale_after,
                notes=tuple(_describe_reading(reading, copies[name], outcomes)),
                silent=chooser.find_silent(state),
            )
        )
    alerts = []
    for name, reading in chosen.items():
        if others := {copy.target for copy in copies[name] if chooser.is_rival(copy, reading)}:
            alerts.append(_describe_conflict(reading, others, "this node"))
    for name, other in same_gpus:
        alerts.append(
            _describe_conflict(
                chosen[name], {f"{chosen[other].target} (node {other})"}, "the same GPUs"
            )
        )
    alerts += [_describe_silent(node.reading, node.silent) for node in nodes if node.silent]
    return nodes, alerts


@dataclass(frozen=True)
class _Chooser:
    """Chooses between several readings of one node, and between several nodes that report one
    GPU.
    """

    readings: Sequence[NodeReading]
    before: Mapping[str, NodeEntry]  # nodes of the last round
    settings: ViewSettings
    now: float

    def group_by_node(self) -> dict[str, list[NodeReading]]:
        """Groups the readings by node. For nodes that are no longer reported, uses the last
        readings.
        """
        reported = {reading.name for reading in self.readings}
        missing = (
            replace(node.reading, listed=False)
            for node in self.before.values()
            if node.name not in reported
        )
        every = (*self.readings, *missing)
        return group_by_key((reading.name, reading) for reading in every if self._is_kept(reading))

    def _is_kept(self, reading: NodeReading) -> bool:
        is_recent = self.now - reading.read_at <= self.settings.drop_after
        return is_recent or bool(reading.listed and reading.state.devices)

    def is_stale(self, reading: NodeReading) -> bool:
        return reading.state.stale or self.now - reading.read_at > self.settings.stale_after

    def is_rival(self, reading: NodeReading, other: NodeReading) -> bool:
        """Returns True if `reading` is current and comes from another exporter than `other`."""
        exporter_id = reading.state.exporter_id
        is_other = reading.target != other.target and (
            not exporter_id or exporter_id != other.state.exporter_id
        )
        return is_other and reading.listed is not False and not self.is_stale(reading)

    def find_silent(self, state: NodeState) -> NodeReading | None:
        """If `state` has no holders, returns the last reading of a podgpu that reported them and no
        longer answers.
        """
        if state.producer == "podgpu" or _has_holders(state):
            return None
        return next(
            (self._silent[gpu.uuid] for gpu in state.devices if gpu.uuid in self._silent), None
        )

    @cached_property
    def _silent(self) -> dict[str, NodeReading]:
        """The last reading of each podgpu that reported holders and no longer answers, by UUID of
        its GPUs.
        """
        targets = {reading.target for reading in self.readings}
        earlier = [
            reading
            for node in self.before.values()
            for reading in (node.reading, node.silent)
            if reading
        ]
        gone = (
            replace(reading, listed=False) for reading in earlier if reading.target not in targets
        )
        unread = (*filter(self.is_stale, self.readings), *gone)
        silent = (
            old for old in unread if old.state.producer == "podgpu" and _has_holders(old.state)
        )
        return {
            uuid: old for old in silent if self._is_kept(old) for uuid in _present_gpus(old.state)
        }

    def rank_exporter(self, reading: NodeReading) -> tuple[object, ...]:
        """Sort key for the readings of one node. The smallest is preferred."""
        shown = self.before.get(reading.name)
        was_chosen = shown is not None and shown.reading.target == reading.target
        is_kept = was_chosen and bool(reading.state.devices) and _names_holders(reading, shown)
        return (
            self.is_stale(reading),  # current values first
            reading.listed is False,  # then exporters that are still listed
            not is_kept,
            *self._rank_content(reading, was_chosen),
        )

    def rank_node(
        self, reading: NodeReading, uuid: str, conflicts: Collection[str]
    ) -> tuple[object, ...]:
        """Sort key for the readings that contain one GPU. The smallest is preferred.

        Any exporter can report any UUID. So the node that had the GPU keeps it as long as it
        answers, except if it never named holders: then podgpu may replace it. Without a last round,
        the exporter that contradicts fewest others (`conflicts`) is preferred.
        """
        shown = self.before.get(reading.name)
        was_chosen = shown is not None and uuid in _present_gpus(shown.state)
        return (
            self.is_stale(reading),  # current values first
            uuid not in _present_gpus(reading.state),  # then a node on which the GPU is present
            reading.listed is False,  # then exporters that are still listed
            not (was_chosen and _names_holders(reading, shown)),
            len(conflicts),
            *self._rank_content(reading, was_chosen),
        )

    @staticmethod
    def _rank_content(reading: NodeReading, was_chosen: bool) -> tuple[object, ...]:
        state = reading.state
        return (
            # a reading with holders first, then one with GPUs
            (not _has_holders(state)) + (not state.devices),
            not reading.named,  # then a node name that the exporter reports
            # then the choice of the last round, so that the view does not alternate
            not was_chosen,
            state.producer != "podgpu",  # then podgpu, because it reports more
            (reading.name, reading.target),  # the same choice in every process
        )

    def share_out_gpus(
        self, chosen: Mapping[str, NodeReading]
    ) -> tuple[dict[str, set[str]], list[tuple[str, str]]]:
        """Chooses one node for each GPU that several nodes report.

        Returns the UUIDs to hide on each node, and pairs of nodes (chosen, other) that both report
        a GPU as present.
        """
        reported: dict[str, list[str]] = defaultdict(list)
        for name, reading in chosen.items():
            for gpu in reading.state.devices:
                reported[gpu.uuid].append(name)
        claims = {uuid: names for uuid, names in reported.items() if uuid and len(names) > 1}
        conflicts = self._find_conflicts(chosen, claims.values())

        hidden: dict[str, set[str]] = defaultdict(set)
        rivals: dict[tuple[str, str], None] = {}
        for uuid, names in claims.items():
            ranks = {n: self.rank_node(chosen[n], uuid, conflicts[chosen[n].target]) for n in names}
            best, *others = sorted(ranks, key=ranks.__getitem__)
            for other in others:
                hidden[other].add(uuid)
                is_present = uuid in _present_gpus(chosen[other].state)
                if is_present and self.is_rival(chosen[other], chosen[best]):
                    rivals[best, other] = None
        return hidden, list(rivals)

    def _find_conflicts(
        self, chosen: Mapping[str, NodeReading], claims: Iterable[Sequence[str]]
    ) -> dict[str, set[str]]:
        """Returns the exporters that report the same GPUs as each exporter.

        `claims`: for each GPU, the nodes that report it. An exporter may report several nodes.
        """
        conflicts: dict[str, set[str]] = defaultdict(set)
        for names in claims:
            targets = {chosen[name].target for name in names}
            for target in targets:
                conflicts[target] |= targets
        return conflicts


def _describe_reading(
    reading: NodeReading, copies: Iterable[NodeReading], outcomes: Mapping[str, TargetOutcome]
) -> Iterator[str]:
    for target in dict.fromkeys(copy.target for copy in copies):
        if target in outcomes and outcomes[target].error:
            yield outcomes[target].text
    skew = reading.skew_seconds or 0.0
    if reading.listed is False:
        yield (
            f"{reading.target} no longer reports this node: check that the exporter runs and that "
            "podgpu reads it"
        )
    if reading.state.dropped:
        yield f"impossible values are ignored: {few_of(sorted(reading.state.dropped))}"
    if reading.state.stale:
        yield "the exporter serves no GPU values, because its last readings are too old"
    if skew > CLOCK_AHEAD:
        yield f"its clock is {skew:.0f} s ahead"
    elif skew < -_CLOCK_BEHIND:
        yield f"its clock is {-skew:.0f} s behind, or its values are late"


def _describe_conflict(used: NodeReading, others: Collection[str], what: str) -> Alert:
    text = (
        f"node {used.name}: {used.target} and {few_of(sorted(others))} report {what}: only the "
        f"figures of {used.target}"
        " are shown; stop the other exporter, or remove it from the sources of the cluster view"
    )
    return Alert("warning", text, used.name)


def _describe_silent(used: NodeReading, silent: NodeReading) -> Alert:
    text = (
        f"node {used.name}: {silent.target} does not answer, and {used.target} does not report "
        "holders:"
        " check that podgpu runs on this node"
    )
    return Alert("warning", text, used.name)


def _names_holders(reading: NodeReading, shown: NodeEntry | None) -> bool:
    """Returns whether the exporter can name holders: it is podgpu, or it named some before."""
    is_podgpu = reading.state.producer == "podgpu"
    return is_podgpu or (shown is not None and _has_holders(shown.state))


def _has_holders(state: NodeState) -> bool:
    return any(device.holders for gpu in state.devices for device in (gpu, *gpu.instances))


def _present_gpus(state: NodeState) -> set[str]:
    return {gpu.uuid for gpu in state.devices if not is_lost(gpu)}


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


def add_lost_gpus(
    state: NodeState, earlier: NodeState, reported: Collection[str], wall: float
) -> NodeState:
    """Adds the GPUs of `earlier` that no node reports now, with the condition `lost`. dcgm-exporter
    omits lost GPUs.
    """
    lost = [
        _make_lost(gpu, wall) for gpu in earlier.devices if gpu.uuid and gpu.uuid not in reported
    ]
    if not lost:
        return state
    devices = sorted(
        (*state.devices, *lost), key=lambda gpu: (-1 if gpu.index is None else gpu.index, gpu.uuid)
    )
    return replace(state, devices=tuple(devices))


def _make_lost(gpu: DeviceState, wall: float) -> DeviceState:
    since = next((c.since for c in gpu.conditions if c.name == LOST), round(wall, 3))
    holders = [
        Workload(*parts_of(holder)) for device in (gpu, *gpu.instances) for holder in device.holders
    ]
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
    """Hides GPUs of `uuids` (removed with `podgpu forget`) while they are lost or the node is gone.

    Returns None if the node is gone and has no other GPU.
    """
    missing = {
        gpu.uuid for gpu in node.state.devices if gpu.uuid in uuids and (node.gone or is_lost(gpu))
    }
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
    return (
        *ordered[:MAX_ALERTS],
        Alert(ordered[MAX_ALERTS].severity, f"and {len(ordered) - MAX_ALERTS} more"),
    )


def describe_node(name: str, state: NodeState, gone: bool = False) -> Iterator[Alert]:
    """Yields one alert per condition of a GPU. A node without an answer or a driver gets one alert
    for all its GPUs.
    """
    broken = [gpu for gpu in state.devices if gpu.conditions and is_shown(gpu)]
    silent = sum(any(c.name in _NOT_ANSWERING for c in gpu.conditions) for gpu in broken)
    lost = state.gpus_lost or 0
    if gone:
        gpus = sum(map(is_shown, state.devices))
        with_it = f", with its {plural(gpus, 'GPU')}" if gpus else ""
        yield Alert(
            "broken", f"node {name} does not answer{with_it}: {words_for(NODE_GONE)[1]}", name
        )
    elif lost > silent:
        verb = "does" if lost - silent == 1 else "do"
        yield Alert(
            "broken",
            f"node {name}: {plural(lost - silent, 'GPU')} on its PCI bus {verb} not answer and "
            "cannot be identified: "
            "run nvidia-smi on the node and see dmesg",
            name,
        )
    without_driver = [c for gpu in broken for c in gpu.conditions if c.name == DRIVER_AWAY]
    if len(without_driver) > 1:
        says, do = words_for(DRIVER_AWAY, without_driver[0].detail)
        says = says.replace("for it", f"for its {plural(len(without_driver), 'GPU')}")
        yield Alert("broken", f"node {name}: {says}: {do}", name)
    for gpu in broken:
        label = "a GPU" if gpu.index is None else f"GPU {gpu.index}"
        for condition in gpu.conditions:
            if condition.name != NODE_GONE and not (
                condition.name == DRIVER_AWAY and len(without_driver) > 1
            ):
                says, do = describe_condition(condition, gpu.xids)
                text = f"{label} of node {name} ({gpu.uuid or 'no UUID'}): {says}: {do}"
                yield Alert(severity_of(condition), text, name, gpu.uuid)
    failing = [
        source.name
        for source in state.sources
        if source.up is False
        and not source.name.removeprefix(
            "gpu"
        ).isdecimal()  # failures of gpu0, gpu1… are conditions of these GPUs
        and not (without_driver and source.name in _DRIVER_SOURCES)
    ]
    if failing and not gone:
        text = (
            f"node {name}: podgpu cannot read {', '.join(failing)}: see the log of podgpu on this "
            "node"
        )
        yield Alert("warning", text, name)


def describe_condition(condition: Condition, xids: Iterable[XidCount] = ()) -> tuple[str, str]:
    """Returns the problem and the advice. For a condition unknown to this version, returns its name
    and no advice.
    """
    if isinstance(condition, RecordedCondition):
        return condition.says, ""
    repeated = tuple((count.xid, count.total) for count in xids if count.total > 1)
    is_known = condition.name in conditions()
    return (
        words_for(condition.name, condition.detail, repeated) if is_known else (condition.name, "")
    )
