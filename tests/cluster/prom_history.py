"""Twenty minutes of a small cluster: its GPUs, the samples that a server stores of them, and the expected means.

The labels are those Prometheus stores under different scrape configurations; what is right is computed from the GPUs,
never from the labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from podgpu.cluster.collect import Scope
from podgpu.model import WorkloadOwner
from tests.cluster.real_servers import Point

STEP = 15
PAST = 80
FUTURE = 40
"""Samples before and after the moment the test starts."""
LATE = -10
"""First sample of a node that was added in the middle of the window."""
H100, A30 = "NVIDIA H100 80GB HBM3", "NVIDIA A30"
Labels = Mapping[str, str]


@dataclass(frozen=True)
class Gpu:
    uuid: str
    index: int
    node: str
    target: Labels
    """The labels of the target as Prometheus has them."""
    value: Callable[[int], float]
    """Sample number -> the measured field, in %."""
    model: str = H100
    holders: tuple[tuple[str, str], ...] = ()
    processes: tuple[int, ...] = ()
    """Of each holder; empty: not reported."""
    labels: Labels = field(default_factory=dict)
    """Labels of nodes and holders, as stored."""
    first: int = -PAST
    copies: Sequence[Labels] = ({},)
    instance: str = ""
    profile: str = ""
    old_names: bool = False
    counted: bool = True
    """False: its figures are impossible."""


def wave(seed: int, rest: int = 4) -> Callable[[int], float]:
    """Between 1 and 97, and 0 in one of `rest` samples."""
    return lambda n: 0.0 if (n + seed) % rest == 0 else float((n * 31 + seed * 17) % 97 + 1)


PODGPU = {"job": "podgpu", "instance": "10.0.0.1:9400", "namespace": "monitoring", "pod": "podgpu-a"}
DCGM = {"job": "dcgm", "instance": "10.0.0.2:9400", "namespace": "gpu-operator", "pod": "dcgm-b"}
OLD = {"job": "old", "instance": "10.0.0.3:9400"}
NODE_D = {"job": "pods", "instance": "10.0.0.4:9400", "node": "node-d"}
NAMELESS = {"job": "pods", "instance": "10.0.0.5:9400"}
MIG = {"job": "mig", "instance": "10.0.0.6:9400"}
COPIES = ({"prometheus_replica": "prometheus-0"}, {"prometheus_replica": "prometheus-1"})

GPUS = (
    # podgpu, honor_labels: true; what a series has no label of is the target's. An HA pair scrapes it.
    Gpu(
        *("GPU-a0", 0, "node-a", PODGPU, wave(1)),
        holders=(("team-a", "train-0"),),
        processes=(2,),
        labels={"Hostname": "node-a", "namespace": "team-a", "pod": "train-0", "container": "main"},
        copies=COPIES,
    ),
    Gpu(
        *("GPU-a1", 1, "node-a", PODGPU, wave(2, 3)),
        holders=(("team-a", "notebook"), ("team-b", "infer-7d9c-x2x")),
        processes=(0, 0),
        labels={"Hostname": "node-a"},
        copies=COPIES,
    ),
    Gpu("GPU-a2", 2, "node-a", PODGPU, wave(3), labels={"Hostname": "node-a"}, copies=COPIES),
    # dcgm-exporter, honor_labels: false.
    Gpu(
        *("GPU-b0", 0, "node-b", DCGM, wave(4), A30),
        holders=(("team-b", "job-x"),),
        labels={
            **{"Hostname": "node-b", "exported_namespace": "team-b", "exported_pod": "job-x"},
            "exported_container": "main",
        },
    ),
    Gpu("GPU-b1", 1, "node-b", DCGM, lambda n: 0.0, A30, labels={"Hostname": "node-b"}),
    Gpu("GPU-b2", 2, "node-b", DCGM, lambda n: 2.0**63, A30, labels={"Hostname": "node-b"}, counted=False),
    # The 1.x names.
    Gpu(
        *("GPU-c0", 0, "node-c", OLD, wave(5, 2)),
        holders=(("team-c", "legacy"),),
        labels={"Hostname": "node-c", "pod_namespace": "team-c", "pod_name": "legacy", "container_name": "main"},
        old_names=True,
    ),
    # A node that came late, called so by a label of the target; nobody has `up` of it.
    Gpu(
        *("GPU-d0", 0, "node-d", NODE_D, wave(6)),
        holders=(("team-d", "late"),),
        labels={"namespace": "team-d", "pod": "late", "container": "c"},
        first=LATE,
    ),
    # A node with nothing but an address.
    Gpu("GPU-e0", 0, "10.0.0.5:9400", NAMELESS, wave(7)),
)
INSTANCES = tuple(
    Gpu(
        *("GPU-f0", 0, "node-f", MIG, wave(8 + n)),
        holders=((("team-a", "slice"),) if n == 1 else ()),
        processes=((1,) if n == 1 else ()),
        labels={"Hostname": "node-f"},
        instance=str(n),
        profile="3g.40gb" if n == 1 else "1g.10gb",
    )
    for n in (1, 2, 3)
)
OWNERS = {
    ("team-a", "train-0"): WorkloadOwner("StatefulSet", "train"),
    ("team-b", "infer-7d9c-x2x"): WorkloadOwner("Deployment", "infer"),
    ("team-b", "job-x"): WorkloadOwner("Job", "job"),
}


# As it is stored


def points(start: float) -> list[Point]:
    """`start`: a multiple of the step, now or a little before."""
    return [point for n in range(-PAST, FUTURE) for point in _at(n, start + n * STEP)]


def _at(n: int, at: float) -> Iterator[Point]:
    for gpu in (*GPUS, *INSTANCES):
        if n >= gpu.first:
            for number, copy in enumerate(gpu.copies):
                yield from (
                    Point(name, gpu.target | labels | copy, value, at + 5 * number)
                    for name, labels, value in _series(gpu, n)
                )
    for target in (PODGPU, DCGM, OLD, NAMELESS, MIG):
        for number, copy in enumerate(COPIES if target is PODGPU else ({},)):
            yield Point("up", target | copy, 1.0, at + 5 * number)
            if target is PODGPU:
                yield from (
                    Point(name, target | labels | copy, value, at + 5 * number) for name, labels, value in _own(n, at)
                )
    yield from _kube_state_metrics(at)


def _series(gpu: Gpu, n: int) -> Iterator[tuple[str, Labels, float]]:
    place = {"gpu": str(gpu.index), "uuid" if gpu.old_names else "UUID": gpu.uuid}
    labels = place | {"modelName": gpu.model} | gpu.labels
    value = gpu.value(n)
    if gpu.instance:
        mig = {"GPU_I_ID": gpu.instance, "GPU_I_PROFILE": gpu.profile}
        yield "DCGM_FI_PROF_GR_ENGINE_ACTIVE", labels | mig, value / 100
        if gpu.instance == "1":  # the GPU itself has the field too, and does not count beside its instances
            yield "DCGM_FI_PROF_GR_ENGINE_ACTIVE", labels, 0.9
    elif gpu.old_names:
        yield "dcgm_mem_copy_utilization", labels, value
        yield "dcgm_gpu_utilization", labels, value
    else:
        yield "DCGM_FI_DEV_MEM_COPY_UTIL", labels, value
        yield "DCGM_FI_DEV_GPU_UTIL", labels, value
        yield "DCGM_FI_DEV_FB_USED", labels, 100.0 * gpu.index
    place = {"gpu": str(gpu.index), "UUID": gpu.uuid} | ({"GPU_I_ID": gpu.instance} if gpu.instance else {})
    if gpu.processes or gpu.old_names:
        for number, (namespace, pod) in enumerate(gpu.holders):
            held = place | {"namespace": namespace, "pod": pod, "container": "main"}
            yield "podgpu_allocation_info", held, 1.0
            yield "podgpu_allocation_share_ratio", held, 1 / len(gpu.holders)
            if gpu.processes:
                host = {"Hostname": gpu.node, "modelName": gpu.model}
                yield "podgpu_container_gpu_processes", held | host, float(gpu.processes[number])


def _own(n: int, at: float) -> Iterator[tuple[str, Labels, float]]:
    yield "podgpu_exporter_build_info", {"version": "1"}, 1.0
    yield "podgpu_exporter_snapshot_timestamp_seconds", {}, at - 2
    yield "podgpu_exporter_source_up", {"source": "nvml"}, 1.0
    for namespace in ("team-a", "team-b"):
        labels = {"namespace": namespace, "modelName": H100}
        yield "podgpu_namespace_gpu_allocated_seconds_total", labels, 1000.0 + n * STEP


def _kube_state_metrics(at: float) -> Iterator[Point]:
    yes = {"owner_is_controller": "true"}
    pod = {"namespace": "team-a", "pod": "train-0", "owner_kind": "StatefulSet", "owner_name": "train"}
    yield Point("kube_pod_owner", pod | yes, 1.0, at)
    pod = {"namespace": "team-b", "pod": "infer-7d9c-x2x", "owner_kind": "ReplicaSet", "owner_name": "infer-7d9c"}
    yield Point("kube_pod_owner", pod | yes, 1.0, at)
    own = {"namespace": "monitoring", "pod": "kube-state-metrics-0"}
    pod = own | {"exported_namespace": "team-b", "exported_pod": "job-x", "owner_kind": "Job", "owner_name": "job"}
    yield Point("kube_pod_owner", pod | yes, 1.0, at)
    owner = {"namespace": "team-b", "replicaset": "infer-7d9c", "owner_kind": "Deployment", "owner_name": "infer"}
    yield Point("kube_replicaset_owner", owner | yes, 1.0, at)


# By hand


def averages(gpus: Sequence[Gpu], n: int, window: int) -> dict[Scope, float]:
    """Of the `window` instants up to sample number `n`, as ratios."""
    found: dict[Scope, list[float]] = {}
    for instant in range(n - window + 1, n + 1):
        for scope, members in _members(gpus, instant).items():
            used = [value(gpu, instant) for gpu in members if value(gpu, instant) > 0]
            found.setdefault(scope, []).append(sum(used) / len(used) / 100 if used else 0.0)
    return {scope: sum(values) / len(values) for scope, values in found.items()}


def _members(gpus: Sequence[Gpu], n: int) -> dict[Scope, list[Gpu]]:
    found: dict[Scope, list[Gpu]] = {}
    for gpu in gpus:
        if n >= gpu.first and gpu.counted:
            model = f"{gpu.model} MIG {gpu.profile}" if gpu.instance else gpu.model
            scopes = {Scope("cluster"), Scope("node", node=gpu.node), Scope("model", model=model)}
            scopes |= {Scope("namespace", namespace) for namespace, _ in gpu.holders}
            for scope in scopes:
                found.setdefault(scope, []).append(gpu)
    return found


def value(gpu: Gpu, n: int) -> float:
    """The second copy is five seconds later: at a multiple of the step it has the sample before. The higher counts."""
    return max(gpu.value(n), gpu.value(n - 1)) if len(gpu.copies) > 1 else gpu.value(n)
