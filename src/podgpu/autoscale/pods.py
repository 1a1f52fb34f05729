"""Watches the running pods and the labels of nodes.

Exporters report only the pods that hold their GPUs. The API server also lists pods that request a GPU but are missing
in the metrics, for example because their node cannot be reached.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from podgpu.clock import Clock
from podgpu.errors import SourceError
from podgpu.kube.client import Object
from podgpu.kube.config import ApiConfig
from podgpu.kube.objects import PODS_PATH, Pairs, parse_owner, parse_pod
from podgpu.kube.reflector import Informer, ReflectorSettings

_PAGE_SIZE = 500
_NODES_PATH = "/api/v1/nodes"
_RUNNING = {"fieldSelector": "status.phase=Running"}
_TRUST_SECONDS = 60.0  # while the watch fails, the last list of pods is used for this time
_GPU_WORDS = ("gpu", "mig-", "cuda", "vgpu")  # in resource names such as nvidia.com/mig-1g.10gb, tencent.com/vcuda-core


class PodSeen(NamedTuple):
    """A running pod, reduced to a few fields, because there may be 100,000 pods."""

    namespace: str
    name: str
    node: str
    started_at: float  # Unix time; 0 if unknown
    owner_kind: str
    owner_name: str
    requests_gpu: bool
    labels: Pairs

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.name


def parse_running_pod(body: Object) -> PodSeen | None:
    """Returns None for pods that are being deleted."""
    record = parse_pod(body)
    if record is None or body["metadata"].get("deletionTimestamp"):
        return None
    owner = parse_owner(body)
    resources = {name for container in (*record.containers, *record.init_containers) for name, _ in container.requests}
    started = body["status"].get("startTime")
    return PodSeen(
        record.namespace,
        record.name,
        record.node,
        datetime.fromisoformat(started).timestamp() if started else 0.0,
        owner.kind if owner else "",
        owner.name if owner else "",
        any(word in name.lower() for name in resources for word in _GPU_WORDS)
        or bool(body["spec"].get("resourceClaims")),
        record.labels,
    )


class RunningPods(NamedTuple):
    by_namespace: Mapping[str, Sequence[PodSeen]]
    by_owner: Mapping[tuple[str, str, str], Sequence[PodSeen]]  # (namespace, kind, name)
    by_key: Mapping[tuple[str, str], PodSeen]  # (namespace, name)
    trouble: str = ""  # why the pods are not available; if set, there are no pods


def index_pods(pods: Iterable[PodSeen], trouble: str = "") -> RunningPods:
    by_namespace: dict[str, list[PodSeen]] = {}
    by_owner: dict[tuple[str, str, str], list[PodSeen]] = {}
    by_key = {}
    for pod in pods:
        by_key[pod.key] = pod
        by_namespace.setdefault(pod.namespace, []).append(pod)
        if pod.owner_kind:
            by_owner.setdefault((pod.namespace, pod.owner_kind, pod.owner_name), []).append(pod)
    return RunningPods(by_namespace, by_owner, by_key, trouble)


class PodWatcher:
    """Watches all running pods."""

    def __init__(
        self, config: ApiConfig, settings: ReflectorSettings | None = None, clock: Clock | None = None
    ) -> None:
        self._clock = clock or Clock()
        self._failing_since: float | None = None  # monotonic time
        self._informer: Informer[PodSeen] = Informer(
            config, PODS_PATH, _RUNNING, parse_running_pod, settings=settings, page_size=_PAGE_SIZE
        )
        self._version = -1
        self._index = index_pods(())

    def current(self) -> RunningPods:
        """Returns no pods and a reason if the API server has been unavailable for a minute. Not thread-safe."""
        if not self._informer.synced:
            why = self._informer.error or "the first list is being read"
            return index_pods((), f"the list of running pods is not available yet: {why}")
        version = self._informer.version
        if version != self._version:
            self._index, self._version = index_pods(self._informer.items()), version
        error, now = self._informer.error, self._clock.monotonic()
        if error is None:
            self._failing_since = None
            return self._index
        if self._failing_since is None:
            self._failing_since = now
        seconds = now - self._failing_since
        if seconds <= _TRUST_SECONDS:
            return self._index
        return index_pods((), f"the list of running pods could not be updated for {seconds:.0f} s: {error}")

    @property
    def error(self) -> SourceError | None:
        return self._informer.error

    def wait_synced(self, timeout: float) -> bool:
        return self._informer.wait_synced(timeout)

    def close(self) -> None:
        self._informer.close()


class NodeWatcher:
    """Watches the labels of all nodes."""

    def __init__(self, config: ApiConfig, settings: ReflectorSettings | None = None) -> None:
        self._informer: Informer[tuple[str, Pairs]] = Informer(
            config, _NODES_PATH, {}, _parse_node, settings=settings, metadata_only=True, page_size=_PAGE_SIZE
        )

    def current(self) -> Mapping[str, Pairs] | None:
        return dict(self._informer.items()) if self._informer.synced else None

    def close(self) -> None:
        self._informer.close()


def _parse_node(body: Object) -> tuple[str, Pairs]:
    metadata = body["metadata"]
    return metadata["name"], tuple(sorted((metadata.get("labels") or {}).items()))
