"""Counts the NVIDIA GPUs on the PCI bus without the driver, for `expected` in podgpu_device_count."""

from __future__ import annotations

import os
from pathlib import Path

_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA controller, 3D controller; NVSwitches are bridges (0x0680)


def count_pci_gpus(sysfs: str = "/sys") -> int | None:
    """Returns the number of GPUs, None if sysfs is missing (some sandboxes) or has no NVIDIA GPU (WSL, Tegra)."""
    try:
        devices = list(Path(sysfs, "bus/pci/devices").iterdir())
    except OSError:
        return None
    return sum(_is_gpu(device) for device in devices) or None


def _is_gpu(device: Path) -> bool:
    try:
        if (device / "vendor").read_text().strip() != _NVIDIA:
            return False
        return (device / "class").read_text().startswith(_DISPLAY_CLASSES) and not _has_other_driver(device)
    except OSError:
        return False  # unplugged between listing and reading


def _has_other_driver(device: Path) -> bool:
    """Returns True if the GPU is used by another driver, such as vfio-pci for a virtual machine.

    Returns False for a GPU without a driver, because it may be lost.
    """
    try:
        return os.path.basename(os.readlink(device / "driver")) != "nvidia"
    except OSError:
        return False
