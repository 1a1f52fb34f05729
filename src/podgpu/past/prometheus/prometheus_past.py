"""`PrometheusPast`: reads every answer about the past from Prometheus or a compatible server."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Generic, TypeVar

from msgspec.structs import replace as replace_fields

from podgpu.fleet.prices import Prices, ReadPrices, no_prices
from podgpu.fleet.read.pages import GpuQuery, PrometheusSelection
from podgpu.fleet.read.prometheus import PrometheusClient, PrometheusServer
from podgpu.fleet.round import Cluster, PublishedState
from podgpu.metrics.promql import quote
from podgpu.past.bills.bill import RangeAnswer, RangeQuery
from podgpu.past.bills.costs import CostsAnswer, CostsQuery, select_budgets
from podgpu.past.events import EventQuery, EventsAnswer
from podgpu.past.gpu_history import (
    JSON,
    MAX_POINTS,
    GpuHistory,
    PodHistory,
    make_pod_history,
    sparkline_times,
    sparklines_json,
)
from podgpu.past.interface import Past
from podgpu.past.prometheus.prometheus_charges import read_bill, read_costs
from podgpu.past.prometheus.prometheus_events import read_prometheus_events
from podgpu.past.prometheus.prometheus_savings import read_savings
from podgpu.past.prometheus.prometheus_series import (
    DeviceLines,
    HistoryReader,
    UuidAndInstance,
    Window,
    read_device,
)
from podgpu.past.savings.savings import SavingsAnswer, SavingsQuery
from podgpu.past.time_steps import COARSE, FINE, ceil_time

CACHE_SECONDS = 15.0  # of sparklines
_ANSWER_SECONDS = 300.0  # of costs and savings: every open page requests them; days change slowly
_MAX_ANSWERS = 32
_MAX_GPUS_OF_POD = 256
_GPUS_PER_QUERY = 16  # VictoriaMetrics rejects queries of more than 16 KiB

_Query = TypeVar("_Query")
_Answer = TypeVar("_Answer")


class _AnswerCache(Generic[_Query, _Answer]):
    """Keeps answers for `_ANSWER_SECONDS`. A change of the prices makes another answer."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # With the time until which an answer is used.
        self._answers: dict[tuple[_Query, Prices], tuple[float, _Answer]] = {}

    def find(self, query: _Query, prices: Prices) -> _Answer | None:
        cached = self._answers.get((query, prices))
        if cached is None:
            return None

        used_until, answer = cached
        if self._clock() > used_until:
            return None
        return answer

    def add(self, query: _Query, prices: Prices, answer: _Answer) -> None:
        while len(self._answers) >= _MAX_ANSWERS:
            oldest = next(iter(self._answers))
            del self._answers[oldest]

        used_until = self._clock() + _ANSWER_SECONDS
        self._answers[query, prices] = used_until, answer


class PrometheusPast(Past):
    """The past in Prometheus. It has no summaries of pods.

    Sparklines and costs are cached, because every open page requests them.
    """

    def __init__(
        self,
        server: PrometheusServer,
        cluster: Cluster,
        prices: ReadPrices = no_prices,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._cluster = cluster
        self._prices = prices
        self._select = PrometheusSelection(server, cluster, prices)
        self._clock = clock
        self._sparklines: JSON = {}
        self._sparklines_at = -math.inf
        self._lock = asyncio.Lock()
        self._costs: _AnswerCache[CostsQuery, CostsAnswer] = _AnswerCache(clock)
        self._savings: _AnswerCache[SavingsQuery, SavingsAnswer] = _AnswerCache(clock)

    async def range(self, query: RangeQuery) -> RangeAnswer:
        state = self._cluster.published.state
        prices, _ = self._prices()
        return await read_bill(self._server, query, prices, state)

    async def costs(self, query: CostsQuery) -> CostsAnswer:
        state = self._cluster.published.state
        prices, _ = self._prices()
        answer = self._costs.find(query, prices)
        if answer is None:
            answer = await read_costs(self._server, query, prices, state)
            self._costs.add(query, prices, answer)

        budgets = select_budgets(state.budgets, query.range)
        return replace_fields(answer, budgets=budgets)

    async def savings(self, query: SavingsQuery) -> SavingsAnswer:
        query = query._replace(is_csv=False)
        prices, _ = self._prices()
        answer = self._savings.find(query, prices)
        if answer is None:
            state = self._cluster.published.state
            read_gpus = self._select.read_gpus
            answer = await read_savings(self._server, query, prices, state, read_gpus)
            # Before the first round, no pod holds a GPU.
            if answer.totals.before.gpus:
                self._savings.add(query, prices, answer)

        return answer

    async def find(self, query: GpuQuery) -> PublishedState:
        return await self._select(query)

    async def sparklines(self) -> JSON:
        async with self._lock:
            now = self._clock()
            if now - self._sparklines_at > CACHE_SECONDS:
                async with aclosing(PrometheusClient(self._server)) as client:
                    self._sparklines = await self._read_sparklines(client)
                self._sparklines_at = now
            return self._sparklines

    async def gpu(self, uuid: str, instance: str, seconds: int) -> GpuHistory | None:
        async with aclosing(PrometheusClient(self._server)) as client:
            reader = await self._make_reader(client, seconds)
            devices = await reader.read_devices([uuid])
            device = devices.get((uuid, instance))
            if device is None:
                return None
            return device.make_history(device.figures)

    async def pod(
        self, namespace: str, pod: str, seconds: int, cluster: str | None = None
    ) -> PodHistory | None:
        name = namespace, pod
        matcher = ""
        if cluster is not None:
            matcher = f"{self._server.cluster_label}={quote(cluster)}"

        devices: dict[UuidAndInstance, DeviceLines] = {}
        async with aclosing(PrometheusClient(self._server)) as client:
            reader = await self._make_reader(client, seconds, matcher)
            held: set[str] = set()
            for line in await reader.read("max", reader.held_by(name)):
                uuid, _ = read_device(line.labels)
                held.add(uuid)

            uuids = sorted(held - {""})[:_MAX_GPUS_OF_POD]
            for first in range(0, len(uuids), _GPUS_PER_QUERY):
                chunk = uuids[first : first + _GPUS_PER_QUERY]
                devices |= await reader.read_devices(chunk, name)

        histories = []
        for device in devices.values():
            history = device.history_of_pod(name)
            if history is not None:
                histories.append(history)

        histories.sort(key=lambda gpu: (gpu.node, gpu.index or 0, gpu.uuid, gpu.instance))
        return make_pod_history(namespace, pod, histories)

    async def events(self, query: EventQuery) -> EventsAnswer:
        return await read_prometheus_events(self._server, query, self._cluster.published.state)

    async def _read_sparklines(self, client: PrometheusClient) -> JSON:
        times = sparkline_times(await client.query_time())
        window = Window(times.start, times.step, len(times))
        reader = HistoryReader(client, window, self._server)
        query = reader.figures()["utilization_ratio"]

        lines = {}
        for labels, points in await reader.read("avg", query):
            uuid, instance = read_device(labels)
            key = uuid
            if instance:
                key = f"{uuid}/{instance}"
            lines[key] = window.align("utilization_ratio", points)

        return sparklines_json(times, lines)

    async def _make_reader(
        self, client: PrometheusClient, seconds: int, matcher: str = ""
    ) -> HistoryReader:
        step = FINE
        if seconds > MAX_POINTS * FINE:
            step = ceil_time(seconds / MAX_POINTS, COARSE)

        count = seconds // step
        end = await client.query_time() // FINE * FINE
        window = Window(end - count * step, step, count)

        matchers = filter(None, (matcher, self._server.match))
        server = replace(self._server, match=",".join(matchers))
        return HistoryReader(client, window, server)
