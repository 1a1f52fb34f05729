"""`podgpu migrate` rewrites dashboards, rules, queries from dcgm-exporter 4.8's names and units to 4.9's, or back."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Any, cast

import click

from podgpu.cli.help import podgpu_command
from podgpu.cli.params import Option, with_options
from podgpu.cli.terminal import print_out
from podgpu.errors import SourceError, UsageError, one_line
from podgpu.files import AtomicFile, read_bounded
from podgpu.migrate.dashboard import migrate_dashboard
from podgpu.migrate.direction import Direction, Generation
from podgpu.migrate.result import Migrated
from podgpu.migrate.rewrite import PromqlError, rewrite_query
from podgpu.migrate.rules import migrate_rules

_MOST_BYTES = 8 * 1024 * 1024
_STDIN = "-"
_YAML = (".yaml", ".yml", ".rules")

MIGRATE_OPTIONS = (
    Option(
        "to",
        default="4.9",
        help="Whose names and units to write: dcgm-exporter 4.9's, or back to 4.8's.",
        kind="choice:4.9|4.8",
        ours=True,
    ),
    Option("expr", help="One PromQL expression, in place of a file.", ours=True),
)
_EXAMPLES = (
    ("podgpu migrate dashboard.json > new.json", "a Grafana dashboard, in 4.9's names and units"),
    ("podgpu migrate --in-place rules/*.yaml", "Prometheus rules: comments and layout stay"),
    ("podgpu migrate --expr 'avg(DCGM_FI_DEV_GPU_UTIL) > 90'", "one query"),
)


@podgpu_command("migrate", *_EXAMPLES)
@with_options(MIGRATE_OPTIONS)
@click.option("--in-place", is_flag=True, help="Rewrite each file, as a whole or not at all, and print nothing.")
@click.option("--force", is_flag=True, help="Write what could be rewritten, and leave as it is what could not.")
@click.argument("files", nargs=-1, metavar="[FILE|-]...")
def command(files: tuple[str, ...], **options: Any) -> int:
    """Rewrite a Grafana dashboard (JSON), Prometheus rules (YAML) or a query for dcgm-exporter 4.9's names.

    A figure whose unit changed is converted in the query, so that panels and thresholds stay right. What cannot be
    rewritten is listed, nothing is written then, and the exit code is 1; --force writes the rest.
    """
    direction = Direction(cast(Generation, options["to"]))
    _check(files, options)
    if options["expr"]:
        migrated = {"--expr": _expression(options["expr"], direction)}
    else:
        migrated = {name: _migrate(_read(name), name, direction) for name in files}
    for name, result in migrated.items():
        _report(name, result, direction.to)
    if any(result.left for result in migrated.values()) and not options["force"]:
        click.echo("podgpu: nothing was written; --force writes the rest and leaves these as they are", err=True)
        return 1
    for name, result in migrated.items():
        if options["in_place"]:
            _write(name, result)
        else:
            print_out(result.text if name != "--expr" else f"{result.text}\n")
    return 0


def _check(files: tuple[str, ...], options: dict[str, Any]) -> None:
    if bool(files) == bool(options["expr"]):
        raise UsageError("migrate: name a file, - for standard input, or a query with --expr")
    if options["in_place"] and (options["expr"] or _STDIN in files):
        raise UsageError("--in-place: goes with files that can be written: name them")
    if len(files) > 1 and not options["in_place"]:
        raise UsageError("migrate: one file at a time is printed; several go with --in-place")
    if len(set(map(os.path.realpath, files))) != len(files):
        raise UsageError("migrate: a file is named twice")


def _read(name: str) -> str:
    try:
        content = sys.stdin.buffer.read(_MOST_BYTES + 1) if name == _STDIN else read_bounded(name, _MOST_BYTES)
    except SourceError as e:
        raise UsageError(str(e)) from e
    if len(content) > _MOST_BYTES:
        raise UsageError(f"standard input: more than {_MOST_BYTES} bytes, which is all that is read")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{name}: not UTF-8 text") from None


def _migrate(text: str, name: str, direction: Direction) -> Migrated:
    """By the file's name, else by what it begins with: JSON has a brace there, rules have not."""
    origin = "standard input" if name == _STDIN else name
    if not text.strip():
        raise UsageError(f"{origin}: is empty")
    if not name.endswith(_YAML) and text.lstrip("\ufeff \t\r\n").startswith(("{", "[")):
        return migrate_dashboard(text, origin, direction)
    return migrate_rules(text, origin, direction)


def _expression(text: str, direction: Direction) -> Migrated:
    try:
        rewritten = rewrite_query(text, direction)
    except PromqlError as e:
        raise UsageError(f"--expr: not PromQL that can be read: {e}") from e
    return Migrated(rewritten.text, int(rewritten.text != text), rewritten.left, rewritten.notes)


def _report(name: str, result: Migrated, to: str) -> None:
    shown = "standard input" if name == _STDIN else one_line(name)
    for sentence in result.left:
        click.echo(f"podgpu: {shown}: not rewritten: {one_line(sentence)}", err=True)
    for sentence in dict.fromkeys(result.notes):
        click.echo(f"podgpu: {shown}: note: {one_line(sentence)}", err=True)
    if not result.changed and not result.left:
        click.echo(f"podgpu: {shown}: nothing to rewrite for {to}", err=True)
    elif name != "--expr":
        click.echo(f"podgpu: {shown}: {result.changed} rewritten, {len(result.left)} not", err=True)


def _write(name: str, result: Migrated) -> None:
    if result.changed:
        mode = stat.S_IMODE(Path(name).stat().st_mode)
        AtomicFile(name, mode=mode, option="--in-place").write(result.text.encode())
