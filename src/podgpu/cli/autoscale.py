"""`podgpu autoscale`: GPU metrics of workloads for KEDA and the HPA."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import click

from podgpu.cli.cluster import PROMETHEUS_OPTIONS, SCRAPE_OPTIONS, VIEW_OPTIONS, check_backend, freshness
from podgpu.cli.exporter_options import pick_options
from podgpu.cli.options import AUTOSCALING, COMMON, Option, make_command, naming_variable
from podgpu.compose.autoscale import autoscale_settings, run_autoscale, unregister
from podgpu.compose.process import configure_logging
from podgpu.web.app import PROBE_OPTION
from podgpu.web.sockets import parse_address

_FROM_VIEW = ("node-label", "interval", "stale-after", "drop-after", "used-field")


def _option(flag: str, default: str, text: str, kind: str = "text", *, group: str = AUTOSCALING) -> Option:
    return Option(flag, env=_variable(flag), default=default, help=text, kind=kind, ours=True, group=group)


def _variable(flag: str) -> str:
    return f"PODGPU_AUTOSCALE_{flag.replace('-', '_').upper()}"


def _rename_variables(options: Iterable[Option]) -> tuple[Option, ...]:
    """PODGPU_CLUSTER_* becomes PODGPU_AUTOSCALE_*, so that both commands can share an environment."""
    return tuple(
        replace(option, env=_variable(option.flag)) if option.env.startswith("PODGPU_CLUSTER_") else option
        for option in options
    )


AUTOSCALE_PROMETHEUS = _rename_variables(PROMETHEUS_OPTIONS)
AUTOSCALE_SCRAPE = _rename_variables(option for option in SCRAPE_OPTIONS if option.flag != "history-dir")
AUTOSCALE_OPTIONS: tuple[Option, ...] = (
    _option("probe-address", ":9410", "Plain HTTP address for probes and its own metrics.", group=COMMON),
    _option(
        "keda-address",
        "127.0.0.1:9411",
        "Address of KEDA's external scaler (gRPC), or none. Other than local addresses need client certificates.",
    ),
    _option("keda-cert-file", "", "Certificate (PEM) of that listener; reloaded when it changes."),
    _option("keda-key-file", "", "Key of --keda-cert-file."),
    _option("keda-client-ca-file", "", "CA of KEDA's client certificate."),
    _option("keda-client-name", "", "Accepted names in client certificates, NAME,NAME,…. Default: any."),
    _option("keda-namespaces", "", "Namespaces that are answered without client certificates, NAME,NAME,…."),
    _option("api-address", "none", "Address of the custom metrics API (HTTPS), such as :6443, or none."),
    _option("api-cert-file", "", "Its certificate (PEM) for SERVICE.NAMESPACE.svc; reloaded when it changes."),
    _option("api-key-file", "", "Key of --api-cert-file."),
    _option(
        "api-service",
        "",
        "NAMESPACE/NAME of its Service: podgpu creates its own certificate and updates its APIServices.",
    ),
    _option("unregister", "false", "Remove podgpu's APIServices and exit. Do this before uninstalling.", "bool"),
    _option("external-metrics", "false", "Also serve the external metrics API, which KEDA usually provides.", "bool"),
    _option("longest-window", "10m", "Longest window that can be requested; samples are kept that long.", "duration"),
    *AUTOSCALE_PROMETHEUS,
    *AUTOSCALE_SCRAPE,
    *_rename_variables(option for option in VIEW_OPTIONS if option.flag in _FROM_VIEW),
    *pick_options(("kubeconfig", "debug", "log-format")),
)


@make_command(
    "autoscale",
    AUTOSCALE_OPTIONS,
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
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Provide GPU metrics to KEDA (external scaler) and to the HPA (custom metrics API).

    Give exactly one of --prometheus, --scrape and --discover-kubernetes. Needs the API server for the running pods.
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
