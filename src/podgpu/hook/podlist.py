"""Writes podlist.json in its own thread, whenever its content changes.

Changes during a write or shortly after it are combined into one write. A file that was removed or overwritten is
restored. If it cannot be written, the old file stays and the write is retried every 5 s.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import msgspec

from podgpu.errors import SourceError
from podgpu.files import AtomicFile, FileIdentity, OutputError, look_at, read_bounded
from podgpu.holders.node_files import MAX_BYTES, PodlistEntry
from podgpu.hook import HookCounters
from podgpu.hook.devices import Cards, Sandbox, find_gpus
from podgpu.workers import Workers

_log = logging.getLogger("podgpu")
_PAUSE_SECONDS = 0.05
_CHECK_SECONDS = 5.0
_STOP_SECONDS = 5.0
_CARDS_INTERVAL, _CARDS_DEADLINE = 10.0, 1.0


def encode_podlist(entries: Iterable[PodlistEntry]) -> bytes:
    """Returns the file content: one line per container, sorted."""
    ordered = sorted(entries, key=lambda entry: (entry.namespace, entry.name, entry.container))
    lines = b",\n".join(map(msgspec.json.encode, ordered))
    return b"[\n" + lines + b"\n]\n" if lines else b"[]\n"


class PodlistWriter:
    def __init__(self, file: AtomicFile, counters: HookCounters, read_cards: Callable[[], Cards] = Cards) -> None:
        self._file = file
        self._counters = counters
        self._read_cards = read_cards
        self._workers = Workers()
        self._next_cards_at = 0.0
        self.cards = Cards()
        self._sandboxes: tuple[Sandbox, ...] | None = None
        """None until the runtime has reported all containers. The previous file is kept until then."""
        self._logged: set[str] = set()
        self._wake = threading.Event()
        self._stopping = False
        self._identity = self._look()
        self._content: bytes | None = None
        with suppress(SourceError):
            self._content = read_bounded(str(file.path), MAX_BYTES)
        self._failure = ""
        self.is_up_to_date = False
        self.gpu_containers = 0
        self._thread = threading.Thread(target=self._run, name="hook-podlist", daemon=True)

    def start(self) -> None:
        self.update_cards()
        self._thread.start()

    def update(self, sandboxes: tuple[Sandbox, ...]) -> None:
        """Sets the sandboxes to write. Does not block."""
        self._sandboxes = sandboxes
        self._wake.set()

    def stop(self) -> None:
        """Stops the thread after the last update is written, but waits only a few seconds."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)
        self._workers.close()

    def update_cards(self) -> None:
        """Waits for a second at most, because the driver may hang. A late answer is used when it arrives."""
        if time.monotonic() < self._next_cards_at:
            return
        result = self._workers.run({"cards": self._read_cards}, _CARDS_DEADLINE, self._wake.set)["cards"]
        if result.value is not None:
            self.cards = result.value
            self._next_cards_at = time.monotonic() + _CARDS_INTERVAL

    def _run(self) -> None:
        stopping = False
        while not stopping:
            self._wake.wait(_CHECK_SECONDS)
            self._wake.clear()
            stopping = self._stopping
            try:
                self.write_changes()
            except OutputError as error:
                self._failed(error.reason, str(error))
            except Exception as error:  # noqa: BLE001 - the thread must continue
                _log.exception("unexpected error, please report it")
                self._failed("bug", f"{type(error).__name__}: {error}")
            if not stopping:
                time.sleep(_PAUSE_SECONDS)

    def write_changes(self) -> None:
        """Writes the file if its content changed. Raises OutputError; the old file is then unchanged."""
        sandboxes = self._sandboxes
        if sandboxes is None:
            return
        self.update_cards()
        entries: list[PodlistEntry] = []
        problems: dict[str, str] = {}  # text -> reason
        for sandbox in sandboxes:
            try:
                entries += find_gpus(sandbox, self.cards)
            except SourceError as error:
                problems[str(error)] = error.reason
            except Exception as error:  # noqa: BLE001 - one pod must not remove the entries of others
                problems[
                    f"pod {sandbox.pod.namespace}/{sandbox.pod.name} is skipped, please report this: {error!r}"
                ] = "bug"
        for text in problems.keys() - self._logged:
            self._counters.error(problems[text])
            _log.warning("%s", text)
        self._logged = set(problems)
        self.gpu_containers = len(entries)
        self._write(encode_podlist(entries))
        self.is_up_to_date = sandboxes is self._sandboxes

    def _write(self, content: bytes) -> None:
        if content == self._content and self._identity is not None and self._identity == self._look():
            return
        self.is_up_to_date = False
        self._file.write(content)
        self._counters.add("podgpu_hook_podlist_writes_total")
        self._content, self._identity = content, self._look()
        if self._failure:
            _log.info("%s: writing works again", self._file.path)
            self._failure = ""

    def _failed(self, reason: str, message: str) -> None:
        self.is_up_to_date = False
        if self._failure != message:
            self._failure = message
            _log.warning("%s", message)
        self._counters.error(reason)

    def _look(self) -> FileIdentity | None:
        try:
            return look_at(str(self._file.path))
        except SourceError:
            return None
