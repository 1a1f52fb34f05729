"""One pod, or a namespace: what it holds, what it makes of it, and what its GPUs and neighbours are up to."""

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
_NODE_PAGE = "/d/podgpu-node?${datasource:queryparam}&var-node=${__data.fields.Node}&${__url_time_range}"


def _in_range(what: str) -> str:
    return f"sum(increase(podgpu_container_gpu_{what}_total{{{_POD}}}[$__range]))"


def _overview() -> Row:
    place = {"Hostname": "Node", "gpu": "GPU", "GPU_I_ID": "Instance", "modelName": "Model"}
    who = {"namespace": "Namespace", "pod": "Pod", "container": "Container"}
    by = ", ".join([*place, *who])
    shown = largest(f"max by ({by}) (podgpu_container_gpu_utilization_ratio{{{_POD}}})", 200)
    return Row(
        "In the time shown",
        (
            stat(
                "GPUs allocated now",
                f"sum(podgpu_allocation_share_ratio{{{_POD}}})",
                "Shares added up: half a GPU is 0.5.",
                decimals=2,
            ),
            stat(
                "Utilisation now",
                f"avg(podgpu_container_gpu_utilization_ratio{{{_POD}}})",
                "Mean over its GPUs.",
                "percentunit",
            ),
            stat(
                "Used part",
                f"{_in_range('busy_seconds')} / {_in_range('allocated_seconds')}",
                "Of the time it had GPUs. More than 100 % is possible where a share is less than a GPU.",
                "percentunit",
                steps=((None, "red"), (0.2, "orange"), (0.5, "green")),
            ),
            stat("GPU-hours allocated", f"{_in_range('allocated_seconds')} / 3600", "Share × time.", "h", decimals=1),
            stat(
                "GPU-hours idle",
                f"{_in_range('idle_seconds')} / 3600",
                "Allocated, and nothing at all run.",
                "h",
                decimals=1,
                steps=((None, "green"), (1, "orange")),
            ),
            stat(
                "Energy", f"{_in_range('energy_joules')} / 3.6e6", "Its part of its GPUs' energy.", "kwatth", decimals=2
            ),
            table(
                "Where it runs",
                [
                    Query(shown, "Utilisation", "percentunit"),
                    Query(
                        f"sum by ({by}) (podgpu_container_gpu_memory_used_bytes{{{_POD}}}) and {shown}",
                        "Memory",
                        "bytes",
                    ),
                    Query(f"sum by ({by}) (podgpu_container_gpu_processes{{{_POD}}}) and {shown}", "Processes"),
                    Query(
                        f"sum by ({by}) (rate(podgpu_container_gpu_energy_joules_total{{{_POD}}}[$__rate_interval]))"
                        f" and {shown}",
                        "Power charged",
                        "watt",
                    ),
                ],
                {**place, **who},
                "The 200 busiest. Needs hostPID; without it look at the figures of whole GPUs below.",
                link=("Node", "This node", _NODE_PAGE),
                height=7,
            ),
        ),
    )


def _use() -> Row:
    return Row(
        "Its own use",
        (
            graph(
                "Utilisation",
                [(largest(f"max by ({_PART}) (podgpu_container_gpu_utilization_ratio{{{_POD}}})"), _NAME)],
                "Part of each second in which its processes ran.",
                "percentunit",
                top=1,
            ),
            graph(
                "Memory",
                [(largest(f"sum by ({_PART}) (podgpu_container_gpu_memory_used_bytes{{{_POD}}})"), _NAME)],
                "Of its processes.",
                "bytes",
            ),
            graph(
                "GPUs: allocated, used, idle",
                [
                    (f"sum(rate(podgpu_container_gpu_{what}_seconds_total{{{_POD}}}[$__rate_interval]))", name)
                    for what, name in (("allocated", "allocated"), ("busy", "used"), ("idle", "idle"))
                ],
                "As numbers of GPUs. Between allocated and used lies what could be given back.",
            ),
            graph(
                "Power charged",
                largest_and_rest(
                    f"sum by ({_PART}) (rate(podgpu_container_gpu_energy_joules_total{{{_POD}}}[$__rate_interval]))",
                    _NAME,
                ),
                "By use; by share held while nobody runs.",
                "watt",
                stacked=True,
            ),
        ),
    )


def _devices() -> Row:
    return Row(
        "Its GPUs",
        (
            graph(
                "What its GPUs do with the time",
                [
                    (f"avg(DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{_POD}}})", "engine active"),
                    (f"avg(DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{_POD}}})", "tensor cores"),
                    (f"avg(DCGM_FI_PROF_DRAM_ACTIVE{{{_POD}}})", "memory interface"),
                ],
                "Of GPUs and instances that it holds alone; Hopper and later. Engine high and tensor low: data "
                "types and shapes that the tensor cores cannot take.",
                "percentunit",
                top=1,
            ),
            graph(
                "Memory left on its GPUs",
                [
                    (
                        f"bottomk({LINES}, min by (Hostname, gpu, GPU_I_ID) (DCGM_FI_DEV_FB_FREE {_ITS_DEVICES}))"
                        " * 1048576",
                        "{{Hostname}} GPU {{gpu}} {{GPU_I_ID}}",
                    )
                ],
                "The next larger batch has to fit in there. The twenty fullest.",
                "bytes",
            ),
            graph(
                "Held down, by reason",
                [
                    (
                        largest(
                            "max by (Hostname, gpu, UUID, reason) (rate(podgpu_device_throttled_seconds_total"
                            f'{{reason!="low_utilization"}}[$__rate_interval])) {_ITS_GPUS}'
                        ),
                        "{{Hostname}} GPU {{gpu}} {{reason}}",
                    )
                ],
                "Why it may be slower than yesterday.",
                "percentunit",
                top=1,
            ),
            graph(
                "XID errors on its GPUs",
                [
                    (
                        largest(f"sum by (Hostname, gpu, UUID) (podgpu_device_xid_errors_total) {_ITS_GPUS}"),
                        "{{Hostname}} GPU {{gpu}}",
                    )
                ],
                "Since the exporter started, whoever caused them.",
                decimals=0,
            ),
            graph(
                "Everybody on its GPUs",
                [
                    (
                        largest(f"max by ({_PART}) (podgpu_container_gpu_utilization_ratio {_ITS_DEVICES})"),
                        "{{namespace}} " + _NAME,
                    )
                ],
                "On shared GPUs: who else runs there.",
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
    about = "What a pod holds of GPUs, what it makes of it, and what goes on beside it."
    return dashboard("podgpu-pod", "podgpu: pod", about, variables, [_overview(), _use(), _devices()])
