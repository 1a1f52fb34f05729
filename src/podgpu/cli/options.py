"""Builds click commands from options.csv, which contains the options of all commands.

Commands also accept the syntax of Go flags, as dcgm-exporter does: `-c=1000`, `-collectors x`,
`--debug=false`.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from podgpu import __version__
from podgpu.cli.terminal import configure_logging
from podgpu.clock import parse_duration
from podgpu.errors import UsageError

if TYPE_CHECKING:
    from podgpu.web.app import Address

GROUPS = {
    "common": "Common",
    "kubernetes": "Kubernetes",
    "autoscaling": "Autoscaling",
    "usage": "Usage and cost",
    "access": "Access (TLS, credentials, probes)",
    "compatibility": "dcgm-exporter compatibility",
    "paths": "Paths",
    "no effect": "Options of dcgm-exporter that are accepted without effect",
}
Options = Mapping[str, Any]  # by parameter
_HIDING_SHARED = ("doctor", "top", "trace")
"""Commands whose --help does not show the options that they share with the exporter."""
KUBECTL_PROGRAM = "kubectl podgpu"
_PLUGIN_HELP = {
    "kube": "kubectl podgpu always does, without --url or --cluster.",
    "url": "Then, not through the API server.",
    "cluster": "Then, not through the API server.",
}
"""Parameter -> what the help of `kubectl podgpu` adds. There, --url has no default."""
_KUBE_FLAG = " --kube"
_ADDRESS_FLAG = re.compile(r" --(url|cluster)\b")
FROM_FILE = "podgpu.from_file"
"""Key in `Context.meta`. Its value maps parameters to the configuration file that sets them."""


@dataclass(frozen=True, slots=True)
class Option:
    flag: str
    short: str = ""  # second name of the option: a letter, or a long name
    env: str = ""
    default: str = ""
    help: str = ""
    kind: str = "TEXT"
    """flag (without a value), bool, duration (a plain number is seconds), milliseconds (a plain
    number is milliseconds), whole:LOW-HIGH, choice:a|b, ADDRESS (to listen on), ADDRESS|none, LIST
    (comma-separated; the flag may be repeated), or the placeholder of a text such as FILE.
    """
    group: str = "common"  # key of GROUPS
    common: bool = True  # True if --help shows the option; False if only --help-all shows it

    @property
    def parameter(self) -> str:
        return self.flag.replace("-", "_")

    @property
    def works(self) -> bool:
        """False for options of dcgm-exporter without effect.

        They are accepted so that a migrated DaemonSet starts.
        """
        return self.group != "no effect"

    @property
    def names(self) -> list[str]:
        names = [f"--{self.flag}"]
        if self.short:
            dashes = "-" if len(self.short) == 1 else "--"
            names.append(dashes + self.short)
        return names


def _read_options() -> dict[str, tuple[Option, ...]]:
    """Returns the options of each command: its own, then those that it shares with the exporter.

    doctor shares all.
    """
    text = Path(__file__).with_suffix(".csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    # Own options come first, so that they replace shared ones of the same name.
    rows.sort(key=lambda row: row["command"].startswith("exporter"))

    commands: defaultdict[str, dict[str, Option]] = defaultdict(dict)
    for row in rows:
        names = row.pop("command").split()
        is_shown = row.pop("shown") == "help"
        env = row.pop("env")
        is_shared = "exporter" in names
        if is_shared:
            names.append("doctor")
        for command in names:
            is_hidden = is_shared and command in _HIDING_SHARED
            variable = env.replace("{COMMAND}", command.upper())
            option = Option(**row, env=variable, common=is_shown and not is_hidden)
            commands[command].setdefault(option.flag, option)
    return {command: tuple(options.values()) for command, options in commands.items()}


_OPTIONS = _read_options()
EXPORTER_OPTIONS = _OPTIONS["exporter"]


_PLAIN_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_PLAIN_UNITS = {"duration": "s", "milliseconds": "ms"}


class _Parsed(click.ParamType):  # type: ignore[type-arg]
    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(str(value).strip())
        except UsageError as error:
            self.fail(str(error), param, ctx)


class _List(click.types.StringParamType):
    envvar_list_splitter = ","


def _parse_seconds(unit: str, text: str) -> float:
    is_plain = _PLAIN_NUMBER.fullmatch(text) is not None
    seconds = parse_duration(f"{text}{unit}" if is_plain else text)
    if seconds is None:
        raise UsageError(f"{text!r} is not a duration such as 5s, 500ms or 1m30s")

    if not 0.1 <= seconds <= 86_400:
        limits = "from 100 ms to 24 h"
        raise UsageError(f"{text} must be {limits}; a number without a unit is in {unit}")
    return seconds


def _parse_listen_address(text: str) -> Address:
    # Imports aiohttp, which most runs of the hook do not need.
    from podgpu.web.app import parse_address

    return parse_address(text)


def _parse_optional_address(text: str) -> Address | None:
    if text in ("", "none"):
        return None
    return _parse_listen_address(text)


def _make_type(kind: str) -> click.ParamType:  # type: ignore[type-arg]
    name, _, argument = kind.partition(":")
    if name in _PLAIN_UNITS:
        return _Parsed("duration", partial(_parse_seconds, _PLAIN_UNITS[name]))
    if name == "ADDRESS":
        return _Parsed(name, _parse_listen_address)
    if name == "ADDRESS|none":
        return _Parsed(name, _parse_optional_address)
    if name == "bool":
        return click.BOOL
    if name == "LIST":
        return _List()
    if name == "choice":
        return click.Choice(argument.split("|"))
    if name == "whole":
        low, _, high = argument.partition("-")
        return click.IntRange(int(low), int(high))
    return click.STRING


def describe_origin(param: click.Parameter, ctx: click.Context | None) -> str:
    """Returns a note that names the environment variable or file that sets the option.

    Empty for flags.
    """
    if ctx is None or param.name is None:
        return ""
    files = ctx.meta.get(FROM_FILE, {})
    if param.name in files:
        return f" (from {files[param.name]})"
    if ctx.get_parameter_source(param.name) is ParameterSource.ENVIRONMENT:
        return f" (from the variable {param.envvar})"
    return ""


def is_set(ctx: click.Context, parameter: str) -> bool:
    """Returns True if a flag or an environment variable sets the option."""
    return ctx.get_parameter_source(parameter) is not ParameterSource.DEFAULT


def split_list(text: str) -> list[str]:
    """Returns the values of an option that are separated by commas. Drops empty ones."""
    return [value.strip() for value in text.split(",") if value.strip()]


def is_kubectl_plugin(ctx: click.Context) -> bool:
    """Returns True in `kubectl podgpu`."""
    return ctx.find_root().info_name == KUBECTL_PROGRAM


@contextmanager
def naming_option(option: str) -> Iterator[None]:
    """Adds the option to the start of a UsageError's message, unless it begins with an option."""
    try:
        yield
    except UsageError as e:
        if str(e).startswith("--"):
            raise
        raise UsageError(f"{option} {e}") from e


Example = tuple[str, str]  # command line, description
_HELP_ALL = "podgpu.help_all"
_VERSION_NAMES = ("-v", "--version")
_GO_SHORT = re.compile(r"-?(-[A-Za-z])")
_GO_LONG = re.compile(r"-[a-z][\w-]+")
_NAMES_WIDTH = 30


def describe_version() -> str:
    """Returns the version and the commit. Only packages from `make release` contain the commit."""
    file = resources.files("podgpu") / "commit.txt"
    try:
        built = f"commit {file.read_text(encoding='utf-8').strip()}"
    except FileNotFoundError:
        built = "built from a source tree"
    return f"podgpu {__version__} ({built})"


def make_command(name: str, *examples: Example) -> Callable[[Callable[..., Any]], click.Command]:
    """Returns a decorator that makes a function a command.

    The options are the command's rows in options.csv.
    """
    rows = _OPTIONS.get(name, ())
    params = [_make_option(row) for row in rows]
    if any(not row.common for row in rows):
        all_options = click.Option(
            ["--help-all"],
            help="Show every option and exit.",
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_all,
        )
        params.append(all_options)

    command = click.command(
        name,
        cls=GroupedCommand,
        rows=rows,
        examples=examples,
        params=params,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )

    if name != "exporter":
        return command
    # The image runs `podgpu exporter`, and dcgm-exporter has this option.
    version = click.version_option(__version__, *_VERSION_NAMES, message=describe_version())
    return lambda function: version(command(function))


def _show_all(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[_HELP_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


def _make_option(row: Option) -> click.Option:
    names = [*row.names, row.parameter]
    if row.kind == "flag":
        return click.Option(names, help=row.help, is_flag=True)

    settings: dict[str, Any] = {
        "type": _make_type(row.kind),
        "envvar": row.env or None,
        "show_envvar": True,
        "default": row.default,
        # A flag that is not given is false, which goes without saying.
        "show_default": row.default not in ("", "false"),
    }
    if row.kind == "bool":
        # As in Go, the value is optional: --debug means --debug=true.
        settings["is_flag"] = False
        settings["flag_value"] = "true"
        settings["metavar"] = "" if row.default == "false" else "[true|false]"
    elif row.kind.isupper() or row.kind == "ADDRESS|none":
        # A placeholder such as FILE. click describes values of the other kinds itself.
        settings["metavar"] = row.kind
    if row.kind == "LIST":
        settings |= {"multiple": True, "default": (), "callback": _join_list}
    return click.Option(names, help=row.help, **settings)


def _join_list(_ctx: click.Context, _param: click.Parameter, values: Sequence[str]) -> str:
    return ",".join(values)


class GroupedCommand(click.Command):
    def __init__(
        self, *arguments: Any, rows: Sequence[Option], examples: Sequence[Example], **named: Any
    ) -> None:
        super().__init__(*arguments, **named)
        self.rows = rows
        self.examples = examples

    def invoke(self, ctx: click.Context) -> Any:
        """Configures logging and runs the command.

        Names the origin of the option in the message of a UsageError.
        """
        if "log_format" in ctx.params:
            configure_logging(ctx.params["log_format"], ctx.params["debug"])
        try:
            return super().invoke(ctx)
        except UsageError as error:
            # Messages about a value begin with the option.
            option = str(error).partition(" ")[0].rstrip(":")
            for param in self.params:
                if option in param.opts:
                    raise UsageError(f"{error}{describe_origin(param, ctx)}") from error
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = {row.parameter: row for row in self.rows}
        records = defaultdict(list)
        for param in self.get_params(ctx):
            # Arguments are in the line of usage.
            if not isinstance(param, click.Option):
                continue
            # --help, --help-all and --version have no row.
            row = rows.get(param.name or "", Option("help"))
            if not row.common and not ctx.meta.get(_HELP_ALL):
                continue
            if is_kubectl_plugin(ctx):
                param = _describe_for_plugin(param)
            record = param.get_help_record(ctx)
            if record is not None:
                records[row.group].append(record)

        for group, title in GROUPS.items():
            if records[group]:
                with formatter.section(title):
                    formatter.write_dl(records[group], col_max=_NAMES_WIDTH)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        examples = self.examples
        if is_kubectl_plugin(ctx):
            examples = _list_plugin_examples(examples)
        write_examples(formatter, examples)


def _describe_for_plugin(param: click.Option) -> click.Option:
    """The plugin reads through the API server, unless an option names an address."""
    if param.name not in _PLUGIN_HELP:
        return param
    described = copy(param)
    described.help = f"{param.help} {_PLUGIN_HELP[param.name]}"
    described.show_default = False
    return described


def _list_plugin_examples(examples: Sequence[Example]) -> list[Example]:
    """Returns the examples that read through the API server, or that name no source at all."""
    through_api = [example for example in examples if _KUBE_FLAG in example[0]]
    without_source = [example for example in examples if not _ADDRESS_FLAG.search(example[0])]
    shown = []
    for command, meaning in through_api or without_source:
        arguments = command.replace(_KUBE_FLAG, "").removeprefix("podgpu ")
        shown.append((f"{KUBECTL_PROGRAM} {arguments}", meaning))
    return shown


def write_examples(formatter: click.HelpFormatter, examples: Sequence[Example]) -> None:
    with formatter.section("Examples"):
        for command, meaning in examples:
            formatter.write(f"{'':{formatter.current_indent}}$ {command}\n")
            with formatter.indentation(), formatter.indentation():
                formatter.write_text(meaning)


def normalize_arguments(arguments: Sequence[str]) -> list[str]:
    """Converts the syntax of Go flags.

    `-c=1000` and `--c=1000` become `-c 1000`, and `-collectors file` becomes `--collectors file`.
    """
    names = list(_VERSION_NAMES)
    for option in EXPORTER_OPTIONS:
        names += option.names

    normal = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        short = _GO_SHORT.fullmatch(name)
        if short and short[1] in names:
            normal.append(short[1])
            if equals:
                normal.append(value)
        elif _GO_LONG.fullmatch(name) and f"-{name}" in names:
            normal.append(f"-{argument}")
        else:
            normal.append(argument)
    return normal
