"""Reads a part of the GPUs from Prometheus, if there are too many to read all of them in every round.

Prometheus finds, sorts and counts the GPUs that match a request. Then only the series of their exporters are read.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace as replace_members

from podgpu.cluster.collect import ClusterReading
from podgpu.cluster.loop import Cluster, PublishedState
from podgpu.cluster.prices import ReadPrices
from podgpu.cluster.prometheus import (
    BROKEN,
    FB_FREE,
    FB_USED,
    TEMPERATURE,
    UTIL,
    PrometheusClient,
    PrometheusCollector,
    PrometheusServer,
    by,
    escape,
    field_query,
    one_of,
    quote,
    select,
    split,
)
from podgpu.cluster.state import ClusterState, build_cluster_state
from podgpu.errors import SourceError, UsageError
from podgpu.metrics.adapter import MODEL_LABELS, POD_LABEL_VARIANTS, UUID_LABELS, read_gpu_id
from podgpu.metrics.names import names_of
from podgpu.metrics.parse import ParsedSample

_TIMEOUT = 30.0
_MAX_REQUESTS = 50  # different requests per round, because each of them loads Prometheus
_TARGETS_PER_QUERY = 20  # VictoriaMetrics rejects queries of more than 16 KiB
_GPUS = names_of(TEMPERATURE)
_HOLDERS = ("podgpu_allocation_info", *names_of(UTIL))
_CONDITIONS = ("podgpu_device_condition_since_timestamp_seconds",)
_USE = ("podgpu_container_gpu_utilization_ratio",)
_IDLE = ("podgpu_container_gpu_idle_seconds_total",)
_OWNERS = ("podgpu:pod_owner:info",)


class GpuQuery(msgspec.Struct, frozen=True):
    """The parameters of `/api/v1/view`. An empty parameter matches every GPU."""

    cluster: str = ""
    ns: str = ""
    pod: str = ""
    owner: str = ""  # KIND/NAME
    node: str = ""  # NODE, or CLUSTER/NODE
    model: str = ""
    gpu: str = ""  # UUID
    state: Literal["", "held", "free", "used", "idle", "broken"] = ""
    q: str = ""  # words; each must occur in the name of the node, model, namespace or pod, or in the UUID
    sort: Literal["", "broken", "idle", "utilization", "memory"] = ""  # highest first; if empty, by node
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    offset: Annotated[int, Meta(ge=0, le=10_000_000)] = 0


def parse_gpu_query(query: Mapping[str, str]) -> GpuQuery | None:
    """Returns None if no parameter is given. Raises UsageError."""
    given = {name: query[name] for name in GpuQuery.__struct_fields__ if query.get(name)}
    try:
        return msgspec.convert(given, GpuQuery, strict=False) if given else None
    except msgspec.ValidationError as error:
        raise UsageError(str(error)) from error


class PrometheusSelection:
    """Answers requests for a pod, a GPU or a page of GPUs. Equal requests share a result until the next round."""

    def __init__(self, server: PrometheusServer, cluster: Cluster, prices: ReadPrices) -> None:
        self._server = replace(server, timeout=_TIMEOUT)
        self._cluster = cluster
        self._prices = prices
        self._state: ClusterState | None = None
        self._results: dict[GpuQuery, asyncio.Task[PublishedState]] = {}

    async def __call__(self, query: GpuQuery) -> PublishedState:
        """Raises SourceError."""
        state = self._cluster.published.state
        if state is not self._state:
            self._state, self._results = state, {}
        if query not in self._results:
            if len(self._results) >= _MAX_REQUESTS:
                raise SourceError("busy", "too many different requests to Prometheus")
            self._results[query] = asyncio.create_task(self._read(query, state))
        try:
            return await asyncio.shield(self._results[query])
        except SourceError:
            self._results.pop(query, None)
            raise

    async def _read(self, query: GpuQuery, state: ClusterState) -> PublishedState:
        async with aclosing(PrometheusClient(self._server)) as client:
            found, gpus = await _find_gpus(client, self._server, query)
        readings = [
            await self._read_targets(instances, state)
            for instances in split(sorted({instance for instance, _ in gpus}), _TARGETS_PER_QUERY)
        ]
        nodes = []
        for node in (node for reading in readings for node in reading.nodes):
            devices = tuple(d for d in node.state.devices if (node.target, d.uuid or str(d.index)) in gpus)
            if devices:
                nodes.append(replace(node, state=replace_members(node.state, devices=devices)))
        reading = ClusterReading(
            nodes=tuple(nodes),
            notes=tuple(dict.fromkeys((*state.notes, *(note for reading in readings for note in reading.notes)))),
            owners=state.owners,
            idle_for={key: seconds for reading in readings for key, seconds in reading.idle_for.items()},
        )
        now, wall, prices = self._cluster.clock.monotonic(), self._cluster.clock.wall(), self._prices()[0]
        selected = build_cluster_state(reading, None, self._cluster.settings, now, wall, prices=prices)
        return PublishedState(replace(selected, fleet=state.fleet, found=found, used={}))

    async def _read_targets(self, instances: Iterable[str], state: ClusterState) -> ClusterReading:
        collector = PrometheusCollector(
            self._server,
            replace(self._cluster.settings, max_gpus=math.inf),
            owners=lambda: state.owners,
            label_names=lambda: self._prices()[0].label_names,
            clock=self._cluster.clock,
            targets=one_of("instance", instances),
            has_clusters=state.fleet is not None and state.fleet.has_clusters,
        )
        try:
            await collector.run_round()
        finally:
            await collector.close()
        [outcome] = collector.reading().outcomes
        if outcome.error and not collector.reading().nodes:
            raise SourceError(outcome.error, outcome.message)
        return collector.reading()


async def _find_gpus(
    client: PrometheusClient, server: PrometheusServer, query: GpuQuery
) -> tuple[int, set[tuple[str, str]]]:
    """Returns the number of all GPUs that match, and the instance and UUID of those on the requested page."""
    cluster, _, node = query.node.rpartition("/")
    cluster = query.cluster or cluster
    where = (f"{server.cluster_label}={quote(cluster)}" if cluster else "", server.match)
    keys = (server.cluster_label, "instance", *UUID_LABELS)
    conditions = _write_conditions(query, node, server, where, f"on ({', '.join(keys)})")
    is_broken = "broken" in (query.state, query.sort)
    names = (_CONDITIONS, BROKEN) if is_broken else (_GPUS, "")

    def matching(*matchers: str) -> str:
        return f"group {by(*keys, *server.node_labels)} ({select(*names, *matchers, *where)}){conditions}"

    first, last = query.offset, query.offset + query.limit
    if query.sort:
        values = f"topk({last}, ({_write_values(query.sort, by(*keys), where)}){conditions})"
        total, samples = await asyncio.gather(client.query(f"count({matching()})"), client.query(values))
        samples.sort(key=lambda sample: (-sample.value, _read_key(sample)))
        return round(sum(count.value for count in total)), set(map(_read_key, samples[first:last]))
    order = (server.cluster_label, *server.node_labels)
    targets = await client.query(f"count {by('instance', *order)} ({matching()})")
    targets.sort(key=lambda sample: [sample.labels.get(name, "") for name in order])
    found, instances = 0, set()
    for sample in targets:
        if first <= found < last:
            instances.add(sample.labels.get("instance", ""))
        found += round(sample.value)
    parts = split(sorted(instances), _TARGETS_PER_QUERY)
    pages = [await client.query(matching(one_of("instance", part))) for part in parts]
    return found, {_read_key(sample) for page in pages for sample in page}


def _read_key(sample: ParsedSample) -> tuple[str, str]:
    return sample.labels.get("instance", ""), read_gpu_id(sample.labels)


def _write_conditions(query: GpuQuery, node: str, server: PrometheusServer, where: Sequence[str], on_gpu: str) -> str:
    """Returns PromQL that follows a query for GPUs and removes the GPUs that do not match."""
    names = (  # value of a parameter, series and labels in which it is searched
        (node, _GPUS, server.node_labels),
        (query.gpu, _GPUS, UUID_LABELS),
        (query.model, _GPUS, MODEL_LABELS),
        (query.ns, _HOLDERS, [row[0] for row in POD_LABEL_VARIANTS]),
        (query.pod, _HOLDERS, [row[1] for row in POD_LABEL_VARIANTS]),
    )

    def any_of(series: Sequence[str], labels: Iterable[str], test: str) -> str:
        return " or ".join(select(series, f"{label}{test}", *where) for label in labels)

    conditions = [any_of(series, labels, f"={quote(name)}") for name, series, labels in names if name]
    for word in query.q.split():
        test = f"=~{quote(f'(?i).*{escape(word)}.*')}"
        conditions.append(" or ".join(any_of(series, labels, test) for _, series, labels in names))
    held, used = select(_HOLDERS[:1], *where), f"{select(_USE, *where)} > 0"
    if query.owner:
        kind, _, name = query.owner.rpartition("/")
        owner = select(_OWNERS, f"owner_kind={quote(kind)}", f"owner_name={quote(name)}", *where)
        conditions.append(f"{held} and on ({server.cluster_label}, namespace, pod) last_over_time({owner}[10m])")
    if query.state in ("held", "idle", "used"):
        conditions.append(used if query.state == "used" else held)
    text = "".join(f" and {on_gpu} ({condition})" for condition in conditions)
    excluded = {"free": held, "idle": used}.get(query.state)
    return f"{text} unless {on_gpu} ({excluded})" if excluded else text


def _write_values(sort: str, labels: str, where: Sequence[str]) -> str:
    """Returns a query for the values by which GPUs are sorted."""
    used, free, utilization = (
        f"({field_query(number, labels, lambda names: select(names, *where))})" for number in (FB_USED, FB_FREE, UTIL)
    )
    return {
        "broken": f"count {labels} ({select(_CONDITIONS, BROKEN, *where)})",
        "idle": f"max {labels} (increase({select(_IDLE, *where)}[1h]))",
        "utilization": utilization,
        "memory": f"{used} / ({used} + {free})",
    }[sort]
