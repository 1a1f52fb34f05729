"""Whether the flags and variables of a container that is shipped are options of podgpu, with values they take."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

import click
import pytest

from podgpu.cli.autoscale import AUTOSCALE_OPTIONS
from podgpu.cli.cluster import CLUSTER_OPTIONS
from podgpu.cli.enrich import ENRICH_OPTIONS
from podgpu.cli.exporter_options import EXPORTER_OPTIONS
from podgpu.cli.hook import HOOK_OPTIONS
from podgpu.cli.options import Option, normalize_arguments, with_options
from tests.deploy.chart import Object, pods_of

OPTIONS: Mapping[str, Sequence[Option]] = {
    "exporter": EXPORTER_OPTIONS,
    "cluster": CLUSTER_OPTIONS,
    "autoscale": AUTOSCALE_OPTIONS,
    "enrich": ENRICH_OPTIONS,
    "hook": HOOK_OPTIONS,
}
OTHERS = {
    "NODE_NAME",
    "HOST_IP",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "NVIDIA_MIG_MONITOR_DEVICES",
    "LD_LIBRARY_PATH",
}
"""Read by podgpu without an option (NODE_NAME), by the chart's own arguments, or by the container runtime."""


def parse(command: str, arguments: Sequence[str], variables: Mapping[str, str], patch: pytest.MonkeyPatch) -> None:
    """As the command would read them, up to the point where it would run. Raises click's error for a wrong one."""
    for name in [name for name in os.environ if name.startswith(("DCGM_", "PODGPU_", "KUBERNETES_", "NVIDIA_"))]:
        patch.delenv(name)
    for name, value in variables.items():
        patch.setenv(name, value)
    options = OPTIONS[command]
    made = click.command(command)(with_options(options)(lambda **_: None))
    made.make_context(command, normalize_arguments(list(arguments), options))


def known(command: str) -> set[str]:
    return {option.env for option in OPTIONS[command] if option.env} | OTHERS


def ours(rendered: list[Object]) -> Iterator[Object]:
    for spec in pods_of(rendered):
        yield from (one for one in spec["containers"] if one["name"] == "podgpu")


def check_options(one: Object, patch: pytest.MonkeyPatch, where: str) -> None:
    """Of one of our containers; `where` it was found is told if they are wrong."""
    program, command = one["command"]
    variables = {variable["name"]: variable["value"] for variable in one["env"] if "value" in variable}
    assert program == "podgpu", where
    assert {variable["name"] for variable in one["env"]} <= known(command), where
    try:
        parse(command, one.get("args", ()), variables, patch)
    except click.UsageError as e:
        raise AssertionError(f"{where}: podgpu {command}: {e.format_message()}") from e
