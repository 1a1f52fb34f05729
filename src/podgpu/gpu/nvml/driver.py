"""Makes all NVML calls: translates errors, shuts down safely and waits for XID events."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Generic, TypeVar

import pynvml

from podgpu.errors import DeviceLost, DriverGone, SourceError, StartError, Unsupported
from podgpu.gpu.source import ErrorEvent, ErrorEvents
from podgpu.model import device_key
from podgpu.workers import DriverLock

_log = logging.getLogger(__name__)
Key = TypeVar("Key", bound=Hashable)
_UNSUPPORTED = {
    pynvml.NVML_ERROR_NOT_SUPPORTED: "not_supported",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "not_supported",
    pynvml.NVML_ERROR_INVALID_ARGUMENT: "not_supported",  # returned, for example, for a missing fan
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: "not_supported",
    pynvml.NVML_ERROR_DEPRECATED: "not_supported",
    pynvml.NVML_ERROR_NO_PERMISSION: "no_permission",
}
_LOST = {pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED}
_GONE = {
    pynvml.NVML_ERROR_UNINITIALIZED: (
        "driver_not_loaded",
        "the NVIDIA driver was unloaded while podgpu used it",
    ),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: (
        "driver_not_loaded",
        "no NVIDIA driver is loaded on this node (check `nvidia-smi` on the host)",
    ),
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
        "library_not_found",
        "libnvidia-ml.so.1 was not found; in a container use the NVIDIA runtime with "
        "NVIDIA_DRIVER_CAPABILITIES=utility, or mount the driver's library directory",
    ),
}
_REASONS = {
    pynvml.NVML_ERROR_NOT_FOUND: "not_found",
    pynvml.NVML_ERROR_TIMEOUT: "timeout",
    pynvml.NVML_ERROR_NO_DATA: "no_data",
    pynvml.NVML_ERROR_NOT_READY: "not_ready",
    pynvml.NVML_ERROR_UNKNOWN: "unknown",
}
_OUT_STRUCTS = {
    "nvmlDeviceGetGpuFabricInfoV": "c_nvmlGpuFabricInfo_v3_t",
    "nvmlDeviceGetPlatformInfo": "c_nvmlPlatformInfo_v2_t",
    "nvmlDeviceGetSramEccErrorStatus": "c_nvmlEccSramErrorStatus_v1_t",
}
_GREW = f"nvml_{pynvml.NVML_ERROR_INSUFFICIENT_SIZE}"
_LIST_ATTEMPTS = 4
_NO_INSTANCE = 0xFFFFFFFF


class VersionMismatch(StartError):
    """libnvidia-ml and the kernel driver have different versions. The container must be recreated."""


class NvmlDriver:
    def __init__(self, nvml: Any = pynvml) -> None:
        """`nvml`: the pynvml module, or an object with its functions (see simulate/driver.py)."""
        self._nvml = nvml
        self._lock = DriverLock("the driver")
        self.hold = self._lock.hold
        """Context manager around every group of calls, so that `close` does not shut NVML down during a call."""

    def open(self) -> None:
        """Initializes NVML if it is not open. Raises DriverGone or VersionMismatch."""
        self._lock.open(partial(self.call, "nvmlInit"))

    def close(self, wait: float, free: Callable[[], None] = lambda: None) -> bool:
        """Calls `free`, then shuts NVML down. If a call does not return within `wait` seconds, returns False and leaves
        NVML open."""

        def stop() -> None:
            for step in (free, partial(self.call, "nvmlShutdown")):
                with suppress(SourceError, StartError):  # the driver may already be unloaded
                    step()

        return self._lock.close(wait, stop)

    def constant(self, name: str) -> Any:
        return getattr(self._nvml, name)

    def call(self, function: str, *arguments: Any) -> Any:
        """Calls an NVML function. Raises Unsupported, DeviceLost, DriverGone, VersionMismatch or SourceError."""
        try:
            return self._call(function, *arguments)
        except pynvml.NVMLError as e:
            raise translate(e.value, function) from e

    def call_list(self, function: str, *arguments: Any) -> Any:
        """Calls a function that returns a list. Retries if entries were added after pynvml read the length."""
        for _ in range(_LIST_ATTEMPTS - 1):
            try:
                return self.call(function, *arguments)
            except SourceError as e:
                if e.reason != _GREW:
                    raise
        return self.call(function, *arguments)

    def _call(self, name: str, *arguments: Any) -> Any:
        function = getattr(self._nvml, name, None)
        if function is None:
            raise Unsupported(f"this nvidia-ml-py has no {name}; install a newer one")
        if name in _OUT_STRUCTS:
            struct = getattr(self._nvml, _OUT_STRUCTS[name])()
            function(*arguments, ctypes.byref(struct))
            return struct
        if name == "nvmlDeviceValidateInforom":
            return self._validate_inforom(function, *arguments)
        return function(*arguments)

    def _validate_inforom(self, function: Callable[..., None], device: Any) -> int:
        try:
            function(device)
        except pynvml.NVMLError as e:
            if e.value == pynvml.NVML_ERROR_CORRUPTED_INFOROM:
                return 0
            raise
        return 1


def translate(code: int, function: str) -> SourceError | StartError:
    """Converts NVML's return code to one of our errors."""
    text = str(pynvml.NVMLError(code))
    if code in _UNSUPPORTED:
        return Unsupported(f"{function}: {text}", _UNSUPPORTED[code])
    if code in _LOST:
        return DeviceLost(f"{function}: {text}; reset the GPU or reboot the node (see dmesg)")
    if code in _GONE:
        reason, advice = _GONE[code]
        return DriverGone(advice, reason)
    if code == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return VersionMismatch(
            "libnvidia-ml in this container and the kernel driver have different versions (was the driver upgraded?); "
            "exiting, because this container must be recreated"
        )
    return SourceError(_REASONS.get(code, f"nvml_{code}"), f"{function}: {text}")


class CallGuard(Generic[Key]):
    """Collects the errors of one reading, so that a failed call affects only the values that need it.

    `Key` identifies a value: the id of a field, or the name of a function.
    """

    def __init__(self, unsupported: Iterable[Key] = ()) -> None:
        self.unsupported: set[Key] = set(unsupported)
        """Values that the GPU does not have. They are not read again."""
        self.errors: list[str] = []
        """Reason words of failed calls."""
        self.dropped: list[Key] = []
        """Values that are a special code, NaN or impossible."""

    def begin(self) -> None:
        """Starts a new reading."""
        self.errors.clear()
        self.dropped.clear()

    @contextmanager
    def catch(self, *keys: Key) -> Iterator[None]:
        """Records errors of the enclosed calls for these values. Passes on DeviceLost and DriverGone."""
        try:
            yield
        except Unsupported:
            self.unsupported.update(keys)
        except (DeviceLost, DriverGone):
            raise
        except SourceError as e:
            self.errors.append(e.reason)


def handle_address(handle: Any) -> int | None:
    """Returns the pointer in a handle, because pynvml creates different handle objects for the same GPU."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def parse_instance_id(gi_id: int) -> int | None:
    """Returns None for NVML's value that means the whole GPU."""
    return None if gi_id == _NO_INSTANCE else gi_id


_WAIT_MS = 400
"""Maximum duration of a wait for events. A wait costs 0.17 ms of CPU (H200). Closing the driver waits for its end."""


class XidWatcher:
    """Waits for XID errors in its own thread. The reader of each GPU registers it."""

    def __init__(self, driver: NvmlDriver, wall: Callable[[], float]) -> None:
        self._driver = driver
        self._wall = wall
        self._event_set: Any = None
        self._uuids: dict[int | None, str] = {}
        self.events = ErrorEvents()

    def start(self) -> None:
        """Starts the thread. Call after opening the driver, within `hold`."""
        self._uuids = {}
        try:
            self._event_set = self._driver.call("nvmlEventSetCreate")
        except DriverGone:
            raise
        except SourceError as e:
            _log.warning("XID errors cannot be watched on this node: %s", e)
            return
        threading.Thread(target=self._run, args=(self._event_set,), name="xid-watch", daemon=True).start()

    def register(self, uuid: str, handle: Any) -> bool:
        """Registers a GPU. Returns False if XIDs cannot be watched on this node. Raises SourceError, and Unsupported if
        the GPU reports no XIDs."""
        if self._event_set is None:
            return False
        self._uuids[handle_address(handle)] = uuid
        xid = self._driver.constant("nvmlEventTypeXidCriticalError")
        self._driver.call("nvmlDeviceRegisterEvents", handle, xid, self._event_set)
        return True

    def free(self) -> None:
        """Frees the event set, which ends the thread. Call when no driver call is in progress."""
        event_set, self._event_set = self._event_set, None
        if event_set is not None:
            with suppress(SourceError):
                self._driver.call("nvmlEventSetFree", event_set)

    def _run(self, event_set: Any) -> None:
        try:
            while self._wait(event_set):
                pass
        except DriverGone:
            _log.debug("XID watch ends: the driver is gone")

    def _wait(self, event_set: Any) -> bool:
        """Waits for one event. Returns False if the event set was freed, even if a new one exists."""
        try:
            with self._driver.hold(gives_way=True):
                if event_set is not self._event_set:
                    return False
                self._record(self._driver.call("nvmlEventSetWait_v2", event_set, _WAIT_MS))
        except DriverGone:
            raise
        except SourceError as e:
            if e.reason != "timeout":  # with a lost GPU the wait fails immediately; continue for the other GPUs
                time.sleep(_WAIT_MS / 1000)
        return True

    def _record(self, data: Any) -> None:
        uuid = self._uuids.get(handle_address(data.device), "unknown")  # a lost GPU cannot be queried for its UUID
        key = device_key(uuid, parse_instance_id(data.gpuInstanceId))
        self.events.add(ErrorEvent(key, int(data.eventData), self._wall()))
