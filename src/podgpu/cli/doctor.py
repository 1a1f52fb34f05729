"""`podgpu doctor` checks this node and says what is right, what is wrong and what to do."""

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
from podgpu.compose.examination import CONFIG_FILE, NodeExamination, autoscaling_findings
from podgpu.doctor.findings import Finding, Level, as_json, as_text, count, wrong
from podgpu.errors import UsageError

_OTHERWISE = {"kubernetes": {"help": "Pod labels are wanted. Default: the kubelet is asked if its socket exists."}}

DOCTOR_OPTIONS = (
    *exporter_options((option.flag for option in EXPORTER_OPTIONS), _OTHERWISE),
    Option(
        "probe-switches",
        default="false",
        help="Measure whether a GPU's busy register is right (--usage-from exact relies on it): two loads of its"
        " own share one idle GPU of every architecture for half a minute. Needs CAP_SYS_ADMIN, and PyTorch or"
        " cuda-python.",
        kind="bool",
        ours=True,
    ),
    Option(
        "autoscale",
        default="false",
        help="Look at the cluster instead, as its autoscalers see it: what every HPA and ScaledObject that asks for a"
        " metric of podgpu's would be told, and why not. Asks the API server.",
        kind="bool",
        ours=True,
    ),
    Option("json", default="false", help="Print the findings as JSON.", kind="bool", ours=True),
)


@podgpu_command(
    "doctor",
    ("podgpu doctor", "can podgpu read the GPUs here and name their pods? If not: what to do"),
    ("podgpu doctor -k --allocation kubelet", "check what `podgpu exporter` would do with these options"),
    ("podgpu doctor --autoscale", "what would this cluster's HPAs be told of GPUs, and why not?"),
)
@with_options(DOCTOR_OPTIONS)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> int:
    """Check this node with the exporter's own options and variables: driver, GPUs, permissions, kubelet, mapping.

    Takes every option of the exporter, and says whether the exporter can do here what they ask for. The exit code is 0
    when nothing is wrong, 1 when something is.
    """
    if options["autoscale"]:
        with quiet_logs(options["debug"]):
            return _told(options, autoscaling_findings(options["kubeconfig"]))
    kubernetes_said = ctx.get_parameter_source("kubernetes") is not ParameterSource.DEFAULT
    options, of_file = _with_config_file(ctx, options)
    check_options(ctx, options)
    options = with_host_engine(ctx, options)
    ignored = (*without_effect(ctx), *of_file_without_effect(options))
    examination = NodeExamination(options, partial(naming_variable, ctx), kubernetes_said)
    with closing(examination), quiet_logs(options["debug"]):
        findings = examination.findings(of_file, ignored)
    return _told(options, findings)


def _told(options: dict[str, Any], findings: list[Finding]) -> int:
    print_out((as_json(findings) if options["json"] else as_text(findings, wants_colour())) + "\n")
    return 1 if count(findings, Level.WRONG) else 0


def _with_config_file(ctx: click.Context, options: dict[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """What keeps the exporter from starting, the doctor is there to say; the rest is judged without the file."""
    path = options["config_file"]
    try:
        merged = with_config_file(ctx, options)
    except UsageError as e:
        if not path:
            raise
        return with_config_file(ctx, {**options, "config_file": ""}), [wrong(CONFIG_FILE, str(e))]
    return merged, []
