"""Every option of `podgpu exporter`, once: flag, variable, default, help. click's options and the README's table come
from here. Rows with `works=False` are dcgm-exporter's: accepted so that a migrated DaemonSet starts, warned about once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from podgpu.cli.newer_options import NEWER_OPTIONS
from podgpu.cli.params import Option
from podgpu.compose.allocations import spellings

_DUMP = "accepted; use --dump-snapshot"
_NAMES = "Whose names, units and labels DCGM's families have: dcgm-exporter 4.8's, 4.9's, or both (docs/dcgm-names.md)."
_HOST = (
    "Name of the host label (NODE_NAME, else the host's name). auto: Hostname, with --dcgm-names 4.9 hostname, or both."
)
_DCGM = "accepted; belongs to DCGM, which podgpu does not need"
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
    Option(
        "collectors",
        "f",
        "DCGM_EXPORTER_COLLECTORS",
        "",
        "Counters: a CSV file, or default, dcp, 1.x (shipped), none (no DCGM_* families). Without it "
        "/etc/dcgm-exporter/default-counters.csv where that exists, else default.",
    ),
    Option("address", "a", "DCGM_EXPORTER_LISTEN", ":9400", "Address to listen on: :PORT, HOST:PORT or [IPV6]:PORT."),
    Option(
        "collect-interval",
        "c",
        "DCGM_EXPORTER_INTERVAL",
        "30000",
        "How often the GPUs are read: a plain number is milliseconds, 5s and 1m work too; at least 100 ms.",
        "duration",
    ),
    Option(
        "kubernetes",
        "k",
        "DCGM_EXPORTER_KUBERNETES",
        "false",
        "Put pod labels on, from every source that knows (see --allocation).",
        "bool",
    ),
    Option(
        "use-old-namespace",
        "o",
        "DCGM_EXPORTER_USE_OLD_NAMESPACE",
        "false",
        "dcgm-exporter 1.x label names (uuid, pod_name, pod_namespace, container_name).",
        "bool",
    ),
    Option(
        "cpu-devices",
        "p",
        "DCGM_EXPORTER_CPU_DEVICES_STR",
        "f",
        "With DCGM, on Grace: f (CPUs and their cores), g[:ids] (CPUs), i[:ids] (cores); ids as 0,2-4.",
    ),
    Option(
        "configmap-data",
        "m",
        "DCGM_EXPORTER_CONFIGMAP_DATA",
        "none",
        "NAMESPACE:NAME of a ConfigMap whose key `metrics` holds the counters; changes are taken up. none: not used.",
    ),
    Option(
        "remote-hostengine-info",
        "r",
        "DCGM_REMOTE_HOSTENGINE_INFO",
        "localhost:5555",
        "A running host engine (nv-hostengine) to read from: HOST:PORT, [IPV6]:PORT, unix:///path or vsock://CID:PORT. "
        "If given, it means --telemetry dcgm; without it none is used.",
        acts_when_named=True,
    ),
    Option(
        "kubernetes-enable-pod-labels",
        "",
        "DCGM_EXPORTER_KUBERNETES_ENABLE_POD_LABELS",
        "false",
        "Put the pod's own labels on its GPUs' DCGM series (from the API server; needs NODE_NAME).",
        "bool",
    ),
    Option(
        "kubernetes-enable-pod-uid",
        "",
        "DCGM_EXPORTER_KUBERNETES_ENABLE_POD_UID",
        "false",
        "Put pod_uid beside the pod labels (from /var/log/pods, else the API server).",
        "bool",
    ),
    Option(
        "kubernetes-gpu-id-type",
        "",
        "DCGM_EXPORTER_KUBERNETES_GPU_ID_TYPE",
        "uid",
        "Kept for compatibility: UUIDs (uid) and nvidia<minor> names (device-name) are both understood, always.",
        "choice:uid|device-name",
    ),
    Option(
        "kubernetes-pod-label-allowlist-regex",
        "",
        "DCGM_EXPORTER_KUBERNETES_POD_LABEL_ALLOWLIST_REGEX",
        "",
        "Comma list of regular expressions: only pod labels whose key matches one, anywhere in it. Empty: all.",
    ),
    Option(
        "devices",
        "d",
        "DCGM_EXPORTER_DEVICES_STR",
        "f",
        "What to show: f (GPUs and MIG instances), g[:ids] (GPUs), i[:ids] (instances), g:0+i:1 (both); ids as 0,2-4.",
    ),
    Option("no-hostname", "n", "DCGM_EXPORTER_NO_HOSTNAME", "false", "Leave the host label out.", "bool"),
    Option(
        "switch-devices",
        "s",
        "DCGM_EXPORTER_OTHER_DEVICES_STR",
        "f",
        "With DCGM: f (NVSwitches and their links), g[:ids] (switches), i[:ids] (links); ids as 0,2-4.",
    ),
    Option(
        "fake-gpus",
        "",
        "DCGM_EXPORTER_USE_FAKE_GPUS",
        "false",
        "accepted; use --telemetry simulated",
        "bool",
        works=False,
    ),
    Option(
        "web-config-file",
        "",
        "DCGM_EXPORTER_WEB_CONFIG_FILE",
        "",
        "Prometheus' web config: TLS, client certificates, basic auth, headers, rate limit (docs/security.md).",
    ),
    Option(
        "web-systemd-socket",
        "",
        "DCGM_EXPORTER_SYSTEMD_SOCKET",
        "false",
        "Listen on the sockets that systemd passes (podgpu.socket) in place of -a.",
        "bool",
    ),
    Option(
        "xid-count-window-size",
        "x",
        "DCGM_EXPORTER_XID_COUNT_WINDOW_SIZE",
        "300000",
        "Window of DCGM_EXP_XID_ERRORS_COUNT.",
        "duration",
    ),
    Option(
        "clock-events-count-window-size",
        "",
        "DCGM_EXPORTER_CLOCK_EVENTS_COUNT_WINDOW_SIZE",
        "300000",
        "Window of DCGM_EXP_CLOCK_EVENTS_COUNT.",
        "duration",
    ),
    Option(
        "replace-blanks-in-model-name",
        "",
        "DCGM_EXPORTER_REPLACE_BLANKS_IN_MODEL_NAME",
        "false",
        "Write modelName with dashes instead of blanks.",
        "bool",
        alias="rbmn",
    ),
    Option("debug", "", "DCGM_EXPORTER_DEBUG", "false", "Log more.", "bool"),
    Option(
        "enable-dcgm-log",
        "",
        "DCGM_EXPORTER_ENABLE_DCGM_LOG",
        "false",
        "Let DCGM log too, to standard output or to the file that __DCGM_DBG_FILE names.",
        "bool",
    ),
    Option(
        "dcgm-log-level",
        "",
        "DCGM_EXPORTER_DCGM_LOG_LEVEL",
        "NONE",
        "With --enable-dcgm-log: what DCGM logs.",
        "choice:NONE|FATAL|ERROR|WARN|INFO|DEBUG|VERB",
    ),
    Option("log-format", "", "DCGM_EXPORTER_LOG_FORMAT", "text", "How log lines look.", "choice:text|json"),
    Option(
        "pod-resources-kubelet-socket",
        "",
        "DCGM_POD_RESOURCES_KUBELET_SOCKET",
        "/var/lib/kubelet/pod-resources/kubelet.sock",
        "The kubelet's pod-resources socket.",
    ),
    Option(
        "hpc-job-mapping-dir",
        "",
        "DCGM_HPC_JOB_MAPPING_DIR",
        "",
        "Directory of HPC job files (named 0, 1, 2.1 …; a job id a line): label hpc_job.",
    ),
    Option(
        "nvidia-resource-names",
        "",
        "NVIDIA_RESOURCE_NAMES",
        "",
        "Comma list of resource names that carry GPUs. Any resource whose ids name a GPU counts by itself; for these "
        "an id that cannot be read is counted and explained too.",
    ),
    Option(
        "kubernetes-virtual-gpus",
        "",
        "KUBERNETES_VIRTUAL_GPUS",
        "false",
        "One series per holder of a shared GPU (label vgpu), with the holder's own utilisation, memory, power, energy.",
        "bool",
    ),
    Option(
        "kubernetes-enable-dra",
        "",
        "KUBERNETES_ENABLE_DRA",
        "false",
        "Map GPUs given through DRA claims (ResourceSlices from the API server), with the dra_* labels.",
        "bool",
    ),
    Option("disable-startup-validate", "", "DISABLE_STARTUP_VALIDATE", "false", _DCGM, "bool", works=False),
    Option(
        "enable-gpu-bind-unbind-watch",
        "",
        "DCGM_EXPORTER_ENABLE_GPU_BIND_UNBIND_WATCH",
        "false",
        "accepted; podgpu always notices GPUs that come and go",
        "bool",
        works=False,
    ),
    Option(
        "gpu-bind-unbind-poll-interval",
        "",
        "DCGM_EXPORTER_GPU_BIND_UNBIND_POLL_INTERVAL",
        "1s",
        "accepted; podgpu always notices GPUs that come and go",
        works=False,
    ),
    Option("enable-pprof", "", "DCGM_EXPORTER_ENABLE_PPROF", "false", "accepted; a Go profiler", "bool", works=False),
    *(
        Option(f"dump-{name}", "", f"DCGM_EXPORTER_DUMP_{name.upper()}", default, _DUMP, kind, works=False)
        for name, default, kind in (
            ("enabled", "false", "bool"),
            ("directory", "/tmp/dcgm-exporter-debug", "text"),
            ("retention", "24", "text"),
            ("compression", "true", "bool"),
        )
    ),
    *NEWER_OPTIONS,
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
        f"Who knows the holders, the most trusted first: {spellings()}. "
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
