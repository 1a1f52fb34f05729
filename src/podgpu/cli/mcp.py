"""`podgpu mcp`: lets an assistant ask a view which pod uses which GPU, over MCP."""

from __future__ import annotations

import logging
from typing import Any

import click

from podgpu.cli.options import make_command
from podgpu.cli.view_options import PERIOD_SECONDS, open_view
from podgpu.errors import SourceError, UsageError
from podgpu.kube.config import is_loopback

_log = logging.getLogger("podgpu")


@make_command(
    "mcp",
    ("podgpu mcp --url localhost:9401", "for an assistant that starts this command"),
    ("podgpu mcp -a 127.0.0.1:9404 --token-file TOKEN", "over HTTP, at http://127.0.0.1:9404/mcp"),
)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Let an assistant read which pod uses which GPU, over the Model Context Protocol (MCP).

    Reads the API of `podgpu cluster` or of an exporter. Nothing is changed. Needs the extra `mcp`.
    """
    address = options["address"]
    token_file = options["token_file"]
    if address is None and token_file:
        raise UsageError("--token-file needs -a: only HTTP has a token")
    if address is not None and not token_file:
        raise UsageError("-a needs --token-file: over HTTP, every request must have a token")
    client = open_view(ctx, PERIOD_SECONDS)

    # Imports the MCP SDK, which is an optional dependency of 70 MB.
    from podgpu.tools.assistant.server import PATH, read_token, serve_http, serve_stdio

    if address is None:
        serve_stdio(client)
        return

    # Each request reads the file again. A bad file is reported here, before the first one.
    try:
        read_token(token_file)
    except SourceError as error:
        raise UsageError(f"--token-file {error}") from error

    if not is_loopback(address.host):
        _log.warning("the token is sent without TLS: put a TLS proxy before %s", address.url)
    _log.info("listening on %s%s", address.url, PATH)
    serve_http(client, address, token_file)
