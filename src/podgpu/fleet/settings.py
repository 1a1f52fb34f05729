"""Settings of the cluster view: its options, with their checks and their texts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from podgpu.errors import UsageError
from podgpu.fleet.setup import SetupHint
from podgpu.metrics.fields import meaning, nearest_names

MAX_ROUNDS = 1000  # limit of --window divided by --interval; bounds the memory of the rolling means
# Milliseconds of each unit.
_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1))


@dataclass(frozen=True)
class ViewSettings:
    """Options of the cluster view. Times are in seconds."""

    interval: float = 15.0
    # nodes with an older reading are stale: means and counts exclude them
    stale_after: float = 45.0
    # nodes with an older reading are dropped, unless their exporter is still listed
    drop_after: float = 300.0
    used_field: str = "DCGM_FI_DEV_MEM_COPY_UTIL"
    extra_fields: tuple[str, ...] = ()  # fields that `podgpu autoscale` needs
    window: float = 300.0
    # a holder idle for longer than this is wasteful; None disables the check
    idle_after: float | None = 1800.0
    # values of a job's GPUs are averaged over this time before they are compared
    compared_seconds: float = 60.0
    legacy_map_metrics: bool = False
    export_tokens: bool = False
    # fail if Prometheus has several clusters, because an HPA names no cluster
    one_cluster: bool = False
    max_gpus: float = math.inf  # with more GPUs in Prometheus, each round reads only totals
    hints: tuple[SetupHint, ...] = ()  # what the options leave out
    savings_skip_namespaces: frozenset[str] = frozenset()

    @cached_property
    def full(self) -> float:
        """Value of --used-field on a fully busy device: 100 for a percentage, 1 for a ratio."""
        return full_scale(self.used_field)

    @cached_property
    def keep_fields(self) -> frozenset[str]:
        """Names of the DCGM fields that collectors store."""
        return frozenset({self.used_field_name, *self.extra_fields})

    @cached_property
    def used_field_name(self) -> str:
        """Key of --used-field in `GpuOrInstance.fields`."""
        spec = meaning(self.used_field)
        if spec:
            return spec.field.name
        return self.used_field


def check_window(option: str, window: float, interval: float) -> None:
    """Raises UsageError if the window has too many readings."""
    if window / interval > MAX_ROUNDS:
        raise UsageError(
            f"{option} {duration_text(window)} has more than {MAX_ROUNDS} readings at --interval "
            f"{duration_text(interval)}: make the window shorter or the interval longer"
        )


def full_scale(field: str) -> float:
    """Returns the field's value on a fully busy device. Raises UsageError if the field is not a
    utilisation.
    """
    spec = meaning(field)
    if spec is None:
        text = f"--used-field {field}: there is no such field"
        near = nearest_names(field)
        if near:
            text += f"; is it {near[0]}?"
        raise UsageError(text)

    if spec.field.unit.startswith("%"):
        return 100.0
    if spec.field.unit.startswith("ratio"):
        return 1.0

    raise UsageError(
        f"--used-field {field} is not a utilisation: choose a field in % or a ratio, such as "
        "DCGM_FI_DEV_GPU_UTIL"
    )


def duration_text(seconds: float) -> str:
    """Formats a duration like Prometheus: 5m, 1h30m, 500ms."""
    milliseconds = round(seconds * 1000)
    text = ""
    for unit, length in _UNITS:
        count, milliseconds = divmod(milliseconds, length)
        if count:
            text += f"{count}{unit}"
    return text or "0s"
