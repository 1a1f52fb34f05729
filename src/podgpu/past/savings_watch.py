"""Computes the savings of the last seven days for metrics, in a thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from podgpu.errors import PodgpuError
from podgpu.fleet.saved_gpus import NO_SAVINGS, SavedGpus, SavingsFigures
from podgpu.known import divide_known
from podgpu.past.interface import Past
from podgpu.past.savings.savings import Advice, SavingsAnswer, SavingsQuery
from podgpu.watch import Watch

_SECONDS = 900.0  # a week changes slowly
_FIRST_SECONDS = 20.0  # until GPUs are held, and there is a day of history
_MAX_PODS = 500  # those that would save most; each has two series
_log = logging.getLogger(__name__)


class SavingsWatch(Watch):
    name = "savings"

    def __init__(self, past: Past) -> None:
        super().__init__()
        self._past = past
        self._latest = NO_SAVINGS

    def read(self) -> SavingsFigures:
        return self._latest

    def update(self) -> None:
        self.pause = _SECONDS
        try:
            answer = asyncio.run(self._past.savings(SavingsQuery()))
        except PodgpuError as error:
            # Old figures could be wrong by now.
            self._latest = NO_SAVINGS
            _log.warning("the metrics of savings are missing: %s", error)
            return

        self._latest = _make_figures(answer)
        if self._latest == NO_SAVINGS:
            self.pause = _FIRST_SECONDS


def _make_figures(answer: SavingsAnswer) -> SavingsFigures:
    # Before the first round, no pod holds a GPU.
    if not answer.is_computed or not answer.totals.before.gpus:
        return NO_SAVINGS

    kinds = []
    for row in answer.kinds:
        # Packing gives nothing back.
        if row.kind != "pack":
            cost = (row.saved.cost or 0.0) if answer.currency else None
            kinds.append(SavedGpus(row.kind, row.saved.gpus, cost))

    pods: list[SavedGpus] = []
    for line in answer.advice:
        if line.kind != "pack":
            pods += _list_pods(line)

    return SavingsFigures(kinds, pods[:_MAX_PODS], answer.currency, answer.prediction_error_ratio)


def _list_pods(line: Advice) -> Iterator[SavedGpus]:
    """Pods that would share a GPU save equal parts, so the sum over pods is what the lines save."""
    count = len(line.pods)
    for pod in line.pods:
        yield SavedGpus(
            line.kind,
            line.saved.gpus / count,
            divide_known(line.saved.cost, count),
            pod.cluster,
            pod.namespace,
            pod.pod or pod.job,
            line.model,
            line.target,
        )
