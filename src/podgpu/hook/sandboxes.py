"""This module keeps the sandboxes and containers a runtime told of, cut down to what says something about GPUs. Pure.

Records are frozen: whoever was handed them keeps a true picture of that moment, while the runtime goes on telling.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from podgpu.errors import SourceError
from podgpu.holders.annotation_formats import is_read
from podgpu.kube.objects import Pairs

STOPPED = 4
MOUNTED_DEVICES = "/var/run/nvidia-container-devices"
"""Where the volume-mount strategy of NVIDIA's device plugin mounts one file for each GPU, named after it."""
VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES"
GPU_MANAGER_DEVICES = "tencent.com/vcuda-device"
"""On the container, from gpu-manager's answer to the kubelet: /dev/nvidia0,/dev/nvidia1."""
MOST_CONTAINERS = 20_000
_MOST_IDS = 512
"""More than any node has GPUs, MIG instances and links together."""

_NVIDIA_MAJOR = 195
_FIRST_CONTROL_MINOR = 254  # 254 is nvidia-modeset, 255 nvidiactl: every GPU container has them
# Runtimes make /dev/null and its kin themselves. Only a privileged container's list has them: it is the host's /dev.
_EVERY_CONTAINER_HAS = {(1, 3), (1, 5), (1, 8)}


@dataclass(frozen=True, slots=True)
class ContainerFacts:
    id: str
    name: str
    visible: str | None = None
    """NVIDIA_VISIBLE_DEVICES; None: it has none."""
    only_looks: bool = False
    """Its driver capabilities let it ask the driver, and run nothing."""
    mounted: tuple[str, ...] = ()
    """Names under MOUNTED_DEVICES."""
    minors: tuple[int, ...] = ()
    """Of its own device nodes; none for a privileged container, which has everybody's."""
    gpu_manager: str = ""


@dataclass(frozen=True, slots=True)
class Sandbox:
    id: str
    namespace: str
    name: str
    uid: str = ""
    annotations: Pairs = ()
    """Only those in which schedulers note GPUs."""
    containers: tuple[ContainerFacts, ...] = ()
    order: tuple[str, ...] = ()
    """Names of its containers as they were first made, which is the order of the pod's specification: annotations name
    containers by their number."""

    def with_container(self, container: ContainerFacts) -> Sandbox:
        """A container made anew takes the place of the one of its name, whose end may have been missed."""
        others = (other for other in self.containers if other.name != container.name and other.id != container.id)
        order = self.order if container.name in self.order else (*self.order, container.name)
        return replace(self, containers=(*others, container), order=order)

    def without_container(self, container_id: str) -> Sandbox:
        return replace(self, containers=tuple(c for c in self.containers if c.id != container_id))


def sandbox_facts(pod: Any) -> Sandbox:
    """From NRI's PodSandbox."""
    read = ((key, text) for key, text in pod.annotations.items() if is_read(key))
    return Sandbox(pod.id, pod.namespace, pod.name, pod.uid, tuple(sorted(read)))


def container_facts(container: Any) -> ContainerFacts:
    """From NRI's Container."""
    told = (variable.decode(errors="replace") for variable in container.env if variable.startswith(b"NVIDIA_"))
    variables = dict(variable.partition("=")[::2] for variable in told)  # the last of a name counts
    capabilities = {word.strip() for word in variables.get(CAPABILITIES, "").split(",", _MOST_IDS) if word.strip()}
    return ContainerFacts(
        container.id,
        container.name,
        variables.get(VISIBLE_DEVICES),
        capabilities == {"utility"},
        tuple(_mounted(container.mounts)),
        tuple(_minors(container.linux.devices)),
        container.annotations.get(GPU_MANAGER_DEVICES, ""),
    )


def _mounted(mounts: Iterable[Any]) -> list[str]:
    inside = f"{MOUNTED_DEVICES}/".encode()
    names = (mount.destination[len(inside) :] for mount in mounts if mount.destination.startswith(inside))
    return [name.decode(errors="replace") for name in names][:_MOST_IDS]


def _minors(devices: Sequence[Any]) -> list[int]:
    if any((device.major, device.minor) in _EVERY_CONTAINER_HAS for device in devices):
        return []
    minors = {
        device.minor for device in devices if device.major == _NVIDIA_MAJOR and 0 <= device.minor < _FIRST_CONTROL_MINOR
    }
    return sorted(minors)


class Sandboxes:
    """All of the node's, by what the runtime says of them."""

    def __init__(self) -> None:
        self._sandboxes: dict[str, Sandbox] = {}
        self._sandbox_of: dict[str, str] = {}
        """Container id -> sandbox id."""

    @property
    def picture(self) -> tuple[Sandbox, ...]:
        return tuple(self._sandboxes.values())

    @property
    def containers(self) -> int:
        return len(self._sandbox_of)

    def get(self, sandbox_id: str) -> Sandbox | None:
        return self._sandboxes.get(sandbox_id)

    def run(self, pod: Any) -> None:
        """A new sandbox. Another of the same pod has ended, whether that was told or not."""
        for sandbox in list(self._sandboxes.values()):
            if pod.uid and sandbox.uid == pod.uid and sandbox.id != pod.id:
                self.end(sandbox.id)
        self._know(pod)

    def end(self, sandbox_id: str) -> None:
        """With all its containers, whether theirs was told or not."""
        sandbox = self._sandboxes.pop(sandbox_id, None)
        for container in sandbox.containers if sandbox else ():
            self._sandbox_of.pop(container.id, None)

    def put(self, pod: Any, container: Any) -> None:
        """A container as it is now; raises SourceError when there are too many to be true."""
        if container.state == STOPPED:
            self.drop(container.id)
            return
        if not container.id or not pod.id:
            raise SourceError("nameless", "the runtime names a container without an id, or in no sandbox")
        if len(self._sandbox_of) >= MOST_CONTAINERS and container.id not in self._sandbox_of:
            raise _too_many()
        before = self._know(pod)
        after = before.with_container(container_facts(container))
        for gone in {c.id for c in before.containers} - {c.id for c in after.containers}:
            self._sandbox_of.pop(gone, None)
        self._sandboxes[after.id] = after
        self._sandbox_of[container.id] = after.id

    def drop(self, container_id: str) -> None:
        sandbox = self._sandboxes.get(self._sandbox_of.pop(container_id, ""))
        if sandbox is not None:
            self._sandboxes[sandbox.id] = sandbox.without_container(container_id)

    def _know(self, pod: Any) -> Sandbox:
        """What was told first stands where the runtime now gives the id alone, as at the end of a container."""
        known = self._sandboxes.get(pod.id)
        if known is None and len(self._sandboxes) >= MOST_CONTAINERS:
            raise _too_many()
        if known is None or pod.name:
            told = sandbox_facts(pod)
            known = told if known is None else replace(told, containers=known.containers, order=known.order)
            self._sandboxes[pod.id] = known
        return known


def _too_many() -> SourceError:
    what = f"the runtime has more than {MOST_CONTAINERS:,} containers: the rest is not followed"
    return SourceError("too_many", what)


def synchronised(pods: Iterable[Any], containers: Iterable[Any]) -> Sandboxes:
    """What the runtime has, all told at once. Containers of a sandbox it does not name are nobody's."""
    sandboxes = Sandboxes()
    named = {pod.id: pod for pod in pods}
    for pod in named.values():
        sandboxes.run(pod)
    for container in sorted(containers, key=lambda c: c.created_at):  # a stable sort: older runtimes tell no time
        pod = named.get(container.pod_sandbox_id)
        if pod is not None:
            sandboxes.put(pod, container)
    return sandboxes
