"""GpmSampler takes Hopper's profiling ratios: means between two samples, kept from tick to tick. No lock, no root."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from podgpu.errors import SourceError
from podgpu.gpu.nvml.driver import NvmlDriver

MIN_SECONDS = 0.1
"""NVML wants the two samples at least 100 ms apart."""


class GpmSampler:
    """The pair of samples of one GPU or GPU instance."""

    def __init__(self, driver: NvmlDriver, take: Callable[[Any], None]) -> None:
        self._driver = driver
        self._take = take
        self._samples: list[Any] = []
        self._last_at: float | None = None

    def read(self, metrics: Iterable[int], now: float) -> dict[int, tuple[int, float]]:
        """Metric -> (NVML return code, value in percent or MiB/s) since the last call; empty the first time."""
        if self._last_at is not None and now - self._last_at < MIN_SECONDS:
            return {}
        while len(self._samples) < 2:
            self._samples.append(self._driver.call("nvmlGpmSampleAlloc"))
        older, newer = self._samples
        self._take(newer)
        answer = {} if self._last_at is None else self._metrics(older, newer, list(metrics))
        self._samples = [newer, older]
        self._last_at = now
        return answer

    def _metrics(self, older: Any, newer: Any, metrics: list[int]) -> dict[int, tuple[int, float]]:
        request = self._driver.constant("c_nvmlGpmMetricsGet_t")()
        request.version = self._driver.constant("NVML_GPM_METRICS_GET_VERSION")
        request.numMetrics = len(metrics)
        request.sample1, request.sample2 = older, newer
        for i, metric in enumerate(metrics):
            request.metrics[i].metricId = metric
        self._driver.call("nvmlGpmMetricsGet", request)
        entries = (request.metrics[i] for i in range(len(metrics)))
        return {entry.metricId: (entry.nvmlReturn, entry.value) for entry in entries}

    def close(self) -> None:
        for sample in self._samples:
            with suppress(SourceError):
                self._driver.call("nvmlGpmSampleFree", sample)
        self._samples, self._last_at = [], None
