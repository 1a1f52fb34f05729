"""Writes PromQL: selectors, and queries for series of all nodes, DCGM fields and idle devices."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from podgpu.metrics.adapter import (
    DCGM_BLANK,
    GPU_LABELS,
    IDENTITY,
    POD_LABEL_VARIANTS,
    REPLICA_LABELS,
    TARGET_LABELS,
    UUID_LABELS,
    WORKLOAD_LABELS,
)
from podgpu.metrics.conditions import FIELD_CONDITIONS
from podgpu.metrics.fields import (
    ENGINE,
    MEMORY_FIELDS,
    POWER,
    TEMPERATURE,
    UTIL,
    XID_NAME,
    fields,
    generations,
    meaning,
    names_of,
    rename_of,
)

HELD_NAMES = ("podgpu_allocation_info", *names_of(UTIL), *names_of(ENGINE))
"""Series of GPUs, with the labels of their holders."""
_IDLE_CHECKS = 30  # number of times in the idle window at which a sample must exist
_SPECIAL = re.compile(r"([\\.+*?()|\[\]{}^$])")  # special characters in RE2


def quote(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def one_of(label: str, values: Iterable[str]) -> str:
    return f"{label}=~{quote('|'.join(map(escape, values)))}"


def escape(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text)


def select(names: Sequence[str], *matchers: str) -> str:
    """Returns a selector for series with one of the names. Skips empty matchers."""
    used = [matcher for matcher in matchers if matcher]
    if len(names) == 1:
        return f"{names[0]}{{{','.join(used)}}}"
    return f"{{{','.join((one_of('__name__', names), *used))}}}"


def select_gpus(names: Sequence[str], uuids: Sequence[str], match: str) -> str:
    """Returns a selector for series of the given GPUs, or of all GPUs."""
    series = []
    for label in UUID_LABELS:
        matcher = one_of(label, uuids) if uuids else f'{label}!=""'
        series.append(select(names, matcher, match))
    return " or ".join(series)


def select_held(namespace: str, pod: str, match: str) -> str:
    """Returns a selector for the series of GPUs that a pod holds."""
    series = []
    for namespace_label, name_label, _ in POD_LABEL_VARIANTS:
        in_namespace = f"{namespace_label}={quote(namespace)}"
        of_pod = f"{name_label}={quote(pod)}"
        series.append(select(HELD_NAMES, in_namespace, of_pod, match))
    return " or ".join(series)


def by(*labels: str) -> str:
    return f"by ({', '.join(dict.fromkeys(labels))})"


class SeriesQuery(NamedTuple):
    what: str
    text: str
    # if it fails, the round fails; otherwise GPUs would be shown with wrong holders
    required: bool = False


def series_queries(
    match: str,
    node_labels: Sequence[str],
    keep_fields: Iterable[str],
    cluster_label: str,
) -> list[SeriesQuery]:
    """Returns queries for the input of `nodes_from_vectors`.

    `max by` drops unused labels, to keep responses small.
    """
    kept = [spec.field.name for name in sorted(keep_fields) if (spec := meaning(name))]
    identity = (*IDENTITY, *node_labels)
    target_labels = (cluster_label, *TARGET_LABELS, *REPLICA_LABELS)
    series_labels = ("__name__", *target_labels, *GPU_LABELS, "GPU_I_ID", *WORKLOAD_LABELS)

    def query(
        what: str, names: Sequence[str], *labels: str, condition: str = "", required: bool = False
    ) -> SeriesQuery:
        series = f"{select(names, match)}{condition}"
        return SeriesQuery(what, f"max {by(*series_labels, *labels)} ({series})", required)

    since = "device_condition_since_timestamp_seconds"
    timed = (*field_names(UTIL, ENGINE, TEMPERATURE), *own_names(since))
    own_pods = by("__name__", "job", "instance", "namespace", "pod")
    targets = (
        f"max {own_pods} (up) and on (job, instance) "
        f"group by (job, instance) ({select(timed, match)})"
    )
    scrape_times = []
    for name in timed:
        series = select((name,), match)
        scrape_times.append(f"max {by(*target_labels)} (timestamp({series}))")
    faulty = [fields()[number].name for number in FIELD_CONDITIONS]
    return [
        query("GPUs", field_names(UTIL, ENGINE, TEMPERATURE, *kept), *identity, required=True),
        query(
            "holders",
            own_names("allocation_info", "allocation_share_ratio", "container_gpu_processes"),
            "source",
            required=True,
        ),
        SeriesQuery("targets", targets, required=True),
        SeriesQuery("times of scrapes", " or ".join(scrape_times), required=True),
        query(
            "memory",
            (*field_names(*MEMORY_FIELDS), *own_names("device_memory_used_bytes")),
            *identity,
        ),
        query("power", (*field_names(POWER), *own_names("device_energy_joules_total")), *identity),
        query(
            "use by containers",
            own_names("container_gpu_utilization_ratio", "container_gpu_memory_used_bytes"),
        ),
        query(
            "time by containers",
            own_names(
                "container_gpu_busy_seconds_total",
                "container_gpu_idle_seconds_total",
                "container_gpu_energy_joules_total",
            ),
        ),
        query(
            "exporters",
            own_names(
                "exporter_build_info",
                "exporter_snapshot_timestamp_seconds",
                "exporter_source_up",
                "device_count",
            ),
            "version",
            "source",
            "state",
            *node_labels,
        ),
        query(
            "conditions",
            own_names(since, "device_last_holder_info"),
            "condition",
            "detail",
            *identity,
        ),
        query("faults", field_names(*faulty, XID_NAME), condition=" > 0"),
    ]


def field_names(*fields: str) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for field in fields:
        names |= dict.fromkeys(names_of(field))
    return tuple(names)


def own_names(*names: str) -> tuple[str, ...]:
    return tuple(f"podgpu_{name}" for name in names)


def field_query(field: str, labels: str, select_names: Callable[[Sequence[str]], str]) -> str:
    """Returns a query for a DCGM field in the unit of dcgm-exporter 4.8.

    `max` merges equal values of MIG instances.
    """
    old_names, new_names = generations(field)
    query = f"max {labels} (({select_names(old_names)}) < {DCGM_BLANK})"
    rename = rename_of(field)
    if rename is None:
        return query
    blank = f"{DCGM_BLANK * rename.factor:.0f}"
    newer = f"max {labels} (({select_names(new_names)}) < {blank})"
    return f"{query} or {newer} / {rename.factor!r}"


def idle_query(match: str, window: float) -> str:
    """Returns a query for devices whose utilisation was 0 during the whole window.

    Uses GPU_UTIL for GPUs, and engine activity for MIG instances and GPUs without GPU_UTIL.
    """
    length = round(window * 1000)
    step = max(1, length // _IDLE_CHECKS)

    def idle(field: str, keys: Sequence[str], *matchers: str) -> str:
        largest = []
        for names in filter(None, generations(field)):
            largest.append(f"max_over_time({select(names, *matchers, match)}[{length}ms])")
        highest = f"max {by(*keys)} ({' or '.join(largest)})"
        # The device may have been busy in a gap without samples, so samples must exist at every
        # check.
        present = f"group {by(*keys)} ({select(names_of(field), *matchers, match)})"
        checks = f"count_over_time(({present})[{length}ms:{step}ms]) >= {_IDLE_CHECKS}"
        return f"(({highest} == 0) and on ({', '.join(keys)}) ({checks}))"

    gpu = ("UUID", "uuid")
    gpus = idle(UTIL, gpu)
    has_util = select(names_of(UTIL), match)
    whole_gpus = idle(ENGINE, gpu, 'GPU_I_ID=""')
    engines = f"({whole_gpus} unless on (UUID, uuid) {has_util})"
    instances = idle(ENGINE, (*gpu, "GPU_I_ID"), 'GPU_I_ID!=""')
    return f"{gpus} or {engines} or {instances}"
