"""Entry point. Runs a command, and reports errors as one line and an exit code."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from typing import ClassVar

import click

from podgpu import INSTALL_EXTRA, __version__
from podgpu.cli.options import (
    KUBECTL_PROGRAM,
    describe_origin,
    describe_version,
    normalize_arguments,
    write_examples,
)
from podgpu.errors import PodgpuError, UsageError, one_line

MAIN_COMMANDS = {
    "exporter": "Export this node's GPUs to Prometheus (replaces dcgm-exporter).",
    "cluster": "Show all nodes on one page: which pod uses which GPU, idle and broken GPUs, cost.",
    "top": "Show in the terminal which pod uses which GPU.",
    "doctor": "Check the driver, permissions, the kubelet and pod labels, and print what to fix.",
    "demo": "Run everything on simulated GPUs.",
}
OTHER_COMMANDS = {
    "pods": "Print which pod holds how many GPUs now, and how it uses them.",
    "waste": "Print who held GPUs in a period without using them.",
    "cost": "Print GPU-hours, energy and cost of a period.",
    "why": "Print why a pod is pending and who could make room, or why it is slow.",
    "report": "Print cost and waste of a day, week or month as a report to share.",
    "savings": "Print which GPUs could be given back, and what the pods would notice.",
    "forget": "Stop showing a lost GPU, or clear the XID errors of a repaired one.",
    "release": "Let the exporter of a node release the driver, for example to reset a GPU.",
    "withdraw": "Remove from Kubernetes what the exporters wrote with --write.",
    "mcp": "Let an assistant ask which pod uses which GPU (Model Context Protocol).",
    "autoscale": "Provide GPU metrics to KEDA and the HPA.",
    "enrich": "Add pod labels to an existing dcgm-exporter's metrics, for node_exporter.",
    "hook": "Maintain koordinator's podlist.json as an NRI plugin.",
    "migrate": "Convert dashboards, rules and queries to the names of dcgm-exporter 4.9.",
    "trace": "Record when each container ran on a GPU or waited for it, for ui.perfetto.dev.",
    "fields": (
        "List the DCGM fields, where podgpu reads them, and their names in dcgm-exporter 4.9."
    ),
}
COMMANDS = MAIN_COMMANDS | OTHER_COMMANDS
KUBECTL_COMMANDS = ("top", "pods", "waste", "cost", "why", "savings", "report", "trace")
"""Commands of `kubectl podgpu`. All but trace read a view through the API server."""
_EXAMPLES = (
    ("podgpu demo", "no GPU and no cluster needed; open http://localhost:9401/"),
    ("podgpu doctor", "on a GPU node: check that podgpu can read the GPUs and find their pods"),
    ("podgpu top", "on a GPU node: show which pods use the GPUs"),
)
_KUBECTL_EXAMPLES = (
    ("kubectl podgpu", "show all GPUs and the pods that use them"),
    ("kubectl podgpu pods -n research", "the pods of a namespace, with use and cost"),
    ("kubectl podgpu waste --range 7d", "who held GPUs in the last week without using them"),
)
_CREDENTIALS = re.compile(r"[^\s'\"()]*:[^\s'\"()]*@")
"""Matches the login in a URL, so that messages can omit it."""


class _Commands(click.Group):
    """Imports the module of a command only when the command runs. This saves memory."""

    sections: ClassVar = {"Commands": MAIN_COMMANDS, "More commands": OTHER_COMMANDS}
    examples = _EXAMPLES

    def list_commands(self, ctx: click.Context) -> list[str]:
        names: list[str] = []
        for commands in self.sections.values():
            names += commands
        return names

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"podgpu.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            text = f"No such command '{args[0]}'."
            for command in get_close_matches(args[0], COMMANDS, n=1):
                text += f" Did you mean '{command}'?"
            ctx.fail(text)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in self.sections.items():
            with formatter.section(title):
                formatter.write_dl(list(commands.items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_examples(formatter, self.examples)


class _KubectlCommands(_Commands):
    """The commands of the kubectl plugin."""

    sections: ClassVar = {"Commands": {name: COMMANDS[name] for name in KUBECTL_COMMANDS}}
    examples = _KUBECTL_EXAMPLES

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in COMMANDS and args[0] not in KUBECTL_COMMANDS:
            ctx.fail(f"'{args[0]}' runs on a node or a server: use podgpu {args[0]}")
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message=describe_version())
def cli() -> None:
    """podgpu shows which pod uses which GPU, how much of it, and what that costs."""


@click.group(
    cls=_KubectlCommands,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "default_map": {name: {"kube": True} for name in KUBECTL_COMMANDS},
    },
)
@click.version_option(__version__, message=describe_version())
def kubectl_cli() -> None:
    """Show which pod uses which GPU, how much of it, and what that costs.

    Reads podgpu's cluster view through the API server, with your kubeconfig (docs/kubectl.md).
    Without a command, shows `top`.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    _run_process(run, list(sys.argv[1:] if arguments is None else arguments))


def kubectl_main() -> None:
    """Entry point of the program `kubectl-podgpu`, which kubectl runs as `kubectl podgpu`."""
    _run_process(run_kubectl, sys.argv[1:])


def run_kubectl(arguments: list[str]) -> int:
    """Like `run`, for `kubectl podgpu`. Without a command, the options are those of `top`."""
    first = arguments[0] if arguments else "-"
    if first.startswith("-") and first not in ("-h", "--help", "--version"):
        arguments = ["top", *arguments]
    return run(arguments, kubectl_cli, KUBECTL_PROGRAM)


_OPTIONAL_PACKAGES = ("grpc", "cryptography", "mcp", "uvicorn", "pydantic")


def _run_process(run_arguments: Callable[[list[str]], int], arguments: list[str]) -> None:
    _open_closed_streams()
    # Only the exporter handles SIGUSR1. By default, the signal would end the other commands.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        # Until here, Ctrl-C ended the process without a traceback (see `__main__`).
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run_arguments(arguments)
    except KeyboardInterrupt:
        code = 130
    # A second signal must not end the process before it has flushed.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)

    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    # Skips Python's cleanup, which can abort while threads are still in driver calls.
    os._exit(code)


def _open_closed_streams() -> None:
    """Opens /dev/null for standard streams that the caller closed: Python sets them to None."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open until the end


def run(arguments: list[str], group: click.Group = cli, program: str = "podgpu") -> int:
    """Returns the exit code.

    0 for success, 1 if podgpu cannot run or found a problem, 2 for wrong usage.
    """
    if arguments and arguments[0] in COMMANDS:
        arguments = normalize_arguments(arguments)
    try:
        result = group.main(arguments, prog_name=program, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help(), err=True)
        return 2
    except click.UsageError as error:
        text = _CREDENTIALS.sub("…@", _explain(error))
        help_command = program
        if arguments[0] in group.list_commands(click.Context(group)):
            help_command += f" {arguments[0]}"
        return _fail(f"{text} (see {help_command} --help)", 2)
    except click.Abort:
        return 130
    except UsageError as error:
        return _fail(str(error), 2, error.remedy)
    except PodgpuError as error:
        return _fail(str(error), 1, error.remedy)
    except ModuleNotFoundError as error:
        package, _, _ = (error.name or "").partition(".")
        if package not in _OPTIONAL_PACKAGES:
            raise
        return _fail(_explain_missing(package, arguments[0]), 1)

    # Most commands return None. They raise an error if they fail.
    return result if isinstance(result, int) else 0


def _explain_missing(package: str, command: str) -> str:
    install = INSTALL_EXTRA.format(extra=command)
    text = f"podgpu {command} needs the package {package}: run {install}"
    # No image contains the packages of mcp.
    if command != "mcp":
        text += ", or use the image with the tag -autoscale"
    return text


def _explain(error: click.UsageError) -> str:
    """Formats a usage error.

    click's own text names the environment variable even if the value came from the flag.
    """
    # A missing argument has no message of its own.
    if not isinstance(error, click.BadParameter) or error.param is None or not error.message:
        return error.format_message()
    longest_name = max(error.param.opts, key=len)
    origin = describe_origin(error.param, error.ctx)
    return f"{longest_name}: {error.message}{origin}"


def _fail(message: str, code: int, remedy: str = "") -> int:
    click.echo(f"podgpu: {one_line(message)}", err=True)
    if remedy:
        click.echo(f"\n{remedy}", err=True)
    return code
