"""Access to the API server and to other exporters, from options. A watch is opened only if an option needs it."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from podgpu.errors import SourceError, UsageError, few_of
from podgpu.gpu.exposition import ExpositionSource, open_exposition_source
from podgpu.http_client import DEFAULT_TIMEOUT, Access
from podgpu.metrics.counters import Naming
from podgpu.model import Allocation, Device

if TYPE_CHECKING:
    from podgpu.agent.counter_feeds import ConfigMapCounters
    from podgpu.kube.config import ApiConfig
    from podgpu.kube.objects import PodRecord, PoolSlice
    from podgpu.kube.reflector import FindPath, Informer, ReflectorSettings

T = TypeVar("T")
_log = logging.getLogger("podgpu")
_SERVICE_ACCOUNT_TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"
_SYNC_SECONDS = 10.0
_CONFIGMAP_KEY = "metrics"
"""dcgm-exporter's."""
_LARGEST_ANSWER = 16 * 1024 * 1024
"""1,000 pods of 16 KiB. A larger list would not fit into the exporter's memory limit."""
SOON_SECONDS = 0.5
"""How long the exporter waits for the first answer at start. A later answer is used when it arrives."""


class NoApi(UsageError):
    """The API server cannot be reached from here."""


def unless_no_api(option: str, open_feed: Callable[[], T]) -> T | None:
    """Opens an optional feed. Without an API server it logs a warning, so that a migrated DaemonSet starts."""
    try:
        return open_feed()
    except NoApi as e:
        _log.warning("--%s: %s; continuing without it", option, e)
        return None


class ApiAccess:
    """The watches of one node's exporter. Each is opened once; all are closed together."""

    def __init__(
        self, kubeconfig: str, sync_seconds: float = _SYNC_SECONDS, settings: ReflectorSettings | None = None
    ) -> None:
        """`sync_seconds`: how long to wait for the first answer of a watch."""
        self._sync_seconds = sync_seconds
        self._settings = settings
        self._kubeconfig = kubeconfig or None
        self._config: ApiConfig | None = None
        self._pods: Informer[PodRecord] | None = None
        self.feeds: list[Informer[Any]] = []

    @property
    def at_hand(self) -> bool:
        """True with a node name and a service account or --kubeconfig: then `--allocation auto` uses the API server."""
        in_cluster = "KUBERNETES_SERVICE_HOST" in os.environ and os.path.exists(_SERVICE_ACCOUNT_TOKEN)
        return bool(os.environ.get("NODE_NAME")) and (self._kubeconfig is not None or in_cluster)

    def check(self) -> None:
        """Raises NoApi if this node's objects cannot be read."""
        self._node()
        self._access()

    def pods(self) -> Informer[PodRecord]:
        """This node's pods."""
        if self._pods is None:
            from podgpu.holders.annotations import is_read
            from podgpu.kube.objects import parse_pod

            selector = {"fieldSelector": f"spec.nodeName={self._node()}"}
            self._pods = self._watch("/api/v1/pods", selector, lambda body: parse_pod(body, is_read))
        return self._pods

    @property
    def watched_pods(self) -> Informer[PodRecord] | None:
        """The watch of this node's pods if some option opened it."""
        return self._pods

    def known_pods(self) -> tuple[PodRecord, ...]:
        """This node's pods if some option watches them, else none."""
        return self._pods.items() if self._pods is not None else ()

    def configmap(self, name: str, naming: Naming = Naming()) -> ConfigMapCounters:  # noqa: B008 - frozen
        """`-m NAMESPACE:NAME`."""
        from podgpu.agent.counter_feeds import ConfigMapCounters

        namespace, colon, map_name = name.partition(":")
        if not colon or not namespace or not map_name or "/" in name:
            raise UsageError(f"-m {name!r}: write NAMESPACE:NAME of a ConfigMap with the key {_CONFIGMAP_KEY!r}")
        path = f"/api/v1/namespaces/{namespace}/configmaps"
        watcher = self._watch(path, {"fieldSelector": f"metadata.name={map_name}"}, _csv_text)
        if not watcher.wait_synced(self._sync_seconds):
            _log.warning("ConfigMap %s cannot be read yet (%s); starting with the counters of -f", name, watcher.error)
        return ConfigMapCounters(name, lambda: next(iter(watcher.items()), None), naming)

    def resource_slices(self) -> Informer[PoolSlice]:
        """This node's DRA devices, in a version of the API that the server has."""
        from podgpu.kube.objects import RESOURCE_VERSIONS, find_slices_path, parse_slice, slices_params, slices_path

        return self._watch(
            slices_path(RESOURCE_VERSIONS[0]), slices_params(self._node()), parse_slice, find_slices_path
        )

    @staticmethod
    def _node() -> str:
        node = os.environ.get("NODE_NAME")
        if not node:
            raise NoApi(
                "NODE_NAME is not set, and podgpu reads only this node's objects from the API server: set it from"
                " spec.nodeName with the downward API"
            )
        return node

    @property
    def config(self) -> ApiConfig:
        """Raises NoApi."""
        return self._access()

    def _access(self) -> ApiConfig:
        from podgpu.kube.config import load_config

        if self._config is None:
            try:
                self._config = load_config(self._kubeconfig)
            except SourceError as e:
                raise NoApi(str(e)) from e
        return self._config

    def _watch(
        self, path: str, params: Mapping[str, str], keep: Any, find_path: FindPath | None = None
    ) -> Informer[Any]:
        from podgpu.kube.reflector import Informer

        watcher: Informer[Any] = Informer(
            self._access(), path, params, keep, max_bytes=_LARGEST_ANSWER, find_path=find_path, settings=self._settings
        )
        self.feeds.append(watcher)
        return watcher

    def close(self) -> None:
        for feed in self.feeds:
            feed.close()


def _csv_text(configmap: Mapping[str, Any]) -> str | None:
    data = configmap.get("data")
    text = data.get(_CONFIGMAP_KEY) if isinstance(data, Mapping) else None
    return text if isinstance(text, str) else None


class ApiHealth:
    """Reports failures of the watches as a source without holders, so that they are counted and explained."""

    name = "api-server"

    def __init__(self, feeds: Iterable[Informer[Any]]) -> None:
        self._feeds = list(feeds)
        self._seen: list[Counter[str]] = [Counter() for _ in self._feeds]

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        """Raises the error of a failing watch, and once for failures that ended between two readings."""
        passed = [reason for number in range(len(self._feeds)) for reason in self._new_failures(number)]
        for feed in self._feeds:
            if feed.error is not None:
                raise feed.error
        if passed:
            raise SourceError(
                passed[0],
                f"a watch failed since the last reading ({few_of(passed)}) and recovered: nothing to do unless it"
                " happens repeatedly",
            )
        return Allocation()

    def _new_failures(self, number: int) -> list[str]:
        now = Counter(self._feeds[number].failures)
        before, self._seen[number] = self._seen[number], now
        return sorted(now - before)

    def close(self) -> None:
        """The watches are closed by ApiAccess."""


# Other exporters


def open_exposition(place: str, options: Mapping[str, Any], deadline: float | None = None) -> ExpositionSource:
    """Opens an exporter's metrics, from a URL or a file. Raises UsageError."""
    access = access_by(options, "exporter", "the exporter")
    return open_exposition_source(place, access, timeout=deadline or _deadline(options))


def access_by(options: Mapping[str, Any], prefix: str, server: str, headers: Mapping[str, str] | None = None) -> Access:
    """Reads the options --PREFIX-ca-file and so on. Raises UsageError."""
    access = Access(
        ca_file=options.get(f"{prefix}_ca_file", ""),
        insecure=options.get(f"{prefix}_insecure_skip_verify", False),
        username=options.get(f"{prefix}_username", ""),
        password_file=options.get(f"{prefix}_password_file", ""),
        token_file=options.get(f"{prefix}_token_file", ""),
        headers=tuple((headers or {}).items()),
        prefix=prefix,
        server=server,
    )
    access.check()
    return access


def _deadline(options: Mapping[str, Any]) -> float:
    """Shorter than the deadline of the turn, whose message says less."""
    return min(DEFAULT_TIMEOUT, 0.8 * max(1.0, float(options.get("collect_interval", DEFAULT_TIMEOUT))))
