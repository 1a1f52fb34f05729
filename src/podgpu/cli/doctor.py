"""`podgpu doctor`: checks this node and prints what to fix."""

from __future__ import annotations

from typing import Any

import click

from podgpu.cli.config_file import merge_config_file
from podgpu.cli.examine import CONFIG_FILE, NodeExamination
from podgpu.cli.exporter import check_options, list_ignored_options, parse_host_engine
from podgpu.cli.options import EXPORTER_OPTIONS, is_set, make_command, options_of
from podgpu.cli.terminal import print_out, quiet_logs, wants_colour
from podgpu.doctor.autoscale import check_autoscaling
from podgpu.doctor.findings import Finding, Level, as_json, as_text, count, note, wrong
from podgpu.errors import UsageError


@make_command(
    "doctor",
    options_of("doctor", (option.flag for option in EXPORTER_OPTIONS), hidden=True),
    ("podgpu doctor", "check that podgpu can read the GPUs and find their pods"),
    ("podgpu doctor -k --allocation kubelet", "check `podgpu exporter` with these options"),
    ("podgpu doctor --autoscale", "check the GPU metrics of this cluster's HPAs"),
)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> int:
    """Check this node: driver, GPUs, permissions, kubelet, mapping of GPUs to pods.

    Accepts every option and variable of the exporter (see --help-all), and checks whether they work here. The exit
    code is 0 if nothing is wrong, otherwise 1.
    """
    if options["autoscale"]:
        with quiet_logs(options["debug"]):
            return _print(options, check_autoscaling(options["kubeconfig"]))
    kubernetes_is_set = is_set(ctx, "kubernetes")
    options, config_findings = _merge_config_file(ctx, options)
    check_options(options)
    options = parse_host_engine(ctx, options)
    ignored = (*list_ignored_options(ctx), *options["config"].ignored)
    examination = NodeExamination(options, options["kubernetes"] or not kubernetes_is_set)
    with quiet_logs(options["debug"]):
        findings = examination.run()
    return _print(options, [*config_findings, *(note("options", text) for text in ignored), *findings])


def _print(options: dict[str, Any], findings: list[Finding]) -> int:
    print_out((as_json(findings) if options["json"] else as_text(findings, wants_colour())) + "\n")
    return 1 if count(findings, Level.WRONG) else 0


def _merge_config_file(ctx: click.Context, options: dict[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """Merges the configuration file. An invalid file becomes a finding, and the other checks run without it."""
    path = options["config_file"]
    try:
        merged = merge_config_file(ctx, options)
    except UsageError as e:
        if not path:
            raise
        return merge_config_file(ctx, {**options, "config_file": ""}), [wrong(CONFIG_FILE, str(e))]
    return merged, []
