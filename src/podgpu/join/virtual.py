"""`--kubernetes-virtual-gpus`: one series per holder of a shared device, with what the holder itself used.

dcgm-exporter copies the device's figures to every holder; here utilisation, memory, power and energy are the holder's
own, and absent where they are not known.
"""

from __future__ import annotations

from collections.abc import Mapping

from podgpu.model import ContainerUsage, Value

GPU_UTIL, FB_USED, POWER_USAGE, TOTAL_ENERGY = 203, 252, 155, 156
GPU_UTIL_RATIO, FB_USED_BYTES, ENERGY_JOULES = 1613, 1627, 1611
ATTRIBUTED = frozenset({GPU_UTIL, FB_USED, POWER_USAGE, TOTAL_ENERGY, GPU_UTIL_RATIO, FB_USED_BYTES, ENERGY_JOULES})
KEPT_FOR_DEVICE = frozenset({GPU_UTIL, FB_USED, GPU_UTIL_RATIO, FB_USED_BYTES})
"""The device's own series stays beside the holders' for these two, as in dcgm-exporter, under either name."""
_MIB = 1024 * 1024
_MJ = 1000


def own_values(device: Mapping[int, Value], usage: ContainerUsage | None) -> dict[int, Value]:
    """The device's values as one holder sees them."""
    values = {field: value for field, value in device.items() if field not in ATTRIBUTED}
    own = {} if usage is None else _attributed(device, usage)
    return values | {field: value for field, value in own.items() if field in device and value is not None}


def _attributed(device: Mapping[int, Value], usage: ContainerUsage) -> dict[int, Value | None]:
    power = device.get(POWER_USAGE)
    watts = power * usage.power_part if usage.power_part is not None and isinstance(power, float) else None
    return {
        GPU_UTIL: None if usage.utilization is None else round(100 * usage.utilization),
        FB_USED: None if usage.memory is None else usage.memory // _MIB,
        POWER_USAGE: watts,
        TOTAL_ENERGY: usage.energy_mj,
        GPU_UTIL_RATIO: None if usage.utilization is None else round(usage.utilization, 2),
        FB_USED_BYTES: usage.memory,
        ENERGY_JOULES: None if usage.energy_mj is None else usage.energy_mj // _MJ,
    }
