"""Made-up pictures, and a server that shows whichever it was given last."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from podgpu.agent.loop import Agent
from podgpu.cluster.view import GpuResponse, NamespaceView, PageState
from podgpu.metrics.encode import Body, etag_of
from podgpu.model import Workload
from podgpu.web.page_routes import page_routes
from podgpu.web.sockets import Address
from tests.browser.flat_documents import DeviceFigures, HolderFigures
from tests.browser.flat_pictures import NodePicture, Picture, page_of
from tests.web.server import LOOPBACK, Client, running

GIB = 1024**3
HOUR = 3600.0
INTERVAL = 1.0
_DUE_SECONDS = 4.0
"""The page calls a picture old after eight."""
_ON_PURPOSE_SECONDS = 300.0


Records = Callable[[str, Mapping[str, str]], Mapping[str, Any] | None]
"""Path below /api/v1/ and query -> the answer as podgpu's JSON; None: there is no such thing."""


@dataclass
class Showing:
    """`picture` may be replaced while the server runs."""

    picture: Picture
    records: Records | None = None
    """History, waste and all that is known of a GPU; None: a server that is too old to have any."""
    more: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Makes of the picture's JSON what is served: with alerts, say."""
    asked: int = 0
    goes_on: bool = True
    """A picture that nobody made old on purpose is taken again in time, however long the machine needs for a test."""
    _made: tuple[Picture, PageState] | None = field(default=None, repr=False)

    def latest(self) -> PageState:
        self.asked += 1
        if self.goes_on and _DUE_SECONDS < time.time() - (self.picture.taken_at or 0.0) < _ON_PURPOSE_SECONDS:
            self.picture = replace(self.picture, taken_at=time.time())
        if self._made is None or self._made[0] is not self.picture:
            self._made = self.picture, self._state(self.picture)
        return self._made[1]

    def _state(self, picture: Picture) -> PageState:
        state = page_of(picture)
        if self.more is None:
            return state
        plain = json.dumps(self.more(json.loads(state.body.plain))).encode()
        return replace(state, body=Body.of(plain), etag=etag_of(plain))

    def _answering(self) -> Middleware:
        @web.middleware
        async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
            path = request.path.removeprefix("/api/v1/")
            if self.records is None or path.split("/")[0] not in ("history", "waste", "gpus"):
                return await handler(request)
            found = self.records(path, request.query)
            if found is None:
                return web.json_response({"error": f"no such path: {request.path}"}, status=404)
            return web.json_response({"api": "podgpu/v1", **found})

        return answer

    @contextmanager
    def served(self, address: Address = LOOPBACK) -> Iterator[Client]:
        app = web.Application(middlewares=[self._answering()])
        app.add_routes(page_routes(self.latest, _no_details, ["metrics"]))
        with running(cast(Agent, None), address, lambda _: app) as client:
            yield client


def gpu(index: int, node: str, model: str = "NVIDIA H100 80GB HBM3", **figures: object) -> DeviceFigures:
    memory = figures.pop("memory", 0)
    assert isinstance(memory, int)
    return DeviceFigures(  # type: ignore[arg-type]
        uuid=f"GPU-{node}-{index:04d}-4c5e-9d3f-000000000000",
        index=index,
        model=model,
        node=node,
        memory_used=memory * GIB,
        memory_total=80 * GIB,
        **figures,
    )


def held(namespace: str, pod: str, container: str = "main", **figures: object) -> HolderFigures:
    return HolderFigures(Workload(namespace, pod, container), **figures)  # type: ignore[arg-type]


def picture(*nodes: NodePicture, **members: object) -> Picture:
    members.setdefault("used_utilization", 0.19)  # of the memory controllers: nothing that the page shows
    members.setdefault("used_field", "DCGM_FI_DEV_MEM_COPY_UTIL")
    return Picture("cluster", time.time(), INTERVAL, nodes, version="1.2.3", **members)  # type: ignore[arg-type]


def three_nodes(turn: int = 0) -> Picture:
    """A small cluster with some of everything; `turn` lets it move."""
    now = time.time()
    nodes = (
        NodePicture("gpu-a-01", tuple(_training_node("gpu-a-01", turn))),
        NodePicture("gpu-a-02", tuple(_mixed_node("gpu-a-02", now, turn))),
        NodePicture("gpu-b-01", tuple(_inference_node("gpu-b-01", now, turn))),
    )
    return picture(
        *nodes,
        namespaces=(
            _namespace("research", 10, 9, 0, 3120.5, 2710.2, 1881.4),
            _namespace("serving", 5.5, 4.5, 0, 1410.25, 640.75, 590.1),
            _namespace("notebooks", 3.43, 0.86, 2, 988.0, 102.6, 160.9),
            _namespace("batch", 1, 1, 0, 412.0, 301.3, 214.2),
        ),
        idle_after_seconds=1800.0,
        currency="EUR",
        counting_since=now - 14 * 24 * HOUR,
        notes=("http://10.0.4.17:9400/metrics: no answer within 5 s; is the exporter running there?",),
    )


def _namespace(name: str, allocated: float, used: float, idle: float, *amounts: float) -> NamespaceView:
    hours, busy, energy = amounts
    return NamespaceView(
        namespace=name,
        allocated_gpus=allocated,
        used_gpus=used,
        idle_gpus=idle,
        unknown_gpus=0.0,
        allocated_gpu_hours=hours,
        busy_gpu_hours=busy,
        energy_kwh=energy,
        cost={"allocated": hours * 2.1, "used": busy * 2.1, "energy": energy * 0.24},
    )


def _wave(index: int, turn: int, base: float, swing: float) -> float:
    return round(min(1.0, max(0.0, base + swing * math.sin(index * 1.7 + turn / 3.0) + 0.02 * math.sin(turn * 2.1))), 3)


def _training_node(node: str, turn: int) -> Iterator[DeviceFigures]:
    for index in range(8):
        load = _wave(index, turn, 0.91, 0.06)
        pod = held("research", f"llm-pretrain-{node}", "trainer", utilization=load, memory=71 * GIB, processes=1)
        figures = {"power_watts": 420 + 270 * load, "temperature": 55.0 + index, "energy_joules": 9e8}
        yield gpu(index, node, utilization=load, memory=71, holders=(pod,), **figures)


def _mixed_node(node: str, now: float, turn: int) -> Iterator[DeviceFigures]:
    for index in range(2):
        load = _wave(index, turn, 0.74, 0.15)
        pod = held("research", "diffusion-sweep-7", "trainer", utilization=load, memory=33 * GIB, processes=2)
        yield gpu(index, node, utilization=load, memory=33, holders=(pod,), power_watts=510.0, temperature=61.0)
    idle = held("notebooks", "jupyter-ada", "notebook", utilization=0.0, processes=1, idle_since=now - 27.4 * HOUR)
    yield gpu(2, node, utilization=0.0, memory=22, holders=(idle,), power_watts=112.0, temperature=38.0)
    idle = held("notebooks", "jupyter-grace", "notebook", utilization=0.0, processes=0, idle_since=now - 2.2 * HOUR)
    yield gpu(3, node, utilization=0.0, memory=0, holders=(idle,), power_watts=71.0, temperature=33.0)
    yield gpu(4, node, utilization=None, memory=43, power_watts=310.0, temperature=52.0)
    yield from _instances(4, node, turn)
    first, second, third = (_wave(i, turn, base, 0.07) for i, base in ((1, 0.34), (2, 0.21), (3, 0.12)))
    sharing = (
        held("batch", "embed-documents", "worker", utilization=first, memory=9 * GIB, share=0.5, processes=1),
        held("serving", "rerank", "server", utilization=second, memory=5 * GIB, share=0.25, processes=1),
        held("serving", "ocr-v2", "server", utilization=third, memory=4 * GIB, share=0.25, processes=1),
    )
    together = {"power_watts": 386.0, "temperature": 54.0}
    yield gpu(5, node, utilization=first + second + third, memory=18, holders=sharing, **together)
    for index in (6, 7):
        yield gpu(index, node, utilization=0.0, power_watts=69.0, temperature=31.0)


def _instances(index: int, node: str, turn: int) -> Iterator[DeviceFigures]:
    small = "1g.10gb"
    layout = (("1", "3g.40gb", 0.62, 30), ("5", "2g.20gb", 0.35, 11), ("9", small, 0.08, 2), ("11", small, 0, 0))
    for number, (instance, profile, load, memory) in enumerate(layout):
        load = _wave(number, turn, load, 0.05) if load else 0.0
        pod = held("notebooks", f"mig-lab-{number}", "notebook", utilization=load, memory=memory * GIB, processes=1)
        part = gpu(index, node, utilization=load, memory=memory, holders=(pod,) if memory else ())
        total = int(profile.partition(".")[2].removesuffix("gb")) * GIB
        yield replace(part, instance=instance, profile=profile, memory_total=total)


def _inference_node(node: str, now: float, turn: int) -> Iterator[DeviceFigures]:
    model = "NVIDIA L40S"
    for index in range(4):
        load = _wave(index, turn, 0.45, 0.3)
        pod = held("serving", f"chat-{index}", "engine", utilization=load, memory=41 * GIB, processes=1)
        figures = {"power_watts": 140 + 190 * load, "temperature": 58.0}
        shown = gpu(index, node, model, utilization=load, memory=41, holders=(pod,), **figures)
        yield replace(shown, memory_total=48 * GIB)


def lived_in_node(turn: int = 0) -> Picture:
    """One node of eight GPUs with MIG and shared ones, as the exporter shows its own."""
    now = time.time()
    node = NodePicture("gpu-a-02", tuple(_mixed_node("gpu-a-02", now, turn)))
    return replace(picture(node), scope="node")


def large(nodes: int = 1000, gpus: int = 8, turn: int = 0) -> Picture:
    """A thousand nodes of eight: most busy, some idle, some free, two nodes old."""
    now, found = time.time(), []
    for number in range(nodes):
        name = f"gpu-{'abcdefgh'[number % 8]}-{number:04d}"
        old = number % 400 == 399
        devices = tuple(_one_of_many(index, number, name, now, turn) for index in range(gpus))
        found.append(NodePicture(name, devices, old=old, age_seconds=75.0 if old else 1.0))
    return picture(*found, idle_after_seconds=1800.0)


def _one_of_many(index: int, number: int, name: str, now: float, turn: int) -> DeviceFigures:
    lot = (number * 2654435761 + index * 40503 * (number % 7)) % 1000
    model = "NVIDIA H100 80GB HBM3" if number % 3 else "NVIDIA A100-SXM4-80GB"
    if lot < 90:
        return gpu(index, name, model, utilization=0.0, power_watts=70.0, temperature=31.0)
    namespace = ("research", "serving", "batch", "vision", "speech", "ranking")[(number // 3) % 6]
    if lot < 160:
        idle = held(namespace, f"dev-{number}-{index}", utilization=0.0, idle_since=now - 2000 - lot * 700)
        return gpu(index, name, model, utilization=0.0, memory=12, holders=(idle,), power_watts=98.0, temperature=36.0)
    load = _wave(index + number, turn, 0.2 + (lot % 100) / 125, 0.08)
    pod = held(namespace, f"job-{number // 4}-worker-{number % 4}", "trainer", utilization=load, memory=60 * GIB)
    return gpu(
        index, name, model, utilization=load, memory=60, holders=(pod,), power_watts=300 + 350 * load, temperature=60.0
    )


async def _no_details(answer: GpuResponse) -> GpuResponse:
    return answer
