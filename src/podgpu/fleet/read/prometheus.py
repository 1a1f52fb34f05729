"""Client for Prometheus and compatible servers, and the collector that reads nodes from them.

The server also provides idle times and pod owners, so that a restart of podgpu loses no data.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeVar

import aiohttp
import msgspec
from msgspec.structs import replace as replace_members

from podgpu.clock import Clock
from podgpu.errors import Note, SourceError, UsageError, one_line
from podgpu.fleet.readings import (
    ClusterReading,
    FleetCounts,
    FleetShare,
    NodeReading,
    Owners,
    TargetOutcome,
)
from podgpu.fleet.settings import ViewSettings
from podgpu.http_client import Access, HttpClient, HttpResponse, open_session
from podgpu.metrics.adapter import (
    NODE_LABELS,
    UUID_LABELS,
    TargetState,
    nodes_from_vectors,
    read_device_key,
)
from podgpu.metrics.conditions import KUBERNETES_UNHEALTHY, harmless_conditions
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
from podgpu.model import NodeState, PodName, WorkloadOwner, all_devices, list_pod_names, select_keys

K = TypeVar("K")
V = TypeVar("V")
# time between queries for unknown owners; kube-state-metrics may report new pods late
_OWNER_SECONDS = 60.0
_PODS_PER_QUERY = 100  # VictoriaMetrics rejects queries of more than 16 KiB

MAX_ANSWER_BYTES = 32 * 1024 * 1024  # twice the response for 8,000 GPUs
MAX_NOTES = 5
_CONCURRENCY = 5  # a quarter of the 20 queries that Prometheus runs at a time by default
_MAX_TEXT = 300
_MAX_INSTANCES = 3  # whose errors are notes
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
BROKEN = f'condition!~"{"|".join(harmless_conditions())}"'
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
    "allocated, used and idle GPUs and cost are not known, because Prometheus lacks the recording "
    f"rule {USAGE_RULE}: set rules.enabled in podgpu's Helm chart, or add its file "
    "podgpu-usage.yaml to Prometheus or vmalert"
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
    reads_tokens: bool = True  # the counters of LLM engines

    def __post_init__(self) -> None:
        # Without a name, reports the empty text as invalid.
        _check_labels("--node-label", self.node_labels or ("",))
        _check_labels("--cluster-label", (self.cluster_label,))

    def cluster_of(self, labels: Mapping[str, str]) -> str:
        return labels.get(self.cluster_label, "")

    def select(self, name: str, *matchers: str) -> str:
        """Returns a selector for the series of this name."""
        return select((name,), *matchers, self.match)


def _check_labels(option: str, names: Iterable[str]) -> None:
    for name in names:
        if not _LABEL.fullmatch(name):
            raise UsageError(f"{option}: {name!r} is not a valid label name")


class RangeSeries(NamedTuple):
    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]  # Unix time, value


class _Element(msgspec.Struct):
    metric: dict[str, str] = {}
    value: tuple[float, str] | None = None
    values: list[tuple[float, str]] = []


class _Data(msgspec.Struct):
    result: list[_Element]


class _QueryAnswer(msgspec.Struct, rename="camel"):
    data: _Data | None = None
    error: str = ""
    warnings: list[str] = []
    is_partial: bool = False  # set by VictoriaMetrics


_decode_answer = msgspec.json.Decoder(_QueryAnswer).decode


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
            text = f"{self.name}: no valid result for the query vector(time())"
            raise SourceError("malformed", text)
        return samples[0].value

    async def query(self, query: str, at: float | None = None) -> list[ParsedSample]:
        form = {} if at is None else {"time": f"{at:.3f}"}
        samples = []
        for element in await self._read("api/v1/query", query, form):
            # A histogram has no value.
            if element.value is None:
                continue
            points = self._to_numbers([element.value])
            # The value was NaN or infinite.
            if not points:
                continue

            _, value = points[0]
            name = element.metric.pop("__name__", "")
            samples.append(ParsedSample(name, element.metric, value))

        return samples

    async def query_range(
        self, query: str, start: float, end: float, step: float
    ) -> list[RangeSeries]:
        form = {"start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:g}"}
        series = []
        for element in await self._read("api/v1/query_range", query, form):
            points = self._to_numbers(element.values)
            series.append(RangeSeries(element.metric, points))
        return series

    def _to_numbers(self, points: Iterable[tuple[float, str]]) -> list[tuple[float, float]]:
        """Drops values that are NaN or infinite. Raises SourceError if a value is not a number."""
        try:
            numbers = [(at, float(text)) for at, text in points]
        except ValueError as error:
            problem = _shorten(str(error))
            text = f"{self.name} returned an invalid value: {problem}"
            raise SourceError("malformed", text) from error
        return [(at, number) for at, number in numbers if math.isfinite(number)]

    async def _read(self, path: str, query: str, form: Mapping[str, str]) -> list[_Element]:
        """Sends the query by POST, because it may be too long for a URL. Raises SourceError."""
        full_form = {"query": query, **self._options, **form}
        async with self._semaphore:
            if self._session is None:
                self._session = open_session()
            response = await self._http.send(
                self._session, "POST", path, form=full_form, accept="application/json"
            )

        answer, result = self._decode(response)
        notes = self.notes + [_shorten(warning) for warning in answer.warnings]
        if answer.is_partial:
            notes.append("the response is incomplete: some of the storage nodes did not respond")

        self.notes = list(dict.fromkeys(notes))[:MAX_NOTES]
        return result

    def _decode(self, response: HttpResponse) -> tuple[_QueryAnswer, list[_Element]]:
        """Returns the answer and its result. Raises SourceError if there is no result."""
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

        # For 401 and 403, our error says which credentials are wrong.
        is_unexplained = status != 200 and not answer.error
        if is_unexplained or status in (401, 403):
            raise self._http.status_error(response)

        if status != 200 or answer.data is None:
            advice = "; check --match" if status in (400, 422) else ""
            reason = "query_failed" if status == 200 else f"http_{status}"
            text = f"{self.name} returned an error: {_shorten(answer.error)}{advice}"
            raise SourceError(reason, text)

        return answer, answer.data.result

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def _shorten(text: str) -> str:
    """Returns one line.

    Cuts the middle of a long text, because VictoriaMetrics writes the reason at the end.
    """
    line = one_line(" ".join(text.split()))
    if len(line) <= _MAX_TEXT:
        return line
    half = _MAX_TEXT // 2
    return f"{line[:half]}…{line[-half:]}"


# Collecting the nodes


@dataclass(eq=False)
class PrometheusCollector:
    """Implements `Collector`."""

    server: PrometheusServer
    settings: ViewSettings
    # returns owners of pods that kube-state-metrics does not report
    owners: Callable[[], Owners] = dict
    kept_pods: Callable[[], frozenset[PodName]] = frozenset  # that savings leave out
    label_names: Callable[[], Sequence[str]] = list  # returns the names of the node labels to read
    clock: Clock = field(default_factory=Clock)
    targets: str = ""  # matcher that selects the exporters
    # add the cluster's name to node names, even if there is only one cluster
    has_clusters: bool = False
    at: float | None = None  # Unix time to read; None: now

    def __post_init__(self) -> None:
        matchers = filter(None, (self.targets, self.server.match))
        self._match = ",".join(matchers)
        self._client = PrometheusClient(self.server)
        self._owners: dict[str, PodOwners] = {}  # by cluster
        self._errors: Counter[tuple[str, str]] = Counter()
        self._failures: list[
            tuple[str, SourceError]
        ] = []  # of this round: name of the query, error
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
        self._failures = []
        try:
            reading = await self._read_all()
        except SourceError as error:
            self._failures = [("", error)]
            reading = replace(self._reading, notes=())

        seconds = self.clock.monotonic() - started
        outcome = TargetOutcome(self._client.name, seconds)
        if self._failures:
            _, first = self._failures[0]
            outcome = replace(outcome, error=first.reason, message=str(first))

        for _, failure in self._failures:
            self._errors[self._client.name, failure.reason] += 1

        self._reading = replace(reading, outcomes=(outcome,), errors=dict(self._errors))
        return self._reading

    async def _read_all(self) -> ClusterReading:
        """Reads all nodes, or only totals if there are too many GPUs.

        Raises SourceError if a required query fails.
        """
        now = await self._client.query_time() if self.at is None else self.at
        monotonic = self.clock.monotonic()
        if self.settings.max_gpus < math.inf:
            counts = await self._count_all(now)
            if counts.gpus > self.settings.max_gpus:
                notes = (*self._list_warnings(), Note("totals only", _describe_counts(counts)))
                return replace(
                    self._reading,
                    nodes=(),
                    kept_pods=self.kept_pods(),
                    totals_only=counts,
                    notes=notes,
                )

        return await self._read_nodes(now, monotonic)

    async def _read_nodes(self, now: float, monotonic: float) -> ClusterReading:
        """Reads all nodes at a time by Prometheus' clock (`now`) and by our own (`monotonic`)."""
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

        # The owners that kube-state-metrics reports take precedence.
        other_owners = self.owners()
        owners = {}
        for cluster in clusters:
            reported = await self._read_owners(cluster, targets, monotonic)
            owners[cluster] = {**other_owners, **reported}

        labels = await read_node_labels(ask, self.server, self.label_names())
        nodes = []
        for target in targets:
            node_owners = owners[target.cluster]
            nodes.append(_make_reading(target, now, monotonic, several, node_owners, labels))

        return replace(
            self._reading,
            nodes=tuple(nodes),
            owners=other_owners,
            kept_pods=self.kept_pods(),
            idle_for=await self._read_idle_times(ask),
            totals_only=None,
            notes=tuple(self._describe_problems(targets, errors)),
        )

    async def _read_idle_times(self, ask: Ask) -> dict[str, float]:
        """Reads idle times in the first round. Afterwards, podgpu measures them itself."""
        window = self.settings.idle_after
        if not window or self._reading.nodes:
            return {}
        idle = await ask("idle GPUs", idle_query(self._match, window))
        return {read_device_key(sample.labels): window for sample in idle}

    async def _ask(self, now: float, what: str, query: str) -> list[ParsedSample]:
        """Returns no samples if the query fails. `what`: the name of the query in messages."""
        try:
            return await self._client.query(query, now)
        except SourceError as error:
            self._failures.append((what, error))
            return []

    async def _read_targets(self, ask: Ask) -> tuple[list[TargetState], dict[str, str]]:
        """Returns the state of each exporter, and errors by instance.

        Raises SourceError if a required query fails.
        """
        server = self.server
        keep_fields = self.settings.keep_fields
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
        server = self.server
        if cluster not in self._owners:
            self._owners[cluster] = PodOwners(
                self._client, server.match, server.cluster_label, cluster
            )

        owners = self._owners[cluster]
        states = [target.state for target in targets if target.cluster == cluster]
        try:
            await owners.update(states, now, self.at)
        except SourceError as error:
            self._failures.append(("owners of pods", error))

        return owners.known

    def _describe_problems(
        self, targets: Iterable[TargetState], errors: Mapping[str, str]
    ) -> Iterator[Note]:
        yield from self._list_warnings()
        for instance, why in sorted(errors.items())[:_MAX_INSTANCES]:
            yield Note(f"instance {instance}", f"{instance}: {why}")

        if self._failures:
            failed = ", ".join(what for what, _ in self._failures)
            yield Note(f"queries {failed}", f"these Prometheus queries failed: {failed}")

        if not any(target.state.devices for target in targets):
            advice = "check that it scrapes the exporters"
            if self._match:
                advice += " and that --match is right"
            yield Note("no GPU metrics", f"Prometheus has no GPU metrics: {advice}")

    def _list_warnings(self) -> list[Note]:
        """Returns the warnings of the server, whose texts podgpu does not know."""
        notes = []
        for number, text in enumerate(self._client.notes):
            notes.append(Note(f"Prometheus {number}", text))
        return notes

    async def _count_all(self, now: float) -> FleetCounts:
        """Returns totals. Without the recording rule, only counts GPUs."""
        means = await self._read_usage_rule(now)
        has_rule = "gpu_seconds" in means
        conditions = own_names("device_condition_since_timestamp_seconds")
        if not has_rule:
            # The current numbers stand for the means.
            gpus = field_names(TEMPERATURE, UTIL)
            means["gpu_seconds"] = await self._count_gpus(select(gpus, self._match), now)
            broken = select(conditions, BROKEN, self._match)
            means["broken_seconds"] = await self._count_gpus(broken, now)

        unhealthy = select(conditions, f"condition={quote(KUBERNETES_UNHEALTHY)}", self._match)
        unhealthy_gpus = await self._count_gpus(unhealthy, now)

        power = _total(means["energy"]) + _total(means["unattributed_energy"])
        clusters = {cluster for cluster, _, _ in means["gpu_seconds"]}
        has_clusters = len(clusters) > 1

        models: dict[tuple[str, str], float] = {}
        if has_rule:
            for (cluster, _, model), number in means["gpu_seconds"].items():
                shown_cluster = cluster if has_clusters else ""
                models[shown_cluster, model] = number

        return FleetCounts(
            gpus=round(_total(means["gpu_seconds"])),
            broken=round(_total(means["broken_seconds"])),
            # GPUs need power, so 0 means that it is unknown.
            power_watts=round(power, 1) or None,
            held=_list_shares(means, has_clusters),
            models=models,
            has_rule=has_rule,
            has_clusters=has_clusters,
            kubernetes_unhealthy=round(_total(unhealthy_gpus)),
        )

    async def _read_usage_rule(self, now: float) -> _FleetMeans:
        cluster_label = self.server.cluster_label
        # The rule is the increase in 5 minutes. Its last value counts if it is evaluated rarely.
        series = f"last_over_time({select((USAGE_RULE,), self._match)}[10m])"
        recorded = f"max {by(cluster_label, *RULE_LABELS)} ({series})"
        keys = by(cluster_label, "kind", "namespace", "modelName", "GPU_I_PROFILE")
        query = f"sum {keys} ({recorded}) / 300"

        means: _FleetMeans = defaultdict(dict)
        for sample in await self._client.query(query, now):
            labels = sample.labels
            kind = labels.get("kind", "")
            cluster = labels.get(cluster_label, "")
            namespace = labels.get("namespace", "")
            model = _billed_model(labels)
            means[kind][cluster, namespace, model] = sample.value

        return means

    async def _count_gpus(self, series: str, now: float) -> _Amounts:
        """Returns the number of GPUs with such a series, by cluster only."""
        label = self.server.cluster_label
        gpus = f"group {by(label, *UUID_LABELS)} ({series})"
        query = f"count {by(label)} ({gpus})"
        counts = {}
        for sample in await self._client.query(query, now):
            cluster = sample.labels.get(label, "")
            counts[cluster, "", ""] = sample.value

        return counts


_Amounts = dict[tuple[str, str, str], float]  # by cluster, namespace and billed model
_FleetMeans = dict[str, _Amounts]
"""Means of 5 minutes, by kind of usage. A kind without series is empty."""


def _total(amounts: _Amounts) -> float:
    return math.fsum(amounts.values())


def _describe_counts(counts: FleetCounts) -> str:
    source = f"totals are means of 5 minutes from {USAGE_RULE}" if counts.has_rule else _NO_RULE
    return f"Prometheus has {counts.gpus:,} GPUs: the page shows a part of them; {source}"


def _list_shares(means: _FleetMeans, has_clusters: bool) -> list[FleetShare]:
    """Returns what each namespace holds of each model."""
    shares = []
    for key, allocated in sorted(means["allocated"].items()):
        cluster, namespace, model = key
        shown_cluster = cluster if has_clusters else ""
        # The means of two counters are not exact.
        idle = min(allocated, means["idle"].get(key, 0.0))
        underused = means["underused"].get(key)
        shares.append(FleetShare(shown_cluster, namespace, model, allocated, idle, underused))

    return shares


def _make_reading(
    target: TargetState,
    now: float,
    monotonic: float,
    several: bool,
    owners: Owners,
    labels: ClusterNodeLabels,
) -> NodeReading:
    """With `several` clusters, adds the cluster's name, so that node names are unique."""
    state = target.state
    sampled_at = now if target.scraped_at is None else target.scraped_at
    cluster = target.cluster if several else ""
    name = "/".join(filter(None, (cluster, state.node)))
    age = max(0.0, now - sampled_at)
    skew = None
    if state.taken_at is not None:
        skew = state.taken_at - sampled_at

    return NodeReading(
        target=target.instance,
        state=replace_members(state, node=name),
        read_at=monotonic - age,
        skew_seconds=skew,
        named=state.node != target.instance,
        cluster=cluster,
        owners=owners,
        labels=labels.get((target.cluster, state.node)),
    )


def _billed_model(labels: Mapping[str, str]) -> str:
    model = labels.get("modelName", "")
    profile = labels.get("GPU_I_PROFILE", "")
    if profile:
        return billed_name(model, profile)
    return model


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
    if not names:
        return {}

    keys = {name: _kube_label(name) for name in names}
    grouping = by(server.cluster_label, "node", "exported_node", *keys.values())
    series = _over(server.select("kube_node_labels"), window)
    variants: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for sample in await ask("labels of nodes", f"group {grouping} ({series})"):
        labels = sample.labels
        cluster = server.cluster_of(labels)
        node = labels.get("exported_node") or labels.get("node", "")
        node_labels = {}
        for name, key in keys.items():
            if key in labels:
                node_labels[name] = labels[key]

        variants[cluster, node].append(node_labels)

    return select_unique(variants)


def select_unique(variants: Mapping[K, Collection[V]]) -> dict[K, V]:
    """Returns the values of the keys that have only one."""
    unique = {}
    for key, values in variants.items():
        if len(values) == 1:
            (value,) = values
            unique[key] = value
    return unique


def _over(series: str, window: str) -> str:
    """Returns the last values in the window, or the current ones without a window."""
    if window:
        return f"last_over_time({series}[{window}])"
    return series


def _kube_label(name: str) -> str:
    """Returns the name that kube-state-metrics gives to a label of a node."""
    valid = re.sub(r"[^a-zA-Z0-9_]", "_", name)
    snake_case = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", valid)
    return f"label_{snake_case.lower()}"


class PodOwners:
    """Reads pod owners of one cluster from kube-state-metrics.

    Caches them, because a pod's owner never changes.
    """

    def __init__(
        self, client: PrometheusClient, match: str, cluster_label: str, cluster: str
    ) -> None:
        """`cluster`: empty if the series of GPUs have no `cluster_label`."""
        of_cluster = ""
        if cluster:
            of_cluster = f"{cluster_label}={quote(cluster)}"
        self._client = client
        self._matchers = (of_cluster, match)
        self.known: dict[PodName, WorkloadOwner] = {}
        self._queried_at = -math.inf

    async def update(
        self, states: Iterable[NodeState], now: float, at: float | None = None
    ) -> None:
        """Queries the owners of new pods, at most once a minute."""
        pods: set[PodName] = set()
        for state in states:
            for _, device in all_devices(state):
                pods.update(list_pod_names(device.holders))

        known = self.known
        missing = sorted(pods - known.keys())
        if missing and now - self._queried_at >= _OWNER_SECONDS:
            known = known | await self.read(missing, at=at)
            self._queried_at = now

        self.known = select_keys(known, pods)

    async def read(
        self, pods: Sequence[PodName], window: str = "", at: float | None = None
    ) -> dict[PodName, WorkloadOwner]:
        """Returns the owners at `at`, or in the last `window` (such as 3600s) before `at`.

        Raises SourceError.
        """
        owners: dict[PodName, WorkloadOwner] = {}
        for first in range(0, len(pods), _PODS_PER_QUERY):
            chunk = pods[first : first + _PODS_PER_QUERY]
            owners |= await self._query_owners(chunk, window, at)
        return owners

    async def _query_owners(
        self, pods: Sequence[PodName], window: str, at: float | None
    ) -> dict[PodName, WorkloadOwner]:
        names = {pod for _, pod in pods}
        of_pod = self._select_owners("kube_pod_owner", "pod", names, window)
        of_exported = self._select_owners("kube_pod_owner", "exported_pod", names, window)
        labels = by(
            "namespace", "pod", "exported_namespace", "exported_pod", "owner_kind", "owner_name"
        )
        query = f"max {labels} ({of_pod} or {of_exported})"
        owners = _read_owners(await self._client.query(query, at), "pod")

        # The owner of a ReplicaSet is a Deployment, which is more useful.
        sets = {owner.name for owner in owners.values() if owner.kind == "ReplicaSet"}
        if not sets:
            return owners

        labels = by("namespace", "exported_namespace", "replicaset", "owner_kind", "owner_name")
        owners_of_sets = self._select_owners("kube_replicaset_owner", "replicaset", sets, window)
        query = f"max {labels} ({owners_of_sets})"
        deployments = _read_owners(await self._client.query(query, at), "replicaset")
        for pod, owner in owners.items():
            if owner.kind == "ReplicaSet":
                namespace, _ = pod
                owners[pod] = deployments.get((namespace, owner.name), owner)

        return owners

    def _select_owners(self, name: str, label: str, values: Iterable[str], window: str) -> str:
        series = select(
            (name,), 'owner_is_controller="true"', one_of(label, sorted(values)), *self._matchers
        )
        return _over(series, window)


def _read_owners(samples: Iterable[ParsedSample], label: str) -> dict[PodName, WorkloadOwner]:
    """Returns owners by namespace and name.

    If there are several, returns the first in alphabetical order.
    """
    owners: dict[PodName, WorkloadOwner] = {}
    for sample in samples:
        labels = sample.labels
        name = labels.get(f"exported_{label}") or labels.get(label, "")
        namespace = labels.get("exported_namespace") or labels.get("namespace", "")
        kind = labels.get("owner_kind", "")
        owner_name = labels.get("owner_name", "")
        # Older versions of kube-state-metrics write <none>.
        has_owner = kind not in ("", "<none>") and owner_name not in ("", "<none>")
        if not name or not has_owner:
            continue

        key = namespace, name
        owner = WorkloadOwner(kind, owner_name)
        owners[key] = min(owner, owners.get(key, owner))

    return owners
