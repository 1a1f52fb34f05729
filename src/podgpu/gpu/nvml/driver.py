"""NvmlDriver makes every NVML call: errors become ours, older drivers get older calls, shutdown waits for calls.

`nvml` is the pynvml module or anything with its functions (see simulate/driver.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from ctypes import byref
from functools import partial
from typing import Any

import pynvml

from podgpu.errors import DeviceLost, DriverGone, SourceError, StartError, Unsupported
from podgpu.gpu.gate import Gate

_UNSUPPORTED = {
    pynvml.NVML_ERROR_NOT_SUPPORTED: "not_supported",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "not_supported",
    pynvml.NVML_ERROR_INVALID_ARGUMENT: "not_supported",  # how NVML refuses e.g. a fan that is not there
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: "not_supported",
    pynvml.NVML_ERROR_DEPRECATED: "not_supported",
    pynvml.NVML_ERROR_NO_PERMISSION: "no_permission",
}
_LOST = {pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED}
_GONE = {
    pynvml.NVML_ERROR_UNINITIALIZED: (
        "driver_not_loaded",
        "the driver was unloaded while podgpu used it",
    ),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: (
        "driver_not_loaded",
        "no NVIDIA driver is loaded on this node (check `nvidia-smi` on the host)",
    ),
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
        "library_not_found",
        "libnvidia-ml.so.1 is not here; in a container use the NVIDIA runtime with NVIDIA_DRIVER_CAPABILITIES=utility, "
        "or mount the driver's library directory",
    ),
}
_REASONS = {
    pynvml.NVML_ERROR_NOT_FOUND: "not_found",
    pynvml.NVML_ERROR_TIMEOUT: "timeout",
    pynvml.NVML_ERROR_NO_DATA: "no_data",
    pynvml.NVML_ERROR_NOT_READY: "not_ready",
    pynvml.NVML_ERROR_UNKNOWN: "unknown",
}
_OLDER: Mapping[str, Callable[[Any], Callable[..., Any]]] = {
    "nvmlDeviceGetMemoryInfo": lambda nvml: lambda device, _version: nvml.nvmlDeviceGetMemoryInfo(device),
    "nvmlDeviceGetCurrentClocksEventReasons": lambda nvml: nvml.nvmlDeviceGetCurrentClocksThrottleReasons,
}
_OUT_STRUCTS = {
    "nvmlDeviceGetGpuFabricInfoV": "c_nvmlGpuFabricInfo_v3_t",
    "nvmlDeviceGetPlatformInfo": "c_nvmlPlatformInfo_v2_t",
    "nvmlDeviceGetSramEccErrorStatus": "c_nvmlEccSramErrorStatus_v1_t",
}


_WAIT = "nvmlEventSetWait_v2"


class Grip:
    """By what the driver knows one GPU. After a reset it is taken anew under all who read the GPU through it."""

    __slots__ = ("handle", "taken")

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.taken = 1
        """How often."""

    def take(self, handle: Any) -> None:
        self.handle = handle
        self.taken += 1


class VersionMismatch(StartError):
    """libnvidia-ml and the kernel driver are of different versions: only a new container helps."""


class NvmlDriver:
    def __init__(self, nvml: Any = pynvml) -> None:
        self._nvml = nvml
        self._gate = Gate("the driver")
        self._life = threading.Lock()
        self.using = self._gate.passed
        """Around every group of calls, so that `close` never pulls the library away under one."""

    @property
    def is_open(self) -> bool:
        return self._gate.is_open

    def open(self) -> None:
        """Initialise NVML; does nothing when that is done. Raises DriverGone or VersionMismatch.

        One thread opens: the inventory's worker.
        """
        with self._life:
            if not self._gate.is_open:
                self.call("nvmlInit")
                self._gate.open()

    def close(self, wait: float, before: Callable[[], None] = lambda: None) -> bool:
        """Shut NVML down once no call is in flight; False (and still open) when one does not return in time.

        `before` frees what was allocated, at a moment when nobody can be using it.
        """
        if not self._life.acquire(timeout=wait):
            return False  # it is being opened, and that hangs: a call in flight like any other
        try:
            if not self._gate.is_open:
                return True
            if not self._gate.shut(wait):
                return False
            for step in (before, partial(self.call, "nvmlShutdown")):
                with suppress(SourceError, StartError):  # the driver may be gone already: nothing is left to let go of
                    step()
            return True
        finally:
            self._life.release()

    def constant(self, name: str) -> Any:
        return getattr(self._nvml, name)

    def call(self, function: str, *arguments: Any) -> Any:
        """One NVML call. Raises Unsupported, DeviceLost, DriverGone, VersionMismatch or SourceError."""
        given = [a.handle if isinstance(a, Grip) else a for a in arguments]
        try:
            return self._function(function)(*given)
        except pynvml.NVMLError as e:
            if e.value == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND and function in _OLDER:
                return self._call_older(function, *given)
            raise translate(e.value, function) from e

    def wait_for_event(self, event_set: Any, milliseconds: int) -> Any | None:
        """The next event; None when there was none in time, as nearly always: that is not put into words first, which
        takes as long as the call. Raises as `call` does."""
        try:
            return self._function(_WAIT)(event_set, milliseconds)
        except pynvml.NVMLError as e:
            if e.value == pynvml.NVML_ERROR_TIMEOUT:
                return None
            raise translate(e.value, _WAIT) from e

    def _call_older(self, function: str, *arguments: Any) -> Any:
        try:
            return _OLDER[function](self._nvml)(*arguments)
        except pynvml.NVMLError as e:
            raise translate(e.value, function) from e

    def _function(self, name: str) -> Callable[..., Any]:
        if name in _OUT_STRUCTS:
            return self._out_struct(name)
        if name == "nvmlDeviceValidateInforom":
            return self._validate_inforom
        try:
            found: Callable[..., Any] = getattr(self._nvml, name)
        except AttributeError:
            raise Unsupported(f"this nvidia-ml-py has no {name}; install a newer one") from None
        return found

    def _out_struct(self, name: str) -> Callable[[Any], Any]:
        def call(device: Any) -> Any:
            struct = getattr(self._nvml, _OUT_STRUCTS[name])()
            getattr(self._nvml, name)(device, byref(struct))
            return struct

        return call

    def _validate_inforom(self, device: Any) -> int:
        try:
            self._nvml.nvmlDeviceValidateInforom(device)
        except pynvml.NVMLError as e:
            if e.value == pynvml.NVML_ERROR_CORRUPTED_INFOROM:
                return 0
            raise
        return 1


def translate(code: int, function: str) -> SourceError | StartError:
    """NVML's return code as one of our errors."""
    text = str(pynvml.NVMLError(code))
    if code in _UNSUPPORTED:
        return Unsupported(f"{function}: {text}", _UNSUPPORTED[code])
    if code in _LOST:
        return DeviceLost(f"{function}: {text}; the GPU needs a reset or the node a reboot (see dmesg)")
    if code in _GONE:
        reason, advice = _GONE[code]
        return DriverGone(advice, reason)
    if code == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return VersionMismatch(
            "libnvidia-ml here and the driver in the kernel are of different versions (was the driver upgraded?); "
            "this container must be recreated: exiting so that it is"
        )
    return SourceError(_REASONS.get(code, f"nvml_{code}"), f"{function}: {text}")
