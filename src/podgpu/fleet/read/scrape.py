"""Collector that reads the exporters directly.

Reads `GET /api/v1/node` from podgpu, and metrics text from other exporters. A failing exporter
affects only its own node. If a target is no longer listed, its last reading is kept for a while.
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
from podgpu.errors import Note, SourceError, UsageError
from podgpu.fleet.jobs import SAMPLE_FIELDS
from podgpu.fleet.parts import ContainerName, container_name
from podgpu.fleet.read.engine_reader import EngineReader
from podgpu.fleet.readings import ClusterReading, NodeLabels, NodeReading, Owners, TargetOutcome
from podgpu.fleet.settings import ViewSettings
from podgpu.http_client import (
    MAX_METRICS_BYTES,
    METRICS_TYPES,
    Access,
    HttpClient,
    open_session,
)
from podgpu.metrics.adapter import NODE_LABELS, node_from_samples, samples_in
from podgpu.metrics.conditions import RECOVERY
from podgpu.metrics.fields import Meaning, meaning, names_of
from podgpu.metrics.parse import BadExposition, check_is_metrics
from podgpu.metrics.values import is_within_unit
from podgpu.model import (
    DeviceState,
    MigInstance,
    NodeState,
    PodName,
    decode_node,
    optional_numbers,
    select_keys,
)

# high, because each failing target blocks one concurrent request until its timeout
_CONCURRENCY = 256
_MAX_FILES = 65_536
_MAX_FIELD = 2.0**63  # drivers report at most 64 bits
S = TypeVar("S", DeviceState, MigInstance)
_log = logging.getLogger(__name__)
_repeating_log = logging.getLogger(f"{__name__}.repeating")
_repeating_log.addFilter(RepeatFilter())


def unique_targets(urls: Iterable[str], access: Access | None = None) -> tuple[str, ...]:
    """Returns the URLs of --scrape without duplicates. Raises UsageError if there is none."""
    by_name: dict[str, str] = {}
    for url in map(str.strip, urls):
        if url:
            name = HttpClient(url, access, default_path="/metrics").shown
            by_name.setdefault(name, url)

    if not by_name:
        raise UsageError("--scrape names no exporter: write HOST:9400,HOST:9400,…")

    return tuple(by_name.values())


class ScrapeTarget:
    """One exporter and its last readings."""

    def __init__(self, url: str, access: Access | None, timeout: float) -> None:
        self._metrics = HttpClient(
            url,
            access,
            timeout=timeout,
            max_bytes=MAX_METRICS_BYTES,
            default_path="/metrics",
        )
        # The API is at the same address, without the path of the metrics and without a query.
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
            return [self._decode_document(response.body, keep_fields)]
        is_rejected = 400 <= response.status < 500
        if response.status != 200 and not is_rejected:
            raise self.api.status_error(response)

        # The exporter has no such path, or a proxy rejects every path except /metrics.
        text = await self._metrics.get(session, accept=METRICS_TYPES)
        check_is_metrics(text, self.name)
        try:
            states = node_from_samples(
                samples_in(text.decode()),
                self.api.host,
                scraped_at=wall,
                keep_fields=keep_fields,
                node_labels=node_labels,
            )
        except (UnicodeDecodeError, BadExposition, msgspec.ValidationError) as error:
            message = f"the metrics of {self.name} cannot be parsed: {error}"
            raise SourceError("malformed", message) from error

        if not any(state.devices or state.producer == "podgpu" for state in states):
            message = f"{self.name} has no GPU in its metrics: check that it is a GPU exporter"
            raise SourceError("no_gpu", message)

        return states

    def _decode_document(self, body: bytes, keep_fields: frozenset[str]) -> NodeState:
        try:
            state = decode_node(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            message = f"{self.name}: cannot parse its /api/v1/node: {error}"
            raise SourceError("malformed", message) from error

        if not state.node:
            state = replace(state, node=self.api.host)

        return reduce_state(state, keep_fields)


def reduce_state(state: NodeState, keep_fields: frozenset[str]) -> NodeState:
    """Drops the fields of `NodeState` that the cluster view does not use.

    This halves the memory of 1,000 nodes.
    """
    devices = []
    for gpu in state.devices:
        instances = [_reduce_device(instance, keep_fields) for instance in gpu.instances]
        reduced = _reduce_device(gpu, keep_fields)
        # Kept, because the advice about an XID depends on it: the driver needs no recovery.
        healthy = (RECOVERY,) if RECOVERY in gpu.healthy else ()
        devices.append(replace(reduced, healthy=healthy, instances=tuple(instances)))

    dropped = select_keys(state.dropped, optional_numbers())
    return replace(state, devices=tuple(devices), entities=(), vcuda=(), dropped=dropped)


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
    """Returns the meanings of the fields' names in all versions.

    They convert the units of 4.9 to those of 4.8.
    """
    meanings = {}
    for field_name in fields:
        for name in names_of(field_name):
            spec = meaning(name)
            if spec is not None:
                meanings[name] = spec
    return meanings


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(hard, _MAX_FILES)
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
    read_kept_pods: Callable[[], frozenset[PodName]] = frozenset  # that savings leave out
    read_node_labels: Callable[[], NodeLabels] = dict
    # returns problems with the list of exporters and with owners
    read_notes: Callable[[], Iterable[Note]] = tuple
    # Creates the reader of LLM engines in the collector's event loop. None: they are not read.
    make_engines: Callable[[], EngineReader] | None = None
    clock: Clock = field(default_factory=Clock)
    _targets: dict[str, ScrapeTarget] = field(default_factory=dict)  # by URL
    _semaphore: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_CONCURRENCY))
    _session: aiohttp.ClientSession | None = None
    _engines: EngineReader | None = None

    async def run_round(self) -> ClusterReading:
        targets = {}
        for url in self.read_urls():
            try:
                target = self._targets.get(url)
                if target is None:
                    target = ScrapeTarget(url, self.access, self.timeout)
            except UsageError as error:  # a discovered endpoint may have an invalid address
                _repeating_log.warning("an exporter is not read: %s", error)
            else:
                targets[url] = target

        self._targets = targets
        if self._session is None:
            _raise_file_limit()  # connections stay open between rounds, one per exporter
            self._session = open_session()
            if self.make_engines is not None:
                self._engines = self.make_engines()

        async with asyncio.TaskGroup() as group:
            if self._engines is not None:
                group.create_task(self._engines.read(self._session, self._list_containers()))
            for target in self._targets.values():
                group.create_task(self._read_target(target, self._session))

        return self._make_reading()

    async def _read_target(self, target: ScrapeTarget, session: aiohttp.ClientSession) -> None:
        """Stores the states of the target, or the error, and the outcome."""
        async with self._semaphore:
            started = self.clock.monotonic()
            reason = ""
            message = ""
            try:
                keep = self.settings.keep_fields | SAMPLE_FIELDS
                wall = self.clock.wall()
                states = await target.read_states(session, keep, self.node_labels, wall)
            except SourceError as error:
                reason = error.reason
                message = str(error)
            except Exception as error:  # noqa: BLE001 - a bug that one exporter triggers must not stop the others
                reason = "bug"
                text = f"{type(error).__name__}: {str(error)[:200]}"
                message = f"{target.name}: unexpected error ({text})"
                _log.exception("%s: unexpected error; please report it", target.name)
            else:
                target.readings = tuple(self._make_node(target, state) for state in states)
                if any(state.dropped for state in states):
                    target.errors["bad_value"] += 1
                    _repeating_log.warning("%s: impossible values are ignored", target.name)

            if reason:
                target.errors[reason] += 1

            seconds = self.clock.monotonic() - started
            target.outcome = TargetOutcome(target.name, seconds, reason, message)

    def _list_containers(self) -> set[ContainerName]:
        """Returns the containers of pods that held GPUs at the last reading."""
        containers: set[ContainerName] = set()
        for target in self._targets.values():
            for node in target.readings:
                for gpu in node.state.devices:
                    for device in (gpu, *gpu.instances):
                        containers.update(map(container_name, device.holders))
        return {name for name in containers if all(name)}

    def _make_node(self, target: ScrapeTarget, state: NodeState) -> NodeReading:
        skew = None if state.taken_at is None else state.taken_at - self.clock.wall()
        return NodeReading(
            target=target.name,
            state=state,
            read_at=self.clock.monotonic(),
            skew_seconds=skew,
            listed=True,
            named=state.node != target.api.host,
        )

    def _make_reading(self) -> ClusterReading:
        labels = self.read_node_labels()
        nodes = []
        outcomes = []
        errors = {}
        for target in self._targets.values():
            for node in target.readings:
                nodes.append(replace(node, labels=labels.get(node.name)))
            if target.outcome is not None:
                outcomes.append(target.outcome)
            for reason, count in target.errors.items():
                errors[target.name, reason] = count

        return ClusterReading(
            nodes=tuple(nodes),
            outcomes=tuple(outcomes),
            errors=errors,
            notes=tuple(self.read_notes()),
            owners=self.read_owners(),
            kept_pods=self.read_kept_pods(),
            engines={} if self._engines is None else self._engines.states,
        )

    async def fetch(self, target: str, path: str) -> bytes:
        for scrape_target in self._targets.values():
            if scrape_target.name == target:
                async with open_session() as session:
                    return await scrape_target.api.get(session, path)
        raise SourceError("not_listed", f"{target} is no longer in the list of exporters")

    async def close(self) -> None:
        if self._engines is not None:
            await self._engines.close()
        if self._session is not None:
            await self._session.close()
