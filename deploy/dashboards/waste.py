"""What GPUs cost, whom, and how much of that nobody needed. Prices are typed in at the top."""

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
    number,
    stat,
    table,
)

_PAYER = 'namespace=~"$namespace",modelName=~"$model"'
_HOLDER = 'namespace=~"$namespace"'
_JOULES_PER_KWH = "3.6e6"
_POD_PAGE = (
    "/d/podgpu-pod?${datasource:queryparam}&var-namespace=${__data.fields.Namespace}&var-pod=${__data.fields.Pod}"
    "&${__url_time_range}"
)


def _total(what: str) -> str:
    """In the time shown. The namespaces' counters outlive containers: short jobs are in them."""
    return f"sum(increase(podgpu_namespace_gpu_{what}_total{{{_PAYER}}}[$__range]))"


def _by_namespace(what: str) -> str:
    return f"sum by (namespace) (increase(podgpu_namespace_gpu_{what}_total{{{_PAYER}}}[$__range]))"


def _gpus(what: str) -> str:
    return f"sum by (namespace) (rate(podgpu_namespace_gpu_{what}_seconds_total{{{_PAYER}}}[$__rate_interval]))"


def _overview() -> Row:
    held, busy, joules = _total("allocated_seconds"), _total("busy_seconds"), _total("energy_joules")
    return Row(
        "In the time shown",
        (
            stat(
                "GPU-hours allocated", f"{held} / 3600", "Share × time, short jobs included.", "h", decimals=1, width=3
            ),
            stat("GPU-hours used", f"{busy} / 3600", "In which kernels ran.", "h", decimals=1, width=3),
            stat(
                "Used part",
                f"{busy} / {held}",
                "Of what was allocated.",
                "percentunit",
                steps=((None, "red"), (0.2, "orange"), (0.5, "green")),
                decimals=0,
                width=3,
            ),
            stat(
                "Cost of what was allocated",
                f"{held} / 3600 * $gpu_hour_price",
                "At the price above.",
                decimals=2,
                width=3,
            ),
            stat(
                "Of that, idle",
                f"clamp_min({held} - {busy}, 0) / 3600 * $gpu_hour_price",
                "Allocated while nothing ran.",
                decimals=2,
                steps=((None, "orange"),),
                width=3,
            ),
            stat("Energy", f"{joules} / {_JOULES_PER_KWH}", "Charged to namespaces.", "kwatth", decimals=1, width=3),
            stat(
                "Cost of energy",
                f"{joules} / {_JOULES_PER_KWH} * $kwh_price",
                "At the price above.",
                decimals=2,
                width=3,
            ),
            stat(
                "Idle holders now",
                f"count(sum by (namespace, pod, container, UUID, GPU_I_ID) "
                f"(rate(podgpu_container_gpu_idle_seconds_total{{{_HOLDER}}}[30m])) > 0.99) or vector(0)",
                "Containers that hold a GPU and have run nothing for half an hour.",
                steps=((None, "green"), (1, "orange")),
                width=3,
            ),
            table(
                "By namespace",
                [
                    Query(f"{_by_namespace('allocated_seconds')} / 3600", "GPU-hours allocated", decimals=1),
                    Query(f"{_by_namespace('busy_seconds')} / 3600", "GPU-hours used", decimals=1),
                    Query(
                        f"{_by_namespace('busy_seconds')} / {_by_namespace('allocated_seconds')}",
                        "Used part",
                        "percentunit",
                        0,
                    ),
                    Query(f"{_by_namespace('allocated_seconds')} / 3600 * $gpu_hour_price", "Cost of GPUs", decimals=2),
                    Query(
                        f"clamp_min({_by_namespace('allocated_seconds')} - {_by_namespace('busy_seconds')}, 0)"
                        " / 3600 * $gpu_hour_price",
                        "Of that, idle",
                        decimals=2,
                    ),
                    Query(f"{_by_namespace('energy_joules')} / {_JOULES_PER_KWH}", "Energy", "kwatth", 1),
                    Query(
                        f"{_by_namespace('energy_joules')} / {_JOULES_PER_KWH} * $kwh_price",
                        "Cost of energy",
                        decimals=2,
                    ),
                ],
                {"namespace": "Namespace"},
                "For a bill choose the time to the day.",
            ),
        ),
    )


def _waste() -> Row:
    place = {"namespace": "Namespace", "pod": "Pod", "container": "Container", "Hostname": "Node", "gpu": "GPU"}
    place |= {"GPU_I_ID": "Instance", "modelName": "Model"}
    by = ", ".join(place)
    idlers = largest(f"sum by ({by}) (increase(podgpu_container_gpu_idle_seconds_total{{{_HOLDER}}}[$__range]))", 50)
    return Row(
        "Where it goes",
        (
            table(
                "Who leaves GPUs idle",
                [
                    Query(idlers, "Idle in the time shown", "s", 0),
                    Query(
                        f"max by ({by}) (podgpu_container_gpu_utilization_ratio{{{_HOLDER}}}) and {idlers}",
                        "Utilisation now",
                        "percentunit",
                    ),
                ],
                place,
                "Worst first. Containers that still run; those that ended are in the hours by namespace.",
                link=("Pod", "This pod", _POD_PAGE),
            ),
            graph(
                "GPUs allocated and idle, by namespace",
                largest_and_rest(f"clamp_min({_gpus('allocated')} - {_gpus('busy')}, 0)", "{{namespace}}"),
                "What could be given back.",
                stacked=True,
            ),
            graph(
                "GPUs free, by model",
                [
                    (
                        "count by (modelName) (count by (modelName, UUID) (DCGM_FI_DEV_GPU_TEMP)"
                        " unless on (UUID) podgpu_allocation_info)",
                        "{{modelName}}",
                    )
                ],
                "Paid for, and free all the same.",
                stacked=True,
            ),
            graph(
                "Cost per hour, by namespace",
                largest_and_rest(f"{_gpus('allocated')} * $gpu_hour_price", "{{namespace}}"),
                "Of what is allocated, at the price above.",
                stacked=True,
                decimals=2,
            ),
            graph(
                "Power, by namespace",
                [
                    *largest_and_rest(
                        "sum by (namespace) "
                        f"(rate(podgpu_namespace_gpu_energy_joules_total{{{_PAYER}}}[$__rate_interval]))",
                        "{{namespace}}",
                    ),
                    ("sum(rate(podgpu_device_unattributed_energy_joules_total[$__rate_interval]))", "nobody's"),
                ],
                "They add up to what the GPUs draw.",
                "watt",
                stacked=True,
            ),
            graph(
                "Used part of what is allocated, by namespace",
                [(f"bottomk({LINES}, {_gpus('busy')} / {_gpus('allocated')})", "{{namespace}}")],
                "The twenty lowest. Low for long: fewer or smaller GPUs would do.",
                "percentunit",
            ),
            graph(
                "Energy nobody is charged for",
                [
                    (
                        "sum(rate(podgpu_device_unattributed_energy_joules_total[$__rate_interval]))"
                        " / sum(rate(podgpu_device_energy_joules_total[$__rate_interval]))",
                        "part of all",
                    )
                ],
                "Free GPUs, processes outside of pods. Near 100 %: podgpu sees no processes (hostPID).",
                "percentunit",
                top=1,
            ),
        ),
    )


def _from_podgpu_cluster() -> Row:
    since = f"podgpu_idle_allocated_gpu_since_timestamp_seconds{{{_HOLDER}}}"
    columns = {
        "namespace": "Namespace",
        "pod": "Pod",
        "container": "Container",
        "node": "Node",
        "gpu": "GPU",
        "model": "Model",
    }
    return Row(
        "From podgpu cluster (needs that component)",
        (
            table(
                "Idle longer than --idle-after",
                [Query(largest(f"time() - max by ({', '.join(columns)}) ({since})", 200), "Idle for", "s", 0)],
                columns,
                "With holder and since when; the 200 longest.",
                link=("Pod", "This pod", _POD_PAGE),
            ),
            graph(
                "Idle GPUs, by namespace",
                largest_and_rest(f"sum by (namespace) (podgpu_namespace_idle_gpus{{{_HOLDER}}})", "{{namespace}}"),
                "Idle longer than --idle-after.",
                stacked=True,
            ),
            graph(
                "Wasted per hour by --prices",
                [
                    (
                        largest(f"sum by (namespace, currency) (podgpu_namespace_wasted_per_hour{{{_HOLDER}}})"),
                        "{{namespace}} ({{currency}})",
                    ),
                    (
                        f"sum by (currency) (podgpu_namespace_cost_per_hour{{{_HOLDER}}})",
                        "all that is allocated ({{currency}})",
                    ),
                ],
                "What is idle from the first second on, beside the cost of all that is allocated.",
                decimals=2,
            ),
            graph(
                "Cost per hour by --prices",
                [
                    (
                        largest(
                            "sum by (namespace, kind, currency) "
                            f"(rate(podgpu_namespace_cost_total{{{_HOLDER}}}[$__rate_interval])) * 3600"
                        ),
                        "{{namespace}} {{kind}} ({{currency}})",
                    )
                ],
                "Each moment at its own price. The kinds are three views, not parts of a sum.",
                decimals=2,
            ),
        ),
        collapsed=True,
    )


def waste() -> Json:
    variables = [
        choice("namespace", "Namespace", "podgpu_namespace_gpu_allocated_seconds_total", "namespace"),
        choice("model", "Model", "podgpu_namespace_gpu_allocated_seconds_total", "modelName"),
        number("gpu_hour_price", "Price of a GPU-hour", "2.50"),
        number("kwh_price", "Price of a kWh", "0.25"),
    ]
    about = "GPU-hours, idleness, energy and cost by namespace. Needs what podgpu sees with hostPID."
    return dashboard(
        "podgpu-waste-and-cost",
        "podgpu: waste and cost",
        about,
        variables,
        [_overview(), _waste(), _from_podgpu_cluster()],
    )
