"""Reads the view for `top` in the background: from this node's driver, an exporter, or a
cluster.
"""

from __future__ import annotations

import threading
import time
from base64 import b64decode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, NamedTuple
from urllib.parse import quote, urlsplit

import msgspec
from msgspec import Meta

from podgpu.decode import find_decoder
from podgpu.errors import MOST_NAMED, SourceError, StartError, few_of
from podgpu.fleet.readings import ClusterReading, NodeReading, ViewSettings
from podgpu.fleet.state import ClusterState, build_cluster_state, build_single_node_state
from podgpu.fleet.view import GpuDetails, View, decode_details, decode_view, make_view
from podgpu.http_client import HttpClient
from podgpu.metrics.adapter import node_from_samples, samples_in
from podgpu.metrics.parse import BadExposition
from podgpu.model import has_readings
from podgpu.node.agent.agent import Agent
from podgpu.node.gpu.remote_exporter import UrlExposition
from podgpu.past.job import JobSummary
from podgpu.past.sqlite import utilization_byte
from podgpu.top.lines import Line, Processes, flatten, make_lines

_EXPORTER_TIMEOUT = 5.0
_CLUSTER_TIMEOUT = 10.0  # the view of a large cluster has several megabytes
_DETAILS_TIMEOUT = 2.0  # short, because the table is drawn only after history and details are read
_POINTS = 60
_DETAILS_SECONDS = 5.0  # how often history and details are read
_MAX_JOBS = 4


@dataclass(frozen=True, slots=True)
class Sparklines:
    points: Mapping[tuple[str, str], bytes] = field(default_factory=dict)
    """(UUID, MIG instance) -> points, newest last, as encoded by `utilization_byte`."""
    span: float = 0.0  # time covered by all points, in seconds


@dataclass(frozen=True, slots=True)
class FetchedDetails:
    uuid: str = ""
    details: GpuDetails | None = None  # None if the server has none
    error: str = ""
    jobs: Sequence[JobSummary] = ()


class SourceReading(NamedTuple):
    view: View
    processes: Processes | None = None
    history: Sparklines | None = None  # None if the source has no history
    fetched: FetchedDetails | None = None  # None if the source has no details


@dataclass
class LocalSource:
    agent: Agent
    with_processes: bool
    name: str = "this node"
    _is_warm: bool = False

    def read(self, selected: str = "") -> SourceReading:
        """Raises SourceError if no GPU can be read now, or StartError if retrying cannot help."""
        agent = self.agent
        if self._is_warm:
            agent.read_telemetry()
            agent.read_allocation()
            agent.read_usage()
        else:
            agent.warm_up()
            self._is_warm = True
        state = agent.published.state
        failing = [source for source in state.sources if source.up is False]
        if not has_readings(state):
            why = (
                "; ".join(source.message for source in failing[:MOST_NAMED]) or "this node has none"
            )
            raise SourceError(
                "no_gpu",
                f"no GPU could be read: {why}. To show other machines, use --url or --cluster",
            )
        notes = [f"{source.name}: {source.message or source.error}" for source in failing]
        state = msgspec.structs.replace(
            state, sources=()
        )  # the notes already include these errors, with messages
        now, wall = agent.clock.monotonic(), agent.clock.wall()
        view = make_view(build_single_node_state(state, ViewSettings(), now, wall, notes=notes))
        return SourceReading(view, agent.list_processes() if self.with_processes else {})


class _HistoryAnswer(msgspec.Struct):
    step_seconds: Annotated[float, Meta(gt=0, le=86_400)]
    devices: dict[str, str]


class ClusterSource:
    """Reads the JSON API of `podgpu cluster` or of a podgpu exporter (docs/api.md)."""

    def __init__(
        self, url: str, server: str = "podgpu cluster", timeout: float = _CLUSTER_TIMEOUT
    ) -> None:
        """`server` is the name of the expected server for error messages. Raises UsageError if the
        URL is invalid.
        """
        url = url.rstrip("/").removesuffix("/metrics")
        self._client = HttpClient(url, timeout=timeout)
        self._details_client = HttpClient(url, timeout=_DETAILS_TIMEOUT)
        self._server = server
        self.name = self._client.shown
        self._history: Sparklines | None = None
        self._fetched = FetchedDetails()
        self._due_at = float("-inf")

    def read(self, selected: str = "") -> SourceReading:
        """`selected` is the UUID of the GPU whose details are read. Raises SourceError if the view
        cannot be read.
        """
        body = self._client.get_blocking("api/v1/view")
        try:
            view = decode_view(body)
        except SourceError as error:
            raise SourceError(
                error.reason, f"{self.name} {error}: is it the address of {self._server}?"
            ) from error
        if time.monotonic() >= self._due_at or selected != self._fetched.uuid:
            with suppress(
                SourceError, msgspec.DecodeError, ValueError
            ):  # not every server has a history
                self._history = self._read_history()
            self._fetched = self._fetch_details(selected, view) if selected else FetchedDetails()
            self._due_at = time.monotonic() + _DETAILS_SECONDS
        return SourceReading(view, history=self._history, fetched=self._fetched)

    def _read_history(self) -> Sparklines:
        answer = find_decoder(_HistoryAnswer).decode(
            self._details_client.get_blocking("api/v1/history")
        )
        points = {
            name.partition("/")[::2]: b64decode(text, validate=True)
            for name, text in answer.devices.items()
        }
        return Sparklines(points, answer.step_seconds * _POINTS)

    def _fetch_details(self, uuid: str, view: View) -> FetchedDetails:
        client, details, problem = self._details_client, None, ""
        try:
            details = decode_details(client.get_blocking(f"api/v1/gpus/{quote(uuid, safe='')}"))
        except SourceError as error:
            problem = "" if error.reason == "http_404" else str(error)
        gpus = [gpu for node in view.nodes for gpu in node.gpus if gpu.uuid == uuid]
        slots = [slot for gpu in gpus for slot in (gpu, *gpu.instances)]
        pods = dict.fromkeys(
            (h.namespace, h.pod)
            for slot in slots
            for h in (*slot.holders, *slot.last_holders)
            if h.pod
        )
        jobs = []
        for pod in (
            () if problem else list(pods)[:_MAX_JOBS]
        ):  # if the first request failed, the others are skipped
            with suppress(SourceError, msgspec.DecodeError):  # not every server has summaries
                path = "/".join(quote(name, safe="") for name in pod)
                jobs.append(
                    find_decoder(JobSummary).decode(client.get_blocking(f"api/v1/summary/{path}"))
                )
        return FetchedDetails(uuid, details, problem, jobs)


class ExporterSource:
    """Reads the view of a podgpu exporter, or the metrics of any other GPU exporter."""

    def __init__(self, url: str) -> None:
        """Adds the path /metrics to a URL without a path. Raises UsageError if the URL is
        invalid.
        """
        self._metrics = UrlExposition(url, timeout=_EXPORTER_TIMEOUT)
        self._api = ClusterSource(url, "a podgpu exporter", _EXPORTER_TIMEOUT)
        self.name = self._metrics.shown
        self._is_podgpu = True  # False if the metrics are from another exporter
        self._state: ClusterState | None = None

    def read(self, selected: str = "") -> SourceReading:
        """Reads the view of a podgpu exporter. If there is no view or no GPU in it, reads the
        metrics instead.
        """
        if self._is_podgpu:
            with suppress(SourceError):
                reading = self._api.read(selected)
                if any(node.gpus for node in reading.view.nodes):
                    return reading
        body = self._metrics.fetch()
        try:
            states = node_from_samples(samples_in(body.decode()), urlsplit(self.name).netloc)
        except (UnicodeDecodeError, BadExposition, msgspec.ValidationError) as error:
            raise SourceError(
                "malformed", f"cannot parse the metrics of {self.name}: {error}"
            ) from error
        if not any(state.devices for state in states):
            failing = [
                source.name for state in states for source in state.sources if source.up is False
            ]
            reason = (
                f"the exporter cannot read {few_of(failing)}"
                if failing
                else "is it a GPU exporter?"
            )
            raise SourceError("no_gpu", f"the metrics of {self.name} contain no GPU: {reason}")
        self._is_podgpu = any(state.producer == "podgpu" for state in states)
        now = time.monotonic()
        readings = tuple(NodeReading(self.name, state, now) for state in states)
        self._state = build_cluster_state(
            ClusterReading(readings), self._state, ViewSettings(), now, time.time()
        )
        return SourceReading(make_view(self._state))


# Readings in the background

Source = LocalSource | ClusterSource | ExporterSource


@dataclass(frozen=True, slots=True)
class Seen:
    """The last successful reading, and the error if a later one failed."""

    view: View
    lines: tuple[Line, ...] = ()
    read_at: float = 0.0  # monotonic time
    now: float = 0.0  # Unix time of the reading by the source's clock
    sparklines: Sparklines = field(default_factory=Sparklines)
    fetched: FetchedDetails | None = None
    error: SourceError | StartError | None = None

    @property
    def notes(self) -> list[str]:
        notes = list(self.view.notes)
        for node in self.view.nodes:
            if node.old:
                age = "" if node.age_seconds is None else f": {node.age_seconds:.0f} s"
                notes.append(f"{node.name} is stale{age}")
            notes += [f"{node.name}: {text}" for text in node.notes]
        return notes


@dataclass
class Feed:
    """Reads a source in a thread, so that the screen never waits. Stores recent utilisation for
    sparklines.
    """

    source: Source
    interval: float
    seen: Seen | None = None
    _wake: threading.Event = field(default_factory=threading.Event)
    _is_closed: bool = False
    _points: dict[tuple[str, str], bytes] = field(
        default_factory=dict
    )  # all points by UUID and MIG instance
    _selected: str = ""

    def read(self) -> Seen:
        """Reads the source once. Raises the error if the first reading fails. Later errors are in
        `seen.error`.
        """
        before = self.seen
        try:
            view, processes, history, fetched = self.source.read(self._selected)
        except (SourceError, StartError) as error:
            if before is None:
                raise
            self.seen = replace(before, error=error)
            return self.seen
        wall = view.taken_at or time.time()
        # A cluster's view changes every 15 s. In between, reuse the lines, because there may be
        # thousands.
        is_same = before is not None and not processes and (view, wall) == (before.view, before.now)
        lines = before.lines if before and is_same else tuple(make_lines(view, wall, processes))
        slots = {line.row[1:3]: line.utilization for _, line in flatten(lines) if line.is_slot}
        self._points = {
            key: (self._points.get(key, b"") + bytes([utilization_byte(ratio)]))[-_POINTS:]
            for key, ratio in slots.items()
        }
        if history is None or not history.points:
            history = Sparklines(self._points, self.interval * _POINTS)
        self.seen = Seen(view, lines, time.monotonic(), wall, history, fetched)
        return self.seen

    def select(self, uuid: str) -> None:
        """Selects the GPU whose details are read. An empty UUID selects none."""
        if uuid != self._selected:
            self._selected = uuid
            self._wake.set()

    def start(self) -> None:
        threading.Thread(target=self._run, name="top-feed", daemon=True).start()

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.wait(self.interval)
            self._wake.clear()
            try:
                self.read()
            except Exception as error:  # noqa: BLE001 - the screen must not show old values as current
                assert self.seen is not None
                text = f"unexpected error, please report it: {type(error).__name__}: {error}"
                self.seen = replace(self.seen, error=SourceError("bug", text))

    def close(self) -> None:
        self._is_closed = True
