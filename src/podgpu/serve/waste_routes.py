"""Answers what was held and idle, by pod, owner or namespace: `/api/v1/waste` (docs/api.md), as JSON or as CSV."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aiohttp import web

from podgpu.errors import UsageError
from podgpu.exposition.body import Body
from podgpu.http.aside import Turns
from podgpu.serve.answers import JSON_HEADERS, PAGE_HEADERS, Handler, json_error, prepared

if TYPE_CHECKING:  # an exporter that nobody looks at does not load it
    from podgpu.figures.waste import WasteStatement
    from podgpu.figures.waste_rows import By, Format, Source

    TellWaste = Callable[[], tuple[WasteStatement, Source]]
    """What was counted until now, and what has to be said of it."""

_CSV_HEADERS = {**PAGE_HEADERS, "Content-Type": "text/csv; charset=utf-8"}


def waste_routes(wasted: TellWaste | None, turns: Turns) -> list[web.RouteDef]:
    return [] if wasted is None else [web.get("/api/v1/waste", _waste(wasted, turns))]


def _waste(wasted: TellWaste, turns: Turns) -> Handler:
    def made(by: By, form: Format) -> tuple[Body, dict[str, str]]:
        from podgpu.figures.page_state import etag_of
        from podgpu.figures.waste_rows import csv_name, waste_csv, waste_json

        statement, source = wasted()
        if form == "json":
            content, headers = waste_json(statement, by, source), JSON_HEADERS
        else:
            attached = f'attachment; filename="{csv_name(by, source)}"'
            content, headers = waste_csv(statement, by, source), {**_CSV_HEADERS, "Content-Disposition": attached}
        return Body.of(content), {**headers, "ETag": etag_of(content)}

    async def handle(request: web.Request) -> web.Response:
        from podgpu.figures.waste_rows import waste_asked

        try:
            by, form = waste_asked(request.query)
        except UsageError as error:
            return json_error(400, str(error))
        body, headers = await turns.do(made, by, form)
        return prepared(request, body, headers)

    return handle
