"""RollCall meets the GPUs that the driver lists, each in a thread of its own: nobody waits for one that hangs there.

Who fails is asked again, ever more rarely; who answers late is met late.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from podgpu.errors import DriverGone, SourceError, StartError
from podgpu.gpu.nvml.driver import NvmlDriver
from podgpu.gpu.nvml.gpu import meet
from podgpu.model import Device

_QUIET_SECONDS = 0.5
"""Who has not answered this long after the last that did is not waited for, within the shortest deadline; nor half as
long again as the others took: a driver that is not kept loaded takes a second or two for each GPU."""
_LONGEST_WAIT = 4.5
"""Seconds, within the deadline that there is as a rule."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0

Met = tuple[Any, Device]
"""A handle, and the GPU it stands for."""


@dataclass(slots=True)
class _Call:
    """To one GPU."""

    began: float
    pending: bool = True
    met: Met | None = None
    error: SourceError | StartError | None = None
    pause: float = _FIRST_PAUSE


class RollCall:
    def __init__(self, driver: NvmlDriver, count: int, clock: Callable[[], float]) -> None:
        self._driver = driver
        self._clock = clock
        self._answered = threading.Condition()
        self._calls = {index: _Call(clock()) for index in range(count)}
        self._waited = False
        for index, call in self._calls.items():
            self._ask(index, call)

    def wait(self) -> None:
        """The first time, for all who answer soon. Raises StartError, and DriverGone when that is all they say."""
        with self._answered:
            began = time.monotonic()
            while not self._waited:
                before, took = self._pending(), time.monotonic() - began
                patience = max(_QUIET_SECONDS, 1.5 * took) if before < len(self._calls) else _LONGEST_WAIT
                left = min(patience, _LONGEST_WAIT - took)
                self._waited = not before or not self._answered.wait_for(partial(self._fewer_than, before), left)
        errors = [call.error for call in self._calls.values()]
        for error in errors:
            if isinstance(error, StartError):
                raise error
        if errors and all(isinstance(error, DriverGone) for error in errors):
            raise errors[0]  # type: ignore[misc] # it was just seen to be one

    def ask_again(self) -> None:
        """Those who failed, when their pause is over."""
        now = self._clock()
        for index, call in self._calls.items():
            if call.error is not None and not call.pending and now - call.began >= call.pause:
                call.began, call.pending, call.pause = now, True, min(2 * call.pause, _LONGEST_PAUSE)
                self._ask(index, call)

    @property
    def met(self) -> list[Met]:
        """By index."""
        return [call.met for call in self._calls.values() if call.met is not None]

    @property
    def unmet(self) -> dict[int, str]:
        """Index -> why."""
        return {index: self._why(call) for index, call in self._calls.items() if call.met is None}

    @property
    def hung(self) -> frozenset[int]:
        """Indices of those of whom nothing was heard yet."""
        return frozenset(index for index, call in self._calls.items() if call.met is None and call.error is None)

    @property
    def failed(self) -> int:
        """How many said that they cannot answer: who has not said anything may be well."""
        return sum(call.error is not None for call in self._calls.values())

    def _pending(self) -> int:
        return sum(call.pending for call in self._calls.values())

    def _fewer_than(self, before: int) -> bool:
        return self._pending() < before

    def _why(self, call: _Call) -> str:
        if call.error is not None:
            return str(call.error)
        return f"the driver has not named it for {self._clock() - call.began:.0f} s"

    def _ask(self, index: int, call: _Call) -> None:
        threading.Thread(target=self._meet, args=(index, call), name=f"meet-gpu{index}", daemon=True).start()

    def _meet(self, index: int, call: _Call) -> None:
        met: Met | None = None
        error: SourceError | StartError | None = None
        try:
            with self._driver.using():
                met = meet(self._driver, index)
        except (SourceError, StartError) as e:
            error = e
        finally:
            with self._answered:
                call.met, call.error, call.pending = met, error, False
                self._answered.notify_all()
