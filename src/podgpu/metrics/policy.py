"""Policy says how the user wants series to look."""

from __future__ import annotations

from dataclasses import dataclass

from podgpu.metrics.counters import Counter


@dataclass(frozen=True, eq=False)  # a key of the label caches: by identity, hashing every counter would cost more
class Policy:
    counters: tuple[Counter, ...] = ()
    hostname: str = ""
    """Empty: no host label."""
    hostname_labels: tuple[str, ...] = ("Hostname",)
    """Each has the name: two while dashboards move from one to the other."""
    old_namespace: bool = False
    """dcgm-exporter 1.x label names: uuid, pod_name, pod_namespace, container_name."""
    replace_blanks_in_model_name: bool = False
    pod_uid: bool = False
    """Put pod_uid beside the pod labels, where the uid is known."""
    virtual_gpus: bool = False
    """One series per holder of a shared device (see `own_values`)."""
    copy_parent_values: bool = False
    """Repeat the GPU's own figures on each of its MIG instances, as dcgm-exporter does."""
    gpu_manager: bool = False
    """gpu-manager's container metrics too."""
    process_metrics: str = ""
    """The exporter's own process too (process_*): where /proc is. Empty: without."""
    xid_window_ms: int = 300_000
    clock_window_ms: int = 300_000

    @property
    def host(self) -> tuple[tuple[str, str], ...]:
        return tuple((label, self.hostname) for label in self.hostname_labels) if self.hostname else ()
