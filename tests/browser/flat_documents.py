"""Documents from flat devices, for tests that describe a device in one line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from podgpu.model import Condition, DeviceState, Holder, HolderUsage, MigInstance, Workload, WorkloadOwner


@dataclass(frozen=True, slots=True)
class HolderFigures:
    holder: Workload
    utilization: float | None = None
    memory: int | None = None
    processes: int | None = None
    busy_seconds: float | None = None
    idle_seconds: float | None = None
    energy_joules: float | None = None
    share: float | None = None
    idle_since: float | None = None
    owner: WorkloadOwner | None = None
    cost_per_hour: float | None = None


@dataclass(frozen=True, slots=True)
class ConditionWords:
    name: str
    since: float | None
    says: str
    do: str


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """A GPU, or with `instance` one MIG instance of it."""

    uuid: str
    index: int
    model: str = ""
    node: str = ""
    instance: str = ""
    profile: str = ""
    utilization: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    power_watts: float | None = None
    temperature: float | None = None
    energy_joules: float | None = None
    holders: tuple[HolderFigures, ...] = ()
    conditions: tuple[ConditionWords, ...] = ()
    present: bool = True
    last_holders: tuple[Workload, ...] = ()
    price_per_hour: float | None = None


def documents_of(devices: Iterable[DeviceFigures]) -> list[DeviceState]:
    whole: dict[str, DeviceState] = {}
    for device in devices:
        slot: dict[str, Any] = {
            "utilization_ratio": device.utilization,
            "memory_used_bytes": device.memory_used,
            "memory_total_bytes": device.memory_total,
            "fields": {},
            "holders": tuple(map(_holder, device.holders)),
        }
        index = device.index if device.index >= 0 else None
        known = whole.get(device.uuid) or DeviceState(uuid=device.uuid, index=index, model=device.model, hidden=True)
        conditions = tuple(Condition(c.name, c.since) for c in device.conditions)
        if not device.present and all(c.name != "lost" for c in conditions):
            conditions = (*conditions, Condition("lost"))
        known = msgspec.structs.replace(known, conditions=known.conditions or conditions)
        if device.instance:
            own = MigInstance(id=int(device.instance), profile=device.profile, **slot)
            whole[device.uuid] = msgspec.structs.replace(known, instances=(*known.instances, own))
        else:
            whole[device.uuid] = msgspec.structs.replace(
                known,
                hidden=False,
                power_mw=None if device.power_watts is None else round(device.power_watts * 1000),
                temperature_celsius=device.temperature,
                last_holders=device.last_holders,
                **slot,
            )
    return list(whole.values())


def _holder(of: HolderFigures) -> Holder:
    who = of.holder
    return Holder(
        *(who.namespace, who.pod, who.container, who.uid, who.container_id, who.job),
        source="kubelet",
        share_ratio=of.share,
        usage=HolderUsage(
            utilization_ratio=of.utilization,
            memory_used_bytes=of.memory,
            processes=of.processes,
            busy_ns=None if of.busy_seconds is None else round(of.busy_seconds * 1e9),
            idle_ns=None if of.idle_seconds is None else round(of.idle_seconds * 1e9),
            energy_mj=None if of.energy_joules is None else round(of.energy_joules * 1000),
            idle_since=of.idle_since,
        ),
    )
