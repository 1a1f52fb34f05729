"""This module is the entry point: it finds the command, and turns every error into one line and an exit code."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from podgpu import __version__
from podgpu.cli.help import write_examples, write_list
from podgpu.cli.option_table import EXPORTER_OPTIONS
from podgpu.cli.params import normalise
from podgpu.errors import PodgpuError, UsageError, one_line

COMMANDS = {
    "exporter": "Export this node's GPUs to Prometheus (a drop-in for dcgm-exporter).",
    "cluster": "Look at every node: which pod is on which GPU, used and idle ones, cost; with a page.",
    "autoscale": "Tell KEDA and the HPA how busy a workload's GPUs are, straight from the exporters.",
    "enrich": "Put pod labels on an existing dcgm-exporter's metrics, into a file for node_exporter.",
    "hook": "Keep podlist.json: which container was given which GPU, as the container runtime (NRI) reports it.",
    "top": "Show GPUs, who uses them and how much, live in the terminal: this node's, an exporter's, a cluster's.",
    "doctor": "Check this node: driver, permissions, kubelet, mapping; say what is wrong and what to do.",
    "migrate": "Rewrite dashboards, rules and queries for dcgm-exporter 4.9's names and units, or back.",
    "demo": "Run exporters and the cluster view on simulated GPUs.",
}


_EXAMPLES = (
    ("podgpu demo", "no GPU, no cluster: look at a made-up one in the browser, on http://localhost:9401/"),
    ("podgpu doctor", "on a node with GPUs: can podgpu read them and name their pods?"),
    ("podgpu top", "on a node with GPUs: who uses them, live"),
)
_LOGIN = re.compile(r"[^\s'\"()]*:[^\s'\"()]*@")
"""In what click quotes: a URL in the wrong place may have a password in it."""


class _Commands(click.Group):
    """Imports a command's file only when it is asked for: the exporter pays for nothing else."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"podgpu.cli.{cmd_name}").command
        command.short_help = COMMANDS[cmd_name]
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not args[0].startswith("-") and args[0] not in COMMANDS:
            from podgpu.cli.params import no_such

            raise click.UsageError(no_such("command", args[0], COMMANDS), ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_list(formatter, "Commands", COMMANDS.items())

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_examples(formatter, _EXAMPLES)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="podgpu")
def cli() -> None:
    """podgpu tells which pod uses which GPU, how much of it, and what that costs."""


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words[:1] and words[0] in COMMANDS:
            _load(words[0])
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(run(words))


def _load(command: str) -> None:
    """Modules and classes are no garbage: looking through them again and again takes a tenth of a command's start."""
    gc.disable()
    try:
        import_module(f"podgpu.cli.{command}")
        gc.freeze()
    finally:
        gc.enable()


def run(arguments: list[str]) -> int:
    """0: fine; 1: podgpu cannot run or found something wrong; 2: it was called wrongly."""
    if arguments[:1] and arguments[0] in COMMANDS:
        arguments = normalise(arguments, EXPORTER_OPTIONS)  # the commands share its options and their spelling
    try:
        result = cli.main(arguments, prog_name="podgpu", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as e:
        click.echo(e.ctx.get_help() if e.ctx else str(e), err=True)
        return 2
    except click.UsageError as e:
        where = f" {arguments[0]}" if arguments[0] in COMMANDS else ""
        return _fail(f"{_LOGIN.sub('…@', _complaint(e, arguments))} (see podgpu{where} --help)", 2)
    except click.Abort:
        return 130
    except UsageError as e:
        return _fail(str(e), 2)
    except PodgpuError as e:
        return _fail(str(e), 1)
    return result if isinstance(result, int) else 0


def _complaint(error: click.UsageError, arguments: Sequence[str]) -> str:
    """click's own text names the variable even when the flag was at fault, and knows nothing of Go's `-collectors`."""
    from podgpu.cli.params import no_such, one_dash_typo  # nobody pays for it who types well

    long_names = _long_names(error.ctx)
    mistyped = next((a for a in arguments if one_dash_typo(a, long_names)), None)
    if mistyped is not None:
        return no_such("option", mistyped.partition("=")[0], long_names)
    if isinstance(error, click.NoSuchOption):
        if arguments[0] not in COMMANDS:
            return f"there is no option {error.option_name} before the command: write podgpu COMMAND {arguments[0]}"
        return no_such("option", error.option_name, long_names)
    if isinstance(error, click.BadParameter) and error.param is not None:
        return f"{max(error.param.opts, key=len)}: {error.message}"
    return error.format_message()


def _long_names(ctx: click.Context | None) -> list[str]:
    names = [name for parameter in (ctx.command.params if ctx else ()) for name in parameter.opts]
    return [name for name in (*names, "--help") if name.startswith("--")]


def _fail(message: str, code: int) -> int:
    click.echo(f"podgpu: {one_line(message)}", err=True)
    return code
