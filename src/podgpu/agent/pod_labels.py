"""Selects the pod labels to add to GPU series, and converts their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from podgpu.errors import UsageError
from podgpu.model import PodLabels

if TYPE_CHECKING:  # loaded only if pods are watched
    from podgpu.kube.objects import PodRecord

_INVALID = re.compile(r"[^a-zA-Z0-9_]")


class LabelFilter:
    """As dcgm-exporter: keys that match any of the patterns, unanchored. Without a pattern all keys match."""

    def __init__(self, patterns: str = "") -> None:
        try:
            self._patterns = [re.compile(p) for p in (part.strip() for part in patterns.split(",")) if p]
        except re.error as e:
            raise UsageError(
                f"--kubernetes-pod-label-allowlist-regex {patterns!r}: not a regular expression: {ascii(str(e))[1:-1]}"
            ) from e
        self.allows = lru_cache(maxsize=4096)(self._allows)

    def _allows(self, key: str) -> bool:
        return not self._patterns or any(pattern.search(key) for pattern in self._patterns)

    def of(self, pods: Iterable[PodRecord]) -> PodLabels:
        return {(pod.namespace, pod.name): self._labels(tuple(pod.labels)) for pod in pods}

    def _labels(self, labels: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        """If two keys become the same name, the first one counts."""
        named: dict[str, str] = {}
        for key, value in sorted(labels):
            if self.allows(key):
                named.setdefault(label_name(key), value)
        return tuple(named.items())


def label_name(key: str) -> str:
    """Converts a key to a valid Prometheus label name."""
    name = _INVALID.sub("_", key)
    name = f"_{name}" if name[:1].isdigit() else name
    return f"pod{name}" if name.startswith("__") else name  # Prometheus reserves two underscores
