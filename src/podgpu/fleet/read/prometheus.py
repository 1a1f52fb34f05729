"""Client for Prometheus and compatible servers, and the collector that reads the nodes with instant
queries.

The server also provides idle times and pod owners, so that a restart of podgpu loses no data.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import aiohttp
import msgspec
from msgspec.structs import replace as replace_members

from podgpu.clock import Clock
from podgpu.errors import SourceError, UsageError, one_line
from podgpu.fleet.readings import (
    ClusterReading,
    FleetCounts,
    NodeReading,
    Owners,
    TargetOutcome,
    ViewSettings,
)
from podgpu.http_client import Access, HttpClient, open_session
from podgpu.metrics.adapter import (
    NODE_LABELS,
    UUID_LABELS,
    PodName,
    TargetState,
    nodes_from_vectors,
    read_device_key,
)
from podgpu.metrics.fields import TEMPERATURE, UTIL
from podgpu.metrics.mig import billed_name
from podgpu.metrics.parse import ParsedSample
from podgpu.metrics.promql import (
    by,
    field_names,
    idle_query,
    one_of,
    own_names,
    quote,
    select,
    series_queries,
)
from podgpu.model import NodeState, WorkloadOwner

_OWNER_SECONDS = (
    60.0  # time between queries for unknown owners; kube-state-metrics may report new pods late
)
_PODS_PER_QUERY = 100  # VictoriaMetrics rejects queries of more than 16 KiB

MAX_ANSWER_BYTES = 32 * 1024 * 1024  # twice the response for 8,000 GPUs
MAX_NOTES = 5
_CONCURRENCY = 5  # a quarter of the 20 queries that Prometheus runs at a time by default
_MAX_TEXT = 300
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
BROKEN = 'condition!="unallocated_use"'
RULE_LABELS = (
    "kind",
    "namespace",
    "owner_kind",
    "owner_name",
    "hpc_job",
    "modelName",
    "GPU_I_PROFILE",
)
USAGE_RULE = "podgpu:usage:increase5m"
_NO_RULE = (
    "allocated, used and idle GPUs and cost are not known, because Prometheus lacks the "
    f"recording rule {USAGE_RULE}:"
    " set rules.enabled in podgpu's Helm chart, or add its file podgpu-usage.yaml to Prometheus "
    "or vmalert"
)


# Requests


@dataclass(frozen=True, slots=True)
class PrometheusServer:
    """Options of --prometheus."""

    url: str
    access: Access = field(default_factory=Access)
    match: str = ""  # label matchers that are added to every selector
    node_labels: tuple[str, ...] = NODE_LABELS
    cluster_label: str = "cluster"
    timeout: float = 10.0  # seconds for one query

    def __post_init__(self) -> None:
        for option, names in (
            ("--node-label", self.node_labels or ("",)),
            ("--cluster-label", (self.cluster_label,)),
        ):
            if bad := [name for name in names if not _LABEL.fullmatch(name)]:
                raise UsageError(f"{option}: {bad[0]!r} is not a valid label name")


class RangeSeries(NamedTuple):
    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]  # Unix time, value


class _Element(msgspec.Struct):
    metric: dict[str, str] = {}
    value: tuple[float, str] | None = None
    values: list[tuple[float, str]] = []


class _Data(msgspec.Struct):
    result: list[_Element]


class _Answer(msgspec.Struct, rename="camel"):
    data: _Data | None = None
    error: str = ""
    warnings: list[str] = []
    is_partial: bool = False  # set by VictoriaMetrics


_decode_answer = msgspec.json.Decoder(_Answer).decode


class PrometheusClient:
    def __init__(self, server: PrometheusServer) -> None:
        """The URL may contain a path, such as /prometheus for Mimir."""
        self._http = HttpClient(
            server.url, server.access, timeout=server.timeout, max_bytes=MAX_ANSWER_BYTES
        )
        self.name = self._http.shown
        self.notes: list[str] = []  # warnings from the server, until the caller clears them
        self._options = {
            "timeout": f"{max(1, round(server.timeout * 1000))}ms",
            "nocache": "1",  # otherwise VictoriaMetrics omits the last 30 seconds
        }
        self._session: aiohttp.ClientSession | None = None
        self._semaphore = asyncio.Semaphore(_CONCURRENCY)

    async def query_time(self) -> float:
        """Returns the Unix time of the server's clock. Raises SourceError."""
        samples = await self.query("vector(time())")
        if not samples or not 0 < samples[0].value < 1e11:
            raise SourceError(
                "malformed", f"{self.name}: no valid result for the query vector(time())"
            )
        return samples[0].value

    async def query(self, query: str, at: float | None = None) -> list[ParsedSample]:
        samples = []
        for element in await self._read(
            "api/v1/query", query, {} if at is None else {"time": f"{at:.3f}"}
        ):
            for _, value in self._to_numbers(
                [element.value] if element.value else ()
            ):  # a histogram has no value
                samples.append(
                    ParsedSample(element.metric.pop("__name__", ""), element.metric, value)
                )
        return samples

    async def query_range(
        self, query: str, start: float, end: float, step: float
    ) -> list[RangeSeries]:
        form = {"start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:g}"}
        elements = await self._read("api/v1/query_range", query, form)
        return [
            RangeSeries(element.metric, self._to_numbers(element.values)) for element in elements
        ]

    def _to_numbers(self, points: Iterable[tuple[float, str]]) -> list[tuple[float, float]]:
        """Drops values that are NaN or infinite. Raises SourceError if a value is not a number."""
        try:
            numbers = [(at, float(text)) for at, text in points]
        except ValueError as error:
            raise SourceError(
                "malformed", f"{self.name} returned an invalid value: {_shorten(str(error))}"
            ) from error
        return [point for point in numbers if math.isfinite(point[1])]

    async def _read(self, path: str, query: str, form: Mapping[str, str]) -> list[_Element]:
        """Sends the query by POST, because it may be too long for a URL. Raises SourceError."""
        form = {"query": query, **self._options, **form}
        async with self._semaphore:
            if self._session is None:
                self._session = open_session()
            response = await self._http.send(self._session, "POST", path, form, "application/json")
        status = response.status
        try:
            answer = _decode_answer(response.body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if status != 200:
                raise self._http.status_error(response) from error
            text = (
                f"{self.name} is not the base URL of a Prometheus HTTP API: it returned "
                f"unexpected JSON ({error})"
            )
            raise SourceError("malformed", text) from error
        if status in (401, 403) or (status != 200 and not answer.error):
            raise self._http.status_error(response)
        if status != 200 or answer.data is None:
            advice = "; check --match" if status in (400, 422) else ""
            reason = "query_failed" if status == 200 else f"http_{status}"
            raise SourceError(
                reason, f"{self.name} returned an error: {_shorten(answer.error)}{advice}"
            )
        if answer.is_partial:
            answer.warnings.append(
                "the response is incomplete: some of the storage nodes did not respond"
            )
        notes = map(_shorten, answer.warnings)
        self.notes = list(dict.fromkeys((*self.notes, *notes)))[:MAX_NOTES]
        return answer.data.result

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def _shorten(text: str) -> str:
    """Returns one line. Cuts the middle of a long text, because VictoriaMetrics writes the reason
    at the end.
    """
    line, half = one_line(" ".join(text.split())), _MAX_TEXT // 2
    return line if len(line) <= _MAX_TEXT else f"{line[:half]}…{line[-half:]}"


# Collecting the nodes


@dataclass(eq=False)
class PrometheusCollector:
    """Implements `Collector`."""

    server: PrometheusServer
    settings: ViewSettings
    owners: Callable[[], Owners] = (
        dict  # returns owners of pods that kube-state-metrics does not report
    )
    label_names: Callable[[], Sequence[str]] = list  # returns the names of the node labels to read
    clock: Clock = field(default_factory=Clock)
    targets: str = ""  # matcher that selects the exporters
    has_clusters: bool = (
        False  # add the cluster's name to node names, even if there is only one cluster
    )
    at: float | None = None  # Unix time to read; None: now

    def __post_init__(self) -> None:
        self._match = ",".join(filter(None, (self.targets, self.server.match)))
        self._client = PrometheusClient(self.server)
        self._owners: dict[str, PodOwners] = {}  # by cluster
        self._errors: Counter[tuple[str, str]] = Counter()
        self._reading = ClusterReading()

    async def fetch(self, target: str, path: str) -> bytes:
        raise SourceError(
            "not_available", "the figures come from Prometheus; exporters are not read directly"
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def run_round(self) -> ClusterReading:
        started = self.clock.monotonic()
        self._client.notes.clear()
        self._failures: list[tuple[str, SourceError]] = []  # name of the query, error
        try:
            await self._read_all()
        except SourceError as error:
            self._failures = [("", error)]
            self._reading = replace(self._reading, notes=())
        first = self._failures[0][1] if self._failures else None
        self._errors.update((self._client.name, failure.reason) for _, failure in self._failures)
        outcome = TargetOutcome(
            self._client.name,
            self.clock.monotonic() - started,
            first.reason if first else "",
            str(first or ""),
        )
        self._reading = replace(self._reading, outcomes=(outcome,), errors=dict(self._errors))
        return self._reading

    async def _read_all(self) -> None:
        """Reads all nodes, or only totals if there are too many GPUs. Raises SourceError if a
        required query fails.
        """
        now = await self._client.query_time() if self.at is None else self.at
        monotonic = self.clock.monotonic()
        fleet = await self._count_fleet(now) if self.settings.max_gpus < math.inf else None
        if fleet is not None:
            source = (
                f"totals are means of 5 minutes from {USAGE_RULE}" if fleet.has_rule else _NO_RULE
            )
            self._client.notes.append(
                f"Prometheus has {fleet.gpus:,} GPUs: the page shows a part of them; {source}"
            )
            self._reading = replace(
                self._reading, nodes=(), fleet=fleet, notes=tuple(self._client.notes)
            )
            return
        ask = partial(self._ask, now)
        targets, errors = await self._read_targets(ask)
        clusters = {target.cluster for target in targets}
        several = self.has_clusters or len(clusters) > 1
        if several and self.settings.one_cluster:
            text = (
                "Prometheus has GPUs of several clusters: select one with --match, such as "
                'cluster="a"'
            )
            raise SourceError("several_clusters", text)
        others = self.owners()
        owners = {
            one: {**others, **await self._read_owners(one, targets, monotonic)} for one in clusters
        }
        labels = await read_node_labels(ask, self.server, self.label_names())
        idle, window = [], self.settings.idle_after
        if (
            window and not self._reading.nodes
        ):  # only in the first round; afterwards podgpu measures idle times itself
            idle = await ask("idle GPUs", idle_query(self._match, window))
        self._reading = replace(
            self._reading,
            nodes=tuple(
                _make_reading(target, now, monotonic, several, owners[target.cluster], labels)
                for target in targets
            ),
            owners=others,
            idle_for={read_device_key(s.labels): window or 0.0 for s in idle},
            fleet=None,
            notes=tuple(self._describe_problems(targets, errors)),
        )

    async def _ask(self, now: float, what: str, query: str) -> list[ParsedSample]:
        """Returns no samples if the query fails. `what`: the name of the query in messages."""
        try:
            return await self._client.query(query, now)
        except SourceError as error:
            self._failures.append((what, error))
            return []

    async def _read_targets(self, ask: Ask) -> tuple[list[TargetState], dict[str, str]]:
        """Returns the state of each exporter, and errors by instance. Raises SourceError if a
        required query fails.
        """
        server, keep_fields = self.server, self.settings.keep_fields
        queries = series_queries(self._match, server.node_labels, keep_fields, server.cluster_label)
        vectors = await asyncio.gather(*(ask(query.what, query.text) for query in queries))
        required = {query.what for query in queries if query.required}
        for what, error in self._failures:
            if what in required:
                raise error
        return nodes_from_vectors(
            vectors,
            keep_fields=keep_fields,
            node_labels=server.node_labels,
            cluster_label=server.cluster_label,
        )

    async def _read_owners(
        self, cluster: str, targets: Iterable[TargetState], now: float
    ) -> Owners:
        label = self.server.cluster_label
        owners = self._owners.setdefault(
            cluster, PodOwners(self._client, self.server.match, label, cluster)
        )
        try:
            await owners.update((t.state for t in targets if t.cluster == cluster), now, self.at)
        except SourceError as error:
            self._failures.append(("owners of pods", error))
        return owners.known

    def _describe_problems(
        self, targets: Iterable[TargetState], errors: Mapping[str, str]
    ) -> Iterator[str]:
        yield from self._client.notes
        yield from (f"{instance}: {why}" for instance, why in sorted(errors.items())[:3])
        if self._failures:
            yield (
                f"these Prometheus queries failed: {', '.join(what for what, _ in self._failures)}"
            )
        if not any(target.state.devices for target in targets):
            and_match = " and that --match is right" if self._match else ""
            yield f"Prometheus has no GPU metrics: check that it scrapes the exporters{and_match}"

    async def _count_fleet(self, now: float) -> FleetCounts | None:
        """Returns totals if there are more than `max_gpus` GPUs. Without the recording rule, only
        counts GPUs.
        """
        label = self.server.cluster_label
        series = f"last_over_time({select((USAGE_RULE,), self._match)}[10m])"
        keys = by(label, "kind", "namespace", "modelName", "GPU_I_PROFILE")
        query = f"sum {keys} (max {by(label, *RULE_LABELS)} ({series})) / 300"
        found: dict[str, dict[tuple[str, str, str], float]] = defaultdict(
            dict
        )  # kind of usage -> means of 5 minutes
        for labels, value in (
            (sample.labels, sample.value) for sample in await self._client.query(query, now)
        ):
            key = labels.get(label, ""), labels.get("namespace", ""), _billed_model(labels)
            found[labels.get("kind", "")][key] = value
        has_rule = "gpu_seconds" in found
        if not has_rule:
            conditions = own_names("device_condition_since_timestamp_seconds")
            for kind, names in (
                ("gpu_seconds", field_names(TEMPERATURE, UTIL)),
                ("broken_seconds", conditions),
            ):
                gpus = select(names, BROKEN if names is conditions else "", self._match)
                counts = await self._client.query(
                    f"count {by(label)} (group {by(label, *UUID_LABELS)} ({gpus}))", now
                )
                found[kind] = {
                    (count.labels.get(label, ""), "", ""): count.value for count in counts
                }
        totals = {kind: math.fsum(amounts.values()) for kind, amounts in found.items()}
        if totals["gpu_seconds"] <= self.settings.max_gpus:
            return None
        has_clusters = len({cluster for cluster, _, _ in found["gpu_seconds"]}) > 1
        return FleetCounts(
            gpus=round(totals["gpu_seconds"]),
            broken=round(totals.get("broken_seconds", 0.0)),
            power_watts=round(totals.get("energy", 0.0) + totals.get("unattributed_energy", 0.0), 1)
            or None,
            held=[
                (
                    key[0] if has_clusters else "",
                    *key[1:],
                    held,
                    min(held, found["idle"].get(key, 0.0)),
                )
                for key, held in sorted(found["allocated"].items())
            ],
            has_rule=has_rule,
            has_clusters=has_clusters,
        )


def _make_reading(
    target: TargetState,
    now: float,
    monotonic: float,
    several: bool,
    owners: Owners,
    labels: ClusterNodeLabels,
) -> NodeReading:
    """With `several` clusters, adds the cluster's name to the node's name, so that node names are
    unique.
    """
    state, sampled_at = target.state, now if target.scraped_at is None else target.scraped_at
    name = "/".join(filter(None, (target.cluster, state.node))) if several else state.node
    return NodeReading(
        target=target.instance,
        state=replace_members(state, node=name),
        read_at=monotonic - max(0.0, now - sampled_at),
        skew_seconds=None if state.taken_at is None else state.taken_at - sampled_at,
        named=not state.node.endswith(target.instance),
        cluster=target.cluster if several else "",
        owners=owners,
        labels=labels.get((target.cluster, state.node)),
    )


def _billed_model(labels: Mapping[str, str]) -> str:
    model, profile = labels.get("modelName", ""), labels.get("GPU_I_PROFILE", "")
    return billed_name(model, profile) if profile else model


# Labels of nodes and owners of pods

ClusterNodeLabels = dict[tuple[str, str], dict[str, str]]  # cluster and node -> labels of the node
Ask = Callable[[str, str], Awaitable[list[ParsedSample]]]
"""Arguments: name for messages, query. Returns no samples if the query fails."""


async def read_node_labels(
    ask: Ask, server: PrometheusServer, names: Sequence[str], window: str = ""
) -> ClusterNodeLabels:
    """Returns the node labels in `names` from kube-state-metrics, by cluster and node.

    With `window` (such as 3600s), omits nodes whose labels changed in this time.
    """
    keys = {name: _kube_label(name) for name in names}
    series = select(("kube_node_labels",), server.match)
    series = f"last_over_time({series}[{window}])" if window else series
    query = f"group {by(server.cluster_label, 'node', 'exported_node', *keys.values())} ({series})"
    found: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for labels in (
        sample.labels for sample in (await ask("labels of nodes", query) if names else ())
    ):
        node = (
            labels.get(server.cluster_label, ""),
            labels.get("exported_node") or labels.get("node", ""),
        )
        found[node].append({name: labels[key] for name, key in keys.items() if key in labels})
    return {node: every[0] for node, every in found.items() if len(every) == 1}


def _kube_label(name: str) -> str:
    """Returns the name that kube-state-metrics gives to a label of a node."""
    return (
        "label_"
        + re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", re.sub(r"[^a-zA-Z0-9_]", "_", name)).lower()
    )


class PodOwners:
    """Reads pod owners of one cluster from kube-state-metrics. Caches them, because a pod's owner
    never changes.
    """

    def __init__(
        self, client: PrometheusClient, match: str, cluster_label: str, cluster: str
    ) -> None:
        """`cluster`: empty if the series of GPUs have no `cluster_label`."""
        self._client = client
        self._matchers = (f"{cluster_label}={quote(cluster)}" if cluster else "", match)
        self.known: dict[PodName, WorkloadOwner] = {}
        self._queried_at = -math.inf

    async def update(
        self, states: Iterable[NodeState], now: float, at: float | None = None
    ) -> None:
        """Queries the owners of new pods, at most once a minute."""
        devices = (
            device for state in states for gpu in state.devices for device in (gpu, *gpu.instances)
        )
        pods = {(h.namespace, h.pod) for device in devices for h in device.holders if h.pod}
        self.known = {pod: owner for pod, owner in self.known.items() if pod in pods}
        missing = sorted(pods - self.known.keys())
        if missing and now - self._queried_at >= _OWNER_SECONDS:
            owners = await self.read(missing, at=at)
            self._queried_at = now
            self.known |= {pod: owner for pod, owner in owners.items() if pod in pods}

    async def read(
        self, pods: Sequence[PodName], window: str = "", at: float | None = None
    ) -> dict[PodName, WorkloadOwner]:
        """Returns the owners at `at`, or in the last `window` (such as 3600s) before `at`. Raises
        SourceError.
        """
        owners: dict[PodName, WorkloadOwner] = {}
        for first in range(0, len(pods), _PODS_PER_QUERY):
            owners |= await self._query_owners(pods[first : first + _PODS_PER_QUERY], window, at)
        return owners

    async def _query_owners(
        self, pods: Sequence[PodName], window: str, at: float | None
    ) -> dict[PodName, WorkloadOwner]:
        labels = by(
            "namespace", "pod", "exported_namespace", "exported_pod", "owner_kind", "owner_name"
        )
        names = {pod for _, pod in pods}
        series = (
            self._select_owners("kube_pod_owner", label, names, window)
            for label in ("pod", "exported_pod")
        )
        owners = _read_owners(
            await self._client.query(f"max {labels} ({' or '.join(series)})", at), "pod"
        )
        sets = {owner.name for owner in owners.values() if owner.kind == "ReplicaSet"}
        if not sets:
            return owners
        labels = by("namespace", "exported_namespace", "replicaset", "owner_kind", "owner_name")
        query = (
            f"max {labels} "
            f"({self._select_owners('kube_replicaset_owner', 'replicaset', sets, window)})"
        )
        deployments = _read_owners(await self._client.query(query, at), "replicaset")
        return {
            pod: deployments.get((pod[0], owner.name), owner)
            if owner.kind == "ReplicaSet"
            else owner
            for pod, owner in owners.items()
        }

    def _select_owners(self, name: str, label: str, values: Iterable[str], window: str) -> str:
        series = select(
            (name,), 'owner_is_controller="true"', one_of(label, sorted(values)), *self._matchers
        )
        return f"last_over_time({series}[{window}])" if window else series


def _read_owners(samples: Iterable[ParsedSample], label: str) -> dict[PodName, WorkloadOwner]:
    """Returns owners by namespace and name. If there are several, returns the first in alphabetical
    order.
    """
    owners: dict[PodName, WorkloadOwner] = {}
    for labels in (sample.labels for sample in samples):
        name = labels.get(f"exported_{label}") or labels.get(label, "")
        owner = WorkloadOwner(labels.get("owner_kind", ""), labels.get("owner_name", ""))
        is_owned = {owner.kind, owner.name}.isdisjoint(
            {"", "<none>"}
        )  # <none>: written by older kube-state-metrics
        if name and is_owned:
            key = labels.get("exported_namespace") or labels.get("namespace", ""), name
            owners[key] = min(owner, owners.get(key, owner))
    return owners
