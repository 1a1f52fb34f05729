"""`podgpu top`: shows GPUs and their holders in a terminal."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import click
from click.core import ParameterSource

from podgpu.agent.api_access import ApiAccess
from podgpu.agent.assemble import Naming, Options, assemble_agent, make_holders, node_name, open_telemetry
from podgpu.agent.loop import Settings
from podgpu.cli.exporter_options import hide, pick_options
from podgpu.cli.options import Option, make_command, naming_variable
from podgpu.cli.terminal import has_letters, is_interactive, print_out, quiet_logs, wants_colour
from podgpu.device_selection import parse_selection
from podgpu.errors import UsageError, one_line
from podgpu.metrics.counters import Counter
from podgpu.metrics.fields import fields
from podgpu.metrics.render import Policy
from podgpu.top.arrange import Order, arrange
from podgpu.top.cells import ASCII, PLAIN, RICH, Glyphs
from podgpu.top.controls import ORDERS, Controls
from podgpu.top.feed import Feed, Seen, Source
from podgpu.top.local import LocalSource, OverheardTelemetry, ProcessWatch
from podgpu.top.table import Table, as_text, table_of
from podgpu.usage.containers import ContainerFinder

_FIELDS = (203, 1001, 250, 251, 252, 253, 155, 150)  # utilisation, engine activity, memory, power, temperature
_LOCAL = (
    "kubernetes",
    "devices",
    "pod-resources-kubelet-socket",
    "nvidia-resource-names",
    "kubernetes-enable-dra",
    "hpc-job-mapping-dir",
    "telemetry",
    "allocation",
    "kubeconfig",
    "path-proc",
    "path-sysfs",
    "path-varlog",
)
_CHANGES = {"kubernetes": {"help": "Show pods. Default: if the kubelet's socket can be opened."}}


TOP_OPTIONS = (
    Option("url", help="Show an exporter, podgpu's or dcgm-exporter's: HOST:9400 or a URL.", ours=True),
    Option("cluster", help="Show all nodes of podgpu cluster: HOST:9401 or a URL.", ours=True),
    Option("once", default="false", help="Print one table and exit.", kind="bool", ours=True),
    Option("sort", default="gpu", help="Sort order.", kind=f"choice:{'|'.join(ORDERS)}", ours=True),
    Option("filter", help="Show only lines with this text in namespace, pod, container, node or model.", ours=True),
    Option("interval", default="1s", help="How often to read.", kind="duration", ours=True),
    Option("processes", default="false", help="Show processes (only with the local driver).", kind="bool", ours=True),
    *hide(pick_options(_LOCAL, _CHANGES)),
)


@make_command(
    "top",
    TOP_OPTIONS,
    ("podgpu top", "this node"),
    ("podgpu top --cluster localhost:9401", "all nodes of a cluster view"),
    ("podgpu top --url gpu-1:9400 --once --sort idle", "another node as plain text, the longest idle first"),
)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> int:
    """Show a live table of GPUs and their holders: of this node, of an exporter, or of a cluster.

    Keys: q quits, Enter shows details, h shows help. If standard output is not a terminal, one plain table is printed.
    Accepts the exporter's options for this node (see --help-all).
    """
    if options["url"] or options["cluster"]:
        _refuse_local_options(ctx, options)
    elif ctx.get_parameter_source("kubernetes") is ParameterSource.DEFAULT:
        options["kubernetes"] = os.access(options["pod_resources_kubelet_socket"], os.R_OK | os.W_OK)
    controls = Controls(options["sort"], options["filter"])
    with quiet_logs(), opened_feed(options, partial(naming_variable, ctx)) as feed:
        if options["once"] or not is_interactive():
            return _print_once(feed, controls)
        return _run(feed, controls)


def _refuse_local_options(ctx: click.Context, options: dict[str, Any]) -> None:
    """Environment variables are ignored: they may be meant for the exporter."""
    if options["url"] and options["cluster"]:
        raise UsageError("--url and --cluster: give only one of them")
    said = [flag for flag in _LOCAL if _said(ctx, flag)] + (["processes"] if options["processes"] else [])
    asked = "--url" if options["url"] else "--cluster"
    if said:
        raise UsageError(f"--{said[0]} is for the local driver and cannot be combined with {asked}")


def _said(ctx: click.Context, flag: str) -> bool:
    return ctx.get_parameter_source(flag.replace("-", "_")) is ParameterSource.COMMANDLINE


def _glyphs(colour: bool) -> Glyphs:
    if not has_letters("–…█▏"):
        return ASCII
    return RICH if colour else PLAIN


def _run(feed: Feed, controls: Controls) -> int:
    from podgpu.top.live import show_live

    feed.read_or_raise()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a name that the terminal cannot show costs its letters only
    colour = wants_colour()
    return show_live(feed, controls, feed.name, colour, _glyphs(colour), sys.stdin.fileno(), sys.stdout)


def _print_once(feed: Feed, controls: Controls) -> int:
    seen = feed.read_twice() if feed.has_rates else feed.read_or_raise()
    colour = wants_colour()
    size = os.get_terminal_size(sys.stdout.fileno()) if sys.stdout.isatty() else None
    table = _table(seen, controls, _glyphs(colour), size.columns if size else None)
    lines = [table.header, *table.body]
    if size:  # for a person; a script gets the table alone
        from podgpu.top.summary import totals_line

        lines.append(totals_line(seen.view.totals, seen.view.currency, size.columns, _glyphs(colour)))
    if colour and size:
        from podgpu.top.screen import Screen

        Screen(sys.stdout, colour).write(lines, size)
    else:
        print_out("".join(f"{as_text(line)}\n" for line in lines))
    if controls.wanted and not table.body:
        click.echo(f"podgpu: no line contains {controls.wanted!r} (--filter)", err=True)
    for note in seen.notes:
        click.echo(f"podgpu: {one_line(note)}", err=True)
    return 0


def _table(seen: Seen, controls: Controls, glyphs: Glyphs, width: int | None) -> Table:
    order: Order = controls.order
    return table_of(arrange(seen.lines, order, controls.wanted), order, glyphs, width)


@contextmanager
def opened_feed(options: Options, naming: Naming) -> Iterator[Feed]:
    """Raises UsageError."""
    with ExitStack() as stack:
        feed = Feed(_source(options, naming, stack), options["interval"])
        stack.callback(feed.close)
        yield feed


def _source(options: Options, naming: Naming, stack: ExitStack) -> Source:
    """Imports what each needs: a remote view loads no agent."""
    if options["url"]:
        from podgpu.top.exporter import ExporterSource

        return ExporterSource(options["url"])
    if options["cluster"]:
        from podgpu.top.api import ClusterSource

        return ClusterSource(options["cluster"])
    api = ApiAccess(options["kubeconfig"])
    stack.callback(api.close)
    return top_source(options, api, naming)


def top_source(options: Options, api: ApiAccess, naming: Naming) -> LocalSource:
    """Assembles what `podgpu top` shows of this node: an agent as the exporter has it, with the fields of the table."""
    with naming("devices"):
        selection = parse_selection(options["devices"])
    with naming("telemetry"):
        telemetry = OverheardTelemetry(open_telemetry(options["telemetry"], options))
    settings = Settings(interval=options["interval"], selection=selection, policy=_top_policy())
    with naming("allocation"):
        holders = make_holders(options, api, telemetry)
    finder = ContainerFinder(options["path_proc"])
    agent = assemble_agent(telemetry, holders, settings, finder)
    with naming("devices"):
        agent.check_selection()
    watch = ProcessWatch(telemetry, finder, holders.identities) if options["processes"] else None
    return LocalSource(agent, node_name(), watch)


def _top_policy() -> Policy:
    return Policy(counters=tuple(Counter(fields()[i], fields()[i].name, "gauge", "") for i in _FIELDS))
