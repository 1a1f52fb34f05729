"""Hook is the hook as a whole: it connects to the runtime, hands what that tells to the keeper, and connects again when
it is away."""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from podgpu.atomic_file import AtomicFile
from podgpu.errors import SourceError, StartError
from podgpu.hook.cards import Cards, CardsWatch, read_cards
from podgpu.hook.keeper import PodlistKeeper
from podgpu.hook.plugin import Plugin
from podgpu.hook.sandboxes import Sandbox
from podgpu.hook.session import Session
from podgpu.hook.tallies import State, Tallies
from podgpu.metrics.encode import Family

_log = logging.getLogger("podgpu")
_FIRST_RETRY, _LAST_RETRY = 0.1, 2.0
_CARDS_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Settings:
    socket: str = "/var/run/nri/nri.sock"
    inherited: int | None = None
    """Descriptor of the connection, where the runtime started the hook itself."""
    name: str = "podgpu"
    index: str = "90"
    inject: bool = False
    proc: str = "/proc"


class Hook:
    """What `podgpu hook` runs (`serve.app.Served`)."""

    def __init__(self, settings: Settings, file: AtomicFile, read: Callable[[str], Cards] = read_cards) -> None:
        self._settings = settings
        self._tallies = Tallies()
        self._cards = CardsWatch(partial(read, settings.proc), self._wake)
        self._keeper = PodlistKeeper(file, self._tallies, lambda: self._cards.cards)
        self._stopping = threading.Event()
        self._connection: socket.socket | None = None
        self._plugin: Plugin | None = None
        """Of the connection that stands; pictures of one before it count no more."""
        self._said = ""
        self._fatal: StartError | None = None
        self._thread: threading.Thread | None = None

    @property
    def fatal(self) -> StartError | None:
        """Why the connection a runtime handed over was no good."""
        return self._fatal

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and self._keeper.is_alive

    @property
    def state(self) -> State:
        plugin = self._plugin
        return State(
            is_synchronised=plugin is not None and plugin.is_synchronised,
            is_up_to_date=self._keeper.is_up_to_date,
            containers=plugin.containers if plugin is not None else 0,
            gpu_containers=self._keeper.gpu_containers,
            disagreeing=self._keeper.disagreeing,
        )

    def families(self) -> list[Family]:
        return self._tallies.families(self.state)

    def start(self, on_fatal: Callable[[], object]) -> None:
        """`on_fatal` is called when a runtime that started the hook itself ended the connection: it starts another."""
        self._cards.start()
        self._thread = threading.Thread(target=self._run, args=(on_fatal,), name="hook-runtime", daemon=True)
        self._keeper.start()
        self._thread.start()

    def reload(self) -> None:
        """Nothing is read that could have changed."""

    def stop(self) -> None:
        """The file stays: containers do not end with the hook."""
        self._stopping.set()
        connection = self._connection
        if connection is not None:
            _shut(connection)
        self._cards.stop()
        self._keeper.stop()

    def _wake(self) -> None:
        self._keeper.wake()

    def _run(self, on_end: Callable[[], object]) -> None:
        self._cards.wait_read(_CARDS_SECONDS)  # else the first file would have numbers where the second has UUIDs
        retry = _FIRST_RETRY
        while not self._stopping.is_set():
            was_good = self._connect_once()
            if self._settings.inherited is not None:
                self._fatal = None if was_good or self._stopping.is_set() else StartError(self._said)
                on_end()
                return
            retry = _FIRST_RETRY if was_good else retry
            self._stopping.wait(retry)
            retry = min(2 * retry, _LAST_RETRY)

    def _connect_once(self) -> bool:
        """Whether the runtime told of its containers before the connection ended."""
        plugin = Plugin(self._offered, self._tallies, lambda: self._cards.cards, self._settings.inject)
        try:
            self._connection = self._connect()
            self._plugin = plugin
            if self._stopping.is_set():
                _shut(self._connection)
            name = self._settings.name, self._settings.index
            Session(self._connection, plugin, name, self._tallies).run()
            self._ended("connection_ended", "the runtime ended the connection", plugin)
        except SourceError as error:
            self._ended(error.reason, str(error), plugin)
        except Exception as error:  # noqa: BLE001 - the edge: without this thread the file would stand still for ever
            _log.exception("unexpected error, please report it")
            self._ended("bug", f"{type(error).__name__}: {error}", plugin)
        finally:
            self._connection = self._plugin = None
        return plugin.is_synchronised

    def _offered(self, plugin: Plugin, picture: tuple[Sandbox, ...]) -> None:
        if plugin is self._plugin:
            self._keeper.offer(picture)

    def _ended(self, reason: str, message: str, plugin: Plugin) -> None:
        """Counted every time; said once, however often it is tried, until a connection was good again."""
        if self._stopping.is_set():
            return
        if plugin.is_synchronised or message != self._said:
            _log.warning("%s; podlist.json stays as it is until the runtime is back", message)
        self._said = message
        self._tallies.error(reason)

    def _connect(self) -> socket.socket:
        inherited, path = self._settings.inherited, self._settings.socket
        try:
            if inherited is not None:
                return socket.socket(fileno=inherited)
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise _explain(error, f"descriptor {inherited}") from error
        try:
            connection.connect(path)
        except OSError as error:
            connection.close()
            raise _explain(error, path) from error
        return connection


def _shut(connection: socket.socket) -> None:
    """Ends a reading that waits, in whatever thread."""
    with suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)


def _explain(error: OSError, path: str) -> SourceError:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return SourceError(
            "no_socket",
            f"there is no NRI socket {path}: mount the host's directory that holds it, and see that NRI is switched on"
            " in the runtime (in containerd 1.7 it is off by default)",
        )
    if error.errno == errno.ECONNREFUSED:
        return SourceError("no_runtime", f"nothing listens at {path}: the runtime is stopped, or starting")
    if error.errno in (errno.EACCES, errno.EPERM):
        return SourceError("permission_denied", f"not allowed to connect to {path}: it is root's (runAsUser: 0)")
    return SourceError("no_connection", f"cannot connect to {path} ({error.strerror or error})")
