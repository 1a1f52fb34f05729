"""One reading of everything that tells of holders on a full node: 250 pods with 1,000 assignments on 16 GPUs.

The kubelet answers over its real gRPC socket; podlist.json and the kubelet's checkpoint say the same as it does, and
job files add a job for each GPU. What is timed is what an allocation turn does with them: read, parse, map, merge and
join, in one thread. CPU time of that thread, of each step the least of many turns; the kubelet lives in other threads.
The names under /var/log, which tell whose uid is whose, are no source of holders and stand beside it.

changed: between two readings one pod goes or comes back, so every file and both directories of names are others.
unchanged: they are as they were, and the kubelet is asked all the same. first: sources made anew. Informs only: it
comes once in the life of a process.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from bench.figures import Figure
from podgpu.agent.allocation_turn import AllocationPart
from podgpu.agent.publish import NodeParts, build_node_state
from podgpu.agent.telemetry_turn import TelemetryPart
from podgpu.files import SETTLED_NS
from podgpu.gpu.nvml import NvmlTelemetry
from podgpu.holders import AllocationSource
from podgpu.holders.checkpoint import CheckpointAllocation
from podgpu.holders.hpc import HpcAllocation
from podgpu.holders.identity import IdentityReader
from podgpu.holders.kubelet import KubeletAllocation
from podgpu.holders.merge import merge
from podgpu.holders.podlist import PodlistAllocation
from podgpu.metrics.render import Policy, render_node
from podgpu.model import Device
from podgpu.simulate.driver import SimulatedNvml
from podgpu.simulate.kubelet import SimulatedKubelet, SimulatedPod

MOST_MS = 50
"""One turn in 5 s: a hundredth of a core on a node this full."""
MOST_TIMES_FOR_FOUR_TIMES_AS_MANY = 5
GPUS = 16
PODS, FEW_PODS = 250, 62
IDS_PER_POD = 4
_REPLICAS = 64
_RESOURCE = "nvidia.com/gpu.shared"
_NAMES = "beside it: the names under /var/log"
_STEPS = ("podlist", "kubelet", "checkpoint", "hpc", "merge", "render", _NAMES)


Cost = dict[str, float]
"""Step -> CPU seconds."""


class Stopwatch:
    """CPU time of this thread from one lap to the next."""

    def __init__(self) -> None:
        self.laps: Cost = {}
        self._last = time.thread_time()

    def lap(self, name: str) -> None:
        now = time.thread_time()
        self.laps[name], self._last = now - self._last, now


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod with one container that holds time slices of several GPUs."""

    namespace: str
    name: str
    uid: str
    ids: tuple[str, ...]


def make_pods(devices: Sequence[Device], count: int) -> list[Pod]:
    slices = [f"{device.uuid}::{replica}" for replica in range(_REPLICAS) for device in devices]
    return [
        Pod(
            f"team-{number % 7}",
            f"trainer-{number:03}-7d9c5b7f4-x2x9k",
            f"{number:08x}-1111-2222-3333-444444444444",
            tuple(slices[number * IDS_PER_POD : (number + 1) * IDS_PER_POD]),
        )
        for number in range(count)
    ]


class FullNode:
    """Everything that is read, in a folder. `write` puts files in each other's place, as their writers do."""

    def __init__(self, folder: Path, pods: int) -> None:
        self.devices = NvmlTelemetry(SimulatedNvml(f"{GPUS}xH100")).inventory().gpus
        self.pods = make_pods(self.devices, pods)
        self.folder = folder
        self._dice = Random(1)
        self.kubelet = SimulatedKubelet(str(folder / "kubelet.sock"))
        registered = [f"{device.uuid}::{replica}" for device in self.devices for replica in range(_REPLICAS)]
        self.kubelet.allocatable = {_RESOURCE: registered}
        self._names: set[str] = set()
        self.sources: tuple[AllocationSource, ...] = ()
        self.forget()
        for name in ("jobs", "pods", "containers"):
            (folder / name).mkdir()

    def forget(self) -> None:
        """Sources that have read nothing yet."""
        self.close()
        self.sources = (
            PodlistAllocation(str(self.folder / "podlist.json")),
            KubeletAllocation(self.kubelet.socket),
            CheckpointAllocation(str(self.folder / "checkpoint")),
            HpcAllocation(str(self.folder / "jobs")),
        )
        self.names = IdentityReader(str(self.folder / "pods"), str(self.folder / "containers"))

    def answer(self, pods: Sequence[Pod]) -> None:
        """What the kubelet says. Its order is that of a Go map: another one each time."""
        mixed = self._dice.sample(pods, len(pods))
        self.kubelet.pods = tuple(
            SimulatedPod(pod.namespace, pod.name, {"main": {_RESOURCE: self._dice.sample(pod.ids, len(pod.ids))}})
            for pod in mixed
        )

    def write(self, pods: Sequence[Pod]) -> None:
        self.answer(pods)
        self._replace("podlist.json", json.dumps([_podlist_entry(pod) for pod in pods]))
        held = {"PodDeviceEntries": [_checkpoint_entry(pod) for pod in pods]}
        registered = {"RegisteredDevices": self.kubelet.allocatable}
        self._replace("checkpoint", json.dumps({"Data": held | registered, "Checksum": len(pods)}))
        self._write_names({name for pod in pods for name in _log_names(pod)})
        for device in self.devices:
            self._replace(f"jobs/{device.index}", f"{len(pods)}{device.index:02}\n")

    def _write_names(self, names: set[str]) -> None:
        for name in self._names - names:
            (self.folder / name).unlink()
        for name in names - self._names:
            (self.folder / name).touch()
        self._names = names

    def _replace(self, name: str, text: str) -> None:
        (self.folder / "new").write_text(text, encoding="ascii")
        os.replace(self.folder / "new", self.folder / name)

    def read(self) -> Cost:
        """CPU seconds of each of the steps."""
        clock = Stopwatch()
        readings = {}
        for source in self.sources:
            readings[source.name] = source.assignments(self.devices)
            clock.lap(source.name)
        identities = self.names.read()
        clock.lap(_NAMES)
        allocation = merge(readings, identities.complete)
        clock.lap("merge")
        telemetry = TelemetryPart(self.devices, self.devices)
        parts = NodeParts(telemetry, AllocationPart(allocation.assignments, allocation.unmapped))
        render_node(build_node_state(parts, ""), Policy())
        clock.lap("render")
        named = sum(
            bool(assignment.holder.pod and assignment.holder.uid and assignment.share)
            for assignment in allocation.assignments
        )
        if allocation.unmapped or named != sum(len(pod.ids) for pod in self.kubelet_pods()):
            raise RuntimeError("not every id found its holder, so the figures would mean nothing")
        return clock.laps

    def kubelet_pods(self) -> list[Pod]:
        listed = {(pod.namespace, pod.name) for pod in self.kubelet.pods}
        return [pod for pod in self.pods if (pod.namespace, pod.name) in listed]

    def close(self) -> None:
        for source in self.sources:
            source.close()


def _log_names(pod: Pod) -> tuple[str, str]:
    container_id = pod.uid.replace("-", "") * 2
    return (
        f"pods/{pod.namespace}_{pod.name}_{pod.uid}",
        f"containers/{pod.name}_{pod.namespace}_main-{container_id}.log",
    )


def _podlist_entry(pod: Pod) -> dict[str, object]:
    return {"name": pod.name, "namespace": pod.namespace, "container": "main", "gpu_list": pod.ids}


def _checkpoint_entry(pod: Pod) -> dict[str, object]:
    entry = {"PodUID": pod.uid, "ContainerName": "main", "ResourceName": _RESOURCE, "DeviceIDs": {"0": pod.ids}}
    return entry | {"AllocResp": "A" * 240}


@contextmanager
def full_node(pods: int) -> Iterator[FullNode]:
    with TemporaryDirectory(prefix="podgpu-bench-") as folder, ExitStack() as stack:
        node = FullNode(Path(folder), pods)
        stack.enter_context(node.kubelet)
        stack.callback(node.close)
        yield node


def measure(pods: int = PODS, few_pods: int = FEW_PODS, turns: int = 100) -> list[Figure]:
    with full_node(few_pods) as node:
        few = _changed(node, turns)
    with full_node(pods) as node:
        changed, unchanged, first = _changed(node, turns), _unchanged(node, turns), _first(node, turns)
    assignments = pods * IDS_PER_POD
    more = assignments / (few_pods * IDS_PER_POD)
    return [
        Figure(f"{assignments:,} assignments, every file changed: CPU", _ms(changed), "ms", MOST_MS),
        *(Figure(f"  {step}", changed[step] * 1e3, "ms") for step in _STEPS),
        Figure(f"{assignments:,} assignments, no file changed: CPU", _ms(unchanged), "ms", MOST_MS),
        Figure(f"{assignments:,} assignments, the first reading: CPU", _ms(first), "ms"),
        Figure(f"{more:.2g} times as many cost", _ms(changed) / _ms(few), "x", MOST_TIMES_FOR_FOUR_TIMES_AS_MANY),
    ]


def _ms(cost: Cost) -> float:
    return sum(seconds for step, seconds in cost.items() if step != _NAMES) * 1e3


def _changed(node: FullNode, turns: int) -> Cost:
    node.write(node.pods)
    node.read()
    costs = []
    for turn in range(turns):
        node.write(node.pods if turn % 2 else node.pods[1:])
        costs.append(node.read())
    return _least(costs)


def _unchanged(node: FullNode, turns: int) -> Cost:
    node.write(node.pods)
    time.sleep(SETTLED_NS / 1e9 + 0.1)  # a younger file is read again: its time stamp may hide a second change
    node.read()
    costs = []
    for _ in range(turns):
        node.answer(node.pods)
        costs.append(node.read())
    return _least(costs)


def _first(node: FullNode, turns: int) -> Cost:
    costs = []
    for _ in range(max(2, turns // 4)):
        node.forget()
        costs.append(node.read())
    return _least(costs)


def _least(costs: Sequence[Cost]) -> Cost:
    """Of each step: what other work on the machine adds to one turn or another is no cost of ours."""
    return {step: min(cost[step] for cost in costs) for step in costs[0]}
