"""Sends POST /-/forget and /-/release, which a podgpu on the same machine accepts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from podgpu.errors import SourceError, one_line
from podgpu.http_client import Access, HttpClient, HttpResponse, open_session

_MAX_TEXT = 400  # another server may answer with a whole page


def send_operator_request(url: str, action: str, query: Mapping[str, str]) -> str:
    """Returns the text of the response. Raises SourceError if podgpu rejects the request."""
    access = Access(headers=(("X-Podgpu-Request", action),))
    client = HttpClient(url, access)
    response = asyncio.run(_post(client, action, query))

    text = one_line(response.body.decode(errors="replace").strip())[:_MAX_TEXT]
    if response.status == 200:
        return text
    # Only an exporter has this path. Another server answers with its own text.
    if response.status == 404 and action == "release":
        text = "it is no exporter of podgpu, so it does not have the driver open"
    raise SourceError(
        f"http_{response.status}", f"{client.shown} answers {response.status}: {text}"
    )


async def _post(client: HttpClient, action: str, query: Mapping[str, str]) -> HttpResponse:
    async with open_session() as session:
        return await client.send(session, "POST", f"-/{action}", query=query)
