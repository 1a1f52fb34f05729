"""Tests the metric names of dcgm-exporter 4.8 and 4.9, and their units."""

from __future__ import annotations

from podgpu.metrics.counters import shipped_counters
from podgpu.metrics.fields import Rename, fields, names_of, rename_of, renames

CHANGED_UNIT = {
    ("DCGM_FI_DEV_SM_CLOCK", 100): ("DCGM_FI_DEV_SM_CLOCK_HERTZ", 1603, 1e6),
    ("DCGM_FI_DEV_MEM_CLOCK", 101): ("DCGM_FI_DEV_MEMORY_CLOCK_HERTZ", 1604, 1e6),
    ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 156): ("DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL", 1611, 1e-3),
    ("DCGM_FI_DEV_GPU_UTIL", 203): ("DCGM_FI_DEV_GPU_UTIL_RATIO", 1613, 0.01),
    ("DCGM_FI_DEV_MEM_COPY_UTIL", 204): ("DCGM_FI_DEV_MEMORY_UTIL_RATIO", 1614, 0.01),
    ("DCGM_FI_DEV_ENC_UTIL", 206): ("DCGM_FI_DEV_ENC_UTIL_RATIO", 1615, 0.01),
    ("DCGM_FI_DEV_DEC_UTIL", 207): ("DCGM_FI_DEV_DEC_UTIL_RATIO", 1616, 0.01),
    ("DCGM_FI_DEV_FB_FREE", 251): ("DCGM_FI_DEV_FB_FREE_BYTES", 1626, 1048576.0),
    ("DCGM_FI_DEV_FB_USED", 252): ("DCGM_FI_DEV_FB_USED_BYTES", 1627, 1048576.0),
    ("DCGM_FI_DEV_FB_RESERVED", 253): ("DCGM_FI_DEV_FB_RESERVED_BYTES", 1628, 1048576.0),
    ("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", 449): ("DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND", 1648, 1.024e6),
}
"""Name and id in 4.8 -> name, id and conversion factor in 4.9."""
RENAMED_ONLY = {
    "DCGM_FI_DRIVER_VERSION": ("DCGM_FI_SYSTEM_DRIVER_VERSION", 1),
    "DCGM_FI_DEV_MEMORY_TEMP": ("DCGM_FI_DEV_MEMORY_TEMP_CELSIUS", 140),
    "DCGM_FI_DEV_GPU_TEMP": ("DCGM_FI_DEV_GPU_TEMP_CELSIUS", 150),
    "DCGM_FI_DEV_POWER_USAGE": ("DCGM_FI_DEV_BOARD_POWER_WATTS", 155),
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": ("DCGM_FI_DEV_PCIE_REPLAY_TOTAL", 202),
    "DCGM_FI_DEV_XID_ERRORS": ("DCGM_FI_DEV_XID_ERROR", 230),
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": ("DCGM_FI_DEV_ROW_REMAP_UNCORRECTABLE_TOTAL", 393),
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": ("DCGM_FI_DEV_ROW_REMAP_CORRECTABLE_TOTAL", 394),
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": ("DCGM_FI_DEV_ROW_REMAP_FAILED", 395),
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": ("DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO", 1001),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": ("DCGM_FI_PROF_TENSOR_UTIL_RATIO", 1004),
    "DCGM_FI_PROF_DRAM_ACTIVE": ("DCGM_FI_PROF_DRAM_UTIL_RATIO", 1005),
}
UNCHANGED = {"DCGM_FI_DEV_VGPU_LICENSE_STATUS", "DCGM_FI_PROF_PCIE_TX_BYTES", "DCGM_FI_PROF_PCIE_RX_BYTES"}


def test_names_of_the_default_file() -> None:
    default = {c.name for c in shipped_counters("default") or ()}
    assert default == {name for name, _ in CHANGED_UNIT} | RENAMED_ONLY.keys() | UNCHANGED
    by_name = {r.old.name: r for r in renames()}
    for (old, old_id), (new, new_id, factor) in CHANGED_UNIT.items():
        assert by_name[old] == Rename(fields()[old_id], fields()[new_id], new, factor)
        assert fields()[old_id].unit != fields()[new_id].unit
    for old, (new, number) in RENAMED_ONLY.items():
        assert by_name[old] == Rename(fields()[number], fields()[number], new, 1.0)
    assert UNCHANGED.isdisjoint(by_name)


def test_every_name_has_one_meaning() -> None:
    new = [r.new_name for r in renames()]
    old = [name for r in renames() for name in r.old_names]
    assert len({*new, *old}) == len(new) + len(old)
    for rename in renames():
        assert rename_of(rename.old.name) is rename_of(rename.new_name) is rename
        assert {rename.old.name, rename.new_name} <= set(names_of(rename.old.id)), rename
