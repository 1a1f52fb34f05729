"""Reads the addresses of exporters (EndpointSlices of Services) and data of pods and nodes from the API server."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from podgpu.errors import UsageError
from podgpu.kube.config import ApiConfig
from podgpu.kube.objects import (
    SERVICE_LABEL,
    EndpointSliceRecord,
    KubeObject,
    collection_path,
    merge_urls,
    parse_endpoint_slice,
)
from podgpu.kube.reflector import Informer, ReflectorSettings

K = TypeVar("K")
V = TypeVar("V")
_SYNC_CHECKS = 100  # every 0.1 s; without an error, the first values are awaited for 10 s
_PAGE_SIZE = 500  # as in kubectl; a page has about 500 KB of metadata
_NAMESPACE = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


class ServiceSelector(NamedTuple):
    namespace: str  # empty for all namespaces
    labels: str

    @classmethod
    def parse(cls, text: str) -> ServiceSelector:
        """Parses `[NAMESPACE/]SELECTOR`. Raises UsageError.

        A label name may also contain a slash. The text before the first slash is a namespace if it contains no dot.
        A leading slash means all namespaces.
        """
        before, slash, after = text.strip().partition("/")
        is_namespace = bool(slash) and (not before or _NAMESPACE.fullmatch(before) is not None)
        namespace, labels = (before, after) if is_namespace else ("", text.strip())
        if not labels or not labels.isprintable():
            raise UsageError(
                f"--discover-kubernetes {text!r}: write [NAMESPACE/]LABEL=VALUE with a label of the exporters' Service"
            )
        return cls(namespace, labels)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.labels}" if self.namespace else self.labels


class KubernetesTargets:
    """Lists the exporters that --discover-kubernetes selects. Keeps the last list while the API server is unavailable.

    The list includes endpoints that are not ready, so that a failing exporter stays visible.
    """

    def __init__(
        self,
        config: ApiConfig,
        selector: ServiceSelector,
        *,
        https: bool = False,
        settings: ReflectorSettings | None = None,
    ) -> None:
        """`https`: use HTTPS for all exporters. Otherwise, HTTPS is used only for ports declared as https."""
        self._config = config
        self._selector = selector
        self._https = https
        self._settings = settings
        self._services: Informer[tuple[str, str]] = Informer(
            config,
            collection_path("/api/v1", "services", selector.namespace),
            {"labelSelector": selector.labels},
            lambda body: (body["metadata"]["namespace"], body["metadata"]["name"]),
            settings=settings,
            metadata_only=True,
        )
        self._labelled = self._watch_slices(selector.labels)
        self._unlabelled: Informer[EndpointSliceRecord] | None = None
        """Watches EndpointSlices that lack the selector's labels, if their Service has the labels."""
        self._unlabelled_names: tuple[str, ...] = ()

    def _watch_slices(self, selector: str) -> Informer[EndpointSliceRecord]:
        return Informer(
            self._config,
            collection_path("/apis/discovery.k8s.io/v1", "endpointslices", self._selector.namespace),
            {"labelSelector": selector},
            lambda body: parse_endpoint_slice(body, self._https),
            settings=self._settings,
        )

    def wait_synced(self, timeout: float) -> bool:
        return self._labelled.wait_synced(timeout)

    def urls(self) -> Sequence[str]:
        return merge_urls(self._find_slices())

    def _find_slices(self) -> tuple[EndpointSliceRecord, ...]:
        labelled = self._labelled.items()
        if not self._labelled.synced or not self._services.synced:
            return labelled
        missing = set(self._services.items()) - {record.service for record in labelled}
        names = tuple(sorted({name for _, name in missing}))
        if names != self._unlabelled_names:
            if self._unlabelled is not None:
                self._unlabelled.close()
            self._unlabelled = self._watch_slices(f"{SERVICE_LABEL} in ({','.join(names)})") if names else None
            self._unlabelled_names = names
        others = self._unlabelled.items() if self._unlabelled is not None else ()
        return (*labelled, *(record for record in others if record.service in missing))

    def notes(self) -> Sequence[str]:
        error, slices = self._labelled.error, self._find_slices()
        problems = tuple(dict.fromkeys(record.problem for record in slices if record.problem))
        if error is not None:
            return (f"the list of exporters may be out of date: {error}", *problems)
        if problems or merge_urls(slices):
            return problems
        if not all(one.synced or one.error for one in (self._services, self._labelled, self._unlabelled) if one):
            return ("the API server has not yet returned the list of exporters",)
        return (f"no Service with the labels {self._selector} has an endpoint",)

    def close(self) -> None:
        for informer in (self._services, self._labelled, self._unlabelled):
            if informer is not None:
                informer.close()


@dataclass
class ApiMap(Generic[K, V]):
    """Watches the objects at an API path and reads a key and a value from each. The first `read` starts the watch."""

    config: ApiConfig
    path: str
    parse: Callable[[KubeObject], tuple[K, V] | None]
    what: str  # describes the values in warnings, such as "owners of pods"
    settings: ReflectorSettings | None = None
    _objects: Informer[tuple[K, V]] | None = None

    def read(self) -> dict[K, V]:
        if self._objects is None:
            more: dict[str, Any] = {"settings": self.settings, "metadata_only": True, "page_size": _PAGE_SIZE}
            self._objects = Informer(self.config, self.path, {}, self.parse, **more)
            for _ in range(_SYNC_CHECKS):  # otherwise the first round would not have the values
                if self._objects.wait_synced(0.1) or self._objects.error:
                    break
        return dict(self._objects.items())

    def notes(self) -> Sequence[str]:
        error = self._objects.error if self._objects else None
        return () if error is None else (f"the {self.what} may be out of date: {error}",)

    def close(self) -> None:
        if self._objects is not None:
            self._objects.close()
