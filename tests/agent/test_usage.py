"""Containers on shared GPUs, from the simulated driver and /proc to the exposition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podgpu.errors import SourceError
from podgpu.fleet.view import make_view
from podgpu.labs.simulate.gpu import SimulatedLoad
from podgpu.metrics.counters import shipped_counters
from podgpu.metrics.labels import Policy
from podgpu.model import Assignment, Unmapped, VcudaRequest, Workload
from podgpu.node.agent.agent import Settings
from podgpu.node.holders.identity import Identities
from podgpu.web.exporter_app import build_state
from tests.agent.simulated_node import SimulatedNode
from tests.simulated import FaultyProc, container_cgroup

GIB = 1024**3
UIDS = {
    name: f"{n}f1f4ffc-0b8c-4d53-9b1e-6b2d0f9b8a1{n}"
    for n, name in enumerate(("train", "serve", "idle"))
}
IDS = {name: f"{n:x}" * 64 for n, name in enumerate(UIDS, 1)}
NAMES = Identities(
    current=frozenset(Workload("ns", name, "main", UIDS[name], IDS[name]) for name in UIDS)
)


class Node(SimulatedNode):
    """One H100 with three time slices. Two pods use it, and a third one is idle."""

    def __init__(self, root: Path, spec: str = "1xH100") -> None:
        self.proc = FaultyProc(root / "proc")
        settings = Settings(interval=1.0, policy=Policy(shipped_counters("default") or (), "h"))
        super().__init__(spec, settings, proc=self.proc, identities=lambda: self.read_names())
        self.read_names: Callable[[], Identities] = lambda: NAMES

    def give(self, *names: str) -> None:
        self.holders.now = [
            Assignment(self.uuid(0), Workload("ns", name, "main"), "kubelet", str(n), 1 / 3)
            for n, name in enumerate(names)
        ]

    def work(self, name: str, pid: int, duty: float, memory: int) -> None:
        self.proc.add(pid, container_cgroup(UIDS[name], IDS[name]))
        self.driver.place(SimulatedLoad(0, pid, duty=duty, memory=memory))

    def value(self, name: str, pod: str = "") -> float | None:
        wanted = f'pod="{pod}"' if pod else ""
        found = [
            x for x in self.exposition.splitlines() if x.startswith(f"{name}{{") and wanted in x
        ]
        found = found if pod else [x for x in found if 'pod="' not in x]
        return float(found[0].rsplit(" ", 1)[1]) if found else None


def shared(node: Node) -> Node:
    node.give("train", "serve", "idle")
    node.work("train", 41, 0.5, 10 * GIB)
    node.work("serve", 42, 0.2, 2 * GIB)
    node.run(20)
    return node


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.agent.stop()


def test_usage_that_was_read_before_a_release_is_not_published_after_it(node: Node) -> None:
    def release_meanwhile() -> Identities:
        assert node.agent.release(30.0)
        return NAMES

    shared(node)
    assert node.value("podgpu_container_gpu_processes", "train") == 1
    node.read_names = release_meanwhile
    unknown = container_cgroup(
        UIDS["idle"].replace("2f", "9f"), "f" * 64
    )  # makes the turn read the names again
    node.proc.add(43, unknown)
    node.driver.place(SimulatedLoad(0, 43, duty=0.1, memory=GIB))
    node.agent.read_usage()
    assert node.value("podgpu_container_gpu_processes", "train") is None


@pytest.mark.fault(
    "A container ends while its GPU is lost, and the GPU returns",
    (
        "energy after the return is not attributed to the container, and the unattributed rest "
        "equals "
        "the device's energy"
    ),
)
def test_energy_after_a_gap_is_not_attributed_to_a_container_that_ended_in_it(node: Node) -> None:
    node.give("train")
    node.work("train", 41, 0.5, GIB)
    node.run(8)  # energy is read every 5 s, so the last seconds are not attributed yet
    node.faults.lose(0)
    node.turn()
    node.driver.remove(41)
    node.give()
    node.turn(60)
    names = "podgpu_device_energy_joules_total", "podgpu_device_unattributed_energy_joules_total"
    before = [node.value(name) or 0 for name in names]
    node.faults.recover(0)
    node.run(20)
    device, rest = (
        (node.value(name) or 0) - value for name, value in zip(names, before, strict=True)
    )
    assert rest == pytest.approx(device)
    assert device > 0


@pytest.mark.fault(
    "The driver hangs in the energy counter while telemetry reads it",
    (
        "usage goes on without it: busy time and memory keep their figures, and the energy comes "
        "with "
        "the next answer"
    ),
)
def test_an_energy_counter_that_hangs_telemetry_does_not_hang_usage(node: Node) -> None:
    shared(node)
    busy, energy = (
        node.value(f"podgpu_container_gpu_{x}_total", "train")
        for x in ("busy_seconds", "energy_joules")
    )
    hang = node.driver.faults.hang("nvmlDeviceGetTotalEnergyConsumption")
    exposition = node.turn()
    assert hang.entered.is_set()
    assert 'podgpu_exporter_source_errors_total{source="usage"' not in exposition
    assert (node.value("podgpu_container_gpu_busy_seconds_total", "train") or 0) > (busy or 0)
    assert node.value("podgpu_container_gpu_energy_joules_total", "train") == energy
    node.driver.faults.release_all()
    node.run(6)
    assert (node.value("podgpu_container_gpu_energy_joules_total", "train") or 0) > (energy or 0)


UNALLOCATED = "podgpu_container_gpu_unallocated_use_since_timestamp_seconds"


def unallocated_use(node: Node) -> list[str]:
    """Returns the details of the condition. Checks that the metrics agree."""
    conditions = [
        c for c in node.agent.published.state.devices[0].conditions if c.name == "unallocated_use"
    ]
    assert (f"{UNALLOCATED}{{" in node.exposition) == bool(conditions)
    assert ('condition="unallocated_use"} 1' in node.exposition) == bool(conditions)
    return [condition.detail for condition in conditions]


def test_a_container_that_uses_a_gpu_it_was_not_given_is_reported_after_a_minute(
    node: Node,
) -> None:
    node.give("serve")
    node.work("serve", 42, 0.2, GIB)
    node.turn()
    node.work("train", 41, 0.5, GIB)
    began = node.wall()
    for _ in range(59):
        node.turn()
        assert unallocated_use(node) == []
    node.turn()
    assert unallocated_use(node) == ["ns/train/main"]
    assert node.value(UNALLOCATED, "train") == pytest.approx(began, abs=1.1)
    assert node.value(UNALLOCATED, "serve") is None
    view = make_view(build_state(node.agent))
    (alert,) = view.alerts
    assert (alert.severity, "ns/train/main uses it without an allocation" in alert.text) == (
        "warning",
        True,
    )
    assert view.totals.broken == 0, "the GPU is not broken"
    node.give("serve", "train")
    node.turn()
    assert unallocated_use(node) == [], "the process belongs to a holder now"


def test_a_container_on_a_gpu_of_nobody_is_reported_although_its_processes_name_it_as_holder(
    node: Node,
) -> None:
    node.holders.more = {"offered": frozenset({node.uuid(0)})}
    node.holders.now = [Assignment(node.uuid(0), Workload("ns", "train", "main"), "processes")]
    node.work("train", 41, 0.5, GIB)
    node.run(62)
    assert unallocated_use(node) == ["ns/train/main"]


@pytest.mark.parametrize(
    "case",
    [
        "the kubelet is away",
        "an allocation is not mapped",
        "gpu-manager",
        "no device plugin",
        "reserved",
    ],
)
def test_use_is_not_called_unallocated_if_the_allocation_is_not_known(
    node: Node, case: str
) -> None:
    train = Workload("ns", "train", "main")
    if case != "no device plugin":
        node.give("serve")
        node.turn()
    if case == "the kubelet is away":
        node.holders.error = SourceError("unavailable", "no")
    elif case == "an allocation is not mapped":
        node.holders.more = {
            "unmapped": (Unmapped("kubelet", "unknown_device", "GPU-x", "nvidia.com/gpu", train),)
        }
    elif case == "gpu-manager":
        node.holders.more = {"vcuda": (VcudaRequest.for_holder(train, 50, 4),)}
    elif case == "reserved":  # by KAI Scheduler, without access to the API server
        pod = Workload("kai-resource-reservation", "gpu-reservation-9f8", "resource-reservation")
        reserved = Unmapped("kubelet", "reserved", node.uuid(0), "", pod)
        node.holders.more = {"unmapped": (reserved,), "offered": frozenset({node.uuid(0)})}
        node.holders.now = [Assignment(node.uuid(0), train, "processes")]
    node.work("train", 41, 0.5, GIB)
    node.run(70)
    assert unallocated_use(node) == []
