"""`SqlitePast`: reads every answer about the past from the history in SQLite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from sqlite3 import Connection

from podgpu.fleet.read.pages import GpuQuery
from podgpu.fleet.round import PublishedState
from podgpu.fleet.state import ClusterState
from podgpu.past.bills.bill import RangeAnswer, RangeQuery
from podgpu.past.bills.costs import CostsAnswer, CostsQuery
from podgpu.past.books.recorder import HistoryRecorder
from podgpu.past.events import EventQuery, EventsAnswer
from podgpu.past.gpu_history import (
    JSON,
    GpuHistory,
    JobHistory,
    PodHistory,
    make_pod_history,
    sparkline_times,
    sparklines_json,
)
from podgpu.past.interface import Past
from podgpu.past.job import JobSummary
from podgpu.past.savings.advice import make_savings
from podgpu.past.savings.savings import SavingsAnswer, SavingsQuery
from podgpu.past.sqlite.sqlite_bills import read_costs_answer, read_range_answer
from podgpu.past.sqlite.sqlite_events import read_events
from podgpu.past.sqlite.sqlite_job import read_summary
from podgpu.past.sqlite.sqlite_loads import read_fleet_load
from podgpu.past.sqlite.sqlite_moment import read_past
from podgpu.past.sqlite.sqlite_series import read_gpu, read_job, read_pod, read_utilization
from podgpu.past.time_steps import COARSE, FINE, floor_time

_MAX_SAVINGS = 16  # answers that are kept until the next step of 5 minutes


class SqlitePast(Past):
    """The past that a recorder stored."""

    has_summaries = True

    def __init__(self, recorder: HistoryRecorder, read_state: Callable[[], ClusterState]) -> None:
        """`read_state`: returns the current state."""
        self._recorder = recorder
        self._read_state = read_state
        # Start of the minute -> utilisation by device.
        self._points: dict[int, Mapping[str, float | None]] = {}
        # Every open page asks for the same savings. They change every 5 minutes.
        self._savings: dict[tuple[SavingsQuery, int], SavingsAnswer] = {}

    async def range(self, query: RangeQuery) -> RangeAnswer:
        answer = await self._recorder.ask(
            lambda db, now: read_range_answer(db, query, now, self._read_state())
        )
        answer.in_memory = self._recorder.is_in_memory
        return answer

    async def costs(self, query: CostsQuery) -> CostsAnswer:
        answer = await self._recorder.ask(
            lambda db, now: read_costs_answer(db, query, now, self._read_state())
        )
        answer.in_memory = self._recorder.is_in_memory
        return answer

    async def savings(self, query: SavingsQuery) -> SavingsAnswer:
        return await self._recorder.ask(partial(self._read_savings, query))

    def _read_savings(self, query: SavingsQuery, db: Connection, now: float) -> SavingsAnswer:
        key = query._replace(is_csv=False), floor_time(now, COARSE)
        cached = self._savings.get(key)
        if cached is not None:
            return cached

        state = self._read_state()
        fleet = read_fleet_load(db, query, now, state)
        answer = make_savings(query, fleet, state.prices.currency)
        answer.prices = state.prices.source
        answer.simulated = state.simulated
        answer.in_memory = self._recorder.is_in_memory
        # Before the first round, no pod holds a GPU. The next request must not get that answer.
        if not fleet.pods:
            return answer
        if len(self._savings) >= _MAX_SAVINGS:
            self._savings = {}

        self._savings[key] = answer
        return answer

    async def find(self, query: GpuQuery) -> PublishedState:
        def read(db: Connection, now: float) -> PublishedState:
            at = now if query.at is None else query.at
            return PublishedState(read_past(db, at, self._read_state()))

        return await self._recorder.ask(read)

    async def sparklines(self) -> JSON:
        return await self._recorder.ask(self._read_sparklines)

    async def gpu(self, uuid: str, instance: str, seconds: int) -> GpuHistory | None:
        return await self._recorder.ask(
            lambda db, now: read_gpu(db, uuid, now - seconds, now, instance)
        )

    async def pod(
        self, namespace: str, pod: str, seconds: int, cluster: str | None = None
    ) -> PodHistory | None:
        def read(db: Connection, now: float) -> PodHistory | None:
            gpus = read_pod(db, namespace, pod, now - seconds, now)
            return make_pod_history(namespace, pod, gpus)

        return await self._recorder.ask(read)

    async def job(self, kind: str, namespace: str, name: str, seconds: int) -> JobHistory | None:
        return await self._recorder.ask(
            lambda db, now: read_job(db, kind, namespace, name, now - seconds, now)
        )

    async def events(self, query: EventQuery) -> EventsAnswer:
        return await self._recorder.ask(lambda db, now: read_events(db, query, now))

    async def summary(self, namespace: str, pod: str) -> JobSummary | None:
        return await self._recorder.ask(
            lambda db, now: read_summary(db, namespace, pod, now, self._read_state())
        )

    def _read_sparklines(self, db: Connection, now: float) -> JSON:
        """Builds the sparklines.

        Caches points of past minutes, because every open page requests them repeatedly.
        """
        times = sparkline_times(now)
        cached = self._points  # local, because another thread may replace self._points
        points: dict[int, Mapping[str, float | None]] = {}
        for at in times:
            end = at + times.step
            if at in cached and end <= now - FINE:
                points[at] = cached[at]
            else:
                points[at] = read_utilization(db, at, end)

        self._points = points

        names: set[str] = set()
        for values in points.values():
            names.update(values)

        lines = {}
        for name in sorted(names):
            lines[name] = [values.get(name) for values in points.values()]

        return sparklines_json(times, lines)
