"""DcgmSession keeps one connection to DCGM, inside this process or to a host engine, and comes back after a loss.

Every group of calls stands in `using`, so that nothing is torn down under a call.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from ctypes import byref
from dataclasses import dataclass
from typing import Any

from podgpu.errors import DriverGone, SourceError, UsageError
from podgpu.gpu.dcgm import structs as s
from podgpu.gpu.dcgm.library import DcgmLibrary, parse_version, shown, versioned
from podgpu.gpu.gate import Gate

_log = logging.getLogger(__name__)
DEFAULT_PORT = 5555
LOG_LEVELS = ("NONE", "FATAL", "ERROR", "WARN", "INFO", "DEBUG", "VERB")
_CONNECT_MS = 2000
_FIRST_DELAY, _LONGEST_DELAY = 1.0, 30.0
_HOST_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]/]+)(?::(?P<port>\d{1,5}))?")
_VSOCK = re.compile(r"vsock://\d{1,10}:\d{1,10}")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a host engine listens."""

    text: str
    """As libdcgm takes it."""
    host: str = ""
    """Empty: a unix socket."""

    @property
    def is_local(self) -> bool:
        return self.host in ("", "localhost", "::1") or self.host.startswith("127.")


def parse_address(text: str) -> Address:
    """HOST, HOST:PORT, [IPV6]:PORT, with or without tcp://, unix:///path or vsock://CID:PORT. Raises UsageError."""
    if text.startswith("unix://"):
        path = text.removeprefix("unix://")
        if not path.startswith("/"):
            raise UsageError(f"-r {text!r}: a socket's path is absolute, as in unix:///run/nv-hostengine.sock")
        return Address(path)
    if m := _VSOCK.fullmatch(text):
        return Address(text, "localhost")  # as libdcgm takes it; the host's name is this machine's, as there
    m = _HOST_PORT.fullmatch(text.removeprefix("tcp://"))
    if m is None or not 0 < int(m["port"] or DEFAULT_PORT) < 65536:
        raise UsageError(
            f"-r {text!r}: write HOST:PORT, [IPV6]:PORT, unix:///path or vsock://CID:PORT of the host engine"
        )
    return Address(f"{m['host']}:{int(m['port'] or DEFAULT_PORT)}", m["host"].strip("[]"))


class DcgmSession:
    def __init__(
        self,
        address: Address | None = None,
        library_path: str = "",
        log_level: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without an address an engine runs inside this process. `log_level` empty: DCGM logs nothing."""
        self._address = address
        self._library_path = library_path
        self._log_level = log_level
        self._clock = clock
        self._library: DcgmLibrary | None = None
        self.engine_version: tuple[int, ...] = ()
        self._handle = 0
        self.lost = False
        """A call found the connection gone: to be closed and opened again."""
        self._gate = Gate("DCGM")
        self.using = self._gate.passed
        """Around every group of calls, so that `close` never pulls the connection away under one."""
        self._life = threading.Lock()
        self._delay = _FIRST_DELAY
        self._retry_at = float("-inf")
        self._failure: SourceError | None = None
        self._warned_of: tuple[int, ...] = ()

    @property
    def is_open(self) -> bool:
        return self._gate.is_open

    @property
    def library(self) -> DcgmLibrary:
        if self._library is None:
            raise DriverGone("libdcgm is not loaded", "library_not_found")
        return self._library

    @property
    def library_version(self) -> tuple[int, ...]:
        return self._library.version if self._library is not None else ()

    # -- life ----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Connect, or start the engine. After a failure only once the back-off has passed. Raises SourceError."""
        with self._life:
            if self._gate.is_open:
                return
            if self._failure is not None and self._clock() < self._retry_at:
                raise DriverGone(str(self._failure), self._failure.reason)
            try:
                self._connect()
            except SourceError as e:
                self._failure = e
                self._back_off()
                raise
            self._failure, self._delay, self.lost = None, _FIRST_DELAY, False
            self._gate.open()

    def _back_off(self) -> None:
        self._retry_at = self._clock() + self._delay
        self._delay = min(2 * self._delay, _LONGEST_DELAY)

    def _connect(self) -> None:
        if self._library is None:
            self._set_log_variables()
            self._library = DcgmLibrary(self._library_path)
        self._library.call("dcgmInit")
        try:
            self._handle = self._start_embedded() if self._address is None else self._connect_to(self._address)
            try:
                self._check_versions()
            except SourceError:
                self._leave()
                raise
        except SourceError:
            with suppress(SourceError):
                self._library.call("dcgmShutdown")
            raise

    def _set_log_variables(self) -> None:
        if self._log_level:
            os.environ.setdefault("__DCGM_DBG_FILE", "-")
            os.environ["__DCGM_DBG_LVL"] = self._log_level

    def _start_embedded(self) -> int:
        parameters = versioned(s.StartEmbeddedV2Params)
        parameters.opMode = s.MODE_AUTO
        parameters.severity = LOG_LEVELS.index(self._log_level or "NONE")
        self.library.call("dcgmStartEmbedded_v2", byref(parameters))
        return int(parameters.dcgmHandle)

    def _connect_to(self, address: Address) -> int:
        parameters, handle = versioned(s.ConnectV2Params), s.Handle()
        parameters.timeoutMs, parameters.addressIsUnixSocket = _CONNECT_MS, int(not address.host)
        try:
            self.library.call("dcgmConnect_v2", address.text.encode(), byref(parameters), byref(handle))
        except SourceError as e:
            if e.reason == "version_mismatch":
                raise self._mismatch() from e
            raise DriverGone(
                f"no host engine answers at {address.text}: see that nv-hostengine runs there and listens on that "
                "address (nv-hostengine -b ALL), or leave -r out",
                "host_engine_unreachable",
            ) from e
        return handle.value

    def _check_versions(self) -> None:
        """Of two majors the structures differ; a library older than the engine only lacks what is new."""
        info = versioned(s.VersionInfo)
        try:
            self.library.call("dcgmHostengineVersionInfo", self._handle, byref(info))
        except SourceError as e:
            if e.reason == "version_mismatch":
                raise self._mismatch() from e
            raise
        self.engine_version = parse_version(info.text)
        ours = self.library.version
        if not ours or not self.engine_version:
            return
        if ours[0] != self.engine_version[0]:
            raise self._mismatch()
        if ours < self.engine_version and self._warned_of != self.engine_version:
            self._warned_of = self.engine_version
            _log.warning(
                "libdcgm %s here is older than the host engine %s: fields that are new there have no series; "
                "update datacenter-gpu-manager in podgpu's image",
                shown(ours),
                shown(self.engine_version),
            )

    def _mismatch(self) -> DriverGone:
        theirs = f"is version {shown(self.engine_version)}" if self.engine_version else "speaks another version"
        return DriverGone(
            f"libdcgm here is version {shown(self.library_version)}, the host engine {theirs}: the major versions must "
            "be the same; name a matching library with --telemetry dcgm:PATH, or update the older of the two",
            "version_mismatch",
        )

    def close(self, wait: float, before: Callable[[], None] = lambda: None) -> bool:
        """Disconnect once no call is in flight; False (and still open) when one does not return in time.

        `before` undoes what was made over the connection, at a moment when nobody can be using it.
        """
        if not self._life.acquire(timeout=wait):
            return False
        try:
            if not self._gate.is_open:
                return True
            if not self._gate.shut(wait):
                return False
            if not self.lost:
                with suppress(SourceError):
                    before()
            self._leave()
            with suppress(SourceError):
                self.library.call("dcgmShutdown")
            return True
        finally:
            self._life.release()

    def _leave(self) -> None:
        with suppress(SourceError):  # what is gone already needs no leave
            self.library.call("dcgmStopEmbedded" if self._address is None else "dcgmDisconnect", self._handle)
        self._handle = 0

    # -- calls ---------------------------------------------------------------------------------------------------

    def call(self, name: str, *arguments: Any) -> None:
        """One call over the connection. Raises Unsupported, DeviceLost, DriverGone or SourceError."""
        try:
            self.library.call(name, self._handle, *arguments)
        except DriverGone as e:
            self.lost = self.lost or e.reason == "connection_lost"
            raise
