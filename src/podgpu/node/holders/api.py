"""Opens the exporter's watches on the API server.

These are the pods, the DRA devices, and the ConfigMap with the counters.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

from podgpu.errors import SourceError, UsageError
from podgpu.kube.config import SERVICE_ACCOUNT, ApiConfig, NoApi, load_config
from podgpu.kube.objects import PODS_PATH, KubeObject, PodRecord, parse_pod, read_map
from podgpu.kube.reflector import FindPath, Informer, ReflectorSettings
from podgpu.model import (
    Allocation,
    Device,
    Pairs,
    PodLabels,
)
from podgpu.node.holders import AllocationSource
from podgpu.node.holders.annotations import is_read

T = TypeVar("T")
_log = logging.getLogger("podgpu")
CONFIGMAP_KEY = "metrics"  # the key that dcgm-exporter uses
SYNC_SECONDS = 10.0
# Maximum wait for the first answer at start. Later answers are used as they arrive.
SOON_SECONDS = 0.5
_INVALID = re.compile(r"[^a-zA-Z0-9_]")


def open_if_api(option: str, open_feed: Callable[[], T]) -> T | None:
    """Returns the watch that `open_feed` opens.

    Without an API server, logs a warning and returns None.
    """
    try:
        return open_feed()
    except NoApi as e:
        _log.warning("--%s: %s; continuing without it", option, e)
        return None


@dataclass(eq=False)
class ApiAccess:
    """Opens watches on the API server. `close` closes all of them."""

    kubeconfig: str
    sync_seconds: float = SYNC_SECONDS  # how long to wait for the first answer of a watch
    settings: ReflectorSettings | None = None
    watched_pods: Informer[PodRecord] | None = None  # None unless an option needs the pods
    feeds: list[Informer[Any]] = field(default_factory=list)

    @property
    def is_available(self) -> bool:
        """True if NODE_NAME is set and credentials exist (a service account or --kubeconfig)."""
        if not os.environ.get("NODE_NAME"):
            return False

        has_address = "KUBERNETES_SERVICE_HOST" in os.environ
        in_cluster = has_address and os.path.exists(f"{SERVICE_ACCOUNT}/token")
        return bool(self.kubeconfig) or in_cluster

    @cached_property
    def config(self) -> ApiConfig:
        """Address and credentials of the API server. Raises NoApi if it is not configured."""
        return load_config(self.kubeconfig)

    @property
    def node(self) -> str:
        """Name of this node. Raises NoApi if NODE_NAME is not set."""
        node = os.environ.get("NODE_NAME")
        if not node:
            raise NoApi(
                "NODE_NAME is not set, and podgpu reads only this node's objects from the API "
                "server: set it from spec.nodeName with the downward API"
            )
        return node

    def check(self) -> None:
        """Raises NoApi if this node's objects cannot be read."""
        _ = self.node, self.config

    def watch_pods(self) -> Informer[PodRecord]:
        """Returns a watch of this node's pods, which all callers share."""
        if self.watched_pods is None:
            selector = {"fieldSelector": f"spec.nodeName={self.node}"}
            parse = partial(parse_pod, keeps_annotation=is_read)
            self.watched_pods = self.watch(PODS_PATH, selector, parse)
        return self.watched_pods

    def known_pods(self) -> tuple[PodRecord, ...]:
        """Returns this node's pods if they are watched, else an empty tuple."""
        if self.watched_pods is None:
            return ()
        return self.watched_pods.items()

    def watch_configmap(self, name: str) -> Callable[[], str | None]:
        """Watches a ConfigMap, given as NAMESPACE:NAME.

        Returns a function that returns its current text.
        """
        namespace, _, map_name = name.partition(":")
        if not namespace or not map_name or "/" in name:
            raise UsageError(
                f"-m {name!r}: write NAMESPACE:NAME of a ConfigMap with the key {CONFIGMAP_KEY!r}"
            )

        path = f"/api/v1/namespaces/{namespace}/configmaps"
        selector = {"fieldSelector": f"metadata.name={map_name}"}
        watcher: Informer[str] = self.watch(path, selector, _read_configmap)
        if not watcher.wait_synced(self.sync_seconds):
            _log.warning(
                "ConfigMap %s cannot be read yet (%s); starting with the counters of -f",
                name,
                watcher.error,
            )

        def read_text() -> str | None:
            # The selector has one name, so there is at most one ConfigMap.
            texts = watcher.items()
            return texts[0] if texts else None

        return read_text

    def watch(
        self,
        path: str,
        params: Mapping[str, str],
        convert: Callable[[KubeObject], T | None],
        find_path: FindPath | None = None,
    ) -> Informer[T]:
        watcher = Informer(
            self.config, path, params, convert, find_path=find_path, settings=self.settings
        )
        self.feeds.append(watcher)
        return watcher

    def close(self) -> None:
        for feed in self.feeds:
            feed.close()


def _read_configmap(body: KubeObject) -> str | None:
    text: str | None = read_map(body, "data").get(CONFIGMAP_KEY)
    return text


class ApiHealth(AllocationSource):
    """Raises the errors of watches, so that they appear in logs and metrics.

    Reports no assignments.
    """

    name = "api-server"

    def __init__(self, feeds: Sequence[Informer[Any]]) -> None:
        self._feeds = feeds

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        for feed in self._feeds:
            error = feed.error
            if error is not None:
                # Re-raising the same error would extend its traceback.
                raise SourceError(error.reason, str(error))
        return Allocation()


class LabelFilter:
    """Selects pod labels whose key contains a match of a pattern.

    Without patterns, selects all labels. Patterns have the syntax of RE2, as in dcgm-exporter.
    """

    def __init__(self, patterns: str = "") -> None:
        texts = [text.strip() for text in patterns.split(",")]
        self._patterns = [_compile(text) for text in texts if text]

    def select(self, pods: Iterable[PodRecord]) -> PodLabels:
        return {(pod.namespace, pod.name): self._select_labels(pod) for pod in pods}

    def _select_labels(self, pod: PodRecord) -> Pairs:
        """Returns the selected labels.

        If several keys become the same label name, the first key is used.
        """
        named: dict[str, str] = {}
        for key, value in sorted(pod.labels):
            if self._selects(key):
                named.setdefault(label_name(key), value)
        return tuple(named.items())

    def _selects(self, key: str) -> bool:
        if not self._patterns:
            return True
        return any(pattern.search(key) for pattern in self._patterns)


def _compile(text: str) -> Any:
    import re2  # needs 3.4 MiB of memory, and few exporters use patterns

    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(text, options)
    except re2.error as error:
        (problem,) = error.args
        raise UsageError(
            f"--kubernetes-pod-label-allowlist-regex {text!r}: not a valid regular expression in "
            f"Go's syntax, RE2 ({problem.decode(errors='replace')}): correct the pattern"
        ) from error


def label_name(key: str) -> str:
    """Converts the key of a pod label to a valid Prometheus label name."""
    name = _INVALID.sub("_", key)
    if name[:1].isdigit():
        name = f"_{name}"
    # Prometheus reserves names that begin with two underscores.
    if name.startswith("__"):
        return f"pod{name}"
    return name
