"""Collector that reads the exporters directly: `GET /api/v1/node` from podgpu, metrics text from
other exporters.

A failing exporter affects only its own node. If a target is no longer listed, its last reading is
kept for a while.
"""

from __future__ import annotations

import asyncio
import logging
import re
import resource
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

import aiohttp
import msgspec
from msgspec.structs import replace

from podgpu.clock import Clock, RepeatFilter
from podgpu.errors import SourceError, UsageError
from podgpu.fleet.readings import (
    ClusterReading,
    NodeLabels,
    NodeReading,
    Owners,
    TargetOutcome,
    ViewSettings,
)
from podgpu.http_client import (
    MAX_METRICS_BYTES,
    METRICS_TYPES,
    Access,
    HttpClient,
    check_is_metrics,
    open_session,
)
from podgpu.metrics.adapter import NODE_LABELS, node_from_samples, samples_in
from podgpu.metrics.fields import DRAM_ACTIVE, TENSOR_ACTIVE, Meaning, meaning, names_of
from podgpu.metrics.parse import BadExposition
from podgpu.metrics.values import is_within_unit
from podgpu.model import OPTIONAL_NUMBERS, DeviceState, MigInstance, NodeState, decode_node

_CONCURRENCY = (
    256  # high, because each failing target blocks one concurrent request until its timeout
)
_MAX_FILES = 65_536
_MAX_FIELD = 2.0**63  # drivers report at most 64 bits
S = TypeVar("S", DeviceState, MigInstance)
_log = logging.getLogger(__name__)
_repeating_log = logging.getLogger(f"{__name__}.repeating")
_repeating_log.addFilter(RepeatFilter())


def unique_targets(urls: Iterable[str], access: Access | None = None) -> tuple[str, ...]:
    """Returns the URLs of --scrape without duplicates. Raises UsageError if there is none."""
    by_name: dict[str, str] = {}
    for url in filter(None, (url.strip() for url in urls)):
        by_name.setdefault(HttpClient(url, access, default_path="/metrics").shown, url)
    if not by_name:
        raise UsageError("--scrape names no exporter: write HOST:9400,HOST:9400,…")
    return tuple(by_name.values())


class ScrapeTarget:
    """One exporter and its last readings."""

    def __init__(self, url: str, access: Access | None, timeout: float) -> None:
        self._metrics = HttpClient(
            url, access, timeout=timeout, max_bytes=MAX_METRICS_BYTES, default_path="/metrics"
        )
        base = re.sub(r"(/metrics)?/*([?#].*)?$", "", url)
        self.api = HttpClient(base, access, timeout=timeout, max_bytes=MAX_METRICS_BYTES)
        self.name = self._metrics.shown
        self.readings: tuple[NodeReading, ...] = ()
        self.outcome: TargetOutcome | None = None
        self.errors: Counter[str] = Counter()  # by reason

    async def read_states(
        self,
        session: aiohttp.ClientSession,
        keep_fields: frozenset[str],
        node_labels: Sequence[str],
        wall: float,
    ) -> list[NodeState]:
        response = await self.api.send(session, path="/api/v1/node", accept="application/json")
        if response.status == 200 and response.content_type == "application/json":
            try:
                state = decode_node(response.body)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise SourceError(
                    "malformed", f"{self.name}: cannot parse its /api/v1/node: {error}"
                ) from error
            return [
                reduce_state(
                    state if state.node else replace(state, node=self.api.host), keep_fields
                )
            ]
        if response.status != 200 and not 400 <= response.status < 500:
            raise self.api.status_error(response)
        # The exporter has no such path, or a proxy rejects every path except /metrics.
        text = await self._metrics.get(session, accept=METRICS_TYPES)
        check_is_metrics(text, self.name)
        try:
            samples = samples_in(text.decode())
            states = node_from_samples(
                samples,
                self.api.host,
                scraped_at=wall,
                keep_fields=keep_fields,
                node_labels=node_labels,
            )
        except (UnicodeDecodeError, BadExposition, msgspec.ValidationError) as error:
            raise SourceError(
                "malformed", f"the metrics of {self.name} cannot be parsed: {error}"
            ) from error
        if not any(state.devices or state.producer == "podgpu" for state in states):
            raise SourceError(
                "no_gpu", f"{self.name} has no GPU in its metrics: check that it is a GPU exporter"
            )
        return states


def reduce_state(state: NodeState, keep_fields: frozenset[str]) -> NodeState:
    """Drops the fields of `NodeState` that the cluster view does not use. This halves the memory of
    1,000 nodes.
    """
    return replace(
        state,
        devices=tuple(
            replace(
                _reduce_device(device, keep_fields),
                throttled_ns={},
                healthy=(),
                instances=tuple(
                    _reduce_device(instance, keep_fields) for instance in device.instances
                ),
            )
            for device in state.devices
        ),
        entities=(),
        vcuda=(),
        dropped={name: n for name, n in state.dropped.items() if name in OPTIONAL_NUMBERS},
    )


def _reduce_device(device: S, keep_fields: frozenset[str]) -> S:
    kept = None
    if device.fields is not None:
        kept = {}
        for name, spec in _find_meanings(keep_fields).items():
            value = device.fields.get(name)
            if isinstance(value, int | float) and abs(value) < _MAX_FIELD:
                number = spec.value(value)
                if is_within_unit(spec.field, number):
                    kept[spec.field.name] = number
    return replace(device, fields=kept, details=(), unsupported=(), clock_events={})


@cache
def _find_meanings(fields: frozenset[str]) -> dict[str, Meaning]:
    """Returns the meanings of the fields' names in all versions. They convert the units of 4.9 to
    those of 4.8.
    """
    return {name: spec for field in fields for name in names_of(field) if (spec := meaning(name))}


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@dataclass
class ScrapeCollector:
    """Implements `Collector`."""

    read_urls: Callable[[], Iterable[str]]  # while the list cannot be read, returns the last list
    settings: ViewSettings
    access: Access | None = None
    timeout: float = 5.0
    node_labels: Sequence[str] = NODE_LABELS
    read_owners: Callable[[], Owners] = dict
    read_node_labels: Callable[[], NodeLabels] = dict
    read_notes: Callable[[], Iterable[str]] = (
        tuple  # returns problems with the list of exporters and with owners
    )
    clock: Clock = field(default_factory=Clock)
    _targets: dict[str, ScrapeTarget] = field(default_factory=dict)  # by URL
    _semaphore: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_CONCURRENCY))
    _session: aiohttp.ClientSession | None = None

    async def run_round(self) -> ClusterReading:
        targets = {}
        for url in self.read_urls():
            try:
                targets[url] = self._targets.get(url) or ScrapeTarget(
                    url, self.access, self.timeout
                )
            except UsageError as error:  # a discovered endpoint may have an invalid address
                _repeating_log.warning("an exporter is not read: %s", error)
        self._targets = targets
        if self._session is None:
            _raise_file_limit()  # connections stay open between rounds, one per exporter
            self._session = open_session()
        async with asyncio.TaskGroup() as group:
            for target in self._targets.values():
                group.create_task(self._read_target(target, self._session))
        return self._make_reading()

    async def _read_target(self, target: ScrapeTarget, session: aiohttp.ClientSession) -> None:
        async with self._semaphore:
            started = self.clock.monotonic()
            reason, message = "", ""
            try:
                keep = self.settings.keep_fields | {TENSOR_ACTIVE, DRAM_ACTIVE}
                states = await target.read_states(
                    session, keep, self.node_labels, self.clock.wall()
                )
            except SourceError as error:
                reason, message = error.reason, str(error)
            except Exception as error:  # noqa: BLE001 - a bug that one exporter triggers must not stop the others
                reason, message = (
                    "bug",
                    f"{target.name}: unexpected error ({type(error).__name__}: {str(error)[:200]})",
                )
                _log.exception("%s: unexpected error; please report it", target.name)
            else:
                target.readings = tuple(
                    NodeReading(
                        target=target.name,
                        state=state,
                        read_at=self.clock.monotonic(),
                        skew_seconds=None
                        if state.taken_at is None
                        else state.taken_at - self.clock.wall(),
                        listed=True,
                        named=state.node != target.api.host,
                    )
                    for state in states
                )
                if any(state.dropped for state in states):
                    target.errors["bad_value"] += 1
                    _repeating_log.warning("%s: impossible values are ignored", target.name)
            if reason:
                target.errors[reason] += 1
            target.outcome = TargetOutcome(
                target.name, self.clock.monotonic() - started, reason, message
            )

    def _make_reading(self) -> ClusterReading:
        targets, labels = self._targets.values(), self.read_node_labels()
        readings = (reading for target in targets for reading in target.readings)
        return ClusterReading(
            nodes=tuple(replace(reading, labels=labels.get(reading.name)) for reading in readings),
            outcomes=tuple(target.outcome for target in targets if target.outcome is not None),
            errors={
                (target.name, reason): n
                for target in targets
                for reason, n in target.errors.items()
            },
            notes=tuple(self.read_notes()),
            owners=self.read_owners(),
        )

    async def fetch(self, target: str, path: str) -> bytes:
        scrape_target = next((t for t in list(self._targets.values()) if t.name == target), None)
        if scrape_target is None:
            raise SourceError("not_listed", f"{target} is no longer in the list of exporters")
        async with open_session() as session:
            return await scrape_target.api.get(session, path)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
