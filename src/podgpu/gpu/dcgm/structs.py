"""This module declares libdcgm's structures and constants for ctypes, as DCGM 3.3 and 4.x have them. It calls nothing.

The sizes are part of every version word, so a wrong one is refused by the library; tests hold them against NVIDIA's.
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
from typing import Any

Handle = c_size_t
"""dcgmHandle_t, dcgmGpuGrp_t and dcgmFieldGrp_t are as wide as a pointer."""
MAX_GPUS = 32
MAX_FIELDS = 128
"""Of one field group, and of one reading."""
MAX_ENTITIES = 64
"""Of one group and of one reading in DCGM 3; DCGM 4 takes 1024."""
TEXT = 256
BLOB = 4096
MODE_AUTO = 1
GROUP_EMPTY = 1
LIVE = 1
"""Flag of a reading: ask the driver now, not the cache."""


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


LINK_UP = 3
HEALTH_ALL = 0xFFFFFFFF
INT64_BLANK = 0x7FFFFFFFFFFFFFF0
INT32_BLANK = 0x7FFFFFF0
DOUBLE_BLANK = 140737488355328.0
NOT_SUPPORTED_OFFSET = 2
"""Each kind of blank comes in four: not there, not found, not supported, not permitted."""
BLANKS = 4


class EntityPair(Structure):
    _fields_ = [("group", c_int32), ("id", c_uint32)]


class ConnectV2Params(Structure):
    STRUCT_VERSION = 2
    _fields_ = [
        ("version", c_uint32),
        ("persistAfterDisconnect", c_uint32),
        ("timeoutMs", c_uint32),
        ("addressIsUnixSocket", c_uint32),
    ]


class StartEmbeddedV2Params(Structure):
    """The first version: every library since 2.x takes it."""

    STRUCT_VERSION = 1
    _fields_ = [
        ("version", c_uint32),
        ("opMode", c_int),
        ("dcgmHandle", Handle),
        ("logFile", c_char_p),
        ("severity", c_int),
        ("denyListCount", c_uint32),
        ("denyList", c_uint32 * 10),
    ]


class VersionInfo(Structure):
    STRUCT_VERSION = 2
    _fields_ = [("version", c_uint32), ("text", c_char * (2 * TEXT))]


class FieldPayload(Union):
    _fields_ = [("i64", c_int64), ("dbl", c_double), ("str", c_char * TEXT), ("blob", c_char * BLOB)]


class FieldValueV1(Structure):
    STRUCT_VERSION = 1
    _fields_ = [
        ("version", c_uint32),
        ("fieldId", c_uint16),
        ("fieldType", c_uint16),
        ("status", c_int32),
        ("ts", c_int64),
        ("value", FieldPayload),
    ]


class FieldValueV2(Structure):
    STRUCT_VERSION = 2
    _fields_ = [
        ("version", c_uint32),
        ("entityGroupId", c_int32),
        ("entityId", c_uint32),
        ("fieldId", c_uint16),
        ("fieldType", c_uint16),
        ("status", c_int32),
        ("unused", c_uint32),
        ("ts", c_int64),
        ("value", FieldPayload),
    ]


OnValues = CFUNCTYPE(c_int, c_int32, c_uint32, POINTER(FieldValueV1), c_int32, c_void_p)


class MigEntry(Structure):
    _fields_ = [
        ("entity", EntityPair),
        ("parent", EntityPair),
        ("gpuUuid", c_char * 128),
        ("nvmlGpuIndex", c_uint32),
        ("nvmlInstanceId", c_uint32),
        ("nvmlComputeInstanceId", c_uint32),
        ("nvmlMigProfileId", c_uint32),
        ("nvmlProfileSlices", c_uint32),
    ]


class MigHierarchy(Structure):
    STRUCT_VERSION = 2
    _fields_ = [("version", c_uint32), ("count", c_uint32), ("entries", MigEntry * 448)]


class Identifiers(Structure):
    _fields_ = [
        ("version", c_uint32),
        ("brandName", c_char * TEXT),
        ("deviceName", c_char * TEXT),
        ("pciBusId", c_char * TEXT),
        ("serial", c_char * TEXT),
        ("uuid", c_char * TEXT),
        ("vbios", c_char * TEXT),
        ("inforomImageVersion", c_char * TEXT),
        ("pciDeviceId", c_uint32),
        ("pciSubSystemId", c_uint32),
        ("driverVersion", c_char * TEXT),
        ("virtualizationMode", c_uint32),
    ]


class DeviceAttributes(Structure):
    STRUCT_VERSION = 3
    _fields_ = [
        ("version", c_uint32),
        ("clockSets", c_char * 3080),
        ("thermal", c_uint32 * 3),
        ("powerLimits", c_uint32 * 6),
        ("identifiers", Identifiers),
        ("memoryUsage", c_uint32 * 5),
        ("settings", c_uint32 * 4),
    ]

    @property
    def mig_enabled(self) -> bool:
        return bool(self.settings[2] == 1)


class Incident(Structure):
    _fields_ = [
        ("system", c_uint32),
        ("health", c_int32),
        ("message", c_char * 1024),
        ("code", c_uint32),
        ("entity", EntityPair),
    ]


class HealthResponseV4(Structure):
    STRUCT_VERSION = 4
    _fields_ = [
        ("version", c_uint32),
        ("overallHealth", c_int32),
        ("incidentCount", c_uint32),
        ("incidents", Incident * 64),
    ]


class HealthResponseV5(Structure):
    STRUCT_VERSION = 5
    _fields_ = [
        ("version", c_uint32),
        ("overallHealth", c_int32),
        ("incidentCount", c_uint32),
        ("incidents", Incident * 1024),
    ]


class GpuLinks(Structure):
    _fields_ = [("entityId", c_uint32), ("linkState", c_int32 * 18)]


class SwitchLinks(Structure):
    _fields_ = [("entityId", c_uint32), ("linkState", c_int32 * 256)]


class NvLinkStatus(Structure):
    """Taken by every DCGM 4; 4.6 has a wider one too."""

    STRUCT_VERSION = 4
    _fields_ = [
        ("version", c_uint32),
        ("numGpus", c_uint32),
        ("gpus", GpuLinks * MAX_GPUS),
        ("numNvSwitches", c_uint32),
        ("nvSwitches", SwitchLinks * 12),
    ]


class GpuPeers(Structure):
    _fields_ = [("entityId", c_uint32), ("linkStatus", c_int32 * MAX_GPUS)]


class NvLinkP2PStatus(Structure):
    STRUCT_VERSION = 1
    _fields_ = [("version", c_uint32), ("numGpus", c_uint32), ("gpus", GpuPeers * MAX_GPUS)]


class OwnedCores(Structure):
    _fields_ = [("version", c_uint32), ("bitmask", c_uint64 * 16)]


class CpuCores(Structure):
    _fields_ = [("cpuId", c_uint32), ("cores", OwnedCores)]


class CpuHierarchy(Structure):
    STRUCT_VERSION = 1
    _fields_ = [("version", c_uint32), ("numCpus", c_uint32), ("cpus", CpuCores * 8)]


def version_word(kind: type[Structure]) -> int:
    """What libdcgm wants in the first member: the size, and the structure's version above it."""
    version: Any = kind.STRUCT_VERSION
    return sizeof(kind) | int(version) << 24


def link_id(owner: EntityGroup, owner_id: int, index: int) -> int:
    """The entity id of an NVLink (dcgm_link_t, DCGM 4)."""
    return owner | index << 8 | owner_id << 24
