"""This module lists every option of `podgpu exporter`, once: dcgm-exporter's (`dcgm_options.py`) and, here, podgpu's
own. click's options and the tables of the docs come from here; other commands take those they share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from podgpu.cli.dcgm_options import DCGM_EXPORTER_OPTIONS
from podgpu.cli.params import Option
from podgpu.holders.sources import describe_sources

_NAMES = "Whose names, units and labels DCGM's families have: dcgm-exporter 4.8's, 4.9's, or both (docs/dcgm-names.md)."
_HOST = (
    "Name of the host label (NODE_NAME, else the host's name). auto: Hostname, with --dcgm-names 4.9 hostname, or both."
)
PRICES_HELP = "Prices per GPU-hour and kWh: a YAML file (docs/cluster.md), or example for those that podgpu ships."

EXPORTER_ACCESS_OPTIONS: tuple[Option, ...] = tuple(
    Option(f"exporter-{name}", "", f"PODGPU_EXPORTER_{name.replace('-', '_').upper()}", default, text, kind, ours=True)
    for name, default, kind, text in (
        ("ca-file", "", "text", "CA certificates (PEM) to verify the exporter's certificate with."),
        ("insecure-skip-verify", "false", "bool", "Do not verify the exporter's certificate."),
        ("username", "", "text", "Basic auth at the exporter; with --exporter-password-file."),
        ("password-file", "", "text", "File with the password of --exporter-username; read at every fetch."),
        ("token-file", "", "text", "File with a bearer token for the exporter; read at every fetch."),
        ("max-age", "5m", "duration", "A file of the exporter that was not written for this long is too old to use."),
    )
)
"""How another exporter is reached, where it feeds podgpu."""

EXPORTER_OPTIONS: tuple[Option, ...] = (
    *DCGM_EXPORTER_OPTIONS,
    Option(
        "dcgm-names", "", "PODGPU_DCGM_NAMES", "4.8", _NAMES, "choice:4.8|4.9|both", acts_when_named=True, ours=True
    ),
    Option("hostname-label", "", "PODGPU_HOSTNAME_LABEL", "auto", _HOST, "choice:auto|Hostname|hostname", ours=True),
    Option(
        "telemetry",
        "",
        "PODGPU_TELEMETRY",
        "auto",
        "Where figures come from: auto (dcgm with -r, else nvml), nvml, dcgm[:LIBRARY] (through libdcgm), "
        "exporter:HOST:PORT, exporter:URL or exporter:PATH (a dcgm-exporter or its file), or simulated[:SPEC] "
        "such as simulated:2xH100,1xH100/7x1g.10gb.",
        ours=True,
    ),
    Option(
        "allocation",
        "",
        "PODGPU_ALLOCATION",
        "auto",
        f"Who knows the holders, the most trusted first: {describe_sources()}. "
        "auto: with -k, each that is present on the node, in this order.",
        ours=True,
    ),
    Option("kubeconfig", "", "", "", "Kubeconfig for the API server outside a cluster. Also: KUBECONFIG.", ours=True),
    Option(
        "allocation-interval",
        "",
        "PODGPU_ALLOCATION_INTERVAL",
        "5000",
        "How often the kubelet is asked who holds what; at least 100 ms.",
        "duration",
        ours=True,
    ),
    Option("path-proc", "", "PODGPU_PATH_PROC", "/proc", "Where the host's /proc is.", ours=True),
    Option(
        "path-sysfs",
        "",
        "PODGPU_PATH_SYSFS",
        "/sys",
        "Where the host's /sys is: its PCI bus shows how many GPUs there are, whatever the driver says.",
        ours=True,
    ),
    Option(
        "path-varlog",
        "",
        "PODGPU_PATH_VARLOG",
        "/var/log",
        "Where the host's /var/log is: uids and container ids are found by the names in its pods and containers.",
        ours=True,
    ),
    Option(
        "container-usage",
        "",
        "PODGPU_CONTAINER_USAGE",
        "true",
        "Account for what each container really uses of a GPU (per process only in the host's PID namespace).",
        "bool",
        ours=True,
    ),
    Option(
        "usage-interval",
        "",
        "PODGPU_USAGE_INTERVAL",
        "1000",
        "How often it is looked who uses the GPUs; accounted for less often while none comes or goes; at least 100 ms.",
        "duration",
        ours=True,
    ),
    Option(
        "usage-from",
        "",
        "PODGPU_USAGE_FROM",
        "samples",
        "How busy time on a shared GPU is divided: samples (the driver's, each given whole to one process), switches"
        " (its context switches: who was on the GPU, and bounds) or exact (these and busy samples; CAP_SYS_ADMIN).",
        "choice:samples|switches|exact",
        ours=True,
    ),
    Option(
        "mig-copy-parent-values",
        "",
        "PODGPU_MIG_COPY_PARENT_VALUES",
        "false",
        "Repeat a GPU's own figures on each of its MIG instances, as dcgm-exporter does.",
        "bool",
        ours=True,
    ),
    Option(
        "gpu-manager-metrics",
        "",
        "PODGPU_GPU_MANAGER_METRICS",
        "false",
        "tkestack gpu-manager's four container metrics too: on /metrics, and alone at /metric.",
        "bool",
        ours=True,
    ),
    Option(
        "gpu-manager-address",
        "",
        "PODGPU_GPU_MANAGER_ADDRESS",
        "",
        "With --gpu-manager-metrics: a second address that serves these alone, such as :5678, gpu-manager's own.",
        ours=True,
    ),
    Option("history-dir", "", "PODGPU_HISTORY_DIR", "", "Keep the last day on disk (docs/history.md).", ours=True),
    Option(
        "probe-address",
        "",
        "PODGPU_PROBE_ADDRESS",
        "",
        "A plain address for /livez, /ready and /health alone, such as :9401: the kubelet's probes cannot send "
        "the logins or certificates of --web-config-file.",
        ours=True,
    ),
    Option(
        "web-enable-lifecycle",
        "",
        "PODGPU_WEB_ENABLE_LIFECYCLE",
        "true",
        "Answer POST /-/release and /-/forget, which only somebody on this machine may ask for (docs/security.md).",
        "bool",
        ours=True,
    ),
    Option(
        "prices", "", "PODGPU_PRICES", "", f"For the web page: {PRICES_HELP[0].lower()}{PRICES_HELP[1:]}", ours=True
    ),
    *EXPORTER_ACCESS_OPTIONS,
    Option("once", "", "", "false", "Read twice, print the exposition, exit.", "bool", ours=True),
    Option("dump-snapshot", "", "", "", "With --once: write the snapshot as JSON to this file.", ours=True),
)


def exporter_options(flags: Iterable[str], otherwise: Mapping[str, Mapping[str, str]] | None = None) -> list[Option]:
    """The exporter's options that another command has too, but for what is otherwise there."""
    rows = {option.flag: option for option in EXPORTER_OPTIONS}
    return [replace(rows[flag], **(otherwise or {}).get(flag, {})) for flag in flags]  # type: ignore[arg-type]
