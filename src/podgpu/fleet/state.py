"""Builds a `ClusterState` after each reading of all nodes, or for one exporter's own page.

A state depends only on the readings and the previous state. The previous state provides the GPUs
that disappeared, the exporter chosen for each node, and (for exporters other than podgpu's) the
idle times of holders.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from msgspec.structs import replace

from podgpu.errors import Note, few_of, texts_of
from podgpu.fleet.budgets import BudgetUse
from podgpu.fleet.choose import (
    Alert,
    add_lost_gpus,
    choose_nodes,
    describe_node,
    hide_missing_gpus,
    recall_lost_gpus,
    sort_alerts,
)
from podgpu.fleet.hold import HolderTimes, IdleTimes, measure_use
from podgpu.fleet.jobs import JobDetector, JobKey, Jobs, describe_slow, find_slow, list_jobs
from podgpu.fleet.node_entry import NodeEntry
from podgpu.fleet.parts import (
    HeldPart,
    device_model,
    device_price,
    divide_device,
    divide_gpu,
    holders_of,
    is_blind,
    key_of,
    read_number,
)
from podgpu.fleet.prices import NO_PRICES, Prices
from podgpu.fleet.readings import ClusterReading, FleetCounts, NodeReading, Owners, TargetOutcome
from podgpu.fleet.saved_gpus import NO_SAVINGS, SavingsFigures
from podgpu.fleet.settings import ViewSettings
from podgpu.fleet.spent import LONGEST_GAP, Spending, describe_rejected
from podgpu.fleet.stragglers import SlowGpu
from podgpu.fleet.tokens import Charged, charge_tokens
from podgpu.metrics.conditions import NODE_GONE
from podgpu.metrics.values import MAX_RATIO
from podgpu.model import (
    Condition,
    DeviceState,
    GpuOrInstance,
    Holder,
    MigInstance,
    NodeState,
    PodName,
)

AVERAGED = frozenset({"cluster", "namespace", "node", "model"})
MAX_NOTES = 12
_CLOCK_STEP = 2.0  # smaller changes of the wall clock, in seconds, are ignored


class Scope(NamedTuple):
    """The devices that a mean covers: those of a cluster, namespace, node, model or owner.

    Unused fields are empty.
    """

    scope: str
    namespace: str = ""
    node: str = ""
    model: str = ""
    owner_kind: str = ""
    owner_name: str = ""
    cluster: str = ""


CLUSTER = Scope("cluster")


class UsedMean(NamedTuple):
    """The number of devices in use, and the mean of --used-field over them, in its own unit."""

    devices: int
    mean: float


@dataclass(frozen=True, slots=True)
class ClusterState:
    """All nodes after one round. An exporter's own page uses a state with a single node."""

    settings: ViewSettings
    taken_at: float | None  # Unix time
    is_past: bool = False
    scope: Literal["node", "cluster"] = "cluster"
    nodes: tuple[NodeEntry, ...] = ()  # sorted by name
    notes: tuple[Note, ...] = ()
    alerts: tuple[Alert, ...] = ()  # most serious first
    used: Mapping[Scope, UsedMean] = field(default_factory=dict)
    owners: Owners = field(default_factory=dict)
    kept_pods: frozenset[PodName] = frozenset()  # savings leave them out, by an annotation
    prices: Prices = NO_PRICES
    budgets: Sequence[BudgetUse] = ()
    savings: SavingsFigures = NO_SAVINGS
    outcomes: tuple[TargetOutcome, ...] = ()  # sorted by target
    errors: Mapping[tuple[str, str], int] = field(default_factory=dict)
    # Set if there are too many GPUs to read each of them. Then `nodes` has only a selection.
    totals_only: FleetCounts | None = None
    matching_nodes: int | None = None  # number of nodes that match the selection
    clock_offset: float = 0.0  # Unix time minus monotonic time; constant until the clock is set
    step_seconds: int | None = None  # set only for a past time: values are means over this time
    jobs: Jobs = field(default_factory=dict)
    slow: Mapping[JobKey, SlowGpu] = field(default_factory=dict)  # the slowest GPU of each job
    charged_tokens: Charged = field(default_factory=dict)

    @property
    def used_ratio(self) -> float | None:
        """Mean of --used-field over the GPUs in use, from 0 to 1. None if there is no data."""
        used = self.used.get(CLUSTER)
        if used is None:
            return None
        return used.mean / self.settings.full

    @property
    def messages(self) -> list[str]:
        """The texts of alerts and notes."""
        texts = [alert.text for alert in self.alerts]
        texts += texts_of(self.notes)
        return texts

    @property
    def failures(self) -> list[str]:
        """The texts of targets that could not be read."""
        return [outcome.text for outcome in self.outcomes if outcome.error]

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
    notes: Sequence[Note] = (),
    recorded: Mapping[str, str] | None = None,
    budgets: Sequence[BudgetUse] = (),
    savings: SavingsFigures = NO_SAVINGS,
    detector: JobDetector | None = None,
) -> ClusterState:
    """Builds the state of a round. `now` is monotonic, `wall` is Unix time.

    `removed`: UUIDs of GPUs that were removed with `podgpu forget`. They are hidden while they are
    lost. `recorded`: the node of each GPU in the history, by UUID. `detector`: keeps the last
    minutes of each job; without it, no GPU is compared with its siblings.
    """
    before: dict[str, NodeEntry] = {}
    # With totals only, nodes are not listed, so missing ones are not gone.
    if previous is not None and reading.totals_only is None:
        before = {node.name: node for node in previous.nodes}

    outcomes = {outcome.target: outcome for outcome in reading.outcomes}
    chosen, conflicts = choose_nodes(reading.nodes, before, outcomes, settings, now, recorded or {})
    entries = _restore_lost_gpus(chosen, before, removed, wall)

    offset = _find_offset(wall - now, previous)
    clock_change = 0.0 if previous is None else offset - previous.clock_offset
    # A node that is not stale yet has no gap.
    longest_gap = max(LONGEST_GAP, settings.stale_after)
    nodes = []
    for entry in entries:
        earlier = before.get(entry.name)
        idle = IdleTimes(
            entry, earlier, offset, clock_change, reading.idle_for, settings.stale_after
        )
        spending = Spending(entry, earlier, longest_gap)
        owners = entry.reading.owners or reading.owners
        nodes.append(complete_node(entry, idle, prices, offset, owners, spending))

    charged = {} if previous is None else previous.charged_tokens
    nodes, charged = charge_tokens(nodes, reading.engines, charged)

    sorted_outcomes = [outcomes[target] for target in sorted(outcomes)]
    unread = _list_unread(sorted_outcomes, reading.nodes)
    jobs = list_jobs(nodes, before)
    slow = {} if detector is None else find_slow(detector, now, jobs)

    all_notes = [*notes, *reading.notes]
    all_notes += unread
    all_notes += describe_unpriced(nodes, prices)

    return ClusterState(
        settings=settings,
        taken_at=wall,
        nodes=tuple(nodes),
        notes=_bound_notes(all_notes),
        alerts=_list_alerts(nodes, [*describe_slow(jobs, slow), *conflicts], unread, budgets),
        used=mean_by_scope(nodes, reading.owners, settings),
        owners=reading.owners,
        kept_pods=reading.kept_pods,
        prices=prices,
        budgets=budgets,
        savings=savings,
        outcomes=tuple(sorted_outcomes),
        errors=reading.errors,
        totals_only=reading.totals_only,
        clock_offset=offset,
        jobs=jobs,
        slow=slow,
        charged_tokens=charged,
    )


def _list_unread(outcomes: Iterable[TargetOutcome], nodes: Iterable[NodeReading]) -> list[Note]:
    """Returns the errors of targets of which no earlier reading is left."""
    read = {node.target for node in nodes}
    notes = []
    for outcome in outcomes:
        if outcome.error and outcome.target not in read:
            notes.append(Note(outcome.target, outcome.text))
    return notes


def _list_alerts(
    nodes: Iterable[NodeEntry],
    others: Iterable[Alert],
    unread: Sequence[Note],
    budgets: Iterable[BudgetUse],
) -> tuple[Alert, ...]:
    alerts: list[Alert] = []
    for node in nodes:
        alerts += describe_node(node.name, node.state, gone=node.gone)
    alerts += others

    for note in unread[:MAX_NOTES]:
        alerts.append(Alert("warning", note.text))
    for budget in budgets:
        if budget.warning:
            alerts.append(Alert("warning", budget.warning))
    return sort_alerts(alerts)


def _find_offset(offset: float, previous: ClusterState | None) -> float:
    """Returns Unix time minus monotonic time. Keeps the last offset until the clock is set."""
    if previous is not None and abs(offset - previous.clock_offset) < _CLOCK_STEP:
        return previous.clock_offset
    return offset


def _restore_lost_gpus(
    chosen: Sequence[NodeEntry],
    before: Mapping[str, NodeEntry],
    removed: Collection[str],
    wall: float,
) -> list[NodeEntry]:
    """Adds what exporters do not report of lost GPUs. Hides lost GPUs that were removed."""
    reported: set[str] = set()
    for node in chosen:
        reported.update(gpu.uuid for gpu in node.state.devices)

    shown = []
    for node in chosen:
        earlier = before.get(node.name)
        if earlier is not None and node.state.producer == "dcgm-exporter":
            node = replace(node, state=add_lost_gpus(node.state, earlier.state, reported, wall))
        elif earlier is not None:
            node = replace(node, state=recall_lost_gpus(node.state, earlier.state))
        kept = hide_missing_gpus(node, removed) if removed else node
        if kept is not None:
            shown.append(kept)

    return shown


def build_single_node_state(
    state: NodeState,
    settings: ViewSettings,
    now: float,
    wall: float,
    *,
    fresh: bool = True,
    prices: Prices = NO_PRICES,
    notes: Sequence[Note] = (),
    previous: ClusterState | None = None,
) -> ClusterState:
    """Builds the state of an exporter's own page.

    If not `fresh`, omits GPUs and shows the first note as an alert. With `previous`, the state has
    what the holders spent since then.
    """
    shown = state if fresh else replace(state, devices=())
    entry = NodeEntry(NodeReading("", shown, read_at=now), shown, stale=not fresh)
    earlier = previous.nodes[0] if previous else None
    spending = Spending(entry, earlier, LONGEST_GAP)
    offset = wall - now
    node = complete_node(entry, None, prices, offset, owners=None, spending=spending)
    alerts = tuple(Alert("broken", note.text, state.node) for note in notes[:1])
    if fresh:
        alerts = sort_alerts(describe_node(state.node, node.state))

    return ClusterState(
        settings=settings,
        taken_at=state.taken_at,
        scope="node",
        nodes=(node,),
        notes=(*notes, *describe_unpriced([node], prices)),
        alerts=alerts,
        prices=prices,
        clock_offset=offset,
    )


def _list_unpriced(nodes: Iterable[NodeEntry]) -> list[str]:
    models = set()
    for node in nodes:
        for model in _list_models(node):
            if node.prices.of(model).gpu_hour is None:
                models.add(model or "devices of an unknown model")
    return sorted(models)


def describe_unpriced(nodes: Iterable[NodeEntry], prices: Prices) -> Iterator[Note]:
    """Yields notes about models without a price.

    If prices depend on node labels, also yields notes about missing labels.
    """
    if not prices.currency:
        return

    priced = []
    unlabelled = []
    for node in nodes:
        # Prices with rules for nodes are not those of a node: its labels are unknown.
        if not node.prices.nodes:
            priced.append(node)
        elif not node.gone:
            unlabelled.append(node.name)

    yield from _describe_unlabelled(priced, unlabelled, prices)

    unpriced = _list_unpriced(priced)
    if unpriced:
        action = "add them to the file of --prices"
        if prices.source == "example":
            action = "write your own price file"
        text = f"there is no price for {few_of(unpriced)}: costs do not include them; {action}"
        yield Note("no price", text)


def _list_models(node: NodeEntry) -> set[str]:
    models = set()
    for gpu in node.gpus:
        models.add(gpu.model)
        for instance in gpu.instances:
            models.add(device_model(gpu, instance))
    return models


def _describe_unlabelled(
    priced: Iterable[NodeEntry], unlabelled: Sequence[str], prices: Prices
) -> Iterator[Note]:
    """Yields notes about node labels on which prices depend and that podgpu does not read."""
    if unlabelled:
        text = (
            f"prices depend on node labels, but the labels of {few_of(unlabelled)} are unknown:"
            " costs do not include these nodes; give podgpu access to nodes of the API server or to"
            " kube_node_labels in Prometheus"
        )
        yield Note("prices of unknown nodes", text)

    labels: set[str] = set()
    for node in priced:
        labels.update(node.reading.labels or ())

    elsewhere = [name for name in prices.label_names if name not in labels]
    if priced and elsewhere:
        text = (
            f"no node has the label {few_of(elsewhere)} of the price file: check that podgpu"
            " reads this label"
        )
        yield Note("prices by unknown labels", text)


def _bound_notes(notes: Sequence[Note]) -> tuple[Note, ...]:
    more = len(notes) - MAX_NOTES
    if more <= 0:
        return tuple(notes)
    return (*notes[:MAX_NOTES], Note("other notes", f"and {more} more"))


def bound_texts(texts: Sequence[str], most: int = MAX_NOTES) -> list[str]:
    if len(texts) <= most:
        return list(texts)
    return [*texts[:most], f"and {len(texts) - most} more"]


# Holders


def complete_node(
    node: NodeEntry,
    idle: IdleTimes | None,
    prices: Prices,
    offset: float,
    owners: Owners | None,
    spending: Spending | None = None,
) -> NodeEntry:
    """Sets `held` and `prices`. If the node is gone, adds the condition `node_gone` to its GPUs."""
    node = replace(node, prices=prices.on_node(node.reading.labels))
    if node.gone:
        gone_since = round(node.reading.read_at + offset, 3)
        node = replace(node, state=_mark_gone(node.state, gone_since))

    notes = node.notes
    held = tuple(_make_parts(node, idle, owners or {}, spending))
    if spending is not None:
        unattributed_joules = spending.list_unattributed()
        # Making the parts and the list above may reject increases.
        note = describe_rejected(spending.rejected)
        if note:
            notes = (*notes, note)

        node = replace(
            node,
            charged_seconds=spending.seconds or 0.0,
            unattributed_joules=unattributed_joules,
            rejected=spending.rejected,
        )

    counted_at = idle.counted_at if idle else node.reading.read_at
    return replace(node, notes=tuple(bound_texts(notes)), held=held, counted_at=counted_at)


def _mark_gone(state: NodeState, since: float) -> NodeState:
    """Adds the condition `node_gone` to the GPUs."""
    condition = Condition(NODE_GONE, since)
    gpus = []
    for gpu in state.devices:
        conditions = (*gpu.conditions, condition)
        gpus.append(replace(gpu, conditions=conditions))
    return replace(state, devices=tuple(gpus))


def _make_parts(
    node: NodeEntry, idle: IdleTimes | None, owners: Owners, spending: Spending | None
) -> Iterator[HeldPart]:
    for gpu in node.state.devices:
        if not gpu.holders and not gpu.instances:
            continue

        is_unknown = node.stale or is_blind(gpu)
        for instance, device_size in divide_gpu(gpu):
            device = instance or gpu
            holders = holders_of(gpu, device)
            if not holders:
                continue

            key = key_of(gpu, instance)
            price = device_price(node.prices, gpu, instance, device_size)
            for holder, share in zip(holders, divide_device(holders), strict=True):
                if idle is None:
                    times = HolderTimes(measure_use(device, holder), holder.known_usage.idle_since)
                else:
                    times = idle.find(gpu, instance, holder)

                spent = None
                counted_at = 0.0
                if spending is not None:
                    spent = spending.measure(gpu, key, holder, share)
                    counted_at = spending.find_counted_at(key, holder)

                yield HeldPart(
                    gpu,
                    instance,
                    holder,
                    device_size,
                    share,
                    use="unknown" if is_unknown else times.use,
                    last_idle_since=times.idle_since,
                    owner=owners.get(holder.pod_name),
                    price=price,
                    cluster=node.reading.cluster,
                    measured_idle=times.measured_idle,
                    window=times.window,
                    spent=spent,
                    counted_at=counted_at,
                )


# Utilisation of GPUs in use, as in gpu-utilization-metric-exporter: the mean of one field over the
# devices in use. A device is in use while the field is above 0. If a scope has devices but none is
# in use, its mean is 0. A scope without data has no mean.


def mean_by_scope(
    nodes: Iterable[NodeEntry], owners: Owners, settings: ViewSettings
) -> dict[Scope, UsedMean]:
    """Computes the mean of each scope over its devices in use, on nodes that are not stale.

    A scope of which no device is in use has the mean 0.
    """
    full = settings.full
    sums: dict[Scope, _UsedSum] = {}
    for node in nodes:
        if node.stale:
            continue

        node_owners = node.reading.owners or owners
        for gpu, instance, value in measured_devices(node, settings):
            for scope in _find_scopes(node, gpu, instance, node_owners):
                used = sums.setdefault(scope, _UsedSum())
                # Other devices are not in use.
                if value > 0:
                    used.devices += 1
                    used.total += min(value, full)

    return {scope: used.mean() for scope, used in sums.items()}


@dataclass(slots=True)
class _UsedSum:
    """The values of the devices of a scope that are in use."""

    devices: int = 0
    total: float = 0.0

    def mean(self) -> UsedMean:
        if not self.devices:
            return UsedMean(0, 0.0)
        return UsedMean(self.devices, self.total / self.devices)


def _find_scopes(
    node: NodeEntry, gpu: DeviceState, instance: MigInstance | None, owners: Owners
) -> set[Scope]:
    """Returns the scopes to which a device belongs."""
    cluster = node.reading.cluster
    model = device_model(gpu, instance)
    scopes = {CLUSTER, Scope("node", node=node.name), Scope("model", model=model)}
    for holder in _all_holders(gpu, instance):
        namespace = holder.namespace
        if not namespace:
            continue
        scopes.add(Scope("namespace", namespace, cluster=cluster))
        owner = owners.get(holder.pod_name)
        if owner is not None:
            scope = Scope(
                "owner",
                namespace,
                owner_kind=owner.kind,
                owner_name=owner.name,
                cluster=cluster,
            )
            scopes.add(scope)

    return scopes


def measured_devices(
    node: NodeEntry, settings: ViewSettings
) -> Iterator[tuple[DeviceState, MigInstance | None, float]]:
    """Yields each device with its value of --used-field.

    Skips a GPU if its MIG instances report the field.
    """
    for gpu in node.gpus:
        has_instances = False
        for instance in gpu.instances:
            value = None if instance.hidden else used_value(instance, settings)
            if value is not None:
                has_instances = True
                yield gpu, instance, value

        if has_instances or gpu.hidden:
            continue

        value = used_value(gpu, settings)
        if value is not None:
            yield gpu, None, value


def used_value(device: GpuOrInstance, settings: ViewSettings) -> float | None:
    """Returns the device's value of --used-field. None if it is unknown or impossible."""
    return read_field(device, settings.used_field_name, settings.full)


def read_field(device: GpuOrInstance, name: str, full: float = 1.0) -> float | None:
    """Returns the value of a field that is `full` on a fully busy device."""
    value = read_number(device, name)
    if value is None or not 0 <= value <= full * MAX_RATIO:
        return None
    return value


def _all_holders(gpu: DeviceState, instance: MigInstance | None) -> Sequence[Holder]:
    """Returns the holders. For a GPU in MIG mode, includes the holders of its instances."""
    if instance is not None:
        return holders_of(gpu, instance)

    holders = list(holders_of(gpu, gpu))
    for each in gpu.instances:
        holders += holders_of(gpu, each)
    return holders
