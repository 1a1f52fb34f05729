"""Makes the address of a view from the options of a command."""

from __future__ import annotations

import click

from podgpu.view_address import UrlAddress, ViewAddress


def find_view(ctx: click.Context) -> ViewAddress:
    return UrlAddress(ctx.params["url"])
