"""What made each pod, from the API server: for clusters without kube-state-metrics, or without Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from podgpu.figures.device import Owner
from podgpu.kube.access import ApiConfig
from podgpu.kube.pods import PODS_PATH, PodOwner, parse_owner
from podgpu.kube.watch import Pace, Watcher

_PODS_AT_A_TIME = 500
"""As kubectl has it: some 500 KB of metadata."""


class ApiOwners:
    """(namespace, pod) -> owner, of all pods. A call costs nothing while nothing changes."""

    def __init__(self, config: ApiConfig, pace: Pace | None = None, page_size: int = _PODS_AT_A_TIME) -> None:
        self._watcher: Watcher[PodOwner] = Watcher(
            config, PODS_PATH, {}, parse_owner, pace=pace, metadata_only=True, page_size=page_size
        )
        self._version = -1
        self._owners: Mapping[tuple[str, str], Owner] = {}

    def all(self) -> Mapping[tuple[str, str], Owner]:
        version = self._watcher.version
        if version != self._version:
            self._owners = {(o.namespace, o.pod): Owner(o.kind, o.name) for o in self._watcher.items()}
            self._version = version
        return self._owners

    def of(self, pods: Iterable[tuple[str, str]]) -> Mapping[tuple[str, str], Owner]:
        """Those of these (namespace, pod) that have one."""
        known = self.all()
        return {pod: known[pod] for pod in pods if pod in known}

    def notes(self) -> Sequence[str]:
        """What is not as it should be."""
        error = self._watcher.error
        return () if error is None else (f"the owners of pods may be out of date: {error}",)

    def wait_synced(self, timeout: float) -> bool:
        return self._watcher.wait_synced(timeout)

    def close(self) -> None:
        self._watcher.close()
