"""Answers `/api/v1/range` and `/api/v1/waste` with queries to Prometheus or a compatible server.

If podgpu's recording rules cover the range, hours of owners and namespaces are read from the rules.
Otherwise they are read from the exporters' counters.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from podgpu.charge import UNALLOCATED, Charge, HeldTime, UsageAccount, charge, charge_rest
from podgpu.errors import SourceError, utc_text
from podgpu.fleet.prices import Prices
from podgpu.fleet.read.prometheus import (
    RULE_LABELS,
    USAGE_RULE,
    PodOwners,
    PrometheusClient,
    PrometheusServer,
    read_node_labels,
)
from podgpu.fleet.state import ClusterState, describe_unpriced
from podgpu.metrics.adapter import (
    MODEL_LABELS,
    UUID_LABELS,
    WORKLOAD_LABELS,
    PodName,
    first_label,
    read_gpu_id,
    read_workload,
)
from podgpu.metrics.fields import ENGINE, TEMPERATURE, UTIL, names_of
from podgpu.metrics.mig import billed_name, parent_and_fraction
from podgpu.metrics.parse import ParsedSample
from podgpu.metrics.promql import by, select
from podgpu.model import Workload, WorkloadOwner, group_by_key
from podgpu.past.bill import (
    RangeAnswer,
    RangeQuery,
    RowName,
    group_now,
    make_range,
    name_row,
    sum_usage,
)
from podgpu.past.schema import COARSE, FINE, HOUR

_TIMEOUT = 60.0
_MAX_STEPS = 2880  # maximum number of times at which GPUs are counted
_COUNTERS = {
    "allocated": "podgpu_container_gpu_allocated_seconds_total",
    "busy": "podgpu_container_gpu_busy_seconds_total",
    "busy_min": "podgpu_container_gpu_busy_seconds_min_total",
    "busy_max": "podgpu_container_gpu_busy_seconds_max_total",
    "idle": "podgpu_container_gpu_idle_seconds_total",
    "waited": "podgpu_container_gpu_wait_seconds_total",
    "energy": "podgpu_container_gpu_energy_joules_total",
    "unattributed_energy": "podgpu_device_unattributed_energy_joules_total",
}
_RULES = {"podgpu:usage:sum1h": HOUR, USAGE_RULE: COARSE}  # the coarsest first
_MIN_SAMPLES = 200  # a rule with fewer samples in a range is not exact enough at the start and end
_GPU_NAMES = (
    *(name for field in (TEMPERATURE, UTIL, ENGINE) for name in names_of(field)),
    "podgpu_device_energy_joules_total",
)
_GPU_KEYS = (*UUID_LABELS, *MODEL_LABELS)
_HOLDER_KEYS = (*_GPU_KEYS, "GPU_I_ID", "GPU_I_PROFILE", *WORKLOAD_LABELS)
Vectors = Mapping[str, Sequence[ParsedSample]]  # by kind of usage


class _HolderKey(NamedTuple):
    """Identifies a holder and its GPU or MIG instance. With a recording rule, `gpu` is the model,
    not a UUID.
    """

    cluster: str
    gpu: str
    instance: str
    workload: Workload
    owner: WorkloadOwner | None = None

    @property
    def pod(self) -> PodName:
        return self.workload.namespace, self.workload.pod


async def read_bill(
    server: PrometheusServer, query: RangeQuery, prices: Prices, state: ClusterState
) -> RangeAnswer:
    """Returns the answer to `/api/v1/range`. Raises SourceError.

    `state`: the current state. Its owners are used if kube-state-metrics does not report a pod.
    """
    server = replace(server, timeout=_TIMEOUT)
    async with aclosing(PrometheusClient(server)) as client:
        now = await client.query_time()
        start, end = query.bounds(now)
        step = FINE * max(1, math.ceil((end - start) / FINE / _MAX_STEPS))
        end = end // step * step
        start = min(start // step * step, end - step)
        reader = _RangeReader(client, server, query, prices, state)
        return await reader.read(start, end, step, now // FINE * FINE)


@dataclass
class _RangeReader:
    client: PrometheusClient
    server: PrometheusServer
    query: RangeQuery
    prices: Prices
    state: ClusterState
    notes: list[str] = field(default_factory=list)
    rule: str = ""

    async def read(self, start: float, end: float, step: int, now: float) -> RangeAnswer:
        """Adds a note for each failed query. Raises SourceError if the allocated hours cannot be
        read.
        """
        rule = self.rule = await self._find_rule(start, end)
        usage: list[Charge] = []
        for first, last, prices in self.prices.periods(start, end):
            if rule:
                function = f"sum_over_time({{}}[{round((last - first) * 1000) - 1}ms])"
                found = await self._read_rule(rule, function, last)
            else:
                found = await self._read_counters(first, last, step)
            usage += await self._make_usage(found, first, last, prices)
        if rule and not any(one.account.methods for one in usage):
            self.notes.append(
                f"missing: methods of usage: {rule} was recorded by rules of an older version"
            )
        if not await self._may_have_gpus(start + step):
            self.notes.append(
                f"Prometheus has no GPU metrics at {utc_text(start)}, the start of the range"
            )
        if not any(any(one.account) for one in usage):
            self.notes.append("Prometheus has no counters of podgpu's exporters in this range")
        self.notes.extend(describe_unpriced(self.state.nodes, self.prices))
        if rule and self.prices.label_names:
            self.notes.append(
                "the cost is unknown: prices depend on node labels, but there are too many "
                "GPUs "
                "to read their nodes"
            )
        current = {} if self.query.end is not None else await self._read_now(usage, now)
        answer = make_range(self.query, (start, end), usage, self.prices.at(end), current)
        answer.simulated, answer.source = self.state.simulated, rule or "counters"
        answer.notes[:0] = dict.fromkeys((*self.notes, *self.client.notes))
        return answer

    async def _ask(self, what: str, query: str, at: float) -> list[ParsedSample]:
        try:
            return await self.client.query(query, at)
        except SourceError as error:
            if what == "allocated":
                raise
            what = "methods of usage" if what == "method" else what.replace("_", " ")
            self.notes.append(f"missing: {what}: {error}")
            return []

    # Queries

    async def _find_rule(self, start: float, end: float) -> str:
        """Returns the coarsest recording rule that covers all GPU metrics in the range, or "" if
        there is none.

        Rules do not contain nodes. With prices by node label, a rule is used only if there are too
        many GPUs to read.
        """
        is_by_node = self.prices.label_names and self.state.fleet is None
        if self.query.by not in ("owner", "namespace") or is_by_node:
            return ""
        for name, seconds in _RULES.items():
            length = end - start
            if length < _MIN_SAMPLES * seconds:
                continue
            series = select((name,), 'kind="gpu_seconds"', self.server.match)
            counts = await self._ask(
                "recording rules", f"max(count_over_time({series}[{round(length)}s]))", end
            )
            covered = sum(count.value for count in counts) * seconds
            if covered >= 0.99 * length:
                return name
            if covered and not await self._may_have_gpus(end - covered - 2 * seconds):
                return name  # the server has no older samples
        return ""

    async def _may_have_gpus(self, at: float) -> bool:
        """Returns True if the server has GPU metrics at this time, or if the query fails."""
        try:
            return bool(
                await self.client.query(f"group({select(_GPU_NAMES, self.server.match)})", at)
            )
        except SourceError as error:
            self.notes.append(f"missing: GPUs at {utc_text(at)}: {error}")
            return True

    async def _read_rule(self, name: str, function: str, end: float) -> Vectors:
        """Reads a recording rule. `function`: PromQL in which `{}` stands for the series."""
        series = function.format(select((name,), self.server.match))
        keys = by(self.server.cluster_label, *RULE_LABELS, "method")
        samples = await self.client.query(f"max {keys} ({series})", end)
        return group_by_key((sample.labels.get("kind", ""), sample) for sample in samples)

    async def _read_counters(self, start: float, end: float, step: int) -> Vectors:
        length = round((end - start) * 1000) - 1  # milliseconds; excludes the start of the range
        cluster = self.server.cluster_label
        gpus = f"group {by(cluster, *_GPU_KEYS)} ({select(_GPU_NAMES, self.server.match)})"
        queries = {kind: self._increase(name, end - start) for kind, name in _COUNTERS.items()}
        shares = select(("podgpu_allocation_share_ratio",), self.server.match)
        methods = select(("podgpu_device_usage_method",), self.server.match)
        window, device_keys = (
            f"{round(end - start)}s",
            by(cluster, *UUID_LABELS, "GPU_I_ID", "method"),
        )
        queries["shares"] = f"avg {by(cluster, *_HOLDER_KEYS)} (avg_over_time({shares}[{window}]))"
        queries["method"] = f"group {device_keys} (last_over_time({methods}[{window}]))"
        keys = (*MODEL_LABELS, *(UUID_LABELS if self.prices.label_names else ()))
        queries["gpu_seconds"] = (
            f"{step} * sum {by(cluster, *keys)} (count_over_time(({gpus})[{length}ms:{step}s]))"
        )
        results = await asyncio.gather(
            *(self._ask(kind, query, end) for kind, query in queries.items())
        )
        return dict(zip(queries, results, strict=True))

    def _increase(self, name: str, seconds: float) -> str:
        """Returns a query for a counter's increase. `max` merges the series of an HA pair, `sum`
        those of exporters.
        """
        increase = f"increase({select((name,), self.server.match)}[{round(seconds)}s])"
        keys = (self.server.cluster_label, *_HOLDER_KEYS)
        return f"sum {by(*keys)} (max {by(*keys, 'job', 'instance')} ({increase}))"

    async def _read_now(self, usage: Sequence[Charge], end: float) -> dict[RowName, dict[str, Any]]:
        """Returns the current values of rows. With a recording rule, these are means of the last 5
        minutes.
        """
        if not self.rule:
            return group_now(self.state, usage, self.query) if self.state.nodes else {}
        recorded = await self._read_rule(USAGE_RULE, f"last_over_time({{}}[{2 * COARSE}s])", end)
        found = {kind: samples for kind, samples in recorded.items() if kind != "gpu_seconds"}
        usage = await self._make_usage(found, end - COARSE, end, self.prices.at(end))
        groups = group_by_key((name_row(one, self.query), one) for one in usage)
        rows = {}
        for name, group in groups.items():
            amounts, is_priced = sum_usage(group), any(one.currency for one in group)
            rows[name] = {
                "gpus": round(amounts.allocated_seconds / COARSE, 2),
                "idle_gpus": round(amounts.idle_seconds / COARSE, 2),
                "cost_per_hour": round(amounts.cost * HOUR / COARSE, 2) if is_priced else None,
            }
        return rows

    # Names of pods

    async def _read_accounts(
        self, keys: Sequence[_HolderKey], methods: Iterable[ParsedSample], start: float, end: float
    ) -> dict[_HolderKey, UsageAccount]:
        """Returns the account of each holder, with its owner, the requested label and the methods
        of measurement.
        """
        window = f"{round(end - start)}s"
        labels = await self._read_labels(self.query.label, window, end) if self.query.label else {}
        owners: dict[tuple[str, PodName], WorkloadOwner] = {}
        if self.query.by in ("pod", "owner"):
            pods = group_by_key((key.cluster, key.pod) for key in keys if key.workload.pod)
            for cluster, names in pods.items():
                try:
                    reader = PodOwners(
                        self.client, self.server.match, self.server.cluster_label, cluster
                    )
                    known = await reader.read(sorted(set(names)), window, end)
                except SourceError as error:
                    self.notes.append(f"missing: owners of pods: {error}")
                else:
                    owners |= {(cluster, pod): owner for pod, owner in known.items()}
        others = (
            {} if self.rule else self.state.owners
        )  # recording rules know only owners from kube-state-metrics
        methods_of: dict[tuple[Any, ...], set[str]] = defaultdict(
            set
        )  # by holder or, without a rule, by device
        for found in (sample.labels for sample in methods):
            device = (
                found.get(self.server.cluster_label, ""),
                read_gpu_id(found),
                found.get("GPU_I_ID", ""),
            )
            methods_of[self._read_key(found) or device].add(found.get("method", ""))
        accounts = {}
        for key in keys:
            workload, pod = key.workload, (key.cluster, key.pod)
            ids = (
                ("", "", "")
                if workload.pod
                else (workload.job, workload.uid, workload.container_id)
            )
            owner = key.owner or owners.get(pod) or others.get(key.pod) or WorkloadOwner("", "")
            used = " ".join(sorted(methods_of[key if self.rule else key[:3]]))
            accounts[key] = UsageAccount(
                *key.pod, *ids, owner.kind, owner.name, labels.get(pod, ""), used
            )
        return accounts

    async def _read_labels(
        self, name: str, window: str, end: float
    ) -> dict[tuple[str, PodName], str]:
        """Returns the label `name` of each pod as a JSON object, from kube-state-metrics or the
        exporters' series.
        """
        found: dict[tuple[str, PodName], str] = {}
        for names, label in ((_GPU_NAMES, name), (("kube_pod_labels",), f"label_{name}")):
            matcher = f'{label}!=""'
            series = f"last_over_time({select(names, matcher, self.server.match)}[{window}])"
            query = f"group {by(self.server.cluster_label, *WORKLOAD_LABELS, label)} ({series})"
            for sample in await self._ask(f"label {label}", query, end):
                pod = read_workload(sample.labels)
                if pod is not None and pod.pod:
                    key = sample.labels.get(self.server.cluster_label, ""), (pod.namespace, pod.pod)
                    found[key] = json.dumps({name: sample.labels[label]})
        return found

    # Usage

    async def _make_usage(
        self, found: Vectors, start: float, end: float, prices: Prices
    ) -> list[Charge]:
        billed = {
            key: sample
            for sample in found.get("allocated", ())
            if (key := self._read_key(sample.labels)) is not None
        }
        accounts = await self._read_accounts(list(billed), found.get("method", ()), start, end)
        gpu_prices = await self._read_gpu_prices(prices, start, end)
        seconds: dict[tuple[str, str, Prices], float] = defaultdict(
            float
        )  # unallocated, after subtraction below
        joules: dict[tuple[str, str, Prices], float] = defaultdict(float)
        for sums, kind in ((seconds, "gpu_seconds"), (joules, "unattributed_energy")):
            for sample in found.get(kind, ()):
                cluster = sample.labels.get(self.server.cluster_label, "")
                own = gpu_prices.get((cluster, read_gpu_id(sample.labels)), prices)
                sums[cluster, first_label(sample.labels, MODEL_LABELS), own] += sample.value
        amounts_of = {
            kind: self._add_by_key(found.get(kind, ())) for kind in (*_COUNTERS, "shares")
        }
        usage = []
        for key, sample in billed.items():
            model, profile = (
                first_label(sample.labels, MODEL_LABELS),
                sample.labels.get("GPU_I_PROFILE", ""),
            )
            name = billed_name(model, profile) if profile else model
            own = gpu_prices.get((key.cluster, key.gpu), prices)
            price = own.of(name).gpu_hour
            time = _make_time({kind: sums[key] for kind, sums in amounts_of.items() if key in sums})
            amounts = charge(time, parent_and_fraction(name)[1] or 0.0, price)
            currency = "" if price is None else prices.currency
            usage.append(
                Charge(accounts[key], amounts=amounts, currency=currency, cluster=key.cluster)
            )
            if (key.cluster, model, own) in seconds:
                seconds[key.cluster, model, own] -= amounts.allocated_seconds
        for (cluster, model, own), left in seconds.items():
            price = own.of(model).gpu_hour
            amounts = charge_rest(left, 1.0, 0.0, price)._replace(
                energy_joules=joules[cluster, model, own]
            )
            currency = "" if price is None else prices.currency
            usage.append(Charge(UNALLOCATED, amounts=amounts, currency=currency, cluster=cluster))
        return sorted(usage)  # makes rounding independent of the order of query results

    async def _read_gpu_prices(
        self, prices: Prices, start: float, end: float
    ) -> dict[tuple[str, str], Prices]:
        """Returns prices by cluster and GPU, if they depend on node labels. Omits GPUs whose nodes
        differ in price.
        """
        if not prices.nodes or self.rule:
            return {}
        window, nodes = f"{round(end - start)}s", self.server.node_labels
        ask = partial(self._ask, at=end)
        known = await read_node_labels(ask, self.server, prices.label_names, window)
        series = f"last_over_time({select(_GPU_NAMES, self.server.match)}[{window}])"
        query = f"group {by(self.server.cluster_label, *UUID_LABELS, *nodes)} ({series})"
        found: dict[tuple[str, str], set[Prices]] = defaultdict(set)
        for labels in (sample.labels for sample in await ask("nodes of GPUs", query)):
            cluster, node = labels.get(self.server.cluster_label, ""), first_label(labels, nodes)
            found[cluster, read_gpu_id(labels)].add(prices.on_node(known.get((cluster, node))))
        return {gpu: own.pop() for gpu, own in found.items() if len(own) == 1}

    def _add_by_key(self, samples: Iterable[ParsedSample]) -> dict[_HolderKey, float]:
        sums: dict[_HolderKey, float] = defaultdict(float)
        for sample in samples:
            if (key := self._read_key(sample.labels)) is not None:
                sums[key] += sample.value
        return sums

    def _read_key(self, labels: Mapping[str, str]) -> _HolderKey | None:
        cluster = labels.get(self.server.cluster_label, "")
        if "kind" not in labels:
            workload = read_workload(labels)
            if workload is None:
                return None
            return _HolderKey(cluster, read_gpu_id(labels), labels.get("GPU_I_ID", ""), workload)
        kind, name = labels.get("owner_kind", ""), labels.get("owner_name", "")
        is_pod = kind == "Pod"
        return _HolderKey(
            cluster,
            first_label(labels, MODEL_LABELS),
            labels.get("GPU_I_PROFILE", ""),
            Workload(
                labels.get("namespace", ""), name if is_pod else "", job=labels.get("hpc_job", "")
            ),
            None if is_pod else WorkloadOwner(kind, name),
        )


def _make_time(sums: Mapping[str, float]) -> HeldTime:
    """`sums`: by kind of usage. Recording rules have no shares, because their idle time is
    multiplied by them.
    """
    share = sums.get("shares") or 1.0
    return HeldTime(
        held=sums["allocated"] / share,
        share=share,
        busy=sums.get("busy"),
        busy_min=sums.get("busy_min"),
        busy_max=sums.get("busy_max"),
        idle=sums.get("idle"),
        waited=sums.get("waited"),
        joules=sums.get("energy", 0.0),
    )
