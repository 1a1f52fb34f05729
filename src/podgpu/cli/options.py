"""Defines options as data, and builds click's options and grouped help from them.

Also accepts the syntax of dcgm-exporter's Go flags: `-c=1000`, `-collectors x`, `--debug=false`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from functools import partial
from typing import Any

import click
from click.core import ParameterSource

from podgpu.errors import UsageError

COMMON, KUBERNETES, AUTOSCALING, USAGE = "Common", "Kubernetes", "Autoscaling", "Usage and cost"
ACCESS, COMPATIBILITY, PATHS = "Access (TLS, credentials, probes)", "dcgm-exporter compatibility", "Paths"
NO_EFFECT = "Accepted without effect"
GROUPS = (COMMON, KUBERNETES, AUTOSCALING, USAGE, ACCESS, COMPATIBILITY, PATHS, NO_EFFECT)
FROM_FILE = "podgpu.from_file"
"""Key in `Context.meta` of a dict: parameter -> file that contains its value."""


@dataclass(frozen=True, slots=True)
class Option:
    flag: str
    short: str = ""
    """A letter, or a second long name."""
    env: str = ""
    default: str = ""
    help: str = ""
    kind: str = "text"
    """text, flag (without a value), bool, duration (a plain number is seconds), milliseconds (a plain number is
    milliseconds), whole:LOW-HIGH or choice:a|b."""
    group: str = COMMON
    common: bool = True
    """True if --help shows the option; False if only --help-all does."""

    @property
    def parameter(self) -> str:
        return self.flag.replace("-", "_")

    @property
    def ours(self) -> bool:
        """True if dcgm-exporter does not have the option."""
        return not self.env or self.env.startswith("PODGPU_")

    @property
    def works(self) -> bool:
        """False if the option has no effect and is accepted only so that a migrated DaemonSet starts."""
        return self.group != NO_EFFECT

    @property
    def names(self) -> list[str]:
        short = [f"-{self.short}" if len(self.short) == 1 else f"--{self.short}"] if self.short else []
        return [f"--{self.flag}", *short]


# Values

_TRUE, _FALSE = {"1", "t", "true", "yes", "on"}, {"0", "f", "false", "no", "off"}
_MAX_SECONDS = 86_400.0
_PLAIN_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_GO_DURATION = re.compile(r"(?:[0-9]{1,12}(?:\.[0-9]{0,12})?|\.[0-9]{1,12})(?:ns|us|µs|μs|ms|s|m|h)")
_GO_PART = re.compile(r"([0-9.]+)([a-zµμ]+)")
_GO_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_go_duration(text: str) -> float | None:
    """Converts `1h30m`, `1.5s`, `500ms` or `0` to seconds. Returns None for negative and invalid durations."""
    if text == "0":
        return 0.0
    if not text or _GO_DURATION.sub("", text):
        return None
    return sum(float(number) * _GO_SECONDS[unit] for number, unit in _GO_PART.findall(text))


def _parse_bool(text: str) -> bool:
    word = text.lower()
    if word not in _TRUE | _FALSE:
        raise ValueError(f"{text!r} is neither true nor false")
    return word in _TRUE


def _parse_duration(unit: str, text: str) -> float:
    """Returns seconds. A number without a unit is in `unit`."""
    seconds = parse_go_duration(f"{text}{unit}" if _PLAIN_NUMBER.fullmatch(text) else text)
    plain = "milliseconds (5000)" if unit == "ms" else "seconds (15)"
    if seconds is None:
        raise ValueError(f"{text!r} is not a duration; write {plain} or a unit (5s, 500ms, 1m)")
    if not 0.1 <= seconds <= _MAX_SECONDS:
        raise ValueError(f"{text} must be from 100 ms to 24 h; numbers without a unit are {plain}")
    return seconds


def _parse_whole(low: int, high: int, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,12}", text) or not low <= int(text) <= high:
        raise ValueError(f"{text!r} is not a whole number from {low} to {high}")
    return int(text)


def _parse_choice(words: Sequence[str], text: str) -> str:
    if text not in words:
        near = "".join(f"; did you mean {word}?" for word in find_similar(text, words)[:1])
        raise ValueError(f"{text!r} is not one of {', '.join(words)}{near}")
    return text


class _ValueType(click.ParamType):  # type: ignore[type-arg]
    """A type of option values. `parse` raises ValueError for an invalid value."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(str(value).strip())
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _make_type(kind: str) -> click.ParamType:  # type: ignore[type-arg]
    name, _, rest = kind.partition(":")
    low, _, high = rest.partition("-")
    parsers: dict[str, Callable[[str], Any]] = {
        "bool": _parse_bool,
        "duration": partial(_parse_duration, "s"),
        "milliseconds": partial(_parse_duration, "ms"),
        "choice": partial(_parse_choice, rest.split("|")),
    }
    if name == "whole":
        return _ValueType(name, partial(_parse_whole, int(low), int(high)))
    return _ValueType(name, parsers[name]) if name in parsers else click.STRING


def describe_origin(param: click.Parameter | None, ctx: click.Context | None) -> str:
    """Returns a note about the environment variable or file that contains the value."""
    if param is None or ctx is None or param.name is None:
        return ""
    if param.name in ctx.meta.get(FROM_FILE, {}):
        return f" (from {ctx.meta[FROM_FILE][param.name]})"
    if ctx.get_parameter_source(param.name) is not ParameterSource.ENVIRONMENT:
        return ""
    return f" (from the variable {param.envvar})"


def is_given(ctx: click.Context, option: Option) -> bool:
    """Returns True if a flag or environment variable sets the option to a value other than its default."""
    if ctx.get_parameter_source(option.parameter) is ParameterSource.DEFAULT:
        return False
    value = ctx.params[option.parameter]
    word = str(value).lower() if isinstance(value, bool) else str(value)
    return word != option.default


# Commands

Example = tuple[str, str]
"""A command line and its description."""
_HELP_ALL = "podgpu.help_all"
_MAX_WIDTH = 110
_INDENT = "  "
_NAMES_WIDTH = 28
_NO_BREAK = "\N{NO-BREAK SPACE}"
_SWITCHES = "Boolean options can be written --NAME, --NAME=true or --NAME=false."
_METAVARS = {"bool": "[true|false]", "duration": "DURATION", "milliseconds": "DURATION"}
_TEXT_METAVARS = {  # by flag, or by the last word of a flag
    **dict.fromkeys(("url", "cluster", "prometheus"), "URL"),
    **dict.fromkeys(("file", "kubeconfig", "prices", "snapshot", "out", "podlist"), "FILE"),
    **dict.fromkeys(("dir", "directory", "path-proc", "path-varlog", "path-sysfs"), "DIR"),
    "in": "URL|FILE",
    "scrape": "URL,URL,...",
    "address": "ADDRESS",
    "info": "ADDRESS",
    "socket": "PATH",
}


class _Option(click.Option):
    """A click option with its `Option`, which contains the group and the visibility."""

    def __init__(self, *arguments: Any, row: Option | None = None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.row = row or Option(max(self.opts, key=len).lstrip("-"))


def make_command(
    name: str, options: Iterable[Option], *examples: Example
) -> Callable[[Callable[..., Any]], click.Command]:
    """Returns a decorator that makes a command with these options, grouped help and --help-all."""
    rows = list(options)
    settings = {"help_option_names": ["-h", "--help"], "max_content_width": _MAX_WIDTH}

    def decorate(function: Callable[..., Any]) -> click.Command:
        if any(not row.common for row in rows):
            function = click.option(
                "--help-all",
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_show_all,
                help="Show every option and exit.",
                cls=_Option,
            )(function)
        for row in reversed(rows):
            function = _make_option(row)(function)
        return click.command(name, cls=_GroupedCommand, examples=examples, context_settings=settings)(function)

    return decorate


def _show_all(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[_HELP_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


def _make_option(row: Option) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    if row.kind == "flag":
        return click.option(*row.names, row.parameter, cls=_Option, row=row, is_flag=True, help=row.help)
    optional_value: dict[str, Any] = {"is_flag": False, "flag_value": "true"} if row.kind == "bool" else {}
    return click.option(
        *row.names,
        row.parameter,
        cls=_Option,
        row=row,
        type=_make_type(row.kind),
        metavar=_make_metavar(row),
        envvar=row.env or None,
        default=row.default,
        help=row.help,
        **optional_value,
    )


def _make_metavar(row: Option) -> str:
    if row.kind == "text":
        return _TEXT_METAVARS.get(row.flag) or _TEXT_METAVARS.get(row.flag.rpartition("-")[2], "TEXT")
    if row.kind.startswith("whole:"):
        return "NUMBER"
    return _METAVARS.get(row.kind) or row.kind.removeprefix("choice:")


class _GroupedCommand(click.Command):
    def __init__(self, *arguments: Any, examples: Sequence[Example], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.examples = examples

    def invoke(self, ctx: click.Context) -> Any:
        """If a UsageError begins with an option, adds the environment variable or file that set the option."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            name = str(error).partition(" ")[0].rstrip(":")
            param = next((param for param in self.params if name in param.opts), None)
            origin = describe_origin(param, ctx)
            raise UsageError(f"{error}{origin}") from error

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shown = shown_options(self, everything=bool(ctx.meta.get(_HELP_ALL)))
        params: dict[str, click.Option] = {row.flag: param for row, param in shown}
        for group in GROUPS:
            flags = [row.flag for row, _ in shown if row.group == group]
            if group == COMMON:
                help_option = self.get_help_option(ctx)
                assert help_option is not None
                params["help"] = help_option
                flags.append("help")
            if group == NO_EFFECT and flags:
                names = " ".join(f"--{flag}" for flag in flags)
                lines: Iterable[str] = textwrap.wrap(
                    names, formatter.width, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False
                )
                _write_section(formatter, "Options of dcgm-exporter that are accepted without effect", lines)
            elif flags:
                lines = (line for flag in flags for line in _format_option(params[flag], formatter.width))
                _write_section(formatter, group, lines)
        if any(row.kind == "bool" for row, _ in shown):
            formatter.write_paragraph()
            formatter.write(f"{_SWITCHES}\n")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_examples(formatter, self.examples)


def shown_options(command: click.Command, *, everything: bool) -> Sequence[tuple[Option, click.Option]]:
    """Returns the options that --help shows, or with `everything` those of --help-all."""
    options = [param for param in command.params if isinstance(param, _Option)]
    return [(param.row, param) for param in options if everything or param.row.common]


def write_examples(formatter: click.HelpFormatter, examples: Sequence[Example]) -> None:
    lines: list[str] = []
    for command, meaning in examples:
        lines.append(f"{_INDENT}$ {command}")
        lines += textwrap.wrap(meaning, formatter.width, initial_indent=_INDENT * 3, subsequent_indent=_INDENT * 3)
    _write_section(formatter, "Examples", lines)


def write_list(formatter: click.HelpFormatter, title: str, items: Collection[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in items)
    _write_section(formatter, title, (line for item in items for line in _format_item(*item, width, formatter.width)))


def _write_section(formatter: click.HelpFormatter, title: str, lines: Iterable[str]) -> None:
    formatter.write_paragraph()
    formatter.write("".join(f"{line}\n" for line in (f"{title}:", *lines)))


def _format_option(option: click.Option, width: int) -> Iterator[str]:
    facts = [fact for fact in (option.envvar, describe_default(option)) if isinstance(fact, str) and fact]
    note = f"[{', '.join(facts).replace(' ', _NO_BREAK)}]" if facts else ""
    return _format_item(describe_names(option), " ".join(filter(None, (option.help, note))), _NAMES_WIDTH, width)


def _format_item(name: str, text: str, names_width: int, width: int) -> Iterator[str]:
    """Formats the name on the left and the text on the right. Words are not broken, so that they can be copied."""
    left = len(_INDENT) + names_width + 2
    room = max(20, width - left)
    lines = [
        line.replace(_NO_BREAK, " ")
        for line in textwrap.wrap(text, room, break_on_hyphens=False, break_long_words=False)
    ]
    if len(name) <= names_width:
        yield f"{_INDENT}{name}".ljust(left) + (lines.pop(0) if lines else "")
    else:
        yield f"{_INDENT}{name}"
    yield from (" " * left + line for line in lines)


def describe_names(option: click.Option) -> str:
    """Returns text such as `-a, --address ADDRESS`. A switch that is off by default has no metavar."""
    long = [name for name in option.opts if name.startswith("--")]
    short = [name for name in option.opts if not name.startswith("--")]
    is_switch = option.is_flag or (option.type.name == "bool" and option.default == "false")
    return " ".join(filter(None, (", ".join((*short, *long)), "" if is_switch else option.metavar or "")))


def describe_default(option: click.Option) -> str:
    if not isinstance(option.default, str) or option.default in ("", "false"):
        return ""
    is_milliseconds = option.type.name == "milliseconds" and option.default.isdecimal()
    return f"default {option.default}{' ms' if is_milliseconds else ''}"


# Spelling

_MAX_SIMILAR = 3
_MIN_WORD = 4  # letters of a misspelt long option with a single dash; fewer are short options
_SIMILAR = 0.85


def normalize_arguments(arguments: Sequence[str], options: Iterable[Option]) -> list[str]:
    """Converts Go's `-c=1000` to `-c 1000`, and `-collectors file` to `--collectors file`."""
    long_names = {name[2:] for option in options for name in option.names if name.startswith("--")}
    normal: list[str] = []
    for argument in arguments:
        if re.match(r"-[A-Za-z]=", argument):
            normal += [argument[:2], argument[3:]]
        elif (match := re.match(r"-([a-z][\w-]+)(=.*)?$", argument)) and match[1] in long_names:
            normal.append(f"-{argument}")
        else:
            normal.append(argument)
    return normal


def explain_unknown(kind: str, name: str, names: Collection[str]) -> str:
    """Returns text such as `there is no option --colectors; did you mean --collectors?`."""
    similar = find_similar(name, names)
    return f"there is no {kind} {name}" + (f"; did you mean {' or '.join(similar)}?" if similar else "")


def find_similar(name: str, names: Collection[str]) -> list[str]:
    begun = sorted(n for n in names if n.startswith(name) and len(name.strip("-")) >= _MIN_WORD)
    return list(dict.fromkeys((*get_close_matches(name, names, _MAX_SIMILAR), *begun)))[:_MAX_SIMILAR]


def is_misspelt_long_option(argument: str, long_names: Collection[str]) -> bool:
    """Returns True for `-colectors x`, which click would read as `-c olectors`."""
    match = re.fullmatch(r"-([a-z][a-z-]+)(?:=.*)?", argument, re.DOTALL)
    if match is None or len(match[1]) < _MIN_WORD or f"--{match[1]}" in long_names:
        return False
    return any(SequenceMatcher(None, match[1], name.lstrip("-")).ratio() >= _SIMILAR for name in long_names)
