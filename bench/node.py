"""The simulated node of the benchmarks: 8 GPUs with load, a kubelet that lists their pods, and the
exporter's agent.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from podgpu.clock import Clock
from podgpu.labs.simulate.simulated_driver import SimulatedNvml
from podgpu.labs.simulate.simulated_kubelet import SimulatedKubelet
from podgpu.labs.simulate.simulated_node import (
    Tenant,
    create_host_files,
    place_loads,
    pods,
    tenants,
)
from podgpu.metrics.counters import shipped_counters
from podgpu.metrics.labels import Policy
from podgpu.node.agent.agent import Agent, Settings
from podgpu.node.gpu.nvml.nvml_telemetry import NvmlTelemetry
from podgpu.node.holders.identity import IdentityReader
from podgpu.node.holders.kubelet import KubeletAllocation
from podgpu.node.holders.reader import HolderSources
from podgpu.node.usage.containers import ContainerFinder

GPUS = 8
MODEL = f"{GPUS}xH100"
HOST = "simulated-node"
SECONDS_PER_ROUND = 15
_NODE_NAMES = re.compile(
    rb'GPU-[0-9a-f-]{36}|simulated-node|-0(?=")|(?<="exporter_id":")[0-9a-f]{16}'
)


class ManualClock:
    """A clock that moves only when `advance` is called."""

    def __init__(self) -> None:
        self._now = time.time()

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float = 1.0) -> None:
        self._now += seconds


@dataclass(frozen=True)
class SimulatedNode:
    agent: Agent
    clock: ManualClock

    def run_round(self) -> None:
        """Simulates 15 seconds, with one usage turn per second and a telemetry turn at the end."""
        for _ in range(SECONDS_PER_ROUND):
            self.clock.advance()
            self.agent.read_usage()
        self.agent.read_telemetry()


@contextmanager
def simulated_node(
    make_tenants: Callable[[SimulatedNvml], list[Tenant]] = tenants,
    wrap: Callable[[SimulatedNvml], object] = lambda d: d,
) -> Iterator[SimulatedNode]:
    """Starts the node and runs the agent's first turns. `wrap` can wrap the driver."""
    clock = ManualClock()
    driver = SimulatedNvml(MODEL, clock=clock, wall=clock)
    on_node = make_tenants(driver)
    place_loads(driver, on_node)
    with tempfile.TemporaryDirectory(prefix="podgpu-bench-") as folder:
        root, socket = Path(folder), f"{folder}/kubelet.sock"
        create_host_files(root, on_node)
        names = IdentityReader(str(root / "pods"), str(root / "containers"))
        agent = Agent(
            NvmlTelemetry(wrap(driver), "simulated", lambda: GPUS, clock, clock),
            HolderSources([KubeletAllocation(socket)], names.read),
            Settings(policy=Policy(counters=shipped_counters("dcp") or (), hostname=HOST)),
            Clock(clock, clock),
            containers=ContainerFinder(str(root / "proc"), clock),
        )
        with SimulatedKubelet(socket, pods(on_node)):
            try:
                agent.read_telemetry()
                agent.read_allocation()
                node = SimulatedNode(agent, clock)
                node.run_round()
                if not any(gpu.holders for gpu in agent.published.state.devices):
                    raise RuntimeError("the simulated kubelet did not answer")
                yield node
            finally:
                agent.stop()


def rename(document: bytes, number: int) -> bytes:
    """Replaces host, GPUs and pods in the text or JSON of the simulated node, to simulate another
    node.
    """
    names: dict[bytes, bytes] = {}

    def replace(match: re.Match[bytes]) -> bytes:
        if match[0] not in names:
            names[match[0]] = _new_name(match[0], number)
        return names[match[0]]

    return _NODE_NAMES.sub(replace, document)


def _new_name(name: bytes, number: int) -> bytes:
    digits = sha256(b"%d %s" % (number, name)).hexdigest()
    if name.startswith(b"GPU-"):
        return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:32]}".encode()
    if name == HOST.encode():
        return b"gpu-node-%05d" % number
    return b"-%d" % number if name == b"-0" else digits[:16].encode()
