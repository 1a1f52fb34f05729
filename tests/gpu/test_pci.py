"""Number of GPUs in sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest

from podgpu.gpu.pci import count_pci_gpus

GPU, VGA, NVSWITCH, NIC = ("0x10de", "0x030200"), ("0x10de", "0x030000"), ("0x10de", "0x068000"), ("0x15b3", "0x020000")


@pytest.mark.parametrize(
    ("devices", "count"), [([GPU, GPU, NVSWITCH, NIC], 2), ([VGA], 1), ([NIC], None), ([NVSWITCH], None), ([], None)]
)
def test_gpus_are_counted_by_vendor_and_class(tmp_path: Path, devices: list[tuple[str, str]], count: int) -> None:
    for number, (vendor, device_class) in enumerate(devices):
        device = tmp_path / "bus/pci/devices" / f"0000:{number:02x}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{device_class}\n")
    assert count_pci_gpus(str(tmp_path)) == count


def test_a_device_that_is_removed_during_the_reading(tmp_path: Path) -> None:
    (tmp_path / "bus/pci/devices/0000:01:00.0").mkdir(parents=True)
    assert count_pci_gpus(str(tmp_path)) is None


def test_a_gpu_of_a_virtual_machine_is_not_counted(tmp_path: Path) -> None:
    for number, driver in enumerate(["nvidia", "vfio-pci", None]):
        device = tmp_path / "bus/pci/devices" / f"0000:0{number}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x030200\n")
        if driver:
            (tmp_path / "drivers" / driver).mkdir(parents=True)
            (device / "driver").symlink_to(tmp_path / "drivers" / driver)
    assert count_pci_gpus(str(tmp_path)) == 2, "the one without a driver may be lost"
