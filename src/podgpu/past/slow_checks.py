"""Says why a pod is slow: what slowed it down, what did not, and what could not be measured.

Absent is not zero: a cause that nobody measured is not one that did nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from podgpu.charge import UsageAccount
from podgpu.fleet.job_view import SlowestView
from podgpu.fleet.jobs import JOB_KINDS, JobKey, compared_with, find_job
from podgpu.fleet.node_entry import NodeEntry
from podgpu.fleet.parts import HeldPart
from podgpu.fleet.settings import duration_text
from podgpu.fleet.setup import OWNERS_HINT
from podgpu.fleet.state import ClusterState
from podgpu.known import select_known
from podgpu.metrics.usage_methods import BY_SWITCHES, IMPROVEMENTS, MPS
from podgpu.past.time_steps import DAY, HOUR
from podgpu.past.verdict import LEAST_RATIO, LEAST_USE, Activity, Cause, CauseName

CheckName = CauseName | Literal["low_use", "slow_gpu"]
CheckState = Literal["found", "none", "not_measured", "not_applicable"]
_PODGPU = "podgpu"
_TITLES: dict[CheckName, str] = {
    "waiting": "waiting for other containers",
    "throttling": "throttling by heat or power brake",
    "failing": "a lost or failing GPU",
    "low_use": "too little work for the GPU",
    "slow_gpu": "a slower GPU of its job",
    "low_activity": "low activity of tensor cores and memory",
    "pcie": "PCIe traffic",
    "nvlink": "NVLink traffic",
}
_NO_WORK = (
    "this is no fault of the GPU: look at data loading, CPU, network, or the number of requests"
)
_USE_SWITCHES = "--usage-from exact or switches on the exporter (chart: exporter.usage.from)"
_USE_PODGPU = "run podgpu's exporter on the node: another exporter does not report it"
_NEED_FIELDS = (
    "the exporter must export DCGM_FI_PROF_PIPE_TENSOR_ACTIVE and DCGM_FI_PROF_DRAM_ACTIVE"
    " (docs/counters.md), and have run for a minute. With NVML, only Hopper GPUs and later have"
    " them"
)
_NEED_TRAFFIC = "the exporter must export DCGM_FI_PROF_{}_TX_BYTES and _RX_BYTES (docs/counters.md)"
_SHARE_LESS = "give it a GPU of its own, or a larger share, or move what it waits for"
_MUCH_WAITING = 0.1  # of the time, now
_MOST_WAITS = 3  # that are named
_ENDED = "known only while the pod runs"


class WaitedFor(NamedTuple):
    ratio: float  # of the time
    holder: str


HeldDevices = Sequence[tuple[NodeEntry, HeldPart]]


class SlowCheck(msgspec.Struct, frozen=True, omit_defaults=True):
    """One possible cause. `not_applicable`: it cannot have slowed the pod down."""

    cause: CheckName
    state: CheckState
    title: str
    says: str
    do: str = ""  # what to do, or how to measure it


@dataclass(slots=True)
class SlowFacts:
    """What is known of a pod in a range. Unknown values are None."""

    causes: Sequence[Cause]
    is_running: bool
    is_shared: bool
    # Mean busy part of what it holds. On a shared GPU, of its share.
    use: float | None
    wait_seconds: float
    throttled_seconds: float
    activity: Activity
    slowest: SlowestView | None
    accounts: Sequence[UsageAccount]  # of its charges
    devices: HeldDevices  # that it holds now
    nodes: Sequence[NodeEntry]  # with GPUs that it holds or held
    gpus: int


def check_causes(facts: SlowFacts, state: ClusterState) -> list[SlowCheck]:
    """Returns all causes: what slowed the pod down, the longest first, then the others."""
    checks = [
        _check_waiting(facts),
        _check_throttling(facts),
        _check_failing(facts),
        _check_use(facts),
        _check_slow_gpu(facts, state),
    ]
    checks += _check_activity(facts)
    others = [check for check in checks if check.state != "found"]
    # `causes` has the longest first, but not all causes of the checks.
    names: list[CheckName] = [cause.cause for cause in facts.causes]
    names += _TITLES
    found = [check for check in checks if check.state == "found"]
    found.sort(key=lambda check: names.index(check.cause))
    return found + others


def explain_slow(checks: Sequence[SlowCheck]) -> str:
    """Returns the answer to "why is it slow?" in a sentence."""
    found = [check.says for check in checks if check.state == "found"]
    missing = [check.title for check in checks if check.state == "not_measured"]
    not_measured = f"Not measured: {', '.join(missing)}."
    if found and missing:
        return f"{'; '.join(found)}. {not_measured}"
    if found:
        return f"{'; '.join(found)}."
    if missing:
        return f"Nothing that was measured slowed it down. {not_measured}"

    busy = [check.says for check in checks if check.cause == "low_use"]
    return f"Nothing slowed it down, of all that podgpu measures. {'. '.join(busy)}."


def _make_check(cause: CheckName, state: CheckState, says: str, do: str = "") -> SlowCheck:
    return SlowCheck(cause, state, _TITLES[cause], says, do)


def _find_cause(facts: SlowFacts, name: CauseName) -> Cause | None:
    for cause in facts.causes:
        if cause.cause == name:
            return cause
    return None


def _describe_length(cause: Cause) -> str:
    percent = _percent(cause.ratio or 0.0)
    duration = _duration(cause.seconds or 0.0)
    return f"{percent} of the time ({duration})"


def _percent(ratio: float) -> str:
    percent = 100 * ratio
    if 0 < ratio < 0.1:
        return f"{percent:.1f} %"
    return f"{percent:.0f} %"


def _duration(seconds: float) -> str:
    """Rounds to the second largest unit, as 1d17h or 12m5s."""
    unit = 1
    if seconds >= DAY:
        unit = HOUR
    elif seconds >= HOUR:
        unit = 60
    return duration_text(max(0, round(seconds / unit)) * unit)


def _check_waiting(facts: SlowFacts) -> SlowCheck:
    cause = _find_cause(facts, "waiting")
    now = _describe_waits(facts)
    if cause is not None:
        says = f"It waited for other containers {_describe_length(cause)}{now}"
        return _make_check("waiting", "found", says, _SHARE_LESS)
    if _find_waits(facts, _MUCH_WAITING):
        says = f"It waited for other containers for only {_duration(facts.wait_seconds)}{now}"
        return _make_check("waiting", "found", says, _SHARE_LESS)
    if not facts.is_shared:
        return _make_check("waiting", "none", "No other pod shares its GPUs")

    improvement = _find_improvement(facts)
    if improvement:
        says = "It shares a GPU, and its waiting time is not measured"
        return _make_check("waiting", "not_measured", says, improvement)

    says = f"It shares a GPU, and waited for only {_duration(facts.wait_seconds)}{now}"
    return _make_check("waiting", "none", says)


def _find_waits(facts: SlowFacts, least: float) -> list[WaitedFor]:
    """Returns for whom it waits now for at least this part of the time, the longest first."""
    waits: list[WaitedFor] = []
    for _, part in facts.devices:
        own = part.holder
        for other in own.known_usage.waits_for:
            if other.ratio < least:
                continue

            name = other.text or "processes outside pods"
            # Not every user may see the pods of other namespaces.
            if other.namespace not in ("", own.namespace):
                name = "a pod of another namespace"
            waits.append(WaitedFor(other.ratio, name))
    return sorted(waits, reverse=True)


def _describe_waits(facts: SlowFacts) -> str:
    waits = _find_waits(facts, LEAST_RATIO)[:_MOST_WAITS]
    if not waits:
        return ""

    texts = []
    for wait in waits:
        texts.append(f"{_percent(wait.ratio)} for {wait.holder}")
    return f"; now {', '.join(texts)}"


def _find_improvement(facts: SlowFacts) -> str:
    """Returns what would measure waiting times. Empty if they are measured."""
    for _, part in facts.devices:
        if part.holder.known_usage.wait_ns is None:
            usage = part.device.known_usage
            limit = MPS if usage.method == "mps" else usage.method_limit
            return IMPROVEMENTS.get(limit, _USE_SWITCHES)

    # Of a pod that has ended, only its charges say how it was measured.
    methods: set[str] = set()
    for account in facts.accounts:
        methods.update(account.methods.split())
    if not facts.devices and not facts.wait_seconds and not methods & BY_SWITCHES:
        return _USE_SWITCHES
    return ""


def _check_throttling(facts: SlowFacts) -> SlowCheck:
    cause = _find_cause(facts, "throttling")
    if cause is not None:
        says = f"Its GPUs were throttled {_describe_length(cause)}"
        do = "check cooling and power limits of the node"
        return _make_check("throttling", "found", says, do)
    if not _are_all_podgpu(facts):
        says = "It is not known whether its GPUs were throttled"
        return _make_check("throttling", "not_measured", says, _USE_PODGPU)
    if any(not part.gpu.throttled_ns for _, part in facts.devices):
        says = "The driver does not count throttling of its GPUs"
        do = "podgpu doctor on the node shows what the driver reports"
        return _make_check("throttling", "not_measured", says, do)

    says = "Neither heat nor the power brake slowed its GPUs for long"
    if facts.throttled_seconds:
        says = f"Its GPUs were throttled for only {_duration(facts.throttled_seconds)}"
    return _make_check("throttling", "none", says)


def _are_all_podgpu(facts: SlowFacts) -> bool:
    return all(node.state.producer == _PODGPU for node in facts.nodes)


def _check_failing(facts: SlowFacts) -> SlowCheck:
    cause = _find_cause(facts, "failing")
    if cause is not None:
        says = f"A GPU was lost or failing {_describe_length(cause)}"
        return _make_check(
            "failing", "found", says, "the events of the pod say which, and what to do"
        )
    if not _are_all_podgpu(facts):
        says = "It is not known whether its GPUs reported errors"
        return _make_check("failing", "not_measured", says, _USE_PODGPU)
    return _make_check("failing", "none", "None of its GPUs was lost or broken for long")


def _check_use(facts: SlowFacts) -> SlowCheck:
    if facts.use is None:
        says = "How busy its GPUs were is not known"
        return _make_check("low_use", "not_measured", says, _USE_PODGPU)

    of_share = " of its share" if facts.is_shared else ""
    busy = f"busy {_percent(facts.use)} of the time{of_share}"
    if not facts.use:
        return _make_check(
            "low_use", "found", "Its GPUs were never busy: they had no work", _NO_WORK
        )
    if facts.use < LEAST_USE:
        says = f"Its GPUs were only {busy}: most of the time, they had no work"
        return _make_check("low_use", "found", says, _NO_WORK)
    return _make_check("low_use", "none", f"Its GPUs were {busy}")


def _check_slow_gpu(facts: SlowFacts, state: ClusterState) -> SlowCheck:
    if facts.slowest is not None:
        says = _describe_slowest(facts.slowest)
        return _make_check("slow_gpu", "found", says, "see the page of the job")
    if not facts.is_running:
        return _make_check("slow_gpu", "not_applicable", _ENDED)

    jobs = select_known(find_job(part) for _, part in facts.devices)
    if not jobs:
        # Owners of other pods are known, so this one has none.
        has_owners = any(part.owner for node in state.nodes for part in node.held)
        if has_owners or not facts.devices:
            return _make_check("slow_gpu", "not_applicable", "It belongs to no job")

        says = "The owners of pods are not read, so its job is not known"
        return _make_check("slow_gpu", "not_measured", says, OWNERS_HINT.do)

    return _check_siblings(min(jobs), facts.devices, state)


def _describe_slowest(slowest: SlowestView) -> str:
    gpu = "a GPU" if slowest.index is None else f"GPU {slowest.index}"
    others = compared_with(slowest.against)
    return f"{gpu} of {slowest.node} is slower than {others}: {slowest.explanation}"


def _check_siblings(key: JobKey, devices: HeldDevices, state: ClusterState) -> SlowCheck:
    if key.kind not in JOB_KINDS:
        says = f"The pods of a {key.kind} have unequal work, so their GPUs are not compared"
        return _make_check("slow_gpu", "not_applicable", says)

    samples = [gpu.sample for gpu in state.jobs.get(key, {}).values()]
    if all(part.instance for _, part in devices):
        says = "MIG instances have no clocks of their own, so they are not compared"
        return _make_check("slow_gpu", "not_applicable", says)
    if not any(sample.clock for sample in samples):
        says = "The clocks of its GPUs are not known, so they are not compared"
        do = "the exporter must export DCGM_FI_DEV_SM_CLOCK (docs/counters.md)"
        return _make_check("slow_gpu", "not_measured", says, do)
    if len(samples) == 1:
        says = "Its only GPU is now not slower than before"
    else:
        says = f"None of the {len(samples)} GPUs of its job is now slower than the others"
    return _make_check("slow_gpu", "none", says)


def _check_activity(facts: SlowFacts) -> list[SlowCheck]:
    """Checks activity and, if it is low, the traffic that may explain it."""
    activity = facts.activity
    cause = _find_cause(facts, "low_activity")
    if cause is not None:
        says = f"Its tensor cores are active only {_percent(activity.tensor or 0.0)} of the time"
        do = "it may wait for data, or start many small kernels: profile the program"
        found = _make_check("low_activity", "found", f"{says} now", do)
        return [found, *_check_traffic(facts)]
    if not facts.is_running:
        return [_make_check("low_activity", "not_applicable", _ENDED)]
    if facts.is_shared:
        says = "The driver has no activity of tensor cores and memory by container on a shared GPU"
        return [_make_check("low_activity", "not_applicable", says)]
    if activity.tensor is None:
        says = "The activity of tensor cores and memory is not known"
        return [_make_check("low_activity", "not_measured", says, _NEED_FIELDS)]
    if activity.use is None or activity.use < LEAST_USE:
        says = "Its GPUs are hardly busy now, so their activity says nothing"
        return [_make_check("low_activity", "not_applicable", says)]

    says = f"Its tensor cores are active {_percent(activity.tensor)} of the time"
    if activity.dram is not None:
        says += f", its memory interface {_percent(activity.dram)}"
    return [_make_check("low_activity", "none", f"{says}, now")]


def _check_traffic(facts: SlowFacts) -> Iterable[SlowCheck]:
    yield _check_link(facts, "pcie", "PCIe", facts.activity.pcie)
    if facts.gpus > 1:
        yield _check_link(facts, "nvlink", "NVLink", facts.activity.nvlink)


def _check_link(facts: SlowFacts, cause: CauseName, name: str, rate: float | None) -> SlowCheck:
    """`rate`: bytes per second."""
    if rate is None:
        says = f"The traffic over {name} is not known"
        return _make_check(cause, "not_measured", says, _NEED_TRAFFIC.format(cause.upper()))

    state: CheckState = "none" if _find_cause(facts, cause) is None else "found"
    return _make_check(cause, state, f"It moves {rate / 1e9:.1f} GB/s over {name} now")
