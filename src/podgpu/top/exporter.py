"""This module makes an exporter a source of `top`: its metrics, or podgpu's own view of the same figures where that is
to be had."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.state import build_single_node_state
from podgpu.cluster.view import make_view
from podgpu.errors import SourceError, UsageError, few_of
from podgpu.gpu.exposition import UrlExposition
from podgpu.http_client import MAX_METRICS_BYTES, Access
from podgpu.metrics.adapter import node_from_samples
from podgpu.metrics.families import CLUSTER_BUILD_INFO
from podgpu.metrics.parse import BadExposition, ParsedFamily, parse_text
from podgpu.model import NodeState
from podgpu.top.api import PodgpuApi
from podgpu.top.figures import FlatView, flat_view

DEADLINE = 5.0
"""Seconds for one exposition."""
_ASK_AGAIN_SECONDS = 60.0


class ExporterSource:
    has_rates = True
    deadline = 2 * DEADLINE + 0.5
    """For whoever waits: a little more than exposition and view take, whose messages say more."""

    def __init__(
        self,
        url: str,
        largest: int = MAX_METRICS_BYTES,
        deadline: float = DEADLINE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A URL without a path means /metrics. Raises UsageError for what cannot be asked."""
        try:
            self._exposition = UrlExposition(url, Access(prefix=""), deadline, largest)
            self._own_api = PodgpuApi(url, "a podgpu exporter", deadline)
        except UsageError as error:
            raise UsageError(f"--url {error}") from error
        self.name = self._exposition.shown
        self._clock = clock
        self._speaks_api = False
        self._ask_api_at = float("-inf")

    @property
    def api(self) -> PodgpuApi | None:
        """None: it is no podgpu, or does not let its view be seen."""
        return self._own_api if self._speaks_api else None

    def read(self) -> FlatView:
        """The view says more than the metrics: what is wrong in words, owners, cost. Raises SourceError."""
        if self._speaks_api and (view := self._view()) is not None:
            return view
        families = self._families()
        samples = (sample for family in families for sample in family.samples)
        try:
            states = node_from_samples(samples)
        except msgspec.ValidationError as error:
            raise SourceError("malformed", f"the metrics of {self.name} cannot be read: {error}") from error
        is_podgpu = any(state.producer == "podgpu" for state in states)
        if is_podgpu and self._clock() >= self._ask_api_at and (view := self._view()) is not None:
            return view
        found = _view_of(states)
        if not found.devices:
            raise self._no_gpu(found, families)
        return found

    def _view(self) -> FlatView | None:
        """None: not to be had, or without GPUs. The metrics then say why, or have figures all the same."""
        try:
            view = self._own_api.view()
        except SourceError:
            self._speaks_api, self._ask_api_at = False, self._clock() + _ASK_AGAIN_SECONDS
            return None
        self._speaks_api = bool(view.devices)
        return view if view.devices else None

    def _families(self) -> list[ParsedFamily]:
        try:
            return list(parse_text(self._exposition.fetch().decode()))
        except UnicodeDecodeError as error:
            raise SourceError(
                "malformed", f"the metrics of {self.name} cannot be read: byte {error.start} is not UTF-8"
            ) from error
        except BadExposition as error:
            raise SourceError(error.reason, f"the metrics of {self.name} cannot be read: {error}") from error

    def _no_gpu(self, view: FlatView, families: list[ParsedFamily]) -> SourceError:
        is_cluster = any(family.name == CLUSTER_BUILD_INFO.name for family in families)
        asked_wrongly = "it is podgpu cluster: use --cluster" if is_cluster else "is it a GPU exporter?"
        return SourceError("no_gpu", f"{self.name} has no GPU in its metrics: {'; '.join(view.notes) or asked_wrongly}")

    def close(self) -> None:
        """Nothing stays open between readings."""


def _view_of(states: Sequence[NodeState]) -> FlatView:
    """Metrics of one exporter may name several nodes."""
    parts = []
    for state in states:
        failing = [source.name for source in state.sources if source.up is False]
        notes = [f"the exporter cannot read: {few_of(failing)}"] if failing else []
        untimed = msgspec.structs.replace(state, taken_at=None)
        parts.append(build_single_node_state(untimed, ViewSettings(), 0.0, 0.0, notes=notes))
    whole = replace(
        parts[0],
        nodes=tuple(node for part in parts for node in part.nodes),
        notes=tuple(note for part in parts for note in part.notes),
        alerts=tuple(alert for part in parts for alert in part.alerts),
    )
    return flat_view(make_view(whole))
