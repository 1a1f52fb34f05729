"""This module says how this process behaves, whatever it does: what its log lines look like, how it manages memory, how
its threads take turns, when it ends, and which node it is on.

Lines are text for people or JSON for collectors, and go to standard error; what was asked for does not.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from podgpu.errors import one_line

_M_ARENA_MAX = -8
_NEW_OBJECTS = 5_000
"""Looking at so many takes half a millisecond where none is garbage and ten where all are, as after strangers were let
go by the hundred; no other thread runs meanwhile."""
_TURN_SECONDS = 0.0005
_ENDING = "_call_connection_lost"
_HELD_BY = frozenset({"_read_ready_cb", "_write_ready"})
"""What asyncio names these things; a Python that names them otherwise is left as it is."""
_SETTLED_SECONDS = 20.0
"""Every cadence but telemetry's at its slowest has turned by then, and somebody has scraped."""


def node_name(elsewhere: str = "") -> str:
    """Of the node this process is on, or of another whose figures it has."""
    return os.environ.get("NODE_NAME") or elsewhere or socket.gethostname()


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = f"{_time(record)} {record.levelname:<7} {one_line(record.getMessage())}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        text = json.dumps(entry, ensure_ascii=False)  # it escapes of ASCII alone what tells a terminal something
        return text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def _is_for_us(record: logging.LogRecord) -> bool:
    """A request that is no HTTP is its sender's affair: any port scanner would fill the log with tracebacks."""
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__module__ != "aiohttp.http_exceptions"


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def configure_logging(log_format: str, debug: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if log_format == "json" else _Text())
    logging.basicConfig(level=logging.DEBUG if debug else logging.INFO, handlers=[handler], force=True)
    for noisy in ("asyncio", "aiohttp.access", "grpc"):
        logging.getLogger(noisy).setLevel(logging.INFO if debug else logging.WARNING)
    server = logging.getLogger("aiohttp.server")
    (server.removeFilter if debug else server.addFilter)(_is_for_us)


# Memory, and whose turn it is


def share_one_heap() -> None:
    """Before any thread begins: glibc gives every thread a heap of its own, about 2 MiB with a thread for each GPU.

    Where the C library is another one there is nothing to do.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def give_back_unused() -> None:
    """What starting took and nobody holds any more: 12 MiB where modules were compiled on the way, as without `.pyc`
    files, since glibc keeps what lies below anything that is in use."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def give_back_once_settled() -> None:
    """Opening the driver and the first turns take and let go of another MiB."""
    timer = threading.Timer(_SETTLED_SECONDS, give_back_unused)
    timer.daemon = True
    timer.name = "give-back"
    timer.start()


def look_for_cycles_seldom() -> None:
    """A round over thousands of GPUs makes objects by the hundred thousand, none in a cycle; looking for cycles after
    every 700 of them, as Python does, takes a third of the round."""
    gc.set_threshold(_NEW_OBJECTS, 2, 2000)


def look_past_what_stays() -> None:
    """Once all is put together: modules and classes are no garbage, and looking through them takes 30 ms, in which no
    scrape is answered. What only making them left behind is; half a MiB of it was set aside while they were loaded."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    give_back_unused()


def let_go_of_what_ended() -> None:
    """asyncio's transports hold themselves by the functions they call: until 3.12 every connection that ends is garbage
    for the collector, from then on every one that is cut off (cpython gh-87745). Five minutes of strangers
    were 330,000 objects at once, and 0.8 s of looking for them, in which no scrape was answered."""
    from asyncio import selector_events

    kind: Any = getattr(selector_events, "_SelectorSocketTransport", None)
    end = getattr(kind, _ENDING, None)
    if end is None:
        return

    def end_whole(transport: object, error: Exception | None) -> None:
        try:
            end(transport, error)
        finally:
            vars(transport).update(dict.fromkeys(_HELD_BY & vars(transport).keys()))

    setattr(kind, _ENDING, end_whole)


def take_turns_often() -> None:
    """Beside a thread that works, an answer waits for its turn half a dozen times, 5 ms each as Python has it."""
    sys.setswitchinterval(_TURN_SECONDS)


# When it ends, where there is no web server to say so


def stop_on_signal() -> threading.Event:
    """What SIGTERM and SIGINT set from now on."""
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    return stopping
