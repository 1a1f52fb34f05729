"""Reads the MIG mode and the instances of one GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from podgpu.errors import SourceError, Unsupported
from podgpu.gpu.nvml.driver import NvmlDriver
from podgpu.model import Device

_OFF_SECONDS = 1.5
"""Disabled MIG mode is cached for this long, because reading the mode costs 0.4 ms of CPU (H200)."""
_PROFILE = re.compile(r"MIG (?:\d+c\.)?(\S+)")  # "NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb": the instance is 3g.20gb


@dataclass(frozen=True, slots=True)
class Instance:
    gi_id: int
    profile: str
    mig_uuids: tuple[str, ...]
    handle: Any = field(compare=False, hash=False)
    """Handle of a MIG device in the instance. Memory figures read with it are those of the whole instance."""

    def make_device(self, gpu: Device) -> Device:
        return replace(gpu, gi_id=self.gi_id, profile=self.profile, mig_uuids=self.mig_uuids)


class MigLayout:
    """MIG mode and instances of one GPU, shared by its workers."""

    def __init__(self, driver: NvmlDriver, handle: Any, clock: Callable[[], float]) -> None:
        self._driver = driver
        self._handle = handle
        self._clock = clock
        self._is_supported = True
        self._off_at = float("-inf")
        """Time when MIG was last read as disabled."""

    def read(self) -> tuple[bool, tuple[Instance, ...]]:
        now = self._clock()
        if not self._is_supported or now - self._off_at < _OFF_SECONDS:
            return False, ()
        try:
            enabled = bool(self._driver.call("nvmlDeviceGetMigMode", self._handle)[0])
        except Unsupported:
            self._is_supported = False
            return False, ()
        if not enabled:
            self._off_at = now
            return False, ()
        return True, self._read_instances()

    def _read_instances(self) -> tuple[Instance, ...]:
        instances: dict[int, Instance] = {}
        for slot in range(self._driver.call("nvmlDeviceGetMaxMigDeviceCount", self._handle)):
            try:
                mig = self._driver.call("nvmlDeviceGetMigDeviceHandleByIndex", self._handle, slot)
            except SourceError as e:
                if e.reason == "not_found" or isinstance(e, Unsupported):
                    continue  # an empty slot; older drivers return INVALID_ARGUMENT
                raise
            instance = self._read_instance(mig)
            known = instances.get(instance.gi_id)
            if known is not None:  # several compute instances in one GPU instance
                instance = replace(known, mig_uuids=(*known.mig_uuids, *instance.mig_uuids))
            instances[instance.gi_id] = instance
        return tuple(instances[gi] for gi in sorted(instances))

    def _read_instance(self, mig: Any) -> Instance:
        name = self._driver.call("nvmlDeviceGetName", mig)
        profile = _PROFILE.search(name)
        return Instance(
            gi_id=self._driver.call("nvmlDeviceGetGpuInstanceId", mig),
            profile=profile[1] if profile else name,
            mig_uuids=(self._driver.call("nvmlDeviceGetUUID", mig),),
            handle=mig,
        )
