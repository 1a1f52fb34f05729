"""`podgpu forget`: removes a GPU that was taken out of the machine from the list of lost GPUs."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

import click

from podgpu.cli.options import make_command, options_of
from podgpu.errors import SourceError
from podgpu.http_client import Access, HttpClient, HttpResponse, open_session


@make_command(
    "forget",
    options_of("forget"),
    ("podgpu forget GPU-5d1c…", "on the node: remove the GPU from its exporter"),
    ("podgpu forget GPU-5d1c… --url localhost:9401", "remove it from the page of podgpu cluster"),
    ("kubectl exec ds/podgpu -- podgpu forget GPU-5d1c…", "the same in a pod"),
)
@click.argument("uuid", metavar="GPU-UUID")
def command(uuid: str, url: str) -> None:
    """Remove a lost GPU, or the XIDs of a GPU that was repaired.

    Run it where podgpu runs, because only requests from the same machine are accepted.
    """
    access = Access(headers=(("X-Podgpu-Request", "forget"),))
    client = HttpClient(f"{url.rstrip('/')}/?gpu={quote(uuid, safe='')}", access)
    response = asyncio.run(_post(client))
    text = response.body.decode(errors="replace").strip()
    if response.status != 200:
        raise SourceError(f"http_{response.status}", text or f"{client.shown} answers {response.status}")
    click.echo(text)


async def _post(client: HttpClient) -> HttpResponse:
    async with open_session() as session:
        return await client.send(session, "POST", "-/forget")
