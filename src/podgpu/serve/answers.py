"""Prepared bytes as an answer: in the encoding asked for, or not at all when the asker has them already."""

from __future__ import annotations

import re
from collections.abc import Mapping

from aiohttp import web

from podgpu.exposition.body import Body


def prepared(request: web.Request, body: Body, headers: Mapping[str, str]) -> web.Response:
    """`headers` with the Content-Type. With an ETag among them, whoever knows it is told that nothing changed."""
    said = {**headers, "Vary": "Accept-Encoding"}
    if "ETag" in said and knows(request, said["ETag"]):
        return web.Response(status=304, headers={k: v for k, v in said.items() if k != "Content-Type"})
    if accepts_gzip(request.headers.get("Accept-Encoding", "")):
        said["Content-Encoding"] = "gzip"
        return web.Response(body=body.zipped, headers=said)
    return web.Response(body=body.plain, headers=said)


def knows(request: web.Request, etag: str) -> bool:
    """By RFC 9110: the weak comparison, * for any."""
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("If-None-Match", "").split(",")}
    return "*" in known or etag.removeprefix("W/") in known


def accepts_gzip(header: str) -> bool:
    """By RFC 9110: gzip's own weight counts, else that of *; 0 means no."""
    weights: dict[str, bool] = {}
    for part in header.lower().split(","):
        coding, *parameters = (piece.strip() for piece in part.split(";"))
        weights.setdefault(coding, not any(re.fullmatch(r"q\s*=\s*0(\.0*)?", p) for p in parameters))
    return weights.get("gzip", weights.get("*", False))
