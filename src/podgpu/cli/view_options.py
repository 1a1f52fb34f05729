"""Finds the view that a command reads, and prints its answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import click
from click.core import ParameterSource

from podgpu.cli.options import is_set, naming_option
from podgpu.cli.terminal import print_lines, print_out
from podgpu.clock import parse_moment
from podgpu.errors import UsageError
from podgpu.kube.config import load_user_config
from podgpu.kube.service_proxy import KubeAddress, parse_service
from podgpu.view_address import UrlAddress, ViewAddress, ViewClient, decode_answer

PERIOD_SECONDS = 90.0
"""Time-out for answers about a period. Longer than a query to Prometheus."""
_Answer = TypeVar("_Answer")
_KUBE_OPTIONS = ("context", "service")
_CHECK_SECONDS = 1.0  # not used: opening a client checks the URL, and connects to nothing


def parse_at(text: str) -> float | None:
    """Returns the Unix time of --at. None if the option is not given: now."""
    if not text:
        return None
    now = time.time()
    with naming_option("--at"):
        at = parse_moment(text, now)
        if at > now:
            raise UsageError(f"{text[:80]!a} is in the future")
        if at <= 0:
            raise UsageError(f"{text[:80]!a} is not after 1970-01-01T00:00:00Z")
    return at


def make_at_query(at: float | None) -> dict[str, str]:
    """Returns the query of the state at this time."""
    return {} if at is None else {"at": f"{at:.3f}"}


def find_view(ctx: click.Context) -> ViewAddress:
    """Returns the address that --url or --kube selects."""
    kube_view = find_kube_view(ctx, "url")
    if kube_view is not None:
        return kube_view
    address = UrlAddress(ctx.params["url"])
    with naming_option("--url"):
        address.open(_CHECK_SECONDS)
    return address


def find_kube_view(ctx: click.Context, *others: str) -> KubeAddress | None:
    """Returns None without --kube.

    `others`: options that select another source. They override the default of `kubectl podgpu`,
    which is --kube.
    """
    is_kube = ctx.params["kube"]
    other = next((name for name in others if is_set(ctx, name)), "")
    if other and is_kube:
        if ctx.get_parameter_source("kube") is ParameterSource.COMMANDLINE:
            raise UsageError(f"--kube and --{other} cannot be combined: give one of them")
        is_kube = False

    if not is_kube:
        for name in _KUBE_OPTIONS:
            if ctx.params[name]:
                raise UsageError(f"--{name} needs --kube")
        return None

    service = ctx.params["service"]
    chosen = parse_service(service) if service else None
    return KubeAddress(load_user_config(ctx.params["kubeconfig"], ctx.params["context"]), chosen)


def print_answer(
    client: ViewClient,
    path: str,
    query: Mapping[str, str],
    output: str,
    kind: type[_Answer],
    write: Callable[[_Answer], Iterable[str]],
) -> None:
    """Reads an answer and prints the lines that `write` makes of it.

    With `output` json or csv, prints the text of the server.
    """
    if output == "csv":
        print_out(client.get_blocking(path, {**query, "format": "csv"}))
        return

    body = client.get_blocking(path, query)
    if output == "json":
        print_out(body + b"\n")
    else:
        print_lines(write(decode_answer(body, path, kind, client.shown)))
