"""A simulated kubelet with faults, claims and variants for tests."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from podgpu.labs.simulate.simulated_kubelet import (
    Resources,
    SimulatedKubelet,
    SimulatedPod,
    encode_devices,
)
from podgpu.node.holders import podresources_pb2

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
class ClaimingPod(SimulatedPod):
    claims: Mapping[str, Sequence[SimulatedClaim]] = field(
        default_factory=dict
    )  # container -> its claims (DRA)


class FaultyKubelet(SimulatedKubelet):
    """Serves the current values of its attributes, which may be changed while it runs."""

    def __init__(self, socket: str, pods: Iterable[SimulatedPod] = ()) -> None:
        super().__init__(socket, pods)
        self.allocatable: Resources | None = None
        """Devices that device plugins registered; empty if no plugin runs. If None, the allocated
        devices are used.
        """
        self.versions: frozenset[str] = frozenset(
            {"v1"}
        )  # served versions; others are Unimplemented
        self.raw_answer: bytes | None = None  # response that is sent instead of the pods
        self.refusal: tuple[str, str] | None = (
            None  # gRPC code and message with which every call fails
        )
        self.calls: deque[str] = deque(
            maxlen=1000
        )  # recent methods, such as `/v1.PodResourcesLister/List`
        self._answering = threading.Event()
        self._answering.set()
        self._is_stopping = False

    def start(self) -> None:
        self._is_stopping = False
        super().start()

    def stop(self, leave_socket: bool = False) -> None:
        """`leave_socket`: keeps the socket file, like a killed kubelet."""
        kept = self.socket + ".kept"
        if leave_socket:
            os.rename(self.socket, kept)
        self._is_stopping = True
        self.resume()
        super().stop()
        if leave_socket:
            os.rename(kept, self.socket)

    def restart(self) -> None:
        """Restarts on a new socket file. A real kubelet lists no pods at first; clear `pods` to
        simulate that.
        """
        self.stop()
        self.start()

    def hang(self) -> None:
        """Makes calls hang until `resume`."""
        self._answering.clear()

    def resume(self) -> None:
        self._answering.set()

    def service(self, call: Any) -> Any:
        self.calls.append(call.method)
        package, _, method = call.method.removeprefix("/").partition(".PodResourcesLister/")
        answer = {"List": self.list_pods, "GetAllocatableResources": self.list_devices}.get(method)
        if package not in self.versions or answer is None:
            return None

        def handle(_request: bytes, context: Any) -> bytes:
            self._answering.wait()
            refusal = ("UNAVAILABLE", "stopping") if self._is_stopping else self.refusal
            if refusal is not None:
                context.abort(grpc.StatusCode[refusal[0]], refusal[1])
            return answer() if self.raw_answer is None else self.raw_answer

        return grpc.unary_unary_rpc_method_handler(handle)

    def list_pods(self) -> bytes:
        return list_answer(self.pods)

    def list_devices(self) -> bytes:
        if self.allocatable is None:
            return super().list_devices()
        devices = encode_devices(self.allocatable)
        return bytes(
            podresources_pb2.AllocatableResourcesResponse(devices=devices).SerializeToString()
        )


def list_answer(pods: Iterable[SimulatedPod], numa_nodes: Sequence[int] = (0,)) -> bytes:
    """Encodes a List response."""
    answer = podresources_pb2.ListPodResourcesResponse()
    for pod in pods:
        entry = answer.pod_resources.add(name=pod.name, namespace=pod.namespace)
        for container, resources in pod.containers.items():
            listed = entry.containers.add(
                name=container, devices=encode_devices(resources, numa_nodes)
            )
            if isinstance(pod, ClaimingPod):
                listed.dynamic_resources.extend(
                    map(_dynamic_resource, pod.claims.get(container, ()))
                )
    return bytes(answer.SerializeToString())


def _dynamic_resource(claim: SimulatedClaim) -> Any:
    """Encodes a claim. As in the kubelet, each device repeats the CDI names of earlier devices of
    its driver.
    """
    resource = podresources_pb2.DynamicResource(
        claim_name=claim.name, claim_namespace=claim.namespace
    )
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
