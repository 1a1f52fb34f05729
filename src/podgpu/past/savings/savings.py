"""The answer of `/api/v1/savings`: GPUs that could be given back, and what the pods would notice.

`advice.py` makes it from the loads of pods, which `past/sqlite/sqlite_loads.py` or
`past/prometheus/prometheus_savings.py` reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from podgpu.charge import UsageAccount
from podgpu.errors import UsageError
from podgpu.model import WorkloadOwner
from podgpu.past.bills.bill import PeriodAnswer, describe_owner
from podgpu.past.bills.focus import write_table
from podgpu.past.queries import parse_is_csv, parse_range
from podgpu.past.time_steps import DAY, HOUR

Kind = Literal["stop", "shrink", "share", "pack"]
KINDS: tuple[Kind, ...] = ("stop", "shrink", "share", "pack")
MONTH_HOURS = 730.0
MAX_DAYS = 8  # loads of 5 minutes are kept for so long
_LEAST_SLOWDOWN = 1.0
_MOST_SLOWDOWN = 2.0
SHORTEST = DAY  # nothing is recommended from a shorter record


class SavingsQuery(NamedTuple):
    seconds: int = 7 * DAY
    slowdown: float = 1.25  # a pod that shares a GPU becomes slower by less than this factor
    idle: int = DAY  # a pod that is idle for so long, or for the whole range, could be stopped
    is_csv: bool = False
    # Namespaces that the user may see. None: all.
    visible: frozenset[str] | None = None


def parse_savings_query(query: Mapping[str, str]) -> SavingsQuery:
    is_csv = parse_is_csv(query)
    seconds = parse_range(query.get("range", "7d"))
    if seconds > MAX_DAYS * DAY:
        raise UsageError(f"range={query['range'][:40]}: savings are computed for up to 8d")

    text = query.get("slowdown", "1.25")
    try:
        slowdown = float(text)
    except ValueError:
        slowdown = math.nan

    # It is not in the range either if it is not a number.
    if not _LEAST_SLOWDOWN < slowdown <= _MOST_SLOWDOWN:
        raise UsageError(f"slowdown={text[:40]!r}: write a factor above 1 and up to 2, as 1.25")

    idle = parse_range(query.get("idle", "24h"), "idle")
    if idle < HOUR:
        raise UsageError(f"idle={query['idle'][:40]}: write at least 1h")

    return SavingsQuery(seconds, slowdown, idle, is_csv)


# Input


@dataclass(slots=True)
class PodLoad:
    """What a pod or job that holds GPUs now did in a range.

    `steps` has one value of `past/busy_steps.py` for every 5 minutes: the sum over its GPUs.
    """

    account: UsageAccount
    steps: bytes
    cluster: str = ""
    node: str = ""
    model: str = ""  # of its GPUs, with the profile of MIG instances; empty if they differ
    devices: int = 1
    gpus: float = 1.0
    is_whole: bool = True  # its devices are GPUs that no other pod shares
    gpu_bytes: float | None = None  # memory of one GPU
    peak_bytes: float | None = None  # largest sum over its GPUs in one reading
    price: float | None = None  # of an hour of all that it holds
    cost: float | None = None  # in the range
    job_gpus: float = 0.0  # of all pods of its owner
    problem: str = ""  # why it is left out: a key of `advice.REASONS`


class NodeRoom(NamedTuple):
    """The whole GPUs of one model on a node."""

    cluster: str
    node: str
    model: str
    gpus: int
    free: int
    pods: Sequence[PodLoad] = ()  # all that hold its GPUs
    price: float | None = None  # of an hour of one GPU


class SharedLoad(NamedTuple):
    """Pods that shared a GPU: what they did in the same time, measured by context switches."""

    cluster: str
    node: str
    pods: Sequence[SharedPodLoad]


class SharedPodLoad(NamedTuple):
    account: UsageAccount
    steps: bytes
    waited: float  # share of the time


class UnreadPods(NamedTuple):
    """Pods of a cluster with too many GPUs to examine each of them."""

    pods: int = 0
    gpus: float = 0.0
    price: float | None = None  # of an hour of these GPUs


ALL_READ = UnreadPods()


@dataclass(slots=True)
class FleetLoad:
    start: float
    end: float
    pods: list[PodLoad] = field(default_factory=list)
    rooms: list[NodeRoom] = field(default_factory=list)
    # (cluster, model) -> numbers of GPUs that pods of the range held on one node
    sizes: dict[tuple[str, str], set[int]] = field(default_factory=dict)
    shared: list[SharedLoad] = field(default_factory=list)
    # Start of the range, if it is cut: before, no use of a GPU is known.
    known_from: float | None = None
    # Start of the oldest record of any kind, if that is earlier.
    recorded_from: float | None = None
    unread: UnreadPods = ALL_READ
    notes: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.end - self.start


# Answer


class Monthly(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Amounts of a month of 730 hours. `cost` is None if a GPU has no price."""

    gpus: float = 0.0
    gpu_hours: float = 0.0
    cost: float | None = None


class SavingsTotals(msgspec.Struct, kw_only=True):
    """All GPUs that pods hold, and what would be left. `before` = `after` + `saved`."""

    before: Monthly
    after: Monthly
    saved: Monthly
    # GPUs that are free already, and would become usable by moves. Not in `saved`.
    packed_gpus: int = 0


class SavedKind(msgspec.Struct, kw_only=True):
    kind: Kind
    lines: int
    saved: Monthly


class PodAdvice(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A pod of a line. Shares are of the time in which its use is known."""

    cluster: str = ""
    namespace: str = ""
    pod: str = ""
    job: str = ""
    owner: WorkloadOwner | None = None
    node: str = ""
    to_node: str = ""  # where it would move
    gpus: float = 0.0
    busy: float | None = None  # mean of busy GPUs: alone, of one GPU
    peak_busy: float | None = None  # largest mean of 5 minutes, in GPUs
    wait: float | None = None  # share of time in which it would wait for others
    slowdown: float | None = None
    worst_slowdown: float | None = None  # in one interval of 5 minutes
    # `wait` is so many times what the model says, as measured of other pods of its owner.
    wait_factor: float | None = None
    peak_memory_bytes: float | None = None
    idle_seconds: float | None = None  # up to the end of the range


class Advice(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A line: what to do with one or several pods. `saved` is per month."""

    kind: Kind
    model: str = ""
    target: str = ""
    says: str
    assumes: str
    falsified_by: str
    pods: list[PodAdvice]
    gpus_before: float
    gpus_after: float
    saved: Monthly
    cost: float | None = None  # of these GPUs in the range
    freed_gpus: int = 0  # free GPUs that become usable together


class LeftOut(msgspec.Struct, kw_only=True):
    reason: str
    says: str
    pods: int
    gpus: float


class SharedPod(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A pod that shares a GPU: what the model says, and what was measured. Shares of time."""

    cluster: str = ""
    namespace: str = ""
    pod: str = ""
    job: str = ""
    node: str = ""
    busy: float
    predicted_wait: float
    measured_wait: float


class SavingsLimits(msgspec.Struct, kw_only=True):
    slowdown: float
    idle_seconds: int
    busy: float
    known: float
    compute_headroom: float
    memory_headroom: float


class SavingsAnswer(PeriodAnswer, kw_only=True):
    step_seconds: int
    month_hours: float
    # False if there is less than a day of history, so that nothing can be said.
    is_computed: bool = msgspec.field(name="computed", default=True)
    limits: SavingsLimits
    totals: SavingsTotals
    kinds: list[SavedKind]
    advice: list[Advice]
    left_out: list[LeftOut]
    shared: list[SharedPod] = msgspec.field(default_factory=list)
    # Mean of |predicted - measured wait|, as a share of time. None if no pods share a GPU.
    prediction_error_ratio: float | None = None


def name_pod(pod: PodAdvice | SharedPod) -> str:
    names = (pod.cluster, pod.namespace, pod.pod or pod.job)
    return "/".join(filter(None, names)) or "(no name)"


_CELLS = (
    "Kind",
    "Line",
    "Cluster",
    "Namespace",
    "Pod",
    "Owner",
    "Node",
    "ToNode",
    "Model",
    "Target",
    "Gpus",
    "BusyGpus",
    "PeakBusyGpus",
    "PredictedWait",
    "PredictedSlowdown",
    "WorstSlowdown",
    "PeakMemoryBytes",
    "IdleSeconds",
    "CostInRange",
    "SavedGpus",
    "SavedGpuHoursPerMonth",
    "SavedCostPerMonth",
    "Currency",
    "Says",
    "Assumes",
    "FalsifiedBy",
)


_LINE_CELLS = ("CostInRange", "SavedGpus", "SavedGpuHoursPerMonth", "SavedCostPerMonth")


def encode_savings_csv(answer: SavingsAnswer) -> bytes:
    """Writes one row per pod. Sums of a line are in the row of its first pod, so they add up."""
    rows = []
    for number, line in enumerate(answer.advice, 1):
        for pod in line.pods:
            cells = _make_cells(answer, line, pod)
            cells["Line"] = number
            if pod is not line.pods[0]:
                for name in _LINE_CELLS:
                    cells[name] = None
            rows.append(cells)

    return write_table(_CELLS, rows)


def _make_cells(answer: SavingsAnswer, line: Advice, pod: PodAdvice) -> dict[str, Any]:
    owner = describe_owner(pod.owner)
    return {
        "Kind": line.kind,
        "Cluster": pod.cluster,
        "Namespace": pod.namespace,
        "Pod": pod.pod or pod.job,
        "Owner": owner,
        "Node": pod.node,
        "ToNode": pod.to_node,
        "Model": line.model,
        "Target": line.target,
        "Gpus": pod.gpus,
        "BusyGpus": pod.busy,
        "PeakBusyGpus": pod.peak_busy,
        "PredictedWait": pod.wait,
        "PredictedSlowdown": pod.slowdown,
        "WorstSlowdown": pod.worst_slowdown,
        "PeakMemoryBytes": pod.peak_memory_bytes,
        "IdleSeconds": pod.idle_seconds,
        "CostInRange": line.cost,
        "SavedGpus": line.saved.gpus,
        "SavedGpuHoursPerMonth": line.saved.gpu_hours,
        "SavedCostPerMonth": line.saved.cost,
        "Currency": answer.currency,
        "Says": line.says,
        "Assumes": line.assumes,
        "FalsifiedBy": line.falsified_by,
    }
