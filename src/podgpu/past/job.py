"""Summarises a pod: its use, memory, energy and cost.

Adds a hint if a smaller part of a GPU would be enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from podgpu.charge import Charge
from podgpu.fleet.job_view import SlowestView, find_slowest
from podgpu.fleet.parts import device_utilization, read_number
from podgpu.fleet.state import ClusterState
from podgpu.known import divide_known, mean_known, round_known, select_known, sum_all
from podgpu.metrics.conditions import NODE_GONE, conditions
from podgpu.metrics.fields import DRAM_ACTIVE, NVLINK_BYTES, PCIE_BYTES, TENSOR_ACTIVE
from podgpu.model import GpuOrInstance, PodName, Workload, WorkloadOwner
from podgpu.past.bills.bill import RangeFigures, StepCharge, add_tokens, add_up, fit_charges
from podgpu.past.gpu_history import (
    GpuHistory,
    HolderSpan,
    Mark,
    PodHistory,
    Values,
    make_pod_history,
)
from podgpu.past.savings.advice import advise_pod
from podgpu.past.savings.savings import FleetLoad
from podgpu.past.slow_checks import SlowCheck, SlowFacts, check_causes, explain_slow
from podgpu.past.spans import IDLE, Interval, measure_common
from podgpu.past.verdict import (
    Activity,
    Cause,
    UseVerdict,
    judge_activity,
    judge_use,
    measure_cause,
    rank_causes,
)

_BRIEF = 60.0  # seconds; pods that hold a GPU together for a shorter time do not share it
_THROTTLING = ("thermal", "power_brake")


class JobSummary(RangeFigures, kw_only=True):
    """Response of `/api/v1/summary`. Unknown values are omitted.

    Peaks are maxima of means over `step_seconds`.
    """

    api: str = msgspec.field(default_factory=lambda: "podgpu/v1")
    simulated: bool = False
    namespace: str
    pod: str
    owner: WorkloadOwner | None = None
    from_: float = msgspec.field(name="from")
    to: float | None = None  # None while the pod holds a GPU
    duration_seconds: float  # time for which the pod held a GPU
    gpus: int = 0
    nodes: tuple[str, ...] = ()
    mean_device_use: float | None = None  # the same as `mean_use` here: of the whole GPU
    mean_share_use: float | None = None  # of what the pod holds, as `mean_use` of a range
    peak_use: float | None = None
    p95_use: float | None = None
    peak_memory_bytes: float | None = None
    step_seconds: int = 0
    # Another pod used one of its GPUs meanwhile, so the next five values are unknown.
    shared: bool = False
    mean_power_watts: float | None = None  # of one GPU
    power_limit_watts: float | None = None  # mean of its GPUs, now
    current_use: float | None = None  # mean of its GPUs, now
    tensor_active_ratio: float | None = None  # mean of its GPUs, now
    dram_active_ratio: float | None = None  # mean of its GPUs, now
    wait_seconds: float = 0.0
    throttled_seconds: float = 0.0
    errors: int = 0
    verdict: UseVerdict | None = None
    causes: Sequence[Cause] = ()  # what slowed it down, the longest share first
    slowest: SlowestView | None = None  # now, the slowest GPU of its job, if one is slower
    # All causes that podgpu knows: what slowed it down first, then what did not or is not known.
    checks: Sequence[SlowCheck] = ()
    why_slow: str = ""  # the checks in a sentence
    currency: str = ""
    hint: str = ""


class RecordedPod(NamedTuple):
    """All that is recorded of a pod."""

    pod: PodName
    owner: WorkloadOwner | None
    runs: Sequence[Interval]  # when it held a GPU: sorted, without overlaps, and not empty
    is_running: bool  # it holds a GPU now
    charges: Sequence[Charge]
    token_steps: Sequence[StepCharge]  # its charges in 5 minutes, if it has an LLM engine
    gpus: Sequence[GpuHistory]  # that it held, with the conditions at the start and the end
    load: FleetLoad  # what it did in the last seven days; without pods if it is not running

    @property
    def end(self) -> float:
        return self.runs[-1].end


def make_summary(record: RecordedPod, state: ClusterState) -> JobSummary:
    namespace, pod = record.pod
    summary = JobSummary(
        simulated=state.simulated,
        namespace=namespace,
        pod=pod,
        owner=record.owner,
        from_=record.runs[0].start,
        to=None if record.is_running else record.end,
        duration_seconds=math.fsum(run.end - run.start for run in record.runs),
        currency=state.prices.currency,
        slowest=find_slowest(state, record.pod),
    )
    _add_charges(summary, record)
    activity = _add_pod_history(summary, record, state)
    _add_checks(summary, record, activity, state)
    for load in record.load.pods:
        summary.hint = advise_pod(load, record.load.seconds)

    return summary


def _add_charges(summary: JobSummary, record: RecordedPod) -> None:
    """Adds hours, cost, waiting time and tokens."""
    charges = record.charges
    add_up(summary, charges, summary.currency)
    summary.mean_share_use = summary.mean_use
    waited = sum(charge.amounts.waited_seconds for charge in charges)
    summary.wait_seconds = round(waited, 1)
    fit = fit_charges(record.token_steps)
    add_tokens(summary, charges, summary.currency, summary.duration_seconds, fit)


def _add_pod_history(summary: JobSummary, record: RecordedPod, state: ClusterState) -> Activity:
    """Returns the activity of its GPUs. It is unknown if the pod shared one of them."""
    history = make_pod_history(*record.pod, record.gpus)
    if history is None:
        return Activity()

    _add_history(summary, history, record.end)
    summary.shared = any(_is_shared(gpu.holders, summary) for gpu in record.gpus)
    if summary.shared:
        return Activity()
    return _add_activity(summary, history, state)


def _add_history(summary: JobSummary, history: PodHistory, end: float) -> None:
    # The mean of an unfinished step still changes, so it counts only if a device has no other.
    finished_steps = None
    if summary.to is None:
        finished_steps = int((end - history.from_) // history.step_seconds)

    use: list[float] = []
    p95_of_devices: list[float] = []
    memory: list[float] = []
    for device in history.devices:
        device_use = _select_finished(device.series["utilization_ratio"], finished_steps)
        if device_use:
            use += device_use
            p95_of_devices.append(_find_p95(device_use))
        memory += _select_finished(device.series["memory_used_bytes"], finished_steps)

    nodes = {device.node for device in history.devices}
    summary.gpus = len(history.devices)
    summary.nodes = tuple(sorted(nodes))
    summary.step_seconds = history.step_seconds
    if use:
        # Here, use is relative to the whole GPU or MIG instance. In /api/v1/range, it is relative
        # to the pod's share.
        summary.mean_use = _mean(use)
        summary.mean_device_use = summary.mean_use
        summary.peak_use = max(use)
        summary.p95_use = max(p95_of_devices)

    summary.peak_memory_bytes = max(memory, default=None)

    _add_causes(summary, history, end)
    for mark in history.marks:
        if mark.condition != IDLE and mark.condition not in _THROTTLING:
            summary.errors += 1


def _find_p95(values: Sequence[float]) -> float:
    place = math.ceil(0.95 * len(values)) - 1
    return sorted(values)[place]


def _add_causes(summary: JobSummary, history: PodHistory, end: float) -> None:
    throttled_seconds = 0.0
    failed_seconds = 0.0
    held_seconds = 0.0
    for device in history.devices:
        throttled: list[Interval] = []
        failed: list[Interval] = []
        gone: list[Interval] = []
        for mark in history.marks:
            if (mark.uuid, mark.instance) != (device.uuid, device.instance):
                continue

            until = end if mark.until is None else mark.until
            interval = Interval(mark.at, until)
            if mark.condition in _THROTTLING:
                throttled.append(interval)
            elif _is_broken(mark):
                failed.append(interval)
            if mark.condition == NODE_GONE:
                gone.append(interval)

        held = _list_known_times(device.holders, gone, history.from_, end)
        held_seconds += measure_common(held, held)
        throttled_seconds += measure_common(throttled, held)
        failed_seconds += measure_common(failed, held)

    # Containers of a pod may wait at the same time for the same GPU.
    longest_wait = summary.duration_seconds * summary.gpus
    summary.wait_seconds = min(summary.wait_seconds, longest_wait)
    summary.throttled_seconds = throttled_seconds
    causes = [
        # Waiting is known for the whole run, the conditions of GPUs for at most eight days.
        measure_cause("waiting", summary.wait_seconds, longest_wait),
        measure_cause("throttling", throttled_seconds, held_seconds),
        measure_cause("failing", failed_seconds, held_seconds),
    ]
    summary.causes = rank_causes(causes, summary.gpus)


def _list_known_times(
    holders: Iterable[HolderSpan], gone: Iterable[Interval], start: float, end: float
) -> list[Interval]:
    """Returns when the pod held a device, within the time of which conditions are known.

    While a node is gone, its holders are unknown. The pod then still counts as a holder.
    """
    held = [Interval(span.from_, span.to or end) for span in holders]
    for absence in gone:
        if any(absence.start == time.end for time in held):
            held.append(absence)

    return [Interval(max(time.start, start), min(time.end, end)) for time in held]


def _is_broken(mark: Mark) -> bool:
    spec = conditions().get(mark.condition)
    return spec is not None and spec.severity == "broken"


def _select_finished(values: Values, finished_steps: int | None) -> list[float]:
    """Returns the known values of the finished steps or, if there are none, of all steps.

    `finished_steps`: None if all are finished.
    """
    return select_known(values[:finished_steps]) or select_known(values)


def _is_shared(spans: Sequence[HolderSpan], summary: JobSummary) -> bool:
    """Returns whether others held the GPU while the pod held it."""
    own = [span for span in spans if _is_of(span, summary)]
    others = [span for span in spans if not _is_of(span, summary)]
    for span in own:
        for other in others:
            start = max(span.from_, other.from_)
            end = min(span.to or math.inf, other.to or math.inf)
            if end - start > _BRIEF:
                return True
    return False


def _add_activity(summary: JobSummary, history: PodHistory, state: ClusterState) -> Activity:
    """Adds values of whole devices. Call it only for a pod that does not share its devices."""
    watts = []
    whole_gpus = set()
    for past_device in history.devices:
        watts += select_known(past_device.series["power_watts"])
        if not past_device.instance:
            whole_gpus.add(past_device.uuid)

    summary.mean_power_watts = _mean(watts)

    limits = []
    devices: dict[str, GpuOrInstance] = {}
    for node in state.nodes:
        for gpu in node.gpus:
            if gpu.uuid in whole_gpus:
                limits.append(gpu.power_limit_mw)
        for part in node.held:
            if _is_of(part.holder, summary) and not node.stale:
                devices[part.device_key] = part.device

    summary.power_limit_watts = _mean(divide_known(limit, 1000) for limit in limits)

    if any(_has_others(device, summary) for device in devices.values()):
        return Activity()  # the pod has begun to share a device

    summary.current_use = _mean(map(device_utilization, devices.values()))
    summary.tensor_active_ratio = _mean_field(devices.values(), TENSOR_ACTIVE)
    summary.dram_active_ratio = _mean_field(devices.values(), DRAM_ACTIVE)
    activity = Activity(
        summary.current_use,
        summary.tensor_active_ratio,
        summary.dram_active_ratio,
        pcie=_mean_traffic(devices.values(), PCIE_BYTES),
        nvlink=_mean_traffic(devices.values(), NVLINK_BYTES),
    )
    summary.causes = [*summary.causes, *judge_activity(activity)]
    return activity


def _add_checks(
    summary: JobSummary, record: RecordedPod, activity: Activity, state: ClusterState
) -> None:
    recorded_uuids = {gpu.uuid for gpu in record.gpus}
    devices = []
    nodes = []
    for node in state.nodes:
        own = [part for part in node.held if _is_of(part.holder, summary)]
        devices += [(node, part) for part in own]
        has_recorded = any(gpu.uuid in recorded_uuids for gpu in node.gpus)
        if own or has_recorded:
            nodes.append(node)
    is_sharing_now = any(_has_others(part.device, summary) for _, part in devices)
    # On a shared GPU, the use of the whole GPU says little about the pod.
    use = summary.mean_use
    if summary.shared and summary.mean_share_use is not None:
        use = summary.mean_share_use

    power_ratio = _find_power_ratio(summary)
    summary.verdict = judge_use(use, summary.mean_device_use, power_ratio, summary.causes)

    facts = SlowFacts(
        causes=summary.causes,
        is_running=record.is_running,
        is_shared=summary.shared or is_sharing_now,
        use=use,
        wait_seconds=summary.wait_seconds,
        throttled_seconds=summary.throttled_seconds,
        activity=activity,
        slowest=summary.slowest,
        accounts=[charge.account for charge in record.charges],
        devices=devices,
        nodes=nodes,
        gpus=summary.gpus,
    )
    summary.checks = check_causes(facts, state)
    summary.why_slow = explain_slow(summary.checks)


def _find_power_ratio(summary: JobSummary) -> float | None:
    """Returns the mean power as a fraction of the limit. None if tensor activity says more."""
    if summary.tensor_active_ratio is not None or not summary.power_limit_watts:
        return None
    return divide_known(summary.mean_power_watts, summary.power_limit_watts)


def _has_others(device: GpuOrInstance, summary: JobSummary) -> bool:
    return not all(_is_of(holder, summary) for holder in device.holders)


def _is_of(holder: Workload, summary: JobSummary) -> bool:
    return holder.pod_name == (summary.namespace, summary.pod)


def _mean_field(devices: Iterable[GpuOrInstance], field: str) -> float | None:
    return _mean(read_number(device, field) for device in devices)


def _mean_traffic(devices: Iterable[GpuOrInstance], fields: Sequence[str]) -> float | None:
    """Returns the mean sum of both directions, of the devices that report both."""
    sums = []
    for device in devices:
        sums.append(sum_all(read_number(device, field) for field in fields))
    return _mean(sums)


def _mean(values: Iterable[float | None]) -> float | None:
    return round_known(mean_known(values), 4)
