"""The interface of a past: what the page and the API ask about time.

`SqlitePast` reads what this podgpu recorded, `PrometheusPast` what a Prometheus server stores.
"""

from __future__ import annotations

from podgpu.fleet.read.pages import GpuQuery
from podgpu.fleet.round import PublishedState
from podgpu.past.bills.bill import RangeAnswer, RangeQuery
from podgpu.past.bills.costs import CostsAnswer, CostsQuery
from podgpu.past.events import EventQuery, EventsAnswer
from podgpu.past.gpu_history import JSON, GpuHistory, JobHistory, PodHistory
from podgpu.past.job import JobSummary
from podgpu.past.savings.savings import SavingsAnswer, SavingsQuery


class Past:
    """The methods raise SourceError if the past cannot be read."""

    has_summaries = False  # True if `summary` and `job` are implemented

    async def range(self, query: RangeQuery) -> RangeAnswer:
        raise NotImplementedError

    async def costs(self, query: CostsQuery) -> CostsAnswer:
        raise NotImplementedError

    async def savings(self, query: SavingsQuery) -> SavingsAnswer:
        raise NotImplementedError

    async def find(self, query: GpuQuery) -> PublishedState:
        """Returns the GPUs at the time `query.at`. Prometheus returns only those that match.

        Raises UsageError if there is no record of this time.
        """
        raise NotImplementedError

    async def sparklines(self) -> JSON:
        raise NotImplementedError

    async def gpu(self, uuid: str, instance: str, seconds: int) -> GpuHistory | None:
        """Returns None if the GPU is unknown."""
        raise NotImplementedError

    async def pod(
        self, namespace: str, pod: str, seconds: int, cluster: str | None = None
    ) -> PodHistory | None:
        """Returns None if the pod held no GPU in the last `seconds`. SQLite ignores `cluster`."""
        raise NotImplementedError

    async def job(self, kind: str, namespace: str, name: str, seconds: int) -> JobHistory | None:
        """Returns None if no pod of the job held a GPU in the last `seconds`."""
        raise NotImplementedError

    async def events(self, query: EventQuery) -> EventsAnswer:
        raise NotImplementedError

    async def summary(self, namespace: str, pod: str) -> JobSummary | None:
        """Returns None if there is no record of the pod."""
        raise NotImplementedError
