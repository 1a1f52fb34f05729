"""Declares libdcgm's structures and constants (DCGM 3.3 and 4.x) for ctypes.

The library checks the version word of a structure, which contains its size. Tests compare the sizes
with NVIDIA's headers.
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

# Type of dcgmHandle_t, dcgmGpuGrp_t and dcgmFieldGrp_t. They have the size of a pointer.
Handle = c_size_t
MAX_GPUS = 32
MAX_FIELDS = 128  # maximum number of fields in a field group and in one call
MAX_ENTITIES = 64  # maximum number of entities in a group and in one call (DCGM 4 allows 1024)
MODE_AUTO = 1
GROUP_EMPTY = 1
LIVE = 1  # flag for reading from the driver instead of the engine's cache
LINK_UP = 3
HEALTH_ALL = 0xFFFFFFFF
INT64_BLANK = 0x7FFFFFFFFFFFFFF0
INT32_BLANK = 0x7FFFFFF0
DOUBLE_BLANK = 140737488355328.0


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


def _struct(number: int = 0, /, **members: Any) -> Any:
    """Creates a structure type with these fields.

    `number`: the structure's version, or 0 if it has no version word.
    """
    if number:
        members = {"version": c_uint32} | members
    content = {"_fields_": list(members.items()), "STRUCT_VERSION": number}
    return type("Struct", (Structure,), content)


def make_struct(kind: Any) -> Any:
    """Returns an empty structure with the version word that libdcgm requires."""
    return kind(version=version_word(kind))


def version_word(kind: Any) -> int:
    return sizeof(kind) | int(kind.STRUCT_VERSION) << 24


_Text = c_char * 256
EntityPair = _struct(group=c_int32, id=c_uint32)
ConnectV2Params = _struct(
    2, persistAfterDisconnect=c_uint32, timeoutMs=c_uint32, addressIsUnixSocket=c_uint32
)
# All libraries since DCGM 2 accept version 1.
StartEmbeddedV2Params = _struct(
    1,
    opMode=c_int,
    dcgmHandle=Handle,
    logFile=c_char_p,
    severity=c_int,
    denyListCount=c_uint32,
    denyList=c_uint32 * 10,
)
VersionInfo = _struct(2, text=c_char * 512)


class FieldPayload(Union):
    _fields_ = [("i64", c_int64), ("dbl", c_double), ("str", _Text), ("blob", c_char * 4096)]


_FIELD: dict[str, Any] = {"fieldId": c_uint16, "fieldType": c_uint16, "status": c_int32}
_VALUE: dict[str, Any] = {"ts": c_int64, "value": FieldPayload}
FieldValueV1 = _struct(1, **_FIELD, **_VALUE)
FieldValueV2 = _struct(
    2, entityGroupId=c_int32, entityId=c_uint32, **_FIELD, unused=c_uint32, **_VALUE
)
OnValues = CFUNCTYPE(c_int, c_int32, c_uint32, POINTER(FieldValueV1), c_int32, c_void_p)

MigEntry = _struct(
    entity=EntityPair,
    parent=EntityPair,
    gpuUuid=c_char * 128,
    nvmlGpuIndex=c_uint32,
    nvmlInstanceId=c_uint32,
    nvmlComputeInstanceId=c_uint32,
    nvmlMigProfileId=c_uint32,
    nvmlProfileSlices=c_uint32,
)
MigHierarchy = _struct(2, count=c_uint32, entries=MigEntry * 448)
Identifiers = _struct(
    version=c_uint32,
    brandName=_Text,
    deviceName=_Text,
    pciBusId=_Text,
    serial=_Text,
    uuid=_Text,
    vbios=_Text,
    inforomImageVersion=_Text,
    pciDeviceId=c_uint32,
    pciSubSystemId=c_uint32,
    driverVersion=_Text,
    virtualizationMode=c_uint32,
)
DeviceAttributes = _struct(
    3,
    clockSets=c_char * 3080,
    thermal=c_uint32 * 3,
    powerLimits=c_uint32 * 6,
    identifiers=Identifiers,
    memoryUsage=c_uint32 * 5,
    settings=c_uint32 * 4,  # the third element is the MIG mode
)
Incident = _struct(
    system=c_uint32, health=c_int32, message=c_char * 1024, code=c_uint32, entity=EntityPair
)
HealthResponseV4 = _struct(
    4, overallHealth=c_int32, incidentCount=c_uint32, incidents=Incident * 64
)
HealthResponseV5 = _struct(
    5, overallHealth=c_int32, incidentCount=c_uint32, incidents=Incident * 1024
)
GpuLinks = _struct(entityId=c_uint32, linkState=c_int32 * 18)
SwitchLinks = _struct(entityId=c_uint32, linkState=c_int32 * 256)
# All versions of DCGM 4 accept version 4. DCGM 4.6 also has a larger structure.
NvLinkStatus = _struct(
    4,
    numGpus=c_uint32,
    gpus=GpuLinks * MAX_GPUS,
    numNvSwitches=c_uint32,
    nvSwitches=SwitchLinks * 12,
)
GpuPeers = _struct(entityId=c_uint32, linkStatus=c_int32 * MAX_GPUS)
NvLinkP2PStatus = _struct(1, numGpus=c_uint32, gpus=GpuPeers * MAX_GPUS)
OwnedCores = _struct(version=c_uint32, bitmask=c_uint64 * 16)
CpuCores = _struct(cpuId=c_uint32, cores=OwnedCores)
CpuHierarchy = _struct(1, numCpus=c_uint32, cpus=CpuCores * 8)
