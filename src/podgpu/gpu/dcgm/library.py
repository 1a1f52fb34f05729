"""DcgmLibrary finds and loads libdcgm, declares its functions and makes its return codes our errors. No connection."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_int, c_int32, c_int64, c_uint16, c_uint32, c_void_p
from pathlib import Path
from typing import Any, TypeVar

from podgpu.errors import DeviceLost, DriverGone, SourceError, Unsupported
from podgpu.gpu.dcgm import structs as s

SONAMES = ("libdcgm.so.4", "libdcgm.so.3")
_FOLDERS = ("/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib")
_MAJORS = (3, 4)
_S = TypeVar("_S", bound=Structure)

_H, _HP = s.Handle, POINTER(s.Handle)
_SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "dcgmInit": (),
    "dcgmShutdown": (),
    "dcgmVersionInfo": (POINTER(s.VersionInfo),),
    "dcgmHostengineVersionInfo": (_H, POINTER(s.VersionInfo)),
    "dcgmStartEmbedded_v2": (POINTER(s.StartEmbeddedV2Params),),
    "dcgmStopEmbedded": (_H,),
    "dcgmConnect_v2": (c_char_p, POINTER(s.ConnectV2Params), _HP),
    "dcgmDisconnect": (_H,),
    "dcgmGetAllDevices": (_H, POINTER(c_uint32), POINTER(c_int)),
    "dcgmGetGpuStatus": (_H, c_uint32, POINTER(c_int)),
    "dcgmGetDeviceAttributes": (_H, c_uint32, POINTER(s.DeviceAttributes)),
    "dcgmGetEntityGroupEntities": (_H, c_int, POINTER(c_uint32), POINTER(c_int), c_uint32),
    "dcgmGetGpuInstanceHierarchy": (_H, POINTER(s.MigHierarchy)),
    "dcgmGetNvLinkLinkStatus": (_H, c_void_p),
    "dcgmGetNvLinkP2PStatus": (_H, POINTER(s.NvLinkP2PStatus)),
    "dcgmGetCpuHierarchy": (_H, POINTER(s.CpuHierarchy)),
    "dcgmGroupCreate": (_H, c_int, c_char_p, _HP),
    "dcgmGroupDestroy": (_H, _H),
    "dcgmGroupAddEntity": (_H, _H, c_int, c_uint32),
    "dcgmFieldGroupCreate": (_H, c_int, POINTER(c_uint16), c_char_p, _HP),
    "dcgmFieldGroupDestroy": (_H, _H),
    "dcgmWatchFields": (_H, _H, _H, c_int64, c_double, c_int32),
    "dcgmUnwatchFields": (_H, _H, _H),
    "dcgmUpdateAllFields": (_H, c_int),
    "dcgmEntitiesGetLatestValues": (
        *(_H, POINTER(s.EntityPair), c_uint32, POINTER(c_uint16), c_uint32, c_uint32),
        POINTER(s.FieldValueV2),
    ),
    "dcgmGetValuesSince_v2": (_H, _H, _H, c_int64, POINTER(c_int64), s.OnValues, c_void_p),
    "dcgmHealthSet": (_H, _H, c_uint32),
    "dcgmHealthCheck": (_H, _H, c_void_p),
}

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
    -10: ("connection_lost", "the connection to DCGM is gone"),
    -21: ("connection_lost", "the connection to the host engine was lost"),
    -25: ("driver_not_loaded", "DCGM does not find the driver's libnvidia-ml.so.1 (check `nvidia-smi` on the host)"),
    -56: ("driver_not_loaded", "DCGM has no driver to talk to (check `nvidia-smi` on the host)"),
    -67: ("gpus_detached", "the host engine has let go of the GPUs (dcgmi detach); they come back with an attach"),
}
_REASONS = {
    -1: "bad_parameter",
    -3: "generic_error",
    -7: "init_error",
    -8: "nvml_error",
    -11: "timeout",
    -12: "version_mismatch",
    -14: "no_data",
    -15: "stale_data",
    -16: "not_watched",
    -24: "max_limit",
    -34: "in_use",
    -37: "profiling_library_error",
    -49: "insufficient_resources",
    -54: "paused",
    -57: "driver_timeout",
}


class DcgmLibrary:
    def __init__(self, path: str = "") -> None:
        """Loads this file, or the newest libdcgm that is here. Raises DriverGone."""
        self._dll = _load([path] if path else _candidates())
        info = versioned(s.VersionInfo)
        self.call("dcgmVersionInfo", byref(info))
        self.version = parse_version(info.text)
        if self.version and self.version[0] not in _MAJORS:
            raise DriverGone(
                f"libdcgm is version {shown(self.version)}, and podgpu speaks with DCGM 3.3 and 4.x: install "
                "datacenter-gpu-manager-4-core, or use --telemetry nvml, which needs no DCGM",
                "version_mismatch",
            )

    @property
    def major(self) -> int:
        return self.version[0] if self.version else _MAJORS[-1]

    def call(self, name: str, *arguments: Any) -> None:
        """One call of libdcgm. Raises Unsupported, DeviceLost, DriverGone or SourceError."""
        code = self._function(name)(*arguments)
        if code:
            raise translate(code, name)

    def _function(self, name: str) -> Any:
        try:
            function = getattr(self._dll, name)
        except AttributeError:
            raise Unsupported(f"this libdcgm has no {name}; a newer one may") from None
        function.argtypes, function.restype = _SIGNATURES[name], c_int
        return function


def _candidates() -> Sequence[str]:
    """By name, as the loader finds it ($LD_LIBRARY_PATH, the cache), then where packages put it."""
    return [place for name in SONAMES for place in (name, *(f"{folder}/{name}" for folder in _FOLDERS))]


def _load(places: Sequence[str]) -> ctypes.CDLL:
    broken = ""
    for place in places:
        try:
            # RTLD_GLOBAL: the embedded engine loads its modules later, and they look for DCGM's symbols.
            return ctypes.CDLL(place, mode=ctypes.RTLD_GLOBAL)
        except OSError as e:
            if "/" in place and Path(place).exists():
                broken = broken or str(e)
    wanted = broken or f"{' or '.join(SONAMES) if len(places) > 1 else places[0]} is not here"
    raise DriverGone(
        f"{wanted}: install datacenter-gpu-manager-4-core (libdcgm.so.4) in podgpu's image or on the host, name the "
        "file with --telemetry dcgm:PATH, or use --telemetry nvml, which needs no DCGM",
        "library_not_found",
    )


def versioned(kind: type[_S]) -> _S:
    """An empty structure with the version word libdcgm asks for."""
    struct = kind()
    struct.version = s.version_word(kind)
    return struct


def parse_version(text: bytes) -> tuple[int, ...]:
    """From `version:4.2.3;arch:x86_64;…`; empty when it does not say."""
    m = re.search(rb"(?:^|;)version:(\d{1,9}(?:\.\d{1,9}){0,3})", text)
    return tuple(int(part) for part in m[1].split(b".")) if m else ()


def shown(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version)) or "unknown"


def translate(code: int, what: str) -> SourceError:
    """DCGM's return code as one of our errors."""
    if code in _UNSUPPORTED:
        reason = _UNSUPPORTED[code]
        return Unsupported(f"{what}: {reason.replace('_', ' ')} (DCGM {code})", reason)
    if code in _LOST:
        return DeviceLost(f"{what}: the GPU is lost (DCGM {code}); it needs a reset or the node a reboot (see dmesg)")
    if code in _GONE:
        reason, text = _GONE[code]
        return DriverGone(text, reason)
    reason = _REASONS.get(code, f"dcgm_{-code}")
    return SourceError(reason, f"{what}: {reason.replace('_', ' ')} (DCGM {code})")
