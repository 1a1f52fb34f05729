"""Simulates a kubelet's pod-resources socket with a real gRPC server. Faults can be injected."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

from podgpu.holders import podresources_pb2

Resources = Mapping[str, Sequence[str]]  # resource name -> device ids

RATE_LIMITED = ("RESOURCE_EXHAUSTED", "rejected by rate limit")
"""The kubelet's error at more than 100 requests per second (Kubernetes 1.27 and later)."""


@dataclass(frozen=True, slots=True)
class SimulatedDevice:
    """One device of a resource claim. Kubelets 1.27 to 1.30 report only the CDI names."""

    driver: str = ""
    pool: str = ""
    device: str = ""
    cdi_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SimulatedClaim:
    namespace: str
    name: str
    devices: tuple[SimulatedDevice, ...]


@dataclass(frozen=True, slots=True)
class SimulatedPod:
    """One pod and the devices of its containers. A container without devices has an empty mapping."""

    namespace: str
    name: str
    containers: Mapping[str, Resources]
    claims: Mapping[str, Sequence[SimulatedClaim]] = field(default_factory=dict)  # container -> its claims (DRA)


class SimulatedKubelet:
    """Serves the current values of its attributes, which may be changed while it runs."""

    def __init__(self, socket: str, pods: Iterable[SimulatedPod] = ()) -> None:
        self.socket = socket
        self.pods: tuple[SimulatedPod, ...] = tuple(pods)
        self.allocatable: Resources | None = None
        """Devices that device plugins registered; empty if no plugin runs. If None, the allocated devices are used."""
        self.numa_nodes: Sequence[int] = (0,)  # NUMA nodes of every device; the kubelet lists a device once per node
        self.versions: frozenset[str] = frozenset({"v1"})  # served versions; others are Unimplemented
        self.raw_answer: bytes | None = None  # response that is sent instead of the pods
        self.refusal: tuple[str, str] | None = None  # gRPC code and message with which every call fails
        self.calls: deque[str] = deque(maxlen=1000)  # recent methods, such as `/v1.PodResourcesLister/List`
        self._answering = threading.Event()
        self._answering.set()
        self._server: Any = None
        self._workers: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        import grpc  # optional dependency

        self._workers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="simulated-kubelet")
        self._server = grpc.server(self._workers, handlers=(self,))
        # Some time after stopping, gRPC removes the path that it bound. A new server may use the path by then. So the
        # server binds another name, and the socket is renamed.
        bound = self.socket + ".new"
        self._server.add_insecure_port("unix://" + quote(os.fsencode(os.path.abspath(bound))))
        self._server.start()
        os.replace(bound, self.socket)

    def stop(self, leave_socket: bool = False) -> None:
        """Stops immediately; calls in progress fail. `leave_socket`: keeps the socket file, like a killed kubelet."""
        server, workers = self._server, self._workers
        self._server = self._workers = None
        if server is None or workers is None:
            return
        stopped = server.stop(grace=None)
        self.resume()
        stopped.wait()
        workers.shutdown()
        if not leave_socket:
            with suppress(FileNotFoundError):
                os.unlink(self.socket)

    def restart(self) -> None:
        """Restarts on a new socket file. A real kubelet lists no pods at first; clear `pods` to simulate that."""
        self.stop()
        self.start()

    def hang(self) -> None:
        """Makes calls hang until `resume`."""
        self._answering.clear()

    def resume(self) -> None:
        self._answering.set()

    def service(self, call: Any) -> Any:
        """Returns the gRPC handler of a method, None if the method is not implemented."""
        self.calls.append(call.method)
        package, _, method = call.method.removeprefix("/").partition(".PodResourcesLister/")
        if package not in self.versions:
            return None
        answers = {("v1", "List"): self._list_v1, ("v1", "GetAllocatableResources"): self._allocatable_v1}
        answer = answers.get((package, method))
        if answer is None:
            return None

        import grpc

        def handle(_request: bytes, context: Any) -> bytes:
            self._answering.wait()
            if self.refusal is not None:
                code, details = self.refusal
                context.abort(grpc.StatusCode[code], details)
            return answer() if self.raw_answer is None else self.raw_answer

        return grpc.unary_unary_rpc_method_handler(handle)

    def _list_v1(self) -> bytes:
        return list_answer(self.pods, self.numa_nodes)

    def _allocatable_v1(self) -> bytes:
        registered = self._held() if self.allocatable is None else self.allocatable
        devices = _container_devices(registered, self.numa_nodes)
        answer = podresources_pb2.AllocatableResourcesResponse(devices=devices)
        return bytes(answer.SerializeToString())

    def _held(self) -> Resources:
        held: dict[str, list[str]] = {}
        for pod in self.pods:
            for container in pod.containers.values():
                for resource, ids in container.items():
                    held.setdefault(resource, []).extend(ids)
        return held


def list_answer(pods: Iterable[SimulatedPod], numa_nodes: Sequence[int] = (0,)) -> bytes:
    """Encodes a List response."""
    answer = podresources_pb2.ListPodResourcesResponse()
    for pod in pods:
        entry = answer.pod_resources.add(name=pod.name, namespace=pod.namespace)
        for container, resources in pod.containers.items():
            listed = entry.containers.add(name=container, devices=_container_devices(resources, numa_nodes))
            listed.dynamic_resources.extend(map(_dynamic_resource, pod.claims.get(container, ())))
    return bytes(answer.SerializeToString())


def _dynamic_resource(claim: SimulatedClaim) -> Any:
    """Encodes a claim. Like the kubelet, repeats the CDI names of earlier devices of the same driver in each device."""
    resource = podresources_pb2.DynamicResource(claim_name=claim.name, claim_namespace=claim.namespace)
    cdi_names: dict[str, list[str]] = {}
    for device in claim.devices:
        names = cdi_names.setdefault(device.driver, [])
        names += device.cdi_names
        resource.claim_resources.add(
            cdi_devices=[podresources_pb2.CDIDevice(name=name) for name in names],
            driver_name=device.driver,
            pool_name=device.pool,
            device_name=device.device,
        )
    return resource


def _container_devices(resources: Resources, numa_nodes: Sequence[int]) -> Iterator[Any]:
    """Yields one message per device id and NUMA node, as the kubelet does since 1.21."""
    for resource, ids in resources.items():
        for device_id in ids:
            for topology in _topologies(numa_nodes):
                yield podresources_pb2.ContainerDevices(
                    resource_name=resource, device_ids=[device_id], topology=topology
                )


def _topologies(numa_nodes: Sequence[int]) -> list[Any]:
    if not numa_nodes:
        return [None]
    nodes = (podresources_pb2.NUMANode(ID=node) for node in numa_nodes)
    return [podresources_pb2.TopologyInfo(nodes=[node]) for node in nodes]
