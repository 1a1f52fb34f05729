"""The options of `podgpu exporter`: dcgm-exporter's, and podgpu's own. Other commands share many of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from podgpu.cli.options import ACCESS, COMMON, COMPATIBILITY, KUBERNETES, NO_EFFECT, PATHS, USAGE, Option
from podgpu.holders.sources import describe_sources

MAX_SAMPLES = 2**31 - 1
PRICES_HELP = "Prices per GPU-hour and kWh: a YAML file (docs/cluster.md), or example for podgpu's example prices."
PROBE_HELP = (
    "Plain HTTP address for /livez, /ready and /health only, such as :9402. The kubelet's probes cannot present the"
    " credentials of --web-config-file."
)


def _no_effect(flag: str, env: str, default: str, why: str, kind: str = "text") -> Option:
    return Option(flag, "", env, default, why, kind, works=False, group=NO_EFFECT, common=False)


_DCGM_EXPORTER_OPTIONS: tuple[Option, ...] = (
    Option("address", "a", "DCGM_EXPORTER_LISTEN", ":9400", "Address to listen on: :PORT, HOST:PORT or [IPV6]:PORT."),
    Option(
        "collectors",
        "f",
        "DCGM_EXPORTER_COLLECTORS",
        "",
        "Counters: a CSV file, or default, dcp, 1.x, none (no DCGM_* metrics). Default:"
        " /etc/dcgm-exporter/default-counters.csv if it exists, else default.",
    ),
    Option(
        "collect-interval",
        "c",
        "DCGM_EXPORTER_INTERVAL",
        "30000",
        "How often GPUs are read: milliseconds, or with a unit (5s, 1m); at least 100 ms.",
        "milliseconds",
    ),
    Option(
        "kubernetes",
        "k",
        "DCGM_EXPORTER_KUBERNETES",
        "false",
        "Add pod labels, from all sources of --allocation.",
        "bool",
    ),
    Option(
        "devices",
        "d",
        "DCGM_EXPORTER_DEVICES_STR",
        "f",
        "Devices: f (GPUs and MIG instances), g[:IDS] (GPUs), i[:IDS] (instances), g:0+i:1 (both); IDS such as 0,2-4.",
    ),
    Option(
        "config-file",
        "",
        "DCGM_EXPORTER_CONFIG_FILE",
        "",
        "YAML file with counters and their intervals, version 1 or 2 (docs/counters.md). Flags and environment"
        " variables override it.",
    ),
    Option(
        "kubernetes-enable-pod-labels",
        "",
        "DCGM_EXPORTER_KUBERNETES_ENABLE_POD_LABELS",
        "false",
        "Add the pod's own labels to DCGM series. Needs the API server and NODE_NAME.",
        "bool",
        group=KUBERNETES,
    ),
    Option(
        "kubernetes-pod-label-allowlist-regex",
        "",
        "DCGM_EXPORTER_KUBERNETES_POD_LABEL_ALLOWLIST_REGEX",
        "",
        "Comma-separated regular expressions. Only pod labels whose key contains a match are added. Empty: all.",
        group=KUBERNETES,
    ),
    Option(
        "kubernetes-enable-pod-uid",
        "",
        "DCGM_EXPORTER_KUBERNETES_ENABLE_POD_UID",
        "false",
        "Add the label pod_uid (from /var/log/pods, else from the API server).",
        "bool",
        group=KUBERNETES,
    ),
    Option(
        "kubernetes-virtual-gpus",
        "",
        "KUBERNETES_VIRTUAL_GPUS",
        "false",
        "One series per holder of a shared GPU (label vgpu), with the holder's own utilisation, memory, power, energy.",
        "bool",
        group=KUBERNETES,
    ),
    Option(
        "kubernetes-enable-dra",
        "",
        "KUBERNETES_ENABLE_DRA",
        "false",
        "Map GPUs of DRA claims to pods and add dra_* labels. Needs the API server or the driver's checkpoint.",
        "bool",
        group=KUBERNETES,
    ),
    Option(
        "configmap-data",
        "m",
        "DCGM_EXPORTER_CONFIGMAP_DATA",
        "none",
        "NAMESPACE:NAME of a ConfigMap whose key `metrics` has the counters; changes are followed.",
        group=KUBERNETES,
    ),
    Option(
        "hpc-job-mapping-dir",
        "",
        "DCGM_HPC_JOB_MAPPING_DIR",
        "",
        "Directory of HPC job files, named by GPU (0, 1, 2.1) with one job id per line: label hpc_job.",
        group=KUBERNETES,
    ),
    Option(
        "pod-resources-kubelet-socket",
        "",
        "DCGM_POD_RESOURCES_KUBELET_SOCKET",
        "/var/lib/kubelet/pod-resources/kubelet.sock",
        "The kubelet's pod-resources socket.",
        group=PATHS,
        common=False,
    ),
    Option(
        "nvidia-resource-names",
        "",
        "NVIDIA_RESOURCE_NAMES",
        "",
        "Comma-separated names of additional GPU resources. Resources whose ids identify a GPU are found without it.",
        group=KUBERNETES,
        common=False,
    ),
    Option(
        "kubernetes-gpu-id-type",
        "",
        "DCGM_EXPORTER_KUBERNETES_GPU_ID_TYPE",
        "uid",
        "For compatibility: UUIDs (uid) and nvidia<minor> names (device-name) are always both understood.",
        "choice:uid|device-name",
        group=COMPATIBILITY,
        common=False,
    ),
    Option(
        "web-config-file",
        "",
        "DCGM_EXPORTER_WEB_CONFIG_FILE",
        "",
        "Prometheus' web config: TLS, client certificates, basic auth, headers, rate limit (docs/security.md).",
        group=ACCESS,
    ),
    Option(
        "max-concurrent-scrapes",
        "",
        "DCGM_EXPORTER_MAX_CONCURRENT_SCRAPES",
        "16",
        "Maximum number of concurrent requests for /metrics; more get 503.",
        f"whole:1-{MAX_SAMPLES}",
        group=ACCESS,
    ),
    Option(
        "web-systemd-socket",
        "",
        "DCGM_EXPORTER_SYSTEMD_SOCKET",
        "false",
        "Listen on the sockets passed by systemd instead of -a.",
        "bool",
        group=ACCESS,
        common=False,
    ),
    Option(
        "web-read-timeout",
        "",
        "DCGM_EXPORTER_WEB_READ_TIMEOUT",
        "10s",
        "Maximum time for a client to send a request.",
        "milliseconds",
        group=ACCESS,
        common=False,
    ),
    Option(
        "web-write-timeout",
        "",
        "DCGM_EXPORTER_WEB_WRITE_TIMEOUT",
        "30s",
        "Maximum time for a client to read the response.",
        "milliseconds",
        group=ACCESS,
        common=False,
    ),
    Option(
        "remote-hostengine-info",
        "r",
        "DCGM_REMOTE_HOSTENGINE_INFO",
        "localhost:5555",
        "Read from a running host engine (nv-hostengine): HOST:PORT, [IPV6]:PORT, unix:///path or vsock://CID:PORT."
        " Implies --telemetry dcgm; not used by default.",
        acts_when_named=True,
        group=COMPATIBILITY,
    ),
    Option(
        "use-old-namespace",
        "o",
        "DCGM_EXPORTER_USE_OLD_NAMESPACE",
        "false",
        "Label names of dcgm-exporter 1.x (uuid, pod_name, pod_namespace, container_name).",
        "bool",
        group=COMPATIBILITY,
    ),
    Option(
        "no-hostname",
        "n",
        "DCGM_EXPORTER_NO_HOSTNAME",
        "false",
        "Omit the host label.",
        "bool",
        group=COMPATIBILITY,
        common=False,
    ),
    Option(
        "switch-devices",
        "s",
        "DCGM_EXPORTER_OTHER_DEVICES_STR",
        "f",
        "With DCGM: f (NVSwitches and links), g[:IDS] (switches), i[:IDS] (links).",
        group=COMPATIBILITY,
        common=False,
    ),
    Option(
        "cpu-devices",
        "p",
        "DCGM_EXPORTER_CPU_DEVICES_STR",
        "f",
        "With DCGM on Grace: f (CPUs and cores), g[:IDS] (CPUs), i[:IDS] (cores).",
        group=COMPATIBILITY,
        common=False,
    ),
    Option(
        "xid-count-window-size",
        "x",
        "DCGM_EXPORTER_XID_COUNT_WINDOW_SIZE",
        "300000",
        "Window of DCGM_EXP_XID_ERRORS_COUNT.",
        "milliseconds",
        group=COMPATIBILITY,
        common=False,
    ),
    Option(
        "clock-events-count-window-size",
        "",
        "DCGM_EXPORTER_CLOCK_EVENTS_COUNT_WINDOW_SIZE",
        "300000",
        "Window of DCGM_EXP_CLOCK_EVENTS_COUNT.",
        "milliseconds",
        group=COMPATIBILITY,
        common=False,
    ),
    Option(
        "replace-blanks-in-model-name",
        "",
        "DCGM_EXPORTER_REPLACE_BLANKS_IN_MODEL_NAME",
        "false",
        "Write modelName with dashes instead of blanks.",
        "bool",
        alias="rbmn",
        group=COMPATIBILITY,
        common=False,
    ),
    Option(
        "enable-dcgm-log",
        "",
        "DCGM_EXPORTER_ENABLE_DCGM_LOG",
        "false",
        "Enable DCGM's log, on standard output or in the file named by __DCGM_DBG_FILE.",
        "bool",
        group=COMPATIBILITY,
        common=False,
    ),
    Option(
        "dcgm-log-level",
        "",
        "DCGM_EXPORTER_DCGM_LOG_LEVEL",
        "NONE",
        "Level of --enable-dcgm-log.",
        "choice:NONE|FATAL|ERROR|WARN|INFO|DEBUG|VERB",
        group=COMPATIBILITY,
        common=False,
    ),
    Option(
        "watch-max-keep-age",
        "",
        "DCGM_EXPORTER_WATCH_MAX_KEEP_AGE",
        "10m",
        "With DCGM: how long samples are kept; 0s: no limit.",
        "age",
        group=COMPATIBILITY,
        common=False,
    ),
    Option(
        "watch-max-keep-samples",
        "",
        "DCGM_EXPORTER_WATCH_MAX_KEEP_SAMPLES",
        "0",
        "With DCGM: how many samples of a field are kept; 0: no limit.",
        f"whole:0-{MAX_SAMPLES}",
        group=COMPATIBILITY,
        common=False,
    ),
    Option(
        "enable-exporter-metrics",
        "",
        "DCGM_EXPORTER_ENABLE_EXPORTER_METRICS",
        "false",
        "Add process_* metrics of the exporter itself.",
        "bool",
        group=COMPATIBILITY,
        common=False,
    ),
    Option("log-format", "", "DCGM_EXPORTER_LOG_FORMAT", "text", "Format of log lines.", "choice:text|json"),
    Option("debug", "", "DCGM_EXPORTER_DEBUG", "false", "Log more.", "bool"),
    _no_effect("fake-gpus", "DCGM_EXPORTER_USE_FAKE_GPUS", "false", "use --telemetry simulated", "bool"),
    _no_effect("disable-startup-validate", "DISABLE_STARTUP_VALIDATE", "false", "DCGM only", "bool"),
    _no_effect(
        "enable-gpu-bind-unbind-watch",
        "DCGM_EXPORTER_ENABLE_GPU_BIND_UNBIND_WATCH",
        "false",
        "podgpu always follows GPUs that appear and disappear",
        "bool",
    ),
    _no_effect(
        "gpu-bind-unbind-poll-interval",
        "DCGM_EXPORTER_GPU_BIND_UNBIND_POLL_INTERVAL",
        "1s",
        "podgpu always follows GPUs that appear and disappear",
    ),
    _no_effect("enable-pprof", "DCGM_EXPORTER_ENABLE_PPROF", "false", "Go profiler", "bool"),
    _no_effect("dump-enabled", "DCGM_EXPORTER_DUMP_ENABLED", "false", "use --dump-snapshot", "bool"),
    _no_effect("dump-directory", "DCGM_EXPORTER_DUMP_DIRECTORY", "/tmp/dcgm-exporter-debug", "use --dump-snapshot"),
    _no_effect("dump-retention", "DCGM_EXPORTER_DUMP_RETENTION", "24", "use --dump-snapshot"),
    _no_effect("dump-compression", "DCGM_EXPORTER_DUMP_COMPRESSION", "true", "use --dump-snapshot", "bool"),
    _no_effect("container-labels", "DCGM_EXPORTER_CONTAINER_LABELS", "false", "use --allocation processes", "bool"),
    _no_effect("container-runtime-socket", "DCGM_CONTAINER_RUNTIME_SOCKET", "", "use --allocation processes"),
)


def _access(name: str, default: str, text: str, kind: str = "text") -> Option:
    env = f"PODGPU_EXPORTER_{name.replace('-', '_').upper()}"
    return Option(f"exporter-{name}", "", env, default, text, kind, ours=True, group=ACCESS, common=False)


EXPORTER_ACCESS_OPTIONS: tuple[Option, ...] = (
    _access("ca-file", "", "CA certificates (PEM) of the exporter that is read."),
    _access("insecure-skip-verify", "false", "Do not verify the exporter's certificate.", "bool"),
    _access("username", "", "Basic auth at the exporter; with --exporter-password-file."),
    _access("password-file", "", "File with the password of --exporter-username, read for every request."),
    _access("token-file", "", "File with a bearer token for the exporter, read for every request."),
    _access("max-age", "5m", "A file of an exporter is stale if it was not written for this long.", "duration"),
)
"""How another exporter is read (--telemetry exporter:, enrich, cluster)."""


def _own(flag: str, default: str, text: str, kind: str = "text", *, group: str = COMMON, common: bool = True) -> Option:
    variable = f"PODGPU_{flag.replace('-', '_').upper()}"
    return Option(flag, "", variable, default, text, kind, ours=True, group=group, common=common)


EXPORTER_OPTIONS: tuple[Option, ...] = (
    *_DCGM_EXPORTER_OPTIONS,
    _own(
        "telemetry",
        "auto",
        "Source of GPU metrics: auto (dcgm with -r, else nvml), nvml, dcgm[:LIBRARY], exporter:URL or exporter:PATH"
        " (a dcgm-exporter or its file), or simulated[:SPEC] such as simulated:2xH100,1xH100/7x1g.10gb.",
    ),
    _own(
        "allocation",
        "auto",
        f"Sources of holders, the most trusted first: {describe_sources()}. auto: with -k, all that are present.",
        group=KUBERNETES,
    ),
    _own("allocation-interval", "5s", "How often holders are read.", "duration", group=KUBERNETES),
    Option(
        "kubeconfig",
        help="Kubeconfig for the API server outside a cluster. Also: KUBECONFIG.",
        ours=True,
        group=KUBERNETES,
    ),
    _own("container-usage", "true", "Compute the usage of each container (docs/usage.md).", "bool", group=USAGE),
    _own("usage-interval", "1s", "How often per-process GPU usage is read.", "duration", group=USAGE),
    _own(
        "usage-from",
        "samples",
        "How busy time of a shared GPU is divided: samples (the driver's), switches (context switches) or exact"
        " (context switches and busy samples; needs CAP_SYS_ADMIN).",
        "choice:samples|switches|exact",
        group=USAGE,
    ),
    _own("history-dir", "", "Store history in this directory (docs/cluster.md#history).", group=USAGE),
    _own("prices", "", PRICES_HELP, group=USAGE),
    _own("probe-address", "", PROBE_HELP, group=ACCESS),
    _own(
        "web-enable-lifecycle",
        "true",
        "Accept POST /-/release and /-/forget from this machine (docs/security.md).",
        "bool",
        group=ACCESS,
    ),
    Option(
        "dcgm-names",
        "",
        "PODGPU_DCGM_NAMES",
        "4.8",
        "Metric names, units and labels of dcgm-exporter 4.8, 4.9, or both (docs/dcgm-names.md).",
        "choice:4.8|4.9|both",
        acts_when_named=True,
        ours=True,
        group=COMPATIBILITY,
    ),
    _own(
        "hostname-label",
        "auto",
        "Name of the host label. auto: Hostname; hostname with --dcgm-names 4.9; both with both.",
        "choice:auto|Hostname|hostname",
        group=COMPATIBILITY,
    ),
    _own(
        "mig-copy-parent-values",
        "false",
        "Repeat a GPU's figures on each of its MIG instances, as dcgm-exporter does.",
        "bool",
        group=COMPATIBILITY,
    ),
    _own(
        "gpu-manager-metrics",
        "false",
        "Add gpu-manager's four container metrics, on /metrics and alone on /metric.",
        "bool",
        group=COMPATIBILITY,
    ),
    _own(
        "gpu-manager-address",
        "",
        "Second address for gpu-manager's metrics only, such as :5678.",
        group=COMPATIBILITY,
        common=False,
    ),
    _own("path-proc", "/proc", "The host's /proc.", group=PATHS, common=False),
    _own("path-sysfs", "/sys", "The host's /sys, to count GPUs on the PCI bus.", group=PATHS, common=False),
    _own(
        "path-varlog",
        "/var/log",
        "The host's /var/log, whose file names supply pod names and uids.",
        group=PATHS,
        common=False,
    ),
    *EXPORTER_ACCESS_OPTIONS,
    Option("once", default="false", help="Print the metrics once and exit.", kind="bool", ours=True),
    Option(
        "dump-snapshot",
        help="With --once: write the node's document as JSON to this file.",
        ours=True,
        group=PATHS,
        common=False,
    ),
)


def pick_options(flags: Iterable[str], changes: Mapping[str, Mapping[str, object]] | None = None) -> list[Option]:
    """The exporter's options with these flags, for another command; `changes` replaces members by flag."""
    rows = {option.flag: option for option in EXPORTER_OPTIONS}
    return [replace(rows[flag], **(changes or {}).get(flag, {})) for flag in flags]  # type: ignore[arg-type]


def hide(options: Iterable[Option]) -> list[Option]:
    """The same options, shown by --help-all only."""
    return [replace(option, common=False) for option in options]
