"""This module serves the web page's files, with the API behind it (`api_routes.py`), for the exporter and the cluster
view alike.

The page's files are read when they are asked for, not kept: an exporter that nobody looks at spends nothing on them.
They are read and compressed in other threads: no scrape waits for somebody who looks.
Every URL in them is relative, so that it works below a prefix.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from podgpu import __version__
from podgpu.metrics.body import Body, etag_of
from podgpu.web.answers import PAGE_HEADERS, Handler, prepared
from podgpu.web.api_routes import api_routes, turns_to_look
from podgpu.web.aside import Turns

if TYPE_CHECKING:  # an exporter that nobody looks at does not load it
    from podgpu.figures.as_json import PageState
    from podgpu.history.asking import History
    from podgpu.web.api_routes import TellWaste

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
    of the same server, shown at the foot of the page. `turns`: of those who look, where there is more to look at."""
    turns = turns or turns_to_look()
    return [
        web.get("/", index(links, turns)),
        web.get("/page/{name}", asset(_asset_types(), turns)),
        *api_routes(latest, turns, history, wasted),
    ]


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
    content = read()
    return Body.of(content), etag_of(content)
