"""`--help` of every command: in groups, with examples that work, readable at 80 columns; and help for the mistyped."""

from __future__ import annotations

import io
import shlex
from contextlib import redirect_stderr, redirect_stdout

import click
import pytest

from podgpu.cli.help import GROUPS, grouped
from podgpu.cli.main import COMMANDS, cli, run
from podgpu.cli.option_table import EXPORTER_OPTIONS
from podgpu.cli.params import normalise

every_command = pytest.mark.parametrize("name", COMMANDS)
FIRST_FIVE = ("Common", "Kubernetes", "Usage accounting", "DCGM compatibility", "Without effect")


def help_of(*names: str, width: int = 80, patch: pytest.MonkeyPatch) -> str:
    patch.setenv("COLUMNS", str(width))
    out = io.StringIO()
    with redirect_stdout(out):
        assert run([*names, "--help"]) == 0
    return out.getvalue()


def complaint(*arguments: str) -> str:
    err = io.StringIO()
    with redirect_stderr(err):
        assert run(list(arguments)) == 2
    (line,) = err.getvalue().splitlines()
    return line


def command_named(name: str) -> click.Command:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return command


def flags_of(name: str) -> set[str]:
    options = (p for p in command_named(name).params if isinstance(p, click.Option))
    return {next(o for o in option.opts if o.startswith("--"))[2:] for option in options}


def sections(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    title = ""
    for line in text.splitlines():
        if line and not line.startswith(" "):
            title = line.rstrip(":")
        found.setdefault(title, []).append(line)
    return found


def test_every_option_is_in_one_group() -> None:
    """Who adds an option says in cli/help.py where people look for it."""
    named = [flag for flags in GROUPS.values() for flag in flags]
    there = {flag for name in COMMANDS for flag in flags_of(name)} | {"help"}
    assert len(named) == len(set(named))
    assert set(named) == there


@every_command
def test_options_stand_in_groups_with_the_common_ones_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = help_of(name, patch=monkeypatch)
    titles = list(sections(text))
    assert titles[1] == "Common"
    for title, flags in grouped(sorted(flags_of(name))):
        assert title in titles
        for flag in flags:
            assert f"--{flag}" in "\n".join(sections(text)[title])


def test_the_exporter_has_all_five_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    titles = list(sections(help_of("exporter", patch=monkeypatch)))
    assert [t for t in titles for first in FIRST_FIVE if t.startswith(first)] == [
        t for first in FIRST_FIVE for t in titles if t.startswith(first)
    ]
    assert all(any(t.startswith(first) for t in titles) for first in FIRST_FIVE)
    without_effect = sections(help_of("exporter", patch=monkeypatch))[next(t for t in titles if "Without" in t)]
    assert {o.flag for o in EXPORTER_OPTIONS if not o.works} == {
        line.split()[0][2:] for line in without_effect if line.startswith("  --")
    }


@every_command
def test_three_examples_that_can_be_typed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = sections(help_of(name, patch=monkeypatch))["Examples"]
    commands = [line.removeprefix("  $ ") for line in lines if line.startswith("  $ ")]
    assert len(commands) == 3
    for command in commands:
        podgpu, verb, *arguments = shlex.split(command)
        assert podgpu == "podgpu"
        command_named(verb).make_context(verb, normalise(arguments, EXPORTER_OPTIONS))  # raises for what is not there


@pytest.mark.parametrize("width", [60, 80, 110])
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_no_line_is_wider_than_the_terminal(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for words that cannot be broken, and examples, which are there to be copied."""
    for line in help_of(*filter(None, [name]), width=width, patch=monkeypatch).splitlines():
        words = line.split() or [""]
        cannot_be_broken = len(words) == 1 or words[0] in ("$", "default") or words[0].startswith("-")
        assert len(line) <= width or cannot_be_broken, line


def test_the_start_names_every_command_with_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = sections(help_of(patch=monkeypatch))
    assert [line.split()[0] for line in parts["Commands"][1:] if line[2:3].strip()] == list(COMMANDS)
    assert sum(line.startswith("  $ podgpu ") for line in parts["Examples"]) == 3


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["exporter", "--colectors", "x"], "--collectors"),
        (["exporter", "--collectors-file=x"], "--collectors"),
        (["exporter", "-colectors", "x"], "--collectors"),
        (["exporter", "-kubernets"], "--kubernetes"),
        (["exporter", "--kubernetes-enable-pod-lables"], "--kubernetes-enable-pod-labels"),
        (["cluster", "--scarpe", "x"], "--scrape"),
        (["cluster", "--discover"], "--discover-kubernetes"),
        (["enrich", "--output", "x"], "--out"),
        (["top", "--clutser", "x"], "--cluster"),
        (["demo", "--gpu", "x"], "--gpus"),
        (["doctor", "--jsno"], "--json"),
        (["hook", "--podlst", "x"], "--podlist"),
        (["exprter"], "exporter"),
        (["tpo"], "top"),
        (["doctr", "-k"], "doctor"),
        (["top", "--sort", "memroy"], "memory"),
    ],
    ids=" ".join,
)
def test_a_typo_gets_a_suggestion(arguments: list[str], meant: str) -> None:
    said = complaint(*arguments)
    assert f"did you mean {meant}" in said, said


@pytest.mark.parametrize(
    "arguments", [["xyzzy"], ["exporter", "--xyzzy"], ["exporter", "-q"], ["top", "--sort", "colour"]], ids=" ".join
)
def test_what_is_like_nothing_gets_none(arguments: list[str]) -> None:
    assert "did you mean" not in complaint(*arguments)


def test_an_option_before_the_command_is_said_to_belong_behind_it() -> None:
    assert "write podgpu COMMAND --telemetry" in complaint("--telemetry", "simulated", "exporter")


def test_a_short_option_with_its_value_is_no_typo() -> None:
    """-c5s is -c with its value, as click has always taken it."""
    context = command_named("exporter").make_context("exporter", normalise(["-c5s", "-d=g:0"], EXPORTER_OPTIONS))
    assert (context.params["collect_interval"], context.params["devices"]) == (5.0, "g:0")
