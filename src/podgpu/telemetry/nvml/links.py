"""LinkStates asks a GPU how many of its NVLinks are up: one call for all of them, and that seldom."""

from __future__ import annotations

from collections.abc import Callable

import pynvml

from podgpu.errors import DeviceLost, DriverGone, SourceError
from podgpu.telemetry.nvml.driver import Grip, NvmlDriver

_STATE = pynvml.NVML_FI_DEV_NVLINK_GET_STATE
_MOST_LINKS = 36
_LOOK_SECONDS = 25.0
"""A link that went down is seen after this long: at default intervals by the next reading."""


class LinkStates:
    """Of one GPU; asked from the worker that reads it."""

    def __init__(self, driver: NvmlDriver, grip: Grip, clock: Callable[[], float]) -> None:
        self._driver = driver
        self._grip = grip
        self._clock = clock
        self._asked_at = float("-inf")
        self._asked_with = 0
        self._count = _MOST_LINKS
        """Links to ask about: those the GPU said it has. 0: it has none, and is not asked until it is met anew."""
        self._up: int | None = None

    def read(self) -> int | None:
        """How many are up; None: it has none, or cannot tell. Raises DeviceLost and DriverGone."""
        if self._asked_with != self._grip.taken:
            self._asked_with, self._count, self._asked_at = self._grip.taken, _MOST_LINKS, float("-inf")
        now = self._clock()
        if self._count and now - self._asked_at >= _LOOK_SECONDS:
            self._asked_at = now
            self._up = self._ask()
        return self._up

    def _ask(self) -> int | None:
        asked = [(_STATE, link) for link in range(self._count)]
        try:
            answer = self._driver.call("nvmlDeviceGetFieldValues", self._grip, asked)
        except (DeviceLost, DriverGone):
            raise
        except SourceError:
            return None
        known = {link: entry.value.uiVal for link, entry in enumerate(answer) if not entry.nvmlReturn}
        if self._count == _MOST_LINKS:
            self._count = max(known, default=-1) + 1
        return sum(state == 1 for state in known.values()) if known else None
