"""This module decides which of a pod's labels go on its GPUs' series, and under which names. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from podgpu.configuration.bounded_pattern import BoundedPattern
from podgpu.errors import UsageError
from podgpu.model import PodLabels

if TYPE_CHECKING:
    from podgpu.kube.objects import PodRecord

_BAD = re.compile(r"[^a-zA-Z0-9_]")


class LabelFilter:
    """dcgm-exporter's rule: keys that match any of the patterns, unanchored; no pattern lets all keys through."""

    def __init__(self, patterns: str = "") -> None:
        try:
            self._patterns = [BoundedPattern(p) for p in (part.strip() for part in patterns.split(",")) if p]
        except re.error as e:
            raise UsageError(
                f"--kubernetes-pod-label-allowlist-regex {patterns!r}: not a regular expression: {ascii(str(e))[1:-1]}"
            ) from e
        self.allows = lru_cache(maxsize=4096)(self._allows)

    def _allows(self, key: str) -> bool:
        return not self._patterns or any(p.is_in(key) for p in self._patterns)

    def of(self, pods: Iterable[PodRecord]) -> PodLabels:
        return {(pod.namespace, pod.name): self._labels(tuple(pod.labels)) for pod in pods}

    def _labels(self, labels: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        """Keys that fall together once made valid: the first in order stands, the others are left out."""
        named: dict[str, str] = {}
        for key, value in sorted(labels):
            if self.allows(key):
                named.setdefault(label_name(key), value)
        return tuple(named.items())


def label_name(key: str) -> str:
    """A label name Prometheus accepts: bad characters become _, and so does a leading digit's place."""
    name = _BAD.sub("_", key)
    name = f"_{name}" if name[:1].isdigit() else name
    return f"pod{name}" if name.startswith("__") else name  # names with two underscores are Prometheus' own
