"""Reads the addresses of exporters (EndpointSlices of Services) and the owners of pods from the API server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from podgpu.cluster.collect import Owners
from podgpu.errors import UsageError
from podgpu.kube.config import ApiConfig
from podgpu.kube.objects import (
    PODS_PATH,
    EndpointSliceRecord,
    PodOwner,
    endpoint_slices_path,
    merge_urls,
    parse_endpoint_slice,
    parse_owner,
)
from podgpu.kube.reflector import Informer, ReflectorSettings
from podgpu.model import WorkloadOwner

_PODS_PER_PAGE = 500  # the page size of kubectl, about 500 KB of metadata
_NAMESPACE = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


class ServiceSelector(NamedTuple):
    namespace: str  # empty for all namespaces
    labels: str

    @classmethod
    def parse(cls, text: str) -> ServiceSelector:
        """Parses `[NAMESPACE/]SELECTOR`. Raises UsageError.

        The name of a label may contain a slash. The part before the first slash is a namespace if it has no dot.
        A leading slash means all namespaces.
        """
        before, slash, after = text.strip().partition("/")
        is_namespace = bool(slash) and (not before or _NAMESPACE.fullmatch(before) is not None)
        namespace, labels = (before, after) if is_namespace else ("", text.strip())
        if not labels or not labels.isprintable():
            raise UsageError(
                f"--discover-kubernetes {text!r}: write [NAMESPACE/]LABEL=VALUE, the labels of the exporters' Service"
            )
        return cls(namespace, labels)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.labels}" if self.namespace else self.labels


class KubernetesTargets:
    """Implements `Targets` for --discover-kubernetes. While the API server is unavailable, the last list is used.

    The list includes endpoints that are not ready, because a failing exporter must not disappear.
    """

    def __init__(
        self,
        config: ApiConfig,
        selector: ServiceSelector,
        *,
        https: bool = False,
        settings: ReflectorSettings | None = None,
    ) -> None:
        """`https` enables TLS for all ports, not only for those declared as https."""
        self._selector = selector
        self._slices: Informer[EndpointSliceRecord] = Informer(
            config,
            endpoint_slices_path(selector.namespace),
            {"labelSelector": selector.labels},
            lambda body: parse_endpoint_slice(body, https),
            settings=settings,
        )
        self._version = -1
        self._urls: tuple[str, ...] = ()

    def wait_synced(self, timeout: float) -> bool:
        return self._slices.wait_synced(timeout)

    def urls(self) -> Sequence[str]:
        version = self._slices.version
        if version != self._version:
            self._urls, self._version = merge_urls(self._slices.items()), version
        return self._urls

    def notes(self) -> Sequence[str]:
        error = self._slices.error
        problems = tuple(dict.fromkeys(record.problem for record in self._slices.items() if record.problem))
        if error is not None:
            return (f"the list of exporters may be out of date: {error}", *problems)
        if not self._slices.synced:
            return ("the API server has not yet returned the list of exporters",)
        if not self.urls() and not problems:
            return (f"no Service with the labels {self._selector} has an endpoint",)
        return problems

    def close(self) -> None:
        self._slices.close()


class ApiOwners:
    """Owners of all pods, for clusters without kube-state-metrics or Prometheus."""

    def __init__(self, config: ApiConfig, settings: ReflectorSettings | None = None) -> None:
        self._pods: Informer[PodOwner] = Informer(
            config, PODS_PATH, {}, parse_owner, settings=settings, metadata_only=True, page_size=_PODS_PER_PAGE
        )
        self._version = -1
        self._owners: Owners = {}

    def all(self) -> Owners:
        version = self._pods.version
        if version != self._version:
            self._owners = {(pod.namespace, pod.pod): WorkloadOwner(pod.kind, pod.name) for pod in self._pods.items()}
            self._version = version
        return self._owners

    def notes(self) -> Sequence[str]:
        error = self._pods.error
        return () if error is None else (f"the owners of pods may be out of date: {error}",)

    def wait_synced(self, timeout: float) -> bool:
        return self._pods.wait_synced(timeout)

    def close(self) -> None:
        self._pods.close()
