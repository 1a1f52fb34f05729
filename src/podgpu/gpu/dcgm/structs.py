"""libdcgm's structures and constants for ctypes, as in DCGM 3.3 and 4.x.

The library checks the sizes through the version word of each structure; tests compare them with NVIDIA's headers.
"""

from __future__ import annotations

from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    Union,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
    sizeof,
)
from enum import IntEnum
from typing import Any, TypeVar

Handle = c_size_t
"""dcgmHandle_t, dcgmGpuGrp_t and dcgmFieldGrp_t have the size of a pointer."""
MAX_GPUS = 32
MAX_FIELDS = 128
"""Limit of a field group and of one call."""
MAX_ENTITIES = 64
"""Limit of a group and of one call in DCGM 3; DCGM 4 has 1024."""
MODE_AUTO = 1
GROUP_EMPTY = 1
LIVE = 1
"""Flag: read from the driver instead of the cache."""
LINK_UP = 3
HEALTH_ALL = 0xFFFFFFFF
INT64_BLANK = 0x7FFFFFFFFFFFFFF0
INT32_BLANK = 0x7FFFFFF0
DOUBLE_BLANK = 140737488355328.0
BLANK, NOT_FOUND, NOT_SUPPORTED, NOT_PERMITTED = BLANKS = range(4)
"""Offsets of the four special values above each BLANK constant."""


class EntityGroup(IntEnum):
    NONE = 0
    GPU = 1
    SWITCH = 3
    GPU_I = 4
    GPU_CI = 5
    LINK = 6
    CPU = 7
    CPU_CORE = 8


class FieldType(IntEnum):
    INT = ord("i")
    DOUBLE = ord("d")
    STRING = ord("s")
    TIME = ord("t")


class EntityStatus(IntEnum):
    LOST = 4
    DISABLED = 6
    DETACHED = 7


_Text = c_char * 256
_VERSION = ("version", c_uint32)
_S = TypeVar("_S", bound=Structure)


def _uint32(*names: str) -> list[tuple[str, type]]:
    return [(name, c_uint32) for name in names]


class EntityPair(Structure):
    _fields_ = [("group", c_int32), ("id", c_uint32)]


class ConnectV2Params(Structure):
    STRUCT_VERSION = 2
    _fields_ = _uint32("version", "persistAfterDisconnect", "timeoutMs", "addressIsUnixSocket")


class StartEmbeddedV2Params(Structure):
    STRUCT_VERSION = 1  # accepted by every library since 2.x
    _fields_ = [
        *(_VERSION, ("opMode", c_int), ("dcgmHandle", Handle), ("logFile", c_char_p)),
        *(("severity", c_int), ("denyListCount", c_uint32), ("denyList", c_uint32 * 10)),
    ]


class VersionInfo(Structure):
    STRUCT_VERSION = 2
    _fields_ = [_VERSION, ("text", c_char * 512)]


class FieldPayload(Union):
    _fields_ = [("i64", c_int64), ("dbl", c_double), ("str", _Text), ("blob", c_char * 4096)]


class FieldValueV1(Structure):
    STRUCT_VERSION = 1
    _fields_ = [
        *(_VERSION, ("fieldId", c_uint16), ("fieldType", c_uint16), ("status", c_int32)),
        *(("ts", c_int64), ("value", FieldPayload)),
    ]


class FieldValueV2(Structure):
    STRUCT_VERSION = 2
    _fields_ = [
        *(_VERSION, ("entityGroupId", c_int32), ("entityId", c_uint32), ("fieldId", c_uint16), ("fieldType", c_uint16)),
        *(("status", c_int32), ("unused", c_uint32), ("ts", c_int64), ("value", FieldPayload)),
    ]


OnValues = CFUNCTYPE(c_int, c_int32, c_uint32, POINTER(FieldValueV1), c_int32, c_void_p)


class MigEntry(Structure):
    _fields_ = [
        *(("entity", EntityPair), ("parent", EntityPair), ("gpuUuid", c_char * 128)),
        *_uint32("nvmlGpuIndex", "nvmlInstanceId", "nvmlComputeInstanceId", "nvmlMigProfileId", "nvmlProfileSlices"),
    ]


class MigHierarchy(Structure):
    STRUCT_VERSION = 2
    _fields_ = [_VERSION, ("count", c_uint32), ("entries", MigEntry * 448)]


class Identifiers(Structure):
    _fields_ = [
        *(_VERSION, ("brandName", _Text), ("deviceName", _Text), ("pciBusId", _Text), ("serial", _Text)),
        *(("uuid", _Text), ("vbios", _Text), ("inforomImageVersion", _Text)),
        *(*_uint32("pciDeviceId", "pciSubSystemId"), ("driverVersion", _Text), ("virtualizationMode", c_uint32)),
    ]


class DeviceAttributes(Structure):
    STRUCT_VERSION = 3
    _fields_ = [
        *(_VERSION, ("clockSets", c_char * 3080), ("thermal", c_uint32 * 3), ("powerLimits", c_uint32 * 6)),
        *(("identifiers", Identifiers), ("memoryUsage", c_uint32 * 5), ("settings", c_uint32 * 4)),
    ]

    @property
    def mig_enabled(self) -> bool:
        return bool(self.settings[2] == 1)


class Incident(Structure):
    _fields_ = [
        *(("system", c_uint32), ("health", c_int32), ("message", c_char * 1024)),
        *(("code", c_uint32), ("entity", EntityPair)),
    ]


class HealthResponseV4(Structure):
    STRUCT_VERSION = 4
    _fields_ = [_VERSION, ("overallHealth", c_int32), ("incidentCount", c_uint32), ("incidents", Incident * 64)]


class HealthResponseV5(Structure):
    STRUCT_VERSION = 5
    _fields_ = [_VERSION, ("overallHealth", c_int32), ("incidentCount", c_uint32), ("incidents", Incident * 1024)]


class GpuLinks(Structure):
    _fields_ = [("entityId", c_uint32), ("linkState", c_int32 * 18)]


class SwitchLinks(Structure):
    _fields_ = [("entityId", c_uint32), ("linkState", c_int32 * 256)]


class NvLinkStatus(Structure):
    STRUCT_VERSION = 4  # accepted by every DCGM 4; 4.6 also has a wider one
    _fields_ = [
        *(_VERSION, ("numGpus", c_uint32), ("gpus", GpuLinks * MAX_GPUS)),
        *(("numNvSwitches", c_uint32), ("nvSwitches", SwitchLinks * 12)),
    ]


class GpuPeers(Structure):
    _fields_ = [("entityId", c_uint32), ("linkStatus", c_int32 * MAX_GPUS)]


class NvLinkP2PStatus(Structure):
    STRUCT_VERSION = 1
    _fields_ = [_VERSION, ("numGpus", c_uint32), ("gpus", GpuPeers * MAX_GPUS)]


class OwnedCores(Structure):
    _fields_ = [_VERSION, ("bitmask", c_uint64 * 16)]


class CpuCores(Structure):
    _fields_ = [("cpuId", c_uint32), ("cores", OwnedCores)]


class CpuHierarchy(Structure):
    STRUCT_VERSION = 1
    _fields_ = [_VERSION, ("numCpus", c_uint32), ("cpus", CpuCores * 8)]


def make_struct(kind: type[_S]) -> _S:
    """Returns an empty structure with the version word that libdcgm requires."""
    struct = kind()
    struct.version = version_word(kind)
    return struct


def version_word(kind: type[Structure]) -> int:
    version: Any = kind.STRUCT_VERSION
    return sizeof(kind) | int(version) << 24


def make_link_id(owner: EntityGroup, owner_id: int, index: int) -> int:
    """Returns the entity id of an NVLink (dcgm_link_t, DCGM 4)."""
    return owner | index << 8 | owner_id << 24
