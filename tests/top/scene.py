"""Small views for the tests of `podgpu top`."""

from __future__ import annotations

from typing import Any

from podgpu.fleet.parts import Totals
from podgpu.fleet.view import ConditionView, GpuView, HolderView, InstanceView, NodeView, View
from podgpu.model import Workload, parts_of
from podgpu.top.feed import Seen
from podgpu.top.lines import Line, make_lines

HEADER = ["GPU", "MODEL", "HOLDER", "UTIL", "MEM", "GiB", "POWER", "TEMP", "PROC", "IDLE"]
H100 = "NVIDIA H100 80GB HBM3"
GIB = 1024**3
NOW = 1_800_000_000.0
TRAINER = Workload("research", "train", "main")
SERVER = Workload("serving", "chat", "engine")
BATCH = Workload("batch", "embed", "worker")
LOST = ConditionView(
    condition="lost",
    since=NOW - 100,
    says="GPU 1 has fallen off the bus",
    do="Drain the node and reset the GPU.",
)


def holder(who: Workload = TRAINER, **figures: Any) -> HolderView:
    return HolderView(*parts_of(who), **figures)


def gpu(index: int | None, *holders: HolderView, model: str = H100, **more: Any) -> GpuView:
    return GpuView(uuid=f"GPU-{index}", index=index, model=model, holders=list(holders), **more)


def busy_gpu(index: int, who: Workload = TRAINER) -> GpuView:
    memory: dict[str, Any] = {"memory_used_bytes": 61 * GIB, "memory_total_bytes": 80 * GIB}
    own = holder(who, processes=1, use="used")
    return gpu(
        index, own, utilization_ratio=0.93, power_watts=600.0, temperature_celsius=67.0, **memory
    )


def instance(number: int, *holders: HolderView, **more: Any) -> InstanceView:
    return InstanceView(id=str(number), profile="1g.10gb", holders=list(holders), **more)


def node(*gpus: GpuView, name: str = "n", **more: Any) -> NodeView:
    return NodeView(name=name, gpus=list(gpus), **more)


def view(*nodes: NodeView, taken_at: float | None = NOW, **more: Any) -> View:
    gpus = sum(len(node.gpus) for node in nodes)
    given: dict[str, Any] = {
        "notes": [],
        "alerts": [],
        "namespaces": [],
        "interval_seconds": 15.0,
    } | more
    totals = given.pop(
        "totals",
        Totals(
            gpus=gpus, allocated=0.0, used=0.0, idle=0.0, unknown=0.0, free=float(gpus), broken=0
        ),
    )
    return View(scope="cluster", taken_at=taken_at, totals=totals, nodes=list(nodes), **given)


def lines_of(*gpus: GpuView, **more: Any) -> list[Line]:
    return make_lines(view(node(*gpus)), NOW, **more)


def seen(*gpus: GpuView, **more: Any) -> Seen:
    shown = view(node(*gpus), **more)
    return Seen(shown, tuple(make_lines(shown, NOW)), read_at=100.0, taken_at=NOW)
