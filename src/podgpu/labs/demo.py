"""The nodes, exporters and events of `podgpu demo`.

In each cycle a job ends, GPUs and an exporter fail, and everything recovers.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from aiohttp import web
from pynvml import NVML_GPU_RECOVERY_ACTION_GPU_RESET

from podgpu.clock import Clock
from podgpu.fleet.prices import ReadPrices
from podgpu.fleet.settings import ViewSettings
from podgpu.labs.simulate.simulated_driver import read_simulated
from podgpu.labs.simulate.simulated_node import DemoNode
from podgpu.metrics.counters import shipped_counters
from podgpu.metrics.labels import Policy
from podgpu.model import Pairs, PodLabels, PodName, WorkloadOwner
from podgpu.node.agent.agent import Agent, Settings
from podgpu.node.gpu.nvml.switch_splitter import SwitchLogFactory
from podgpu.node.holders.identity import IdentityReader
from podgpu.node.holders.kubelet import KubeletAllocation
from podgpu.node.holders.reader import HolderSources
from podgpu.node.usage.containers import ContainerFinder
from podgpu.node.usage.ledger import Ledger
from podgpu.past.books.recorder import HistoryRecorder
from podgpu.past.sqlite.sqlite_past import SqlitePast
from podgpu.web.exporter_app import application, build_state, node_recorder

OTHER_GPUS = ("6xH100,2xH100/1x3g.40gb+1x2g.20gb+1x1g.10gb", "4xH200", "2xRTX4090")
"""GPUs of all nodes but the first."""
_PLAIN = 3  # index of the node without Kubernetes
CLUSTER = ViewSettings(
    interval=2.0,
    stale_after=6.0,
    drop_after=120.0,
    window=60.0,
    idle_after=30.0,
    compared_seconds=5.0,
)
_PODS_PER_NODE = 8
CYCLE_SECONDS = 150.0
_ILL_GPU = 6
_XID = 48  # a double-bit memory error, after which the GPU must be reset
_LOST_GPU = 3
JOB = "llm-train"
_FIRST_JOB = 2  # number in the name of the job that runs on the third node at the start
_OWNERS = {
    JOB: "Job",
    "finetune": "Job",
    "diffusion": "Job",
    "chat": "Deployment",
    "rank": "Deployment",
    "embed": "Deployment",
    "ocr": "Deployment",
    "jupyter-ada": "Notebook",
    "jupyter-ben": "Notebook",
    "jupyter": "StatefulSet",
}
"""Prefix of a pod's name -> kind of its owner."""
_WORKERS = {f"{JOB}-0", f"{JOB}-1"}
"""Pods of one job, on the first two nodes. One of its GPUs is slower than the others."""
_SLOW_GPU = 1
_SLOW_CLOCK = 0.94
_TEAMS = {"research": "nlp", "serving": "chat", "batch": "search"}
"""Namespace -> value of the label team of its pods. Other pods belong to the team data-science."""


def make_node(number: int, gpus: str, clock: Clock) -> DemoNode:
    """`number`: position of the node, from 0."""
    is_plain = number == _PLAIN
    name = "workstation-1" if is_plain else f"node-{number + 1}"
    first = number * _PODS_PER_NODE
    node = DemoNode(name, gpus, clock, first, is_plain)
    if number == 1:
        node.driver.gpus[_SLOW_GPU].relative_clock = _SLOW_CLOCK
    return node


class Act(NamedTuple):
    at: float  # seconds since the start of the cycle
    message: str
    do: Callable[[], object]


def make_script(nodes: Sequence[DemoNode]) -> list[Act]:
    """Returns the events of the nodes with Kubernetes.

    Between 30 and 90 seconds, all faults are present.
    """
    first, second, third, *_ = nodes
    # The user chooses the GPUs of the first node.
    ill = min(_ILL_GPU, len(first.driver.gpus) - 1)
    workers = [tenant for tenant in third.tenants if tenant.pod == f"{JOB}-{_FIRST_JOB}"]
    numbers = itertools.count(_FIRST_JOB + 1)

    def end_job() -> None:
        third.remove_pod(workers[0].namespace, workers[0].pod)

    def begin_next_job() -> None:
        nonlocal workers
        name = f"{JOB}-{next(numbers)}"
        workers = [replace(worker, pod=name) for worker in workers]
        third.add_tenants(*workers)

    def raise_xid() -> None:
        first.driver.raise_xid(ill, _XID)
        first.driver.advise(ill, NVML_GPU_RECOVERY_ACTION_GPU_RESET)

    reset = partial(first.reset, ill)
    lose = partial(second.driver.lose, _LOST_GPU)
    recover = partial(second.driver.recover, _LOST_GPU)
    stop_answers = partial(setattr, third, "answers", False)
    start_answers = partial(setattr, third, "answers", True)

    return [
        Act(10.0, f"{third.name}: a training job ends", end_job),
        Act(15.0, f"{first.name}: GPU {ill} reports XID {_XID}", raise_xid),
        Act(20.0, f"{second.name}: GPU {_LOST_GPU} falls off the bus", lose),
        Act(30.0, f"{third.name}: the exporter stops answering", stop_answers),
        Act(90.0, f"{third.name}: the exporter answers again", start_answers),
        Act(95.0, f"{third.name}: the next training job begins", begin_next_job),
        Act(105.0, f"{second.name}: GPU {_LOST_GPU} answers again", recover),
        Act(115.0, f"{first.name}: GPU {ill} is reset", reset),
    ]


def schedule(script: Sequence[Act]) -> Iterator[tuple[float, Act]]:
    """Yields each event with its time since the start, cycle after cycle."""
    # Without this, the endless loop would never yield.
    if not script:
        return
    for cycle in itertools.count():
        for act in script:
            yield cycle * CYCLE_SECONDS + act.at, act


class DemoExporter(NamedTuple):
    node: DemoNode
    agent: Agent
    ledger: Ledger
    recorder: HistoryRecorder
    application: web.Application


def make_exporter(node: DemoNode, prices: ReadPrices) -> DemoExporter:
    names = IdentityReader(str(node.root / "pods"), str(node.root / "containers"))
    sources = []
    if not node.is_plain:
        sources.append(KubeletAllocation(node.kubelet.socket))
    counters = shipped_counters("dcp") or ()
    policy = Policy(counters=counters, hostname=node.name)
    telemetry = read_simulated(node.driver, node.clock, SwitchLogFactory("exact"))
    finder = ContainerFinder(str(node.root / "proc"), finds_users=node.is_plain)
    ledger = Ledger()
    agent = Agent(
        telemetry,
        HolderSources(sources, names.read),
        Settings(interval=1.0, allocation_interval=1.0, policy=policy),
        node.clock,
        containers=finder,
        ledger=ledger,
        pod_labels=partial(_label_pods, node),
    )

    recorder = node_recorder(agent, prices=prices)
    past = SqlitePast(recorder, lambda: build_state(agent, prices))
    app = application(agent, past=past, prices=prices)

    @web.middleware
    async def close_while_down(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        # As from a machine that is down: the scraper gets no HTTP response.
        if not node.answers and request.transport is not None:
            request.transport.abort()
        return await handler(request)

    app.middlewares.insert(0, close_while_down)
    return DemoExporter(node, agent, ledger, recorder, app)


def _label_pods(node: DemoNode) -> PodLabels:
    labels: dict[PodName, Pairs] = {}
    for tenant in node.tenants:
        if tenant.pod:
            labels[tenant.pod_name] = (("team", team_of(tenant.namespace)),)
    return labels


# Owners and teams. In a real cluster, these are read from the API server.


def team_of(namespace: str) -> str:
    return _TEAMS.get(namespace, "data-science")


def find_owners(nodes: Sequence[DemoNode]) -> dict[PodName, WorkloadOwner]:
    owners: dict[PodName, WorkloadOwner] = {}
    for node in nodes:
        for tenant in node.tenants:
            owner = owner_of(tenant.pod)
            if owner is not None:
                owners[tenant.pod_name] = owner
    return owners


def owner_of(pod: str) -> WorkloadOwner | None:
    if pod in _WORKERS:
        return WorkloadOwner("PyTorchJob", JOB)
    for prefix, kind in _OWNERS.items():
        if pod.startswith(f"{prefix}-"):
            return WorkloadOwner(kind, pod if kind == "Job" else prefix)
    return None
