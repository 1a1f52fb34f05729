"""Dashboard of the whole cluster: number of GPUs, holders, utilisation, and nodes with problems."""

from __future__ import annotations

from deploy.dashboards.parts import (
    BROKEN,
    Json,
    Panel,
    Query,
    Row,
    choice,
    dashboard,
    graph,
    largest,
    largest_and_rest,
    stat,
    table,
)

_CHOSEN = 'modelName=~"$model",Hostname=~"$node"'
_ALL = f"count by (UUID) (DCGM_FI_DEV_GPU_TEMP{{{_CHOSEN}}})"
"""One series per GPU, also if two jobs scrape it. All models report the temperature, also in MIG
mode.
"""
_UTIL = f"max by (UUID) (DCGM_FI_DEV_GPU_UTIL{{{_CHOSEN}}})"
_IDLE_TIME = (
    "min by (UUID) (max by (UUID, GPU_I_ID, namespace, pod, container, hpc_job) "
    f"(rate(podgpu_container_gpu_idle_seconds_total{{{_CHOSEN}}}[$__rate_interval])))"
)
"""The idle time of each GPU in every second, as the exporters count it. The least idle holder
counts. Two jobs that scrape a GPU have equal values.
"""
_HELD = "on (UUID) podgpu_allocation_info"
_ALLOCATED = f"count({_ALL} and {_HELD}) or vector(0)"
_USED = f"sum(1 - clamp_max({_IDLE_TIME}, 1) and {_ALL} and {_HELD}) or vector(0)"
_IDLE = f"sum(clamp_max({_IDLE_TIME}, 1) and {_ALL} and {_HELD}) or vector(0)"
_NOT_KNOWN = f"count({_ALL} and {_HELD} unless on (UUID) {_IDLE_TIME}) or vector(0)"
_FREE = f"count({_ALL} unless {_HELD}) or vector(0)"
_UNWELL = f'podgpu_device_health{{{_CHOSEN},UUID!="",{BROKEN}}} == 1'
_GONE = 'podgpu_device_health{node=~"$node",condition="node_gone"} == 1'
"""Nodes whose exporter is gone. The exporter's series have ended, so only `podgpu cluster` reports
these nodes.
"""
_BROKEN = f"(count(max by (UUID) ({_UNWELL})) or vector(0)) + (count({_GONE}) or vector(0))"
_MOST = largest("sum by (namespace, pod) (podgpu_allocation_share_ratio)", 100)
"""Restricts every column of the table to the same pods. Otherwise the table would have rows with
empty cells.
"""
_NODE_PAGE = (
    "/d/podgpu-node?${datasource:queryparam}&var-node=${__data.fields.Node}&${__url_time_range}"
)
_POD_PAGE = (
    "/d/podgpu-pod?${datasource:queryparam}&var-namespace=${__data.fields.Namespace}&var-pod=${__data.fields.Pod}"
    "&${__url_time_range}"
)
_BAD_ABOVE_0 = ((None, "green"), (1, "red"))


def _overview() -> Row:
    return Row(
        "Now",
        (
            stat("GPUs", f"count({_ALL})", "Number of GPUs that respond."),
            stat("Allocated", _ALLOCATED, "GPUs that are allocated in whole or in part."),
            stat(
                "Used",
                _USED,
                "Allocated GPUs that were in use. Half a GPU was in use half of the time.",
                decimals=1,
            ),
            stat(
                "Idle",
                _IDLE,
                "Allocated GPUs on which nothing ran. Half a GPU was idle half of the time.",
                decimals=1,
                steps=((None, "green"), (1, "orange")),
            ),
            stat("Free", _FREE, "GPUs that are not allocated."),
            stat(
                "Broken",
                _BROKEN,
                "GPUs that are lost, unreadable or throttled, or have a critical XID, bad memory, "
                "NVLink down"
                " or no driver. Also counts nodes that are gone (needs podgpu cluster).",
                steps=_BAD_ABOVE_0,
            ),
            stat(
                "Utilisation of GPUs in use",
                f"avg({_UTIL} > 0)",
                "Mean over GPUs in use. Idle GPUs are excluded.",
                "percent",
                decimals=0,
                width=6,
            ),
            stat(
                "Power",
                f"sum(max by (UUID) (DCGM_FI_DEV_POWER_USAGE{{{_CHOSEN}}}))",
                "Sum over all GPUs.",
                "watt",
                width=6,
            ),
            stat(
                "Nodes",
                'count(count by (Hostname) (podgpu_device_count{Hostname=~"$node"}))',
                "Nodes whose exporter responds.",
                width=6,
            ),
            stat(
                "Alerts",
                'count(ALERTS{alertname=~"Podgpu.*",alertstate="firing"}) or vector(0)',
                "Firing alerts of podgpu.",
                steps=_BAD_ABOVE_0,
                width=6,
            ),
        ),
    )


def _use() -> Row:
    return Row(
        "Use",
        (
            graph(
                "GPUs by state",
                [(_USED, "used"), (_IDLE, "idle"), (_NOT_KNOWN, "not known"), (_FREE, "free")],
                (
                    "The sum is the number of GPUs that respond. Used, idle and not known GPUs are "
                    "allocated."
                ),
                stacked=True,
            ),
            graph(
                "Utilisation",
                [
                    (f"avg({_UTIL} > 0)", "mean of GPUs in use"),
                    (f"avg({_UTIL})", "mean of all GPUs"),
                    (f"quantile(0.1, {_UTIL})", "10th percentile"),
                    (f"quantile(0.9, {_UTIL})", "90th percentile"),
                ],
                "GPUs in MIG mode do not report utilisation.",
                "percent",
                top=100,
            ),
            graph(
                "GPUs allocated, by namespace",
                largest_and_rest(
                    "sum by (namespace) (podgpu_allocation_share_ratio)", "{{namespace}}"
                ),
                "Sum of shares. A MIG instance counts as one.",
                stacked=True,
            ),
            graph(
                "GPUs used, by namespace",
                largest_and_rest(
                    (
                        "sum by (namespace) "
                        "(rate(podgpu_namespace_gpu_busy_seconds_total[$__rate_interval]))"
                    ),
                    "{{namespace}}",
                ),
                "Busy seconds per second. Needs hostPID.",
                stacked=True,
            ),
            table(
                "Pods",
                [
                    Query(_MOST, "GPUs allocated", decimals=2),
                    Query(
                        (
                            "sum by (namespace, pod) (podgpu_container_gpu_utilization_ratio) and "
                            f"{_MOST}"
                        ),
                        "GPUs used",
                        decimals=2,
                    ),
                    Query(
                        (
                            "sum by (namespace, pod) (podgpu_container_gpu_memory_used_bytes) and "
                            f"{_MOST}"
                        ),
                        "Memory",
                        "bytes",
                    ),
                    Query(
                        "sum by (namespace, pod) "
                        "(rate(podgpu_container_gpu_energy_joules_total[$__rate_interval]))"
                        f" and {_MOST}",
                        "Power charged",
                        "watt",
                    ),
                ],
                {"namespace": "Namespace", "pod": "Pod"},
                "The 100 pods with the most GPUs.",
                link=("Pod", "This pod", _POD_PAGE),
            ),
        ),
    )


def _nodes() -> Row:
    by = "Hostname, modelName"
    held = f"count by ({by}, UUID) (DCGM_FI_DEV_GPU_TEMP{{{_CHOSEN}}}) and {_HELD}"
    return Row(
        "Nodes",
        (
            table(
                "Nodes",
                [
                    Query(
                        (
                            f"count by ({by}) (count by ({by}, UUID) "
                            f"(DCGM_FI_DEV_GPU_TEMP{{{_CHOSEN}}}))"
                        ),
                        "GPUs",
                    ),
                    Query(f"count by ({by}) ({held})", "Allocated"),
                    Query(
                        f"avg by ({by}) (DCGM_FI_DEV_GPU_UTIL{{{_CHOSEN}}})",
                        "Utilisation",
                        "percent",
                        0,
                    ),
                    Query(f"sum by ({by}) (DCGM_FI_DEV_POWER_USAGE{{{_CHOSEN}}})", "Power", "watt"),
                    Query(
                        f"max by ({by}) (DCGM_FI_DEV_GPU_TEMP{{{_CHOSEN}}})",
                        "Max temperature",
                        "celsius",
                    ),
                ],
                {"Hostname": "Node", "modelName": "Model"},
                "One line per node and model.",
                link=("Node", "This node", _NODE_PAGE),
            ),
            graph(
                "Power, by node",
                largest_and_rest(
                    f"sum by (Hostname) (DCGM_FI_DEV_POWER_USAGE{{{_CHOSEN}}})", "{{Hostname}}"
                ),
                (
                    "Power of GPUs only: the 20 nodes with the highest power, and the sum of all "
                    "others."
                ),
                "watt",
                stacked=True,
            ),
            graph(
                "Hottest GPU, by node",
                [
                    (
                        largest(f"max by (Hostname) (DCGM_FI_DEV_GPU_TEMP{{{_CHOSEN}}})"),
                        "{{Hostname}}",
                    ),
                    (
                        f"quantile(0.5, max by (Hostname) (DCGM_FI_DEV_GPU_TEMP{{{_CHOSEN}}}))",
                        "median",
                    ),
                ],
                "The 20 hottest nodes.",
                "celsius",
            ),
            graph(
                "Thermal and power-brake throttling, by node",
                [
                    (
                        largest(
                            "max by (Hostname, reason) (rate(podgpu_device_throttled_seconds_total"
                            '{Hostname=~"$node",reason=~".*thermal|hw_power_brake"}[$__rate_interval]))'
                        ),
                        "{{Hostname}} {{reason}}",
                    )
                ],
                "Fraction of the time, for the most throttled GPU.",
                "percentunit",
            ),
            graph(
                "XID errors, by node and number",
                [
                    (
                        largest(
                            'sum by (Hostname, xid) (podgpu_xid_errors_total{Hostname=~"$node"})'
                        ),
                        "{{Hostname}} XID {{xid}}",
                    )
                ],
                "Since each exporter started. No series if there were no errors.",
                decimals=0,
            ),
            graph(
                "GPUs with a condition, by node and condition",
                [
                    (
                        largest(
                            "sum by (Hostname, condition) "
                            f'(podgpu_device_health{{{_CHOSEN},UUID!=""}})'
                        )
                        + " > 0",
                        "{{Hostname}} {{condition}}",
                    ),
                    (
                        largest(
                            "max by (Hostname) "
                            '(podgpu_device_count{state="lost",Hostname=~"$node"})'
                        ),
                        "{{Hostname}} lost",
                    ),
                ],
                "The 20 nodes with the most broken GPUs. Empty if all GPUs are healthy.",
                decimals=0,
            ),
            graph(
                "Exporters",
                [
                    ("count by (version) (podgpu_exporter_build_info)", "version {{version}}"),
                    ("count(podgpu_exporter_source_up == 0) or vector(0)", "failed sources"),
                    (
                        "sum(podgpu_exporter_unmapped_assignments) or vector(0)",
                        "unmapped assignments",
                    ),
                ],
                "Problems that make the panels above incomplete.",
                decimals=0,
            ),
        ),
    )


def _cost() -> Row:
    return Row(
        "From podgpu cluster: cost (needs that component, with --prices)",
        (
            stat(
                "Cost per hour",
                (
                    "sum(podgpu_namespace_cost_per_hour or "
                    'podgpu_waste_cost_per_hour{kind="unallocated"})'
                ),
                "Cost of all GPUs, allocated or not, in the currency of --prices.",
                decimals=2,
                width=12,
            ),
            _waste("Idle cost per hour", "idle", "Cost of the allocated GPUs that are idle."),
            _waste(
                "Under-used cost per hour",
                "underused",
                "Cost of the unused rest of shares that are in use.",
            ),
            _waste(
                "Unallocated cost per hour",
                "unallocated",
                "Cost of the GPUs that no pod or job has allocated.",
            ),
        ),
    )


def _waste(title: str, kind: str, about: str) -> Panel:
    return stat(
        title,
        f'sum(podgpu_waste_cost_per_hour{{kind="{kind}"}})',
        about,
        steps=((None, "green"), (0.01, "orange")),
        decimals=2,
        width=4,
    )


def _from_podgpu_cluster() -> Row:
    return Row(
        "From podgpu cluster (needs that component)",
        (
            graph(
                "Mean over GPUs in use",
                [
                    ("avg_GPU_utilization", "now"),
                    (
                        'podgpu_used_gpu_utilization_average_ratio{scope="cluster"} * 100',
                        "rolling, {{window}}",
                    ),
                ],
                "Mean of --used-field (default: memory copy utilisation).",
                "percent",
                top=100,
            ),
            graph(
                "Mean over GPUs in use, by namespace",
                [
                    (
                        largest('podgpu_used_gpu_utilization_ratio{scope="namespace"}'),
                        "{{namespace}}",
                    )
                ],
                "The same mean for the GPUs of each namespace.",
                "percentunit",
                top=1,
            ),
            graph(
                "Devices, by model",
                [
                    (
                        'sum by (model) (podgpu_node_allocated_gpus{node=~"$node"})',
                        "{{model}} allocated",
                    ),
                    ('sum by (model) (podgpu_node_used_gpus{node=~"$node"})', "{{model}} used"),
                    ('sum by (model) (podgpu_node_free_gpus{node=~"$node"})', "{{model}} free"),
                ],
                "Each MIG instance counts as one device.",
            ),
            graph(
                "GPUs in use",
                [('podgpu_used_gpus{scope="cluster"}', "in use")],
                "Number of GPUs in the mean.",
            ),
        ),
        collapsed=True,
    )


def cluster() -> Json:
    variables = [
        choice("model", "Model", "DCGM_FI_DEV_GPU_TEMP", "modelName"),
        choice("node", "Node", "podgpu_device_count", "Hostname"),
    ]
    about = "All GPUs of the cluster: number, holders, utilisation and nodes."
    return dashboard(
        "podgpu-cluster",
        "podgpu: cluster",
        about,
        variables,
        [_overview(), _cost(), _use(), _nodes(), _from_podgpu_cluster()],
    )
