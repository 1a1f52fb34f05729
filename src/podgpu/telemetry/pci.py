"""How many NVIDIA GPUs the PCI bus shows, whatever the driver says: what `expected` means in podgpu_device_count."""

from __future__ import annotations

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
        return (device / "class").read_text().startswith(_DISPLAY_CLASSES)
    except OSError:
        return False  # unplugged between listing and reading
