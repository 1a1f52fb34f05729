"""Simulated views of clusters, and a server that shows the current one on the page."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from msgspec.structs import replace

from podgpu.charge import Waste
from podgpu.fleet.parts import Totals, WasteRate
from podgpu.fleet.readings import ClusterReading
from podgpu.fleet.round import PublishedState
from podgpu.fleet.settings import ViewSettings
from podgpu.fleet.state import build_cluster_state
from podgpu.fleet.view import (
    DeviceView,
    GpuResponse,
    GpuView,
    HolderView,
    InstanceView,
    NamespaceView,
    NodeView,
    View,
)
from podgpu.metrics.encode import Body, etag_of
from podgpu.model import WaitPart
from podgpu.node.agent.agent import Agent
from podgpu.web.app import Address
from podgpu.web.lifecycle import forget_route
from podgpu.web.page_routes import page_routes
from tests.web.server import LOOPBACK, Client, running

GIB = 1024**3
HOUR = 3600.0
INTERVAL = 1.0
_DUE_SECONDS = 4.0
"""Less than the 8 s after which the page shows a view as stale."""
_ON_PURPOSE_SECONDS = 300.0


Records = Callable[[str, Mapping[str, str]], Mapping[str, Any] | None]
"""Maps a path below /api/v1/ and a query to the JSON of the response. None means 404."""


@dataclass
class Showing:
    """`picture` may be replaced while the server runs."""

    picture: View
    records: Records | None = None
    """Responses about history, waste and single GPUs. None simulates an old server without them."""
    more: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Changes the JSON before it is served."""
    asked: int = 0
    forgotten: list[str] = field(default_factory=list)
    may_forget: bool = True
    goes_on: bool = True
    """Updates the time of the view, so that it does not become stale on a slow machine."""
    _made: tuple[View, PublishedState] | None = field(default=None, repr=False)

    def latest(self) -> PublishedState:
        self.asked += 1
        if (
            self.goes_on
            and _DUE_SECONDS < time.time() - (self.picture.taken_at or 0.0) < _ON_PURPOSE_SECONDS
        ):
            self.picture = replace(self.picture, taken_at=time.time())
        if self._made is None or self._made[0] is not self.picture:
            self._made = self.picture, self._state(self.picture)
        return self._made[1]

    def _state(self, picture: View) -> PublishedState:
        state = page_of(picture)
        if self.more is None:
            return state
        plain = json.dumps(self.more(json.loads(state.view_json[0].plain))).encode()
        state.view_json = Body(plain), etag_of(plain)
        return state

    def _answering(self) -> Middleware:
        @web.middleware
        async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
            path = request.path.removeprefix("/api/v1/")
            if path == "view" and "at" in request.query:
                past = {"at": float(request.query["at"]), "step_seconds": 300}
                return web.json_response(json.loads(self.latest().view_json[0].plain) | past)
            if self.records is None or path.split("/")[0] not in (
                "history",
                "range",
                "costs",
                "events",
                "summary",
                "gpus",
                "queue",
            ):
                return await handler(request)
            found = self.records(path, request.query)
            if found is None:
                return web.json_response(
                    {"error": f"there is no path {request.path}", "reason": "no_path"}, status=404
                )
            return web.json_response({"api": "podgpu/v1", **found})

        return answer

    def _forget(self, uuid: str) -> tuple[int, str]:
        self.forgotten.append(uuid)
        return 200, "removed"

    @contextmanager
    def served(self, address: Address = LOOPBACK) -> Iterator[Client]:
        app = web.Application(middlewares=[self._answering()])
        app.add_routes(
            [
                forget_route(self._forget, self.may_forget),
                *page_routes(self.latest, _no_details, ["metrics"]),
            ]
        )
        with running(cast(Agent, None), address, lambda _: app) as client:
            yield client


def page_of(picture: View) -> PublishedState:
    """Computes the dependent values: the use of holders, the mean of MIG instances, and totals."""
    nodes = [_complete(node) for node in picture.nodes]
    view = replace(picture, nodes=nodes, totals=_totals(nodes, bool(picture.currency)))
    state = build_cluster_state(
        ClusterReading(), None, ViewSettings(), 0.0, picture.taken_at or 0.0
    )
    published = PublishedState(state)
    published.view = view
    return published


def _complete(node: NodeView) -> NodeView:
    unknown = node.old or node.gone
    gpus = []
    for gpu in node.gpus:
        parts = [
            replace(part, holders=_divide(part, part.part or 0.0, unknown or gpu.absent))
            for part in gpu.instances
        ]
        whole = replace(gpu, instances=parts, holders=_divide(gpu, 1.0, unknown or gpu.absent))
        known = [part for part in parts if part.utilization_ratio is not None]
        if known:
            busy = sum((part.part or 0.0) * (part.utilization_ratio or 0.0) for part in known)
            whole.utilization_ratio = round(busy / sum(part.part or 0.0 for part in known), 4)
        whole.waste = _add_up_waste(whole)
        gpus.append(whole)
    return replace(node, gpus=gpus)


def _divide(slot: DeviceView, size: float, unknown: bool) -> list[HolderView]:
    found = []
    for holder in slot.holders:
        load = (
            slot.utilization_ratio if holder.utilization_ratio is None else holder.utilization_ratio
        )
        use = "unknown" if unknown or load is None else "used" if load else "idle"
        share = 1 / len(slot.holders) if holder.share_ratio is None else holder.share_ratio
        part = round(size * share, 6)
        waste = None
        if use != "unknown":
            idle = 1.0 if use == "idle" else 0.0
            cost = holder.cost_per_hour
            waste = WasteRate(
                Waste(idle=idle * part),
                None if cost is None else Waste(idle=idle * cost),
            )
        found.append(replace(holder, part=part, use=use, waste=waste))
    return found


def _add_up_waste(gpu: GpuView) -> WasteRate:
    waste = WasteRate()
    for slot in (gpu, *gpu.instances):
        for holder in slot.holders:
            waste = waste.plus(holder.waste or WasteRate())
    if not any(slot.holders for slot in (gpu, *gpu.instances)):
        cost = gpu.price_per_hour
        waste = WasteRate(Waste(unallocated=1.0), None if cost is None else Waste(unallocated=cost))
    return waste


def _totals(nodes: list[NodeView], priced: bool) -> Totals:
    gpus = [gpu for node in nodes for gpu in node.gpus]
    holders = [holder for gpu in gpus for slot in (gpu, *gpu.instances) for holder in slot.holders]
    uses = {
        use: sum(h.part or 0.0 for h in holders if h.use == use)
        for use in ("used", "idle", "unknown")
    }
    costs = [h.cost_per_hour for h in holders if h.cost_per_hour is not None]
    wasted = sum(h.cost_per_hour or 0.0 for h in holders if h.use == "idle")
    watts = [
        gpu.power_watts
        for node in nodes
        for gpu in node.gpus
        if gpu.power_watts is not None and not node.old
    ]
    allocated = sum(uses.values())
    return Totals(
        gpus=len(gpus),
        allocated=round(allocated, 4),
        used=round(uses["used"], 4),
        idle=round(uses["idle"], 4),
        unknown=round(uses["unknown"], 4),
        free=round(len(gpus) - allocated, 4),
        broken=sum(
            any(slot.conditions or slot.absent for slot in (gpu, *gpu.instances)) for gpu in gpus
        ),
        power_watts=sum(watts) if watts else None,
        cost_per_hour=round(sum(costs), 4) if priced and (costs or not holders) else None,
        wasted_per_hour=round(wasted, 4) if priced and (costs or not holders) else None,
        waste=sum_waste(gpus),
    )


def sum_waste(gpus: Iterable[GpuView]) -> WasteRate:
    waste = WasteRate()
    for gpu in gpus:
        waste = waste.plus(gpu.waste or WasteRate())
    return waste


def gpu(
    index: int,
    node: str,
    model: str = "NVIDIA H100 80GB HBM3",
    *,
    utilization: float | None = None,
    memory: int | None = 0,
    total: int | None = 80,
    holders: Iterable[HolderView] = (),
    **figures: Any,
) -> GpuView:
    """`memory` and `total` are in GiB."""
    return GpuView(
        uuid=f"GPU-{node}-{index:04d}-4c5e-9d3f-000000000000",
        index=index,
        model=model,
        utilization_ratio=utilization,
        memory_used_bytes=None if memory is None else memory * GIB,
        memory_total_bytes=None if total is None else total * GIB,
        holders=list(holders),
        **figures,
    )


def mig(
    number: str,
    profile: str,
    utilization: float | None,
    memory: int = 0,
    holders: Iterable[HolderView] = (),
) -> InstanceView:
    slices = int(profile[0])
    return InstanceView(
        id=number,
        profile=profile,
        slices=slices,
        gpu_slices=7,
        part=round(slices / 7, 6),
        utilization_ratio=utilization,
        memory_used_bytes=memory * GIB,
        memory_total_bytes=int(profile.partition(".")[2].removesuffix("gb")) * GIB,
        holders=list(holders),
    )


def held(
    namespace: str,
    pod: str,
    container: str = "main",
    utilization: float | None = None,
    memory: int | None = None,
    **figures: Any,
) -> HolderView:
    memory = None if memory is None else memory * GIB
    return HolderView(
        namespace,
        pod,
        container,
        utilization_ratio=utilization,
        memory_used_bytes=memory,
        **figures,
    )


def node(name: str, gpus: Iterable[GpuView], **more: Any) -> NodeView:
    return NodeView(name=name, gpus=list(gpus), **more)


def picture(*nodes: NodeView, **members: Any) -> View:
    members = {"used_utilization_ratio": 0.19, "used_field": "DCGM_FI_DEV_MEM_COPY_UTIL", **members}
    empty = _totals([], False)
    return View(
        version="1.2.3",
        scope="cluster",
        taken_at=time.time(),
        interval_seconds=INTERVAL,
        nodes=list(nodes),
        totals=empty,
        **{"namespaces": [], "alerts": [], "notes": [], **members},
    )


def three_nodes(turn: int = 0) -> View:
    """A small cluster with GPUs in most states. Values change with `turn`."""
    now = time.time()
    return picture(
        node("gpu-a-01", _training_node("gpu-a-01", turn)),
        node("gpu-a-02", _mixed_node("gpu-a-02", now, turn)),
        node("gpu-b-01", _inference_node("gpu-b-01", turn)),
        namespaces=[
            _namespace("research", 10, 9, 0),
            _namespace("serving", 5.5, 4.5, 0),
            _namespace("notebooks", 3.43, 0.86, 2),
            _namespace("batch", 1, 1, 0),
        ],
        idle_after_seconds=1800.0,
        currency="EUR",
        notes=[
            "http://10.0.4.17:9400/metrics: no answer within 5 s; is the exporter running there?"
        ],
    )


def _namespace(name: str, allocated: float, used: float, idle: float) -> NamespaceView:
    return NamespaceView(
        namespace=name, allocated_gpus=allocated, used_gpus=used, idle_gpus=idle, unknown_gpus=0.0
    )


def _wave(index: int, turn: int, base: float, swing: float) -> float:
    return round(
        min(
            1.0,
            max(
                0.0, base + swing * math.sin(index * 1.7 + turn / 3.0) + 0.02 * math.sin(turn * 2.1)
            ),
        ),
        3,
    )


def _training_node(node: str, turn: int) -> Iterator[GpuView]:
    for index in range(8):
        load = _wave(index, turn, 0.91, 0.06)
        pod = held("research", f"llm-pretrain-{node}", "trainer", load, 71, processes=1)
        figures: dict[str, Any] = {
            "power_watts": round(420 + 270 * load, 1),
            "temperature_celsius": 55.0 + index,
        }
        yield gpu(
            index, node, utilization=load, memory=71, holders=[pod], energy_joules=9e8, **figures
        )


def _mixed_node(node: str, now: float, turn: int) -> Iterator[GpuView]:
    for index in range(2):
        load = _wave(index, turn, 0.74, 0.15)
        pod = held("research", "diffusion-sweep-7", "trainer", load, 33, processes=2)
        figures: dict[str, Any] = {"power_watts": 510.0, "temperature_celsius": 61.0}
        yield gpu(index, node, utilization=load, memory=33, holders=[pod], **figures)
    idle = held(
        "notebooks",
        "jupyter-ada",
        "notebook",
        0.0,
        processes=1,
        idle_since=round(now - 27.4 * HOUR),
    )
    yield gpu(
        2,
        node,
        utilization=0.0,
        memory=22,
        holders=[idle],
        power_watts=112.0,
        temperature_celsius=38.0,
    )
    idle = held(
        "notebooks",
        "jupyter-grace",
        "notebook",
        0.0,
        processes=0,
        idle_since=round(now - 2.2 * HOUR),
    )
    yield gpu(
        3,
        node,
        utilization=0.0,
        memory=0,
        holders=[idle],
        power_watts=71.0,
        temperature_celsius=33.0,
    )
    yield gpu(
        4, node, memory=43, power_watts=310.0, temperature_celsius=52.0, instances=_instances(turn)
    )
    loads = [_wave(i, turn, base, 0.07) for i, base in ((1, 0.34), (2, 0.21), (3, 0.12))]
    slow = (WaitPart("batch", "embed-documents", "worker", seconds=0.1, ratio=0.1),)
    sharing = [
        held(
            "batch",
            "embed-documents",
            "worker",
            loads[0],
            9,
            share_ratio=0.5,
            processes=1,
            wait_ratio=0.0,
        ),
        held(
            "serving",
            "rerank",
            "server",
            loads[1],
            5,
            share_ratio=0.25,
            processes=1,
            wait_ratio=0.1,
            waits_for=slow,
        ),
        held("serving", "ocr-v2", "server", loads[2], 4, share_ratio=0.25, processes=1),
    ]
    together: dict[str, Any] = {
        "utilization": round(sum(loads), 4),
        "power_watts": 386.0,
        "temperature_celsius": 54.0,
    }
    yield gpu(5, node, memory=18, holders=sharing, **together)
    for index in (6, 7):
        yield gpu(index, node, utilization=0.0, power_watts=69.0, temperature_celsius=31.0)


def _instances(turn: int) -> list[InstanceView]:
    found = []
    layout = (("1", "3g.40gb", 0.62, 30), ("5", "2g.20gb", 0.35, 11), ("9", "1g.10gb", 0.08, 2))
    for number, (instance, profile, base, memory) in enumerate(layout):
        load = _wave(number, turn, base, 0.05)
        pod = held("notebooks", f"mig-lab-{number}", "notebook", load, memory, processes=1)
        found.append(mig(instance, profile, load, memory, [pod]))
    return [*found, mig("11", "1g.10gb", 0.0)]


def _inference_node(node: str, turn: int) -> Iterator[GpuView]:
    for index in range(4):
        load = _wave(index, turn, 0.45, 0.3)
        pod = held("serving", f"chat-{index}", "engine", load, 41, processes=1)
        figures: dict[str, Any] = {
            "power_watts": round(140 + 190 * load, 1),
            "temperature_celsius": 58.0,
        }
        yield gpu(
            index,
            node,
            "NVIDIA L40S",
            utilization=load,
            memory=41,
            total=48,
            holders=[pod],
            **figures,
        )


def lived_in_node(turn: int = 0) -> View:
    """One node of eight GPUs, some shared and some with MIG, as on the exporter's own page."""
    return replace(
        picture(node("gpu-a-02", _mixed_node("gpu-a-02", time.time(), turn))), scope="node"
    )


def large(nodes: int = 1000, gpus: int = 8, turn: int = 0) -> View:
    """A thousand nodes of eight GPUs: most are busy, some idle, some free. Two nodes are stale."""
    now, found = time.time(), []
    for number in range(nodes):
        name = f"gpu-{'abcdefgh'[number % 8]}-{number:04d}"
        old = number % 400 == 399
        devices = (_one_of_many(index, number, name, now, turn) for index in range(gpus))
        found.append(node(name, devices, old=old, age_seconds=75.0 if old else 1.0))
    return picture(*found, idle_after_seconds=1800.0)


def _one_of_many(index: int, number: int, name: str, now: float, turn: int) -> GpuView:
    lot = (number * 2654435761 + index * 40503 * (number % 7)) % 1000
    model = "NVIDIA H100 80GB HBM3" if number % 3 else "NVIDIA A100-SXM4-80GB"
    if lot < 90:
        return gpu(index, name, model, utilization=0.0, power_watts=70.0, temperature_celsius=31.0)
    namespace = ("research", "serving", "batch", "vision", "speech", "ranking")[(number // 3) % 6]
    if lot < 160:
        idle = [
            held(
                namespace,
                f"dev-{number}-{index}",
                utilization=0.0,
                idle_since=round(now - 2000 - lot * 700),
            )
        ]
        figures: dict[str, Any] = {"power_watts": 98.0, "temperature_celsius": 36.0}
        return gpu(index, name, model, utilization=0.0, memory=12, holders=idle, **figures)
    load = _wave(index + number, turn, 0.2 + (lot % 100) / 125, 0.08)
    pod = held(namespace, f"job-{number // 4}-worker-{number % 4}", "trainer", load, 60)
    figures = {"power_watts": round(300 + 350 * load, 1), "temperature_celsius": 60.0}
    return gpu(index, name, model, utilization=load, memory=60, holders=[pod], **figures)


async def _no_details(answer: GpuResponse) -> GpuResponse:
    return answer
