"""The JSON of `/api/v1/jobs` and `/api/v1/jobs/KIND/NAMESPACE/NAME` (docs/api.md)."""

from __future__ import annotations

from typing import Any

import msgspec

from podgpu.fleet.jobs import JOB_KINDS, JobGpu, JobKey, compared_with, explain_slow
from podgpu.fleet.parts import (
    HeldPart,
    WasteRate,
    device_memory,
    device_model,
    gpu_id,
    sum_held,
)
from podgpu.fleet.state import ClusterState
from podgpu.fleet.stragglers import Against, SlowReason
from podgpu.fleet.view import API, Answer, ApiVersion
from podgpu.known import mean_known, round_known
from podgpu.model import PodName


class SlowestView(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The GPU of a job that is slower than the others, or than before."""

    node: str
    uuid: str
    instance: str = ""
    index: int | None = None
    reason: SlowReason
    difference_ratio: float
    against: Against
    since: float
    says: str
    explanation: str  # the part of `says` that names the cause


class JobDevice(msgspec.Struct, omit_defaults=True, kw_only=True):
    node: str
    uuid: str
    instance: str = ""
    index: int | None = None
    model: str
    pods: list[str]
    is_slowest: bool = False
    utilization_ratio: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    sm_clock_mhz: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    power_capped_ratio: float | None = None
    throttled_ratio: float | None = None
    tensor_active_ratio: float | None = None
    dram_active_ratio: float | None = None
    bytes_per_second: float | None = None
    wait_ratio: float | None = None


class JobView(msgspec.Struct, omit_defaults=True, kw_only=True):
    kind: str
    namespace: str
    name: str
    cluster: str = ""
    pods: int
    nodes: int
    gpus: float  # parts of GPUs that the job has allocated
    utilization_ratio: float | None = None  # mean of its devices
    wait_ratio: float | None = None  # mean of its devices
    cost_per_hour: float | None = None
    waste: WasteRate | None = None
    slowest: SlowestView | None = None


class JobsResponse(Answer, kw_only=True):
    """`/api/v1/jobs`."""

    taken_at: float | None = None
    currency: str = ""
    jobs: list[JobView]


class JobResponse(JobView, kw_only=True):
    """`/api/v1/jobs/KIND/NAMESPACE/NAME`."""

    api: ApiVersion = msgspec.field(default_factory=lambda: API)
    taken_at: float | None = None
    currency: str = ""
    devices: list[JobDevice]


def make_jobs(state: ClusterState) -> JobsResponse:
    jobs = []
    for key in state.jobs:
        if key.kind in JOB_KINDS:
            jobs.append(JobView(**_job_fields(state, key)))
    return JobsResponse(taken_at=state.taken_at, currency=state.prices.currency, jobs=jobs)


def make_job(state: ClusterState, kind: str, namespace: str, name: str) -> JobResponse | None:
    """Returns None if the owner has no GPU. If several clusters have it, returns the first."""
    for key, gpus in state.jobs.items():
        if (key.kind, key.namespace, key.name) != (kind, namespace, name):
            continue

        slow = state.slow.get(key)
        devices = []
        for device, gpu in gpus.items():
            is_slowest = slow is not None and slow.device == device
            devices.append(_make_device(gpu, is_slowest))

        fields = _job_fields(state, key)
        currency = state.prices.currency
        return JobResponse(taken_at=state.taken_at, currency=currency, devices=devices, **fields)

    return None


def find_slowest(state: ClusterState, pod: PodName) -> SlowestView | None:
    """Returns the slowest GPU of the pod's job. Pods of a job often wait for it."""
    for key in state.slow:
        for gpu in state.jobs[key].values():
            pods = [part.holder.pod_name for part in gpu.parts]
            if pod in pods:
                return _make_slowest(state, key)

    return None


def _job_fields(state: ClusterState, key: JobKey) -> dict[str, Any]:
    gpus = state.jobs[key].values()
    parts: list[HeldPart] = []
    for gpu in gpus:
        parts += gpu.parts

    pods = {part.holder.pod for part in parts}
    nodes = {gpu.node.name for gpu in gpus}
    held = sum(part.gpu_fraction for part in parts)
    busy = mean_known(gpu.sample.busy for gpu in gpus)
    waiting = mean_known(gpu.sample.waiting for gpu in gpus)
    sums = sum_held(parts, state.prices.currency).rounded()

    return {
        "kind": key.kind,
        "namespace": key.namespace,
        "name": key.name,
        "cluster": key.cluster,
        "pods": len(pods),
        "nodes": len(nodes),
        "gpus": round(held, 6),
        "utilization_ratio": round_known(busy),
        "wait_ratio": round_known(waiting),
        "cost_per_hour": sums.cost_per_hour,
        "waste": sums.waste,
        "slowest": _make_slowest(state, key),
    }


def _make_slowest(state: ClusterState, key: JobKey) -> SlowestView | None:
    slow = state.slow.get(key)
    if slow is None:
        return None

    gpu = state.jobs[key][slow.device]
    explanation = explain_slow(slow)

    return SlowestView(
        **_place(gpu),
        reason=slow.reason,
        difference_ratio=round(slow.difference, 4),
        against=slow.against,
        since=round(slow.since + state.clock_offset, 0),
        says=f"Slower than {compared_with(slow.against)}: {explanation}.",
        explanation=explanation,
    )


def _make_device(gpu: JobGpu, is_slowest: bool) -> JobDevice:
    first = gpu.parts[0]
    sample = gpu.sample

    return JobDevice(
        **_place(gpu),
        model=device_model(first.gpu, first.instance),
        pods=sorted({part.holder.pod for part in gpu.parts}),
        is_slowest=is_slowest,
        utilization_ratio=round_known(sample.busy),
        memory_used_bytes=device_memory(first.device),
        memory_total_bytes=first.device.memory_total_bytes,
        sm_clock_mhz=sample.clock,
        power_watts=round_known(sample.power),
        power_limit_watts=round_known(sample.power_limit),
        power_capped_ratio=round_known(sample.capped),
        throttled_ratio=round_known(sample.throttled),
        tensor_active_ratio=round_known(sample.tensor),
        dram_active_ratio=round_known(sample.dram),
        bytes_per_second=sample.bytes,
        wait_ratio=round_known(sample.waiting),
    )


def _place(gpu: JobGpu) -> dict[str, Any]:
    first = gpu.parts[0]
    instance = "" if first.instance is None else str(first.instance.id)

    return {
        "node": gpu.node.name,
        "uuid": gpu_id(first.gpu),
        "instance": instance,
        "index": first.gpu.index,
    }
