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
from podgpu.view_address import UrlAddress, ViewClient, decode_answer

PERIOD_SECONDS = 90.0
"""Time-out for answers about a period. Longer than a query to Prometheus."""
_Answer = TypeVar("_Answer")
_KUBE_OPTIONS = ("context", "service")


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


def open_view(ctx: click.Context, timeout: float) -> ViewClient:
    """Opens the view that --url or --kube selects."""
    kube_view = find_kube_view(ctx, "url")
    if kube_view is not None:
        return kube_view.open(timeout)
    with naming_option("--url"):
        return UrlAddress(ctx.params["url"]).open(timeout)


def find_kube_view(ctx: click.Context, *other_sources: str) -> KubeAddress | None:
    """Returns None without --kube.

    `other_sources`: options that select another source. They override the default of
    `kubectl podgpu`, which is --kube.
    """
    is_kube = ctx.params["kube"]
    is_flag = ctx.get_parameter_source("kube") is ParameterSource.COMMANDLINE
    for name in other_sources:
        if is_kube and is_set(ctx, name):
            if is_flag:
                raise UsageError(f"--kube and --{name} cannot be combined: give one of them")
            is_kube = False

    if not is_kube:
        for name in _KUBE_OPTIONS:
            if ctx.params[name]:
                raise UsageError(f"--{name} needs --kube")
        return None

    service = None
    if ctx.params["service"]:
        service = parse_service(ctx.params["service"])
    config = load_user_config(ctx.params["kubeconfig"], ctx.params["context"])
    return KubeAddress(config, service)


def print_answer(
    client: ViewClient,
    path: str,
    query: Mapping[str, str],
    output: str,
    kind: type[_Answer],
    write: Callable[[_Answer], Iterable[str]],
) -> None:
    """Reads an answer of the type `kind`, and prints the lines that `write` makes of it.

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
