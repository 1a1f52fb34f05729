"""Sends POST /-/forget and /-/release, which a podgpu on the same machine accepts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from urllib.parse import urlencode

from podgpu.errors import SourceError
from podgpu.http_client import Access, HttpClient, HttpResponse, open_session


def send_operator_request(url: str, action: str, query: Mapping[str, str]) -> str:
    """Returns the text of the response. Raises SourceError if podgpu rejects the request."""
    access = Access(headers=(("X-Podgpu-Request", action),))
    client = HttpClient(f"{url.rstrip('/')}/?{urlencode(query)}", access)
    response = asyncio.run(_post(client, action))

    text = response.body.decode(errors="replace").strip()
    if response.status != 200:
        text = text or f"{client.shown} answers {response.status}"
        raise SourceError(f"http_{response.status}", text)
    return text


async def _post(client: HttpClient, action: str) -> HttpResponse:
    async with open_session() as session:
        return await client.send(session, "POST", f"-/{action}")
