"""Reads the view for `top` in the background: from this node, an exporter, or a cluster."""

from __future__ import annotations

import threading
import time
from base64 import b64decode
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, NamedTuple
from urllib.parse import quote, urlsplit

import msgspec
from msgspec import Meta

from podgpu.decode import find_decoder
from podgpu.errors import MOST_NAMED, Note, SourceError, StartError, few_of
from podgpu.fleet.readings import ClusterReading, NodeReading
from podgpu.fleet.settings import ViewSettings
from podgpu.fleet.state import ClusterState, build_cluster_state, build_single_node_state
from podgpu.fleet.view import GpuDetails, View, decode_details, decode_view, make_view
from podgpu.metrics.adapter import node_from_samples, samples_in
from podgpu.metrics.parse import BadExposition
from podgpu.model import NodeState, PodName, Workload, has_readings, list_pod_names
from podgpu.node.agent.agent import Agent
from podgpu.node.gpu.remote_exporter import UrlExposition
from podgpu.past.gpu_history import utilization_byte
from podgpu.past.job import JobSummary
from podgpu.top.lines import Line, Processes, SlotOfView, flatten, make_lines
from podgpu.view_address import UrlAddress, ViewAddress

_EXPORTER_TIMEOUT = 5.0
_CLUSTER_TIMEOUT = 10.0  # the view of a large cluster has several megabytes
_DETAILS_TIMEOUT = 2.0  # short, because the table is drawn only after history and details are read
_POINTS = 60
_DETAILS_SECONDS = 5.0  # how often history and details are read
_MAX_JOBS = 4  # pods whose summaries are read, with one request each


@dataclass(frozen=True, slots=True)
class Sparklines:
    points: Mapping[tuple[str, str], bytes] = field(default_factory=dict)
    """(UUID, MIG instance) -> points, newest last, as encoded by `utilization_byte`."""
    span: float = 0.0  # time covered by all points, in seconds

    def find(self, line: Line) -> bytes:
        """Returns the points of the device to which a line belongs."""
        return self.points.get(line.device, b"")


@dataclass(frozen=True, slots=True)
class FetchedDetails:
    uuid: str = ""
    details: GpuDetails | None = None  # None if the server has none
    error: str = ""
    jobs: Sequence[JobSummary] = ()


class SourceReading(NamedTuple):
    view: View
    processes: Processes | None = None
    history: Sparklines = Sparklines()  # empty if the source has no history
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
            messages = [source.message for source in failing[:MOST_NAMED]]
            why = "; ".join(messages) or "this node has none"
            raise SourceError(
                "no_gpu",
                f"no GPU could be read: {why}. To show other machines, use --url or --cluster",
            )

        # A view names failing sources without their messages. These notes have both.
        notes = []
        for source in failing:
            text = f"{source.name}: {source.message or source.error}"
            notes.append(Note(source.name, text))
        state = msgspec.structs.replace(state, sources=())

        now = agent.clock.monotonic()
        wall = agent.clock.wall()
        cluster = build_single_node_state(state, ViewSettings(), now, wall, notes=notes)
        processes: Processes = {}
        if self.with_processes:
            processes = agent.list_processes()
        return SourceReading(make_view(cluster), processes)


class _HistoryAnswer(msgspec.Struct):
    step_seconds: Annotated[float, Meta(gt=0, le=86_400)]
    devices: dict[str, str]


class ClusterSource:
    """Reads the JSON API of `podgpu cluster` or of a podgpu exporter (docs/api.md)."""

    def __init__(
        self,
        address: ViewAddress,
        server: str = "podgpu cluster",
        timeout: float = _CLUSTER_TIMEOUT,
        query: Mapping[str, str] | None = None,
    ) -> None:
        """Raises UsageError if the address is invalid.

        `server` is the name of the expected server for error messages. `query` selects the view.
        """
        self._query = query
        self._client = address.open(timeout)
        self._details_client = address.open(_DETAILS_TIMEOUT)
        self._server = server
        self.name = self._client.shown
        self._history = Sparklines()
        self._fetched = FetchedDetails()
        self._due_at = float("-inf")  # monotonic time of the next reading of history and details

    def read(self, selected: str = "") -> SourceReading:
        """Raises SourceError if the view cannot be read.

        `selected` is the UUID of the GPU whose details are read.
        """
        body = self._client.get_blocking("api/v1/view", self._query)
        try:
            view = decode_view(body)
        except SourceError as error:
            why = f"{self.name} {error}: is it the address of {self._server}?"
            raise SourceError(error.reason, why) from error

        if time.monotonic() >= self._due_at or selected != self._fetched.uuid:
            # Not every server has a history.
            with suppress(SourceError, msgspec.DecodeError, ValueError):
                self._history = self._read_history()

            self._fetched = FetchedDetails()
            if selected:
                self._fetched = self._fetch_details(selected, view)

            self._due_at = time.monotonic() + _DETAILS_SECONDS
        return SourceReading(view, history=self._history, fetched=self._fetched)

    def _read_history(self) -> Sparklines:
        body = self._details_client.get_blocking("api/v1/history")
        answer = find_decoder(_HistoryAnswer).decode(body)

        points = {}
        for name, text in answer.devices.items():
            uuid, _, instance = name.partition("/")
            points[uuid, instance] = b64decode(text, validate=True)
        return Sparklines(points, answer.step_seconds * _POINTS)

    def _fetch_details(self, uuid: str, view: View) -> FetchedDetails:
        client = self._details_client
        details = None
        try:
            details = decode_details(client.get_blocking(f"api/v1/gpus/{quote(uuid, safe='')}"))
        except SourceError as error:
            # With 404, the server has only no details of this GPU. After other errors, the next
            # requests would probably fail too.
            if error.reason != "http_404":
                return FetchedDetails(uuid, error=str(error))

        jobs = []
        for namespace, pod in _list_pods(view, uuid)[:_MAX_JOBS]:
            path = f"api/v1/summary/{quote(namespace, safe='')}/{quote(pod, safe='')}"
            # Not every server has summaries.
            with suppress(SourceError, msgspec.DecodeError):
                jobs.append(find_decoder(JobSummary).decode(client.get_blocking(path)))
        return FetchedDetails(uuid, details, jobs=jobs)


def _list_pods(view: View, uuid: str) -> list[PodName]:
    """Returns the pods that hold or last held the GPU or one of its instances."""
    slots: list[SlotOfView] = []
    for node in view.nodes:
        for gpu in node.gpus:
            if gpu.uuid == uuid:
                slots.append(gpu)
                slots += gpu.instances

    holders: list[Workload] = []
    for slot in slots:
        holders += [*slot.holders, *slot.last_holders]
    return list_pod_names(holders)


class ExporterSource:
    """Reads the view of a podgpu exporter, or the metrics of any other GPU exporter."""

    def __init__(self, url: str) -> None:
        """Raises UsageError if the URL is invalid. A URL without a path gets the path /metrics."""
        self._metrics = UrlExposition(url, timeout=_EXPORTER_TIMEOUT)
        view = UrlAddress(url.rstrip("/").removesuffix("/metrics"))
        self._api = ClusterSource(view, "a podgpu exporter", _EXPORTER_TIMEOUT)
        self.name = self._metrics.shown
        self._is_podgpu = True  # False if the metrics are from another exporter
        self._state: ClusterState | None = None

    def read(self, selected: str = "") -> SourceReading:
        """Reads the view of a podgpu exporter.

        If there is no view or no GPU in it, reads the metrics instead.
        """
        if self._is_podgpu:
            # Any error here: the metrics may still be readable, or have the better message.
            with suppress(SourceError):
                reading = self._api.read(selected)
                if any(node.gpus for node in reading.view.nodes):
                    return reading

        states = self._read_metrics()
        # Another exporter has no view, so the next reading does not ask for it.
        self._is_podgpu = any(state.producer == "podgpu" for state in states)
        now = time.monotonic()
        readings = tuple(NodeReading(self.name, state, now) for state in states)
        self._state = build_cluster_state(
            ClusterReading(readings), self._state, ViewSettings(), now, time.time()
        )
        return SourceReading(make_view(self._state))

    def _read_metrics(self) -> list[NodeState]:
        """Raises SourceError if the metrics contain no GPU."""
        body = self._metrics.fetch()
        try:
            address = urlsplit(self.name).netloc
            states = node_from_samples(samples_in(body.decode()), address=address)
        except (UnicodeDecodeError, BadExposition, msgspec.ValidationError) as error:
            why = f"cannot parse the metrics of {self.name}: {error}"
            raise SourceError("malformed", why) from error
        if any(state.devices for state in states):
            return states

        failing = []
        for state in states:
            failing += [source.name for source in state.sources if source.up is False]
        reason = "is it a GPU exporter?"
        if failing:
            reason = f"the exporter cannot read {few_of(failing)}"
        raise SourceError("no_gpu", f"the metrics of {self.name} contain no GPU: {reason}")


# Readings in the background

Source = LocalSource | ClusterSource | ExporterSource


@dataclass(frozen=True, slots=True)
class Seen:
    """The last successful reading, and the error if a later one failed."""

    view: View
    lines: tuple[Line, ...] = ()
    read_at: float = 0.0  # monotonic time
    taken_at: float = 0.0  # Unix time of the reading by the source's clock
    sparklines: Sparklines = field(default_factory=Sparklines)
    fetched: FetchedDetails | None = None
    error: SourceError | StartError | None = None

    @property
    def notes(self) -> list[str]:
        notes = list(self.view.notes)
        for node in self.view.nodes:
            if node.old:
                stale = f"{node.name} is stale"
                if node.age_seconds is not None:
                    stale += f": {node.age_seconds:.0f} s"
                notes.append(stale)

            notes += [f"{node.name}: {text}" for text in node.notes]

        return notes


@dataclass
class Feed:
    """Reads a source in a thread, so that the screen never waits.

    Stores recent utilisation for sparklines.
    """

    source: Source
    interval: float
    seen: Seen | None = None
    _wake: threading.Event = field(default_factory=threading.Event)
    _is_closed: bool = False
    # All points by UUID and MIG instance.
    _points: dict[tuple[str, str], bytes] = field(default_factory=dict)
    _selected: str = ""

    def read(self) -> Seen:
        """Reads the source once.

        Raises the error if the first reading fails. Later errors are in `seen.error`.
        """
        before = self.seen
        try:
            view, processes, history, fetched = self.source.read(self._selected)
        except (SourceError, StartError) as error:
            if before is None:
                raise
            self.seen = replace(before, error=error)
            return self.seen

        taken_at = view.taken_at or time.time()
        # A cluster's view changes every 15 s. In between, reuse the lines: there may be thousands.
        # Without `taken_at`, the ages in the lines depend on the time of the reading.
        is_same = before is not None and view == before.view and taken_at == before.taken_at
        # The processes of this node change without a change of the view.
        if before is not None and is_same and not processes:
            lines = before.lines
        else:
            lines = tuple(make_lines(view, taken_at, processes))

        self._add_points(lines)
        # A source without a history gets the points of our own readings.
        if not history.points:
            history = Sparklines(self._points, self.interval * _POINTS)
        self.seen = Seen(view, lines, time.monotonic(), taken_at, history, fetched)
        return self.seen

    def _add_points(self, lines: Iterable[Line]) -> None:
        """Adds a point for each device. Removes the points of devices that are gone."""
        points = {}
        for _, line in flatten(lines):
            if line.is_slot:
                newest = bytes([utilization_byte(line.utilization)])
                recent = self._points.get(line.device, b"") + newest
                points[line.device] = recent[-_POINTS:]

        self._points = points

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
            # After any error, the screen must not show old values as current.
            try:
                self.read()
            except Exception as error:  # noqa: BLE001
                assert self.seen is not None
                text = f"unexpected error, please report it: {type(error).__name__}: {error}"
                self.seen = replace(self.seen, error=SourceError("bug", text))

    def close(self) -> None:
        self._is_closed = True
