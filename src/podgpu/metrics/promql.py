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
    name = ""
    if len(names) == 1:
        name = names[0]
    else:
        used.insert(0, one_of("__name__", names))
    return f"{name}{{{','.join(used)}}}"


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


def sum_increase(series: str, window: str, keys: Sequence[str]) -> str:
    """Returns a query for the increase of a counter, by the labels `keys`.

    `max` merges the series of an HA pair, `sum` those of exporters.
    """
    of_exporter = by(*keys, "job", "instance")
    return f"sum {by(*keys)} (max {of_exporter} (increase({series}[{window}])))"


_SINCE = "device_condition_since_timestamp_seconds"
_HOLDERS = ("allocation_info", "allocation_share_ratio", "container_gpu_processes")
_CONTAINER_USE = ("container_gpu_utilization_ratio", "container_gpu_memory_used_bytes")
_CONTAINER_TIME = (
    "container_gpu_busy_seconds_total",
    "container_gpu_idle_seconds_total",
    "container_gpu_energy_joules_total",
)
_WASTED = ("container_gpu_wasted_seconds_total",)
_EXPORTERS = (
    "exporter_build_info",
    "exporter_snapshot_timestamp_seconds",
    "exporter_source_up",
    "device_count",
)


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
    identity = (*IDENTITY, *node_labels)
    target_labels = (cluster_label, *TARGET_LABELS, *REPLICA_LABELS)
    series_labels = ("__name__", *target_labels, *GPU_LABELS, "GPU_I_ID", *WORKLOAD_LABELS)

    def query(
        what: str,
        names: Sequence[str],
        *labels: str,
        matcher: str = "",
        condition: str = "",
        required: bool = False,
    ) -> SeriesQuery:
        series = f"{select(names, matcher, match)}{condition}"
        return SeriesQuery(what, f"max {by(*series_labels, *labels)} ({series})", required)

    timed = (*field_names(UTIL, ENGINE, TEMPERATURE), *own_names(_SINCE))
    targets = _query_targets(timed, match)
    scrape_times = _query_scrape_times(timed, match, by(*target_labels))

    gpu_fields = field_names(UTIL, ENGINE, TEMPERATURE, *sorted(keep_fields))
    memory = (*field_names(*MEMORY_FIELDS), *own_names("device_memory_used_bytes"))
    power = (*field_names(POWER), *own_names("device_energy_joules_total"))
    conditions = own_names(_SINCE, "device_last_holder_info")
    faulty = [fields()[number].name for number in FIELD_CONDITIONS]
    faults = field_names(*faulty, XID_NAME)

    return [
        query("GPUs", gpu_fields, *identity, required=True),
        query("holders", own_names(*_HOLDERS), "source", required=True),
        SeriesQuery("targets", targets, required=True),
        SeriesQuery("times of scrapes", scrape_times, required=True),
        query("memory", memory, *identity),
        query("power", power, *identity),
        query("use by containers", own_names(*_CONTAINER_USE)),
        query("time by containers", own_names(*_CONTAINER_TIME)),
        query("under-used time", own_names(*_WASTED), "kind", matcher='kind="underused"'),
        query("exporters", own_names(*_EXPORTERS), "version", "source", "state", *node_labels),
        query("conditions", conditions, "condition", "detail", *identity),
        query("faults", faults, condition=" > 0"),
    ]


def _query_targets(names: Sequence[str], match: str) -> str:
    own_pods = by("__name__", "job", "instance", "namespace", "pod")
    targets = f"group by (job, instance) ({select(names, match)})"
    return f"max {own_pods} (up) and on (job, instance) {targets}"


def _query_scrape_times(names: Sequence[str], match: str, target: str) -> str:
    times = []
    for name in names:
        series = select((name,), match)
        times.append(f"max {target} (timestamp({series}))")
    return " or ".join(times)


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


# Idle devices of exporters that do not count idle time. As in `fleet.hold.measure_use`, a device is
# idle if its utilisation is 0: GPU_UTIL of a GPU, and engine activity of a MIG instance.

_IDLE_WINDOW = "10m"
_HOLDER_LABELS = (
    "cluster",
    "node",
    "Hostname",
    "hostname",
    "gpu",
    "UUID",
    "GPU_I_ID",
    "namespace",
    "pod",
    "container",
)


def _select_highest(field: str, window: str, *matchers: str) -> list[str]:
    """Returns a query for each name of the field: the highest value in the window.

    It is 0 if the device was idle.
    """
    series = []
    for name in names_of(field):
        series.append(f"max_over_time({select((name,), *matchers)}[{window}])")
    return series


def idle_rule() -> str:
    """Returns the expression of the recording rule for the idle fraction of each holder's time.

    podgpu's exporter counts idle time. For others, the result is 1 or 0.
    """
    labels = by(*_HOLDER_LABELS)
    idle = f'increase(podgpu_container_gpu_wasted_seconds_total{{kind="idle"}}[{_IDLE_WINDOW}])'
    held = f"increase(podgpu_container_gpu_allocated_seconds_total[{_IDLE_WINDOW}])"
    utilization = _select_highest(UTIL, _IDLE_WINDOW, 'pod!=""')
    utilization += _select_highest(ENGINE, _IDLE_WINDOW, 'pod!=""', 'GPU_I_ID!=""')
    highest = "\n  or ".join(utilization)
    return f"""\
sum {labels} (
  {idle}
)
/
sum {labels} (
  {held}
)
or
max {labels} (
  {highest}
) == bool 0
"""


def idle_query(match: str, window: float) -> str:
    """Returns a query for devices whose utilisation was 0 during the whole window.

    Uses engine activity also for GPUs without GPU_UTIL.
    """
    length_ms = round(window * 1000)
    gpu_keys = ("UUID", "uuid")
    with_util = _query_idle(UTIL, gpu_keys, [match], length_ms)

    of_gpus = ['GPU_I_ID=""', match]
    whole_gpus = _query_idle(ENGINE, gpu_keys, of_gpus, length_ms)
    has_util = select(names_of(UTIL), match)
    without_util = f"({whole_gpus} unless on (UUID, uuid) {has_util})"

    instance_keys = (*gpu_keys, "GPU_I_ID")
    of_instances = ['GPU_I_ID!=""', match]
    instances = _query_idle(ENGINE, instance_keys, of_instances, length_ms)
    return f"{with_util} or {without_util} or {instances}"


def _query_idle(field: str, keys: Sequence[str], matchers: Sequence[str], length_ms: int) -> str:
    """Returns a query for the devices whose value of this field was 0 all the time."""
    grouped = by(*keys)
    series = " or ".join(_select_highest(field, f"{length_ms}ms", *matchers))
    was_idle = f"max {grouped} ({series}) == 0"

    # The device may have been busy in a gap without samples, so samples must exist at every check.
    every = select(names_of(field), *matchers)
    step_ms = max(1, length_ms // _IDLE_CHECKS)
    present = f"(group {grouped} ({every}))[{length_ms}ms:{step_ms}ms]"
    was_present = f"count_over_time({present}) >= {_IDLE_CHECKS}"

    return f"(({was_idle}) and on ({', '.join(keys)}) ({was_present}))"
