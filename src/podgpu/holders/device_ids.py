"""This module has the one parser of device ids, and the one look-up from an id to the device it means. Pure.

Every device plugin writes its ids its own way; what they mean is decided here and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from podgpu.model import Device

Shared = tuple[object, ...]
"""What the ids of all replicas of one device have in common."""


class DeviceId(NamedTuple):
    """What a device id says. A part it does not say is None (or False, or empty).

    A plain tuple: a thousand of them are hashed and compared at every reading.
    """

    gpu_uuid: str | None = None
    mig_uuid: str | None = None
    minor: int | None = None
    """N of /dev/nvidiaN. It can differ from the driver's index, which counts in PCI order."""
    gi_id: int | None = None
    ci_id: int | None = None
    everything: bool = False
    """Every GPU of the node: WSL offers them only together."""
    integrated: bool = False
    """The one GPU of a Tegra board, which has neither UUID nor minor in its id."""
    replica: str = ""
    """Which time slice, MPS client or vGPU of the device, when it is shared."""

    @property
    def shared(self) -> Shared:
        return self[:-1]


_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
# No leading zeros: smarter-device-manager numbers its copies of /dev/nvidia0 "nvidia00", "nvidia01".
_NUMBER = r"(?:0|[1-9][0-9]{0,8})"

_NVIDIA_PLUGIN = re.compile(
    rf"(?P<gpu>GPU-{_UUID})"
    rf"|(?P<mig>MIG-{_UUID})"
    rf"|MIG-(?P<parent>GPU-{_UUID})/(?P<gi>{_NUMBER})/(?P<ci>{_NUMBER})",
    re.IGNORECASE | re.ASCII,
)
_GKE_PLUGIN = re.compile(rf"nvidia(?P<minor>{_NUMBER})(?:/gi(?P<gi>{_NUMBER}))?(?:/vgpu(?P<vgpu>{_NUMBER}))?", re.ASCII)


def parse_device_id(text: str) -> DeviceId | None:
    """What the id says, or None when it names no GPU (gpu-manager's `tencent.com/vcuda-core-3`, say)."""
    name, _, replica = text.partition("::")
    if name == "all":
        return DeviceId(everything=True, replica=replica)
    if name == "tegra":
        return DeviceId(integrated=True, replica=replica)
    return _parse_nvidia_plugin(name, replica) or _parse_gke_plugin(text)


def _parse_nvidia_plugin(name: str, replica: str) -> DeviceId | None:
    match = _NVIDIA_PLUGIN.fullmatch(name)
    if match is None:
        return None
    return DeviceId(
        gpu_uuid=match["gpu"] or match["parent"],
        mig_uuid=match["mig"],
        gi_id=_number(match["gi"]),
        ci_id=_number(match["ci"]),
        replica=replica,
    )


def _parse_gke_plugin(text: str) -> DeviceId | None:
    match = _GKE_PLUGIN.fullmatch(text)
    if match is None:
        return None
    return DeviceId(minor=int(match["minor"]), gi_id=_number(match["gi"]), replica=match["vgpu"] or "")


def _number(digits: str | None) -> int | None:
    return None if digits is None else int(digits)


class DeviceIndex:
    """The devices of a node, ready to be found by id. Build it once per reading, not once per id."""

    def __init__(self, devices: Sequence[Device]) -> None:
        whole = (device for device in devices if not device.is_instance)
        self._whole = tuple(sorted(whole, key=lambda device: -1 if device.index is None else device.index))
        self._by_uuid = {(device.uuid.lower(), device.gi_id): device for device in devices}
        self._by_mig_uuid = {uuid.lower(): device for device in devices for uuid in device.mig_uuids}
        # Of two with one minor, the first: the other is gone.
        self._uuid_by_minor = {device.minor: device.uuid for device in reversed(devices) if device.minor is not None}

    def find(self, device_id: DeviceId) -> tuple[Device, ...]:
        """The devices meant; empty when the node has none such. All replicas of a device mean the same."""
        if device_id.everything:
            return self._whole
        if device_id.integrated:
            return self._whole[:1]
        found = self._find_one(device_id)
        return () if found is None else (found,)

    def _find_one(self, device_id: DeviceId) -> Device | None:
        if device_id.mig_uuid is not None:
            return self._by_mig_uuid.get(device_id.mig_uuid.lower())
        uuid = device_id.gpu_uuid
        if uuid is None and device_id.minor is not None:
            uuid = self._uuid_by_minor.get(device_id.minor)
        return None if uuid is None else self._by_uuid.get((uuid.lower(), device_id.gi_id))
