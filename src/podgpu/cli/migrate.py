"""`podgpu migrate`: converts dashboards, rules and queries from dcgm-exporter 4.8 to 4.9."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from typing import Any

import click

from podgpu.cli.options import Options, make_command
from podgpu.cli.terminal import print_out
from podgpu.errors import SourceError, UsageError, one_line
from podgpu.files import AtomicFile, read_bounded
from podgpu.tools.migrate.documents import migrate_dashboard, migrate_rules
from podgpu.tools.migrate.query_rewriter import PromqlError, RewriteResult, rewrite_query

_MOST_BYTES = 8 * 1024 * 1024
_STDIN = "-"
_YAML = (".yaml", ".yml", ".rules")


@make_command(
    "migrate",
    ("podgpu migrate dashboard.json > new.json", "convert a Grafana dashboard"),
    (
        "podgpu migrate --in-place rules/*.yaml",
        "convert Prometheus rules; comments and layout stay",
    ),
    ("podgpu migrate --expr 'avg(DCGM_FI_DEV_GPU_UTIL) > 90'", "convert one query"),
)
@click.argument("files", nargs=-1, metavar="[FILE|-]...")
def command(files: tuple[str, ...], **options: Any) -> int:
    """Convert a Grafana dashboard (JSON), Prometheus rules (YAML) or a query to the names in
    dcgm-exporter 4.9.

    If the unit of a metric changed, the query converts the value, so panels and thresholds stay
    correct. Queries that cannot be converted are listed. Then nothing is written (except with
    --force), and the exit code is 1.
    """
    _check(files, options)
    migrated = {name: _migrate(_read(name), name) for name in files}
    if not files:
        # --expr is reported like a file of this name.
        try:
            migrated["--expr"] = rewrite_query(options["expr"])
        except PromqlError as e:
            raise UsageError(f"--expr is not PromQL: {e}") from e

    for name, result in migrated.items():
        _report(name, result)

    has_problem = any(result.unconverted for result in migrated.values())
    if has_problem and not options["force"]:
        text = "podgpu: nothing was written; use --force to write the converted queries"
        click.echo(text, err=True)
        return 1

    for name, result in migrated.items():
        if name == "--expr":
            print_out(f"{result.text}\n")
        elif not options["in_place"]:
            print_out(result.text)
        elif result.changed:
            # Keeps the permissions, because the new file replaces the old one.
            mode = stat.S_IMODE(Path(name).stat().st_mode)
            AtomicFile(name, mode=mode, option="--in-place").write(result.text.encode())
    return 0


def _check(files: tuple[str, ...], options: Options) -> None:
    if bool(files) == bool(options["expr"]):
        raise UsageError("migrate: give either files (- for standard input) or --expr QUERY")
    if options["in_place"] and (options["expr"] or _STDIN in files):
        raise UsageError("--in-place needs files")
    if len(files) > 1 and not options["in_place"]:
        raise UsageError("migrate: only one file can be printed; use --in-place for several")


def _read(name: str) -> str:
    if name == _STDIN:
        content = sys.stdin.buffer.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise UsageError(f"standard input: larger than the maximum of {_MOST_BYTES} bytes")
    else:
        try:
            content = read_bounded(name, _MOST_BYTES)
        except SourceError as e:
            raise UsageError(str(e)) from e
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{name}: not UTF-8 text") from None


def _migrate(text: str, name: str) -> RewriteResult:
    """Converts a file.

    Files that begin with { or [ are dashboards, unless their names end in .yaml, .yml or .rules.
    """
    origin = "standard input" if name == _STDIN else name
    if not text.strip():
        raise UsageError(f"{origin} is empty")
    if not name.endswith(_YAML) and text.lstrip("\ufeff \t\r\n").startswith(("{", "[")):
        return migrate_dashboard(text, origin)
    return migrate_rules(text, origin)


def _report(name: str, result: RewriteResult) -> None:
    shown = "standard input" if name == _STDIN else one_line(name)
    notes = dict.fromkeys(result.notes)  # without repetitions, in their order
    lines = [f"not converted: {one_line(sentence)}" for sentence in result.unconverted]
    lines += [f"note: {one_line(sentence)}" for sentence in notes]

    if not result.changed and not result.unconverted:
        lines.append("nothing to convert")
    elif name != "--expr":
        lines.append(f"{result.changed} converted, {len(result.unconverted)} not")
    for line in lines:
        click.echo(f"podgpu: {shown}: {line}", err=True)
