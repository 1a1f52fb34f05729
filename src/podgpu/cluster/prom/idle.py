"""This module asks which devices Prometheus knows to have been idle, so that podgpu need not have watched them itself.
Pure.

A device is idle while its utilisation is 0: of a MIG instance the engine's, as everywhere. Only one that has samples
all through the window counts; what happened in a gap, nobody knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from podgpu.cluster.prom import promql
from podgpu.cluster.prom.promql import Matcher, by, has, is_
from podgpu.cluster.reading import NodeReading
from podgpu.figures.device import GR_ENGINE, UTIL
from podgpu.metrics.names import generations, names_of
from podgpu.metrics.parse import ParsedSample

LOOKS = 30
"""So often in the window it is looked whether there are samples."""
ASK_EVERY = 600.0
"""Seconds. Between, what a round shows to be busy is taken off."""
_GPU = ("UUID", "uuid")
_INSTANCE = (*_GPU, "GPU_I_ID")
DeviceKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class IdleQuery:
    match: tuple[Matcher, ...]
    window: float
    """Seconds."""

    @property
    def step(self) -> float:
        return max(1, round(self.window * 1000 / LOOKS)) / 1000

    def instant(self, at: float) -> float:
        step = round(self.step * 1000)
        return round(at * 1000) // step * step / 1000

    def text(self) -> str:
        """The engine's activity counts for MIG instances, and for GPUs whose exporters give no GPU_UTIL."""
        busy = promql.selector(names_of(UTIL), *self.match)
        without = f"{self._idle(GR_ENGINE, _GPU, is_('GPU_I_ID'))} unless on ({', '.join(_GPU)}) {busy}"
        instances = self._idle(GR_ENGINE, _INSTANCE, has("GPU_I_ID"))
        return f"{self._idle(UTIL, _GPU)} or ({without}) or {instances}"

    def _idle(self, field: int, keys: tuple[str, ...], *matchers: Matcher) -> str:
        """`group` over each look's instant is 1 where there is data: as many of them as looks, or there was a gap.

        What is over time has no name any more: a figure under two names would be two series alike.
        """
        window, step = promql.milliseconds(self.window), promql.milliseconds(self.step)
        short = promql.milliseconds(self.window - 0.001)
        series = promql.selector(names_of(field), *matchers, *self.match)
        looks = f"count_over_time((group{by(*keys)} ({series}))[{short}:{step}])"
        most = " or ".join(
            f"max_over_time({promql.selector(names, *matchers, *self.match)}[{window}])"
            for names in generations(field)
            if names
        )
        never_used = f"max{by(*keys)} ({most}) == 0"
        return f"(({never_used}) and on ({', '.join(keys)}) ({looks} >= {self.looks}))"

    @property
    def looks(self) -> int:
        """Multiples of the step later than the window's beginning."""
        return -(-round(self.window * 1000) // round(self.step * 1000))


class IdleDevices:
    """Since when devices are idle, by the server's clock, from one time it was asked to the next."""

    def __init__(self, window: float) -> None:
        self._window = window
        self._since: dict[DeviceKey, float] = {}
        self._asked_at: float | None = None

    def is_due(self, at: float) -> bool:
        return self._asked_at is None or abs(at - self._asked_at) >= ASK_EVERY

    def take(self, samples: Iterable[ParsedSample], at: float) -> None:
        """`at`: the instant the query was evaluated at."""
        self._asked_at = at
        found = {_key(sample.labels): at - self._window for sample in samples}
        self._since = {key: min(since, self._since.get(key, since)) for key, since in found.items() if key[0]}

    def watch(self, nodes: Iterable[NodeReading]) -> None:
        """What the round shows in use, or does not show at all, is idle no longer."""
        idle = {device.key for node in nodes for device in node.devices if device.utilization == 0}
        self._since = {key: since for key, since in self._since.items() if key in idle}

    def idle_for(self, at: float) -> Mapping[DeviceKey, float]:
        return {key: max(0.0, at - since) for key, since in self._since.items()}


def _key(labels: Mapping[str, str]) -> DeviceKey:
    return labels.get("UUID") or labels.get("uuid", ""), labels.get("GPU_I_ID", "")
