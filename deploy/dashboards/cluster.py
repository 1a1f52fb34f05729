"""The whole cluster: how many GPUs there are, who has them, how the used ones are doing, and which nodes to look at."""

from __future__ import annotations

from deploy.dashboards.parts import Json, Query, Row, choice, dashboard, graph, largest, largest_and_rest, stat, table

_CHOSEN = 'modelName=~"$model",Hostname=~"$node"'
_ALL = f"count by (UUID) (DCGM_FI_DEV_GPU_TEMP{{{_CHOSEN}}})"
"""One element per GPU: every model has a temperature, in MIG mode too. Two jobs that see one GPU count once."""
_UTIL = f"max by (UUID) (DCGM_FI_DEV_GPU_UTIL{{{_CHOSEN}}})"
_BUSY = f"sum by (UUID) (rate(podgpu_device_busy_seconds_total{{{_CHOSEN}}}[$__rate_interval]))"
_HELD = "on (UUID) podgpu_allocation_info"
_MOST = largest("sum by (namespace, pod) (podgpu_allocation_share_ratio)", 100)
"""Every column of a table is for these pods only: else the lines of all others would be there with gaps."""
_NODE_PAGE = "/d/podgpu-node?${datasource:queryparam}&var-node=${__data.fields.Node}&${__url_time_range}"
_POD_PAGE = (
    "/d/podgpu-pod?${datasource:queryparam}&var-namespace=${__data.fields.Namespace}&var-pod=${__data.fields.Pod}"
    "&${__url_time_range}"
)
_BAD_ABOVE_0 = ((None, "green"), (1, "red"))


def _overview() -> Row:
    return Row(
        "Now",
        (
            stat("GPUs", f"count({_ALL})", "That answer.", width=3),
            stat(
                "Lost",
                'sum(podgpu_device_count{state="lost",Hostname=~"$node"})',
                "On the bus and silent.",
                steps=_BAD_ABOVE_0,
                width=3,
            ),
            stat("Held", f"count({_ALL} and {_HELD}) or vector(0)", "By somebody, in whole or in part.", width=3),
            stat("Free", f"count({_ALL} unless {_HELD}) or vector(0)", "Held by nobody.", width=3),
            stat(
                "Utilisation of GPUs in use",
                f"avg({_UTIL} > 0)",
                "Idle GPUs do not pull it down.",
                "percent",
                decimals=0,
                width=3,
            ),
            stat(
                "Power", f"sum(max by (UUID) (DCGM_FI_DEV_POWER_USAGE{{{_CHOSEN}}}))", "Of all GPUs.", "watt", width=3
            ),
            stat(
                "Nodes",
                'count(count by (Hostname) (podgpu_device_count{Hostname=~"$node"}))',
                "With an exporter that answers.",
                width=3,
            ),
            stat(
                "Alerts",
                'count(ALERTS{alertname=~"Podgpu.*",alertstate="firing"}) or vector(0)',
                "podgpu's, that fire.",
                steps=_BAD_ABOVE_0,
                width=3,
            ),
        ),
    )


def _use() -> Row:
    return Row(
        "Use",
        (
            graph(
                "GPUs by what becomes of them",
                [
                    (f"count({_ALL} and {_HELD} and on (UUID) ({_BUSY} > 0)) or vector(0)", "held and working"),
                    (
                        f"count({_ALL} and {_HELD} unless on (UUID) ({_BUSY} > 0)) or vector(0)",
                        "held and doing nothing",
                    ),
                    (f"count({_ALL} unless {_HELD}) or vector(0)", "free"),
                ],
                "The three add up to all GPUs.",
                stacked=True,
            ),
            graph(
                "Utilisation",
                [
                    (f"avg({_UTIL} > 0)", "mean of GPUs in use"),
                    (f"avg({_UTIL})", "mean of all GPUs"),
                    (f"quantile(0.1, {_UTIL})", "a tenth is below"),
                    (f"quantile(0.9, {_UTIL})", "a tenth is above"),
                ],
                "GPUs in MIG mode have no such figure.",
                "percent",
                top=100,
            ),
            graph(
                "GPUs held, by namespace",
                largest_and_rest("sum by (namespace) (podgpu_allocation_share_ratio)", "{{namespace}}"),
                "Shares added up; a MIG instance counts as one.",
                stacked=True,
            ),
            graph(
                "GPUs busy, by namespace",
                largest_and_rest(
                    "sum by (namespace) (rate(podgpu_namespace_gpu_busy_seconds_total[$__rate_interval]))",
                    "{{namespace}}",
                ),
                "Seconds of work per second. Needs hostPID.",
                stacked=True,
            ),
            table(
                "Pods",
                [
                    Query(_MOST, "GPUs held", decimals=2),
                    Query(
                        f"sum by (namespace, pod) (podgpu_container_gpu_utilization_ratio) and {_MOST}",
                        "GPUs' worth of work",
                        decimals=2,
                    ),
                    Query(
                        f"sum by (namespace, pod) (podgpu_container_gpu_memory_used_bytes) and {_MOST}",
                        "Memory",
                        "bytes",
                    ),
                    Query(
                        "sum by (namespace, pod) (rate(podgpu_container_gpu_energy_joules_total[$__rate_interval]))"
                        f" and {_MOST}",
                        "Power charged",
                        "watt",
                    ),
                ],
                {"namespace": "Namespace", "pod": "Pod"},
                "The hundred that hold most.",
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
                    Query(f"count by ({by}) (count by ({by}, UUID) (DCGM_FI_DEV_GPU_TEMP{{{_CHOSEN}}}))", "GPUs"),
                    Query(f"count by ({by}) ({held})", "Held"),
                    Query(f"avg by ({by}) (DCGM_FI_DEV_GPU_UTIL{{{_CHOSEN}}})", "Utilisation", "percent", 0),
                    Query(f"sum by ({by}) (DCGM_FI_DEV_POWER_USAGE{{{_CHOSEN}}})", "Power", "watt"),
                    Query(f"max by ({by}) (DCGM_FI_DEV_GPU_TEMP{{{_CHOSEN}}})", "Hottest", "celsius"),
                ],
                {"Hostname": "Node", "modelName": "Model"},
                "One line per node and model.",
                link=("Node", "This node", _NODE_PAGE),
            ),
            graph(
                "Power, by node",
                largest_and_rest(f"sum by (Hostname) (DCGM_FI_DEV_POWER_USAGE{{{_CHOSEN}}})", "{{Hostname}}"),
                "GPUs only. The twenty nodes that draw most, and all others together.",
                "watt",
                stacked=True,
            ),
            graph(
                "Hottest GPU, by node",
                [
                    (largest(f"max by (Hostname) (DCGM_FI_DEV_GPU_TEMP{{{_CHOSEN}}})"), "{{Hostname}}"),
                    (
                        f"quantile(0.5, max by (Hostname) (DCGM_FI_DEV_GPU_TEMP{{{_CHOSEN}}}))",
                        "half of the nodes are below",
                    ),
                ],
                "The twenty hottest nodes. Rows of racks show up as groups of lines.",
                "celsius",
            ),
            graph(
                "Held down by heat or the power brake, by node",
                [
                    (
                        largest(
                            "max by (Hostname, reason) (rate(podgpu_device_throttled_seconds_total"
                            '{Hostname=~"$node",reason=~".*thermal|hw_power_brake"}[$__rate_interval]))'
                        ),
                        "{{Hostname}} {{reason}}",
                    )
                ],
                "Part of the time, of the worst GPU.",
                "percentunit",
            ),
            graph(
                "XID errors, by node and number",
                [
                    (
                        largest('sum by (Hostname, xid) (podgpu_xid_errors_total{Hostname=~"$node"})'),
                        "{{Hostname}} XID {{xid}}",
                    )
                ],
                "Since each exporter started. No series: none came.",
                decimals=0,
            ),
            graph(
                "GPUs lost, by node",
                [(largest('max by (Hostname) (podgpu_device_count{state="lost",Hostname=~"$node"})'), "{{Hostname}}")],
                "The twenty worst. 0 is how it should be.",
                decimals=0,
            ),
            graph(
                "Exporters",
                [
                    ("count by (version) (podgpu_exporter_build_info)", "version {{version}}"),
                    ("count(podgpu_exporter_source_up == 0) or vector(0)", "sources that do not answer"),
                    ("sum(podgpu_exporter_unmapped_assignments) or vector(0)", "assignments that name no GPU"),
                ],
                "Whether the figures above can be trusted.",
                decimals=0,
            ),
        ),
    )


def _from_podgpu_cluster() -> Row:
    return Row(
        "From podgpu cluster (needs that component)",
        (
            graph(
                "Mean over GPUs in use",
                [
                    ("avg_GPU_utilization", "now"),
                    ('podgpu_used_gpu_utilization_average_ratio{scope="cluster"} * 100', "rolling, {{window}}"),
                ],
                "Of --used-field; the memory interface unless told otherwise.",
                "percent",
                top=100,
            ),
            graph(
                "Mean over GPUs in use, by namespace",
                [(largest('podgpu_used_gpu_utilization_ratio{scope="namespace"}'), "{{namespace}}")],
                "The same for the GPUs that a namespace's pods hold.",
                "percentunit",
                top=1,
            ),
            graph(
                "Devices, by model",
                [
                    ('sum by (model) (podgpu_node_allocated_gpus{node=~"$node"})', "{{model}} held"),
                    ('sum by (model) (podgpu_node_used_gpus{node=~"$node"})', "{{model}} in use"),
                    ('sum by (model) (podgpu_node_free_gpus{node=~"$node"})', "{{model}} free"),
                ],
                "MIG instances count each.",
            ),
            graph("GPUs in use", [('podgpu_used_gpus{scope="cluster"}', "in use")], "That the mean is over."),
        ),
        collapsed=True,
    )


def cluster() -> Json:
    variables = [
        choice("model", "Model", "DCGM_FI_DEV_GPU_TEMP", "modelName"),
        choice("node", "Node", "podgpu_device_count", "Hostname"),
    ]
    about = "All GPUs of the cluster: how many, whose, how busy, on which nodes."
    return dashboard(
        "podgpu-cluster", "podgpu: cluster", about, variables, [_overview(), _use(), _nodes(), _from_podgpu_cluster()]
    )
