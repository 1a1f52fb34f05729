"""This module says what an option is, and makes click's of it with Go's habits: `-c=1000`, `-collectors x`,
`--debug=false`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import click
from click.core import ParameterSource

from podgpu.errors import UsageError

_TRUE = {"1", "t", "true", "yes", "on"}
_FALSE = {"0", "f", "false", "no", "off"}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?")
_UNIT_SECONDS = {None: 0.001, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_MOST_SECONDS = 86_400.0
_GO_DURATION = re.compile(r"(?:[0-9]{1,12}(?:\.[0-9]{0,12})?|\.[0-9]{1,12})(?:ns|us|µs|μs|ms|s|m|h)")
_GO_PART = re.compile(r"([0-9.]+)([a-zµμ]+)")
_GO_SECONDS = {
    "ns": Fraction(1, 10**9),
    **dict.fromkeys(("us", "µs", "μs"), Fraction(1, 10**6)),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
}
_METAVARS = {"bool": "[true|false]", "duration": "DURATION", "age": "DURATION"}
FROM_FILE = "podgpu.from_file"
"""In a context's meta: parameter -> the file its value came from."""
_TEXTS = {
    **dict.fromkeys(("url", "cluster", "prometheus"), "URL"),
    **dict.fromkeys(("file", "kubeconfig", "prices", "snapshot", "out", "podlist"), "FILE"),
    **dict.fromkeys(("dir", "directory"), "DIR"),
    **dict.fromkeys(("path-proc", "path-varlog", "path-sysfs"), "DIR"),
    "in": "URL|FILE",
    "scrape": "URL,URL,...",
    "address": "ADDRESS",
    "info": "ADDRESS",
    "socket": "PATH",
}
"""What is to be written behind the flag, by the whole of it or its last word."""


def parse_go_duration(text: str) -> Fraction | None:
    """Returns the seconds of `1h30m`, `1.5s`, `500ms` or `0`; None for negative and invalid ones."""
    if text == "0":
        return Fraction(0)
    if not text or len(text) > 64 or _GO_DURATION.sub("", text):
        return None
    return sum((Fraction(number) * _GO_SECONDS[unit] for number, unit in _GO_PART.findall(text)), Fraction(0))


@dataclass(frozen=True, slots=True)
class Option:
    """One row of a table of options; click's are made of them."""

    flag: str
    short: str = ""
    env: str = ""
    default: str = ""
    help: str = ""
    kind: str = "text"
    """text, bool, duration (a plain number is milliseconds), age (as Go writes them, 0 too), whole:LOW-HIGH or
    choice:a|b."""
    works: bool = True
    alias: str = ""
    acts_when_named: bool = False
    """Setting it means something even at its default value."""
    ours: bool = False
    """podgpu's own; dcgm-exporter does not have it."""

    @property
    def parameter(self) -> str:
        return self.flag.replace("-", "_")


class _Bool(click.ParamType):  # type: ignore[type-arg]
    name = "true|false"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bool:
        word = str(value).strip().lower()
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
        self.fail(f"{value!r} is neither true nor false{_from(param, ctx)}", param, ctx)


class _Duration(click.ParamType):  # type: ignore[type-arg]
    """Seconds as a float; what is written without a unit is milliseconds, as dcgm-exporter documents."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        m, go = _DURATION.fullmatch(text), parse_go_duration(text)
        if m is None and go is None:
            where = _from(param, ctx)
            self.fail(
                f"{value!r} is not a duration; write milliseconds (5000) or a unit (5s, 500ms, 1m){where}", param, ctx
            )
        seconds = float(go or 0) if m is None else float(m[1]) * _UNIT_SECONDS[m[2]]
        if not 0.1 <= seconds <= _MOST_SECONDS:
            self.fail(
                f"{value} is out of range: 100 ms to 24 h, a plain number is milliseconds{_from(param, ctx)}",
                param,
                ctx,
            )
        return seconds


class _Age(click.ParamType):  # type: ignore[type-arg]
    """Seconds as a float, written as Go does."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = parse_go_duration(str(value).strip())
        if seconds is None:
            self.fail(f"{value!r} is not a duration; write it as in 10m, 90s or 0s{_from(param, ctx)}", param, ctx)
        return float(seconds)


class _Whole(click.ParamType):  # type: ignore[type-arg]
    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        self.name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip()
        if not re.fullmatch(r"[0-9]{1,12}", text) or not self.low <= int(text) <= self.high:
            where = _from(param, ctx)
            self.fail(f"{value!r} is not a whole number from {self.low} to {self.high}{where}", param, ctx)
        return int(text)


class _Choice(click.ParamType):  # type: ignore[type-arg]
    def __init__(self, words: Sequence[str]) -> None:
        self.words = words
        self.name = "|".join(words)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.words:
            from podgpu.cli.params import close_to

            meant = "".join(f"; did you mean {word}?" for word in close_to(str(value), self.words)[:1])
            self.fail(f"{value!r} is not one of {', '.join(self.words)}{meant}{_from(param, ctx)}", param, ctx)
        return str(value)


def _from(param: click.Parameter | None, ctx: click.Context | None) -> str:
    """Names the variable when that is where the value came from."""
    if param is None or ctx is None or param.name is None:
        return ""
    if param.name in ctx.meta.get(FROM_FILE, {}):
        return f" (from {ctx.meta[FROM_FILE][param.name]})"
    if ctx.get_parameter_source(param.name) is not ParameterSource.ENVIRONMENT:
        return ""
    return f" (from the variable {param.envvar})"


def _type(kind: str) -> Any:
    if kind == "bool":
        return _Bool()
    if kind == "duration":
        return _Duration()
    if kind == "age":
        return _Age()
    if kind.startswith("whole:"):
        low, _, high = kind.removeprefix("whole:").partition("-")
        return _Whole(int(low), int(high))
    if kind.startswith("choice:"):
        return _Choice(kind.removeprefix("choice:").split("|"))
    return click.STRING


def with_options(options: Iterable[Option]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(list(options)):
            function = _click_option(option)(function)
        return function

    return decorate


def _click_option(option: Option) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    names = [f"--{option.flag}", *([f"-{option.short}"] if option.short else [])]
    names += [f"--{option.alias}"] if option.alias else []
    optional_value: dict[str, Any] = {"is_flag": False, "flag_value": "true"} if option.kind == "bool" else {}
    return click.option(
        *names,
        option.parameter,
        type=_type(option.kind),
        metavar=_metavar(option),
        envvar=option.env or None,
        default=option.default,
        show_envvar=bool(option.env),
        show_default=bool(option.default),
        help=option.help,
        **optional_value,
    )


# How an option is shown


def shown_name(option: click.Option) -> str:
    """`-a, --address ADDRESS`. What is off by default is switched on by its name alone."""
    long, short = ([name for name in option.opts if name.startswith("--") is is_long] for is_long in (True, False))
    metavar = "" if isinstance(option.type, _Bool) and option.default == "false" else option.metavar or ""
    return " ".join(filter(None, (", ".join((*short, *long)), metavar)))


def shown_default(option: click.Option) -> str:
    """`default 5s`; "" where there is none, and for what is off."""
    if not isinstance(option.default, str) or option.default in ("", "false"):
        return ""
    unit = " ms" if isinstance(option.type, _Duration) and option.default.isdecimal() else ""
    return f"default {option.default}{unit}"


def _metavar(option: Option) -> str:
    """Of text its last word tells what is to be written."""
    if option.kind == "text":
        return _TEXTS.get(option.flag) or _TEXTS.get(option.flag.rpartition("-")[2], "TEXT")
    if option.kind.startswith("whole:"):
        return "NUMBER"
    return _METAVARS.get(option.kind) or option.kind.removeprefix("choice:")


def normalise(arguments: Sequence[str], options: Iterable[Option]) -> list[str]:
    """Go's flag package takes `-c=1000` and `-collectors file`; so do we."""
    long_names = {name for option in options for name in (option.flag, option.alias) if name}
    normal: list[str] = []
    for argument in arguments:
        if re.match(r"-[A-Za-z]=", argument):
            normal += [argument[:2], argument[3:]]
        elif (m := re.match(r"-([a-z][\w-]+)(=.*)?$", argument)) and m[1] in long_names:
            normal.append(f"-{argument}")
        else:
            normal.append(argument)
    return normal


def given(ctx: click.Context, option: Option) -> bool:
    """The user set it, by flag or variable, to something other than the default."""
    if ctx.get_parameter_source(option.parameter) is ParameterSource.DEFAULT:
        return False
    value = ctx.params[option.parameter]
    word = str(value).lower() if isinstance(value, bool) else str(value)
    return option.acts_when_named or word != option.default


@contextmanager
def naming_variable(ctx: click.Context, parameter: str) -> Iterator[None]:
    """Adds to a usage error raised inside that the value came from a variable, where it did."""
    try:
        yield
    except UsageError as e:
        param = next(p for p in ctx.command.params if p.name == parameter)
        where = _from(param, ctx)
        raise UsageError(f"{e}{where}") from e


_MOST = 3
_SHORTEST_WORD = 4
"""Of letters behind one dash: fewer are short options in a row, or one with its value."""
_NEARLY = 0.85


def no_such(kind: str, name: str, names: Collection[str]) -> str:
    """`there is no option --colectors; did you mean --collectors?`"""
    close = close_to(name, names)
    return f"there is no {kind} {name}" + (f"; did you mean {' or '.join(close)}?" if close else "")


def close_to(name: str, names: Collection[str]) -> list[str]:
    """The nearest first; those that begin with it count as near, however much is missing."""
    from difflib import get_close_matches  # not needed until there is something to say

    begun = sorted(n for n in names if n.startswith(name) and len(name.strip("-")) >= _SHORTEST_WORD)
    return list(dict.fromkeys((*get_close_matches(name, names, _MOST), *begun)))[:_MOST]


def one_dash_typo(argument: str, long_names: Collection[str]) -> bool:
    """`-colectors x`: Go's way to write a long option, mistyped. click would take it for `-c olectors`."""
    match = re.fullmatch(r"-([a-z][a-z-]+)(?:=.*)?", argument, re.DOTALL)
    if match is None or len(match[1]) < _SHORTEST_WORD or f"--{match[1]}" in long_names:
        return False
    from difflib import SequenceMatcher

    return any(SequenceMatcher(None, match[1], name.lstrip("-")).ratio() >= _NEARLY for name in long_names)
