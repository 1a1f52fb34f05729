"""`podgpu doctor`: checks this node or the cluster's autoscalers."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any

import click
from click.core import ParameterSource

from podgpu.cli.config_file import of_file_without_effect, with_config_file
from podgpu.cli.exporter import check_options, with_host_engine, without_effect
from podgpu.cli.help import podgpu_command
from podgpu.cli.option_table import EXPORTER_OPTIONS, exporter_options
from podgpu.cli.params import Option, naming_variable, with_options
from podgpu.cli.terminal import print_out, quiet_logs, wants_colour
from podgpu.doctor.autoscale import check_autoscaling
from podgpu.doctor.examine import CONFIG_FILE, NodeExamination
from podgpu.doctor.findings import Finding, Level, as_json, as_text, count, wrong
from podgpu.errors import UsageError

_OTHERWISE = {"kubernetes": {"help": "Check pod labels. Default: if the kubelet's socket exists."}}

DOCTOR_OPTIONS = (
    *exporter_options((option.flag for option in EXPORTER_OPTIONS), _OTHERWISE),
    Option(
        "autoscale",
        default="false",
        help="Check the cluster instead: the values that HPAs and ScaledObjects get for podgpu's metrics.",
        kind="bool",
        ours=True,
    ),
    Option("json", default="false", help="Print the findings as JSON.", kind="bool", ours=True),
)


@podgpu_command(
    "doctor",
    ("podgpu doctor", "check the driver, GPUs, kubelet and pod mapping of this node"),
    ("podgpu doctor -k --allocation kubelet", "check what `podgpu exporter` would do with these options"),
    ("podgpu doctor --autoscale", "check the GPU metrics of this cluster's HPAs and ScaledObjects"),
)
@with_options(DOCTOR_OPTIONS)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> int:
    """Check this node with the exporter's own options and variables: driver, GPUs, permissions, kubelet, mapping.

    Takes every option of the exporter. The exit code is 0 without problems, otherwise 1.
    """
    if options["autoscale"]:
        with quiet_logs(options["debug"]):
            return _print(options, check_autoscaling(options["kubeconfig"]))
    kubernetes_is_set = ctx.get_parameter_source("kubernetes") is not ParameterSource.DEFAULT
    options, config_findings = _with_config_file(ctx, options)
    check_options(ctx, options)
    options = with_host_engine(ctx, options)
    ignored = (*without_effect(ctx), *of_file_without_effect(options))
    examination = NodeExamination(options, partial(naming_variable, ctx), kubernetes_is_set)
    with closing(examination), quiet_logs(options["debug"]):
        findings = examination.run(config_findings, ignored)
    return _print(options, findings)


def _print(options: dict[str, Any], findings: list[Finding]) -> int:
    print_out((as_json(findings) if options["json"] else as_text(findings, wants_colour())) + "\n")
    return 1 if count(findings, Level.WRONG) else 0


def _with_config_file(ctx: click.Context, options: dict[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """Reports errors of the configuration file as findings, and continues without it."""
    path = options["config_file"]
    try:
        merged = with_config_file(ctx, options)
    except UsageError as e:
        if not path:
            raise
        return with_config_file(ctx, {**options, "config_file": ""}), [wrong(CONFIG_FILE, str(e))]
    return merged, []
