"""Builds the node a `node.json` describes: a simulated driver, a kubelet on a socket, and the agent over both."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from podgpu.agent.loop import Agent, Clock, Settings
from podgpu.allocation.kubelet import KubeletAllocation
from podgpu.cli.exporter import _policy, command, read_counters
from podgpu.cli.option_table import EXPORTER_OPTIONS
from podgpu.cli.params import normalise
from podgpu.device_selection import parse_selection
from podgpu.simulate.driver import SimulatedNvml
from podgpu.simulate.kubelet import SimulatedKubelet, SimulatedPod
from podgpu.simulate.node import place_loads, pods, tenants
from podgpu.simulate.workload import SimulatedLoad
from podgpu.telemetry.nvml import NvmlTelemetry
from tests.nodes.clock import FakeClock, wait_until

FIXTURES = Path(__file__).parents[1] / "fixtures"
_UP_FOR = 60.0
"""Seconds the loads have run before podgpu starts, so that nothing reads as on the first second of a boot."""


@dataclass(frozen=True)
class Description:
    """What `node.json` may say. What it leaves out is a healthy node without pods and podgpu's defaults."""

    about: str
    """Why this scenario exists."""
    gpus: str
    """As in `--telemetry simulated:SPEC`."""
    arguments: Sequence[str] = ()
    """The command line after `podgpu exporter`; with -k it asks the kubelet described here."""
    hostname: str = "node-1"
    uuids: Sequence[str] = ()
    mig_uuids: Mapping[str, str] = field(default_factory=dict)
    """`GPU number/MIG slot` -> UUID."""
    minors: Sequence[int] = ()
    on_the_bus: int | None = -1
    """GPUs that sysfs shows; -1: as many as simulated."""
    lived_in: bool = False
    """Loads and pods of `podgpu demo`."""
    loads: Sequence[Mapping[str, Any]] = ()
    pods: Sequence[Mapping[str, Any]] = ()
    kubelet_answers: Mapping[str, str] = field(default_factory=dict)
    """gRPC method -> a file below tests/fixtures, replayed as it is."""
    faults: Sequence[Sequence[Any]] = ()
    """Methods of `Faults` and their arguments; there from the start."""
    faults_later: Sequence[Sequence[Any]] = ()
    """The same, between the two readings."""

    @property
    def xids(self) -> int:
        return sum(name == "raise_xid" for name, *_ in self.faults_later)


def read_description(folder: Path) -> Description:
    return Description(**json.loads((folder / "node.json").read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Node:
    description: Description
    clock: FakeClock
    driver: SimulatedNvml
    kubelet: SimulatedKubelet
    agent: Agent

    def take_turns(self) -> None:
        """What `Agent.warm_up` does, in fake time: two readings a second apart, then the holders."""
        self.agent.read_telemetry()
        self.clock.advance(1.0)
        self._go_wrong_later()
        self.agent.read_telemetry()
        self.agent.read_allocation()
        wait_until(self._xids_arrived, "the XIDs raised are published")

    def _go_wrong_later(self) -> None:
        if self.description.xids:  # before its first wait the watch has registered for no event
            wait_until(lambda: self.driver.calls["nvmlEventSetWait_v2"], "XIDs are waited for")
        _apply(self.driver, self.description.faults_later)

    def _xids_arrived(self) -> bool:
        if sum(tally.total for tally in self.agent.published.snapshot.xids) == self.description.xids:
            return True
        self.agent.read_allocation()
        return False


@contextmanager
def node_of(description: Description, folder: Path) -> Iterator[Node]:
    """`folder` is for the kubelet's socket: a short path."""
    clock = FakeClock()
    driver = _driver(description, clock)
    with ExitStack() as stack:
        kubelet = stack.enter_context(_kubelet(description, driver, str(folder / "kubelet.sock")))
        clock.advance(_UP_FOR)
        _apply(driver, description.faults)
        agent = _agent(description, driver, clock, kubelet.socket)
        stack.callback(agent.stop)
        # Before that, so that stopping waits neither for the XID watch nor for a hung call.
        stack.callback(driver.faults.unload_driver)
        stack.callback(driver.faults.release_all)
        agent.check_selection()
        yield Node(description, clock, driver, kubelet, agent)


def _driver(description: Description, clock: FakeClock) -> SimulatedNvml:
    driver = SimulatedNvml(
        description.gpus,
        clock=clock.monotonic,
        wall=clock.wall,
        uuids=description.uuids,
        mig_uuids={_gpu_and_slot(place): uuid for place, uuid in description.mig_uuids.items()},
        minors=description.minors,
        unrest=0,
    )
    if description.lived_in:
        place_loads(driver, tenants(driver))
    for load in description.loads:
        driver.place(SimulatedLoad(**load))
    return driver


def _gpu_and_slot(place: str) -> tuple[int, int]:
    gpu, slot = place.split("/")
    return int(gpu), int(slot)


class RecordedKubelet(SimulatedKubelet):
    """Answers what a real kubelet answered, to the byte."""

    def __init__(self, socket: str, answers: Mapping[str, bytes]) -> None:
        super().__init__(socket)
        self._answers = answers

    def service(self, call: Any) -> Any:
        self.calls.append(call.method)
        answer = self._answers.get(call.method)
        return None if answer is None else grpc.unary_unary_rpc_method_handler(lambda _request, _context: answer)


def _kubelet(description: Description, driver: SimulatedNvml, socket: str) -> SimulatedKubelet:
    if description.kubelet_answers:
        files = description.kubelet_answers.items()
        return RecordedKubelet(socket, {method: (FIXTURES / file).read_bytes() for method, file in files})
    if description.lived_in:
        return SimulatedKubelet(socket, pods(tenants(driver)))
    return SimulatedKubelet(socket, [SimulatedPod(**pod) for pod in description.pods])


def _apply(driver: SimulatedNvml, faults: Sequence[Sequence[Any]]) -> None:
    for name, *arguments in faults:
        getattr(driver.faults, name)(*arguments)


def _agent(description: Description, driver: SimulatedNvml, clock: FakeClock, socket: str) -> Agent:
    """As `podgpu.cli.exporter.build_agent`, but nothing of it comes from the machine the test runs on."""
    options = _options(description.arguments)
    counters, _ = read_counters(options["collectors"])
    policy = _policy(options, counters)
    settings = Settings(
        interval=options["collect_interval"],
        allocation_interval=options["allocation_interval"],
        selection=parse_selection(options["devices"]),
        policy=replace(policy, hostname=description.hostname if policy.hostname else ""),
    )
    on_the_bus = len(driver.machine.gpus) if description.on_the_bus == -1 else description.on_the_bus
    telemetry = NvmlTelemetry(driver, count_expected=lambda: on_the_bus, clock=clock.monotonic, wall=clock.wall)
    sources = [KubeletAllocation(socket, clock=clock.monotonic)] if options["kubernetes"] else []
    return Agent(telemetry, sources, settings, Clock(clock.monotonic, clock.wall))


def _options(arguments: Sequence[str]) -> dict[str, Any]:
    return dict(command.make_context("exporter", normalise(arguments, EXPORTER_OPTIONS)).params)
