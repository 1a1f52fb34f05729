"""Builds the node that a `node.json` describes, and the exporter's agent for it. The driver,
kubelet and API server are simulated. The files, log names and /proc are in a folder.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from podgpu.cli.exporter import command, resolve_options
from podgpu.cli.options import normalize_arguments
from podgpu.cli.sources import build_exporter_agent
from podgpu.clock import Clock
from podgpu.kube.reflector import ReflectorSettings
from podgpu.labs.simulate.gpu import SimulatedLoad
from podgpu.labs.simulate.simulated_kubelet import SimulatedPod
from podgpu.labs.simulate.simulated_node import place_loads, pods, tenants
from podgpu.node.agent.agent import Agent
from podgpu.node.gpu.nvml.nvml_telemetry import NvmlTelemetry
from podgpu.node.holders.api import ApiAccess
from tests.host.guard import HOST_VARIABLES, NODE_PATHS
from tests.kube.api_server import SimulatedApiServer
from tests.nodes.clock import FakeClock, wait_until
from tests.simulated import (
    OTHER_PID_NAMESPACE,
    FaultyNvml,
    FaultyProc,
    cgroup_text,
    container_cgroup,
)
from tests.simulated_kubelet import ClaimingPod, FaultyKubelet, SimulatedClaim, SimulatedDevice

FIXTURES = Path(__file__).parents[1] / "fixtures"
_PACE = ReflectorSettings(first_delay=0.05, max_delay=0.2, max_refused_delay=0.2)
_UP_FOR = 60.0
"""Seconds that the loads run before podgpu starts."""


@dataclass(frozen=True)
class Description:
    """Keys of `node.json`. The defaults are a healthy node without pods, and podgpu's default
    options.
    """

    about: str
    """Why this scenario exists."""
    gpus: str
    """SPEC of `--telemetry simulated:SPEC`."""
    arguments: Sequence[str] = ()
    """The command line after `podgpu exporter`. `{folder}` is the folder of `files`."""
    hostname: str = "node-1"
    uuids: Sequence[str] = ()
    mig_uuids: Mapping[str, str] = field(default_factory=dict)
    """`GPU number/MIG slot` -> UUID."""
    minors: Sequence[int] = ()
    on_the_bus: int | None = -1
    """Number of GPUs in sysfs. -1 means all simulated GPUs."""
    lived_in: bool = False
    """Adds the loads and pods of `podgpu demo`."""
    loads: Sequence[Mapping[str, Any]] = ()
    pods: Sequence[Mapping[str, Any]] = ()
    kubelet_answers: Mapping[str, str] = field(default_factory=dict)
    """gRPC method -> file with the recorded response, below tests/fixtures."""
    allocatable: Mapping[str, Sequence[str]] | None = None
    """Resource -> device ids that GetAllocatableResources returns."""
    files: Mapping[str, Any] = field(default_factory=dict)
    """File name -> text, or object to write as JSON."""
    fixtures: Mapping[str, str] = field(default_factory=dict)
    """File name -> file below tests/fixtures to copy."""
    logs: Sequence[str] = ()
    """Names below /var/log: `pods/<namespace>_<pod>_<uid>`,
    `containers/<pod>_<namespace>_<container>-<id>.log`.
    """
    processes: Mapping[str, Mapping[str, Any]] | None = None
    """Pid -> `uid` and `container_id` of its container. If None, podgpu runs in its own PID
    namespace.
    """
    host_processes: Sequence[int] = ()
    """Pids outside any container."""
    mps_servers: Sequence[int] = ()
    """Pids of MPS servers, outside any container."""
    api_objects: Mapping[str, Sequence[Mapping[str, Any]]] | None = None
    """Resource -> objects of the API server in `{folder}/kubeconfig`. If None, there is no API
    server.
    """
    api_away: bool = False
    """Whether the API server is stopped when podgpu starts."""
    faults: Sequence[Sequence[Any]] = ()
    """Methods of `Faults` and their arguments, applied before the start."""
    faults_later: Sequence[Sequence[Any]] = ()
    """Like `faults`, but applied between the two readings."""
    usage_turns: int = 0
    """Number of usage readings, one second apart."""

    @property
    def xids(self) -> int:
        return sum(name == "raise_xid" for name, *_ in self.faults_later)


def read_description(folder: Path) -> Description:
    return Description(**json.loads((folder / "node.json").read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Node:
    description: Description
    clock: FakeClock
    driver: FaultyNvml
    kubelet: FaultyKubelet
    agent: Agent
    api: ApiAccess
    api_server: SimulatedApiServer | None

    def take_turns(self) -> None:
        """Reads telemetry twice, then the holders, then usage."""
        self.agent.read_telemetry()
        self.clock.advance(1.0)
        self._go_wrong_later()
        self.agent.read_telemetry()
        self.agent.read_allocation()
        wait_until(self._xids_arrived, "the XIDs raised are published")
        for _ in range(self.description.usage_turns):
            self.clock.advance(1.0)
            self.agent.read_usage()

    def _go_wrong_later(self) -> None:
        if self.description.xids:  # earlier XIDs would be lost
            wait_until(lambda: self.driver.calls["nvmlEventSetWait_v2"], "XIDs are waited for")
        _apply(self.driver, self.description.faults_later)

    def _xids_arrived(self) -> bool:
        slots = [
            slot for gpu in self.agent.published.state.devices for slot in (gpu, *gpu.instances)
        ]
        if sum(count.total for slot in slots for count in slot.xids) == self.description.xids:
            return True
        self.agent.read_allocation()
        return False


@contextmanager
def node_of(description: Description, folder: Path) -> Iterator[Node]:
    """Writes all files and the kubelet's socket to `folder`. Its path must be short, because socket
    paths are.
    """
    clock = FakeClock()
    driver = _driver(description, clock)
    write_files(description, folder)
    with ExitStack() as stack:
        kubelet = stack.enter_context(_kubelet(description, driver, str(folder / "kubelet.sock")))
        kubelet.allocatable = description.allocatable
        api_server = None
        if description.api_objects is not None:
            api_server = stack.enter_context(_api_server(description.api_objects, folder))
            if description.api_away:
                api_server.stop()
        clock.advance(_UP_FOR)
        _apply(driver, description.faults)
        agent, api = stack.enter_context(_agent(description, driver, clock, folder))
        # Otherwise stopping the agent would wait for hung calls and for the XID thread.
        stack.callback(driver.faults.unload_driver)
        stack.callback(driver.faults.release_all)
        yield Node(description, clock, driver, kubelet, agent, api, api_server)


def write_files(description: Description, folder: Path) -> None:
    for name, content in description.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            content if isinstance(content, str) else json.dumps(content), encoding="utf-8"
        )
    for name, fixture in description.fixtures.items():
        shutil.copy(FIXTURES / fixture, folder / name)
    for name in description.logs:
        (folder / "log" / name).mkdir(parents=True)
    if description.processes is None:
        FaultyProc(folder / "proc", OTHER_PID_NAMESPACE)
    else:
        proc = FaultyProc(folder / "proc")
        for name, container in description.processes.items():
            proc.add(int(name), container_cgroup(**container))
        for pid in description.host_processes:
            proc.add(pid, cgroup_text("/system.slice/gpu-burn.service"))
        for pid in description.mps_servers:
            proc.add(pid, cgroup_text("/system.slice/nvidia-mps.service"), "nvidia-cuda-mps-server")


@contextmanager
def _api_server(
    objects: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path
) -> Iterator[SimulatedApiServer]:
    with SimulatedApiServer() as server:
        for resource, things in objects.items():
            server.put(resource, *(dict(thing) for thing in things))
        (folder / "kubeconfig").write_text(kubeconfig(server.url), encoding="utf-8")
        yield server


def kubeconfig(url: str) -> str:
    parts = {
        "clusters": [{"name": "test", "cluster": {"server": url}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "users": [{"name": "test", "user": {}}],
    }
    return json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "test", **parts})


def _driver(description: Description, clock: FakeClock) -> FaultyNvml:
    driver = FaultyNvml(
        description.gpus,
        clock=clock.monotonic,
        wall=clock.wall,
        uuids=description.uuids,
        mig_uuids={_gpu_and_slot(place): uuid for place, uuid in description.mig_uuids.items()},
        minors=description.minors,
    )
    if description.lived_in:
        place_loads(driver, tenants(driver))
    for load in description.loads:
        driver.place(SimulatedLoad(**load))
    return driver


def _gpu_and_slot(place: str) -> tuple[int, int]:
    gpu, slot = place.split("/")
    return int(gpu), int(slot)


class RecordedKubelet(FaultyKubelet):
    """Returns the recorded responses of a real kubelet."""

    def __init__(self, socket: str, answers: Mapping[str, bytes]) -> None:
        super().__init__(socket)
        self._answers = answers

    def service(self, call: Any) -> Any:
        self.calls.append(call.method)
        answer = self._answers.get(call.method)
        return (
            None
            if answer is None
            else grpc.unary_unary_rpc_method_handler(lambda _request, _context: answer)
        )


def _kubelet(description: Description, driver: FaultyNvml, socket: str) -> FaultyKubelet:
    if description.kubelet_answers:
        files = description.kubelet_answers.items()
        return RecordedKubelet(
            socket, {method: (FIXTURES / file).read_bytes() for method, file in files}
        )
    if description.lived_in:
        return FaultyKubelet(socket, pods(tenants(driver)))
    return FaultyKubelet(socket, [_pod(**pod) for pod in description.pods])


def _pod(
    claims: Mapping[str, Sequence[Mapping[str, Any]]] | None = None, **pod: Any
) -> SimulatedPod:
    held = {
        container: [_claim(**claim) for claim in each] for container, each in (claims or {}).items()
    }
    return ClaimingPod(**pod, claims=held)


def _claim(namespace: str, name: str, devices: Sequence[Mapping[str, Any]]) -> SimulatedClaim:
    return SimulatedClaim(namespace, name, tuple(SimulatedDevice(**device) for device in devices))


def _apply(driver: FaultyNvml, faults: Sequence[Sequence[Any]]) -> None:
    for name, *arguments in faults:
        getattr(driver.faults, name)(*arguments)


@contextmanager
def _agent(
    description: Description, driver: FaultyNvml, clock: FakeClock, folder: Path
) -> Iterator[tuple[Agent, ApiAccess]]:
    """Builds the agent like the real exporter, but independent of the machine that runs the
    test.
    """
    on_the_bus = len(driver.gpus) if description.on_the_bus == -1 else description.on_the_bus
    telemetry = NvmlTelemetry(
        driver,
        count_expected=lambda: on_the_bus,
        clock=clock.monotonic,
        wall=clock.wall,
        sees_processes=description.processes is not None,
    )
    with only_these_variables({"NODE_NAME": description.hostname}):
        words = [word.replace("{folder}", str(folder)) for word in (*ROOTS, *description.arguments)]
        ctx = command.make_context("exporter", normalize_arguments(words))
        api = ApiAccess(ctx.params["kubeconfig"], settings=_PACE)
        time = Clock(clock.monotonic, clock.wall)
        agent = build_exporter_agent(resolve_options(ctx, ctx.params), api, telemetry, time)
    try:
        if not description.api_away:
            wait_until(lambda: all(feed.synced for feed in api.feeds), "the API server was read")
        yield agent, api
    finally:
        agent.stop()
        api.close()


ROOTS = (
    *("--pod-resources-kubelet-socket", "{folder}/kubelet.sock"),
    *("--path-proc", "{folder}/proc"),
    *("--path-varlog", "{folder}/log"),
)


@contextmanager
def only_these_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Removes the environment variables that podgpu reads, except paths, and sets the given
    ones.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(HOST_VARIABLES) and name not in NODE_PATHS:
                patch.delenv(name)
        for name, value in variables.items():
            patch.setenv(name, value)
        yield
