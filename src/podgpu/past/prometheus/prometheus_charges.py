"""Answers `/api/v1/range`, `/api/v1/waste` and `/api/v1/costs` by queries to Prometheus.

If podgpu's recording rules cover the range, hours of owners and namespaces are read from the rules.
Otherwise they are read from the exporters' counters.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from podgpu.charge import (
    AMOUNTS,
    UNALLOCATED,
    Amounts,
    Charge,
    HeldTime,
    UsageAccount,
    charge,
    charge_rest,
    scale_bill,
    sum_charges,
)
from podgpu.errors import SourceError, UsageError, texts_of, utc_text
from podgpu.fleet.hold import has_unheld_use
from podgpu.fleet.prices import Prices
from podgpu.fleet.read.prometheus import (
    RULE_LABELS,
    USAGE_RULE,
    PodOwners,
    PrometheusClient,
    PrometheusServer,
    read_node_labels,
    select_unique,
)
from podgpu.fleet.state import ClusterState, describe_unpriced
from podgpu.metrics.adapter import (
    MODEL_LABELS,
    UUID_LABELS,
    WORKLOAD_LABELS,
    first_label,
    read_gpu_id,
    read_workload,
)
from podgpu.metrics.fields import ENGINE, TEMPERATURE, UTIL, names_of
from podgpu.metrics.mig import billed_name, parent_and_fraction
from podgpu.metrics.parse import ParsedSample
from podgpu.metrics.promql import by, one_of, select, sum_increase
from podgpu.model import (
    PodName,
    Workload,
    WorkloadOwner,
    group_by,
)
from podgpu.past.bills.bill import (
    CurrentRows,
    RangeAnswer,
    RangeQuery,
    StepCharge,
    group_now,
    make_range,
    name_row,
)
from podgpu.past.bills.costs import (
    CostsAnswer,
    CostsQuery,
    CostStep,
    first_forecast_day,
    make_costs,
)
from podgpu.past.prometheus.prometheus_tokens import (
    ClusterPod,
    PodTokens,
    read_tokens,
    token_queries,
    token_step_queries,
)
from podgpu.past.time_steps import COARSE, DAY, FINE, HOUR, ceil_time, floor_time

_TIMEOUT = 60.0
_MAX_STEPS = 2880  # maximum number of times at which GPUs are counted
# Kind of usage -> counter and matcher.
_COUNTERS = {
    amount.column: (amount.counter, amount.matcher) for amount in AMOUNTS if amount.counter
}
_COUNTERS["unattributed_energy"] = ("podgpu_device_unattributed_energy_joules_total", "")
_RULES = {"podgpu:usage:sum1h": HOUR, USAGE_RULE: COARSE}  # the coarsest first
_BUSY = "podgpu_container_gpu_busy_seconds_total"
_TOKEN_SECONDS = 25 * HOUR  # as in SQLite, which keeps 5 minutes for so long
_MAX_ENGINES = 100  # pods whose names fit into a query
_MIN_SAMPLES = 200  # a rule with fewer samples in a range is not exact enough at the start and end
_GPU_NAMES = (
    *names_of(TEMPERATURE),
    *names_of(UTIL),
    *names_of(ENGINE),
    "podgpu_device_energy_joules_total",
)
_GPU_KEYS = (*UUID_LABELS, *MODEL_LABELS)
_HOLDER_KEYS = (*_GPU_KEYS, "GPU_I_ID", "GPU_I_PROFILE", *WORKLOAD_LABELS)
Vectors = Mapping[str, Sequence[ParsedSample]]  # by kind of usage


class _ModelKey(NamedTuple):
    """Identifies the GPUs of a model that have the same prices."""

    cluster: str
    model: str
    prices: Prices


class _HolderKey(NamedTuple):
    """Identifies a holder and its GPU or MIG instance.

    With a recording rule, `gpu` is the model, not a UUID.
    """

    cluster: str
    gpu: str
    instance: str
    workload: Workload
    owner: WorkloadOwner | None = None


class _ReadPeriod(NamedTuple):
    """The usage of a part of a step in which prices do not change."""

    step: int  # its start
    start: float
    end: float
    prices: Prices
    vectors: Vectors


async def read_bill(
    server: PrometheusServer, query: RangeQuery, prices: Prices, state: ClusterState
) -> RangeAnswer:
    """Returns the answer to `/api/v1/range`. Raises SourceError.

    `state`: the current state. Its owners are used if kube-state-metrics does not report a pod.
    """
    _check_label(query)
    server = replace(server, timeout=_TIMEOUT)
    async with aclosing(PrometheusClient(server)) as client:
        now = await client.query_time()
        start, end = query.bounds(now)
        step = _choose_step(end - start)
        end = end // step * step
        start = min(start // step * step, end - step)

        reader = _RangeReader(client, server, query, prices, state)
        last_record = now // FINE * FINE
        return await reader.read(start, end, step, last_record)


async def read_costs(
    server: PrometheusServer, query: CostsQuery, prices: Prices, state: ClusterState
) -> CostsAnswer:
    """Returns the answer to `/api/v1/costs`. Raises SourceError.

    Every query reads all hours or days at once, so their number does not depend on the range.
    """
    _check_label(query.range)
    server = replace(server, timeout=_TIMEOUT)
    async with aclosing(_SteppedClient(server)) as client:
        now = await client.query_time() // FINE * FINE
        windows = query.windows(now)
        end = windows.recorded_until // FINE * FINE
        reader = _RangeReader(client, server, query.range, prices, state)
        steps = await reader.read_steps(client, query.first_step(now), end, query.step)
        source = reader.rule or "counters"

        days: Sequence[CostStep] = []
        if query.has_forecast and query.step == DAY:
            days = steps
        elif query.has_forecast:
            first = first_forecast_day(now)
            days = await reader.read_steps(client, first, now, DAY)

    answer = make_costs(query, now, prices.at(now), steps, days)
    answer.simulated = state.simulated
    answer.source = source
    reader.notes += texts_of(describe_unpriced(state.nodes, prices))
    answer.notes[:0] = dict.fromkeys(reader.notes + client.notes)

    recorded_from = _find_first_record(steps, windows.start)
    if recorded_from is None:
        answer.recorded_from = now
    elif recorded_from > windows.start:
        answer.recorded_from = recorded_from
    return answer


def _choose_step(seconds: float) -> int:
    """Returns the time between two counts of the GPUs in a range."""
    samples_per_step = math.ceil(seconds / FINE / _MAX_STEPS)
    return FINE * max(1, samples_per_step)


def _exclude_start(seconds: float) -> int:
    """Returns the length, in milliseconds, of a PromQL range that excludes its start."""
    return round(seconds * 1000) - 1


def _find_first_record(steps: Iterable[CostStep], start: float) -> float | None:
    for step in steps:
        if step.charges and step.start >= start:
            return step.start
    return None


def _check_label(query: RangeQuery) -> None:
    if query.label.startswith("__"):
        raise UsageError(f"by=label:{query.label[:60]}: pods have no labels of this kind")


class _SteppedClient(PrometheusClient):
    """Reads each query for all steps at once, when it is first asked for the end of a step."""

    def __init__(self, server: PrometheusServer) -> None:
        super().__init__(server)
        self.ends = range(0)
        self._answers: dict[str, dict[int, list[ParsedSample]]] = {}
        self._failed: dict[str, SourceError] = {}

    def set_ends(self, ends: range) -> None:
        """`ends`: Unix times. A query of another time is sent as it is."""
        self.ends = ends
        self._answers = {}
        self._failed = {}

    async def query(self, query: str, at: float | None = None) -> list[ParsedSample]:
        if at is None or at not in self.ends:
            return await super().query(query, at)
        if query in self._failed:
            raise self._failed[query]

        if query not in self._answers:
            try:
                self._answers[query] = await self._query_steps(query)
            except SourceError as error:
                self._failed[query] = error
                raise

        return self._answers[query].get(round(at), [])

    async def _query_steps(self, query: str) -> dict[int, list[ParsedSample]]:
        first = self.ends[0]
        last = self.ends[-1]
        answers: dict[int, list[ParsedSample]] = defaultdict(list)
        for all_labels, points in await self.query_range(query, first, last, self.ends.step):
            labels = dict(all_labels)
            name = labels.pop("__name__", "")
            for time, value in points:
                sample = ParsedSample(name, labels, value)
                answers[round(time)].append(sample)
        return answers


@dataclass
class _RangeReader:
    client: PrometheusClient
    server: PrometheusServer
    query: RangeQuery
    prices: Prices
    state: ClusterState
    notes: list[str] = field(default_factory=list)
    rule: str = ""
    owners: Mapping[ClusterPod, WorkloadOwner] | None = None  # None: read when needed

    async def read(self, start: float, end: float, step: int, now: float) -> RangeAnswer:
        """Adds a note for each failed query.

        Raises SourceError if the allocated hours cannot be read.
        """
        self.rule = await self._find_rule(start, end)
        usage: list[Charge] = []
        for first, last, prices in self.prices.periods(start, end):
            vectors = await self._read_vectors(first, last, step)
            usage += await self._make_usage(vectors, first, last, prices)

        await self._describe_gaps(usage, start, step)
        current: CurrentRows = {}
        if self.query.end is None:
            current = await self._read_now(usage, now)
        token_steps = await self._read_token_steps(usage, start, end)

        answer = make_range(
            self.query,
            (start, end),
            usage,
            self.prices.at(end),
            current,
            token_steps=token_steps,
        )
        answer.simulated = self.state.simulated
        answer.source = self.rule or "counters"
        answer.notes[:0] = dict.fromkeys(self.notes + self.client.notes)
        return answer

    async def read_steps(
        self, client: _SteppedClient, start: int, end: float, step: int
    ) -> list[CostStep]:
        """Returns the charges of each step between these times. The last one may be shorter."""
        self.rule = await self._find_rule(start, end)
        last_end = floor_time(end, step)
        client.set_ends(range(start + step, last_end + 1, step))
        periods = await self._read_periods(start, end, step)

        # The names of pods are in the query, so it is one for all steps.
        holders: dict[_HolderKey, ParsedSample] = {}
        for period in periods:
            holders |= self._find_holders(period.vectors)
        window = f"{round(end - start)}s"
        self.owners = await self._read_owners(holders, window, end)

        steps: dict[int, list[Charge]] = {}
        for period in periods:
            usage = await self._make_usage(period.vectors, period.start, period.end, period.prices)
            steps.setdefault(period.step, []).extend(usage)
        self.owners = None

        complete = await self._find_complete(step, client.ends)
        answer = []
        for first, usage in steps.items():
            is_complete = first in complete
            answer.append(CostStep(first, usage, is_complete))
        return answer

    async def _read_periods(self, start: int, end: float, step: int) -> list[_ReadPeriod]:
        resolution = _choose_step(step)
        periods = []
        for first in range(start, ceil_time(end, step), step):
            last = min(first + step, end)
            for since, until, prices in self.prices.periods(first, last):
                vectors = await self._read_vectors(since, until, resolution)
                periods.append(_ReadPeriod(first, since, until, prices, vectors))
        return periods

    async def _find_complete(self, step: int, ends: range) -> set[int]:
        """Returns the starts of the steps in which no hour (of a day) or 5 minutes are missing."""
        part = COARSE
        if step == DAY:
            part = HOUR
        gpus = f"group({select(_GPU_NAMES, self.server.match)})"
        query = f"count_over_time(({gpus})[{_exclude_start(step)}ms:{part}s])"

        complete = set()
        for at in ends:
            counts = await self._ask("complete days", query, at)
            if counts and counts[0].value >= step / part:
                complete.add(at - step)
        return complete

    async def _read_vectors(self, start: float, end: float, step: int) -> Vectors:
        if not self.rule:
            return await self._read_counters(start, end, step)
        function = f"sum_over_time({{}}[{_exclude_start(end - start)}ms])"
        return await self._read_rule(self.rule, function, end)

    async def _describe_gaps(self, usage: Sequence[Charge], start: float, step: int) -> None:
        """Adds notes about what the answer does not include."""
        has_methods = any(charge.account.methods for charge in usage)
        if self.rule and not has_methods:
            self.notes.append(
                f"missing: methods of usage: {self.rule} was recorded by rules of an older version"
            )

        if has_unheld_use(self.state.nodes):
            self.notes.append(
                "a GPU is busy although nobody is known to hold it: such time counts as wasted"
                " (unallocated) here, because Prometheus cannot tell (docs/usage.md#waste)"
            )

        if not await self._may_have_gpus(start + step):
            self.notes.append(
                f"Prometheus has no GPU metrics at {utc_text(start)}, the start of the range"
            )

        # Without counters of podgpu, all usage is of the empty account, which has no name at all.
        has_accounts = any(any(charge.account) for charge in usage)
        if not has_accounts:
            self.notes.append("Prometheus has no counters of podgpu's exporters in this range")
        self.notes += texts_of(describe_unpriced(self.state.nodes, self.prices))
        if self.rule and self.prices.label_names:
            self.notes.append(
                "the cost is unknown: prices depend on node labels, "
                "but there are too many GPUs to read their nodes"
            )

    async def _ask(self, what: str, query: str, at: float) -> list[ParsedSample]:
        """Queries what an answer can do without. `what`: for the note if the query fails."""
        try:
            return await self.client.query(query, at)
        except SourceError as error:
            self.notes.append(f"missing: {what}: {error}")
            return []

    # Queries

    async def _find_rule(self, start: float, end: float) -> str:
        """Returns the coarsest recording rule that covers the range, or "" if there is none.

        A rule must cover all GPU metrics. Rules do not contain nodes. With prices by node label, a
        rule is used only if there are too many GPUs to read.
        """
        is_by_node = self.prices.label_names and self.state.totals_only is None
        if self.query.by not in ("owner", "namespace") or is_by_node:
            return ""

        length = end - start
        for name, seconds in _RULES.items():
            if length < _MIN_SAMPLES * seconds:
                continue

            series = self.server.select(name, 'kind="gpu_seconds"')
            query = f"max(count_over_time({series}[{round(length)}s]))"
            counts = await self._ask("recording rules", query, end)
            covered = sum(count.value for count in counts) * seconds
            if covered >= 0.99 * length:
                return name

            # A rule that is as old as the oldest samples covers all that the server has.
            before_rule = end - covered - 2 * seconds
            if covered and not await self._may_have_gpus(before_rule):
                return name

        return ""

    async def _may_have_gpus(self, at: float) -> bool:
        """Returns True if the server has GPU metrics at this time, or if the query fails."""
        query = f"group({select(_GPU_NAMES, self.server.match)})"
        try:
            return bool(await self.client.query(query, at))
        except SourceError as error:
            self.notes.append(f"missing: GPUs at {utc_text(at)}: {error}")
            return True

    async def _read_rule(self, name: str, function: str, end: float) -> Vectors:
        """Reads a recording rule. `function`: PromQL in which `{}` stands for the series."""
        series = function.format(self.server.select(name))
        keys = by(self.server.cluster_label, *RULE_LABELS, "method")
        query = f"max {keys} ({series})"
        samples = await self.client.query(query, end)
        return group_by(samples, lambda sample: sample.labels.get("kind", ""))

    async def _read_counters(self, start: float, end: float, step: int) -> Vectors:
        queries = self._write_counters(start, end, step)
        asked = []
        for kind, query in queries.items():
            if kind == "allocated":
                # Without allocated time, there is no bill.
                asked.append(self.client.query(query, end))
                continue

            name = "methods of usage" if kind == "method" else kind.replace("_", " ")
            asked.append(self._ask(name, query, end))
        results = await asyncio.gather(*asked)
        return dict(zip(queries, results, strict=True))

    def _write_counters(self, start: float, end: float, step: int) -> dict[str, str]:
        """Returns the query for each kind of usage."""
        window = f"{round(end - start)}s"
        queries = {}
        for kind, (counter, matcher) in _COUNTERS.items():
            queries[kind] = self._increase(counter, matcher, window)
        queries["shares"] = self._write_shares(window)
        queries["method"] = self._write_methods(window)

        length = _exclude_start(end - start)
        queries["gpu_seconds"] = self._write_gpu_seconds(length, step)
        if self.server.reads_tokens:
            cluster = self.server.cluster_label
            queries |= token_queries(cluster, self.server.match, window, length, step)
        return queries

    def _write_shares(self, window: str) -> str:
        series = self.server.select("podgpu_allocation_share_ratio")
        keys = by(self.server.cluster_label, *_HOLDER_KEYS)
        return f"avg {keys} (avg_over_time({series}[{window}]))"

    def _write_methods(self, window: str) -> str:
        series = self.server.select("podgpu_device_usage_method")
        keys = by(self.server.cluster_label, *UUID_LABELS, "GPU_I_ID", "method")
        return f"group {keys} (last_over_time({series}[{window}]))"

    def _write_gpu_seconds(self, length: int, step: int) -> str:
        """`length`: see `_exclude_start`."""
        cluster = self.server.cluster_label
        series = select(_GPU_NAMES, self.server.match)
        gpus = f"group {by(cluster, *_GPU_KEYS)} ({series})"
        counts = f"count_over_time(({gpus})[{length}ms:{step}s])"

        keys = [cluster, *MODEL_LABELS]
        if self.prices.label_names:
            keys += UUID_LABELS
        return f"{step} * sum {by(*keys)} ({counts})"

    def _increase(self, name: str, matcher: str, window: str) -> str:
        series = self.server.select(name, matcher)
        keys = (self.server.cluster_label, *_HOLDER_KEYS)
        return sum_increase(series, window, keys)

    async def _read_now(self, usage: Sequence[Charge], end: float) -> CurrentRows:
        """Returns the current values of rows.

        With a recording rule, these are means of the last 5 minutes.
        """
        if not self.rule:
            if not self.state.nodes:
                return {}
            return group_now(self.state, usage, self.query)

        function = f"last_over_time({{}}[{2 * COARSE}s])"
        recorded = await self._read_rule(USAGE_RULE, function, end)
        # Without the time of all GPUs, nothing is charged as unallocated.
        held = dict(recorded)
        held.pop("gpu_seconds", None)
        recent = await self._make_usage(held, end - COARSE, end, self.prices.at(end))

        rows = {}
        groups = group_by(recent, lambda charged: name_row(charged, self.query))
        for name, group in groups.items():
            amounts = sum_charges(group)
            cost = None
            if any(charged.currency for charged in group):
                cost = round(scale_bill(amounts.cost, COARSE, HOUR), 2)
            rows[name] = {
                "gpus": round(amounts.allocated_seconds / COARSE, 2),
                "idle_gpus": round(amounts.idle_seconds / COARSE, 2),
                "cost_per_hour": cost,
            }

        return rows

    # Tokens of every 5 minutes

    async def _read_token_steps(
        self, usage: Sequence[Charge], start: float, end: float
    ) -> list[StepCharge]:
        """Reads busy time and tokens of the last hours, to separate the two kinds of tokens."""
        accounts: dict[ClusterPod, UsageAccount] = {}
        for charged in usage:
            account = charged.account
            if charged.amounts.token_seconds and account.pod:
                pod = account.namespace, account.pod
                accounts[charged.cluster, pod] = account

        # Each step is queried at its end.
        since = max(start, end - _TOKEN_SECONDS)
        first = ceil_time(since, COARSE) + COARSE
        last = floor_time(end, COARSE)
        if not accounts or len(accounts) > _MAX_ENGINES or first > last:
            return []

        pods = sorted({name for _, (_, name) in accounts})
        try:
            vectors = await self._query_token_steps(pods, first, last)
        except SourceError as error:
            self.notes.append(f"missing: cost of prompt and generated tokens: {error}")
            return []

        steps = []
        for at, step in sorted(vectors.items()):
            for charged in _make_token_charges(step, self.server.cluster_label, accounts):
                steps.append(StepCharge(at // COARSE, charged))
        return steps

    async def _query_token_steps(
        self, pods: Sequence[str], first: int, last: int
    ) -> Mapping[int, Vectors]:
        """Returns the samples by time and kind. Raises SourceError."""
        queries = self._write_token_steps(pods)
        asked = []
        for query in queries.values():
            asked.append(self.client.query_range(query, first, last, COARSE))
        results = await asyncio.gather(*asked)

        vectors: dict[int, dict[str, list[ParsedSample]]] = {}
        for kind, lines in zip(queries, results, strict=True):
            for labels, points in lines:
                for at, value in points:
                    sample = ParsedSample("", labels, value)
                    step = vectors.setdefault(round(at), {})
                    step.setdefault(kind, []).append(sample)

        return vectors

    def _write_token_steps(self, pods: Sequence[str]) -> dict[str, str]:
        """Returns the queries for busy time and tokens in steps of 5 minutes."""
        cluster = self.server.cluster_label
        series = self.server.select(_BUSY, one_of("pod", pods))
        keys = by(cluster, *_HOLDER_KEYS, "job", "instance")
        busy = f"max {keys} (increase({series}[{COARSE}s]))"
        of_pod = by(cluster, "namespace", "pod")

        queries = token_step_queries(cluster, self.server.match, pods, COARSE)
        queries[_BUSY] = f"sum {of_pod} ({busy})"
        return queries

    # Names of pods

    async def _read_accounts(
        self,
        keys: Sequence[_HolderKey],
        method_samples: Iterable[ParsedSample],
        window: str,
        end: float,
    ) -> dict[_HolderKey, UsageAccount]:
        """Returns the account of each holder, with owner, requested label and methods."""
        labels: dict[ClusterPod, str] = {}
        if self.query.label:
            labels = await self._read_labels(self.query.label, window, end)

        owners = await self._read_owners(keys, window, end)
        methods_of = self._group_methods(method_samples)
        accounts = {}
        for key in keys:
            workload = key.workload
            pod = key.cluster, workload.pod_name
            # A pod's name is its account, also after a restart.
            ids = (workload.job, workload.uid, workload.container_id)
            if workload.pod:
                ids = ("", "", "")

            owner = key.owner or owners.get(pod)
            if owner is None and not self.rule:
                # Recording rules know only owners from kube-state-metrics.
                owner = self.state.owners.get(workload.pod_name)

            owner = owner or WorkloadOwner("", "")
            device = key.cluster, key.gpu, key.instance
            methods = methods_of.get(key if self.rule else device, set())
            accounts[key] = UsageAccount(
                *workload.pod_name,
                *ids,
                owner.kind,
                owner.name,
                labels.get(pod, ""),
                " ".join(sorted(methods)),
            )

        return accounts

    async def _read_owners(
        self, keys: Iterable[_HolderKey], window: str, end: float
    ) -> Mapping[ClusterPod, WorkloadOwner]:
        """Returns the owners of pods by cluster and pod, if the query needs them."""
        if self.owners is not None:
            return self.owners
        if self.query.by not in ("pod", "owner"):
            return {}

        owners: dict[ClusterPod, WorkloadOwner] = {}
        pods: dict[str, set[PodName]] = {}  # by cluster
        for key in keys:
            if key.workload.pod:
                pods.setdefault(key.cluster, set()).add(key.workload.pod_name)

        for cluster, names in pods.items():
            label = self.server.cluster_label
            reader = PodOwners(self.client, self.server.match, label, cluster)
            try:
                known = await reader.read(sorted(names), window, end)
            except SourceError as error:
                self.notes.append(f"missing: owners of pods: {error}")
                continue

            for pod, owner in known.items():
                owners[cluster, pod] = owner

        return owners

    def _group_methods(self, samples: Iterable[ParsedSample]) -> dict[tuple[Any, ...], set[str]]:
        """Groups the methods of measurement by holder or, without a rule, by device."""
        methods: dict[tuple[Any, ...], set[str]] = defaultdict(set)
        for sample in samples:
            labels = sample.labels
            cluster = self.server.cluster_of(labels)
            device = cluster, read_gpu_id(labels), labels.get("GPU_I_ID", "")
            # Only recording rules have holders and methods in one series.
            key = self._read_key(labels) or device
            methods[key].add(labels.get("method", ""))
        return methods

    async def _read_labels(self, name: str, window: str, end: float) -> dict[ClusterPod, str]:
        """Returns the label `name` of each pod as a JSON object.

        Reads kube-state-metrics or the exporters' series.
        """
        places: dict[str, Sequence[str]] = {}  # label -> series
        # No label name in Prometheus begins with a digit.
        if not name[0].isdecimal():
            places[name] = _GPU_NAMES
        places[f"label_{name}"] = ("kube_pod_labels",)

        cluster_label = self.server.cluster_label
        values: dict[ClusterPod, str] = {}
        for label, names in places.items():
            selector = select(names, f'{label}!=""', self.server.match)
            keys = by(cluster_label, *WORKLOAD_LABELS, label)
            query = f"group {keys} (last_over_time({selector}[{window}]))"
            for sample in await self._ask(f"label {label}", query, end):
                workload = read_workload(sample.labels)
                if workload is None or not workload.pod:
                    continue

                cluster = sample.labels.get(cluster_label, "")
                value = sample.labels[label]
                values[cluster, workload.pod_name] = json.dumps({name: value})

        return values

    # Usage

    async def _make_usage(
        self, vectors: Vectors, start: float, end: float, prices: Prices
    ) -> list[Charge]:
        window = f"{round(end - start)}s"
        holders = self._find_holders(vectors)
        methods = vectors.get("method", ())
        accounts = await self._read_accounts(list(holders), methods, window, end)
        gpu_prices = await self._read_gpu_prices(prices, window, end)
        find_model = partial(self._find_model, prices=prices, gpu_prices=gpu_prices)
        # All time of the GPUs, from which the time of holders is subtracted.
        rest_seconds = _add_by_model(vectors.get("gpu_seconds", ()), find_model)
        rest_joules = _add_by_model(vectors.get("unattributed_energy", ()), find_model)
        tokens = read_tokens(vectors, self.server.cluster_label)
        sums_of_holders = self._add_by_holder(vectors)

        usage = []
        for key, sample in holders.items():
            model = find_model(sample.labels)
            profile = sample.labels.get("GPU_I_PROFILE", "")
            pod = key.cluster, key.workload.pod_name
            served = tokens.get(pod)
            time = _make_time(sums_of_holders[key])
            charged = _charge_holder(accounts[key], model, profile, time, served)
            usage.append(charged)
            if served is not None:
                # The tokens are those of the pod, not of a GPU: its first GPU gets all of them.
                tokens[pod] = replace(served, prompt=0.0, generated=0.0)
            if model in rest_seconds:
                rest_seconds[model] -= charged.amounts.allocated_seconds

        usage += _charge_rests(rest_seconds, rest_joules)
        return sorted(usage)  # makes rounding independent of the order of query results

    def _find_holders(self, vectors: Vectors) -> dict[_HolderKey, ParsedSample]:
        """Returns the holders to charge, each with the last sample of its allocated time."""
        holders = {}
        for sample in vectors.get("allocated", ()):
            key = self._read_key(sample.labels)
            if key is not None:
                holders[key] = sample
        return holders

    async def _read_gpu_prices(
        self, prices: Prices, window: str, end: float
    ) -> dict[tuple[str, str], Prices]:
        """Returns prices by cluster and GPU, if they depend on node labels.

        Omits GPUs whose nodes differ in price.
        """
        if not prices.nodes or self.rule:
            return {}

        ask = partial(self._ask, at=end)
        labels_of_nodes = await read_node_labels(ask, self.server, prices.label_names, window)

        node_labels = self.server.node_labels
        cluster_label = self.server.cluster_label
        series = select(_GPU_NAMES, self.server.match)
        keys = by(cluster_label, *UUID_LABELS, *node_labels)
        query = f"group {keys} (last_over_time({series}[{window}]))"
        variants: dict[tuple[str, str], set[Prices]] = defaultdict(set)
        for sample in await ask("nodes of GPUs", query):
            labels = sample.labels
            cluster = self.server.cluster_of(labels)
            node = first_label(labels, node_labels)
            own = prices.on_node(labels_of_nodes.get((cluster, node)))
            variants[cluster, read_gpu_id(labels)].add(own)

        return select_unique(variants)

    def _find_model(
        self,
        labels: Mapping[str, str],
        prices: Prices,
        gpu_prices: Mapping[tuple[str, str], Prices],
    ) -> _ModelKey:
        """Returns the model and prices of a GPU. See `_read_gpu_prices`."""
        cluster = self.server.cluster_of(labels)
        model = first_label(labels, MODEL_LABELS)
        gpu = read_gpu_id(labels)
        return _ModelKey(cluster, model, gpu_prices.get((cluster, gpu), prices))

    def _add_by_holder(self, vectors: Vectors) -> dict[_HolderKey, dict[str, float]]:
        """Returns the sums of each holder by kind of usage."""
        sums: dict[_HolderKey, dict[str, float]] = {}
        for kind in (*_COUNTERS, "shares"):
            for sample in vectors.get(kind, ()):
                key = self._read_key(sample.labels)
                if key is not None:
                    own = sums.setdefault(key, {})
                    own[kind] = own.get(kind, 0.0) + sample.value
        return sums

    def _read_key(self, labels: Mapping[str, str]) -> _HolderKey | None:
        """Returns None if the series has no holder."""
        cluster = self.server.cluster_of(labels)
        # The other series are of recording rules, which have the owner instead of a pod.
        if "kind" not in labels:
            workload = read_workload(labels)
            if workload is None:
                return None
            return _HolderKey(cluster, read_gpu_id(labels), labels.get("GPU_I_ID", ""), workload)

        kind = labels.get("owner_kind", "")
        name = labels.get("owner_name", "")
        namespace = labels.get("namespace", "")
        job = labels.get("hpc_job", "")
        owner: WorkloadOwner | None = WorkloadOwner(kind, name)
        workload = Workload(namespace, job=job)
        # A pod without an owner stands for itself.
        if kind == "Pod":
            owner = None
            workload = Workload(namespace, name, job=job)

        model = first_label(labels, MODEL_LABELS)
        return _HolderKey(cluster, model, labels.get("GPU_I_PROFILE", ""), workload, owner)


def _make_time(sums: Mapping[str, float]) -> HeldTime:
    """`sums`: by kind of usage. Recording rules have no shares.

    Prometheus has GPU seconds of the share, except for busy and waiting time.
    """
    share = sums.get("shares") or 1.0
    idle = sums.get("idle")

    return HeldTime(
        held=sums["allocated"] / share,
        share=share,
        busy=sums.get("busy"),
        busy_min=sums.get("busy_min"),
        busy_max=sums.get("busy_max"),
        idle=None if idle is None else idle / share,
        waited=sums.get("waited"),
        joules=sums.get("energy"),
        underused=sums.get("underused"),
    )


def _add_by_model(
    samples: Iterable[ParsedSample], find_model: Callable[[Mapping[str, str]], _ModelKey]
) -> dict[_ModelKey, float]:
    sums: dict[_ModelKey, float] = defaultdict(float)
    for sample in samples:
        model = find_model(sample.labels)
        sums[model] += sample.value
    return sums


def _charge_holder(
    account: UsageAccount, gpu: _ModelKey, profile: str, time: HeldTime, served: PodTokens | None
) -> Charge:
    """`profile`: of the MIG instance, or empty. `served`: None if the pod counts no tokens."""
    name = billed_name(gpu.model, profile) if profile else gpu.model
    price = gpu.prices.of(name).gpu_hour
    _, fraction = parent_and_fraction(name)
    size = fraction or 0.0
    if served is None:
        amounts = charge(time, size, price)
    else:
        account = account._replace(model=served.model)
        amounts = charge(time._replace(tokens=served.tokens), size, price)
        amounts = served.cover(amounts, time.held)

    currency = "" if price is None else gpu.prices.currency
    return Charge(account, amounts=amounts, currency=currency, cluster=gpu.cluster)


def _charge_rests(
    seconds: Mapping[_ModelKey, float], joules: Mapping[_ModelKey, float]
) -> list[Charge]:
    """Charges what no holder had."""
    rests = []
    for gpu, rest_seconds in seconds.items():
        price = gpu.prices.of(gpu.model).gpu_hour
        amounts = charge_rest(rest_seconds, size=1.0, held_seconds=0.0, price=price)
        rest = Charge(
            UNALLOCATED,
            amounts=amounts._replace(energy_joules=joules.get(gpu, 0.0)),
            currency="" if price is None else gpu.prices.currency,
            cluster=gpu.cluster,
        )
        rests.append(rest)

    return rests


def _make_token_charges(
    step: Vectors, cluster_label: str, accounts: Mapping[ClusterPod, UsageAccount]
) -> Iterator[Charge]:
    """Yields the busy time and the tokens of each pod in 5 minutes."""
    tokens = read_tokens(step, cluster_label)
    for sample in step.get(_BUSY, ()):
        labels = sample.labels
        cluster = labels.get(cluster_label, "")
        name = labels.get("namespace", ""), labels.get("pod", "")
        pod = cluster, name
        if pod in tokens and pod in accounts:
            counted = tokens[pod].tokens
            amounts = Amounts(
                busy_seconds=sample.value,
                prompt_tokens=counted.prompt,
                generated_tokens=counted.generated,
            )
            yield Charge(accounts[pod], amounts=amounts, cluster=cluster)
