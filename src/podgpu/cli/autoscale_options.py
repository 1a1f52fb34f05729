"""This module lists every option of `podgpu autoscale`, once: its own, and those of `podgpu cluster` about whom to ask
and when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from podgpu.cli.cluster_options import PROMETHEUS_OPTIONS, SCRAPE_OPTIONS, VIEW_OPTIONS
from podgpu.cli.option_table import exporter_options
from podgpu.cli.params import Option

_FROM_VIEW = ("node-label", "interval", "stale-after", "drop-after", "used-field")


def _option(flag: str, default: str, text: str, kind: str = "text") -> Option:
    return Option(flag, "", _variable(flag), default, text, kind, ours=True)


def _variable(flag: str) -> str:
    return f"PODGPU_AUTOSCALE_{flag.replace('-', '_').upper()}"


def _as_ours(options: Iterable[Option]) -> tuple[Option, ...]:
    """With a variable of this command's: both may run in one environment."""
    return tuple(
        replace(option, env=_variable(option.flag)) if option.env.startswith("PODGPU_CLUSTER_") else option
        for option in options
    )


AUTOSCALE_PROMETHEUS = _as_ours(PROMETHEUS_OPTIONS)
AUTOSCALE_SCRAPE = _as_ours(option for option in SCRAPE_OPTIONS if option.flag != "history-dir")

KEDA_OPTIONS: tuple[Option, ...] = (
    _option(
        "keda-address",
        "127.0.0.1:9411",
        "Address of KEDA's external scaler (gRPC); none: it is off. Beyond this machine only with client certificates.",
    ),
    _option("keda-cert-file", "", "Certificate of that listener (PEM); read again when it changes."),
    _option("keda-key-file", "", "Its key."),
    _option("keda-client-ca-file", "", "Authorities of the certificates that KEDA has to show."),
    _option("keda-client-name", "", "A certificate must have one of these names, NAME,NAME,…; without: any of them."),
    _option("keda-namespaces", "", "Without client certificates: the namespaces that are answered, NAME,NAME,…."),
)
API_OPTIONS: tuple[Option, ...] = (
    _option("api-address", "none", "Address of the custom metrics API (HTTPS), such as :6443; none: it is off."),
    _option("api-cert-file", "", "Its certificate (PEM), for SERVICE.NAMESPACE.svc; read again when it changes."),
    _option("api-key-file", "", "Its key."),
    _option(
        "api-service",
        "",
        "NAMESPACE/NAME of the Service it is behind: podgpu then makes a certificate of its own, and keeps the "
        "caBundle of its APIServices.",
    ),
    _option(
        "unregister",
        "false",
        "Remove podgpu's APIServices, those that lead to --api-service, and exit: before anything else is uninstalled.",
        "bool",
    ),
    _option("external-metrics", "false", "Serve the external metrics API too. KEDA, for one, has it.", "bool"),
)
AUTOSCALE_OPTIONS: tuple[Option, ...] = (
    _option("probe-address", ":9410", "A plain address for /livez, /ready, /health and /metrics of its own."),
    *KEDA_OPTIONS,
    *API_OPTIONS,
    _option("longest-window", "10m", "The longest window that may be asked for: so long samples are kept.", "duration"),
    *AUTOSCALE_PROMETHEUS,
    *AUTOSCALE_SCRAPE,
    *_as_ours(option for option in VIEW_OPTIONS if option.flag in _FROM_VIEW),
    *exporter_options(("kubeconfig", "debug", "log-format")),
)
