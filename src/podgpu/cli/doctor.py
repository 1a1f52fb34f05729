"""`podgpu doctor`: checks this node and says what is right, what is wrong and what to do."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import click
from click.core import ParameterSource

from podgpu.allocation.kubelet import KubeletAllocation
from podgpu.catalog.counters import Counter, shipped_counters
from podgpu.cli.exporter import read_counters
from podgpu.cli.logs import configure_logging
from podgpu.cli.option_table import EXPORTER_OPTIONS, Option
from podgpu.cli.params import with_options
from podgpu.cli.telemetries import open_telemetry
from podgpu.device_selection import parse_selection
from podgpu.doctor.examine import DEADLINE, PROC, SYSFS, Question, examine
from podgpu.doctor.findings import Finding, Level, as_json, as_text, count, wrong
from podgpu.errors import UsageError

_SHARED = (
    "collectors",
    "kubernetes",
    "devices",
    "no-hostname",
    "debug",
    "pod-resources-kubelet-socket",
    "nvidia-resource-names",
    "telemetry",
)
_HELP = {"kubernetes": "Pod labels are wanted. Not said: the kubelet is asked where its socket exists."}


def _options() -> list[Option]:
    rows = {option.flag: option for option in EXPORTER_OPTIONS}
    return [replace(rows[flag], help=_HELP.get(flag, rows[flag].help)) for flag in _SHARED]


DOCTOR_OPTIONS = (
    *_options(),
    Option("path-proc", default=PROC, help="Where the host's /proc is.", ours=True),
    Option("path-sysfs", default=SYSFS, help="Where the host's /sys is.", ours=True),
    Option("json", default="false", help="Print the findings as JSON.", kind="bool", ours=True),
)


@click.command("doctor", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@with_options(DOCTOR_OPTIONS)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> int:
    """Check this node with the exporter's own options and variables: driver, GPUs, permissions, kubelet, mapping.

    The exit code is 0 when nothing is wrong, 1 when something is.
    """
    kubernetes_said = ctx.get_parameter_source("kubernetes") is not ParameterSource.DEFAULT
    telemetry = open_telemetry(options["telemetry"])
    with _logs(options["debug"]):
        counters, findings = _counters(options["collectors"])
        findings += examine(_question(options, counters, kubernetes_said), telemetry)
    _print(as_json(findings) if options["json"] else as_text(findings, _wants_colour()))
    return 1 if count(findings, Level.WRONG) else 0


def _question(options: dict[str, Any], counters: tuple[Counter, ...], kubernetes_said: bool) -> Question:
    wanted = options["kubernetes"] or not kubernetes_said
    names = frozenset(name.strip() for name in options["nvidia_resource_names"].split(",") if name.strip())
    # The kubelet's own deadline is the shorter one: its message says more than the worker's.
    kubelet = KubeletAllocation(options["pod_resources_kubelet_socket"], names, DEADLINE * 0.8) if wanted else None
    return Question(
        counters=counters,
        selection=parse_selection(options["devices"]),
        kubelet=kubelet,
        kubelet_required=options["kubernetes"],
        no_hostname=options["no_hostname"],
        proc=options["path_proc"],
        sysfs=options["path_sysfs"],
        environment=dict(os.environ),
    )


def _counters(chosen: str) -> tuple[tuple[Counter, ...], list[Finding]]:
    """A counter file that keeps the exporter from starting is what the doctor is there to say."""
    try:
        return read_counters(chosen)[0], []
    except UsageError as e:
        return shipped_counters("default") or (), [wrong("counters", str(e))]


@contextmanager
def _logs(debug: bool) -> Iterator[None]:
    """What the exporter would log, the findings say; --debug shows both."""
    before = logging.root.manager.disable
    if debug:
        configure_logging("text", debug)
    else:
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _wants_colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _print(text: str) -> None:
    """In a terminal that knows no arrows they become question marks, not an error."""
    encoding = sys.stdout.encoding or "utf-8"
    click.echo(text.encode(encoding, "replace").decode(encoding))
