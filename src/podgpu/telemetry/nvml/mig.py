"""MigLayout follows how one GPU is cut by MIG: the only reader of the mode and of the instances NVML lists now."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from podgpu.errors import SourceError, Unsupported
from podgpu.model import Device
from podgpu.telemetry.nvml.driver import NvmlDriver

_PROFILE = re.compile(r"MIG (?:\d+c\.)?(\S+)")  # "NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb": the instance is 3g.20gb


@dataclass(frozen=True, slots=True)
class Instance:
    gi_id: int
    profile: str
    mig_uuids: tuple[str, ...]
    handle: Any = field(compare=False, hash=False)
    """A MIG device handle inside the instance: frame buffer figures are the instance's."""

    def device(self, gpu: Device) -> Device:
        return replace(gpu, gi_id=self.gi_id, profile=self.profile, mig_uuids=self.mig_uuids)


class MigLayout:
    """Whether a GPU is in MIG mode, and its instances, reading after reading. Parts that know no MIG are asked once."""

    def __init__(self, driver: NvmlDriver, handle: Any) -> None:
        self._driver = driver
        self._handle = handle
        self._knows_mig = True

    def read(self) -> tuple[bool, tuple[Instance, ...]]:
        if not self._knows_mig:
            return False, ()
        try:
            enabled = bool(self._driver.call("nvmlDeviceGetMigMode", self._handle)[0])
        except Unsupported:
            self._knows_mig = False
            return False, ()
        return enabled, _read_instances(self._driver, self._handle) if enabled else ()


def _read_instances(driver: NvmlDriver, handle: Any) -> tuple[Instance, ...]:
    found: dict[int, Instance] = {}
    for slot in range(driver.call("nvmlDeviceGetMaxMigDeviceCount", handle)):
        try:
            mig = driver.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot)
        except SourceError as e:
            if e.reason == "not_found" or isinstance(e, Unsupported):
                continue  # an empty slot; older drivers answer INVALID_ARGUMENT
            raise
        instance = _read_instance(driver, mig)
        known = found.get(instance.gi_id)
        if known is not None:  # several compute instances in one GPU instance
            instance = replace(known, mig_uuids=(*known.mig_uuids, *instance.mig_uuids))
        found[instance.gi_id] = instance
    return tuple(found[gi] for gi in sorted(found))


def _read_instance(driver: NvmlDriver, mig: Any) -> Instance:
    name = driver.call("nvmlDeviceGetName", mig)
    profile = _PROFILE.search(name)
    return Instance(
        gi_id=driver.call("nvmlDeviceGetGpuInstanceId", mig),
        profile=profile[1] if profile else name,
        mig_uuids=(driver.call("nvmlDeviceGetUUID", mig),),
        handle=mig,
    )
