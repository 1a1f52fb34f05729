"""The web page and the paths below `/api/v1` (docs/api.md), for the exporter and the cluster view.

Responses are built and compressed in threads, so that they do not delay scrapes.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from podgpu import __version__
from podgpu.errors import SourceError, UsageError
from podgpu.fleet.job_view import make_job, make_jobs
from podgpu.fleet.pod_list import make_pods
from podgpu.fleet.read.pages import GpuQuery, parse_gpu_query
from podgpu.fleet.round import PublishedState
from podgpu.fleet.setup import QUEUE_HINT
from podgpu.fleet.state import ClusterState
from podgpu.fleet.view import GpuResponse, View, make_gpu_answer, make_pod
from podgpu.metrics.encode import Body, etag_of
from podgpu.model import PodName
from podgpu.past.bills.bill import Order, RangeQuery, parse_range_query
from podgpu.past.bills.costs import parse_costs_query, widest_range
from podgpu.past.bills.focus import encode_csv, split_days
from podgpu.past.events import parse_events_query
from podgpu.past.interface import Past
from podgpu.past.queries import parse_range, parse_time
from podgpu.past.savings.savings import encode_savings_csv, parse_savings_query
from podgpu.past.waste_advice import advise_row
from podgpu.pending.queue import QueueSnapshot, make_queue, parse_queue_query
from podgpu.web.access import Viewer, viewer_of
from podgpu.web.redaction import (
    hide_in_events,
    hide_in_gpu,
    hide_in_history,
    hide_in_marks,
    hide_in_pod,
    hide_in_pod_history,
    hide_in_view,
    list_event_namespaces,
    list_held_namespaces,
    list_namespaces,
)
from podgpu.web.responses import JSON_HEADERS, PAGE_HEADERS, Handler, body_response, json_error

JsonObject = dict[str, Any]
_Answer = TypeVar("_Answer")
ReadQueue = Callable[[], QueueSnapshot]
CompleteGpu = Callable[[GpuResponse], Awaitable[GpuResponse]]
"""Adds details to the answer about a GPU. Only the GPU's exporter has these details."""
_HTML_HEADERS = {**PAGE_HEADERS, "Content-Type": "text/html; charset=utf-8"}
_CSV_HEADERS = {**PAGE_HEADERS, "Content-Type": "text/csv; charset=utf-8"}
_ASSET_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8"}
_GPU_QUERY = GpuQuery.__struct_fields__
_PERIOD = ("range", "from", "to")  # parameters
_FOLDER = Path(__file__).parent / "page"
_ASSETS = {file.name: file for file in _FOLDER.iterdir() if file.suffix in _ASSET_TYPES}


def page_routes(
    read_latest: Callable[[], PublishedState],
    complete_gpu: CompleteGpu,
    links: Sequence[str],
    past: Past | None = None,
    read_queue: ReadQueue | None = None,
) -> list[web.RouteDef]:
    """Returns the routes of the page and the API.

    Add them last: they answer all other `/api` paths with 404. `read_latest` and `read_queue` are
    called in a thread. `links` are other paths of the server, shown at the bottom of the page. In a
    large cluster, `read_latest` has only totals. Then `past` finds the GPUs that match a query.
    """
    now = _NowRoutes(read_latest, complete_gpu, links, past)
    route = partial(_gpu_route, read_latest)
    routes = [
        web.get("/", now.index),
        web.get("/page/{name}", now.asset),
        route("/api/v1/view", now.view, _GPU_QUERY),
        route("/api/v1/gpus/{uuid}", now.gpu),
        route("/api/v1/pods", now.pods, _GPU_QUERY),
        route("/api/v1/pods/{namespace}/{pod}", now.pod, ["cluster"]),
        route("/api/v1/jobs", now.jobs),
        route("/api/v1/jobs/{kind}/{namespace}/{name}", now.job),
    ]
    if past is not None:
        routes += _list_past_routes(past, read_latest)
    if read_queue is not None:
        routes.append(_queue_route(read_queue))
    routes.append(web.get("/api/{rest:.*}", _unknown_path))
    return routes


def _list_past_routes(
    past: Past, read_latest: Callable[[], PublishedState]
) -> Iterator[web.RouteDef]:
    history = _HistoryRoutes(past, read_latest)
    route = partial(_gpu_route, read_latest)
    yield route("/api/v1/history", history.sparklines)
    yield route("/api/v1/history/gpus/{uuid}", history.gpu, ["range", "instance"])
    yield route("/api/v1/history/pods/{namespace}/{pod}", history.pod, ["range", "cluster"])
    if past.has_summaries:
        yield route("/api/v1/history/jobs/{kind}/{namespace}/{name}", history.job, ["range"])
        yield route("/api/v1/summary/{namespace}/{pod}", history.summary)

    bills = _BillRoutes(past)
    cost = partial(bills.range, "cost", "podgpu-cost")
    waste = partial(bills.range, "wasted", "podgpu-waste")
    yield route("/api/v1/range", cost, [*_PERIOD, "by", "format"])
    yield route("/api/v1/waste", waste, [*_PERIOD, "by", "format"])
    yield route("/api/v1/costs", bills.costs, [*_PERIOD, "by", "step"])
    yield route("/api/v1/savings", bills.savings, ["range", "slowdown", "idle", "format"])
    yield route("/api/v1/events", history.events, ["range", "to", "gpu", "node", "pod"])


@dataclass(frozen=True, slots=True)
class _NowRoutes:
    """The page, and the answers about the current state."""

    read_latest: Callable[[], PublishedState]
    complete_gpu: CompleteGpu
    links: Sequence[str]
    past: Past | None

    async def index(self, request: web.Request) -> web.Response:
        return await _response(request, partial(_read_index, self.links), _HTML_HEADERS)

    async def asset(self, request: web.Request) -> web.Response:
        file = _ASSETS.get(request.match_info["name"])
        if file is None:
            raise web.HTTPNotFound()
        headers = {**PAGE_HEADERS, "Content-Type": _ASSET_TYPES[file.suffix]}
        return await _response(request, file.read_bytes, headers)

    async def _find(self, query: GpuQuery | None) -> PublishedState:
        """Returns a state that contains the GPUs of the query, or the current one without it."""
        if query is not None and query.at is not None:
            if self.past is None:
                raise UsageError("this server has no history")
            return await self.past.find(query)

        published = await asyncio.to_thread(self.read_latest)
        # A state with all nodes contains them already; the page selects them.
        has_all = published.state.totals_only is None
        if query is None or self.past is None or has_all:
            return published
        return await self.past.find(query)

    async def _find_selected(self, request: web.Request) -> PublishedState:
        _reject_future(request, "at")
        query = parse_gpu_query(request.query)
        viewer = viewer_of(request)
        if not await viewer.sees_all():
            await _check_selection(viewer, query)
        return await self._find(query)

    async def _read_visible(self, request: web.Request, published: PublishedState) -> View:
        whole = await asyncio.to_thread(lambda: published.view)
        return await _redact(request, whole, partial(_namespaces_in, whole), hide_in_view)

    async def view(self, request: web.Request) -> web.Response:
        published = await self._find_selected(request)
        if not await viewer_of(request).sees_all():
            return await _json_response(request, await self._read_visible(request, published))
        body, etag = await asyncio.to_thread(lambda: published.view_json)
        return body_response(request, body, {**JSON_HEADERS, "ETag": etag})

    async def pods(self, request: web.Request) -> web.Response:
        published = await self._find_selected(request)
        _check_has_all(published, "too many GPUs for a list of pods: choose one pod")
        visible = await self._read_visible(request, published)
        return await _json_response(request, await asyncio.to_thread(make_pods, visible))

    async def pod(self, request: web.Request) -> web.Response:
        namespace, name = _parse_pod(request)
        cluster = request.query.get("cluster")  # None for any cluster
        missing = f"pod {namespace}/{name} holds no GPU"
        await _check_visible(request, namespace, missing)
        published = await self._find(GpuQuery(cluster=cluster or "", ns=namespace, pod=name))
        found = await asyncio.to_thread(
            lambda: make_pod(published.state, published.view, namespace, name, cluster)
        )
        answer = _require(found, missing)
        namespaces = partial(list_namespaces, answer.nodes)
        answer = await _redact(request, answer, namespaces, hide_in_pod)
        return await _json_response(request, answer)

    async def gpu(self, request: web.Request) -> web.Response:
        uuid = request.match_info["uuid"]
        published = await self._find(GpuQuery(gpu=uuid))
        found = await asyncio.to_thread(lambda: make_gpu_answer(published.view, uuid))
        answer = _require(found, f"GPU {uuid[:64]!r} does not exist")
        answer = await self.complete_gpu(answer)
        namespaces = partial(_namespaces_in, published.view)
        answer = await _redact(request, answer, namespaces, hide_in_gpu)
        return await _json_response(request, answer)

    async def jobs(self, request: web.Request) -> web.Response:
        published = await asyncio.to_thread(self.read_latest)
        _check_has_all(published, "too many GPUs for a list of jobs: choose one job")
        answer = await asyncio.to_thread(make_jobs, published.state)
        viewer = viewer_of(request)
        if not await viewer.sees_all():
            visible = await viewer.visible(job.namespace for job in answer.jobs)
            answer.jobs = [job for job in answer.jobs if job.namespace in visible]

        return await _json_response(request, answer)

    async def job(self, request: web.Request) -> web.Response:
        kind, namespace, name = _parse_job(request)
        missing = f"{kind} {namespace}/{name} holds no GPU"
        await _check_visible(request, namespace, missing)
        published = await self._find(GpuQuery(ns=namespace, owner=f"{kind}/{name}"))
        found = await asyncio.to_thread(make_job, published.state, kind, namespace, name)
        return await _json_response(request, _require(found, missing))


def _read_index(links: Sequence[str]) -> bytes:
    anchors = "".join(f'<a href="{link}">{link}</a>' for link in links)
    file = _FOLDER / "index.html"
    text = file.read_text(encoding="utf-8")
    text = text.replace("<!--links-->", anchors)
    text = text.replace("<!--version-->", __version__)
    return text.encode()


class _Missing(Exception):
    """The response is a 404 with this text."""


def _require(answer: _Answer | None, missing: str) -> _Answer:
    if answer is None:
        raise _Missing(missing)
    return answer


async def _check_visible(request: web.Request, namespace: str, missing: str) -> None:
    """Answers as if the pod did not exist if the user may not see its namespace."""
    if not await viewer_of(request).visible([namespace]):
        raise _Missing(missing)


def _check_has_all(published: PublishedState, missing: str) -> None:
    """In a large cluster, the state has only totals."""
    if published.state.totals_only is not None:
        raise _Missing(missing)


def _namespaces_in(view: View) -> list[str]:
    _require_one_cluster([row.cluster for row in view.namespaces])
    _require_one_cluster([node.cluster for node in view.nodes])
    names = [row.namespace for row in view.namespaces]
    names += list_namespaces(view.nodes)
    return names


def _require_one_cluster(clusters: Iterable[str]) -> None:
    """Raises HTTPForbidden if there are several clusters."""
    if any(clusters):
        raise _several_clusters()


def _several_clusters() -> web.HTTPForbidden:
    """The API server knows only the permissions of its own cluster."""
    text = "several clusters are shown: only users who may list all pods may see them"
    return web.HTTPForbidden(text=json.dumps({"error": text}), content_type="application/json")


async def _check_selection(viewer: Viewer, query: GpuQuery | None) -> None:
    """Raises UsageError if the selection would tell whether a hidden pod exists."""
    if query is None:
        return
    if query.ns and await viewer.visible([query.ns]):
        return
    if query.ns or query.pod or query.owner or query.q:
        raise UsageError(
            "you may select by pod, owner or text only in a namespace of yours: add ns="
        )


def _reject_future(request: web.Request, parameter: str) -> None:
    """Raises UsageError if the time is after now, or is no time."""
    parse_time(request.query, parameter, time.time())


def _parse_pod(request: web.Request) -> PodName:
    return request.match_info["namespace"], request.match_info["pod"]


def _parse_job(request: web.Request) -> tuple[str, str, str]:
    info = request.match_info
    return info["kind"], info["namespace"], info["name"]


async def _redact(
    request: web.Request,
    answer: _Answer,
    namespaces: Callable[[], Iterable[str]],
    hide: Callable[[_Answer, frozenset[str]], _Answer],
) -> _Answer:
    """Hides what the user may not see with `hide`.

    `namespaces`: returns the namespaces that the answer may name.
    """
    viewer = viewer_of(request)
    if await viewer.sees_all():
        return answer
    # With thousands of GPUs, both take long.
    named = await asyncio.to_thread(lambda: list(namespaces()))
    visible = await viewer.visible(named)
    return await asyncio.to_thread(hide, answer, visible)


async def _json_response(request: web.Request, answer: msgspec.Struct | JsonObject) -> web.Response:
    return await _response(request, partial(msgspec.json.encode, answer), JSON_HEADERS)


async def _csv_response(
    request: web.Request, make: Callable[[], bytes], name: str, is_simulated: bool
) -> web.Response:
    """`name`: of the file, without suffix."""
    suffix = "-SIMULATED" if is_simulated else ""
    attachment = f'attachment; filename="{name}{suffix}.csv"'
    return await _response(request, make, {**_CSV_HEADERS, "Content-Disposition": attachment})


async def _response(
    request: web.Request, make: Callable[[], bytes], headers: Mapping[str, str]
) -> web.Response:
    """Calls `make` in a thread and sends its result. `headers` must contain the Content-Type."""

    def compress() -> tuple[Body, str]:
        content = make()
        return Body(content), etag_of(content)

    body, etag = await asyncio.to_thread(compress)
    return body_response(request, body, {**headers, "ETag": etag})


def _api_route(path: str, handler: Handler, parameters: Collection[str] = ()) -> web.RouteDef:
    """Answers with 400 if the query is invalid, with 404 if there is nothing to answer, or with 503
    if the data cannot be read. `parameters`: those that a query may have.
    """

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            _check_parameters(request, parameters)
            return await handler(request)
        except UsageError as error:
            return json_error(400, str(error), facts=error.facts)
        except _Missing as error:
            return json_error(404, str(error))
        except SourceError as error:
            return json_error(
                503, f"the data cannot be read: {error}", headers={"Retry-After": "15"}
            )

    return web.get(path, handle)


def _gpu_route(
    read_latest: Callable[[], PublishedState],
    path: str,
    handler: Handler,
    parameters: Collection[str] = (),
) -> web.RouteDef:
    """Like `_api_route`, for GPUs and their holders. These may be in several clusters."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if not await viewer_of(request).sees_all():
            published = await asyncio.to_thread(read_latest)
            if _has_clusters(published.state):
                raise _several_clusters()
        return await handler(request)

    return _api_route(path, handle, parameters)


def _has_clusters(state: ClusterState) -> bool:
    if state.totals_only is not None:
        return state.totals_only.has_clusters
    # A reading names its cluster only if there are several.
    return any(node.reading.cluster for node in state.nodes)


def _check_parameters(request: web.Request, known: Collection[str]) -> None:
    """A misspelt parameter would be answered with figures that nobody asked for."""
    for name in request.query:
        if name not in known:
            takes = f"takes {', '.join(known)}" if known else "takes no parameters"
            raise UsageError(
                f"unknown parameter {name[:60]!a}: {request.path[:100]} {takes}",
                parameter=name[:60],
            )


# History


@dataclass(frozen=True, slots=True)
class _HistoryRoutes:
    """Time series, events and summaries."""

    past: Past
    read_latest: Callable[[], PublishedState]

    async def sparklines(self, request: web.Request) -> web.StreamResponse:
        published = await asyncio.to_thread(self.read_latest)
        _check_has_all(published, "too many GPUs for sparklines")
        return await _json_response(request, await self.past.sparklines())

    async def gpu(self, request: web.Request) -> web.StreamResponse:
        uuid = request.match_info["uuid"]
        instance = request.query.get("instance", "")
        seconds = parse_range(request.query.get("range", "1h"))
        found = await self.past.gpu(uuid, instance, seconds)
        name = uuid[:64]
        if instance:
            name += f"/{instance[:16]}"

        answer = _require(found, f"there is no history of GPU {name}")
        namespaces = partial(list_held_namespaces, [answer])
        answer = await _redact(request, answer, namespaces, hide_in_history)
        return await _json_response(request, answer)

    async def pod(self, request: web.Request) -> web.StreamResponse:
        namespace, name = _parse_pod(request)
        seconds = parse_range(request.query.get("range", "1h"))
        missing = f"there is no record that pod {namespace}/{name} held a GPU in this time range"
        await _check_visible(request, namespace, missing)
        cluster = request.query.get("cluster")
        answer = _require(await self.past.pod(namespace, name, seconds, cluster), missing)
        namespaces = partial(list_held_namespaces, answer.devices)
        answer = await _redact(request, answer, namespaces, hide_in_pod_history)
        return await _json_response(request, answer)

    async def job(self, request: web.Request) -> web.StreamResponse:
        kind, namespace, name = _parse_job(request)
        seconds = parse_range(request.query.get("range", "1h"))
        missing = f"there is no record that {kind} {namespace}/{name} held a GPU in this time range"
        await _check_visible(request, namespace, missing)
        answer = _require(await self.past.job(kind, namespace, name, seconds), missing)
        if not await viewer_of(request).sees_all():
            answer.marks = hide_in_marks(answer.marks)
        return await _json_response(request, answer)

    async def events(self, request: web.Request) -> web.StreamResponse:
        answer = await self.past.events(parse_events_query(request.query))
        answer = await _redact(
            request, answer, partial(list_event_namespaces, answer), hide_in_events
        )
        return await _json_response(request, answer)

    async def summary(self, request: web.Request) -> web.StreamResponse:
        namespace, name = _parse_pod(request)
        missing = f"there is no record that pod {namespace}/{name} held a GPU"
        await _check_visible(request, namespace, missing)
        answer = _require(await self.past.summary(namespace, name), missing)
        return await _json_response(request, answer)


@dataclass(frozen=True, slots=True)
class _BillRoutes:
    """Cost, waste and savings."""

    past: Past

    async def range(self, order: Order, file_name: str, request: web.Request) -> web.StreamResponse:
        _reject_future(request, "from")
        query = parse_range_query(request.query, order)
        query = query._replace(visible=await _find_visible(request, self.past, query))
        answer = await self.past.range(query)
        if query.order == "wasted":
            for row in answer.rows:
                row.do = advise_row(row, answer.to)
        if not query.is_csv:
            return await _json_response(request, answer)

        days = [await self.past.range(day) for day in split_days(query, answer)]
        make = partial(encode_csv, days)
        return await _csv_response(request, make, file_name, answer.simulated)

    async def costs(self, request: web.Request) -> web.StreamResponse:
        _reject_future(request, "from")
        query = parse_costs_query(request.query)
        visible = await _find_visible(request, self.past, widest_range(query, time.time()))
        query = query._replace(range=query.range._replace(visible=visible))
        return await _json_response(request, await self.past.costs(query))

    async def savings(self, request: web.Request) -> web.StreamResponse:
        query = parse_savings_query(request.query)
        period = RangeQuery("namespace", seconds=query.seconds)
        query = query._replace(visible=await _find_visible(request, self.past, period))
        answer = await self.past.savings(query)
        if not query.is_csv:
            return await _json_response(request, answer)
        make = partial(encode_savings_csv, answer)
        return await _csv_response(request, make, "podgpu-savings", answer.simulated)


async def _find_visible(
    request: web.Request, past: Past, query: RangeQuery
) -> frozenset[str] | None:
    """Returns the namespaces of this period that the user may see. None if he may see all."""
    viewer = viewer_of(request)
    if await viewer.sees_all():
        return None
    by_namespace = await past.range(query._replace(by="namespace"))
    _require_one_cluster(row.cluster for row in by_namespace.rows)
    return await viewer.visible(row.namespace for row in by_namespace.rows)


def _queue_route(read_queue: ReadQueue) -> web.RouteDef:
    async def queue(request: web.Request) -> web.StreamResponse:
        query = parse_queue_query(request.query)
        snapshot = await asyncio.to_thread(read_queue)
        viewer = viewer_of(request)
        visible = None
        if not await viewer.sees_all():
            visible = await viewer.visible(snapshot.list_namespaces())
        answer = await asyncio.to_thread(make_queue, snapshot, query, visible)
        return await _json_response(request, answer)

    return _api_route("/api/v1/queue", queue, ["ns", "pod"])


async def _unknown_path(request: web.Request) -> web.Response:
    if request.path == "/api/v1/queue":
        return json_error(404, f"{QUEUE_HINT.says} {QUEUE_HINT.do} adds them.")
    if request.path.startswith("/api/v1/summary/"):
        return json_error(404, "podgpu has no summaries of pods with --prometheus")
    if request.path.startswith("/api/v1/history/jobs/"):
        return json_error(404, "podgpu has no history of jobs with --prometheus: see their pods")
    message = f"there is no path {request.path}; docs/api.md lists the paths"
    return json_error(404, message, facts={"reason": "no_path"})
