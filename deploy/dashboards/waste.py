"""Dashboard of GPU-hours, idle time, energy and cost by namespace. Prices are variables of the
dashboard.
"""

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


def _total(what: str, kind: str = "") -> str:
    """Returns a query for the increase in the time range. Counters per namespace include containers
    that have ended.
    """
    return f"sum({_increase(what, kind)})"


def _by_namespace(what: str, kind: str = "") -> str:
    return f"sum by (namespace) ({_increase(what, kind)})"


def _increase(what: str, kind: str) -> str:
    return f"increase({_counter(what, kind)}[$__range])"


def _gpus(what: str, kind: str = "") -> str:
    return f"sum by (namespace) (rate({_counter(f'{what}_seconds', kind)}[$__rate_interval]))"


def _counter(what: str, kind: str) -> str:
    """Returns a selector. `kind`: of wasted seconds, idle or underused."""
    chosen = f'{_PAYER},kind="{kind}"' if kind else _PAYER
    return f"podgpu_namespace_gpu_{what}_total{{{chosen}}}"


def _overview() -> Row:
    held = _total("allocated_seconds")
    busy = _total("busy_seconds")
    idle = _total("wasted_seconds", "idle")
    joules = _total("energy_joules")
    return Row(
        "In the selected time range",
        (
            stat(
                "GPU-hours allocated",
                f"{held} / 3600",
                "Share × time, including ended pods.",
                "h",
                decimals=1,
                width=3,
            ),
            stat(
                "GPU-hours used",
                f"{busy} / 3600",
                "Time in which kernels ran.",
                "h",
                decimals=1,
                width=3,
            ),
            stat(
                "Used",
                f"{busy} / {held}",
                "Used fraction of the allocated GPU-hours.",
                "percentunit",
                steps=((None, "red"), (0.2, "orange"), (0.5, "green")),
                decimals=0,
                width=3,
            ),
            stat(
                "Cost of allocated GPUs",
                f"{held} / 3600 * $gpu_hour_price",
                "At the price entered above.",
                decimals=2,
                width=3,
            ),
            stat(
                "Cost of idle GPUs",
                f"{idle} / 3600 * $gpu_hour_price",
                "Cost of allocated GPUs while their holders ran nothing.",
                decimals=2,
                steps=((None, "orange"),),
                width=3,
            ),
            stat(
                "Energy",
                f"{joules} / {_JOULES_PER_KWH}",
                "Energy attributed to namespaces.",
                "kwatth",
                decimals=1,
                width=3,
            ),
            stat(
                "Cost of energy",
                f"{joules} / {_JOULES_PER_KWH} * $kwh_price",
                "At the price entered above.",
                decimals=2,
                width=3,
            ),
            stat(
                "Idle holders now",
                f"count(sum by (namespace, pod, container, UUID, GPU_I_ID) "
                f"(rate(podgpu_container_gpu_idle_seconds_total{{{_HOLDER}}}[30m])) > 0.99) or "
                "vector(0)",
                "Containers that hold a GPU and have run nothing for half an hour.",
                steps=((None, "green"), (1, "orange")),
                width=3,
            ),
            table(
                "By namespace",
                [
                    Query(
                        f"{_by_namespace('allocated_seconds')} / 3600",
                        "GPU-hours allocated",
                        decimals=1,
                    ),
                    Query(f"{_by_namespace('busy_seconds')} / 3600", "GPU-hours used", decimals=1),
                    Query(
                        f"{_by_namespace('busy_seconds')} / {_by_namespace('allocated_seconds')}",
                        "Used",
                        "percentunit",
                        0,
                    ),
                    Query(
                        f"{_by_namespace('allocated_seconds')} / 3600 * $gpu_hour_price",
                        "Cost of GPUs",
                        decimals=2,
                    ),
                    Query(
                        f"{_by_namespace('wasted_seconds', 'idle')} / 3600 * $gpu_hour_price",
                        "Cost of idle GPUs",
                        decimals=2,
                    ),
                    Query(
                        f"{_by_namespace('energy_joules')} / {_JOULES_PER_KWH}",
                        "Energy",
                        "kwatth",
                        1,
                    ),
                    Query(
                        f"{_by_namespace('energy_joules')} / {_JOULES_PER_KWH} * $kwh_price",
                        "Cost of energy",
                        decimals=2,
                    ),
                ],
                {"namespace": "Namespace"},
                "For a bill, select a time range of whole days.",
            ),
        ),
    )


def _waste() -> Row:
    place = {
        "namespace": "Namespace",
        "pod": "Pod",
        "container": "Container",
        "Hostname": "Node",
        "gpu": "GPU",
    }
    place |= {"GPU_I_ID": "Instance", "modelName": "Model"}
    by = ", ".join(place)
    idlers = largest(
        f"sum by ({by}) (increase(podgpu_container_gpu_idle_seconds_total{{{_HOLDER}}}[$__range]))",
        50,
    )
    return Row(
        "Waste",
        (
            table(
                "Idle containers",
                [
                    Query(idlers, "Idle time", "s", 0),
                    Query(
                        (
                            f"max by ({by}) (podgpu_container_gpu_utilization_ratio{{{_HOLDER}}}) "
                            "and "
                            f"{idlers}"
                        ),
                        "Utilisation now",
                        "percentunit",
                    ),
                ],
                place,
                (
                    "Longest idle time first. Only running containers; the table by namespace also "
                    "includes ended ones."
                ),
                link=("Pod", "This pod", _POD_PAGE),
            ),
            graph(
                "GPUs allocated and idle, by namespace",
                largest_and_rest(_gpus("wasted", "idle"), "{{namespace}}"),
                "Allocated GPUs whose holders run nothing.",
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
                "GPUs that are not allocated.",
                stacked=True,
            ),
            graph(
                "Cost per hour, by namespace",
                largest_and_rest(f"{_gpus('allocated')} * $gpu_hour_price", "{{namespace}}"),
                "Cost of allocated GPUs, at the price entered above.",
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
                    (
                        "sum(rate(podgpu_device_unattributed_energy_joules_total[$__rate_interval]))",
                        "unattributed",
                    ),
                ],
                "The sum is the power of all GPUs.",
                "watt",
                stacked=True,
            ),
            graph(
                "Used fraction of allocated GPUs, by namespace",
                [(f"bottomk({LINES}, {_gpus('busy')} / {_gpus('allocated')})", "{{namespace}}")],
                "The 20 lowest. If a value stays low, fewer or smaller GPUs are sufficient.",
                "percentunit",
            ),
            graph(
                "Unattributed energy",
                [
                    (
                        "sum(rate(podgpu_device_unattributed_energy_joules_total[$__rate_interval]))"
                        " / sum(rate(podgpu_device_energy_joules_total[$__rate_interval]))",
                        "fraction of all energy",
                    )
                ],
                (
                    "Energy of free GPUs and of processes outside pods. Near 100 %: podgpu cannot "
                    "see "
                    "processes (hostPID)."
                ),
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
                [
                    Query(
                        largest(f"time() - max by ({', '.join(columns)}) ({since})", 200),
                        "Idle for",
                        "s",
                        0,
                    )
                ],
                columns,
                "The 200 longest idle times, with their holders.",
                link=("Pod", "This pod", _POD_PAGE),
            ),
            graph(
                "Idle GPUs, by namespace",
                largest_and_rest(
                    f"sum by (namespace) (podgpu_namespace_long_idle_gpus{{{_HOLDER}}})",
                    "{{namespace}}",
                ),
                "Idle longer than --idle-after.",
                stacked=True,
            ),
            graph(
                "Wasted per hour by --prices",
                [
                    (
                        largest(
                            "sum by (kind, namespace, currency) "
                            f'(podgpu_waste_cost_per_hour{{kind!="unallocated",{_HOLDER}}})'
                        ),
                        "{{kind}} {{namespace}} ({{currency}})",
                    ),
                    (
                        'sum by (kind, currency) (podgpu_waste_cost_per_hour{kind="unallocated"})',
                        "{{kind}} ({{currency}})",
                    ),
                    (
                        f"sum by (currency) (podgpu_namespace_cost_per_hour{{{_HOLDER}}})",
                        "all allocated GPUs ({{currency}})",
                    ),
                ],
                (
                    "Cost of idle, under-used and unallocated GPUs, regardless of --idle-after, and "
                    "the cost of all allocated GPUs."
                ),
                decimals=2,
            ),
            graph(
                "Cost per hour by --prices",
                [
                    (
                        largest(
                            "sum by (namespace, currency) "
                            f"(podgpu_namespace_cost_per_hour{{{_HOLDER}}})"
                        ),
                        "{{namespace}} ({{currency}})",
                    )
                ],
                "Cost of the allocated GPUs, with the price at each time.",
                decimals=2,
            ),
        ),
        collapsed=True,
    )


def _savings() -> Row:
    # Replicas of podgpu cluster have the same figures.
    columns = {
        "kind": "Do",
        "namespace": "Namespace",
        "pod": "Pod",
        "model": "Model",
        "target": "Then",
    }
    by = ", ".join(columns)
    pods = f"max by ({by}) (podgpu_savings_pod_gpus{{{_HOLDER}}})"
    costs = f"max by ({by}, currency) (podgpu_savings_pod_cost_per_month{{{_HOLDER}}})"
    return Row(
        "Savings (needs podgpu cluster)",
        (
            stat(
                "GPUs that could be given back",
                "sum(max by (kind) (podgpu_savings_gpus))",
                "From the last 7 days, of all namespaces. Empty with less than a day of history.",
                decimals=1,
                width=6,
            ),
            stat(
                "Their cost per month",
                "sum by (currency) (max by (kind, currency) (podgpu_savings_cost_per_month))",
                "Of 730 hours, by --prices.",
                decimals=0,
                width=6,
            ),
            stat(
                "Error of predicted waiting times",
                "max(podgpu_savings_prediction_error_ratio)",
                "Mean over pods that share a GPU already, as a fraction of time.",
                "percentunit",
                decimals=1,
                width=6,
            ),
            table(
                "What could be given back",
                [
                    Query(largest(pods, 200), "GPUs saved", decimals=2),
                    Query(f"sum by ({by}) ({costs})", "Cost per month", decimals=2),
                ],
                columns,
                (
                    "What each pod would save: the 200 largest. podgpu savings and the page "
                    "also show the evidence, the assumptions and how much slower pods would be."
                ),
                link=("Pod", "This pod", _POD_PAGE),
            ),
        ),
        collapsed=True,
    )


def _tokens() -> Row:
    tokens = f"podgpu:pod_llm_tokens:rate5m{{{_HOLDER}}}"
    models = "sum by (namespace, model)"
    pods = "sum by (namespace, pod, model)"
    price = "Cost per million tokens"
    energy = "J per token"
    return Row(
        "Tokens of LLM engines (needs the recording rules; cost needs podgpu cluster)",
        (
            graph(
                "Tokens per second",
                largest_and_rest(f"{models} ({tokens})", "{{namespace}}/{{model}}"),
                "Prompt and generated tokens of engines in pods that hold GPUs, by model.",
                decimals=0,
                stacked=True,
            ),
            graph(
                "Cost per million tokens",
                [
                    (
                        largest(f"podgpu:model_cost_per_million_tokens:rate5m{{{_HOLDER}}}"),
                        "{{namespace}}/{{model}} ({{currency}})",
                    )
                ],
                (
                    "What the pods of a model pay for their GPUs, also while they wait or are idle,"
                    " by --prices of podgpu cluster."
                ),
                decimals=2,
            ),
            table(
                "Models",
                [
                    Query(f"{models} ({tokens})", "Tokens per second", decimals=0),
                    Query(
                        "sum by (namespace, model, currency)"
                        f" (podgpu:model_cost_per_million_tokens:rate5m{{{_HOLDER}}})",
                        price,
                        decimals=2,
                    ),
                    Query(
                        f"{models} (podgpu:model_joules_per_token:rate5m{{{_HOLDER}}})",
                        energy,
                        decimals=3,
                    ),
                ],
                {"namespace": "Namespace", "model": "Model"},
                "Added up over the pods of a model, so also for separate prefill and decode pods.",
                width=12,
            ),
            table(
                "Pods",
                [
                    Query(largest(f"{pods} ({tokens})", 200), "Tokens per second", decimals=0),
                    Query(
                        "sum by (namespace, pod, currency)"
                        f" (podgpu:pod_cost_per_million_tokens:rate5m{{{_HOLDER}}})",
                        price,
                        decimals=2,
                    ),
                    Query(
                        "sum by (namespace, pod)"
                        f" (podgpu:pod_joules_per_token:rate5m{{{_HOLDER}}})",
                        energy,
                        decimals=3,
                    ),
                ],
                {"namespace": "Namespace", "pod": "Pod", "model": "Model"},
                "The 200 pods with the most tokens.",
                link=("Pod", "This pod", _POD_PAGE),
                width=12,
            ),
        ),
        collapsed=True,
    )


def waste() -> Json:
    variables = [
        choice(
            "namespace", "Namespace", "podgpu_namespace_gpu_allocated_seconds_total", "namespace"
        ),
        choice("model", "Model", "podgpu_namespace_gpu_allocated_seconds_total", "modelName"),
        number("gpu_hour_price", "Price of a GPU-hour", "2.50"),
        number("kwh_price", "Price of a kWh", "0.25"),
    ]
    about = "GPU-hours, idleness, energy and cost by namespace. Usage needs hostPID."
    return dashboard(
        "podgpu-waste-and-cost",
        "podgpu: waste and cost",
        about,
        variables,
        [_overview(), _waste(), _savings(), _tokens(), _from_podgpu_cluster()],
    )
