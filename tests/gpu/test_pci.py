"""Tests the number of GPUs in sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest

from podgpu.node.gpu.nvml.nvml_telemetry import count_pci_gpus

GPU, VGA, NVSWITCH, NIC = (
    ("0x10de", "0x030200"),
    ("0x10de", "0x030000"),
    ("0x10de", "0x068000"),
    ("0x15b3", "0x020000"),
)


def add_device(sysfs: Path, kind: tuple[str, str], driver: str = "") -> None:
    devices = sysfs / "bus/pci/devices"
    devices.mkdir(parents=True, exist_ok=True)
    device = devices / f"0000:{len(list(devices.iterdir())):02x}:00.0"
    device.mkdir()
    for name, value in zip(("vendor", "class"), kind, strict=True):
        (device / name).write_text(f"{value}\n")
    if driver:
        (sysfs / "drivers" / driver).mkdir(parents=True)
        (device / "driver").symlink_to(sysfs / "drivers" / driver)


@pytest.mark.parametrize(
    ("devices", "count"),
    [([GPU, GPU, NVSWITCH, NIC], 2), ([VGA], 1), ([NIC], None), ([NVSWITCH], None), ([], None)],
)
def test_gpus_are_counted_by_vendor_and_class(
    tmp_path: Path, devices: list[tuple[str, str]], count: int
) -> None:
    for kind in devices:
        add_device(tmp_path, kind)
    (tmp_path / "bus/pci/devices/0000:ff:00.0").mkdir(
        parents=True
    )  # a device whose files were removed
    assert count_pci_gpus(str(tmp_path)) == count


def test_a_gpu_of_a_virtual_machine_is_not_counted(tmp_path: Path) -> None:
    for driver in ("nvidia", "vfio-pci", ""):
        add_device(tmp_path, GPU, driver)
    assert count_pci_gpus(str(tmp_path)) == 2, (
        "a GPU without a driver counts, because it may be lost"
    )
