"""Simulates a kubelet's pod-resources socket with a real gRPC server."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote

from podgpu.node.holders import podresources_pb2

Resources = Mapping[str, Sequence[str]]  # resource name -> device ids


@dataclass(frozen=True, slots=True)
class SimulatedPod:
    """One pod and the devices of its containers.

    A container without devices has an empty mapping.
    """

    namespace: str
    name: str
    containers: Mapping[str, Resources]


class SimulatedKubelet:
    """Serves the current `pods`, which may be changed while it runs."""

    def __init__(self, socket: str, pods: Iterable[SimulatedPod] = ()) -> None:
        self.socket = socket
        self.pods: tuple[SimulatedPod, ...] = tuple(pods)
        self._server: Any = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        import grpc  # optional dependency

        self._server = grpc.server(ThreadPoolExecutor(4, "simulated-kubelet"), handlers=(self,))
        # The server binds a temporary name, and the socket is renamed. Otherwise, gRPC could delete
        # the socket of the next server, because gRPC deletes the bound path some time after a
        # server stops.
        bound = self.socket + ".new"
        self._server.add_insecure_port("unix://" + quote(os.fsencode(os.path.abspath(bound))))
        self._server.start()
        os.replace(bound, self.socket)

    def stop(self) -> None:
        """Stops the server immediately, so that calls in progress fail."""
        if self._server is not None:
            self._server.stop(grace=None).wait()
            self._server = None
            with suppress(FileNotFoundError):
                os.unlink(self.socket)

    def service(self, call: Any) -> Any:
        """Returns the gRPC handler of a method, or None if the method is not implemented."""
        import grpc

        encode = {
            "/v1.PodResourcesLister/List": self.list_pods,
            "/v1.PodResourcesLister/GetAllocatableResources": self.list_devices,
        }.get(call.method)
        return encode and grpc.unary_unary_rpc_method_handler(lambda _request, _context: encode())

    def list_pods(self) -> bytes:
        answer = podresources_pb2.ListPodResourcesResponse()
        for pod in self.pods:
            entry = answer.pod_resources.add(name=pod.name, namespace=pod.namespace)
            for container, resources in pod.containers.items():
                devices = encode_devices(resources)
                entry.containers.add(name=container, devices=devices)
        return bytes(answer.SerializeToString())

    def list_devices(self) -> bytes:
        """Returns the allocatable devices. A simplification: free devices are missing."""
        answer = podresources_pb2.AllocatableResourcesResponse()
        for pod in self.pods:
            for resources in pod.containers.values():
                answer.devices.extend(encode_devices(resources))
        return bytes(answer.SerializeToString())


def encode_devices(resources: Resources, numa_nodes: Sequence[int] = (0,)) -> Iterator[Any]:
    """Yields one message per device id and NUMA node, as the kubelet does since Kubernetes 1.21."""
    for resource, ids in resources.items():
        for device_id, number in itertools.product(ids, numa_nodes):
            numa_node = podresources_pb2.NUMANode(ID=number)
            topology = podresources_pb2.TopologyInfo(nodes=[numa_node])
            yield podresources_pb2.ContainerDevices(
                resource_name=resource, device_ids=[device_id], topology=topology
            )
