"""`podgpu autoscale` tells KEDA and the HPA what a workload's pods do on their GPUs."""

from __future__ import annotations

from typing import Any

import click

from podgpu.cli.autoscale_options import AUTOSCALE_OPTIONS, AUTOSCALE_PROMETHEUS, AUTOSCALE_SCRAPE
from podgpu.cli.cluster import check_backend, freshness
from podgpu.cli.help import podgpu_command
from podgpu.cli.params import naming_variable, with_options
from podgpu.compose.autoscale import autoscale_settings, run_autoscale, unregister
from podgpu.compose.process import configure_logging
from podgpu.web.app import PROBE_OPTION
from podgpu.web.sockets import parse_address


@podgpu_command(
    "autoscale",
    (
        "podgpu autoscale --discover-kubernetes podgpu/app.kubernetes.io/name=podgpu --keda-namespaces serving",
        "for a KEDA on this machine, fed by the exporters themselves",
    ),
    (
        "podgpu autoscale --prometheus prometheus:9090 --api-address :6443 --api-service podgpu/podgpu-autoscale",
        "the custom metrics API behind the Service podgpu-autoscale, with a certificate of its own",
    ),
    (
        "podgpu autoscale --unregister --api-service podgpu/podgpu-autoscale",
        "remove its APIServices, before anything else of it is uninstalled",
    ),
)
@with_options(AUTOSCALE_OPTIONS)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Scale on GPUs: KEDA's external scaler and the custom metrics API, from the figures of all nodes.

    Asks a Prometheus server, or scrapes the exporters itself: exactly one of --prometheus, --scrape and
    --discover-kubernetes. Needs the API server, which knows which pods run.
    """
    configure_logging(options["log_format"], options["debug"])
    with naming_variable(ctx, "probe_address"):
        probe_address = parse_address(options["probe_address"], PROBE_OPTION)
    if options["unregister"]:
        unregister(options)
        return
    settings = autoscale_settings(options, *freshness(ctx, options))
    check_backend(ctx, options, (AUTOSCALE_PROMETHEUS, AUTOSCALE_SCRAPE))
    run_autoscale(options, settings, probe_address)
