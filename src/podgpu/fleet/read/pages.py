"""Reads the nodes that a request selects from Prometheus.

Used if there are too many GPUs to read in every round.

Prometheus finds and sorts the nodes with matching GPUs. podgpu then reads only the series of one
page of these nodes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta
from msgspec.structs import replace as replace_members

from podgpu.errors import SourceError, UsageError, utc_text
from podgpu.fleet.prices import ReadPrices
from podgpu.fleet.read.prometheus import (
    BROKEN,
    PrometheusClient,
    PrometheusCollector,
    PrometheusServer,
)
from podgpu.fleet.readings import ClusterReading, NodeReading
from podgpu.fleet.round import Cluster, PublishedState
from podgpu.fleet.state import ClusterState, build_cluster_state
from podgpu.metrics.adapter import MODEL_LABELS, POD_LABEL_VARIANTS, UUID_LABELS
from podgpu.metrics.fields import FB_FREE, FB_USED, TEMPERATURE, UTIL, names_of
from podgpu.metrics.promql import by, escape, field_query, one_of, quote, select

PAGE_SIZE = 20  # nodes; VictoriaMetrics rejects queries of more than 16 KiB
_TIMEOUT = 30.0
_GPUS_PER_QUERY = 30  # each UUID is in the longest query eleven times
_MAX_READS = 4  # at the same time
_MAX_REQUESTS = 50  # limit of different requests per round, to protect Prometheus
_GPUS = names_of(TEMPERATURE)
_HOLDERS = ("podgpu_allocation_info", *names_of(UTIL))
_CONDITIONS = ("podgpu_device_condition_since_timestamp_seconds",)
_USE = ("podgpu_container_gpu_utilization_ratio",)
_IDLE = ("podgpu_container_gpu_idle_seconds_total",)
_OWNERS = ("podgpu:pod_owner:info",)


class TargetGpu(NamedTuple):
    """A GPU, with the address of its exporter."""

    cluster: str
    instance: str
    uuid: str


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
    # words; each must occur in the name of the node, model, namespace or pod, or in the UUID
    q: str = ""
    # by a node's highest value; if empty, by name
    sort: Literal["", "broken", "idle", "utilization", "memory"] = ""
    page: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    at: float | None = None  # a past Unix time


_VALID = {
    "state": "use held, free, used, idle or broken",
    "sort": "use broken, idle, utilization or memory",
    "page": "write a number from 1 to 1000000",
    "at": "write a Unix time in seconds",
}
"""What to write instead of an invalid value. The other parameters may have any value."""


def parse_gpu_query(query: Mapping[str, str]) -> GpuQuery | None:
    """Returns None if no parameter is given. Raises UsageError."""
    parameters = {name: query[name] for name in GpuQuery.__struct_fields__ if query.get(name)}
    if not parameters:
        return None

    # Each is checked alone, because msgspec's error does not name the parameter.
    for name, text in parameters.items():
        try:
            msgspec.convert({name: text}, GpuQuery, strict=False)
        except msgspec.ValidationError as error:
            message = f"{name}={text[:60]!a}: {_VALID[name]}"
            raise UsageError(message, parameter=name) from error

    return msgspec.convert(parameters, GpuQuery, strict=False)


@dataclass(eq=False)
class PrometheusSelection:
    """Answers requests for a GPU, a pod or a page of nodes.

    Equal requests share a result until the next round.
    """

    _server: PrometheusServer
    _cluster: Cluster
    _prices: ReadPrices
    _state: ClusterState | None = None
    _results: dict[GpuQuery, asyncio.Task[PublishedState]] = field(default_factory=dict)

    async def __call__(self, query: GpuQuery) -> PublishedState:
        """Returns the nodes that match, and the totals of all nodes. Raises SourceError."""
        state = self._cluster.published.state
        if state is not self._state:
            self._state = state
            self._results = {}

        if query not in self._results:
            if len(self._results) >= _MAX_REQUESTS:
                raise SourceError("busy", "too many different requests to Prometheus")
            self._results[query] = asyncio.create_task(self._read(query, state))

        try:
            # The others that wait for it still need it if this request is cancelled.
            return await asyncio.shield(self._results[query])
        except SourceError:
            # The next request tries again.
            self._results.pop(query, None)
            raise

    async def read_gpus(self, gpus: Sequence[TargetGpu]) -> ClusterState:
        """Reads only these GPUs. Raises SourceError."""
        state = self._cluster.published.state
        limit = asyncio.Semaphore(_MAX_READS)

        async def read(chunk: Sequence[TargetGpu]) -> ClusterReading:
            matcher = one_of("UUID", [gpu.uuid for gpu in chunk])
            targets = [(gpu.cluster, gpu.instance) for gpu in chunk]
            async with limit:
                return await self._read_targets(state, targets, at=None, matcher=matcher)

        ordered = sorted(gpus)
        reads = []
        for first in range(0, len(ordered), _GPUS_PER_QUERY):
            reads.append(read(ordered[first : first + _GPUS_PER_QUERY]))

        nodes: dict[tuple[str, str], NodeReading] = {}
        idle_for: dict[str, float] = {}
        for reading in await asyncio.gather(*reads):
            idle_for |= reading.idle_for
            for node in reading.nodes:
                _add_devices(nodes, node)

        merged = ClusterReading(
            tuple(nodes.values()),
            owners=state.owners,
            kept_pods=state.kept_pods,
            idle_for=idle_for,
        )
        return self._build(state, merged, at=None)

    async def _read(self, query: GpuQuery, state: ClusterState) -> PublishedState:
        if query.at is not None:
            state = await self._collect(state, (), query.at)
            # If it has only totals, one page of the nodes is read below.
            if state.totals_only is None:
                if not state.nodes:
                    raise UsageError(f"Prometheus has no GPU metrics at {utc_text(query.at)}")
                return PublishedState(state)

        server = replace(self._server, timeout=_TIMEOUT)
        async with aclosing(PrometheusClient(server)) as client:
            matching = await _find_targets(client, self._server, query)

        last = query.page * PAGE_SIZE
        targets = matching[last - PAGE_SIZE : last]
        if not targets:
            return PublishedState(replace(state, matching_nodes=len(matching)))

        selected = await self._collect(state, targets, query.at)
        # The means of a page are not those of the cluster.
        page = replace(
            selected, totals_only=state.totals_only, matching_nodes=len(matching), used={}
        )
        return PublishedState(page)

    async def _collect(
        self, state: ClusterState, targets: Sequence[tuple[str, str]], at: float | None
    ) -> ClusterState:
        """Reads the targets (cluster, address).

        Without targets, reads all of them, or totals if there are too many.
        """
        reading = await self._read_targets(state, targets, at)
        return self._build(state, reading, at)

    def _build(
        self, state: ClusterState, reading: ClusterReading, at: float | None
    ) -> ClusterState:
        clock = self._cluster.clock
        wall = clock.wall() if at is None else at
        # Notes and alerts say what to do now.
        notes = state.notes if at is None else ()
        prices, _ = self._prices()
        built = build_cluster_state(
            reading,
            None,
            self._cluster.settings,
            clock.monotonic(),
            wall,
            prices=prices.at(wall),
            notes=notes,
        )
        if at is None:
            return built
        return replace(built, is_past=True, alerts=())

    async def _read_targets(
        self,
        state: ClusterState,
        targets: Sequence[tuple[str, str]],
        at: float | None,
        matcher: str = "",
    ) -> ClusterReading:
        """`matcher`: selects other series than all of these targets. Raises SourceError."""
        settings = self._cluster.settings
        if targets:
            settings = replace(settings, max_gpus=math.inf)
            matcher = matcher or one_of("instance", [instance for _, instance in targets])

        collector = PrometheusCollector(
            self._server,
            settings,
            owners=lambda: state.owners,
            label_names=lambda: self._prices()[0].label_names,
            clock=self._cluster.clock,
            targets=matcher,
            has_clusters=state.totals_only is not None and state.totals_only.has_clusters,
            at=at,
        )
        try:
            reading = await collector.run_round()
        finally:
            await collector.close()

        outcome = reading.outcomes[0]
        if outcome.error and not reading.nodes:
            raise SourceError(outcome.error, outcome.message)
        if not targets:
            return reading

        # Exporters of two clusters may have the same address, so compare the cluster, too.
        nodes = []
        for node in reading.nodes:
            if not node.cluster or (node.cluster, node.target) in targets:
                nodes.append(node)

        return replace(reading, nodes=tuple(nodes))


def _add_devices(nodes: dict[tuple[str, str], NodeReading], node: NodeReading) -> None:
    """Adds a node, or its GPUs if the node is there: they may be in several readings."""
    key = node.cluster, node.target
    earlier = nodes.get(key)
    if earlier is not None:
        devices = (*earlier.state.devices, *node.state.devices)
        node = replace_members(earlier, state=replace_members(earlier.state, devices=devices))
    nodes[key] = node


async def _find_targets(
    client: PrometheusClient, server: PrometheusServer, query: GpuQuery
) -> list[tuple[str, str]]:
    """Returns the cluster and address of each exporter with a matching GPU, sorted as requested."""
    # A node is written as NODE or CLUSTER/NODE.
    cluster_of_node, _, node = query.node.rpartition("/")
    cluster = query.cluster or cluster_of_node
    where = [server.match]
    if cluster:
        where.insert(0, f"{server.cluster_label}={quote(cluster)}")

    gpu_labels = [server.cluster_label, "instance", *UUID_LABELS]
    labels = [server.cluster_label, *server.node_labels, "instance"]
    if query.sort:
        gpus = _write_values(query.sort, by(*gpu_labels), where)
        # The values have no labels of nodes.
        labels = [server.cluster_label, "instance"]
    elif query.state == "broken":
        gpus = select(_CONDITIONS, BROKEN, *where)
    else:
        gpus = select(_GPUS, *where)

    on_gpu = f"on ({', '.join(gpu_labels)})"
    conditions = _write_conditions(query, node, server, where, on_gpu)
    selected = f"max {by(*labels)} (({gpus}){conditions})"
    samples = await client.query(selected, query.at)

    samples.sort(key=lambda sample: [sample.labels.get(label, "") for label in labels])
    if query.sort:
        samples.sort(key=attrgetter("value"), reverse=True)

    targets = []
    for sample in samples:
        address = sample.labels.get("instance", "")
        targets.append((server.cluster_of(sample.labels), address))

    return targets


def _write_conditions(
    query: GpuQuery, node: str, server: PrometheusServer, where: Sequence[str], on_gpu: str
) -> str:
    """Returns PromQL to append to a query for GPUs. It keeps only the GPUs that match."""
    namespace_labels = [namespace for namespace, *_ in POD_LABEL_VARIANTS]
    pod_labels = [pod for _, pod, *_ in POD_LABEL_VARIANTS]
    # Each parameter, with the series and the labels in which to search for it.
    names = (
        (node, _GPUS, server.node_labels),
        (query.gpu, _GPUS, UUID_LABELS),
        (query.model, _GPUS, MODEL_LABELS),
        (query.ns, _HOLDERS, namespace_labels),
        (query.pod, _HOLDERS, pod_labels),
    )

    conditions = []
    for name, series, labels in names:
        if name:
            test = f"={quote(name)}"
            conditions.append(_write_any(series, labels, test, where))

    for word in query.q.split():
        pattern = f"(?i).*{escape(word)}.*"
        test = f"=~{quote(pattern)}"
        matches = [_write_any(series, labels, test, where) for _, series, labels in names]
        conditions.append(" or ".join(matches))

    if query.owner:
        conditions.append(_write_owner(query.owner, server, where))

    text = "".join(f" and {on_gpu} ({condition})" for condition in conditions)
    return text + _write_state(query.state, where, on_gpu)


def _write_any(
    series: Sequence[str], labels: Iterable[str], test: str, where: Sequence[str]
) -> str:
    """Returns PromQL for the series of which any of the labels passes the test."""
    return " or ".join(select(series, f"{label}{test}", *where) for label in labels)


def _write_owner(text: str, server: PrometheusServer, where: Sequence[str]) -> str:
    """`text`: KIND/NAME."""
    kind, _, name = text.rpartition("/")
    is_kind = f"owner_kind={quote(kind)}"
    is_name = f"owner_name={quote(name)}"
    owner = select(_OWNERS, is_kind, is_name, *where)
    on_pod = f"on ({server.cluster_label}, namespace, pod)"
    held = select(_HOLDERS[:1], *where)
    return f"{held} and {on_pod} last_over_time({owner}[10m])"


def _write_state(state: str, where: Sequence[str], on_gpu: str) -> str:
    """Returns the end of the query: it keeps only the GPUs in this state."""
    held = f"{on_gpu} ({select(_HOLDERS[:1], *where)})"
    used = f"{on_gpu} ({select(_USE, *where)} > 0)"
    broken = f"{on_gpu} ({select(_CONDITIONS, BROKEN, *where)})"
    ends = {
        "held": f" and {held}",
        "free": f" unless {held}",
        "used": f" and {used}",
        "idle": f" and {held} unless {used}",
        "broken": f" and {broken}",
    }
    return ends.get(state, "")


def _write_values(sort: str, labels: str, where: Sequence[str]) -> str:
    """Returns a query for the values by which nodes are sorted."""

    def select_matching(names: Sequence[str]) -> str:
        return select(names, *where)

    def write_field(field: str) -> str:
        return f"({field_query(field, labels, select_matching)})"

    if sort == "broken":
        return f"count {labels} ({select(_CONDITIONS, BROKEN, *where)})"
    if sort == "idle":
        return f"max {labels} (increase({select(_IDLE, *where)}[1h]))"
    if sort == "utilization":
        return write_field(UTIL)

    # The sort order "memory": the fraction in use.
    used = write_field(FB_USED)
    return f"{used} / ({used} + {write_field(FB_FREE)})"
