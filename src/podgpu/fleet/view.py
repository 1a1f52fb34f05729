"""The JSON of `/api/v1/view`, `/api/v1/pods/…` and `/api/v1/gpus/UUID` (docs/api.md) as structs.

The server encodes the structs and `top` decodes them. New versions may add fields but never change
existing ones. Fields whose value is unknown are omitted from the JSON.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import msgspec
from msgspec.structs import asdict, replace

from podgpu import __version__
from podgpu.charge import HeldTime, Waste
from podgpu.decode import find_decoder
from podgpu.errors import SourceError
from podgpu.fleet.choose import Alert, describe_condition, is_gpu_source
from podgpu.fleet.hold import find_unheld
from podgpu.fleet.node_entry import NodeEntry
from podgpu.fleet.parts import (
    EngineState,
    HeldPart,
    HeldSums,
    Totals,
    Use,
    WasteRate,
    device_memory,
    device_model,
    device_utilization,
    divide_gpu,
    gpu_id,
    gpu_utilization,
    is_lost,
    key_of,
    make_rate,
    sum_held,
)
from podgpu.fleet.prices import Prices
from podgpu.fleet.readings import FleetCounts
from podgpu.fleet.repair import Repair, make_repair, repair_of
from podgpu.fleet.setup import SetupHint, hint_labels, hint_prices
from podgpu.fleet.state import ClusterState
from podgpu.known import divide_known, round_known, select_known
from podgpu.metrics.conditions import KUBERNETES_UNHEALTHY, breaks_gpu, find_checks, xid_spec
from podgpu.metrics.fields import (
    CLOCK_EVENTS_FIELD,
    clock_events_in_words,
    detail_helps,
    field_named,
    fields,
)
from podgpu.metrics.mig import parent_and_fraction, slices_of_gpu, slices_of_profile
from podgpu.metrics.usage_methods import IMPROVEMENTS
from podgpu.model import (
    MJ,
    NS,
    Condition,
    DeviceState,
    FieldValues,
    GpuOrInstance,
    Holder,
    MigInstance,
    NodeState,
    RunningProcess,
    SourceStatus,
    Value,
    WaitPart,
    Workload,
    WorkloadOwner,
    XidCulprit,
    parts_of,
)

ApiVersion = Literal["podgpu/v1"]
API: ApiVersion = "podgpu/v1"


class _JsonStruct(msgspec.Struct, omit_defaults=True):
    """Base of all structs. A field with its default value is omitted from the JSON."""


class ConditionView(_JsonStruct, kw_only=True):
    condition: str
    since: float | None = None
    says: str
    do: str
    detail: str = ""  # such as the XIDs or the name of the recovery action
    checks: tuple[str, ...] = ()  # what shows the cause on the node: dmesg, nvlink


class EngineView(_JsonStruct, kw_only=True):
    """The LLM engine in a container. Rates are those between the last two readings."""

    engine: str = ""
    model: str = ""
    prompt_tokens_per_second: float | None = None
    generated_tokens_per_second: float | None = None
    requests_running: float | None = None
    requests_waiting: float | None = None
    cache_ratio: float | None = None
    first_token_seconds: float | None = None  # 95th percentile of the last 5 minutes
    first_token_before_seconds: float | None = None  # of the half hour before
    reason: str = ""  # why the engine could not be read
    message: str = ""


class HolderView(Workload, frozen=True, kw_only=True):
    share_ratio: float | None = None
    utilization_ratio: float | None = None
    memory_used_bytes: int | None = None
    power_watts: float | None = None
    processes: int | None = None
    busy_seconds: float | None = None
    idle_seconds: float | None = None
    wait_seconds: float | None = None
    wait_ratio: float | None = None
    waits_for: tuple[WaitPart, ...] = ()
    energy_joules: float | None = None
    idle_since: float | None = None
    owner: WorkloadOwner | None = None
    cost_per_hour: float | None = None
    part: float | None = None  # fraction of a physical GPU
    use: Use | None = None
    unknown_because: str = ""  # reason, if `use` is unknown
    waste: WasteRate | None = None
    running: tuple[RunningProcess, ...] = ()  # only on a node without Kubernetes
    engine: EngineView | None = None
    hidden: bool = False  # True for the sum of the holders that the user may not see


class DeviceView(_JsonStruct, kw_only=True):
    """The fields that GPUs and MIG instances have in common."""

    utilization_ratio: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    energy_joules: float | None = None
    holders: list[HolderView] = []
    conditions: list[ConditionView] = []
    absent: bool = False
    last_holders: tuple[Workload, ...] = ()
    price_per_hour: float | None = None
    kubernetes_health: str = ""  # Healthy or Unhealthy; empty if Kubernetes does not say


class InstanceView(DeviceView, kw_only=True):
    id: str
    profile: str
    slices: int | None = None
    gpu_slices: int | None = None
    part: float | None = None  # fraction of the physical GPU


class GpuView(DeviceView, kw_only=True):
    uuid: str
    index: int | None = None
    model: str
    instances: list[InstanceView] = []
    waste: WasteRate | None = None  # of its holders, and what nobody has allocated
    # Of a GPU in use without a known holder: paid for, and not wasted.
    unheld_cost_per_hour: float | None = None
    repair: Repair | None = None  # None if no condition needs one


class NodeView(_JsonStruct, kw_only=True):
    name: str
    cluster: str = ""
    old: bool = False
    gone: bool = False
    age_seconds: float | None = None
    notes: list[str] = []
    simulated: bool = False
    gpus: list[GpuView]


class NamespaceView(_JsonStruct, kw_only=True):
    namespace: str
    cluster: str = ""
    hidden: bool = False  # True for the sum of the namespaces that the user may not see
    allocated_gpus: float
    used_gpus: float | None = None
    idle_gpus: float
    unknown_gpus: float
    cost_per_hour: float | None = None
    wasted_per_hour: float | None = None  # cost of idle GPUs
    waste: WasteRate | None = None


class Answer(_JsonStruct, kw_only=True):
    """Base of all answers."""

    api: ApiVersion = msgspec.field(default_factory=lambda: API)


class View(Answer, kw_only=True):
    """`/api/v1/view`."""

    version: str = msgspec.field(default_factory=lambda: __version__)
    scope: str
    taken_at: float | None = None
    interval_seconds: float
    simulated: bool = False
    notes: list[str]
    alerts: list[Alert]
    used_utilization_ratio: float | None = None
    used_field: str = ""
    idle_after_seconds: float | None = None
    currency: str = ""
    prices: str = ""
    # there are too many GPUs to read all; `nodes` has one page of the matching nodes
    paged: bool = False
    found: int | None = None  # number of nodes that match the request
    at: float | None = None  # the past time that was requested
    step_seconds: int | None = None  # values of a past time are means over this time
    setup: list[SetupHint] = []  # what is not shown yet, and how to add it
    totals: Totals
    namespaces: list[NamespaceView]
    nodes: list[NodeView]


class PodResponse(Answer, kw_only=True):
    """`/api/v1/pods/NAMESPACE/POD`."""

    taken_at: float | None = None
    simulated: bool = False
    namespace: str
    pod: str
    owner: WorkloadOwner | None = None
    currency: str = ""
    prices: str = ""
    totals: HeldSums
    nodes: list[NodeView]


class FieldView(_JsonStruct, kw_only=True):
    name: str
    help: str = ""
    unit: str = ""
    value: int | float | str
    source: str = ""


class XidView(_JsonStruct, kw_only=True):
    xid: int
    says: str = ""
    class_: str = msgspec.field(name="class", default="")
    at: float | None = None
    total: int | None = None
    culprits: tuple[XidCulprit, ...] = ()


class SourceView(_JsonStruct, kw_only=True):
    source: str
    ok: bool
    error: str = ""
    message: str = ""


class GpuDetails(Answer, kw_only=True):
    """Details that only the GPU's exporter can provide."""

    fields: list[FieldView] | None = None
    xids: list[XidView] | None = None
    sources: list[SourceView] = []
    method: str = ""
    method_limit: str = ""
    improvement: str = ""  # what would improve the method


class GpuResponse(GpuDetails, kw_only=True):
    """`/api/v1/gpus/UUID`."""

    taken_at: float | None = None
    simulated: bool = False
    node: str
    gpu: GpuView


# Encoding


def make_view(state: ClusterState) -> View:
    prices = state.prices
    is_cluster = state.scope == "cluster"

    return View(
        scope=state.scope,
        taken_at=state.taken_at,
        interval_seconds=state.settings.interval,
        simulated=state.simulated,
        notes=list(dict.fromkeys(state.messages)),
        alerts=list(state.alerts),
        used_utilization_ratio=state.used_ratio,
        used_field=state.settings.used_field if is_cluster else "",
        idle_after_seconds=state.settings.idle_after if is_cluster else None,
        currency=prices.currency,
        prices=prices.source,
        paged=state.totals_only is not None,
        found=state.matching_nodes,
        at=state.taken_at if state.is_past else None,
        step_seconds=state.step_seconds,
        setup=_find_hints(state),
        totals=total_of(state),
        namespaces=_make_namespaces(state),
        nodes=[_make_node(node, is_cluster) for node in state.nodes],
    )


def _find_hints(state: ClusterState) -> list[SetupHint]:
    """Returns nothing before the first reading, and for past states."""
    if state.taken_at is None or state.is_past:
        return []
    hints = [*hint_prices(state.prices.source), *state.settings.hints]
    if state.scope == "cluster":
        hints += hint_labels(node.state for node in state.nodes)
    return hints


def total_of(state: ClusterState) -> Totals:
    if state.totals_only is not None:
        return _total_of_counts(state, state.totals_only)

    gpus = 0
    broken = 0
    unhealthy = 0
    unknown = 0.0
    watts = []
    unheld_costs = []
    unallocated = WasteRate()
    for node in state.nodes:
        held = node.held_by_device()
        for gpu in node.gpus:
            gpus += 1
            names = [condition.name for condition in gpu.conditions]
            if any(map(breaks_gpu, names)):
                broken += 1
            if KUBERNETES_UNHEALTHY in names:
                unhealthy += 1

            unheld = find_unheld(node, gpu, held)
            unknown += unheld.unknown
            unallocated = unallocated.plus(unheld.unallocated)
            unheld_costs.append(unheld.unheld_cost)
            if gpu.power_mw is not None and not node.stale:
                watts.append(gpu.power_mw / 1000)

    # Without a known value, a sum is None, not 0.
    power = round(sum(watts), 1) if watts else None
    sums = sum_held(_held_parts(state), state.prices.currency)
    sums.waste = unallocated.plus(sums.waste or WasteRate())
    totals = _make_totals(sums, gpus, broken, unhealthy, power, round(unknown, 4))
    costs = select_known(unheld_costs)
    totals.unheld_cost_per_hour = round(sum(costs), 4) if costs else None
    return totals


def _total_of_counts(state: ClusterState, counts: FleetCounts) -> Totals:
    currency = state.prices.currency
    unknown = 0.0
    if not counts.has_rule:
        # Neither holders nor costs are known.
        currency = ""
        unknown = counts.gpus

    sums = sum_held(_held_parts(state), currency)
    unallocated = _sum_unallocated(counts, state.prices)
    sums.waste = unallocated.plus(sums.waste or WasteRate())
    unhealthy = counts.kubernetes_unhealthy
    return _make_totals(sums, counts.gpus, counts.broken, unhealthy, counts.power_watts, unknown)


def _sum_unallocated(counts: FleetCounts, prices: Prices) -> WasteRate:
    """Adds up the GPUs of each model that nobody has allocated."""
    allocated: dict[tuple[str, str], float] = defaultdict(float)
    for share in counts.held:
        model, fraction = parent_and_fraction(share.model)
        size = fraction or 0.0
        allocated[share.cluster, model] += share.allocated * size

    unallocated = WasteRate()
    for (cluster, model), gpus in counts.models.items():
        free = max(0.0, gpus - allocated[cluster, model])
        waste = Waste(unallocated=free)
        price = _find_price(prices, model)
        unallocated = unallocated.plus(make_rate(waste, 1.0, price))

    return unallocated


def _find_price(prices: Prices, model: str) -> float | None:
    """Returns the price of an hour. None if it depends on node labels."""
    if not prices.currency:
        return None
    return prices.of(model).gpu_hour


def _make_totals(
    sums: HeldSums,
    gpus: int,
    broken: int,
    kubernetes_unhealthy: int,
    power_watts: float | None,
    unknown: float,
) -> Totals:
    held = sums.rounded()
    return Totals(
        **asdict(held),
        gpus=gpus,
        free=round(max(0.0, gpus - held.allocated - unknown), 4),
        unheld_unknown=unknown,
        broken=broken,
        kubernetes_unhealthy=kubernetes_unhealthy,
        power_watts=power_watts,
    )


def _held_parts(state: ClusterState) -> Iterator[HeldPart]:
    """Yields the shares of all holders.

    If the state has only totals, yields a used and an idle share per namespace and model.
    """
    if state.totals_only is None:
        for node in state.nodes:
            yield from node.held
        return

    for share in state.totals_only.held:
        _, fraction = parent_and_fraction(share.model)
        used = HeldPart(
            DeviceState(model=share.model),
            None,
            Holder(share.namespace),
            device_size=fraction or 0.0,
            share=share.allocated - share.idle,
            use="used",
            price=_find_price(state.prices, share.model),
            cluster=share.cluster,
            # In one second, so that the under-used time is a number of GPUs.
            spent=HeldTime(1.0, underused=share.underused),
        )
        yield used
        yield replace(used, share=share.idle, use="idle")


def _make_namespaces(state: ClusterState) -> list[NamespaceView]:
    groups: dict[tuple[str, str], list[HeldPart]] = {}
    for part in _held_parts(state):
        namespace = part.holder.namespace
        if namespace:
            groups.setdefault((namespace, part.cluster), []).append(part)

    namespaces = []
    for (namespace, cluster), group in sorted(groups.items()):
        held = sum_held(group, state.prices.currency).rounded()
        # If nothing is known, what is used is absent, not 0.
        is_unknown = bool(held.allocated) and held.unknown == held.allocated
        row = NamespaceView(
            namespace=namespace,
            cluster=cluster,
            allocated_gpus=held.allocated,
            used_gpus=None if is_unknown else held.used,
            idle_gpus=held.idle,
            unknown_gpus=held.unknown,
            cost_per_hour=held.cost_per_hour,
            wasted_per_hour=held.wasted_per_hour,
            waste=held.waste,
        )
        namespaces.append(row)

    return namespaces


def _make_node(node: NodeEntry, is_cluster: bool) -> NodeView:
    held = node.held_by_device()
    gpus = []
    for gpu in node.gpus:
        view = _make_gpu(gpu, held, node)
        view.repair = _make_repair(gpu, node, is_cluster)
        gpus.append(view)

    return NodeView(
        name=node.name,
        cluster=node.reading.cluster,
        old=node.stale,
        gone=node.gone,
        age_seconds=round_known(node.age_seconds, 1),
        notes=list(node.notes),
        simulated=node.state.simulated,
        gpus=gpus,
    )


def _make_repair(gpu: DeviceState, node: NodeEntry, is_cluster: bool) -> Repair | None:
    action = repair_of(gpu)
    if not action or node.gone:
        return None

    holders = [part.holder for part in node.held]
    has_pods = any(holder.namespace for holder in holders)
    if not has_pods:
        # The exporter of a node without pods does not know whether Kubernetes manages the node.
        has_others = any(holder.user or holder.job for holder in holders)
        has_pods = is_cluster and not has_others

    name = gpu_id(gpu) if gpu.index is None else str(gpu.index)
    pods = [holder.pod_name for holder in holders]
    return make_repair(action, node.name, name, has_pods=has_pods, pods=pods)


def _make_gpu(gpu: DeviceState, held: Mapping[str, list[HeldPart]], node: NodeEntry) -> GpuView:
    unheld = find_unheld(node, gpu, held)
    waste = unheld.unallocated
    instances = []
    values: dict[str, Any] = {}
    for instance, fraction in divide_gpu(gpu):
        parts = held.get(key_of(gpu, instance), ())
        for part in parts:
            waste = waste.plus(part.waste)

        members = _device_fields(gpu, instance, parts, node.prices)
        if instance is None:
            values = members
            continue

        instances.append(
            InstanceView(
                id=str(instance.id),
                profile=instance.profile,
                slices=slices_of_profile(instance.profile),
                gpu_slices=slices_of_gpu(gpu.model),
                part=round(fraction, 6),
                **members,
            )
        )

    # A hidden GPU is shown only for its instances.
    if not gpu.hidden:
        values["power_watts"] = round_known(divide_known(gpu.power_mw, 1000), 1)
        values["temperature_celsius"] = gpu.temperature_celsius
        values["last_holders"] = gpu.last_holders

    values["utilization_ratio"] = round_known(gpu_utilization(gpu))
    return GpuView(
        uuid=gpu_id(gpu),
        index=gpu.index,
        model=gpu.model,
        instances=instances,
        waste=waste.rounded(),
        unheld_cost_per_hour=round_known(unheld.unheld_cost),
        **values,
    )


def _device_fields(
    gpu: DeviceState, instance: MigInstance | None, held: Iterable[HeldPart], prices: Prices
) -> dict[str, Any]:
    device: GpuOrInstance = instance or gpu
    usage = device.known_usage

    return {
        "utilization_ratio": round_known(device_utilization(device)),
        "memory_used_bytes": device_memory(device),
        "memory_total_bytes": device.memory_total_bytes,
        "energy_joules": round_known(divide_known(usage.energy_mj, MJ), 1),
        "holders": [_make_holder(part) for part in held],
        "conditions": [_make_condition(condition, gpu) for condition in gpu.conditions],
        "absent": is_lost(gpu),
        "price_per_hour": round_known(prices.of(device_model(gpu, instance)).gpu_hour),
        "kubernetes_health": device.kubernetes_health,
    }


def _make_holder(part: HeldPart) -> HolderView:
    holder = part.holder
    usage = holder.known_usage
    power_mw = part.gpu.power_mw
    watts = None
    if power_mw is not None and usage.power_ratio is not None:
        # Rounded down, so that the watts of all holders do not exceed the watts of the GPU.
        tenths_of_watt = power_mw * usage.power_ratio // 100
        watts = tenths_of_watt / 10

    waits_for = []
    for other in usage.waits_for:
        seconds = round(other.seconds, 4)
        ratio = round(other.ratio, 4)
        waits_for.append(replace(other, seconds=seconds, ratio=ratio))

    return HolderView(
        *parts_of(holder),
        share_ratio=round_known(holder.share_ratio),
        utilization_ratio=round_known(usage.utilization_ratio),
        memory_used_bytes=usage.memory_used_bytes,
        power_watts=watts,
        processes=usage.processes,
        busy_seconds=round_known(divide_known(usage.busy_ns, NS), 1),
        idle_seconds=round_known(divide_known(usage.idle_ns, NS), 1),
        wait_seconds=round_known(divide_known(usage.wait_ns, NS), 1),
        wait_ratio=round_known(usage.wait_ratio),
        waits_for=tuple(waits_for),
        energy_joules=round_known(divide_known(usage.energy_mj, MJ), 1),
        idle_since=round_known(part.idle_since, 0),
        owner=part.owner,
        cost_per_hour=round_known(part.cost_per_hour),
        part=round(part.gpu_fraction, 6),
        use=part.use,
        unknown_because=part.unknown_because,
        waste=part.waste.rounded(),
        running=holder.running,
        engine=None if part.engine is None else _make_engine(part.engine),
    )


def _make_engine(state: EngineState) -> EngineView:
    prompt = None
    generated = None
    if state.per_second is not None:
        prompt = round(state.per_second.prompt, 2)
        generated = round(state.per_second.generated, 2)

    return EngineView(
        engine=state.engine,
        model=state.model,
        prompt_tokens_per_second=prompt,
        generated_tokens_per_second=generated,
        requests_running=state.running,
        requests_waiting=state.waiting,
        cache_ratio=round_known(state.cache_ratio),
        first_token_seconds=round_known(state.first_token_seconds),
        first_token_before_seconds=round_known(state.first_token_before_seconds),
        reason=state.reason,
        message=state.message,
    )


def _make_condition(condition: Condition, gpu: DeviceState) -> ConditionView:
    says, do = describe_condition(condition, gpu)
    return ConditionView(
        condition=condition.name,
        since=round_known(condition.since, 0),
        says=says,
        do=do,
        detail=condition.detail,
        checks=find_checks(condition.name, condition.detail),
    )


# One pod, one GPU


def make_pod(
    state: ClusterState, view: View, namespace: str, pod: str, cluster: str | None = None
) -> PodResponse | None:
    """Returns the devices that the pod holds, with all their holders. None if it holds no device.

    Without `cluster`, includes the pods of this name in all clusters.
    """
    nodes = []
    for node in view.nodes:
        gpus = list(_select_held_by(node.gpus, namespace, pod))
        if gpus and cluster in (None, node.cluster):
            nodes.append(replace(node, gpus=gpus))

    if not nodes:
        return None

    parts = []
    for entry in state.nodes:
        for part in entry.held:
            is_pod = part.holder.pod_name == (namespace, pod)
            if is_pod and cluster in (None, part.cluster):
                parts.append(part)

    owners = {part.owner for part in parts if part.owner is not None}
    return PodResponse(
        taken_at=view.taken_at,
        simulated=view.simulated,
        namespace=namespace,
        pod=pod,
        owner=owners.pop() if len(owners) == 1 else None,
        currency=view.currency,
        prices=view.prices,
        totals=sum_held(parts, view.currency).rounded(),
        nodes=nodes,
    )


def _select_held_by(gpus: Iterable[GpuView], namespace: str, pod: str) -> Iterator[GpuView]:
    def holds(device: DeviceView) -> bool:
        return any(holder.pod_name == (namespace, pod) for holder in device.holders)

    for gpu in gpus:
        instances = [instance for instance in gpu.instances if holds(instance)]
        if holds(gpu):
            yield replace(gpu, instances=instances)
        elif instances:
            yield GpuView(uuid=gpu.uuid, index=gpu.index, model=gpu.model, instances=instances)


def make_gpu_answer(view: View, uuid: str) -> GpuResponse | None:
    """Returns the GPU as it is in the view. None if the view has no such GPU."""
    for node in view.nodes:
        for gpu in node.gpus:
            if gpu.uuid == uuid:
                return GpuResponse(
                    taken_at=view.taken_at, simulated=node.simulated, node=node.name, gpu=gpu
                )
    return None


def add_details(answer: GpuResponse, details: GpuDetails) -> GpuResponse:
    return replace(answer, **asdict(details))


def make_details(
    state: NodeState, uuid: str, more: FieldValues, links_up: int | None
) -> GpuDetails:
    """Builds the details of a GPU.

    `more`: DCGM fields that are read only for this response, by id.
    """
    gpu = DeviceState()
    for device in state.devices:
        if gpu_id(device) == uuid:
            gpu = device
            break

    values: dict[str, Value] = {}
    if gpu.pci_bus_id:
        values["DCGM_FI_DEV_PCI_BUSID"] = gpu.pci_bus_id

    for number, value in more.items():
        values[fields()[number].name] = value

    values |= gpu.fields or {}
    # The exporter lists the telemetry first, then the sources of holders.
    read_sources = [status.name for status in state.sources if status.up is not None]
    telemetry = read_sources[0] if read_sources else ""

    return GpuDetails(
        fields=_make_fields(values, telemetry, links_up),
        xids=_make_xids(gpu),
        sources=_make_sources(state, gpu),
        method=gpu.known_usage.method,
        method_limit=gpu.known_usage.method_limit,
        improvement=IMPROVEMENTS.get(gpu.known_usage.method_limit, ""),
    )


def _make_xids(gpu: DeviceState) -> list[XidView]:
    counts = list(gpu.xids)
    for instance in gpu.instances:
        counts += instance.xids

    counts.sort(key=lambda count: count.xid)
    counts.sort(key=lambda count: count.last_seen, reverse=True)
    views = []
    for count in counts:
        spec = xid_spec(count.xid)
        newest_first = count.culprits[::-1]
        views.append(
            XidView(
                xid=count.xid,
                says=spec.text,
                class_=spec.cause,
                at=round(count.last_seen, 3),
                total=count.total,
                culprits=newest_first,
            )
        )

    return views


def _make_sources(state: NodeState, gpu: DeviceState) -> list[SourceView]:
    views = []
    for status in state.sources:
        if _concerns(status, gpu):
            views.append(
                SourceView(
                    source=status.name,
                    ok=bool(status.up),
                    error=status.error,
                    message=status.message[:512],
                )
            )

    return views


def _make_fields(values: Mapping[str, Value], source: str, links_up: int | None) -> list[FieldView]:
    helps = detail_helps()
    order = {number: place for place, number in enumerate(helps)}
    known_fields = []
    for name, value in values.items():
        field = field_named(name)
        if field is not None:
            known_fields.append((field, value))

    # Fields without a place in the order come last, by number.
    known_fields.sort(key=lambda pair: pair[0].id)
    known_fields.sort(key=lambda pair: order.get(pair[0].id, len(order)))

    views = []
    for field, value in known_fields:
        if field.id == CLOCK_EVENTS_FIELD and isinstance(value, int):
            value = clock_events_in_words(value)
        text = helps.get(field.id, "")
        views.append(
            FieldView(name=field.name, help=text, unit=field.unit, value=value, source=source)
        )

    if links_up is not None:
        text = "NVLinks that are up."
        views.append(
            FieldView(name="nvlinks_up", help=text, unit="links", value=links_up, source=source)
        )

    return views


def _concerns(status: SourceStatus, gpu: DeviceState) -> bool:
    """Returns True if the source has a status and reads this GPU or the whole node."""
    if status.up is None:
        return False
    if status.device:
        return status.device == gpu.uuid
    return not is_gpu_source(status) or status.name == f"gpu{gpu.index}"


# Decoding


_Response = TypeVar("_Response", View, GpuDetails)


def decode_view(body: bytes) -> View:
    return _decode(body, View, "/api/v1/view")


def decode_details(body: bytes) -> GpuDetails:
    return _decode(body, GpuDetails, "/api/v1/gpus")


def _decode(body: bytes, shape: type[_Response], path: str) -> _Response:
    try:
        return find_decoder(shape).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SourceError(
            "malformed", f"is not a valid response of podgpu's {path}: {error}"
        ) from error
