"""Sends writes, and repeats those that failed. A write that waits is replaced by a newer one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from podgpu.clock import FaultLog, double_delay, spread_delay
from podgpu.errors import SourceError

_log = logging.getLogger(__name__)
_FIRST_DELAY = 1.0
_MAX_DELAY = 300.0
_DEADLINE = 10.0  # seconds of one attempt
_MAX_WAITING = 1000  # a node has at most 16 GPUs, with some writes each
_LOG_SECONDS = 3600.0
# Reasons for which the next object would not be written either.
_NO_ANSWER = ("unreachable", "timeout", "tls", "unauthorized")

Send = Callable[[], Awaitable[None]]


class Write(NamedTuple):
    """One object to write. `send` raises SourceError if that fails."""

    writer: str  # such as `events`
    key: str  # identifies the object among those of its writer
    send: Send


@dataclass
class _PendingWrite:
    write: Write
    due: float = float("-inf")  # monotonic time of the next attempt
    failures: int = 0


@dataclass(eq=False)
class WriteQueue:
    """Must be used in one event loop."""

    _clock: Callable[[], float]
    _spread: Callable[[float], float] = spread_delay
    _waiting: dict[tuple[str, str], _PendingWrite] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)  # by writer

    def __post_init__(self) -> None:
        self._faults: FaultLog[str] = FaultLog(self._clock, _LOG_SECONDS)

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, write: Write) -> None:
        """Adds a write. A write of the same object is replaced, and keeps its delay."""
        key = write.writer, write.key
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.write = write
        elif len(self._waiting) < _MAX_WAITING:
            self._waiting[key] = _PendingWrite(write)
        else:
            text = f"more than {_MAX_WAITING} writes wait, so new ones are dropped"
            self._report(write.writer, "queue_full", text)

    async def flush(self) -> None:
        """Sends the writes that are due. A failure delays only the same object.

        If there is no answer, the others wait, too.
        """
        for key, waiting in list(self._waiting.items()):
            # A write may take seconds, so the time is read again for each.
            if waiting.due > self._clock():
                continue

            error = await self._send(waiting.write)
            if error is None:
                del self._waiting[key]
                self._recover(waiting.write.writer)
                continue

            delay = double_delay(waiting.failures, _FIRST_DELAY, _MAX_DELAY)
            waiting.failures += 1
            waiting.due = self._clock() + max(self._spread(delay), error.retry_after)
            self._report(waiting.write.writer, error.reason, str(error))
            if error.reason in _NO_ANSWER:
                self._postpone(waiting.write.writer, waiting.due)

    async def _send(self, write: Write) -> SourceError | None:
        try:
            async with asyncio.timeout(_DEADLINE):
                await write.send()
        except SourceError as error:
            return error
        except TimeoutError:
            return SourceError("timeout", f"no answer within {_DEADLINE:g} s")

        return None

    def _postpone(self, writer: str, due: float) -> None:
        for waiting in self._waiting.values():
            if waiting.write.writer == writer:
                waiting.due = max(waiting.due, due)

    def _report(self, writer: str, reason: str, text: str) -> None:
        self.problems[writer] = text
        if self._faults.fail(writer, reason):
            _log.warning("--write %s: %s; podgpu retries", writer, text)

    def _recover(self, writer: str) -> None:
        for waiting in self._waiting.values():
            if waiting.write.writer == writer and waiting.failures:
                return

        self.problems.pop(writer, None)
        if self._faults.recover(writer):
            _log.info("--write %s: works again", writer)
