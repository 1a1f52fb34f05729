"""MigLayout follows how one GPU is cut by MIG: the only reader of the mode and of the instances NVML lists now."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from podgpu.errors import SourceError, Unsupported
from podgpu.gpu.nvml.driver import Grip, NvmlDriver
from podgpu.model import Device

_PROFILE = re.compile(r"MIG (?:\d+c\.)?(\S+)")  # "NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb": the instance is 3g.20gb

_NO_INSTANCE = 0xFFFFFFFF
IN_ONE_TURN = 0.25
"""Seconds: what one turn has asked it need not ask again."""
IN_ONE_SECOND = 0.95
"""The same for another cadence: usage goes by what telemetry was just told, where that asks every second."""


@dataclass(frozen=True, slots=True)
class Instance:
    gi_id: int
    profile: str
    mig_uuids: tuple[str, ...]
    handle: Any = field(compare=False, hash=False)
    """A MIG device handle inside the instance: frame buffer figures are the instance's."""

    def device(self, gpu: Device) -> Device:
        return replace(gpu, gi_id=self.gi_id, profile=self.profile, mig_uuids=self.mig_uuids)


def instance_named(gi_id: int) -> int | None:
    """The GPU instance that an entry of NVML's is about; None: it is about the GPU."""
    return None if gi_id == _NO_INSTANCE else gi_id


class MigLayout:
    """Whether a GPU is in MIG mode, and its instances, reading after reading; from several workers.

    The mode takes the driver 0.4 ms of CPU (an H200), so all who read the GPU share what it said. Parts that know no
    MIG are asked once.
    """

    def __init__(self, driver: NvmlDriver, grip: Grip, clock: Callable[[], float]) -> None:
        self._driver = driver
        self._grip = grip
        self._clock = clock
        self._knows_mig = True
        self._off: tuple[int, float] | None = None
        """By which grip, and when, it was last found not to be in MIG mode; None: it is, or nobody has asked."""

    def read(self, believing: float) -> tuple[bool, tuple[Instance, ...]]:
        """`believing`: for how many seconds a GPU that was found whole is taken to be so."""
        off, now = self._off, self._clock()
        if not self._knows_mig or (off is not None and off[0] == self._grip.taken and now - off[1] < believing):
            return False, ()
        taken = self._grip.taken
        try:
            enabled = bool(self._driver.call("nvmlDeviceGetMigMode", self._grip)[0])
        except Unsupported:
            self._knows_mig = False
            return False, ()
        self._off = None if enabled else (taken, now)
        return enabled, _read_instances(self._driver, self._grip) if enabled else ()


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
