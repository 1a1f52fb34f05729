"""Tests the sizes and version words of the ctypes structures."""

from __future__ import annotations

from ctypes import sizeof

import pytest

from podgpu.node.gpu.dcgm import structs as s
from tests.gpu.dcgm.double import Double

# Name -> size and version word in NVIDIA's headers (3.3.9, 4.0.0 and 4.6.0).
SIZES = {
    "ConnectV2Params": (16, 0x02000010),
    "StartEmbeddedV2Params": (72, 0x01000048),
    "VersionInfo": (516, 0x02000204),
    "FieldPayload": (4096, 0),
    "FieldValueV1": (4120, 0x01001018),
    "FieldValueV2": (4128, 0x02001020),
    "EntityPair": (8, 0),
    "MigEntry": (164, 0),
    "MigHierarchy": (73480, 0x02011F08),
    "Identifiers": (2064, 0),
    "DeviceAttributes": (5220, 0x03001464),
    "Incident": (1044, 0),
    "HealthResponseV4": (66828, 0x0401050C),
    "HealthResponseV5": (1069068, 0x0510500C),
    "GpuLinks": (76, 0),
    "SwitchLinks": (1028, 0),
    "NvLinkStatus": (14780, 0x040039BC),
    "GpuPeers": (132, 0),
    "NvLinkP2PStatus": (4232, 0x01001088),
    "OwnedCores": (136, 0),
    "CpuCores": (144, 0),
    "CpuHierarchy": (1160, 0x01000488),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_and_version_words(name: str) -> None:
    kind = getattr(s, name)
    size, word = SIZES[name]
    assert sizeof(kind) == size
    if word:
        assert s.version_word(kind) == word


def test_the_fake_library_has_the_same_sizes(double: Double) -> None:
    assert {name: double.call("size", name) for name in SIZES} == {
        name: size for name, (size, _) in SIZES.items()
    }
