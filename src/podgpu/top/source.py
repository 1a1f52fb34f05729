"""The sources of `top`: the driver on this node, an exporter, or a cluster view."""

from __future__ import annotations

import re
import time
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Protocol
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from podgpu.agent.loop import Agent
from podgpu.cluster.collect import ClusterReading, NodeReading
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.state import ClusterState, build_cluster_state, build_single_node_state
from podgpu.cluster.view import API, GpuDetails, View, decode_details, decode_view, make_view
from podgpu.errors import MOST_NAMED, SourceError, UsageError, few_of
from podgpu.gpu.exposition import UrlExposition
from podgpu.http_client import Access, HttpClient
from podgpu.metrics.adapter import node_from_text
from podgpu.metrics.parse import BadExposition
from podgpu.model import NodeState, has_readings
from podgpu.top.lines import Processes
from podgpu.top.text import FULL, NO_DATA

EXPORTER_TIMEOUT = 5.0
CLUSTER_TIMEOUT = 10.0  # the view of a large cluster has several megabytes
_ALLOCATION_SECONDS = 1.0
_MAX_POINTS = 10_000
_SAFE_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _:-]{0,127}")  # the UUID becomes part of a URL path


@dataclass(frozen=True, slots=True)
class SourceReading:
    view: View
    processes: Processes = field(default_factory=dict)


class Source(Protocol):
    name: str
    deadline: float
    has_rates: bool  # computes rates, which need a second reading

    @property
    def api(self) -> PodgpuApi | None:
        """The API for history and details, or None if the source is not a podgpu server."""

    def read(self) -> SourceReading:
        """Raises SourceError or StartError."""

    def close(self) -> None: ...


# This node


class LocalSource:
    name = "this node"
    has_rates = True
    api = None

    def __init__(self, agent: Agent, with_processes: bool) -> None:
        self._agent = agent
        self._with_processes = with_processes
        self._allocated_at = float("-inf")
        self.deadline = 4 * agent.settings.deadline  # `read` makes several calls, each with its own deadline

    def read(self) -> SourceReading:
        """Raises SourceError if no GPU can be read now, StartError if retrying cannot help."""
        agent = self._agent
        agent.read_telemetry()
        now = agent.clock.monotonic()
        if now - self._allocated_at >= _ALLOCATION_SECONDS:
            self._allocated_at = now
            agent.read_allocation()
        agent.read_usage()
        state = agent.published.state
        failing = [source for source in state.sources if source.up is False]
        if not has_readings(state):
            why = "; ".join(source.message for source in failing[:MOST_NAMED]) or "this node has none"
            raise SourceError("no_gpu", f"no GPU could be read: {why}. To show other machines, use --url or --cluster")
        notes = [f"{source.name}: {source.message or source.error}" for source in failing]
        state = replace(state, sources=())  # the notes already include these errors, with messages
        view = make_view(build_single_node_state(state, ViewSettings(), now, agent.clock.wall(), notes=notes))
        return SourceReading(view, agent.list_processes() if self._with_processes else {})

    def close(self) -> None:
        self._agent.stop()


# Servers


@dataclass(frozen=True, slots=True)
class ServerHistory:
    step: float  # time between two points, in seconds
    devices: Mapping[tuple[str, str], bytes] = field(default_factory=dict)
    """Points by UUID and MIG instance, encoded as described at `text.FULL`, newest last."""


class _HistoryAnswer(msgspec.Struct):
    api: str
    step_seconds: Annotated[float, Meta(gt=0, le=86_400)]
    devices: dict[str, Annotated[str, Meta(max_length=2 * _MAX_POINTS)]]


class PodgpuApi:
    """Client for the JSON API of podgpu's exporter and cluster view (docs/api.md). All methods raise SourceError."""

    def __init__(self, url: str, server: str, timeout: float) -> None:
        """`server` names the expected server in error messages. Raises UsageError."""
        base = url.rstrip("/").removesuffix("/metrics")
        self._client = HttpClient(base, Access(prefix="", server=server), timeout=timeout)
        self._server = server
        self.name = self._client.shown

    def view(self) -> View:
        body = self._client.get_blocking("api/v1/view")
        try:
            return decode_view(body)
        except SourceError as error:
            raise SourceError(error.reason, f"{self.name} {error}: is it the address of {self._server}?") from error

    def history(self, points: int) -> ServerHistory:
        return decode_history(self._client.get_blocking("api/v1/history", {"points": str(points)}))

    def gpu(self, uuid: str) -> GpuDetails:
        if not _SAFE_UUID.fullmatch(uuid):
            raise SourceError("http_404", f"{self.name} has no details of this GPU")
        return decode_details(self._client.get_blocking(f"api/v1/gpus/{uuid}"))


def decode_history(body: bytes) -> ServerHistory:
    """Raises SourceError."""
    try:
        answer = msgspec.json.decode(body, type=_HistoryAnswer)
        if answer.api != API:
            raise msgspec.ValidationError("the field `api` is wrong")
        devices = {_split_device(name): _decode_points(text) for name, text in answer.devices.items()}
    except (msgspec.DecodeError, ValueError) as error:
        raise SourceError("malformed", f"not a valid response of podgpu's /api/v1/history: {error}") from error
    return ServerHistory(answer.step_seconds, devices)


def _split_device(name: str) -> tuple[str, str]:
    uuid, _, instance = name.partition("/")
    return uuid, instance


def _decode_points(text: str) -> bytes:
    return bytes(point if point <= FULL else NO_DATA for point in b64decode(text, validate=True))


class ClusterSource:
    """Reads the view of `podgpu cluster`, or of any other server with podgpu's API."""

    deadline = CLUSTER_TIMEOUT + 1.0  # longer than the request's timeout, so that its more detailed error is shown
    has_rates = False

    def __init__(self, url: str) -> None:
        """Raises UsageError."""
        self.api = PodgpuApi(url, "podgpu cluster", CLUSTER_TIMEOUT)
        self.name = self.api.name

    def read(self) -> SourceReading:
        return SourceReading(self.api.view())

    def close(self) -> None: ...


class ExporterSource:
    """Reads the view of a podgpu exporter, or the metrics of any other GPU exporter."""

    has_rates = False
    # Longer than the timeouts of two requests, so that their more detailed errors are shown.
    deadline = 2 * EXPORTER_TIMEOUT + 0.5

    def __init__(self, url: str) -> None:
        """If the URL has no path, /metrics is used. Raises UsageError."""
        try:
            self._metrics = UrlExposition(url, Access(prefix=""), EXPORTER_TIMEOUT)
            self._api = PodgpuApi(url, "a podgpu exporter", EXPORTER_TIMEOUT)
        except UsageError as error:
            raise UsageError(f"--url {error}") from error
        self.name = self._metrics.shown
        self._is_podgpu = True  # False if its metrics are from another exporter
        self._has_view = False
        self._state: ClusterState | None = None

    @property
    def api(self) -> PodgpuApi | None:
        return self._api if self._has_view else None

    def read(self) -> SourceReading:
        view = self._read_view() if self._is_podgpu else None
        self._has_view = view is not None
        return SourceReading(view or self._read_metrics())

    def _read_view(self) -> View | None:
        """Returns None if there is no view or it has no GPUs. The metrics may have GPUs, or show the reason."""
        try:
            view = self._api.view()
        except SourceError:
            return None
        return view if any(node.gpus for node in view.nodes) else None

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
        except UnicodeDecodeError as error:
            reason, message = "malformed", f"byte {error.start} is not UTF-8"
        except BadExposition as error:
            reason, message = error.reason, str(error)
        except msgspec.ValidationError as error:
            reason, message = "malformed", str(error)
        raise SourceError(reason, f"cannot parse the metrics of {self.name}: {message}")

    def close(self) -> None: ...
