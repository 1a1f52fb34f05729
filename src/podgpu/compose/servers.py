"""This module says whom podgpu asks over the network, as the options describe it: the API server, other exporters, and
how to be let in.

A feed from the API server is opened only when an option asks for one.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from podgpu.errors import SourceError, UsageError, few_of
from podgpu.gpu.exposition_source import DEFAULT_MAX_AGE, ExpositionSource, open_exposition_source
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
"""Of one node: 1,000 pods of 16 KiB. A larger list would not fit into the memory that the chart gives an exporter."""
SOON_SECONDS = 0.5
"""A server that is well has answered by then; what comes later is taken up when it comes."""


class NoApi(UsageError):
    """The API server cannot be asked from here, whatever the options say."""


def unless_no_api(option: str, open_feed: Callable[[], T]) -> T | None:
    """For what is nice to have: a DaemonSet brought over from dcgm-exporter starts without it, and says so."""
    try:
        return open_feed()
    except NoApi as e:
        _log.warning("--%s: %s; continuing without it", option, e)
        return None


class ApiAccess:
    """The API server as one node's exporter asks it: each feed once, closed together."""

    def __init__(
        self, kubeconfig: str, sync_seconds: float = _SYNC_SECONDS, settings: ReflectorSettings | None = None
    ) -> None:
        """`sync_seconds`: how long a feed that the first exposition needs is waited for. `settings`: of every feed."""
        self._sync_seconds = sync_seconds
        self._settings = settings
        self._kubeconfig = kubeconfig or None
        self._config: ApiConfig | None = None
        self._pods: Informer[PodRecord] | None = None
        self.feeds: list[Informer[Any]] = []

    @property
    def at_hand(self) -> bool:
        """A service account (or --kubeconfig) and a node name: what `--allocation auto` takes as leave to ask."""
        in_cluster = "KUBERNETES_SERVICE_HOST" in os.environ and os.path.exists(_SERVICE_ACCOUNT_TOKEN)
        return bool(os.environ.get("NODE_NAME")) and (self._kubeconfig is not None or in_cluster)

    def check(self) -> None:
        """Raises NoApi when this node's objects cannot be asked for from here."""
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
        """This node's pods if some option watches them, else none: nothing is opened for this."""
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
        """This node's DRA devices, in whichever version of the API the server has."""
        from podgpu.kube.objects import RESOURCE_VERSIONS, find_slices_path, parse_slice, slices_params, slices_path

        return self._watch(
            slices_path(RESOURCE_VERSIONS[0]), slices_params(self._node()), parse_slice, find_slices_path
        )

    @staticmethod
    def _node() -> str:
        node = os.environ.get("NODE_NAME")
        if not node:
            raise NoApi(
                "the API server is asked for this node only, so the variable NODE_NAME must say which it is: "
                "set it from spec.nodeName by the downward API"
            )
        return node

    @property
    def config(self) -> ApiConfig:
        """How the API server is reached. Raises NoApi."""
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
    """Says how the feeds fare: a source that names nobody, so that an absence is counted and explained."""

    name = "api-server"

    def __init__(self, feeds: Iterable[Informer[Any]]) -> None:
        self._feeds = list(feeds)
        self._seen: list[Counter[str]] = [Counter() for _ in self._feeds]

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        """Fails while a feed does, and once for what went wrong and right again between two readings."""
        passed = [reason for number in range(len(self._feeds)) for reason in self._new_failures(number)]
        for feed in self._feeds:
            if feed.error is not None:
                raise feed.error
        if passed:
            raise SourceError(
                passed[0],
                f"a watch failed since the last reading ({few_of(passed)}) and goes on again: nothing to do,"
                " unless it happens again and again",
            )
        return Allocation()

    def _new_failures(self, number: int) -> list[str]:
        now = Counter(self._feeds[number].failures)
        before, self._seen[number] = self._seen[number], now
        return sorted(now - before)

    def close(self) -> None:
        """The feeds belong to others."""


# Other exporters


def open_exposition(place: str, options: Mapping[str, Any], deadline: float | None = None) -> ExpositionSource:
    """An exporter's metrics, at a URL or in a file. Raises UsageError; options not there count as not given."""
    access = access_by(options, "exporter", "the exporter")
    max_age = options.get("exporter_max_age", DEFAULT_MAX_AGE)
    return open_exposition_source(place, access, timeout=deadline or _deadline(options), max_age=max_age)


def access_by(options: Mapping[str, Any], prefix: str, server: str, headers: Mapping[str, str] | None = None) -> Access:
    """What the options --PREFIX-… say of the server. Raises UsageError."""
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
    """A little before the turn's own: its own message says more."""
    return min(DEFAULT_TIMEOUT, 0.8 * max(1.0, float(options.get("collect_interval", DEFAULT_TIMEOUT))))
