"""Dashboard of a pod or namespace: its GPUs, its usage, and other pods on the same GPUs."""

from __future__ import annotations

from deploy.dashboards.parts import (
    LINES,
    Json,
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

_POD = 'namespace=~"$namespace",pod=~"$pod"'
_ITS_GPUS = f"and on (UUID) podgpu_allocation_info{{{_POD}}}"
_ITS_DEVICES = f"and on (UUID, GPU_I_ID) podgpu_allocation_info{{{_POD}}}"
_PART = "namespace, pod, container, Hostname, gpu, GPU_I_ID"
_NAME = "{{pod}} {{container}} {{Hostname}} GPU {{gpu}} {{GPU_I_ID}}"
_NODE_PAGE = (
    "/d/podgpu-node?${datasource:queryparam}&var-node=${__data.fields.Node}&${__url_time_range}"
)


_IDLE = f'podgpu_container_gpu_wasted_seconds_total{{{_POD},kind="idle"}}'


def _in_range(what: str) -> str:
    return f"sum(increase({_counter(what)}[$__range]))"


def _counter(what: str) -> str:
    return f"podgpu_container_gpu_{what}_total{{{_POD}}}"


def _overview() -> Row:
    place = {"Hostname": "Node", "gpu": "GPU", "GPU_I_ID": "Instance", "modelName": "Model"}
    who = {"namespace": "Namespace", "pod": "Pod", "container": "Container"}
    by = ", ".join([*place, *who])
    shown = largest(f"max by ({by}) (podgpu_container_gpu_utilization_ratio{{{_POD}}})", 200)
    return Row(
        "In the selected time range",
        (
            stat(
                "GPUs allocated now",
                f"sum(podgpu_allocation_share_ratio{{{_POD}}})",
                "Sum of shares. Half a GPU is 0.5.",
                decimals=2,
            ),
            stat(
                "Utilisation now",
                f"avg(podgpu_container_gpu_utilization_ratio{{{_POD}}})",
                "Mean over the pod's GPUs.",
                "percentunit",
            ),
            stat(
                "Used",
                f"{_in_range('busy_seconds')} / {_in_range('allocated_seconds')}",
                (
                    "Used fraction of the allocated GPU time. Can exceed 100 % if the share is "
                    "less "
                    "than one GPU."
                ),
                "percentunit",
                steps=((None, "red"), (0.2, "orange"), (0.5, "green")),
            ),
            stat(
                "GPU-hours allocated",
                f"{_in_range('allocated_seconds')} / 3600",
                "Share × time.",
                "h",
                decimals=1,
            ),
            stat(
                "GPU-hours idle",
                f"sum(increase({_IDLE}[$__range])) / 3600",
                "Share × time in which nothing ran.",
                "h",
                decimals=1,
                steps=((None, "green"), (1, "orange")),
            ),
            stat(
                "Energy",
                f"{_in_range('energy_joules')} / 3.6e6",
                "Energy attributed to the pod.",
                "kwatth",
                decimals=2,
            ),
            table(
                "Containers",
                [
                    Query(shown, "Utilisation", "percentunit"),
                    Query(
                        (
                            f"sum by ({by}) (podgpu_container_gpu_memory_used_bytes{{{_POD}}}) and "
                            f"{shown}"
                        ),
                        "Memory",
                        "bytes",
                    ),
                    Query(
                        f"sum by ({by}) (podgpu_container_gpu_processes{{{_POD}}}) and {shown}",
                        "Processes",
                    ),
                    Query(
                        f"sum by ({by}) "
                        f"(rate(podgpu_container_gpu_energy_joules_total{{{_POD}}}[$__rate_interval]))"
                        f" and {shown}",
                        "Power charged",
                        "watt",
                    ),
                ],
                {**place, **who},
                (
                    "The 200 busiest containers. Needs hostPID. Without it, see the panels of "
                    "whole "
                    "GPUs below."
                ),
                link=("Node", "This node", _NODE_PAGE),
                height=7,
            ),
        ),
    )


def _use() -> Row:
    return Row(
        "Usage",
        (
            graph(
                "Utilisation",
                [
                    (
                        largest(
                            f"max by ({_PART}) (podgpu_container_gpu_utilization_ratio{{{_POD}}})"
                        ),
                        _NAME,
                    )
                ],
                "Fraction of the time in which the container's processes ran.",
                "percentunit",
                top=1,
            ),
            graph(
                "Memory",
                [
                    (
                        largest(
                            f"sum by ({_PART}) (podgpu_container_gpu_memory_used_bytes{{{_POD}}})"
                        ),
                        _NAME,
                    )
                ],
                "Memory used by the container's processes.",
                "bytes",
            ),
            graph(
                "GPUs: allocated, used, idle",
                [
                    (f"sum(rate({counter}[$__rate_interval]))", name)
                    for counter, name in (
                        (_counter("allocated_seconds"), "allocated"),
                        (_counter("busy_seconds"), "used"),
                        (_IDLE, "idle"),
                    )
                ],
                "Number of GPUs. The difference between allocated and used is not needed.",
            ),
            graph(
                "Power charged",
                largest_and_rest(
                    (
                        f"sum by ({_PART}) "
                        f"(rate(podgpu_container_gpu_energy_joules_total{{{_POD}}}[$__rate_interval]))"
                    ),
                    _NAME,
                ),
                "Attributed by use, or by share while nothing runs.",
                "watt",
                stacked=True,
            ),
        ),
    )


def _devices() -> Row:
    return Row(
        "GPUs of the pod",
        (
            graph(
                "Activity by unit",
                [
                    (f"avg(DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{_POD}}})", "engine active"),
                    (f"avg(DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{_POD}}})", "tensor cores"),
                    (f"avg(DCGM_FI_PROF_DRAM_ACTIVE{{{_POD}}})", "memory interface"),
                ],
                "Only GPUs and instances that the pod does not share. Needs Hopper or later. If "
                "the engine is active "
                "and the tensor cores are not, the data types or shapes may not suit tensor cores.",
                "percentunit",
                top=1,
            ),
            graph(
                "Free memory",
                [
                    (
                        f"bottomk({LINES}, min by (Hostname, gpu, GPU_I_ID) (DCGM_FI_DEV_FB_FREE "
                        f"{_ITS_DEVICES}))"
                        " * 1048576",
                        "{{Hostname}} GPU {{gpu}} {{GPU_I_ID}}",
                    )
                ],
                "The 20 devices with the least free memory.",
                "bytes",
            ),
            graph(
                "Throttling, by reason",
                [
                    (
                        largest(
                            "max by (Hostname, gpu, UUID, reason) "
                            "(rate(podgpu_device_throttled_seconds_total"
                            f'{{reason!="low_utilization"}}[$__rate_interval])) {_ITS_GPUS}'
                        ),
                        "{{Hostname}} GPU {{gpu}} {{reason}}",
                    )
                ],
                "Fraction of the time in which the GPU was throttled.",
                "percentunit",
                top=1,
            ),
            graph(
                "XID errors",
                [
                    (
                        largest(
                            "sum by (Hostname, gpu, UUID) (podgpu_device_xid_errors_total) "
                            f"{_ITS_GPUS}"
                        ),
                        "{{Hostname}} GPU {{gpu}}",
                    )
                ],
                (
                    "Errors on the pod's GPUs since the exporter started, also those caused by "
                    "other "
                    "pods."
                ),
                decimals=0,
            ),
            graph(
                "All containers on these GPUs",
                [
                    (
                        largest(
                            f"max by ({_PART}) (podgpu_container_gpu_utilization_ratio "
                            f"{_ITS_DEVICES})"
                        ),
                        "{{namespace}} " + _NAME,
                    )
                ],
                "Shows other pods on shared GPUs.",
                "percentunit",
                width=24,
            ),
        ),
    )


def pod() -> Json:
    variables = [
        choice("namespace", "Namespace", "podgpu_allocation_info", "namespace"),
        choice("pod", "Pod", 'podgpu_allocation_info{namespace=~"$namespace"}', "pod"),
    ]
    about = "GPUs and usage of a pod, and other pods on the same GPUs."
    return dashboard(
        "podgpu-pod", "podgpu: pod", about, variables, [_overview(), _use(), _devices()]
    )
