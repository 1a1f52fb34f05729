"""Writes to the API server while one GPU of each of 100 nodes flaps for 24 simulated hours.

A GPU is lost for 20 to 60 s every 2 to 10 minutes, and a pod causes an XID every 5 s in one of the
hours. The API server is in memory; `tests/writers` has tests over HTTP.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, cast

from bench.figures import Figure, cpu_seconds
from podgpu.clock import Clock
from podgpu.errors import SourceError
from podgpu.kube.client import ApiClient
from podgpu.metrics.conditions import LOST, RECURRING
from podgpu.model import Condition, DeviceState, Holder, NodeState, XidCount, XidCulprit
from podgpu.writers.gpu_changes import Records, find_changes
from podgpu.writers.health_writer import NodeUpdate, Writer
from podgpu.writers.node_condition import NodeConditionWriter
from podgpu.writers.pod_events import EVENT_SECONDS, EventWriter
from podgpu.writers.write_queue import WriteQueue

_SEED = 46
GPUS = 8
_POD = Holder("team", "train", "main", "uid-train", source="kubelet")
_HEALTHY = (LOST, RECURRING)
START = 1_700_000_000.0


class _ApiServer:
    """Counts writes. Events expire an hour after the last one."""

    def __init__(self) -> None:
        self.now = 0.0
        self._written_at: dict[str, float] = {}
        self.writes: defaultdict[str, list[float]] = defaultdict(list)  # of Events, by path
        self.created = 0
        self.condition_changes = 0
        self._status = ""

    async def create(self, path: str, document: Mapping[str, Any]) -> bytes:
        name = f"{path}/{document['metadata']['name']}"
        if self.now - self._written_at.get(name, float("-inf")) < 3600.0:
            raise SourceError("conflict", name)
        self.created += 1
        self._write(name)
        return b""

    async def get(self, path: str, _params: object = None) -> dict[str, Any]:
        return {"metadata": {"name": path}, "status": {"conditions": []}}

    async def patch(self, path: str, changes: Mapping[str, Any], _kind: str = "") -> None:
        if path.endswith("/status"):
            [condition] = changes["status"]["conditions"]
            self.condition_changes += condition["status"] != self._status
            self._status = condition["status"]
        elif self.now - self._written_at[path] >= 3600.0:
            raise SourceError("not_found", path)
        else:
            self._write(path)

    def _write(self, name: str) -> None:
        self._written_at[name] = self.now
        self.writes[name].append(self.now)


class _Node:
    def __init__(self, number: int) -> None:
        self.api = _ApiServer()
        clock = Clock(lambda: self.api.now, lambda: START + self.api.now)
        client = cast(ApiClient, self.api)
        name = f"node-{number}"
        self._writers: tuple[Writer, ...] = (
            EventWriter(client, name, clock),
            NodeConditionWriter(client, name, clock),
        )
        self._queue = WriteQueue(lambda: self.api.now)
        self._records: Records = {}
        self._name = name

    async def see(self, at: float, is_lost: bool, failures: int, xids: int) -> None:
        self.api.now = at
        state = make_state(self._name, is_lost, failures, xids)
        self._records, changes = find_changes(self._records, state, START + at, 1800.0)
        for writer in self._writers:
            for write in writer.update(NodeUpdate(state, self._records, changes)):
                self._queue.put(write)
        await self._queue.flush()


def make_state(node: str, is_lost: bool, failures: int, xids: int) -> NodeState:
    conditions = []
    if is_lost:
        conditions.append(Condition(LOST, 1.0))
    if failures >= 3:
        conditions.append(Condition(RECURRING, 1.0))
    names = {condition.name for condition in conditions}
    counts: tuple[XidCount, ...] = ()
    if xids:
        culprit = XidCulprit("team", "train", "main", "uid-train", total=xids, last_seen=0.0, pid=1)
        counts = (XidCount(31, xids, 0.0, culprits=(culprit,)),)
    flapping = DeviceState(
        uuid=f"{node}-0",
        index=0,
        holders=(_POD,),
        conditions=tuple(conditions),
        healthy=tuple(name for name in _HEALTHY if name not in names),
        xids=counts,
    )
    others = [
        DeviceState(uuid=f"{node}-{index}", index=index, healthy=_HEALTHY)
        for index in range(1, GPUS)
    ]
    return NodeState(producer="podgpu", node=node, devices=(flapping, *others))


def list_faults(random_numbers: random.Random, seconds: float) -> Iterator[tuple[float, str]]:
    """Yields times and what happens then."""
    at = random_numbers.uniform(0.0, 600.0)
    while at < seconds:
        yield at, "lost"
        yield at + random_numbers.uniform(20.0, 60.0), "recovered"
        at += random_numbers.uniform(120.0, 600.0)
    storm = random_numbers.uniform(0.0, max(1.0, seconds - 3600.0))
    for number in range(720):
        yield storm + 5.0 * number, "xid"


async def _run(number: int, seconds: float) -> tuple[_ApiServer, Counter[str]]:
    """Compares documents at each change, and every ten minutes."""
    node = _Node(number)
    faults = list(list_faults(random.Random(_SEED + number), seconds))
    ticks = [(at, "") for at in range(0, round(seconds) + 1200, 60)]
    happened: Counter[str] = Counter()
    is_lost = False
    for at, what in sorted([*faults, *ticks]):
        happened[what] += bool(what)
        if what in ("lost", "recovered"):
            is_lost = what == "lost"
        await node.see(at, is_lost, happened["lost"], happened["xid"])
    return node.api, happened


def measure(nodes: int = 100, hours: float = 24.0) -> list[Figure]:
    servers = []
    happened: Counter[str] = Counter()

    def simulate() -> None:
        for number in range(nodes):
            api, counts = asyncio.run(_run(number, hours * 3600.0))
            servers.append(api)
            happened.update(counts)

    seconds = cpu_seconds(simulate)
    changes = sum(happened.values())
    writes = 0
    closest = float("inf")
    for api in servers:
        for times in api.writes.values():
            writes += len(times)
            gaps = [later - earlier for earlier, later in pairwise(times)]
            closest = min(closest, *gaps, float("inf"))
    return [
        Figure("state changes (lost, recovered, XIDs)", changes),
        Figure("Events", sum(api.created for api in servers)),
        Figure("writes of Events", writes),
        Figure("writes of Events per state change", writes / changes, at_most=1.0),
        Figure("shortest time between writes of an Event", closest, "s", at_least=EVENT_SECONDS),
        Figure("changes of Node conditions", sum(api.condition_changes for api in servers)),
        Figure("CPU per state change", seconds / changes * 1e6, "us"),
    ]
