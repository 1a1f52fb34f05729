"""This module is a kubelet as far as its pod-resources socket goes: a real gRPC server that can also be ill on
request."""

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

Resources = Mapping[str, Sequence[str]]
"""Resource name -> device ids."""

RATE_LIMITED = ("RESOURCE_EXHAUSTED", "rejected by rate limit")
"""What the kubelet says past 100 requests a second (Kubernetes 1.27 and later)."""


@dataclass(frozen=True, slots=True)
class ClaimedDevice:
    """One device of a claim. Kubelets of 1.27 to 1.30 tell nothing but the CDI names."""

    driver: str = ""
    pool: str = ""
    device: str = ""
    cdi_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SimulatedClaim:
    namespace: str
    name: str
    devices: tuple[ClaimedDevice, ...]


@dataclass(frozen=True, slots=True)
class SimulatedPod:
    """One pod and what its containers were given. A container without devices has an empty mapping."""

    namespace: str
    name: str
    containers: Mapping[str, Resources]
    claims: Mapping[str, Sequence[SimulatedClaim]] = field(default_factory=dict)
    """Container -> the claims (DRA) it uses."""


class SimulatedKubelet:
    """Serves what its attributes say at the moment of the call; all of them may be set while it runs."""

    def __init__(self, socket: str, pods: Iterable[SimulatedPod] = ()) -> None:
        self.socket = socket
        self.pods: tuple[SimulatedPod, ...] = tuple(pods)
        self.allocatable: Resources | None = None
        """What the device plugins registered, empty while they are away. None: what is in somebody's hands, no more."""
        self.numa_nodes: Sequence[int] = (0,)
        """NUMA nodes of every device; the kubelet lists a device once for each."""
        self.versions: frozenset[str] = frozenset({"v1", "v1alpha1"})
        """Versions served; the others are Unimplemented."""
        self.raw_answer: bytes | None = None
        """Sent instead of an answer made from `pods`."""
        self.refusal: tuple[str, str] | None = None
        """Name of a gRPC code, and a text: every call fails with it."""
        self.calls: deque[str] = deque(maxlen=1000)
        """Methods called lately, as `/v1.PodResourcesLister/List`."""
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
        import grpc  # 9 MiB, for those only who start one

        self._workers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="simulated-kubelet")
        self._server = grpc.server(self._workers, handlers=(self,))
        # gRPC removes the path it bound some time after stopping, when it may be a successor's. So it binds a
        # name of its own, and the socket is put in place ready to connect to.
        bound = self.socket + ".new"
        self._server.add_insecure_port("unix://" + quote(os.fsencode(os.path.abspath(bound))))
        self._server.start()
        os.replace(bound, self.socket)

    def stop(self, leave_socket: bool = False) -> None:
        """Stop at once; calls in progress fail. A killed kubelet leaves its socket file behind."""
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
        """A new process on a new socket file, as after `systemctl restart kubelet`.

        A real one lists no pods at first: for a second, and for as long as the API server is away. Set `pods` for that.
        """
        self.stop()
        self.start()

    def hang(self) -> None:
        """Accept calls and answer none until `resume`."""
        self._answering.clear()

    def resume(self) -> None:
        self._answering.set()

    def service(self, call: Any) -> Any:
        """gRPC asks here for the handler of a method; None is Unimplemented."""
        self.calls.append(call.method)
        package, _, method = call.method.removeprefix("/").partition(".PodResourcesLister/")
        if package not in self.versions:
            return None
        answers = {("v1", "List"): self._list_v1, ("v1", "GetAllocatableResources"): self._allocatable_v1}
        answers["v1alpha1", "List"] = self._list_v1alpha1
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

    def _list_v1alpha1(self) -> bytes:
        return list_answer(self.pods, numa_nodes=(), with_claims=False)

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


def list_answer(pods: Iterable[SimulatedPod], numa_nodes: Sequence[int] = (0,), with_claims: bool = True) -> bytes:
    """The bytes of a List answer. Without NUMA nodes there is no topology: so v1alpha1 has it, and no claims."""
    answer = podresources_pb2.ListPodResourcesResponse()
    for pod in pods:
        entry = answer.pod_resources.add(name=pod.name, namespace=pod.namespace)
        for container, resources in pod.containers.items():
            listed = entry.containers.add(name=container, devices=_container_devices(resources, numa_nodes))
            claims = pod.claims.get(container, ()) if with_claims else ()
            listed.dynamic_resources.extend(_dynamic_resource(claim) for claim in claims)
    return bytes(answer.SerializeToString())


def _dynamic_resource(claim: SimulatedClaim) -> Any:
    """Within a claim and a driver the kubelet repeats the CDI names of the devices before each device."""
    told = podresources_pb2.DynamicResource(claim_name=claim.name, claim_namespace=claim.namespace)
    cdi_names: dict[str, list[str]] = {}
    for device in claim.devices:
        names = cdi_names.setdefault(device.driver, [])
        names += device.cdi_names
        told.claim_resources.add(
            cdi_devices=[podresources_pb2.CDIDevice(name=name) for name in names],
            driver_name=device.driver,
            pool_name=device.pool,
            device_name=device.device,
        )
    return told


def _container_devices(resources: Resources, numa_nodes: Sequence[int]) -> Iterator[Any]:
    """One message per device id and NUMA node, as the kubelet has it since 1.21."""
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
