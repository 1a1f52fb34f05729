"""The sources of `top`: the driver on this node, an exporter, or a cluster view."""

from __future__ import annotations

import time
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, NamedTuple, Protocol
from urllib.parse import quote, urlsplit

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from podgpu.agent.loop import Agent
from podgpu.cluster.collect import ClusterReading, NodeReading, ViewSettings
from podgpu.cluster.state import ClusterState, build_cluster_state, build_single_node_state
from podgpu.cluster.summary import JobSummary
from podgpu.cluster.view import GpuDetails, View, decode_details, decode_view, make_view
from podgpu.decode import find_decoder
from podgpu.errors import MOST_NAMED, SourceError, UsageError, few_of
from podgpu.gpu.exporter import UrlExposition
from podgpu.http_client import HttpClient
from podgpu.metrics.adapter import node_from_text
from podgpu.metrics.parse import BadExposition
from podgpu.model import NodeState, has_readings
from podgpu.top.lines import Processes
from podgpu.top.text import FULL, NO_DATA

EXPORTER_TIMEOUT = 5.0
CLUSTER_TIMEOUT = 10.0  # the view of a large cluster has several megabytes
_ALLOCATION_SECONDS = 1.0
_MAX_WARM_UP = 1.0
POINTS = 60
_HISTORY_SECONDS, _DETAILS_SECONDS = 30.0, 5.0  # how often they are read
_MAX_JOBS = 4


@dataclass(frozen=True, slots=True)
class Sparklines:
    points: Mapping[tuple[str, str], bytes] = field(default_factory=dict)
    """By UUID and MIG instance. Encoded as described at `text.FULL`, newest last."""
    span: float = 0.0  # time covered by all points, in seconds


@dataclass(frozen=True, slots=True)
class FetchedDetails:
    """Details of the selected GPU, and what its holders used since they started."""

    uuid: str
    details: GpuDetails | None = None  # None if the source has none
    error: str = ""
    jobs: Sequence[JobSummary] = ()


class Reading(NamedTuple):
    view: View
    processes: Processes = MappingProxyType({})
    history: Sparklines | None = None  # None if the source has no history
    fetched: FetchedDetails | None = None


class Source(Protocol):
    name: str
    deadline: float

    def read(self, selected: str = "") -> Reading:
        """`selected` is the UUID of the GPU whose details are read. Raises SourceError or StartError."""


class LocalSource:
    name = "this node"

    def __init__(self, agent: Agent, with_processes: bool, interval: float) -> None:
        self._agent = agent
        self._with_processes = with_processes
        self._warm_up = min(_MAX_WARM_UP, interval)
        self._allocated_at = float("-inf")
        self.deadline = (
            self._warm_up + 4 * agent.settings.deadline
        )  # `read` makes several calls, each with its own deadline

    def read(self, selected: str = "") -> Reading:
        """Raises SourceError if no GPU can be read now, StartError if retrying cannot help."""
        agent = self._agent
        self._read_agent()
        if self._warm_up:  # the usage of containers is a rate, which needs two readings
            time.sleep(self._warm_up)
            self._warm_up = 0.0
            self._read_agent()
        state = agent.published.state
        failing = [source for source in state.sources if source.up is False]
        if not has_readings(state):
            why = "; ".join(source.message for source in failing[:MOST_NAMED]) or "this node has none"
            raise SourceError("no_gpu", f"no GPU could be read: {why}. To show other machines, use --url or --cluster")
        notes = [f"{source.name}: {source.message or source.error}" for source in failing]
        state = replace(state, sources=())  # the notes already include these errors, with messages
        now, wall = agent.clock.monotonic(), agent.clock.wall()
        view = make_view(build_single_node_state(state, ViewSettings(), now, wall, notes=notes))
        fetched = FetchedDetails(selected) if selected else None
        return Reading(view, agent.list_processes() if self._with_processes else {}, fetched=fetched)

    def _read_agent(self) -> None:
        agent = self._agent
        agent.read_telemetry()
        now = agent.clock.monotonic()
        if now - self._allocated_at >= _ALLOCATION_SECONDS:
            self._allocated_at = now
            agent.read_allocation()
        agent.read_usage()


class _HistoryAnswer(msgspec.Struct):
    step_seconds: Annotated[float, Meta(gt=0, le=86_400)]
    devices: dict[str, str]


class ClusterSource:
    """Reads the JSON API of `podgpu cluster` or of a podgpu exporter (docs/api.md)."""

    def __init__(
        self,
        url: str,
        server: str = "podgpu cluster",
        timeout: float = CLUSTER_TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`server` names the expected server in error messages. Raises UsageError if the URL is invalid."""
        base = url.rstrip("/").removesuffix("/metrics")
        self._client = HttpClient(base, timeout=timeout)
        self._server = server
        self._clock = clock
        self.name = self._client.shown
        self.deadline = 2 * timeout + 1.0  # longer than the requests' timeouts, so that their errors are shown
        self._history: Sparklines | None = None
        self._fetched = FetchedDetails("")
        self._history_at = self._fetched_at = float("-inf")
        self._last_start = float("inf")  # a request that begins later may end after the deadline

    def read(self, selected: str = "") -> Reading:
        self._last_start = self._clock() + self._client.timeout
        body = self._client.get_blocking("api/v1/view")
        try:
            view = decode_view(body)
        except SourceError as error:
            raise SourceError(error.reason, f"{self.name} {error}: is it the address of {self._server}?") from error
        now = self._clock()
        if now >= self._history_at + _HISTORY_SECONDS and self._has_time():
            self._history_at = now
            with suppress(SourceError):  # not every server has a history
                self._history = self.read_history(POINTS)
        is_due = selected != self._fetched.uuid or now >= self._fetched_at + _DETAILS_SECONDS
        if selected and is_due and self._has_time():
            self._fetched_at = now
            self._fetched = self._fetch_details(selected, view)
        return Reading(view, history=self._history, fetched=self._fetched if selected else None)

    def _has_time(self) -> bool:
        return self._clock() <= self._last_start

    def read_history(self, points: int) -> Sparklines:
        body = self._client.get_blocking("api/v1/history", {"points": str(points)})
        try:
            answer = find_decoder(_HistoryAnswer).decode(body)
            decoded = {name: b64decode(text, validate=True) for name, text in answer.devices.items()}
        except (msgspec.DecodeError, ValueError) as error:
            raise SourceError("malformed", f"not a valid response of podgpu's /api/v1/history: {error}") from error
        devices = {
            _split_device(name): bytes(value if value <= FULL else NO_DATA for value in values[-points:])
            for name, values in decoded.items()
        }
        return Sparklines(devices, answer.step_seconds * points)

    def _fetch_details(self, uuid: str, view: View) -> FetchedDetails:
        details, problem = None, ""
        try:
            details = decode_details(self._client.get_blocking(f"api/v1/gpus/{quote(uuid, safe='')}"))
        except SourceError as error:
            problem = "" if error.reason == "http_404" else str(error)
        gpus = [gpu for node in view.nodes for gpu in node.gpus if gpu.uuid == uuid]
        slots = [slot for gpu in gpus for slot in (gpu, *gpu.instances)]
        pods = dict.fromkeys(
            (h.namespace, h.pod) for slot in slots for h in (*slot.holders, *slot.last_holders) if h.pod
        )
        jobs = []
        for pod in list(pods)[:_MAX_JOBS]:
            if not self._has_time():
                break
            with suppress(SourceError, msgspec.DecodeError):  # not every server has summaries
                path = "/".join(quote(name, safe="") for name in pod)
                jobs.append(find_decoder(JobSummary).decode(self._client.get_blocking(f"api/v1/summary/{path}")))
        return FetchedDetails(uuid, details, problem, jobs)


def _split_device(name: str) -> tuple[str, str]:
    uuid, _, instance = name.partition("/")
    return uuid, instance


class ExporterSource:
    """Reads the view of a podgpu exporter, or the metrics of any other GPU exporter."""

    deadline = 3 * EXPORTER_TIMEOUT + 0.5  # longer than three requests, so that their more detailed errors are shown

    def __init__(self, url: str) -> None:
        """If the URL has no path, /metrics is used. Raises UsageError if the URL is invalid."""
        try:
            self._metrics = UrlExposition(url, timeout=EXPORTER_TIMEOUT)
            self._api = ClusterSource(url, "a podgpu exporter", EXPORTER_TIMEOUT)
        except UsageError as error:
            raise UsageError(f"--url {error}") from error
        self.name = self._metrics.shown
        self._is_podgpu = True  # False if its metrics are from another exporter
        self._state: ClusterState | None = None

    def read(self, selected: str = "") -> Reading:
        """Reads the view. If there is none, or it has no GPUs, reads the metrics, which may show GPUs or the cause."""
        if self._is_podgpu:
            with suppress(SourceError):
                reading = self._api.read(selected)
                if any(node.gpus for node in reading.view.nodes):
                    return reading
        return Reading(self._read_metrics(), fetched=FetchedDetails(selected) if selected else None)

    def _read_metrics(self) -> View:
        states = self._parse(self._metrics.fetch())
        failing = [source.name for state in states for source in state.sources if source.up is False]
        if not any(state.devices for state in states):
            reason = f"the exporter cannot read {few_of(failing)}" if failing else "is it a GPU exporter?"
            raise SourceError("no_gpu", f"the metrics of {self.name} contain no GPU: {reason}")
        self._is_podgpu = any(state.producer == "podgpu" for state in states)
        now, wall = time.monotonic(), time.time()
        readings = tuple(NodeReading(self.name, state, now) for state in states)
        self._state = build_cluster_state(ClusterReading(readings), self._state, ViewSettings(), now, wall)
        return make_view(self._state)

    def _parse(self, body: bytes) -> list[NodeState]:
        try:
            return node_from_text(body.decode(), address=urlsplit(self.name).netloc)
        except (UnicodeDecodeError, BadExposition, msgspec.ValidationError) as error:
            raise SourceError("malformed", f"cannot parse the metrics of {self.name}: {error}") from error
