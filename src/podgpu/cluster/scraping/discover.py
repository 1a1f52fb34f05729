"""This module asks the API server who is out there: exporters by the endpoints of the Services that a selector chooses,
ready or not, and what made each pod.

An exporter that is not ready is the one somebody looks for: it is asked on until it is gone from the slices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from podgpu.errors import UsageError
from podgpu.figures.device import Owner
from podgpu.kube.config import ApiConfig
from podgpu.kube.objects import (
    METRICS_PORT,
    PODS_PATH,
    EndpointSliceRecord,
    MetricsUrls,
    PodOwner,
    endpoint_slices_path,
    metrics_urls,
    parse_endpoint_slice,
    parse_owner,
)
from podgpu.kube.reflector import Informer, ReflectorSettings

_PODS_AT_A_TIME = 500
"""As kubectl has it: some 500 KB of metadata."""
_NAMESPACE = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_NUMBER = re.compile(r"[0-9]{1,5}")
_PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


class Selection(NamedTuple):
    namespace: str
    """Empty: all."""
    labels: str

    @classmethod
    def parse(cls, text: str) -> Selection:
        """`[NAMESPACE/]SELECTOR`. Raises UsageError.

        A label's name may have a slash too: what stands before the first one is a namespace where it has no dot in it.
        A selector that begins with a slash is of all namespaces whatever follows.
        """
        before, slash, after = text.strip().partition("/")
        if slash and not before:
            namespace, labels = "", after
        elif slash and _NAMESPACE.fullmatch(before):
            namespace, labels = before, after
        else:
            namespace, labels = "", text.strip()
        if not labels or not labels.isprintable():
            raise UsageError(
                f"--discover-kubernetes {text!r}: write [NAMESPACE/]LABEL=VALUE, the labels of the exporters' Service"
            )
        return cls(namespace, labels)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.labels}" if self.namespace else self.labels


def check_port(text: str) -> str:
    """A port's name or number. Raises UsageError."""
    if _NUMBER.fullmatch(text):
        if 0 < int(text) < 65536:
            return text
    elif _PORT_NAME.fullmatch(text):
        return text
    raise UsageError(f"--discover-port {text!r}: write the name of the Service's port, or a number up to 65535")


class KubernetesTargets:
    """The `Targets` of --discover-kubernetes. While the API server is away the last ones stay."""

    def __init__(
        self,
        config: ApiConfig,
        selection: Selection,
        port: str = METRICS_PORT,
        *,
        https: bool = False,
        settings: ReflectorSettings | None = None,
    ) -> None:
        """`https`: all of them, not only those whose port says so."""
        self._selection = selection
        self._port = check_port(port)
        self._https = https
        self._watcher: Informer[EndpointSliceRecord] = Informer(
            config,
            endpoint_slices_path(selection.namespace),
            {"labelSelector": selection.labels},
            parse_endpoint_slice,
            settings=settings,
        )
        self._version = -1
        self._found = MetricsUrls((), ())

    def wait_synced(self, timeout: float) -> bool:
        """Blocks until the exporters are known for the first time: worth a moment before the first round."""
        return self._watcher.wait_synced(timeout)

    def urls(self) -> Sequence[str]:
        version = self._watcher.version
        if version != self._version:
            self._found = metrics_urls(self._watcher.items(), self._port, https=self._https)
            self._version = version
        return self._found.urls

    def notes(self) -> Sequence[str]:
        error = self._watcher.error
        if error is not None:
            return (f"the list of exporters may be out of date: {error}", *self._found.problems)
        if not self._watcher.synced:
            return ("the API server has not yet said where the exporters are",)
        if not self._found.urls and not self._found.problems:
            return (f"no Service with the labels {self._selection} has an endpoint",)
        return self._found.problems

    def close(self) -> None:
        self._watcher.close()


class ApiOwners:
    """What made each pod, for clusters without kube-state-metrics or Prometheus. Costs little while nothing changes."""

    def __init__(
        self, config: ApiConfig, settings: ReflectorSettings | None = None, page_size: int = _PODS_AT_A_TIME
    ) -> None:
        self._watcher: Informer[PodOwner] = Informer(
            config, PODS_PATH, {}, parse_owner, settings=settings, metadata_only=True, page_size=page_size
        )
        self._version = -1
        self._owners: Mapping[tuple[str, str], Owner] = {}

    def all(self) -> Mapping[tuple[str, str], Owner]:
        """(namespace, pod) -> its owner."""
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
