"""This module lists every option of `podgpu cluster`, once. The table of docs/cluster.md comes from here."""

from __future__ import annotations

from podgpu.cli.option_table import EXPORTER_ACCESS_OPTIONS, PRICES_HELP, exporter_options
from podgpu.cli.params import Option

_SHARED = ("kubeconfig", "web-config-file", "probe-address", "web-enable-lifecycle", "debug", "log-format")
_OTHERWISE = {
    "probe-address": {
        "help": "A plain address for /livez, /ready and /health alone, such as :9402: the kubelet's probes cannot send "
        "the logins or certificates of --web-config-file."
    },
    "web-enable-lifecycle": {
        "help": "Answer POST /-/forget, which only somebody on this machine may ask for (docs/security.md)."
    },
}


def _option(flag: str, default: str, text: str, kind: str = "text", short: str = "") -> Option:
    return Option(flag, short, f"PODGPU_CLUSTER_{flag.replace('-', '_').upper()}", default, text, kind, ours=True)


PROMETHEUS_OPTIONS: tuple[Option, ...] = (
    _option("prometheus", "", "Ask this server, which speaks Prometheus' HTTP API: HOST:9090, or its whole URL."),
    _option("match", "", 'Label matchers added to every selector, such as cluster="a".'),
    _option("prometheus-ca-file", "", "CA certificates (PEM) to verify the server's certificate with."),
    _option("prometheus-insecure-skip-verify", "false", "Do not verify the server's certificate.", "bool"),
    _option("prometheus-username", "", "Basic auth at the server; with --prometheus-password-file."),
    _option("prometheus-password-file", "", "File with the password of --prometheus-username; read at every query."),
    _option("prometheus-token-file", "", "File with a bearer token for the server; read at every query."),
    _option("prometheus-tenant", "", "Tenant, sent as X-Scope-OrgID (Mimir, Cortex and the like)."),
    _option("prometheus-timeout", "10s", "How long a query may take.", "duration"),
)

SCRAPE_OPTIONS: tuple[Option, ...] = (
    _option("scrape", "", "Scrape these exporters: HOST:9400,… or URLs; one without a path means /metrics."),
    _option(
        "discover-kubernetes",
        "",
        "Scrape the endpoints of Services with these labels, ready or not: [NAMESPACE/]SELECTOR, "
        "such as monitoring/app.kubernetes.io/name=podgpu.",
    ),
    _option("scrape-timeout", "5s", "How long one exporter may take.", "duration"),
    _option("history-dir", "", "Keep the last day on disk, so that a restart does not lose it (docs/history.md)."),
    *(o for o in EXPORTER_ACCESS_OPTIONS if o.flag != "exporter-max-age"),
)

VIEW_OPTIONS: tuple[Option, ...] = (
    _option(
        "node-label",
        "Hostname,hostname,node,instance",
        "Labels to take a node's name from; the first one present counts.",
    ),
    _option("interval", "15s", "How often the nodes are read.", "duration"),
    _option(
        "stale-after",
        "45s",
        "A node without news for this long is stale: it is marked, and left out of averages. Default: 3 intervals.",
        "duration",
    ),
    _option(
        "drop-after",
        "5m",
        "A node without news for this long is dropped, unless its exporter is still listed.",
        "duration",
    ),
    _option(
        "used-field",
        "DCGM_FI_DEV_MEM_COPY_UTIL",
        "The field that used-GPU utilisation is the mean of. A GPU is in use while it is above 0.",
    ),
    _option("window", "5m", "Length of the rolling average of used-GPU utilisation.", "duration"),
    _option(
        "idle-after",
        "30m",
        "A holder that is idle for longer counts as wasteful: in podgpu_namespace_idle_gpus and the idle metrics. "
        "Cost of idle GPUs counts from the first second.",
        "duration",
    ),
    _option(
        "owners",
        "auto",
        "Where the owners of pods come from if kube_pod_owner is missing: the API server, or nowhere. auto: ask it in "
        "a cluster, with --discover-kubernetes and with --kubeconfig, and go without if it refuses.",
        "choice:auto|api|none",
    ),
    _option("prices", "", PRICES_HELP),
    _option("legacy-map-metrics", "false", "Export POD_GPU_MAP_INFO_<n> too.", "bool"),
)

CLUSTER_OPTIONS: tuple[Option, ...] = (
    _option("address", ":9401", "Address to listen on: :PORT, HOST:PORT or [IPV6]:PORT.", short="a"),
    *PROMETHEUS_OPTIONS,
    *SCRAPE_OPTIONS,
    *VIEW_OPTIONS,
    *exporter_options(_SHARED, _OTHERWISE),
)
