"""Builds the metric families of `podgpu cluster`."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import asdict

from podgpu.charge import Waste
from podgpu.fleet.hold import find_unheld, wasteful_since
from podgpu.fleet.node_entry import NodeEntry
from podgpu.fleet.parts import (
    ContainerName,
    EngineState,
    HeldPart,
    WasteRate,
    container_name,
    device_model,
    device_utilization,
    gpu_id,
    holders_of,
    sum_held,
)
from podgpu.fleet.saved_gpus import SavingsFigures
from podgpu.fleet.settings import duration_text
from podgpu.fleet.state import CLUSTER, ClusterState, Scope
from podgpu.metrics.conditions import NODE_GONE
from podgpu.metrics.encode import (
    NO_LABELS,
    VERSIONS,
    Family,
    Labels,
    Sample,
    families_in,
    make_families,
)
from podgpu.metrics.labels import holder_names
from podgpu.model import DeviceState, GpuOrInstance, MigInstance, Pairs, PodName, list_pod_names

_PLACE_LABELS = ("node", "gpu", "gpu_id", "model")
_WASTE_LABELS = ("kind", "namespace", "currency", "cluster")
_PRICE_LABELS = ("model", "profile", "currency", "cluster")
_TOKEN_LABELS = ("kind", "namespace", "pod", "container", "cluster")
_BUDGET_LABELS = ("namespace", "label", "value", "currency")
_SAVINGS_LABELS = ("kind", "namespace", "pod", "model", "target", "cluster")
# `gpu_id`: the GPU, even of a MIG instance
_MAP_LABELS = ("gpu_id", "gpu_model", "namespace", "node", "pod_name")
_NamedSample = tuple[str, Sample]  # with the name of its family


def cluster_families(state: ClusterState, rolling: Mapping[Scope, float]) -> list[Family]:
    """Builds the families of `/metrics`."""
    rows = _map_rows(state)
    pod_map = [Sample(labels, 1.0) for _, labels in rows]
    # The group `seed` has the names of "pod gpu metrics exporter".
    families = make_families("seed", {"pod_and_gpu_map_info": pod_map})
    if state.settings.legacy_map_metrics:
        families += _legacy_map_families(rows)

    families += _used_families(state, rolling)
    families += _group_families(_list_idle(state))
    families += _group_families(_list_slow(state))
    families += _group_families(_list_counts(state))
    families += _namespace_families(state)
    families += _group_families(_list_costs(state))
    families += _group_families(_list_prices(state))
    families += _group_families(_list_tokens(state))
    families += _group_families(_list_budgets(state))
    families += _group_families(_list_savings(state.savings))
    families += _group_families(_list_health(state))
    families += self_families(state)
    return families


def _group_families(samples: Iterable[_NamedSample]) -> list[Family]:
    by_name: dict[str, list[Sample]] = defaultdict(list)
    for name, sample in samples:
        by_name[name].append(sample)
    return make_families("cluster", by_name)


def node_families(state: ClusterState) -> list[Family]:
    """Builds the families of `/metrics/nodes`: one per node, with the node's pods and GPUs.

    If `metric_name` returns the same name for two nodes, these nodes share a family.
    """
    spec = families_in("seed")["<node>_info"]
    samples: dict[str, list[Sample]] = defaultdict(list)
    for node, labels in _map_rows(state):
        samples[metric_name(node)].append(Sample(labels, 1.0))

    families = []
    for name, own in samples.items():
        families.append(Family(name, spec.type, spec.help, tuple(own)))

    return families


def self_families(state: ClusterState) -> list[Family]:
    """Builds the families about podgpu itself.

    They are also served when the GPU values are too old.
    """
    taken_at = state.taken_at or 0.0
    samples: dict[str, list[Sample]] = {
        "podgpu_cluster_build_info": [Sample(VERSIONS, 1)],
        "podgpu_cluster_target_up": [],
        "podgpu_cluster_target_errors_total": [],
        "podgpu_cluster_target_duration_seconds": [],
        "podgpu_cluster_node_up": [],
        "podgpu_cluster_node_last_seen_timestamp_seconds": [],
        "podgpu_cluster_round_timestamp_seconds": [Sample(NO_LABELS, round(taken_at, 3))],
    }

    def add(name: str, labels: Labels, value: float) -> None:
        samples[f"podgpu_cluster_{name}"].append(Sample(labels, value))

    for outcome in state.outcomes:
        labels = Labels([("target", outcome.target)])
        add("target_up", labels, 0 if outcome.error else 1)
        add("target_duration_seconds", labels, outcome.seconds)

    for key, count in sorted(state.errors.items()):
        add("target_errors_total", _labels(("target", "reason"), key), count)

    for node in state.nodes:
        labels = Labels([("node", node.name)])
        last_seen = round(taken_at - (node.age_seconds or 0.0), 3)
        add("node_up", labels, 0 if node.stale else 1)
        add("node_last_seen_timestamp_seconds", labels, last_seen)

    return make_families("cluster", samples)


def _labels(names: Iterable[str], values: Iterable[str]) -> Labels:
    """Pairs label names with values. Omits the label `cluster` if it is empty."""
    pairs = []
    for name, value in zip(names, values, strict=True):
        if value or name != "cluster":
            pairs.append((name, value))
    return Labels(pairs)


def _some_labels(names: Iterable[str], values: Iterable[str]) -> Labels:
    """Pairs label names with values. Omits empty labels."""
    pairs = zip(names, values, strict=True)
    return Labels(pair for pair in pairs if pair[1])


# Pod map: one series per pod and GPU, as in "pod gpu metrics exporter"


def _map_rows(state: ClusterState) -> list[tuple[str, Labels]]:
    """Returns the node and the labels of each pair of GPU and pod, sorted by node and GPU.

    Omits jobs and users.
    """
    rows: dict[tuple[str, ...], str] = {}  # without duplicates
    for node in state.nodes:
        for gpu in node.gpus:
            uuid = gpu_id(gpu)
            pods: set[PodName] = set()
            for device in (gpu, *gpu.instances):
                pods.update(list_pod_names(holders_of(gpu, device)))
            for namespace, pod in sorted(pods):
                rows[uuid, gpu.model, namespace, node.name, pod] = node.name

    return [(node, _labels(_MAP_LABELS, row)) for row, node in rows.items()]


def _legacy_map_families(rows: Iterable[tuple[str, Labels]]) -> list[Family]:
    """Builds the families POD_GPU_MAP_INFO_0, POD_GPU_MAP_INFO_1 and so on, one per row."""
    spec = families_in("seed")["POD_GPU_MAP_INFO_<n>"]
    families = []
    for number, (_, labels) in enumerate(rows):
        name = f"POD_GPU_MAP_INFO_{number}"
        sample = Sample(labels, 0.0)
        families.append(Family(name, spec.type, spec.help, (sample,)))
    return families


def metric_name(node: str) -> str:
    """Converts a node name to a metric name: `gpu-1.lab` becomes `gpu_1:lab_info`.

    `-` becomes `_` and `.` becomes `:`. Other special characters, which Kubernetes does not allow
    in node names, become `::<hex>:`. A name that begins with a digit gets the prefix `_`.
    """
    replacements = {"-": "_", ".": ":"}

    def escape(match: re.Match[str]) -> str:
        character = match[0]
        return replacements.get(character, f"::{ord(character):x}:")

    name = re.sub(r"[^a-zA-Z0-9]", escape, node)
    if name[:1].isdigit():
        return f"_{name}_info"

    return f"{name}_info"


# GPUs in use, as in gpu-utilization-metric-exporter


def _used_families(state: ClusterState, rolling: Mapping[Scope, float]) -> list[Family]:
    average = []
    used = state.used.get(CLUSTER)
    if used is not None:
        percent = used.mean * (100 / state.settings.full)
        average.append(Sample(NO_LABELS, percent))

    families = make_families("seed", {"avg_GPU_utilization": average})
    return families + _group_families(_list_used(state, rolling))


def _list_used(state: ClusterState, rolling: Mapping[Scope, float]) -> Iterator[_NamedSample]:
    for scope, used in sorted(state.used.items()):
        labels = _scope_labels(scope)
        yield "podgpu_used_gpu_utilization_ratio", Sample(labels, used.mean / state.settings.full)
        yield "podgpu_used_gpus", Sample(labels, used.devices)

    window = ("window", duration_text(state.settings.window))
    for scope, mean in sorted(rolling.items()):
        labels = _scope_labels(scope, window)
        yield "podgpu_used_gpu_utilization_average_ratio", Sample(labels, mean)


def _scope_labels(scope: Scope, *more: tuple[str, str]) -> Labels:
    pairs = list(more)
    for name, value in zip(Scope._fields, scope, strict=True):
        if value:
            pairs.append((name, value))
    return Labels(pairs)


# Idle holders


def _list_idle(state: ClusterState) -> Iterator[_NamedSample]:
    idle_since: dict[Pairs, float] = {}
    for node in _fresh(state):
        for part in node.held:
            since = wasteful_since(part, state.taken_at, state.settings.idle_after)
            if since is None or not part.holder.has_labels:
                continue

            labels = _list_device_labels(node, part)
            # A pod has all of its labels, also empty ones. Other holders have only known ones.
            for name, text in holder_names(part.holder).items():
                if text or part.holder.pod:
                    labels.append((name, text))

            key = tuple(labels)
            idle_since[key] = min(since, idle_since.get(key, since))

    name = "podgpu_idle_allocated_gpu_since_timestamp_seconds"
    for pairs, since in idle_since.items():
        yield name, Sample(Labels(pairs), round(since, 3))


def _list_slow(state: ClusterState) -> Iterator[_NamedSample]:
    for key, slow in state.slow.items():
        gpu = state.jobs[key][slow.device]
        labels = _list_device_labels(gpu.node, gpu.parts[0])
        labels += [
            ("namespace", key.namespace),
            ("owner_kind", key.kind),
            ("owner_name", key.name),
            ("reason", slow.reason),
            ("against", slow.against),
        ]
        if key.cluster:
            labels.append(("cluster", key.cluster))

        sample = Sample(Labels(labels), round(slow.difference, 4))
        yield "podgpu_gpu_slower_than_siblings_ratio", sample


def _list_device_labels(node: NodeEntry, part: HeldPart) -> list[tuple[str, str]]:
    place = _place(node, part.gpu, part.instance)
    labels = list(zip(_PLACE_LABELS, place, strict=True))
    if part.instance is not None:
        labels.append(("gpu_instance", str(part.instance.id)))
    return labels


def _place(
    node: NodeEntry, gpu: DeviceState, instance: MigInstance | None
) -> tuple[str, str, str, str]:
    index = "" if gpu.index is None else str(gpu.index)
    return node.name, index, gpu_id(gpu), device_model(gpu, instance)


# Counts. In MIG mode, the instances are counted instead of the GPU, and `model` contains the MIG
# profile.


_Counts = dict[tuple[str, ...], Counter[str]]


def _list_counts(state: ClusterState) -> Iterator[_NamedSample]:
    by_node: _Counts = defaultdict(Counter)
    by_model: _Counts = defaultdict(Counter)
    for node in _fresh(state):
        for gpu in node.gpus:
            devices: list[MigInstance | None] = []
            devices += [instance for instance in gpu.instances if not instance.hidden]
            if not devices:
                devices = [None]
            for instance in devices:
                model = device_model(gpu, instance)
                counts = _count_device(gpu, instance or gpu)
                by_node[node.name, model].update(counts)
                by_model[(model,)].update(counts)

    yield from _name_counts("node", ("node", "model"), by_node)
    yield from _name_counts("model", ("model",), by_model)


def _count_device(gpu: DeviceState, device: GpuOrInstance) -> dict[str, int]:
    """Returns what the device adds to each count: 0 or 1.

    As on the web page, a device is in use if its utilisation is above 0. Omits this count if the
    utilisation is unknown.
    """
    is_held = bool(holders_of(gpu, device))
    # The families are printed in this order.
    counts = {"gpus": 1, "allocated_gpus": int(is_held)}
    ratio = device_utilization(device)
    if ratio is not None:
        counts["used_gpus"] = int(ratio > 0)
    counts["free_gpus"] = int(not is_held)
    return counts


def _name_counts(scope: str, names: Sequence[str], groups: _Counts) -> Iterator[_NamedSample]:
    for key, counts in sorted(groups.items()):
        labels = _labels(names, key)
        for name, count in counts.items():
            yield f"podgpu_{scope}_{name}", Sample(labels, count)


def _namespace_families(state: ClusterState) -> list[Family]:
    groups: dict[tuple[str, str, str], list[HeldPart]] = defaultdict(list)
    for node in _fresh(state):
        for part in node.held:
            # Each MIG instance counts as a GPU. Its GPU does not, as in `_list_counts`.
            is_gpu_of_instances = part.instance is None and part.gpu.instances
            if part.holder.namespace and not is_gpu_of_instances:
                model = device_model(part.gpu, part.instance)
                groups[part.holder.namespace, model, part.cluster].append(part)

    allocated = []
    used = []
    idle = []
    for key, parts in sorted(groups.items()):
        labels = _labels(("namespace", "model", "cluster"), key)
        sums = sum_held(parts, by_device=True)
        long_idle = 0.0
        for part in parts:
            if wasteful_since(part, state.taken_at, state.settings.idle_after) is not None:
                long_idle += part.share

        allocated.append(Sample(labels, round(sums.allocated, 9)))
        idle.append(Sample(labels, round(long_idle, 9)))
        # If nothing is known, what is used is absent, not 0.
        if sums.used or sums.idle or not sums.unknown:
            used.append(Sample(labels, round(sums.used, 9)))

    samples = {
        "podgpu_namespace_allocated_gpus": allocated,
        "podgpu_namespace_used_gpus": used,
        "podgpu_namespace_long_idle_gpus": idle,
        # The older name.
        "podgpu_namespace_idle_gpus": idle,
    }
    return make_families("cluster", samples)


# Costs


def _list_costs(state: ClusterState) -> Iterator[_NamedSample]:
    """Yields costs and waste of each namespace, and what nobody has allocated."""
    groups: dict[tuple[str, str], list[HeldPart]] = defaultdict(list)
    unallocated: dict[str, WasteRate] = defaultdict(WasteRate)  # by cluster
    for node in state.nodes:
        for part in node.held:
            groups[part.holder.namespace, part.cluster].append(part)

        held = node.held_by_device()
        cluster = node.reading.cluster
        for gpu in node.gpus:
            unheld = find_unheld(node, gpu, held)
            unallocated[cluster] = unallocated[cluster].plus(unheld.unallocated)

    currency = state.prices.currency
    for (namespace, cluster), parts in sorted(groups.items()):
        sums = sum_held(parts)
        yield from _list_waste(sums.waste or WasteRate(), namespace, currency, cluster)
        if namespace and sums.cost_per_hour is not None and sums.wasted_per_hour is not None:
            labels = _labels(("namespace", "currency", "cluster"), (namespace, currency, cluster))
            yield "podgpu_namespace_cost_per_hour", Sample(labels, sums.cost_per_hour)
            yield "podgpu_namespace_wasted_per_hour", Sample(labels, sums.wasted_per_hour)

    for cluster, waste in sorted(unallocated.items()):
        yield from _list_waste(waste, "", currency, cluster)


def _list_waste(
    waste: WasteRate, namespace: str, currency: str, cluster: str
) -> Iterator[_NamedSample]:
    cost = waste.cost_per_hour or Waste()
    parts = (
        ("podgpu_waste_gpus", waste.gpus, ""),
        ("podgpu_waste_cost_per_hour", cost, currency),
    )
    for name, amounts, unit in parts:
        for kind, amount in asdict(amounts).items():
            if amount is not None:
                labels = _some_labels(_WASTE_LABELS, (kind, namespace, unit, cluster))
                yield name, Sample(labels, round(amount, 9))


def _list_prices(state: ClusterState) -> Iterator[_NamedSample]:
    currency = state.prices.currency
    if not currency:
        return

    # With prices by node label, a model may have several prices. Then it has no sample.
    prices: dict[tuple[str, str, str], set[float | None]] = defaultdict(set)
    for node in state.nodes:
        cluster = node.reading.cluster
        for gpu in node.gpus:
            for instance in (None, *gpu.instances):
                profile = "" if instance is None else instance.profile
                model = device_model(gpu, instance)
                price = node.prices.of(model)
                prices[gpu.model, profile, cluster].add(price.gpu_hour)

    if state.totals_only is not None and not state.prices.label_names:
        for cluster, model in state.totals_only.models:
            price = state.prices.of(model)
            prices[model, "", cluster].add(price.gpu_hour)

    for (model, profile, cluster), hours in sorted(prices.items()):
        if len(hours) > 1:
            continue

        (hour,) = hours
        if hour is not None:
            labels = _some_labels(_PRICE_LABELS, (model, profile, currency, cluster))
            yield "podgpu_gpu_price_per_hour", Sample(labels, hour)


def _list_tokens(state: ClusterState) -> Iterator[_NamedSample]:
    if not state.settings.export_tokens:
        return

    # By container, because each GPU that a container holds has the same engine.
    engines: dict[tuple[ContainerName, str], EngineState] = {}
    for node in state.nodes:
        for part in node.held:
            if part.engine is not None and part.engine.engine:
                engines[container_name(part.holder), part.cluster] = part.engine

    for (container, cluster), engine in sorted(engines.items()):
        tokens = {"prompt": engine.counted.prompt, "generation": engine.counted.generated}
        for kind, count in tokens.items():
            labels = _some_labels(_TOKEN_LABELS, (kind, *container, cluster))
            yield "podgpu_container_llm_tokens_total", Sample(labels, count)


def _list_budgets(state: ClusterState) -> Iterator[_NamedSample]:
    for budget in state.budgets:
        values = (budget.namespace, budget.label, budget.value, budget.currency)
        labels = _some_labels(_BUDGET_LABELS, values)
        yield "podgpu_budget_ratio", Sample(labels, budget.ratio)
        if budget.forecast_ratio is not None:
            yield "podgpu_budget_forecast_ratio", Sample(labels, budget.forecast_ratio)


def _list_savings(savings: SavingsFigures) -> Iterator[_NamedSample]:
    currency = ("currency", savings.currency)
    groups = {"podgpu_savings": savings.kinds, "podgpu_savings_pod": savings.pods}
    for name, rows in groups.items():
        for row in rows:
            values = (row.kind, row.namespace, row.pod, row.model, row.target, row.cluster)
            labels = _some_labels(_SAVINGS_LABELS, values)
            yield f"{name}_gpus", Sample(labels, round(row.gpus, 4))
            if row.cost is not None:
                priced = Labels([*labels.pairs, currency])
                yield f"{name}_cost_per_month", Sample(priced, round(row.cost, 2))

    error = savings.prediction_error_ratio
    if error is not None:
        yield "podgpu_savings_prediction_error_ratio", Sample(NO_LABELS, error)


def _list_health(state: ClusterState) -> Iterator[_NamedSample]:
    """Yields one sample of the condition `node_gone` per GPU.

    The exporters report all other conditions.
    """
    names = (*_PLACE_LABELS, "condition")
    for node in state.nodes:
        for gpu in node.gpus:
            labels = _labels(names, (*_place(node, gpu, None), NODE_GONE))
            yield "podgpu_device_health", Sample(labels, int(node.gone))


def _fresh(state: ClusterState) -> Iterator[NodeEntry]:
    return (node for node in state.nodes if not node.stale)
