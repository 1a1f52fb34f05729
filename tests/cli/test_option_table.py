"""Every row of dcgm-exporter's option table, and the messages about wrong options."""

from __future__ import annotations

import csv
import io
import json
import logging
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pynvml
import pytest

from podgpu import __version__
from podgpu.cli.exporter import command
from podgpu.cli.main import COMMANDS, cli, run
from podgpu.cli.options import EXPORTER_OPTIONS, Option, normalize_arguments, split_list
from tests.host.guard import NODE_PATHS

TABLE = Path(__file__).parents[1] / "data" / "dcgm_exporter_options.csv"
ROWS: list[dict[str, str]] = list(csv.DictReader(TABLE.read_text(encoding="utf-8").splitlines()))
OURS: Mapping[str, Option] = {option.flag: option for option in EXPORTER_OPTIONS}
VARIABLES = [option.env for option in EXPORTER_OPTIONS if option.env]

QUICK = ["exporter", "--once", "--telemetry", "simulated:1xT4", "-c", "100"]
OTHER_VALUES = {
    "collectors": "dcp",
    "address": "127.0.0.1:0",
    "collect-interval": "101",
    "configmap-data": "monitoring:counters",
    "remote-hostengine-info": "hostengine:5555",
    "switch-devices": "g",
    "cpu-devices": "i:0-3",
    "devices": "g:0",
    "gpu-bind-unbind-poll-interval": "2s",
    "dcgm-log-level": "DEBUG",
    "dump-retention": "48",
    "pod-resources-kubelet-socket": "/nowhere/kubelet.sock",
    "web-config-file": str(TABLE.with_name("web_config.yml")),
    "config-file": str(TABLE.with_name("config_file.yaml")),
    "watch-max-keep-age": "0s",
    "watch-max-keep-samples": "3",
    "max-concurrent-scrapes": "2",
}
"""Where "/somewhere" would not do."""

rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row["flag"])


def other_value(row: Mapping[str, str]) -> str:
    """Returns a valid value that is not the default."""
    if row["flag"] in OTHER_VALUES:
        return OTHER_VALUES[row["flag"]]
    if row["kind"] == "bool":
        return "false" if row["default"] == "true" else "true"
    if row["kind"] == "duration":
        return "200000"
    if row["kind"].startswith("choice:"):
        return row["kind"].rpartition("|")[2]
    return "/somewhere"


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def warned(self) -> list[str]:
        """Returns the warnings about options without effect, from text or JSON logs."""
        return [line for line in map(_message, self.err.splitlines()) if " has no effect: " in line]

    @property
    def complaint(self) -> str:
        """Returns the error message. Checks that it is one line without a traceback."""
        (line,) = (line for line in self.err.splitlines() if line.startswith("podgpu: "))
        assert "Traceback" not in self.err
        return line


def _message(line: str) -> str:
    return json.loads(line)["msg"] if line.startswith("{") else line.partition("WARNING ")[2]


@contextmanager
def environment(variables: Mapping[str, str], keep: Iterable[str] = ()) -> Iterator[None]:
    """Sets these variables and removes all other variables of the exporter."""
    with pytest.MonkeyPatch.context() as patch:
        for name in {*VARIABLES, "NODE_NAME"}.difference(keep):
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


def execute(arguments: list[str], **variables: str) -> Ran:
    """Runs `podgpu ...` in this process, with these variables and no others of the exporter."""
    out, err = (
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)
    )
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with environment(variables, NODE_PATHS), redirect_stdout(out), redirect_stderr(err):
        try:
            code = run(arguments)
        finally:
            root.handlers[:], root.level = handlers, level
    return Ran(code, out.buffer.getvalue().decode(), err.buffer.getvalue().decode())


def parsed(arguments: list[str], **variables: str) -> dict[str, Any]:
    """Returns the parsed options. Raises click's error."""
    with environment(variables):
        return command.make_context("exporter", normalize_arguments(arguments)).params


# --- the table


def test_every_option_is_there_as_dcgm_exporter_has_it() -> None:
    for row in ROWS:
        ours, kind = OURS[row["flag"]], row["kind"]
        assert (ours.short, ours.env) == (row["short"] or row["alias"], row["env"]), row["flag"]
        # podgpu reads the file of -f, or the shipped copy if it is missing. It uses an address only
        # with -r.
        if row["flag"] not in ("collectors", "remote-hostengine-info"):
            assert ours.default == row["default"], row["flag"]
        kind = "milliseconds" if kind == "duration" else kind
        our_kind = "text" if ours.kind.isupper() else ours.kind
        assert our_kind == kind if ours.works else (our_kind == "bool") == (kind == "bool"), row[
            "flag"
        ]


def test_nothing_else_claims_to_be_dcgm_exporters() -> None:
    theirs = {row["flag"] for row in ROWS}
    ours = {
        option.flag
        for option in EXPORTER_OPTIONS
        if not option.env or option.env.startswith(("PODGPU_", "OTEL_"))
    }
    assert {option.flag for option in EXPORTER_OPTIONS} - ours == theirs
    assert all(option.works for option in EXPORTER_OPTIONS if option.flag in ours)


@rows
def test_flag_and_variable_mean_the_same(row: dict[str, str]) -> None:
    name, value = OURS[row["flag"]].parameter, other_value(row)
    default = parsed([])[name]
    by_flag = parsed([f"--{row['flag']}={value}"])[name]
    assert by_flag != default
    assert parsed([], **{row["env"]: value})[name] == by_flag
    for short in filter(None, (row["short"], row["alias"])):
        assert parsed([f"-{short}={value}"])[name] == by_flag


@rows
def test_flag_goes_before_variable_before_default(row: dict[str, str]) -> None:
    name, value = OURS[row["flag"]].parameter, other_value(row)
    default = parsed([])[name]
    if isinstance(default, bool):
        assert (
            parsed([f"--{row['flag']}={str(default).lower()}"], **{row["env"]: value})[name]
            is default
        )
    elif row["default"] and row["flag"] not in ("collectors", "remote-hostengine-info"):
        assert parsed([f"--{row['flag']}", row["default"]], **{row["env"]: value})[name] == default
    assert parsed([], **{row["env"]: ""})[name] == default


# --- the real command, once with all flags and once with all variables, because a run takes half a
# second


@pytest.mark.parametrize("way", ["flags", "variables"])
def test_the_command_accepts_them_all_and_warns_of_those_that_do_nothing(way: str) -> None:
    if way == "flags":
        ran = execute([*QUICK, *(f"--{row['flag']}={other_value(row)}" for row in ROWS)])
    else:
        ran = execute(QUICK[: QUICK.index("-c")], **{row["env"]: other_value(row) for row in ROWS})
    assert ran.code == 0, ran.err
    assert "DCGM_FI_DEV_GPU_TEMP{" in ran.out
    idle = [f"--{option.flag} ({option.env})" for option in EXPORTER_OPTIONS if not option.works]
    warned = [line.partition(")")[0] + ")" for line in ran.warned if line.startswith("--")]
    assert sorted(warned) == sorted(idle)


def test_what_is_set_to_its_default_is_not_warned_about() -> None:
    set_to_default = [row for row in ROWS if row["default"] and row["flag"] != "collectors"]
    flags = [f"--{row['flag']}={row['default']}" for row in set_to_default]
    ran = execute(
        [*QUICK, *flags, "-c", "100"], **{row["env"]: row["default"] for row in set_to_default}
    )
    assert ran.code == 0, ran.err
    assert ran.warned == []
    # An explicit -r is reported even if its address is the default.
    assert "-r localhost:5555 is ignored" in ran.err


# --- Go's flag syntax


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["-c=1000"], "collect_interval", 1.0),
        (["-collect-interval=5s"], "collect_interval", 5.0),
        (["-collectors", "x.csv"], "collectors", "x.csv"),
        (["-collectors=x.csv"], "collectors", "x.csv"),
        (["-k"], "kubernetes", True),
        (["--k"], "kubernetes", True),
        (["--k=false"], "kubernetes", False),
        (["--c=1000"], "collect_interval", 1.0),
        (["--c", "1000"], "collect_interval", 1.0),
        (["--f", "x.csv"], "collectors", "x.csv"),
        (["-k", "-f", "x.csv"], "kubernetes", True),
        (["-k=false"], "kubernetes", False),
        (["--kubernetes=false"], "kubernetes", False),
        (["-kubernetes=false"], "kubernetes", False),
        (["--kubernetes=T"], "kubernetes", True),
        (["--kubernetes=0"], "kubernetes", False),
        (["-rbmn"], "replace_blanks_in_model_name", True),
        (["-d=i:0,2-4"], "devices", "i:0,2-4"),
        (
            ["--nvidia-resource-names", "a,b", "-nvidia-resource-names=c"],
            "nvidia_resource_names",
            "a,b,c",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_go_habits(arguments: list[str], name: str, value: object) -> None:
    assert parsed(arguments)[name] == value


def test_a_variable_with_a_list_may_contain_spaces() -> None:
    name = "kubernetes_pod_label_allowlist_regex"
    assert (
        parsed([], DCGM_EXPORTER_KUBERNETES_POD_LABEL_ALLOWLIST_REGEX="^a b$,c")[name] == "^a b$,c"
    )


# --- errors are reported on one line


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["-k=maybe"], ["--kubernetes", "'maybe'"]),
        (["-c", "soon"], ["--collect-interval", "'soon'"]),
        (["-c", "99"], ["--collect-interval", "99", "100 ms"]),
        (["-c", "-5"], ["--collect-interval", "'-5'"]),
        (["--allocation-interval", "25h"], ["--allocation-interval", "25h", "24 h"]),
        (["--log-format", "xml"], ["--log-format", "'xml'", "'json'"]),
        (["-a", "9400"], ["-a", "'9400'", ":9400"]),
        (["-d", "x"], ["-d", "'x'", "g:0,2-4"]),
        (["-d", "g:7"], ["-d g:7", "this node has no GPU 7"]),
        (["-f", "/nowhere/counters.csv"], ["-f /nowhere/counters.csv", "does not exist"]),
        (["--telemetry", "crystal-ball"], ["--telemetry", "'crystal-ball'", "simulated"]),
        (["--telemetry", "nvml:0"], ["--telemetry nvml", "'0'"]),
        (["-r", "gpu-1:70000"], ["-r", "'gpu-1:70000'", "HOST:PORT"]),
        (["-s", "x"], ["-s", "'x'", "NVSwitches"]),
        (["--web-config-file", "/nowhere"], ["--web-config-file /nowhere does not exist"]),
        (["--telemetry", "simulated:2xH1000"], ["'H1000'", "H100"]),
        (["--telemetry", "simulated:1xT4/7x1g.10gb"], ["T4", "MIG"]),
        (["--collector", "x"], ["--collector", "--collectors"]),
        (["--max-concurrent-scrapes", "0"], ["in the range"]),
        (["--web-read-timeout", "0s"], ["must be from 100"]),
        (["extra"], ["extra"]),
        (["-c"], ["-c"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_wrong_value_is_named(arguments: list[str], names: list[str]) -> None:
    ran = execute([*QUICK, *arguments])
    assert (ran.code, ran.out) == (2, "")
    for name in names:
        assert name in ran.complaint


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DCGM_EXPORTER_KUBERNETES", "maybe"),
        ("DCGM_EXPORTER_INTERVAL", "soon"),
        ("DCGM_EXPORTER_DEVICES_STR", "x"),
        ("PODGPU_TELEMETRY", "crystal-ball"),
        ("DCGM_REMOTE_HOSTENGINE_INFO", "gpu-1:70000"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, value: str) -> None:
    arguments = ["exporter", "--once"] + ([] if variable == "PODGPU_TELEMETRY" else QUICK[2:4])
    ran = execute(arguments, **{variable: value})
    assert (ran.code, ran.out) == (2, "")
    assert value in ran.complaint
    assert variable in ran.complaint


@pytest.fixture
def no_driver() -> Iterator[None]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield
    else:
        pynvml.nvmlShutdown()
        pytest.skip("this machine has a driver")


@pytest.mark.usefixtures("no_driver")
def test_an_empty_list_contains_no_empty_name() -> None:
    """Otherwise, --savings-skip-namespaces= would skip everything without a namespace."""
    assert split_list("") == []
    assert split_list(" kube-system, ,ml,") == ["kube-system", "ml"]


def test_no_driver_is_not_a_usage_error() -> None:
    ran = execute(["exporter", "--once", "-c", "100"])
    assert ran.code == 1
    assert "no GPU could be read" in ran.complaint
    assert "podgpu_exporter_source_up" in ran.out


@pytest.mark.parametrize("name", ["-v", "--version", "-version"])
def test_the_version_as_in_dcgm_exporter(name: str) -> None:
    ran = execute(["exporter", "-k", name])
    assert (ran.code, ran.out) == (0, execute(["--version"]).out)
    assert ran.out.startswith(f"podgpu {__version__} (")


def test_help_shows_common_options_and_help_all_every_option() -> None:
    short, full = execute(["exporter", "--help"]), execute(["exporter", "--help-all"])
    assert (short.code, full.code) == (0, 0)
    for option in EXPORTER_OPTIONS:
        assert (f"--{option.flag}" in short.out.split()) == option.common, option.flag
        assert f"--{option.flag}" in full.out
        assert not option.works or option.env in "".join(full.out.split())
    assert sum(option.common for option in EXPORTER_OPTIONS) <= 40


def test_examples_in_help_are_valid() -> None:
    for name in COMMANDS:
        lines = execute([name, "--help"]).out.splitlines()
        examples = [
            line.split("$ podgpu ", 1)[1] for line in lines if line.strip().startswith("$ podgpu ")
        ]
        assert examples, name
        for example in examples:
            command_name, *arguments = shlex.split(re.sub(r" > [\w.]+$", "", example))
            other = cli.get_command(click.Context(cli), command_name)
            assert other is not None
            other.make_context(command_name, normalize_arguments(arguments))


def test_an_unknown_command_is_a_usage_error() -> None:
    ran = execute(["exprter"])
    assert ran.code == 2
    assert "exprter" in ran.complaint
    assert "Did you mean 'exporter'?" in ran.complaint
