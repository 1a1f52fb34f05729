"""This module counts the NVIDIA GPUs on the PCI bus, whatever the driver says: `expected` in podgpu_device_count."""

from __future__ import annotations

import os
from pathlib import Path

_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA controller, 3D controller; NVSwitches are bridges (0x0680)


def count_pci_gpus(sysfs: str = "/sys") -> int | None:
    """None when sysfs is not there (some sandboxes) or shows no NVIDIA GPU (WSL, Tegra): not known, not zero."""
    try:
        devices = list(Path(sysfs, "bus/pci/devices").iterdir())
    except OSError:
        return None
    return sum(_is_gpu(device) for device in devices) or None


def _is_gpu(device: Path) -> bool:
    try:
        if (device / "vendor").read_text().strip() != _NVIDIA:
            return False
        return (device / "class").read_text().startswith(_DISPLAY_CLASSES) and not _is_given_away(device)
    except OSError:
        return False  # unplugged between listing and reading


def _is_given_away(device: Path) -> bool:
    """Another driver has it, such as vfio-pci for a virtual machine: NVIDIA's will never answer for it, and it is not
    lost. Without any driver it may be."""
    try:
        return os.path.basename(os.readlink(device / "driver")) != "nvidia"
    except OSError:
        return False
