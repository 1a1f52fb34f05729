"""This module keeps podlist.json, in a thread of its own: what the runtime told last becomes the file, and only when it
differs.

A change is written at once; what comes while a write is under way, or shortly after it, becomes one write. A file that
somebody took away or wrote over is put back. Where it cannot be written the one before stands, and it is tried again.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from podgpu.atomic_file import AtomicFile, OutputError
from podgpu.errors import SourceError
from podgpu.files import FileIdentity, look_at, read_bounded
from podgpu.holders.podlist import MAX_BYTES
from podgpu.hook.cards import Cards
from podgpu.hook.gpus import Entry, Found, Note, gpus_of_sandbox
from podgpu.hook.sandboxes import Sandbox
from podgpu.hook.tallies import Tallies

_log = logging.getLogger("podgpu")
_PAUSE = 0.05
"""Seconds between two writes."""
_LOOK_EVERY = 5.0
_FIRST_RETRY, _LAST_RETRY = 0.5, 30.0
_STOP_SECONDS = 5.0


def encode_podlist(entries: Iterable[Entry]) -> bytes:
    """The file's bytes, a line for each container: the same for the same entries, in whatever order they were told."""
    plain = (
        {"name": e.name, "namespace": e.namespace, "container": e.container, "gpu_list": list(e.gpus)}
        for e in sorted(entries)
    )
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in plain)
    return f"[\n{lines}\n]\n".encode() if lines else b"[]\n"


class Evaluation:
    """What the sandboxes come to. A sandbox that is as it was is not looked at again."""

    def __init__(self, tallies: Tallies) -> None:
        self._tallies = tallies
        self._cards = Cards()
        self._found: dict[str, tuple[Sandbox, Found]] = {}
        self._said: dict[str, set[str]] = {}

    def of(self, picture: Sequence[Sandbox], cards: Cards) -> list[Found]:
        known = self._found if cards == self._cards else {}
        self._cards = cards
        self._found = {sandbox.id: self._look(sandbox, known.get(sandbox.id)) for sandbox in picture}
        self._said = {id_: words for id_, words in self._said.items() if id_ in self._found}
        return [found for _, found in self._found.values()]

    def _look(self, sandbox: Sandbox, known: tuple[Sandbox, Found] | None) -> tuple[Sandbox, Found]:
        if known is not None and known[0] is sandbox:
            return known
        found = self._try(sandbox)
        said = self._said.get(sandbox.id, set())
        for note in found.notes:
            if note.text not in said:
                self._tallies.error(note.reason)
                _log.warning("%s", note.text)
        if found.notes:
            self._said[sandbox.id] = said | {note.text for note in found.notes}
        return sandbox, found

    def _try(self, sandbox: Sandbox) -> Found:
        try:
            return gpus_of_sandbox(sandbox, self._cards)
        except Exception as error:  # noqa: BLE001 - the edge: one odd pod must not cost the others their entries
            _log.exception("unexpected error, please report it")
            where = f"pod {sandbox.namespace}/{sandbox.name}"
            return Found(notes=(Note("bug", f"{where} is left out: {type(error).__name__}: {error}"),))


class PodlistKeeper:
    def __init__(
        self,
        file: AtomicFile,
        tallies: Tallies,
        cards: Callable[[], Cards] = Cards,
    ) -> None:
        self._file = file
        self._tallies = tallies
        self._cards = cards
        self._evaluation = Evaluation(tallies)
        self._picture: tuple[Sandbox, ...] | None = None
        """None: nothing is known yet, and the file of the hook before stands."""
        self._wake = threading.Event()
        self._ending = False
        self._content, self._identity = _read(file)
        self._failing = ""
        self._retry = _FIRST_RETRY
        self.is_up_to_date = False
        self.gpu_containers = 0
        self.disagreeing = 0
        self._thread = threading.Thread(target=self._keep, name="hook-podlist", daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def offer(self, picture: tuple[Sandbox, ...]) -> None:
        """The newest counts. Waits for nothing."""
        self._picture = picture
        self._wake.set()

    def wake(self) -> None:
        self._wake.set()

    def stop(self) -> None:
        """With what was told written, where that can be done in time."""
        self._ending = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)

    def _keep(self) -> None:
        wait, ending = _LOOK_EVERY, False
        while not ending:
            self._wake.wait(wait)
            self._wake.clear()
            ending = self._ending
            try:
                self.turn()
                wait, self._retry = _LOOK_EVERY, _FIRST_RETRY
            except OutputError as error:
                self._failed(error.reason, str(error))
                wait, self._retry = self._retry, min(2 * self._retry, _LAST_RETRY)
            except Exception as error:  # noqa: BLE001 - the edge: the writing goes on
                _log.exception("unexpected error, please report it")
                self._failed("bug", f"{type(error).__name__}: {error}")
            if not ending:
                time.sleep(_PAUSE)

    def turn(self) -> None:
        """The file as the runtime's last word has it. Raises OutputError, and then the one before stands."""
        picture = self._picture
        if picture is None:
            return
        found = self._evaluation.of(picture, self._cards())
        entries = [entry for of_sandbox in found for entry in of_sandbox.entries]
        self.gpu_containers, self.disagreeing = len(entries), sum(of_sandbox.disagreeing for of_sandbox in found)
        self._write(encode_podlist(entries))
        self.is_up_to_date = picture is self._picture

    def _write(self, content: bytes) -> None:
        if content == self._content and self._identity is not None and self._identity == _identity(self._file):
            return
        self.is_up_to_date = False
        self._file.write(content)
        self._tallies.wrote()
        self._content, self._identity = content, _identity(self._file)
        if self._failing:
            _log.info("%s can be written again", self._file.path)
            self._failing = ""

    def _failed(self, reason: str, message: str) -> None:
        """Counted every time, said once."""
        self.is_up_to_date = False
        if self._failing != message:
            self._failing = message
            _log.warning("%s", message)
        self._tallies.error(reason)


def _identity(file: AtomicFile) -> FileIdentity | None:
    try:
        return look_at(str(file.path))
    except SourceError:
        return None


def _read(file: AtomicFile) -> tuple[bytes | None, FileIdentity | None]:
    """What the hook before left."""
    identity = _identity(file)
    try:
        return read_bounded(str(file.path), MAX_BYTES), identity
    except SourceError:
        return None, None
