"""`podgpu forget`: removes a lost GPU from the page, or clears the XIDs of a repaired GPU."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

import click

from podgpu.cli.options import make_command
from podgpu.errors import SourceError
from podgpu.http_client import Access, HttpClient, HttpResponse, open_session


@make_command(
    "forget",
    ("podgpu forget GPU-5d1c…", "on the node: remove the GPU from the exporter's page and metrics"),
    ("podgpu forget GPU-5d1c… --url localhost:9401", "remove it from the page of podgpu cluster"),
    (
        "kubectl -n NAMESPACE exec POD-ON-THAT-NODE -- podgpu forget GPU-5d1c…",
        "the first example, in Kubernetes",
    ),
)
@click.argument("uuid", metavar="GPU-UUID")
def command(uuid: str, url: str) -> None:
    """Stop showing a lost GPU, or clear the XID errors of a repaired one.

    Run this command on the machine (or in the pod) of that podgpu, because it accepts only local
    requests.
    """
    access = Access(headers=(("X-Podgpu-Request", "forget"),))
    client = HttpClient(f"{url.rstrip('/')}/?gpu={quote(uuid, safe='')}", access)
    response = asyncio.run(_post(client))
    text = response.body.decode(errors="replace").strip()
    if response.status != 200:
        text = text or f"{client.shown} answers {response.status}"
        raise SourceError(f"http_{response.status}", text)
    click.echo(text)


async def _post(client: HttpClient) -> HttpResponse:
    async with open_session() as session:
        return await client.send(session, "POST", "-/forget")
