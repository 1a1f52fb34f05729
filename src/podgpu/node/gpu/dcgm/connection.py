"""Loads libdcgm, and connects to a DCGM engine inside this process or to a running host engine."""

from __future__ import annotations

import ctypes
import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress
from ctypes import byref
from dataclasses import dataclass
from itertools import product
from typing import Any

from podgpu.errors import DeviceLost, DriverGone, SourceError, Unsupported, UsageError
from podgpu.node.gpu.dcgm import structs as s
from podgpu.workers import DriverLock

_log = logging.getLogger(__name__)
_SONAMES = ("libdcgm.so.4", "libdcgm.so.3")
_FOLDERS = ("/usr/lib64/", "/usr/lib/x86_64-linux-gnu/", "/usr/lib/aarch64-linux-gnu/", "/usr/lib/")
Version = tuple[int, ...]  # a version such as (4, 2, 3); empty if unknown

# Reasons in metrics, by DCGM's return code.
_UNSUPPORTED = {
    -6: "not_supported",
    -13: "unknown_field",
    -17: "no_permission",
    -20: "not_supported",
    -22: "not_supported",
    -29: "no_permission",
    -32: "not_supported",
    -33: "module_not_loaded",
    -36: "profiling_not_supported",
}
_LOST = {-18, -19}
_GONE = {
    -10: "connection_lost",
    -21: "connection_lost",
    -25: "driver_not_loaded",
    -56: "driver_not_loaded",
    -67: "gpus_detached",
}
_OTHER_ERRORS = {
    -11: "timeout",
    -12: "version_mismatch",
    -14: "no_data",
    -15: "stale_data",
    -16: "not_watched",
    -24: "max_limit",
    -49: "insufficient_resources",
}
_REASONS = _UNSUPPORTED | _GONE | _OTHER_ERRORS
_ADVICE = {
    "driver_not_loaded": "; check `nvidia-smi` on the host",
    "gpus_detached": "; attach them again (dcgmi attach)",
}


def _load(path: str) -> ctypes.CDLL:
    """Loads the library at `path`.

    If `path` is empty, loads the newest libdcgm in the loader's path or `_FOLDERS`.
    """
    names = [path]
    if not path:
        # An empty folder stands for the loader's path.
        folders = ("", *_FOLDERS)
        names = [folder + name for name, folder in product(_SONAMES, folders)]

    wanted = path or " or ".join(_SONAMES)
    problem = f"{wanted} was not found"
    for name in names:
        try:
            # RTLD_GLOBAL, because the engine later loads modules that need DCGM's symbols.
            return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError as e:
            # A library that exists but cannot be loaded is the more useful message.
            if os.path.exists(name):
                problem = str(e)

    raise DriverGone(
        f"{problem}: install datacenter-gpu-manager-4-core (libdcgm.so.4) in podgpu's image or on "
        "the host, give its path with --telemetry dcgm:PATH, or use --telemetry nvml, which needs "
        "no DCGM",
        "library_not_found",
    )


def parse_version(text: bytes) -> Version:
    """Parses `version:4.2.3;arch:x86_64;…`."""
    match = re.search(rb"(?:^|;)version:(\d{1,9}(?:\.\d{1,9}){0,3})", text)
    if match is None:
        return ()
    return tuple(map(int, match[1].split(b".")))


def format_version(version: Version) -> str:
    return ".".join(map(str, version)) or "unknown"


def translate(code: int, what: str) -> SourceError:
    """Converts DCGM's return code to an exception. `what`: the call or field that failed."""
    if code in _LOST:
        return DeviceLost(
            f"{what}: the GPU is lost (DCGM {code}); reset the GPU or reboot the node (see dmesg)"
        )

    reason = _REASONS.get(code, f"dcgm_{-code}")
    reason_text = reason.replace("_", " ")
    advice = _ADVICE.get(reason, "")
    text = f"{what}: {reason_text} (DCGM {code}){advice}"

    if code in _UNSUPPORTED:
        return Unsupported(text, reason)
    if code in _GONE:
        return DriverGone(text, reason)
    return SourceError(reason, text)


_DEFAULT_PORT = 5555
_LOG_LEVELS = ("NONE", "FATAL", "ERROR", "WARN", "INFO", "DEBUG", "VERB")
_CONNECT_MS = 2000  # maximum wait for a connection
_HOST_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]/]+)(?::(?P<port>\d{1,5}))?")
_VSOCK = re.compile(r"vsock://\d{1,10}:\d{1,10}")


@dataclass(frozen=True, slots=True)
class EngineAddress:
    text: str  # the address in libdcgm's format
    host: str = ""  # host name or IP address; empty for a Unix socket

    @property
    def is_local(self) -> bool:
        host = self.host.lower()
        return host in ("", "localhost", "::1") or host.startswith("127.")


def parse_address(text: str) -> EngineAddress:
    """Parses [tcp://]HOST[:PORT], unix:///path or vsock://CID:PORT.

    The scheme may be in upper case. Raises UsageError if the address is invalid.
    """
    scheme, separator, rest = text.partition("://")
    address = text
    if separator:
        address = f"{scheme.lower()}://{rest}"

    if address.startswith("unix:///"):
        return EngineAddress(address.removeprefix("unix://"))
    if _VSOCK.fullmatch(address):
        return EngineAddress(address, "localhost")  # libdcgm uses this host name for vsock, too

    match = _HOST_PORT.fullmatch(address.removeprefix("tcp://"))
    port = 0
    if match is not None:
        port = int(match["port"] or _DEFAULT_PORT)
    if match is None or not 0 < port < 65536:
        raise UsageError(
            f"-r {text!r}: the address of the host engine must be HOST:PORT, [IPV6]:PORT, "
            "unix:///path or vsock://CID:PORT"
        )

    host = match["host"]
    return EngineAddress(f"{host}:{port}", host.strip("[]"))


class DcgmConnection:
    def __init__(self, address: EngineAddress | None, library_path: str, log_level: str) -> None:
        """Does not connect.

        `address`: None for an engine inside this process. `log_level`: empty if DCGM must not log.
        """
        self._address = address
        self._library_path = library_path
        self._log_level = log_level
        self._dll: ctypes.CDLL | None = None

        self.library_version: Version = ()
        self.engine_version: Version = ()
        self._handle = s.Handle()
        # True if a call failed because the connection was lost. It must be reopened.
        self.lost = False

        self._lock = DriverLock("DCGM")
        self.hold = self._lock.hold
        """Context manager for calls. It prevents `close` from disconnecting during a call."""

    @property
    def is_open(self) -> bool:
        return self._lock.is_open

    @property
    def major(self) -> int:
        """Major version of the library. If it is unknown, the newest one is assumed."""
        if not self.library_version:
            return 4
        return self.library_version[0]

    @property
    def version(self) -> Version:
        """Version of the library or the engine, whichever is older.

        Empty if one of them is unknown, because an empty tuple is the least one.
        """
        return min(self.library_version, self.engine_version)

    def open(self) -> None:
        """Connects to the host engine, or starts an engine in this process.

        Raises SourceError if this fails.
        """
        self._lock.open(self._connect)

    def close(self, wait: float, free: Callable[[], None]) -> bool:
        """Calls `free`, then disconnects.

        If another call does not return within `wait` seconds, leaves the connection open and
        returns False.
        """

        def stop() -> None:
            # On a lost connection, each call would fail.
            if not self.lost:
                with suppress(SourceError):
                    free()
            self._disconnect()

        return self._lock.close(wait, stop)

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a libdcgm function. Raises Unsupported, DeviceLost, DriverGone or SourceError.

        ctypes passes Python integers as 32 bits, so handles, 64-bit integers and floats must have a
        ctypes type.
        """
        try:
            self._call(name, self._handle, *arguments)
        except DriverGone as e:
            if e.reason == "connection_lost":
                self.lost = True
            raise

    def try_call(self, name: str, *arguments: Any) -> bool:
        """Calls a function that some engines do not support. Returns False if it fails.

        May raise DriverGone.
        """
        try:
            self.call(name, *arguments)
        except DriverGone:
            raise
        except SourceError as e:
            _log.debug("%s", e)
            return False
        return True

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._dll, name, None)
        if function is None:
            raise Unsupported(f"this libdcgm has no function {name}; a newer version may have it")

        code = function(*arguments)
        if code:
            raise translate(code, name)

    def _load_library(self) -> None:
        # libdcgm reads these variables when it is loaded. The file `-` is the standard output.
        if self._log_level:
            os.environ.setdefault("__DCGM_DBG_FILE", "-")
            os.environ["__DCGM_DBG_LVL"] = self._log_level
        self._dll = _load(self._library_path)

        info = s.make_struct(s.VersionInfo)
        self._call("dcgmVersionInfo", byref(info))
        self.library_version = parse_version(info.text)

    def _connect(self) -> None:
        # A library cannot be unloaded, so it is loaded only once.
        if self._dll is None:
            self._load_library()

        self._call("dcgmInit")
        try:
            if self._address is None:
                self._handle = self._start_embedded()
            else:
                self._handle = self._connect_to(self._address)
            self._check_versions()
        except SourceError:
            self._disconnect()
            raise
        self.lost = False

    def _start_embedded(self) -> s.Handle:
        parameters = s.make_struct(s.StartEmbeddedV2Params)
        parameters.opMode = s.MODE_AUTO
        parameters.severity = _LOG_LEVELS.index(self._log_level or "NONE")
        self._call("dcgmStartEmbedded_v2", byref(parameters))
        return s.Handle(parameters.dcgmHandle)

    def _connect_to(self, address: EngineAddress) -> s.Handle:
        handle = s.Handle()
        parameters = s.make_struct(s.ConnectV2Params)
        parameters.timeoutMs = _CONNECT_MS
        is_unix_socket = not address.host
        parameters.addressIsUnixSocket = int(is_unix_socket)

        try:
            self._call("dcgmConnect_v2", address.text.encode(), byref(parameters), byref(handle))
        except SourceError as e:
            raise DriverGone(
                f"no host engine answers at {address.text} ({e}): check that nv-hostengine runs "
                "there and listens on that address (nv-hostengine -b ALL), or leave -r out",
                "host_engine_unreachable",
            ) from e
        return handle

    def _check_versions(self) -> None:
        """Raises DriverGone if library and engine have different major versions.

        Their structures then differ.
        """
        info = s.make_struct(s.VersionInfo)
        self._call("dcgmHostengineVersionInfo", self._handle, byref(info))
        self.engine_version = parse_version(info.text)
        if not self.library_version or not self.engine_version:
            return

        if self.major != self.engine_version[0]:
            library = format_version(self.library_version)
            engine = format_version(self.engine_version)
            raise DriverGone(
                f"libdcgm has version {library}, the host engine {engine}: "
                "the major versions must be equal; give the path of a matching library with "
                "--telemetry dcgm:PATH, or update the older one",
                "version_mismatch",
            )

    def _disconnect(self) -> None:
        stop = "dcgmStopEmbedded" if self._address is None else "dcgmDisconnect"
        if self._handle:
            with suppress(SourceError):
                self._call(stop, self._handle)
        self._handle = s.Handle()
        with suppress(SourceError):
            self._call("dcgmShutdown")
