"""Dashboard of one node: the health and the holders of its GPUs, and the state of its exporter."""

from __future__ import annotations

from deploy.dashboards.parts import BROKEN, Json, Query, Row, choice, dashboard, graph, stat, table

_NODE = 'Hostname=~"$node"'
_GPU = f'{_NODE},gpu=~"$gpu"'
_HERE = f"and on (instance) podgpu_device_count{{{_NODE}}}"
"""Selects the series of the node's exporter in families without a host label."""
_DEVICE = "gpu, GPU_I_ID"
_HOLDER = f"{_DEVICE}, namespace, pod, container"
_NAME = "GPU {{gpu}} {{GPU_I_ID}}"
_POD_PAGE = (
    "/d/podgpu-pod?${datasource:queryparam}&var-namespace=${__data.fields.Namespace}&var-pod=${__data.fields.Pod}"
    "&${__url_time_range}"
)
_BAD_ABOVE_0 = ((None, "green"), (1, "red"))


def _overview() -> Row:
    return Row(
        "Now",
        (
            stat(
                "GPUs",
                f'sum(podgpu_device_count{{{_NODE},state="visible"}})',
                "Number of GPUs that respond.",
                width=3,
            ),
            stat(
                "Broken",
                f"count(max by (UUID) (podgpu_device_health{{{_GPU},{BROKEN}}} == 1)) or vector(0)",
                "GPUs with a problem. The table below lists the problems.",
                steps=_BAD_ABOVE_0,
                width=3,
            ),
            stat(
                "Devices allocated",
                f"count(count by (UUID, GPU_I_ID) (podgpu_allocation_info {_HERE})) or vector(0)",
                "Allocated GPUs and MIG instances, used or idle.",
                width=3,
            ),
            stat(
                "Power",
                f"sum(DCGM_FI_DEV_POWER_USAGE{{{_GPU}}})",
                "Sum over all GPUs.",
                "watt",
                width=3,
            ),
            stat(
                "Hottest GPU",
                f"max(DCGM_FI_DEV_GPU_TEMP{{{_GPU}}})",
                "The throttling temperature depends on the model. Most models throttle from 83 °C.",
                "celsius",
                steps=((None, "green"), (80, "orange"), (87, "red")),
                width=3,
            ),
            stat(
                "XID errors",
                f"sum(increase(podgpu_device_xid_errors_total{{{_GPU}}}[$__range]))",
                "In the selected time range.",
                steps=_BAD_ABOVE_0,
                decimals=0,
                width=3,
            ),
            stat(
                "Age of the readings",
                f"time() - max(podgpu_exporter_snapshot_timestamp_seconds and on (instance) "
                f"last_over_time(podgpu_device_count{{{_NODE}}}[1d]))",
                "Time since the exporter last read a GPU.",
                "s",
                steps=((None, "green"), (90, "orange"), (300, "red")),
                decimals=0,
                width=3,
            ),
            stat(
                "Alerts",
                f'count(ALERTS{{alertname=~"Podgpu.*",alertstate="firing",{_NODE}}}) or vector(0)',
                "Firing alerts of podgpu for GPUs of this node.",
                steps=_BAD_ABOVE_0,
                width=3,
            ),
            table(
                "Problems",
                [
                    Query(
                        f"time() - max by (gpu, UUID, condition) "
                        f"(podgpu_device_condition_since_timestamp_seconds{{{_GPU}}})",
                        "For",
                        "s",
                        0,
                    ),
                ],
                {"gpu": "GPU", "condition": "Condition", "UUID": "UUID"},
                (
                    "Empty if all GPUs are healthy. The node's page and /health explain each "
                    "problem "
                    "and what to do."
                ),
                height=5,
            ),
            table(
                "Holders",
                [
                    Query(
                        f"max by ({_HOLDER}) (podgpu_allocation_share_ratio {_HERE})",
                        "Share allocated",
                        "percentunit",
                    ),
                    Query(
                        f"max by ({_HOLDER}) (podgpu_container_gpu_utilization_ratio{{{_GPU}}})",
                        "Utilisation",
                        "percentunit",
                    ),
                    Query(
                        f"sum by ({_HOLDER}) (podgpu_container_gpu_memory_used_bytes{{{_GPU}}})",
                        "Memory",
                        "bytes",
                    ),
                    Query(
                        f"sum by ({_HOLDER}) "
                        f"(rate(podgpu_container_gpu_energy_joules_total{{{_GPU}}}[$__rate_interval]))",
                        "Power charged",
                        "watt",
                    ),
                    Query(
                        f"sum by ({_HOLDER}) (podgpu_container_gpu_processes{{{_GPU}}})",
                        "Processes",
                    ),
                ],
                {
                    "gpu": "GPU",
                    "GPU_I_ID": "Instance",
                    "namespace": "Namespace",
                    "pod": "Pod",
                    "container": "Container",
                },
                "Usage of each container. Without hostPID, only the share is known.",
                link=("Pod", "This pod", _POD_PAGE),
            ),
        ),
    )


def _work() -> Row:
    used, free = (
        f"max by ({_DEVICE}) (DCGM_FI_DEV_FB_{what}{{{_GPU}}})" for what in ("USED", "FREE")
    )
    return Row(
        "Work",
        (
            graph(
                "Utilisation",
                [
                    (f"max by (gpu) (DCGM_FI_DEV_GPU_UTIL{{{_GPU}}})", "GPU {{gpu}}"),
                    (
                        (
                            f"max by ({_DEVICE}) "
                            f'(DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{_GPU},GPU_I_ID!=""}}) * 100'
                        ),
                        _NAME,
                    ),
                ],
                (
                    "Fraction of the time in which at least one kernel ran. MIG instances: "
                    "activity "
                    "of their engine."
                ),
                "percent",
                top=100,
            ),
            graph(
                "Memory used",
                [(f"{used} / ({used} + {free})", _NAME)],
                "Fraction of the memory that is not reserved by the driver.",
                "percentunit",
                top=1,
            ),
            graph(
                "Activity by unit",
                [
                    (f"avg(DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{_GPU}}})", "engine active"),
                    (f"avg(DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{_GPU}}})", "tensor cores"),
                    (f"avg(DCGM_FI_PROF_DRAM_ACTIVE{{{_GPU}}})", "memory interface"),
                ],
                "Mean over the selected GPUs. Needs Hopper or later.",
                "percentunit",
                top=1,
            ),
            graph(
                "Traffic",
                [
                    (f"sum(DCGM_FI_PROF_PCIE_RX_BYTES{{{_GPU}}})", "PCIe to GPUs"),
                    (f"sum(DCGM_FI_PROF_PCIE_TX_BYTES{{{_GPU}}})", "PCIe from GPUs"),
                    (f"sum(DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL{{{_GPU}}}) * 1e6", "NVLink"),
                ],
                "Sum over the selected GPUs.",
                "Bps",
            ),
        ),
    )


def _health() -> Row:
    return Row(
        "Health",
        (
            graph(
                "Power",
                [(f"max by (gpu) (DCGM_FI_DEV_POWER_USAGE{{{_GPU}}})", "GPU {{gpu}}")],
                "Power of each GPU.",
                "watt",
            ),
            graph(
                "Temperature",
                [
                    (f"max by (gpu) (DCGM_FI_DEV_GPU_TEMP{{{_GPU}}})", "GPU {{gpu}}"),
                    (f"max by (gpu) (DCGM_FI_DEV_MEMORY_TEMP{{{_GPU}}})", "GPU {{gpu}} memory"),
                ],
                "Memory temperature only if the GPU has a sensor.",
                "celsius",
            ),
            graph(
                "SM clock",
                [(f"max by (gpu) (DCGM_FI_DEV_SM_CLOCK{{{_GPU}}}) * 1e6", "GPU {{gpu}}")],
                "Decreases while the GPU is throttled.",
                "hertz",
            ),
            graph(
                "Throttling, by reason",
                [
                    (
                        "max by (gpu, reason) (rate(podgpu_device_throttled_seconds_total"
                        f'{{{_GPU},reason!="low_utilization"}}[$__rate_interval]))',
                        "GPU {{gpu}} {{reason}}",
                    )
                ],
                (
                    "Fraction of the time. power_cap is normal under full load; thermal and "
                    "power-brake reasons are not."
                ),
                "percentunit",
                top=1,
            ),
            graph(
                "XID errors by number",
                [
                    (
                        f"sum by (gpu, xid) (podgpu_xid_errors_total{{{_GPU}}})",
                        "GPU {{gpu}} XID {{xid}}",
                    )
                ],
                "Since the exporter started. No series if there were no errors.",
                decimals=0,
            ),
            graph(
                "Memory rows and PCIe replays",
                [
                    (
                        f"max by (gpu) (DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS{{{_GPU}}})",
                        "GPU {{gpu}} rows remapped, uncorrectable",
                    ),
                    (
                        f"max by (gpu) (DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS{{{_GPU}}})",
                        "GPU {{gpu}} rows remapped, correctable",
                    ),
                    (
                        f"max by (gpu) (DCGM_FI_DEV_ROW_REMAP_FAILURE{{{_GPU}}})",
                        "GPU {{gpu}} remapping failed",
                    ),
                    (
                        (
                            "max by (gpu) "
                            f"(increase(DCGM_FI_DEV_PCIE_REPLAY_COUNTER{{{_GPU}}}[$__rate_interval]))"
                        ),
                        "GPU {{gpu}} PCIe replays",
                    ),
                ],
                "Rising values can be an early sign of failing hardware.",
            ),
        ),
    )


def _exporter() -> Row:
    return Row(
        "The exporter",
        (
            graph(
                "Sources",
                [(f"podgpu_exporter_source_up {_HERE}", "{{source}}")],
                "1 if the last reading succeeded. usage is always 0 without hostPID.",
                top=1,
                width=8,
            ),
            graph(
                "Duration of a reading",
                [(f"podgpu_exporter_collect_duration_seconds {_HERE}", "{{source}}")],
                "A GPU that is much slower than the others may fail soon.",
                "s",
                width=8,
            ),
            graph(
                "Failed readings",
                [
                    (
                        "sum by (source, reason) "
                        "(increase(podgpu_exporter_source_errors_total[$__rate_interval])"
                        f" {_HERE})",
                        "{{source}} {{reason}}",
                    )
                ],
                "Reasons are explained in docs/metrics.md.",
                width=8,
            ),
        ),
        collapsed=True,
    )


def node() -> Json:
    variables = [
        choice("node", "Node", "podgpu_device_count", "Hostname", many=False),
        choice("gpu", "GPU", 'DCGM_FI_DEV_GPU_TEMP{Hostname=~"$node"}', "gpu"),
    ]
    about = "The GPUs of one node: holders, utilisation and health."
    return dashboard(
        "podgpu-node",
        "podgpu: node",
        about,
        variables,
        [_overview(), _work(), _health(), _exporter()],
    )
