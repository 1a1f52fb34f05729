"""Connects to the runtime, passes its containers to the podlist writer, and reconnects."""

from __future__ import annotations

import errno
import logging
import platform
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from podgpu import __version__
from podgpu.errors import SourceError, StartError
from podgpu.files import AtomicFile
from podgpu.hook import HookCounters
from podgpu.hook.devices import Cards, read_cards
from podgpu.hook.nri import Session
from podgpu.hook.plugin import Plugin
from podgpu.hook.podlist import PodlistWriter
from podgpu.metrics.encode import NO_LABELS, Family, Labels, Sample, make_families

_log = logging.getLogger("podgpu")
_RETRY_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class HookSettings:
    socket: str = "/var/run/nri/nri.sock"
    inherited: int | None = None  # descriptor of the connection, if the runtime started the hook
    name: str = "podgpu"
    index: str = "90"
    inject: bool = False
    proc: str = "/proc"


class Hook:
    """The service that `podgpu hook` runs."""

    def __init__(self, settings: HookSettings, file: AtomicFile, read: Callable[[str], Cards] = read_cards) -> None:
        self._settings = settings
        self._counters = HookCounters()
        self._writer = PodlistWriter(file, self._counters, partial(read, settings.proc))
        self._stopping = threading.Event()
        self._connection: socket.socket | None = None
        self._plugin: Plugin | None = None  # plugin of the open connection
        self._logged = ""
        self.fatal: StartError | None = None  # set if the inherited connection failed

    @property
    def is_synchronised(self) -> bool:
        plugin = self._plugin
        return plugin is not None and plugin.is_synchronised

    @property
    def is_up_to_date(self) -> bool:
        return self._writer.is_up_to_date

    def families(self) -> list[Family]:
        plugin = self._plugin
        build = Labels((("version", __version__), ("python_version", platform.python_version())))
        gauges = {
            "podgpu_hook_synchronised": int(self.is_synchronised),
            "podgpu_hook_containers": plugin.containers if plugin is not None else 0,
            "podgpu_hook_gpu_containers": self._writer.gpu_containers,
            "podgpu_hook_podlist_up_to_date": int(self.is_up_to_date),
        }
        samples = {name: [Sample(NO_LABELS, value)] for name, value in gauges.items()}
        samples["podgpu_hook_build_info"] = [Sample(build, 1)]
        return make_families("hook", {**samples, **self._counters.samples()})

    def start(self, on_fatal: Callable[[], object]) -> None:
        """Calls `on_fatal` when an inherited connection ends, because only the runtime can open a new one."""
        self._writer.start()
        threading.Thread(target=self._run, args=(on_fatal,), name="hook-runtime", daemon=True).start()

    def reload(self) -> None:
        """Does nothing, because the hook has no configuration files."""

    def stop(self) -> None:
        """Stops the threads. Does not remove the file, because containers continue to run without the hook."""
        self._stopping.set()
        connection = self._connection
        if connection is not None:
            _shut(connection)
        self._writer.stop()

    def _run(self, on_end: Callable[[], object]) -> None:
        while not self._stopping.is_set():
            was_good = self._connect_once()
            if self._settings.inherited is not None:
                self.fatal = None if was_good or self._stopping.is_set() else StartError(self._logged)
                on_end()
                return
            self._stopping.wait(_RETRY_SECONDS)

    def _connect_once(self) -> bool:
        """Returns True if the runtime reported its containers before the connection ended."""
        cards = (lambda: self._writer.cards) if self._settings.inject else None
        plugin = Plugin(self._writer.update, self._counters, cards)
        try:
            self._connection = self._connect()
            self._plugin = plugin
            if self._stopping.is_set():
                _shut(self._connection)
            name = self._settings.name, self._settings.index
            Session(self._connection, plugin.answer, name, self._counters).run()
            self._ended("connection_ended", "the runtime ended the connection", plugin)
        except SourceError as error:
            self._ended(error.reason, str(error), plugin)
        except Exception as error:  # noqa: BLE001 - without this thread the file would never change again
            _log.exception("unexpected error, please report it")
            self._ended("bug", f"{type(error).__name__}: {error}", plugin)
        finally:
            self._connection = self._plugin = None
        return plugin.is_synchronised

    def _ended(self, reason: str, message: str, plugin: Plugin) -> None:
        """Counts every failure. Logs it only once until a connection works again."""
        if self._stopping.is_set():
            return
        if plugin.is_synchronised or message != self._logged:
            _log.warning("%s; podlist.json stays unchanged until the connection works again", message)
        self._logged = message
        self._counters.error(reason)

    def _connect(self) -> socket.socket:
        inherited, path = self._settings.inherited, self._settings.socket
        try:
            if inherited is not None:
                path = f"descriptor {inherited}"
                return socket.socket(fileno=inherited)
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(path)
            except OSError:
                connection.close()
                raise
        except OSError as error:
            raise _explain(error, path) from error
        return connection


def _shut(connection: socket.socket) -> None:
    """Shuts the connection down, which ends a blocked read in another thread."""
    with suppress(OSError):  # already closed
        connection.shutdown(socket.SHUT_RDWR)


def _explain(error: OSError, path: str) -> SourceError:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return SourceError(
            "no_socket",
            f"there is no NRI socket {path}: mount its directory from the host, and check that NRI is enabled"
            " in the runtime (containerd 1.7 disables it by default)",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return SourceError("permission_denied", f"no permission to connect to {path}: run as root (runAsUser: 0)")
    return SourceError("no_connection", f"cannot connect to {path} ({error.strerror}): the runtime may be stopped")
