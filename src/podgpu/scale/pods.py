"""Watches the running pods.

Exporters report only pods that hold GPUs. The API server also shows pods that request a GPU but are
not reported, for example because their node cannot be reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from podgpu.clock import Clock
from podgpu.kube.config import ApiConfig
from podgpu.kube.objects import (
    GPU_FRACTION,
    GPU_MEMORY,
    PODS_PATH,
    KubeObject,
    PodRecord,
    is_gpu_resource,
    parse_owner,
    parse_pod,
    read_map,
)
from podgpu.kube.reflector import Informer, ReflectorSettings
from podgpu.model import Pairs, PodName

_PAGE_SIZE = 500
_RUNNING = {"fieldSelector": "status.phase=Running"}
_TRUST_SECONDS = 60.0  # while the watch fails, the last list of pods is used for this time
_GPU_ANNOTATIONS = (GPU_FRACTION, GPU_MEMORY)


class PodSeen(NamedTuple):
    """A running pod, reduced to a few fields, because there may be 100,000 pods."""

    namespace: str
    name: str
    node: str
    started_at: float  # Unix time; 0 if unknown
    owner: tuple[str, str] | None  # kind and name
    requests_gpu: bool
    labels: Pairs

    @property
    def key(self) -> PodName:
        return self.namespace, self.name


def parse_running_pod(body: KubeObject) -> PodSeen | None:
    """Returns None for pods that are being deleted."""
    record = parse_pod(body)
    if record is None or body["metadata"].get("deletionTimestamp"):
        return None

    owner = None
    owned = parse_owner(body)
    if owned is not None:
        _, workload = owned
        owner = (workload.kind, workload.name)

    started_at = 0.0
    started = body["status"].get("startTime")
    if started:
        started_at = datetime.fromisoformat(started).timestamp()
    return PodSeen(
        record.namespace,
        record.name,
        record.node,
        started_at,
        owner,
        _requests_gpu(record, body),
        record.labels,
    )


def _requests_gpu(record: PodRecord, body: KubeObject) -> bool:
    if body["spec"].get("resourceClaims"):
        return True
    annotations = read_map(body["metadata"], "annotations")
    if not annotations.keys().isdisjoint(_GPU_ANNOTATIONS):
        return True
    for container in record.all_containers:
        for resource, _ in container.requests:
            if is_gpu_resource(resource):
                return True
    return False


class RunningPods(NamedTuple):
    by_key: Mapping[PodName, PodSeen] = {}
    trouble: str = ""  # why the list of pods is not available; otherwise empty


class PodWatcher:
    def __init__(
        self,
        config: ApiConfig,
        settings: ReflectorSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or Clock()
        self._updated_at = self._clock.monotonic()
        self.informer: Informer[PodSeen] = Informer(
            config, PODS_PATH, _RUNNING, parse_running_pod, settings=settings, page_size=_PAGE_SIZE
        )

    def current(self) -> RunningPods:
        """Returns the running pods. If the list is unknown or too old, returns the reason instead.

        Not thread-safe.
        """
        # Waits for the first list unless reading fails.
        if self.informer.error is None:
            self.informer.wait_synced(5.0)

        error = self.informer.error
        if not self.informer.synced:
            reason = error or "it is being read"
            return RunningPods(trouble=f"the list of running pods is not available yet: {reason}")

        now = self._clock.monotonic()
        if error is None:
            self._updated_at = now
        seconds = now - self._updated_at
        if seconds > _TRUST_SECONDS:
            return RunningPods(
                trouble="the list of running pods could not be updated "
                f"for {seconds:.0f} s: {error}"
            )
        return RunningPods({pod.key: pod for pod in self.informer.items()})
