"""`podgpu top`: shows in a terminal which pod uses which GPU."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from podgpu.cli.options import EXPORTER_OPTIONS, Options, is_set, make_command, naming_option
from podgpu.cli.sources import make_finder, make_holders, node_name, open_telemetry
from podgpu.cli.terminal import is_screen, print_out, quiet_logs, wants_colour
from podgpu.cli.view_options import find_kube_view, make_at_query, parse_at
from podgpu.errors import UsageError, one_line, utc_text
from podgpu.metrics.counters import CounterSpec
from podgpu.metrics.fields import fields
from podgpu.metrics.labels import Policy
from podgpu.node.agent.agent import Agent, Settings
from podgpu.node.agent.device_selection import parse_selection
from podgpu.node.holders.api import ApiAccess
from podgpu.top.feed import ClusterSource, ExporterSource, Feed, LocalSource, Source
from podgpu.top.lines import Order, arrange
from podgpu.top.screen import Screen
from podgpu.top.table import Table, as_text, render_totals
from podgpu.view_address import UrlAddress, ViewAddress

_FIELDS = (150, 155, 203, 250, 251, 252, 253, 1001)
"""DCGM fields: temperature, power, utilisation, memory."""


@make_command(
    "top",
    ("podgpu top", "show this node"),
    ("podgpu top --kube", "show all nodes of the cluster of your kubeconfig"),
    ("podgpu top --cluster localhost:9401", "show all nodes of a cluster"),
    (
        "podgpu top --url gpu-1:9400 --once --sort idle",
        "print another node as plain text, the longest idle GPUs first",
    ),
)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> int:
    """Show a live table of GPUs and the pods that use them, on this node, another node or a
    cluster.

    Keys: q quits, Enter shows details, h shows help. If standard output is not a terminal, one
    plain table is printed. For this node, many options of the exporter are accepted (see
    --help-all).
    """
    view = find_kube_view(ctx, "url", "cluster")
    at = parse_at(options["at"])
    remote = "kube" if view is not None else _find_remote(options)
    if at is not None and remote not in ("kube", "cluster"):
        raise UsageError("--at needs --cluster or --kube: only they have a history")
    if remote:
        _reject_local_options(ctx, options, remote)
    elif not is_set(ctx, "kubernetes"):
        # By default, pods are shown if this user may ask the kubelet.
        kubelet = options["pod_resources_kubelet_socket"]
        options["kubernetes"] = os.access(kubelet, os.R_OK | os.W_OK)

    with quiet_logs(), ExitStack() as at_exit:
        source = _open_source(options, view, at, at_exit)
        feed = Feed(source, options["interval"])
        at_exit.callback(feed.close)

        if options["json"]:
            print_out(msgspec.json.encode(feed.read().view) + b"\n")
            return 0
        if at is not None:
            print_out(f"As of {utc_text(at)}\n")

        has_keyboard = sys.stdin.isatty() and is_screen()
        # The past does not change.
        if at is not None or options["once"] or not has_keyboard:
            _print_once(feed, options["sort"], options["filter"])
            return 0
        from podgpu.top.live import show_live  # imports rich, which is needed only on a terminal

        return show_live(feed, Screen(feed.source.name, options["sort"], options["filter"]))


def _find_remote(options: Options) -> str:
    """Returns the option that names another source than this node. Empty if there is none."""
    if options["url"] and options["cluster"]:
        raise UsageError("--url and --cluster cannot be combined: give one of them")
    if options["url"]:
        return "url"
    return "cluster" if options["cluster"] else ""


def _reject_local_options(ctx: click.Context, options: Options, remote: str) -> None:
    """Raises UsageError if `remote`, the option of another source, is combined with flags of the
    local driver.

    Environment variables of such flags are ignored, because they may be meant for the exporter.
    """
    flags = [option.flag for option in EXPORTER_OPTIONS if option.parameter in options]
    # top has its own --once, which works with every source.
    flags.remove("once")
    flags.append("processes")
    if remote == "kube":
        flags.remove("kubeconfig")

    for flag in flags:
        if ctx.get_parameter_source(flag.replace("-", "_")) is ParameterSource.COMMANDLINE:
            text = f"--{flag} is for the local driver and cannot be combined with --{remote}"
            raise UsageError(text)


def _open_source(
    options: Options, view: ViewAddress | None, at: float | None, at_exit: ExitStack
) -> Source:
    if view is not None:
        return ClusterSource(view, query=make_at_query(at))
    if options["url"]:
        with naming_option("--url"):
            return ExporterSource(options["url"])
    if options["cluster"]:
        with naming_option("--cluster"):
            url = options["cluster"].rstrip("/").removesuffix("/metrics")
            return ClusterSource(UrlAddress(url), query=make_at_query(at))

    api = ApiAccess(options["kubeconfig"])
    at_exit.callback(api.close)
    chosen = [fields()[number] for number in _FIELDS]
    counters = tuple(CounterSpec(field, field.name, "gauge", "") for field in chosen)
    selection = parse_selection(options["devices"])
    telemetry = open_telemetry(options["telemetry"], options)
    settings = Settings(
        node_name=node_name(),
        interval=options["interval"],
        selection=selection,
        policy=Policy(counters=counters),
    )
    holders = make_holders(options, api, telemetry)
    agent = Agent(telemetry, holders, settings, containers=make_finder(options))
    agent.check_selection()
    at_exit.callback(agent.stop)
    return LocalSource(agent, options["processes"])


def _print_once(feed: Feed, order: Order, wanted: str) -> None:
    seen = feed.read()
    # Without the width of a terminal, the whole table is printed. Some terminals report 0.
    width = None
    if sys.stdout.isatty():
        width = os.get_terminal_size(sys.stdout.fileno()).columns or None

    lines = arrange(seen.lines, order, wanted)
    table = Table(lines, order, width)
    printed = [table.header(), *table.render()]
    if width:
        # Only for terminals, because scripts need no totals.
        printed.append(render_totals(seen.view.totals, seen.view.currency, width))

    if width and wants_colour():
        from podgpu.top.live import make_text, open_console  # imports rich

        console = open_console()
        for line in printed:
            console.print(make_text(line))
    else:
        print_out("".join(f"{as_text(line)}\n" for line in printed))

    if wanted and not lines:
        click.echo(f"podgpu: no line contains {wanted!r} (--filter)", err=True)
    for note in seen.notes:
        click.echo(f"podgpu: {one_line(note)}", err=True)
