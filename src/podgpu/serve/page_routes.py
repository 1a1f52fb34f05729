"""Serves the web page and the JSON behind it (docs/api.md), for the exporter and for the cluster view alike.

The page's files are read when they are asked for, not kept: an exporter that nobody looks at spends nothing on them.
Figures are made, files read and both compressed in other threads: no scrape waits for somebody who looks.
Every URL in them is relative, so that it works below a prefix.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from podgpu import __version__
from podgpu.exposition.body import Body
from podgpu.http.aside import Turns
from podgpu.serve.answers import JSON_HEADERS, PAGE_HEADERS, Handler, json_error, prepared
from podgpu.serve.history_routes import history_routes
from podgpu.serve.waste_routes import waste_routes

if TYPE_CHECKING:  # an exporter that nobody looks at does not load it
    from podgpu.figures.page_state import PageState
    from podgpu.history.asking import History
    from podgpu.serve.waste_routes import TellWaste

_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8"}
_FOLDER = Path(__file__).parent / "page"
_LINKS, _VERSION = "<!--links-->", "<!--version-->"


def page_routes(
    latest: Callable[[], PageState],
    links: Sequence[str] = ("metrics",),
    history: History | None = None,
    wasted: TellWaste | None = None,
    turns: Turns | None = None,
) -> list[web.RouteDef]:
    """`latest` and `wasted` are asked at every request, in a thread that is not the event loop's. `links`: other paths
    of the same server, shown at the foot of the page. `turns`: for all who look there."""
    turns = turns or turns_to_look()
    return [
        web.get("/", index(links, turns)),
        web.get("/page/{name}", asset(_asset_types(), turns)),
        web.get("/api/v1/view", view(latest, turns)),
        web.get("/api/v1/pods/{namespace}/{pod}", pod(latest, turns)),
        *history_routes(history, turns),
        *waste_routes(wasted, turns),
        web.route("*", "/api/{rest:.*}", nothing_here),
    ]


def turns_to_look() -> Turns:
    """One more than one: somebody who has much made keeps nobody from the page itself."""
    return Turns(2)


def index(links: Sequence[str], turns: Turns) -> Handler:
    def page() -> bytes:
        anchors = "".join(f'<a href="{html.escape(link)}">{html.escape(link)}</a>' for link in links)
        text = (_FOLDER / "index.html").read_text(encoding="utf-8")
        return text.replace(_LINKS, anchors).replace(_VERSION, html.escape(__version__)).encode()

    async def handle(request: web.Request) -> web.Response:
        return await _file(request, page, "text/html; charset=utf-8", turns)

    return handle


def asset(types: Mapping[str, str], turns: Turns) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in types:
            raise web.HTTPNotFound()
        return await _file(request, (_FOLDER / name).read_bytes, types[name], turns)

    return handle


def _asset_types() -> dict[str, str]:
    """Only what lies in the folder at start, by name: no path leads anywhere else."""
    return {file.name: _TYPES[file.suffix] for file in _FOLDER.iterdir() if file.suffix in _TYPES}


async def _file(request: web.Request, read: Callable[[], bytes], content_type: str, turns: Turns) -> web.Response:
    body, etag = await turns.do(_with_etag, read)
    return prepared(request, body, {**PAGE_HEADERS, "Content-Type": content_type, "ETag": etag})


def _with_etag(read: Callable[[], bytes]) -> tuple[Body, str]:
    from podgpu.figures.page_state import etag_of

    content = read()
    return Body.of(content), etag_of(content)


def view(latest: Callable[[], PageState], turns: Turns) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        state = await turns.do(latest)
        return prepared(request, state.view, {**JSON_HEADERS, "ETag": state.etag})

    return handle


def pod(latest: Callable[[], PageState], turns: Turns) -> Handler:
    def find(namespace: str, name: str) -> Body | None:
        from podgpu.figures.as_json import pod_json

        found = pod_json(latest().picture, namespace, name)
        return None if found is None else Body.of(json.dumps(found, ensure_ascii=False).encode())

    async def handle(request: web.Request) -> web.Response:
        namespace, name = request.match_info["namespace"], request.match_info["pod"]
        found = await turns.do(find, namespace, name)
        if found is None:
            return json_error(404, f"no GPU is held by pod {namespace}/{name}")
        return prepared(request, found, JSON_HEADERS)

    return handle


async def nothing_here(request: web.Request) -> web.Response:
    """For scripts: what is wrong is JSON too."""
    if request.method not in ("GET", "HEAD"):
        return json_error(405, f"{request.method} {request.path}: only GET and HEAD", Allow="GET, HEAD")
    there = "/api/v1/view, /api/v1/gpus/UUID, /api/v1/pods/NAMESPACE/POD, /api/v1/history and /api/v1/waste"
    return json_error(404, f"no such path: {request.path}; there are {there}")
