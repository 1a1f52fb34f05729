"""Checks that the flags and variables of shipped containers are options of podgpu, with valid
values.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

import click
import pytest

from podgpu.cli.main import cli
from tests.deploy.chart import Object, pods_of

# These are read without an option (NODE_NAME), by the chart's own arguments, or by the container
# runtime.
OTHERS = {
    "NODE_NAME",
    "HOST_IP",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "NVIDIA_MIG_MONITOR_DEVICES",
    "LD_LIBRARY_PATH",
}


def parse(
    command: str, arguments: Sequence[str], variables: Mapping[str, str], patch: pytest.MonkeyPatch
) -> None:
    """Parses the options without running the command. Raises click's error for an invalid one."""
    for name in [
        name
        for name in os.environ
        if name.startswith(("DCGM_", "PODGPU_", "KUBERNETES_", "NVIDIA_"))
    ]:
        patch.delenv(name)
    for name, value in variables.items():
        patch.setenv(name, value)
    _find(command).make_context(command, list(arguments))


def _find(command: str) -> click.Command:
    found = cli.get_command(click.Context(cli), command)
    assert found is not None
    return found


def known(command: str) -> set[str]:
    return {str(option.envvar) for option in _find(command).params if option.envvar} | OTHERS


def ours(rendered: list[Object]) -> Iterator[Object]:
    for spec in pods_of(rendered):
        yield from (one for one in spec["containers"] if one["name"] == "podgpu")


def check_options(one: Object, patch: pytest.MonkeyPatch, where: str) -> None:
    program, command = one["command"]
    variables = {
        variable["name"]: variable["value"] for variable in one["env"] if "value" in variable
    }
    assert program == "podgpu", where
    assert {variable["name"] for variable in one["env"]} <= known(command), where
    try:
        parse(command, one.get("args", ()), variables, patch)
    except click.UsageError as e:
        raise AssertionError(f"{where}: podgpu {command}: {e.format_message()}") from e
