"""This module knows which pods run: their labels, what made them, since when, and whether they ask for a GPU. From the
API server.

The exporters tell of GPUs that are held. That a pod which asks for one is in none of their figures (its node is dark)
can only be known from here: left out silently, the others' idleness would be taken for everybody's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from podgpu.clock import Clock
from podgpu.errors import SourceError
from podgpu.json_shape import mapping_in
from podgpu.kube.config import ApiConfig
from podgpu.kube.objects import PODS_PATH, Pairs, parse_owner, parse_pod
from podgpu.kube.reflector import Informer, ReflectorSettings

_PODS_AT_A_TIME = 500
_NODES_PATH = "/api/v1/nodes"
_RUNNING = {"fieldSelector": "status.phase=Running"}
_BELIEVED_SECONDS = 60.0
"""For which the list of pods counts though its watch does not stand."""
_GPU_WORDS = ("gpu", "mig-", "cuda", "vgpu")
"""In the names of extended resources that are GPUs or parts of one: nvidia.com/mig-1g.10gb, tencent.com/vcuda-core."""


class PodSeen(NamedTuple):
    """Small: there may be 100,000 of them."""

    namespace: str
    name: str
    node: str
    started_at: float
    """Unix time; 0: not told."""
    owner_kind: str
    owner_name: str
    asks_gpu: bool
    labels: Pairs

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.name


def parse_running_pod(body: Mapping[str, Any]) -> PodSeen | None:
    """None: it is no pod, or on its way out, and no longer what scaling is about. Never raises."""
    record = parse_pod(body)
    if record is None or mapping_in(body.get("metadata")).get("deletionTimestamp"):
        return None
    owner = parse_owner(body)
    requests = {name for of in (*record.containers, *record.init_containers) for name, _ in of.requests}
    by_name = any(word in name.lower() for name in requests for word in _GPU_WORDS)
    return PodSeen(
        record.namespace,
        record.name,
        record.node,
        _moment(mapping_in(body.get("status")).get("startTime")),
        owner.kind if owner else "",
        owner.name if owner else "",
        by_name or bool(mapping_in(body.get("spec")).get("resourceClaims")),
        record.labels,
    )


def _moment(text: object) -> float:
    if not isinstance(text, str) or len(text) > 40:
        return 0.0
    try:
        return max(0.0, datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError, OSError):
        return 0.0


class RunningPods(NamedTuple):
    """All that run, as of one moment."""

    by_namespace: Mapping[str, Sequence[PodSeen]]
    by_owner: Mapping[tuple[str, str, str], Sequence[PodSeen]]
    """(namespace, kind, name) -> pods."""
    keys: frozenset[tuple[str, str]] = frozenset()
    trouble: str = ""
    """Why nothing is known of pods; what is here then counts for nothing."""

    def everywhere(self) -> Iterable[PodSeen]:
        return (pod for pods in self.by_namespace.values() for pod in pods)


def index_pods(pods: Iterable[PodSeen], trouble: str = "") -> RunningPods:
    by_namespace: dict[str, list[PodSeen]] = {}
    by_owner: dict[tuple[str, str, str], list[PodSeen]] = {}
    for pod in pods:
        by_namespace.setdefault(pod.namespace, []).append(pod)
        if pod.owner_kind:
            by_owner.setdefault((pod.namespace, pod.owner_kind, pod.owner_name), []).append(pod)
    keys = frozenset(pod.key for of_namespace in by_namespace.values() for pod in of_namespace)
    return RunningPods(by_namespace, by_owner, keys, trouble)


class PodFeed:
    """Watches all running pods. `now` costs nothing while nothing changes."""

    def __init__(
        self, config: ApiConfig, settings: ReflectorSettings | None = None, clock: Clock | None = None
    ) -> None:
        self._clock = clock or Clock()
        self._away_since: float | None = None
        """Monotonic time."""
        self._watcher: Informer[PodSeen] = Informer(
            config, PODS_PATH, _RUNNING, parse_running_pod, settings=settings, page_size=_PODS_AT_A_TIME
        )
        self._version = -1
        self._index = index_pods(())

    def now(self) -> RunningPods:
        """For one thread to call. While the API server is away the pods are as they last were, for a minute: after
        that there may be others, on nodes that nobody hears of, and nothing is answered."""
        if not self._watcher.synced:
            return index_pods((), f"the API server has not yet said which pods there are: {_why(self._watcher.error)}")
        version = self._watcher.version
        if version != self._version:
            self._index, self._version = index_pods(self._watcher.items()), version
        trouble = self._trouble()
        return index_pods((), trouble) if trouble else self._index

    def _trouble(self) -> str:
        error, now = self._watcher.error, self._clock.monotonic()
        if error is None:
            self._away_since = None
            return ""
        if self._away_since is None:
            self._away_since = now
        away = now - self._away_since
        return f"which pods run is not known any more, for {away:.0f} s: {error}" if away > _BELIEVED_SECONDS else ""

    @property
    def error(self) -> SourceError | None:
        return self._watcher.error

    def wait_synced(self, timeout: float) -> bool:
        return self._watcher.wait_synced(timeout)

    def close(self) -> None:
        self._watcher.close()


class NodeFeed:
    """Watches the labels of all nodes."""

    def __init__(self, config: ApiConfig, settings: ReflectorSettings | None = None) -> None:
        self._watcher: Informer[tuple[str, Pairs]] = Informer(
            config, _NODES_PATH, {}, _named_labels, settings=settings, metadata_only=True, page_size=_PODS_AT_A_TIME
        )

    def now(self) -> Mapping[str, Pairs] | None:
        return dict(self._watcher.items()) if self._watcher.synced else None

    def close(self) -> None:
        self._watcher.close()


def _named_labels(body: Mapping[str, Any]) -> tuple[str, Pairs] | None:
    metadata = mapping_in(body.get("metadata"))
    name, labels = metadata.get("name"), mapping_in(metadata.get("labels"))
    pairs = sorted((key, text) for key, text in labels.items() if isinstance(key, str) and isinstance(text, str))
    return (name, tuple(pairs)) if isinstance(name, str) and name else None


def _why(error: SourceError | None) -> str:
    return str(error) if error is not None else "the list is on its way"
