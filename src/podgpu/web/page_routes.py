"""The web page and the paths below `/api/v1` (docs/api.md), for the exporter and the cluster view.

Responses are built and compressed in threads, so that they do not delay scrapes.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
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
from podgpu.fleet.view import GpuResponse, View, make_gpu_answer, make_pod
from podgpu.metrics.encode import Body, etag_of
from podgpu.model import PodName
from podgpu.past.bill import Order, RangeQuery, parse_range_query
from podgpu.past.costs import parse_costs_query, widest_range
from podgpu.past.events import parse_events_query
from podgpu.past.focus import encode_csv, split_days
from podgpu.past.interface import Past
from podgpu.past.savings import encode_savings_csv, parse_savings_query
from podgpu.past.sqlite import parse_range, parse_time
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
Complete = Callable[[GpuResponse], Awaitable[GpuResponse]]
"""Adds details to the answer about a GPU. Only the GPU's exporter has these details."""
_HTML_HEADERS = {**PAGE_HEADERS, "Content-Type": "text/html; charset=utf-8"}
_CSV_HEADERS = {**PAGE_HEADERS, "Content-Type": "text/csv; charset=utf-8"}
_ASSET_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8"}
_FOLDER = Path(__file__).parent / "page"


def page_routes(
    latest: Callable[[], PublishedState],
    complete_gpu: Complete,
    links: Sequence[str],
    past: Past | None = None,
    read_queue: ReadQueue | None = None,
) -> list[web.RouteDef]:
    """Returns the routes of the page and the API.

    Add them last: they answer all other `/api` paths with 404. `latest` is called in a thread.
    `links` are other paths of the server, shown at the bottom of the page. In a large cluster,
    `latest` has only totals. Then `past` finds the GPUs that match a query. `read_queue` is called
    in a thread.
    """
    assets = {file.name: file for file in _FOLDER.iterdir() if file.suffix in _ASSET_TYPES}

    async def index(request: web.Request) -> web.Response:
        return await _response(request, partial(_read_index, links), _HTML_HEADERS)

    async def asset(request: web.Request) -> web.Response:
        file = assets.get(request.match_info["name"])
        if file is None:
            raise web.HTTPNotFound()
        headers = {**PAGE_HEADERS, "Content-Type": _ASSET_TYPES[file.suffix]}
        return await _response(request, file.read_bytes, headers)

    async def find(query: GpuQuery | None) -> PublishedState:
        if query is None or query.at is None:
            published = await asyncio.to_thread(latest)
            # If the state has all nodes, the page selects GPUs itself.
            if query is None or past is None or published.state.fleet is None:
                return published
        elif past is None:
            raise UsageError("this server has no history")
        return await past.find(query)

    async def find_selected(request: web.Request) -> PublishedState:
        parse_time(request.query, "at", time.time())  # rejects the future
        query = parse_gpu_query(request.query)
        viewer = viewer_of(request)
        if not await viewer.sees_all():
            await _check_selection(viewer, query)
        return await find(query)

    async def read_visible(request: web.Request, published: PublishedState) -> View:
        whole = await asyncio.to_thread(lambda: published.view)
        return await _redact(request, whole, partial(_namespaces_in, whole), hide_in_view)

    async def view(request: web.Request) -> web.Response:
        published = await find_selected(request)
        if not await viewer_of(request).sees_all():
            return await _json_response(request, await read_visible(request, published))
        body, etag = await asyncio.to_thread(lambda: published.view_json)
        return body_response(request, body, {**JSON_HEADERS, "ETag": etag})

    async def pods(request: web.Request) -> web.Response:
        published = await find_selected(request)
        if published.state.fleet is not None:
            return json_error(404, "too many GPUs for a list of pods: choose one pod")
        visible = await read_visible(request, published)
        return await _json_response(request, await asyncio.to_thread(make_pods, visible))

    async def pod(request: web.Request) -> web.Response:
        namespace, name = _parse_pod(request)
        cluster = request.query.get("cluster")
        missing = f"pod {namespace}/{name} holds no GPU"
        if not await viewer_of(request).visible([namespace]):
            return json_error(404, missing)

        published = await find(GpuQuery(cluster=cluster or "", ns=namespace, pod=name))
        answer = await asyncio.to_thread(
            lambda: make_pod(published.state, published.view, namespace, name, cluster)
        )
        if answer is not None:
            namespaces = partial(list_namespaces, answer.nodes)
            answer = await _redact(request, answer, namespaces, hide_in_pod)

        return await _json_response(request, answer, missing)

    async def gpu(request: web.Request) -> web.Response:
        uuid = request.match_info["uuid"]
        published = await find(GpuQuery(gpu=uuid))
        answer = await asyncio.to_thread(lambda: make_gpu_answer(published.view, uuid))
        if answer is not None:
            answer = await complete_gpu(answer)
            namespaces = partial(_namespaces_in, published.view)
            answer = await _redact(request, answer, namespaces, hide_in_gpu)
        return await _json_response(request, answer, f"GPU {uuid[:64]!r} does not exist")

    async def jobs(request: web.Request) -> web.Response:
        published = await asyncio.to_thread(latest)
        if published.state.fleet is not None:
            return json_error(404, "too many GPUs for a list of jobs: choose one job")

        answer = await asyncio.to_thread(make_jobs, published.state)
        viewer = viewer_of(request)
        if not await viewer.sees_all():
            _check_clusters(job.cluster for job in answer.jobs)
            visible = await viewer.visible(job.namespace for job in answer.jobs)
            answer.jobs = [job for job in answer.jobs if job.namespace in visible]

        return await _json_response(request, answer)

    async def job(request: web.Request) -> web.Response:
        kind, namespace, name = _parse_job(request)
        missing = f"{kind} {namespace}/{name} holds no GPU"
        if not await viewer_of(request).visible([namespace]):
            return json_error(404, missing)

        published = await find(GpuQuery(ns=namespace, owner=f"{kind}/{name}"))
        answer = await asyncio.to_thread(make_job, published.state, kind, namespace, name)
        if answer is not None and not await viewer_of(request).sees_all():
            _check_clusters([answer.cluster])

        return await _json_response(request, answer, missing)

    routes = [
        web.get("/", index),
        web.get("/page/{name}", asset),
        _api_route("/api/v1/view", view),
        _api_route("/api/v1/gpus/{uuid}", gpu),
        _api_route("/api/v1/pods", pods),
        _api_route("/api/v1/pods/{namespace}/{pod}", pod),
        _api_route("/api/v1/jobs", jobs),
        _api_route("/api/v1/jobs/{kind}/{namespace}/{name}", job),
    ]
    if past is not None:
        routes += _history_routes(past, latest)
        routes += _range_routes(past)
        routes.append(_event_route(past))
        if past.has_summaries:
            routes.append(_summary_route(past))

    if read_queue is not None:
        routes.append(_queue_route(read_queue))

    routes.append(web.get("/api/{rest:.*}", _unknown_path))
    return routes


def _read_index(links: Sequence[str]) -> bytes:
    anchors = "".join(f'<a href="{link}">{link}</a>' for link in links)
    file = _FOLDER / "index.html"
    text = file.read_text(encoding="utf-8")
    text = text.replace("<!--links-->", anchors)
    text = text.replace("<!--version-->", __version__)
    return text.encode()


def _namespaces_in(view: View) -> list[str]:
    _check_clusters([row.cluster for row in view.namespaces])
    _check_clusters([node.cluster for node in view.nodes])
    names = [row.namespace for row in view.namespaces]
    names += list_namespaces(view.nodes)
    return names


def _check_clusters(clusters: Iterable[str]) -> None:
    """Raises HTTPForbidden if there are several clusters.

    The API server knows only the permissions of its own cluster.
    """
    if any(clusters):
        text = "several clusters are shown: only users who may list all pods may see them"
        raise web.HTTPForbidden(text=json.dumps({"error": text}), content_type="application/json")


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
    """Hides what the user may not see. `namespaces`: returns those that the answer may name."""
    viewer = viewer_of(request)
    if await viewer.sees_all():
        return answer
    return hide(answer, await viewer.visible(namespaces()))


async def _json_response(
    request: web.Request, answer: msgspec.Struct | JsonObject | None, missing: str = ""
) -> web.Response:
    """Encodes the answer. If it is None, the response is a 404 with the message `missing`."""
    if answer is None:
        return json_error(404, missing)
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


def _api_route(path: str, handler: Handler) -> web.RouteDef:
    """Answers with 400 if the query is invalid, or with 503 if the data cannot be read."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except UsageError as error:
            return json_error(400, str(error))
        except SourceError as error:
            return json_error(503, f"the data cannot be read: {error}", **{"Retry-After": "15"})

    return web.get(path, handle)


# History


def _history_routes(past: Past, latest: Callable[[], PublishedState]) -> list[web.RouteDef]:
    async def sparklines(request: web.Request) -> web.StreamResponse:
        published = await asyncio.to_thread(latest)
        if published.state.fleet is not None:
            return json_error(404, "too many GPUs for sparklines")
        return await _json_response(request, await past.sparklines())

    async def gpu(request: web.Request) -> web.StreamResponse:
        uuid = request.match_info["uuid"]
        instance = request.query.get("instance", "")
        answer = await past.gpu(uuid, instance, parse_range(request.query.get("range", "1h")))
        if answer is not None:
            namespaces = partial(list_held_namespaces, [answer])
            answer = await _redact(request, answer, namespaces, hide_in_history)

        name = uuid[:64]
        if instance:
            name += f"/{instance[:16]}"

        return await _json_response(request, answer, f"there is no history of GPU {name}")

    async def pod(request: web.Request) -> web.StreamResponse:
        namespace, name = _parse_pod(request)
        seconds = parse_range(request.query.get("range", "1h"))
        missing = f"there is no record that pod {namespace}/{name} held a GPU in this time range"
        if not await viewer_of(request).visible([namespace]):
            return json_error(404, missing)

        answer = await past.pod(namespace, name, seconds, request.query.get("cluster"))
        if answer is not None:
            namespaces = partial(list_held_namespaces, answer.devices)
            answer = await _redact(request, answer, namespaces, hide_in_pod_history)

        return await _json_response(request, answer, missing)

    async def job(request: web.Request) -> web.StreamResponse:
        kind, namespace, name = _parse_job(request)
        seconds = parse_range(request.query.get("range", "1h"))
        missing = f"there is no record that {kind} {namespace}/{name} held a GPU in this time range"
        viewer = viewer_of(request)
        if not await viewer.visible([namespace]):
            return json_error(404, missing)

        answer = await past.job(kind, namespace, name, seconds)
        if answer is not None and not await viewer.sees_all():
            answer.marks = hide_in_marks(answer.marks)

        return await _json_response(request, answer, missing)

    routes = [
        _api_route("/api/v1/history", sparklines),
        _api_route("/api/v1/history/gpus/{uuid}", gpu),
        _api_route("/api/v1/history/pods/{namespace}/{pod}", pod),
    ]
    if past.has_summaries:
        routes.append(_api_route("/api/v1/history/jobs/{kind}/{namespace}/{name}", job))

    return routes


def _range_routes(past: Past) -> list[web.RouteDef]:
    def ordered_by(order: Order, file_name: str) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            parse_time(request.query, "from", time.time())  # rejects the future
            query = parse_range_query(request.query, order)
            query = query._replace(visible=await _find_visible(request, past, query))
            answer = await past.range(query)
            if not query.is_csv:
                return await _json_response(request, answer)

            days = [await past.range(day) for day in split_days(query, answer)]
            make = partial(encode_csv, days)
            return await _csv_response(request, make, file_name, answer.simulated)

        return handle

    async def costs(request: web.Request) -> web.StreamResponse:
        parse_time(request.query, "from", time.time())
        query = parse_costs_query(request.query)
        visible = await _find_visible(request, past, widest_range(query, time.time()))
        query = query._replace(range=query.range._replace(visible=visible))
        return await _json_response(request, await past.costs(query))

    async def savings(request: web.Request) -> web.StreamResponse:
        query = parse_savings_query(request.query)
        period = RangeQuery("namespace", seconds=query.seconds)
        query = query._replace(visible=await _find_visible(request, past, period))
        answer = await past.savings(query)
        if not query.is_csv:
            return await _json_response(request, answer)
        make = partial(encode_savings_csv, answer)
        return await _csv_response(request, make, "podgpu-savings", answer.simulated)

    return [
        _api_route("/api/v1/savings", savings),
        _api_route("/api/v1/costs", costs),
        _api_route("/api/v1/range", ordered_by("cost", "podgpu-cost")),
        _api_route("/api/v1/waste", ordered_by("wasted", "podgpu-waste")),
    ]


async def _find_visible(
    request: web.Request, past: Past, query: RangeQuery
) -> frozenset[str] | None:
    """Returns the namespaces of this period that the user may see. None if he may see all."""
    viewer = viewer_of(request)
    if await viewer.sees_all():
        return None
    by_namespace = await past.range(query._replace(by="namespace"))
    _check_clusters(row.cluster for row in by_namespace.rows)
    return await viewer.visible(row.namespace for row in by_namespace.rows)


def _event_route(past: Past) -> web.RouteDef:
    async def events(request: web.Request) -> web.StreamResponse:
        answer = await past.events(parse_events_query(request.query))
        answer = await _redact(
            request, answer, partial(list_event_namespaces, answer), hide_in_events
        )
        return await _json_response(request, answer)

    return _api_route("/api/v1/events", events)


def _summary_route(past: Past) -> web.RouteDef:
    async def summary(request: web.Request) -> web.StreamResponse:
        namespace, name = _parse_pod(request)
        missing = f"there is no record that pod {namespace}/{name} held a GPU"
        if not await viewer_of(request).visible([namespace]):
            return json_error(404, missing)
        answer = await past.summary(namespace, name)
        return await _json_response(request, answer, missing)

    return _api_route("/api/v1/summary/{namespace}/{pod}", summary)


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

    return _api_route("/api/v1/queue", queue)


async def _unknown_path(request: web.Request) -> web.Response:
    if request.path == "/api/v1/queue":
        return json_error(404, f"{QUEUE_HINT.says} {QUEUE_HINT.do} adds them.")
    if request.path.startswith("/api/v1/summary/"):
        return json_error(404, "podgpu has no summaries of pods with --prometheus")
    if request.path.startswith("/api/v1/history/jobs/"):
        return json_error(404, "podgpu has no history of jobs with --prometheus: see their pods")
    return json_error(404, f"there is no path {request.path}; docs/api.md lists the paths")
