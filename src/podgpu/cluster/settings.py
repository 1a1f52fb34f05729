"""This module has what the user chose for the view: when data is old, what "in use" means, how long a window is.

Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from podgpu.errors import UsageError
from podgpu.metrics.fields import nearest_names
from podgpu.metrics.names import meaning

UsedMeans = Literal["busy", "allocated", "processes"]
MOST_ROUNDS = 1000
"""In one window: each scope keeps a figure per round, and a thousand nodes are a thousand scopes."""
_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1))


@dataclass(frozen=True, slots=True)
class ViewSettings:
    interval: float = 15.0
    """Seconds between rounds; all times here are in seconds."""
    stale_after: float = 45.0
    """A node not heard of for longer is old: shown and marked, in no average and no count of use."""
    drop_after: float = 300.0
    """A node not heard of for longer is gone."""
    used_means: UsedMeans = "busy"
    used_field: str = "DCGM_FI_DEV_MEM_COPY_UTIL"
    """What `DeviceFigures.measured` is."""
    fields_beside: tuple[int, ...] = ()
    """What `DeviceFigures.beside` has, by number."""
    window: float = 300.0
    idle_after: float = 1800.0
    """A holder idle for longer is a waste."""
    legacy_map_metrics: bool = False

    @property
    def full(self) -> float:
        """What the used field reads on a device that is busy all the time: 100 of %, 1 of a ratio that has no %."""
        return full_scale(self.used_field)


def check_settings(settings: ViewSettings) -> ViewSettings:
    """The same settings. Raises UsageError for what cannot be meant."""
    full_scale(settings.used_field)
    if settings.window / settings.interval > MOST_ROUNDS:
        raise UsageError(
            f"--window {duration_text(settings.window)} holds more than {MOST_ROUNDS} rounds of --interval "
            f"{duration_text(settings.interval)}: make the window shorter or the interval longer"
        )
    if settings.drop_after < settings.stale_after:
        raise UsageError(
            f"--drop-after {duration_text(settings.drop_after)} is shorter than --stale-after "
            f"{duration_text(settings.stale_after)}: a node is old before it is dropped"
        )
    return settings


def full_scale(field: str) -> float:
    """Raises UsageError for a field that is no utilisation."""
    known = meaning(field)
    if known is None:
        near = nearest_names(field)
        raise UsageError(f"--used-field {field}: there is no such field{f'; is it {near[0]}?' if near else ''}")
    if known.field.unit.startswith("%"):
        return 100.0
    if known.field.unit.startswith("ratio"):
        return 1.0
    raise UsageError(
        f"--used-field {field} is not a utilisation: choose a field in % or a ratio, such as DCGM_FI_DEV_GPU_UTIL"
    )


def duration_text(seconds: float) -> str:
    """As Prometheus writes it: 5m, 1h30m, 500ms."""
    rest = round(seconds * 1000)
    parts = []
    for unit, length in _UNITS:
        count, rest = divmod(rest, length)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"
