"""Connects to the container runtime, and writes podlist.json in a second thread.

Changes during or shortly after a write are combined into one write. If another program removes or
overwrites the file, the hook restores it. If the file cannot be written, the old file stays, and
the hook tries again every 5 s. While the hook is connected, it updates the time of the file, so
that readers recognise a file that no hook maintains.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec

from podgpu.errors import SourceError, StartError
from podgpu.files import AtomicFile, OutputError, read_bounded
from podgpu.metrics.encode import NO_LABELS, VERSIONS, Family, Sample, make_families
from podgpu.node.holders.node_files import MAX_BYTES, PodlistEntry
from podgpu.node.hook import HookCounters
from podgpu.node.hook.devices import Cards, Sandbox, find_gpus
from podgpu.node.hook.nri import Plugin, PluginName, Session
from podgpu.workers import Workers

_log = logging.getLogger("podgpu")
_RETRY_SECONDS = 0.5  # between two connections
_PAUSE_SECONDS = 0.05  # after a write; changes meanwhile are combined
_CHECK_SECONDS = 5.0  # how often the file is checked without a change
_HEARTBEAT_SECONDS = 20.0  # age of the file at which its time is updated
_STOP_SECONDS = 5.0
_CARDS_INTERVAL = 10.0
_CARDS_DEADLINE = 1.0


@dataclass
class Hook:
    file: AtomicFile  # podlist.json
    read_cards: Callable[[], Cards]
    path: str = "/var/run/nri/nri.sock"  # socket of the runtime
    # If the runtime started the hook: file descriptor of the open connection.
    inherited: int | None = None
    name: PluginName = field(default_factory=PluginName)
    inject: bool = False  # sets NVIDIA_VISIBLE_DEVICES of new containers
    fatal: StartError | None = None  # set if the inherited connection failed

    def __post_init__(self) -> None:
        self._counters = HookCounters()
        self.writer = PodlistWriter(
            self.file, self._counters, self.read_cards, lambda: self.is_synchronised
        )
        self._stopping = threading.Event()
        self._connection: socket.socket | None = None
        self._plugin: Plugin | None = None  # plugin of the open connection
        self._logged = ""  # why the last connection ended

    @property
    def is_synchronised(self) -> bool:
        plugin = self._plugin
        return plugin is not None and plugin.is_synchronised

    def families(self) -> list[Family]:
        plugin = self._plugin
        gauges = {
            "podgpu_hook_synchronised": int(self.is_synchronised),
            "podgpu_hook_containers": 0 if plugin is None else plugin.container_count,
            "podgpu_hook_gpu_containers": self.writer.gpu_containers,
            "podgpu_hook_podlist_up_to_date": int(self.writer.is_up_to_date),
        }

        samples = {name: [Sample(NO_LABELS, value)] for name, value in gauges.items()}
        samples["podgpu_hook_build_info"] = [Sample(VERSIONS, 1)]
        samples |= self._counters.samples()
        return make_families("hook", samples)

    def start(self, on_fatal: Callable[[], object]) -> None:
        """Starts the threads.

        Calls `on_fatal` when an inherited connection ends, because it cannot be opened again.
        """
        self.writer.start()
        run = partial(self._run, on_fatal)
        threading.Thread(target=run, name="hook-runtime", daemon=True).start()

    def reload(self) -> None:
        """Required by the web server. Does nothing, because the hook has no configuration files."""

    def stop(self) -> None:
        """Stops the threads.

        Keeps the file, because containers continue to run without the hook.
        """
        _log.info(
            "stopping; %s stays, because the containers keep running; the exporter ignores it soon "
            "unless a hook is started again; if you uninstall the hook, delete the file",
            self.file.path,
        )

        self._stopping.set()
        connection = self._connection
        if connection is not None:
            _shut(connection)
        self.writer.stop()

    def _run(self, on_end: Callable[[], object]) -> None:
        while not self._stopping.is_set():
            was_synchronised = self._connect_once()
            if self.inherited is not None:
                if not was_synchronised and not self._stopping.is_set():
                    self.fatal = StartError(self._logged)
                on_end()
                return
            self._stopping.wait(_RETRY_SECONDS)

    def _connect_once(self) -> bool:
        """Runs one connection until it ends.

        Returns True if the runtime reported its containers before the end.
        """
        # Without cards, the plugin does not change containers.
        cards = (lambda: self.writer.cards) if self.inject else None
        plugin = Plugin(self.writer.update, self._counters, cards)
        problem = self._serve(plugin)
        if not self._stopping.is_set():
            self._report_end(problem, plugin.is_synchronised)
        return plugin.is_synchronised

    def _serve(self, plugin: Plugin) -> SourceError:
        """Connects, and answers requests until the connection ends. Returns the reason."""
        try:
            self._connection = self._connect()
            self._plugin = plugin
            # `stop` did not see the connection if it was called just before.
            if self._stopping.is_set():
                _shut(self._connection)
            session = Session(self._connection, plugin.answer, self.name, self._counters)
            session.run()
        except SourceError as error:
            return error
        except Exception as error:  # noqa: BLE001 - the thread must continue
            _log.exception("unexpected error, please report it")
            return SourceError("bug", repr(error))
        finally:
            self._connection = None
            self._plugin = None
        return SourceError("connection_ended", "the runtime ended the connection")

    def _report_end(self, problem: SourceError, was_synchronised: bool) -> None:
        message = str(problem)
        # Repeated failures are logged once.
        if was_synchronised or message != self._logged:
            _log.warning(
                "%s; podlist.json stays unchanged until the connection works again", message
            )

        self._logged = message
        self._counters.error(problem.reason)

    def _connect(self) -> socket.socket:
        try:
            if self.inherited is not None:
                return socket.socket(fileno=self.inherited)
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(self.path)
            except OSError:
                connection.close()
                raise
        except OSError as error:
            raise SourceError(
                "no_connection",
                f"cannot connect to the NRI socket {self.path} ({error.strerror}): mount its "
                "directory from the host, run as root (runAsUser: 0), and check that the runtime "
                "enables NRI (containerd 1.7 disables it)",
            ) from error
        return connection


def _shut(connection: socket.socket) -> None:
    """Shuts the connection down, so that a blocked read in another thread ends."""
    with suppress(OSError):  # already closed
        connection.shutdown(socket.SHUT_RDWR)


def encode_podlist(entries: Iterable[PodlistEntry]) -> bytes:
    """Returns the file content: one line per container, sorted."""
    ordered = sorted(entries, key=lambda entry: (entry.namespace, entry.name, entry.container))

    lines = b",\n".join(map(msgspec.json.encode, ordered))
    if not lines:
        return b"[]\n"
    return b"[\n" + lines + b"\n]\n"


class PodlistWriter:
    def __init__(
        self,
        file: AtomicFile,
        counters: HookCounters,
        read_cards: Callable[[], Cards] = Cards,
        is_synchronised: Callable[[], bool] = lambda: True,
    ) -> None:
        self._file = file
        self._counters = counters
        self._read_cards = read_cards
        self._is_synchronised = is_synchronised

        self._workers = Workers()
        self._next_cards_at = 0.0
        self.cards = Cards()

        # None until the runtime has reported all containers. Until then, nothing is written.
        self._sandboxes: tuple[Sandbox, ...] | None = None
        self._logged: set[str] = set()  # the current problems of sandboxes

        self._wake = threading.Event()
        self._stopping = False
        self._failure = ""  # the last message, empty after a success
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
        """Stops the thread after it has written the last update. Waits at most 5 s."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)
        self._workers.close()

    def update_cards(self) -> None:
        """Reads the GPUs, at most every 10 s. Waits at most 1 s, because the driver may hang."""
        if time.monotonic() < self._next_cards_at:
            return

        jobs = {"cards": self._read_cards}
        result = self._workers.run(jobs, _CARDS_DEADLINE, self._wake.set)["cards"]
        if result.value is not None:
            self.cards = result.value
            self._next_cards_at = time.monotonic() + _CARDS_INTERVAL

    def _run(self) -> None:
        stopping = False
        while not stopping:
            self._wake.wait(_CHECK_SECONDS)
            self._wake.clear()
            # Before the write, so that the last update before `stop` is written.
            stopping = self._stopping

            try:
                self.write_changes()
                self._failure = ""
            except OutputError as error:
                self._failed(error.reason, str(error))
            except Exception as error:  # noqa: BLE001 - the thread must continue
                _log.exception("unexpected error, please report it")
                self._failed("bug", repr(error))
            if not stopping:
                time.sleep(_PAUSE_SECONDS)

    def write_changes(self) -> None:
        """Writes the file if its content changed, or else updates its time.

        Raises OutputError if that fails.
        """
        sandboxes = self._sandboxes
        if sandboxes is None:
            return

        self.update_cards()
        content = encode_podlist(self._find_entries(sandboxes))

        current = None
        with suppress(SourceError):
            current = read_bounded(str(self._file.path), MAX_BYTES)

        if current != content:
            # Stays False if the write fails.
            self.is_up_to_date = False
            self._file.write(content)
            self._counters.add("podgpu_hook_podlist_writes_total")
        elif self._is_synchronised() and self._is_heartbeat_due():
            self._file.touch()

        # There may be newer sandboxes already.
        self.is_up_to_date = sandboxes is self._sandboxes

    def _is_heartbeat_due(self) -> bool:
        # The time is in the future if the clock was set back.
        age = time.time() - os.stat(self._file.path).st_mtime
        return abs(age) >= _HEARTBEAT_SECONDS

    def _find_entries(self, sandboxes: Iterable[Sandbox]) -> list[PodlistEntry]:
        """Returns the entries of all pods. Counts and logs new problems."""
        entries = []
        problems: dict[str, str] = {}  # text -> reason
        for sandbox in sandboxes:
            try:
                entries += find_gpus(sandbox, self.cards)
            except SourceError as error:
                problems[str(error)] = error.reason
            except Exception as error:  # noqa: BLE001 - other pods keep their entries
                name = f"{sandbox.pod.namespace}/{sandbox.pod.name}"
                problems[f"pod {name} is skipped, please report this: {error!r}"] = "bug"

        for text in problems.keys() - self._logged:
            self._counters.error(problems[text])
            _log.warning("%s", text)

        self._logged = set(problems)
        self.gpu_containers = len(entries)
        return entries

    def _failed(self, reason: str, message: str) -> None:
        self.is_up_to_date = False
        if self._failure != message:
            self._failure = message
            _log.warning("%s", message)
        self._counters.error(reason)
