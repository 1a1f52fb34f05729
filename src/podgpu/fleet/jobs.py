"""Groups the GPUs of a round by job, the owner at the top of a pod's owner chain."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from podgpu.fleet.choose import Alert
from podgpu.fleet.node_entry import NodeEntry
from podgpu.fleet.parts import (
    HeldPart,
    device_model,
    device_utilization,
    gpu_id,
    is_blind,
    read_number,
)
from podgpu.fleet.stragglers import Against, JobGpuSample, SlowGpu, SlowReason, StragglerDetector
from podgpu.known import add_known, divide_known, select_known
from podgpu.metrics.fields import (
    ACTIVITY_FIELDS,
    DRAM_ACTIVE,
    NVLINK_BYTES,
    PCIE_BYTES,
    TENSOR_ACTIVE,
)
from podgpu.model import NS, DeviceState, group_by

JOB_KINDS = frozenset(
    {
        "JAXJob",
        "Job",
        "JobSet",
        "LeaderWorkerSet",
        "MPIJob",
        "PaddleJob",
        "PyTorchJob",
        "RayCluster",
        "StatefulSet",
        "TFJob",
        "XGBoostJob",
    }
)
"""Kinds of owners whose pods work together. The pods of others, such as Deployments, have unequal
work, so their GPUs are not compared.
"""
SM_CLOCK = "DCGM_FI_DEV_SM_CLOCK"
SAMPLE_FIELDS = ACTIVITY_FIELDS | {SM_CLOCK}
"""Fields that collectors store for the comparison of GPUs."""
_CAPPED = ("power_cap",)
_THROTTLED = ("thermal", "sw_thermal", "hw_thermal", "hw_power_brake", "reliability", "board_limit")
_WORDS: dict[SlowReason, str] = {
    "power_limit": "its power limit is {percent} lower",
    "throttled": "heat or a power brake lowers its clock for {percent} more of the time",
    "waiting": "it waits for other containers for {percent} more of the time",
    "clock": "its SM clock is {percent} lower",
    "bytes": "it moves {percent} fewer bytes",
    "tensor": "its tensor cores are {percent} less active",
}


class JobKey(NamedTuple):
    cluster: str
    namespace: str
    kind: str
    name: str


class JobGpu(NamedTuple):
    """A GPU or MIG instance of a job, with the shares of the job's pods."""

    node: NodeEntry
    parts: tuple[HeldPart, ...]
    sample: JobGpuSample


class _SameModel(NamedTuple):
    job: JobKey
    model: str


JobDetector = StragglerDetector[_SameModel]
Jobs = Mapping[JobKey, Mapping[str, JobGpu]]
"""The devices of each job, by node and `HeldPart.device_key`."""


def list_jobs(nodes: Iterable[NodeEntry], before: Mapping[str, NodeEntry]) -> Jobs:
    """`before`: the nodes of the last round."""
    jobs: dict[JobKey, dict[str, JobGpu]] = {}
    for node in nodes:
        earlier = before.get(node.name)
        for job, parts in group_by(node.held, find_job).items():
            if job is None:
                continue
            gpus = jobs.setdefault(job, {})
            for device, own in group_by(parts, lambda part: part.device_key).items():
                # A GPU without a UUID has the same key on several nodes.
                key = f"{node.name} {device}"
                gpus[key] = JobGpu(node, tuple(own), _make_sample(node, own, earlier))

    return {job: jobs[job] for job in sorted(jobs)}


def find_job(part: HeldPart) -> JobKey | None:
    owner = part.owner
    if owner is None:
        return None
    return JobKey(part.cluster, part.holder.namespace, owner.kind, owner.name)


def find_slow(detector: JobDetector, now: float, jobs: Jobs) -> dict[JobKey, SlowGpu]:
    """Returns the slowest GPU of each job. Compares only devices of the same model."""
    samples: dict[_SameModel, dict[str, JobGpuSample]] = {}
    for key, gpus in jobs.items():
        if key.kind not in JOB_KINDS:
            continue
        for device, gpu in gpus.items():
            # All parts of the GPU are of the same device.
            part = gpu.parts[0]
            group = _SameModel(key, device_model(part.gpu, part.instance))
            samples.setdefault(group, {})[device] = gpu.sample

    slow: dict[JobKey, SlowGpu] = {}
    for group, slowest in detector.update(now, samples).items():
        # A job may have GPUs of several models.
        other = slow.get(group.job)
        if other is None or slowest.difference > other.difference:
            slow[group.job] = slowest

    return slow


def describe_slow(jobs: Jobs, slow: Mapping[JobKey, SlowGpu]) -> Iterator[Alert]:
    for key, slowest in slow.items():
        gpu = jobs[key][slowest.device]
        node = gpu.node.name
        device = gpu.parts[0].gpu
        label = "a GPU"
        if device.index is not None:
            label = f"GPU {device.index}"

        job = f"{key.namespace}/{key.name}"
        text = (
            f"{key.kind} {job}: {label} of {node} is slower than "
            f"{compared_with(slowest.against)}: {explain_slow(slowest)}"
        )
        yield Alert("warning", text, node, gpu_id(device), f"{key.kind}/{job}")


def compared_with(against: Against) -> str:
    if against == "siblings":
        return "its siblings"
    return "before"


def explain_slow(slow: SlowGpu) -> str:
    percent = slow.difference * 100
    words = _WORDS[slow.reason]
    return words.format(percent=f"{percent:.0f} %")


# Values


def _make_sample(
    node: NodeEntry, parts: Sequence[HeldPart], earlier: NodeEntry | None
) -> JobGpuSample:
    """Returns no values if the node or the GPU cannot be read.

    Clock, power, throttling and bytes of a MIG instance are unknown.
    """
    gpu = parts[0].gpu
    instance = parts[0].instance
    if node.stale or node.gone or is_blind(gpu):
        return JobGpuSample()

    device = instance or gpu
    # A pod that is alone on a GPU does not wait.
    waiting = 0.0 if len(device.holders) == 1 else None
    for part in parts:
        ratio = part.holder.known_usage.wait_ratio
        if ratio is not None:
            waiting = max(ratio, waiting or 0.0)

    sample = JobGpuSample(
        busy=device_utilization(device),
        tensor=read_number(device, TENSOR_ACTIVE),
        dram=read_number(device, DRAM_ACTIVE),
        waiting=waiting,
    )
    if instance is not None:
        return sample

    moved_bytes = None
    for name in (*PCIE_BYTES, *NVLINK_BYTES):
        moved_bytes = add_known(moved_bytes, read_number(gpu, name))

    throttled = _measure_throttling(node, gpu, earlier)
    return sample._replace(
        clock=read_number(gpu, SM_CLOCK),
        power=divide_known(gpu.power_mw, 1000),
        power_limit=divide_known(gpu.power_limit_mw, 1000),
        capped=_find_largest(throttled, _CAPPED),
        throttled=_find_largest(throttled, _THROTTLED),
        bytes=moved_bytes,
    )


def _measure_throttling(
    node: NodeEntry, gpu: DeviceState, earlier: NodeEntry | None
) -> dict[str, float]:
    """Returns the ratio of time since the last round, by reason. Empty if it is unknown."""
    if earlier is None:
        return {}

    seconds = node.reading.read_at - earlier.reading.read_at
    earlier_gpus = {each.uuid: each for each in earlier.state.devices}
    earlier_gpu = earlier_gpus.get(gpu.uuid)
    if earlier_gpu is None or seconds <= 0:
        return {}

    ratios = {}
    for reason, ns in gpu.throttled_ns.items():
        earlier_ns = earlier_gpu.throttled_ns.get(reason)
        # A smaller value means that the counter was reset.
        if earlier_ns is not None and ns >= earlier_ns:
            throttled = (ns - earlier_ns) / NS
            ratios[reason] = min(1.0, throttled / seconds)

    return ratios


def _find_largest(ratios: Mapping[str, float], reasons: Iterable[str]) -> float | None:
    """Returns the largest ratio, because several reasons may apply at the same time."""
    known = select_known(ratios.get(reason) for reason in reasons)
    return max(known, default=None)
