"""Chooses one exporter per node and one node per GPU, keeps lost GPUs, and describes problems."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
from msgspec.structs import replace

from podgpu.errors import few_of, plural
from podgpu.fleet.node_entry import NodeEntry
from podgpu.fleet.parts import is_lost, is_shown
from podgpu.fleet.readings import NodeReading, TargetOutcome
from podgpu.fleet.settings import ViewSettings
from podgpu.metrics.conditions import (
    DRIVER_AWAY,
    LOST,
    NO_RECOVERY,
    NODE_GONE,
    RECOVERY,
    RECURRING,
    UNREADABLE,
    conditions,
    describe_failures,
    words_for,
)
from podgpu.model import (
    Condition,
    DeviceState,
    MigInstance,
    NodeState,
    SourceStatus,
    Workload,
    all_devices,
    group_by,
    parts_of,
)

_UNKNOWN_GPU = DeviceState()
# Tolerated clock skew in seconds. 60, because late values look like a slow clock.
CLOCK_AHEAD = 5.0
_CLOCK_BEHIND = 60.0
MAX_ALERTS = 200
_MAX_NODE_ALERTS = 40  # so that one exporter cannot displace the alerts of other nodes
_NOT_ANSWERING = {LOST, UNREADABLE, DRIVER_AWAY}
_DRIVER_SOURCES = {"nvml", "dcgm", "exporter", "simulated", "usage", "switches"}


class Alert(msgspec.Struct, frozen=True, omit_defaults=True):
    """A problem of a node or a GPU, described in plain text."""

    severity: str  # broken or warning
    text: str
    node: str = ""
    uuid: str = ""
    job: str = ""  # KIND/NAMESPACE/NAME, if it is about a GPU of this job
    sources: tuple[str, ...] = ()  # that fail, such as kubelet or usage


def choose_nodes(
    readings: Sequence[NodeReading],
    before: Mapping[str, NodeEntry],
    outcomes: Mapping[str, TargetOutcome],
    settings: ViewSettings,
    now: float,
    recorded: Mapping[str, str],
) -> tuple[list[NodeEntry], list[Alert]]:
    """Returns one entry per node, and alerts about nodes or GPUs with two exporters.

    `held` of the entries is still empty. `before`: the nodes of the last round. If a node is no
    longer reported, its last reading is kept for a while. `recorded`: the node of each GPU in the
    history, by UUID.
    """
    chooser = _Chooser(readings, before, settings, now, recorded)
    copies = chooser.group_by_node()
    chosen = {}
    for name in sorted(copies):
        chosen[name] = min(copies[name], key=chooser.rank_exporter)
    hidden, same_gpus = chooser.share_out_gpus(chosen)

    nodes = []
    for name, reading in chosen.items():
        state = _remove_gpus(reading.state, hidden[name])
        if reading.state.devices and not state.devices:
            continue  # other nodes show all its GPUs
        notes = _describe_reading(reading, copies[name], outcomes)
        nodes.append(chooser.make_entry(reading, state, notes))

    alerts = []
    for name, reading in chosen.items():
        rivals = [copy for copy in copies[name] if chooser.is_rival(copy, reading)]
        rival_targets = {copy.target for copy in rivals}
        if rival_targets:
            alerts.append(_describe_conflict(reading, rival_targets, "this node"))

    for name, other in same_gpus:
        rival = f"{chosen[other].target} (node {other})"
        alerts.append(_describe_conflict(chosen[name], [rival], "the same GPUs"))

    for node in nodes:
        if node.silent:
            alerts.append(_describe_silent(node.reading, node.silent))

    return nodes, alerts


@dataclass(frozen=True)
class _Chooser:
    """Chooses between several readings of one node, and between several nodes with one GPU."""

    readings: Sequence[NodeReading]
    before: Mapping[str, NodeEntry]  # nodes of the last round
    settings: ViewSettings
    now: float
    recorded: Mapping[str, str]  # UUID -> node in the history

    def group_by_node(self) -> dict[str, list[NodeReading]]:
        """Groups the readings by node.

        For nodes that are no longer reported, uses the last readings.
        """
        readings = list(self.readings)
        reported = {reading.name for reading in readings}
        for name, node in self.before.items():
            if name not in reported:
                readings.append(replace(node.reading, listed=False))
        kept = filter(self._is_kept, readings)
        return group_by(kept, lambda reading: reading.name)

    def make_entry(self, reading: NodeReading, state: NodeState, notes: Iterable[str]) -> NodeEntry:
        age = self.now - reading.read_at
        taken = {}
        for gpu in state.devices:
            owner = self.owners.get(gpu.uuid, reading.name)
            if owner != reading.name:
                taken[gpu.uuid] = owner

        return NodeEntry(
            reading,
            state,
            age_seconds=max(0.0, age),
            stale=self.is_stale(reading),
            gone=age > self.settings.stale_after,
            notes=tuple(notes),
            silent=self._find_silent(state),
            taken=taken,
        )

    @cached_property
    def owners(self) -> dict[str, str]:
        """The node to which each GPU belongs, by UUID: the one of the last round or of the history.

        While another node has taken the GPU over, it still belongs to the first one.
        """
        owners = dict(self.recorded)
        for name, node in self.before.items():
            for uuid in _present_gpus(node.state):
                owners[uuid] = node.taken.get(uuid, name)
        return owners

    def _is_kept(self, reading: NodeReading) -> bool:
        age = self.now - reading.read_at
        if age <= self.settings.drop_after:
            return True
        # While the exporter is listed, its GPUs stay visible, because they may be broken.
        return bool(reading.listed and reading.state.devices)

    def is_stale(self, reading: NodeReading) -> bool:
        age = self.now - reading.read_at
        return reading.state.stale or age > self.settings.stale_after

    def is_rival(self, reading: NodeReading, other: NodeReading) -> bool:
        """Returns True if `reading` is current and comes from another exporter than `other`."""
        if reading.target == other.target:
            return False
        # One exporter may be listed with two addresses.
        exporter_id = reading.state.exporter_id
        if exporter_id and exporter_id == other.state.exporter_id:
            return False
        return reading.listed is not False and not self.is_stale(reading)

    # Exporters that no longer answer

    def _find_silent(self, state: NodeState) -> NodeReading | None:
        """Returns the last reading of a podgpu that named the holders and no longer answers.

        Returns None if `state` itself has holders.
        """
        if state.producer == "podgpu" or _has_holders(state):
            return None
        for gpu in state.devices:
            if gpu.uuid in self._silent_by_gpu:
                return self._silent_by_gpu[gpu.uuid]
        return None

    @cached_property
    def _silent_by_gpu(self) -> dict[str, NodeReading]:
        """Readings of podgpus that named holders and no longer answer, by UUID of their GPUs."""
        unread = [reading for reading in self.readings if self.is_stale(reading)]
        targets = {reading.target for reading in self.readings}
        for node in self.before.values():
            for reading in (node.reading, node.silent):
                if reading and reading.target not in targets:
                    unlisted = replace(reading, listed=False)
                    unread.append(unlisted)

        silent: dict[str, NodeReading] = {}
        for reading in unread:
            state = reading.state
            if state.producer == "podgpu" and _has_holders(state) and self._is_kept(reading):
                for uuid in _present_gpus(state):
                    silent[uuid] = reading

        return silent

    # Sort keys: the smallest is preferred

    def rank_exporter(self, reading: NodeReading) -> tuple[object, ...]:
        """Sort key for the readings of one node."""
        shown = self.before.get(reading.name)
        was_chosen = shown is not None and shown.reading.target == reading.target
        # An exporter without GPUs, or that cannot name holders, is replaced by a better one.
        stays = was_chosen and bool(reading.state.devices) and _names_holders(reading, shown)

        return (
            # current values first, then exporters that are still listed
            self.is_stale(reading),
            reading.listed is False,
            not stays,
            *_rank_content(reading, was_chosen),
        )

    def rank_node(
        self, reading: NodeReading, uuid: str, conflicts: Collection[str]
    ) -> tuple[object, ...]:
        """Sort key for the readings that contain one GPU.

        Any exporter can report any UUID. So the node that had the GPU first keeps it as long as it
        answers, and gets it back afterwards, except if it never named holders: then podgpu may
        replace it. Without a last round, the exporter that contradicts fewest others (`conflicts`)
        is preferred.
        """
        shown = self.before.get(reading.name)
        was_chosen = shown is not None and _has_gpu(shown.state, uuid)
        names_holders = _names_holders(reading, shown)

        return (
            # current values first, then a node on which the GPU is present
            self.is_stale(reading),
            not _has_gpu(reading.state, uuid),
            # then exporters that are still listed
            reading.listed is False,
            not (names_holders and self.owners.get(uuid) == reading.name),
            not (names_holders and was_chosen),
            len(conflicts),
            *_rank_content(reading, was_chosen),
        )

    # GPUs that several nodes report

    def share_out_gpus(
        self, chosen: Mapping[str, NodeReading]
    ) -> tuple[dict[str, set[str]], list[tuple[str, str]]]:
        """Chooses one node for each GPU that several nodes report.

        Returns the UUIDs to hide on each node, and pairs of nodes (chosen, other) that both report
        a GPU as present.
        """
        claims = _find_claims(chosen)
        conflicts = _find_conflicts(chosen, claims.values())
        hidden: dict[str, set[str]] = defaultdict(set)
        rivals: dict[tuple[str, str], None] = {}
        for uuid, names in claims.items():
            ranks = {}
            for name in names:
                reading = chosen[name]
                ranks[name] = self.rank_node(reading, uuid, conflicts[reading.target])

            best, *others = sorted(ranks, key=ranks.__getitem__)
            for other in others:
                hidden[other].add(uuid)
                reading = chosen[other]
                if _has_gpu(reading.state, uuid) and self.is_rival(reading, chosen[best]):
                    rivals[best, other] = None

        return hidden, list(rivals)


def _rank_content(reading: NodeReading, was_chosen: bool) -> tuple[object, ...]:
    state = reading.state
    return (
        # a reading with holders first, then one with GPUs
        not _has_holders(state),
        not state.devices,
        # then a node name that the exporter reports
        not reading.named,
        # then the choice of the last round, so that the view does not alternate
        not was_chosen,
        # then podgpu, because it reports more
        state.producer != "podgpu",
        # the same choice in every process
        (reading.name, reading.target),
    )


def _find_claims(chosen: Mapping[str, NodeReading]) -> dict[str, list[str]]:
    """Returns the UUIDs that several nodes report, with the names of these nodes."""
    nodes: dict[str, list[str]] = defaultdict(list)
    for name, reading in chosen.items():
        for gpu in reading.state.devices:
            if gpu.uuid:
                nodes[gpu.uuid].append(name)

    claims = {}
    for uuid, names in nodes.items():
        if len(names) > 1:
            claims[uuid] = names

    return claims


def _find_conflicts(
    chosen: Mapping[str, NodeReading], claims: Iterable[Sequence[str]]
) -> dict[str, set[str]]:
    """Returns for each exporter the exporters that report one of its GPUs, including itself.

    One exporter may report several nodes: they count once.
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

    if reading.listed is False:
        yield (
            f"{reading.target} no longer reports this node: check that the exporter runs and that "
            "podgpu reads it"
        )

    if reading.state.dropped:
        yield f"impossible values are ignored: {few_of(sorted(reading.state.dropped))}"
    if reading.state.stale:
        yield "the exporter serves no GPU values, because its last readings are too old"

    skew = reading.skew_seconds or 0.0
    if skew > CLOCK_AHEAD:
        yield f"its clock is {skew:.0f} s ahead"
    elif skew < -_CLOCK_BEHIND:
        yield f"its clock is {-skew:.0f} s behind, or its values are late"


def _describe_conflict(used: NodeReading, others: Collection[str], what: str) -> Alert:
    text = (
        f"node {used.name}: {used.target} and {few_of(sorted(others))} report {what}: "
        f"only the figures of {used.target} are shown; "
        "stop the other exporter, or remove it from the sources of the cluster view"
    )
    return Alert("warning", text, used.name)


def _describe_silent(used: NodeReading, silent: NodeReading) -> Alert:
    text = (
        f"node {used.name}: {silent.target} does not answer, and {used.target} does not report "
        "holders: check that podgpu runs on this node"
    )
    return Alert("warning", text, used.name)


def _names_holders(reading: NodeReading, shown: NodeEntry | None) -> bool:
    """Returns whether the exporter is podgpu, or holders were known in the last round."""
    is_podgpu = reading.state.producer == "podgpu"
    return is_podgpu or (shown is not None and _has_holders(shown.state))


def _has_holders(state: NodeState) -> bool:
    return any(device.holders for _, device in all_devices(state))


def _has_gpu(state: NodeState, uuid: str) -> bool:
    """Returns whether the GPU is present on the node, and not lost."""
    return any(gpu.uuid == uuid and not is_lost(gpu) for gpu in state.devices)


def _present_gpus(state: NodeState) -> list[str]:
    return [gpu.uuid for gpu in state.devices if not is_lost(gpu)]


def _remove_gpus(state: NodeState, uuids: Collection[str]) -> NodeState:
    if not uuids:
        return state

    kept = []
    lost = state.gpus_lost or 0
    for gpu in state.devices:
        if gpu.uuid not in uuids:
            kept.append(gpu)
        elif is_lost(gpu):
            lost -= 1

    sources = [source for source in state.sources if source.device not in uuids]
    return replace(state, devices=tuple(kept), gpus_lost=max(0, lost), sources=tuple(sources))


# GPUs that disappeared


def add_lost_gpus(
    state: NodeState, earlier: NodeState, reported: Collection[str], wall: float
) -> NodeState:
    """Adds the GPUs of `earlier` that no node reports now, with the condition `lost`.

    dcgm-exporter omits lost GPUs.
    """
    devices = list(state.devices)
    for gpu in earlier.devices:
        if gpu.uuid and gpu.uuid not in reported:
            devices.append(_make_lost(gpu, wall))

    if len(devices) == len(state.devices):
        return state

    without_number = -1
    devices.sort(key=lambda gpu: (without_number if gpu.index is None else gpu.index, gpu.uuid))
    return replace(state, devices=tuple(devices))


def recall_lost_gpus(state: NodeState, earlier: NodeState) -> NodeState:
    """Adds the model of GPUs that were lost before their exporter started: it never saw them.

    Without a model, they would have no price. The driver may have renumbered the others, so the
    number stays unknown.
    """
    if all(gpu.model for gpu in state.devices):
        return state

    with_model = {gpu.uuid: gpu for gpu in earlier.devices if gpu.model}
    devices = []
    for gpu in state.devices:
        last = with_model.get(gpu.uuid)
        if last is not None and not gpu.model and is_lost(gpu):
            memory = last.memory_total_bytes
            gpu = replace(gpu, model=last.model, memory_total_bytes=memory)
        devices.append(gpu)

    return replace(state, devices=tuple(devices))


def _make_lost(gpu: DeviceState, wall: float) -> DeviceState:
    lost = Condition(LOST, round(wall, 3))
    for condition in gpu.conditions:
        if condition.name == LOST:
            # It was lost before.
            lost = Condition(LOST, condition.since)

    holders = list(gpu.holders)
    instances = []
    for instance in gpu.instances:
        holders += instance.holders
        instances.append(MigInstance(id=instance.id, profile=instance.profile))

    last_holders = tuple(Workload(*parts_of(holder)) for holder in holders)
    return DeviceState(
        uuid=gpu.uuid,
        index=gpu.index,
        model=gpu.model,
        memory_total_bytes=gpu.memory_total_bytes,
        conditions=(lost,),
        last_holders=gpu.last_holders or last_holders,
        instances=tuple(instances),
    )


def hide_missing_gpus(node: NodeEntry, uuids: Collection[str]) -> NodeEntry | None:
    """Hides GPUs of `uuids` (removed with `podgpu forget`) while they are lost or the node is gone.

    Returns None if the node is gone and has no other GPU.
    """
    missing = set()
    for gpu in node.state.devices:
        is_missing = node.gone or is_lost(gpu)
        if is_missing and gpu.uuid in uuids:
            missing.add(gpu.uuid)

    state = _remove_gpus(node.state, missing)
    if node.gone and missing and not state.devices:
        return None

    return replace(node, state=state)


# Alerts, shared by the web pages, `/health` and `top`


def severity_of(condition: Condition) -> str:
    spec = conditions().get(condition.name)
    if spec is None:
        return "broken"
    return spec.severity


def sort_alerts(alerts: Iterable[Alert]) -> tuple[Alert, ...]:
    """Sorts "broken" before "warning". Keeps at most MAX_ALERTS, and _MAX_NODE_ALERTS per node."""
    shown: list[Alert] = []
    left_out = []
    of_node: Counter[str] = Counter()
    for alert in sorted(alerts, key=lambda alert: alert.severity != "broken"):
        of_node[alert.node] += 1
        has_room = of_node[alert.node] <= _MAX_NODE_ALERTS
        if has_room and len(shown) < MAX_ALERTS:
            shown.append(alert)
        else:
            left_out.append(alert)

    if left_out:
        shown.append(Alert(left_out[0].severity, f"and {len(left_out)} more"))

    return tuple(shown)


def describe_node(name: str, state: NodeState, gone: bool = False) -> Iterator[Alert]:
    """Yields one alert per condition of a GPU, and alerts about the whole node.

    A node without an answer or a driver gets one alert for all its GPUs.
    """
    broken = [gpu for gpu in state.devices if gpu.conditions and is_shown(gpu)]
    if gone:
        yield _describe_gone(name, state)
    else:
        yield from _describe_lost(name, state, broken)

    yield from _describe_conditions(name, broken)
    if not gone:
        yield from _describe_sources(name, state, broken)


def _describe_conditions(name: str, broken: Iterable[DeviceState]) -> Iterator[Alert]:
    without_driver = _find_without_driver(broken)
    # One alert describes the whole node: `_describe_gone`.
    described = {NODE_GONE}
    if len(without_driver) > 1:
        described.add(DRIVER_AWAY)
        yield _describe_without_driver(name, without_driver)

    for gpu in broken:
        for condition in gpu.conditions:
            if condition.name not in described:
                yield _describe_gpu(name, gpu, condition)


def _find_without_driver(broken: Iterable[DeviceState]) -> list[Condition]:
    away = []
    for gpu in broken:
        away += [condition for condition in gpu.conditions if condition.name == DRIVER_AWAY]
    return away


def _describe_sources(
    name: str, state: NodeState, broken: Iterable[DeviceState]
) -> Iterator[Alert]:
    ignored = _DRIVER_SOURCES if _find_without_driver(broken) else ()
    failing = []
    for source in state.sources:
        # Failures of gpu0, gpu1… are conditions of these GPUs.
        if is_gpu_source(source) or source.name in ignored:
            continue
        if source.up is False:
            failing.append(source.name)

    if failing:
        text = (
            f"node {name}: podgpu cannot read {', '.join(failing)}: "
            "see the log of podgpu on this node"
        )
        yield Alert("warning", text, name, sources=tuple(failing))


def _describe_gone(name: str, state: NodeState) -> Alert:
    _, do = words_for(NODE_GONE)
    problem = f"node {name} does not answer"
    gpus = sum(map(is_shown, state.devices))
    if gpus:
        problem += f", with its {plural(gpus, 'GPU')}"
    return Alert("broken", f"{problem}: {do}", name)


def _describe_lost(name: str, state: NodeState, broken: Iterable[DeviceState]) -> Iterator[Alert]:
    """Yields an alert about lost GPUs that are not among the devices of the node."""
    lost = state.gpus_lost or 0
    for gpu in broken:
        if any(condition.name in _NOT_ANSWERING for condition in gpu.conditions):
            lost -= 1

    if lost > 0:
        verb = "does" if lost == 1 else "do"
        text = (
            f"node {name}: {plural(lost, 'GPU')} on its PCI bus {verb} not answer and "
            "cannot be identified: run nvidia-smi on the node and see dmesg"
        )
        yield Alert("broken", text, name)


def _describe_without_driver(name: str, away: Sequence[Condition]) -> Alert:
    """Returns one alert for several GPUs. The first one's detail is shown."""
    spec = conditions()[DRIVER_AWAY]
    gpus = plural(len(away), "GPU")
    detail = away[0].detail
    if detail:
        detail = f" ({detail})"
    says = spec.says_many.format(gpus=gpus, detail=detail)
    return Alert("broken", f"node {name}: {says}: {spec.do}", name)


def _describe_gpu(name: str, gpu: DeviceState, condition: Condition) -> Alert:
    label = "a GPU"
    if gpu.index is not None:
        label = f"GPU {gpu.index}"
    uuid = gpu.uuid or "no UUID"
    says, do = describe_condition(condition, gpu)
    text = f"{label} of node {name} ({uuid}): {says}"
    if do:
        text += f": {do}"
    return Alert(severity_of(condition), text, name, gpu.uuid)


def is_gpu_source(status: SourceStatus) -> bool:
    """Returns whether the source reads a single GPU: gpu0, gpu1 and so on.

    `SourceStatus.device` is not enough, because the UUID of a GPU that does not answer is unknown.
    """
    return bool(status.device) or status.name.removeprefix("gpu").isdecimal()


def describe_condition(condition: Condition, gpu: DeviceState = _UNKNOWN_GPU) -> tuple[str, str]:
    """Returns the problem and the advice.

    The driver's recovery action is the first source of the advice. A condition of the
    history has its own text. For a condition unknown to this version, returns its name and no
    advice.
    """
    if condition.text:
        return condition.text, ""
    if condition.name not in conditions():
        return condition.name, ""

    if condition.name == RECURRING and gpu.failures:
        failures = []
        for failure in gpu.failures:
            if failure.count > 1:
                failures.append((failure.condition, failure.count))
        last = max(failure.last for failure in gpu.failures)
        return words_for(RECURRING, describe_failures(failures, last))

    repeated = []
    for xid in gpu.xids:
        if xid.total > 1:
            repeated.append((xid.xid, xid.total))

    return words_for(condition.name, condition.detail, tuple(repeated), find_recovery(gpu))


def find_recovery(gpu: DeviceState) -> str:
    """Returns the driver's recovery action. Empty if it is unknown."""
    for condition in gpu.conditions:
        if condition.name == RECOVERY:
            return condition.detail
    if RECOVERY not in gpu.healthy:
        return ""
    return NO_RECOVERY
