"""The whole cluster: how many GPUs there are, who has them, how the used ones are doing, and which nodes to look at."""

from __future__ import annotations

from deploy.dashboards.parts import Json, Query, Row, choice, dashboard, graph, largest, largest_and_rest, stat, table

_CHOSEN = 'modelName=~"$model",Hostname=~"$node"'
_ALL = f"count by (UUID) (DCGM_FI_DEV_GPU_TEMP{{{_CHOSEN}}})"
"""One element per GPU: every model has a temperature, in MIG mode too. Two jobs that see one GPU count once."""
_UTIL = f"max by (UUID) (DCGM_FI_DEV_GPU_UTIL{{{_CHOSEN}}})"
_BUSY = f"sum by (UUID) (rate(podgpu_device_busy_seconds_total{{{_CHOSEN}}}[$__rate_interval]))"
_HELD = "on (UUID) podgpu_allocation_info"
_ALLOCATED = f"count({_ALL} and {_HELD}) or vector(0)"
_USED = f"count({_ALL} and {_HELD} and on (UUID) ({_BUSY} > 0)) or vector(0)"
_IDLE = f"count({_ALL} and {_HELD} and on (UUID) ({_BUSY} == 0)) or vector(0)"
_NOT_KNOWN = f"count({_ALL} and {_HELD} unless on (UUID) {_BUSY}) or vector(0)"
_FREE = f"count({_ALL} unless {_HELD}) or vector(0)"
_UNWELL = f'podgpu_device_health{{{_CHOSEN},UUID!=""}} == 1'
_GONE = 'podgpu_device_health{node=~"$node",condition="node_gone"} == 1'
"""What only podgpu cluster can say: of an exporter that is gone nothing is left here."""
_BROKEN = f"(count(max by (UUID) ({_UNWELL})) or vector(0)) + (count({_GONE}) or vector(0))"
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
            stat("GPUs", f"count({_ALL})", "That answer."),
            stat("Allocated", _ALLOCATED, "To somebody, in whole or in part."),
            stat("Used", _USED, "Allocated, and something ran on it lately."),
            stat("Idle", _IDLE, "Allocated, and nothing runs.", steps=((None, "green"), (1, "orange"))),
            stat("Free", _FREE, "Allocated to nobody."),
            stat(
                "Broken",
                _BROKEN,
                "Lost, unreadable, with an XID that needs action, bad memory, throttled, NVLink down, without a driver,"
                " or gone with its node (that one needs podgpu cluster).",
                steps=_BAD_ABOVE_0,
            ),
            stat(
                "Utilisation of GPUs in use",
                f"avg({_UTIL} > 0)",
                "Idle GPUs do not pull it down.",
                "percent",
                decimals=0,
                width=6,
            ),
            stat(
                "Power", f"sum(max by (UUID) (DCGM_FI_DEV_POWER_USAGE{{{_CHOSEN}}}))", "Of all GPUs.", "watt", width=6
            ),
            stat(
                "Nodes",
                'count(count by (Hostname) (podgpu_device_count{Hostname=~"$node"}))',
                "With an exporter that answers.",
                width=6,
            ),
            stat(
                "Alerts",
                'count(ALERTS{alertname=~"Podgpu.*",alertstate="firing"}) or vector(0)',
                "podgpu's, that fire.",
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
                "GPUs by what becomes of them",
                [(_USED, "used"), (_IDLE, "idle"), (_NOT_KNOWN, "not known"), (_FREE, "free")],
                "They add up to all GPUs that answer. Used, idle and not known are allocated.",
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
                "GPUs allocated, by namespace",
                largest_and_rest("sum by (namespace) (podgpu_allocation_share_ratio)", "{{namespace}}"),
                "Shares added up; a MIG instance counts as one.",
                stacked=True,
            ),
            graph(
                "GPUs used, by namespace",
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
                    Query(_MOST, "GPUs allocated", decimals=2),
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
                "The hundred that have most.",
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
                    Query(f"count by ({by}) ({held})", "Allocated"),
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
                "GPUs broken, by node and condition",
                [
                    (
                        largest(f'sum by (Hostname, condition) (podgpu_device_health{{{_CHOSEN},UUID!=""}})') + " > 0",
                        "{{Hostname}} {{condition}}",
                    ),
                    (
                        largest('max by (Hostname) (podgpu_device_count{state="lost",Hostname=~"$node"})'),
                        "{{Hostname}} do not answer",
                    ),
                ],
                "The twenty worst. No line above 0 is how it should be.",
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


def _cost() -> Row:
    return Row(
        "From podgpu cluster: cost (needs that component, with --prices)",
        (
            stat(
                "Cost per hour",
                "sum(podgpu_namespace_cost_per_hour)",
                "Of what is allocated now, in the currency of --prices.",
                decimals=2,
                width=12,
            ),
            stat(
                "Wasted per hour",
                "sum(podgpu_namespace_wasted_per_hour)",
                "Of that, what is idle.",
                steps=((None, "green"), (0.01, "orange")),
                decimals=2,
                width=12,
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
                    ('sum by (model) (podgpu_node_allocated_gpus{node=~"$node"})', "{{model}} allocated"),
                    ('sum by (model) (podgpu_node_used_gpus{node=~"$node"})', "{{model}} used"),
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
        "podgpu-cluster",
        "podgpu: cluster",
        about,
        variables,
        [_overview(), _cost(), _use(), _nodes(), _from_podgpu_cluster()],
    )
