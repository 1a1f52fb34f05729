"""The metric families of podgpu's commands, read from families.csv. The reference is generated from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from podgpu.metrics.encode import Family, Sample
from podgpu.metrics.fields import table_rows

POD_LABELS = ("namespace", "pod", "container")
OLD_POD_LABELS = ("pod_namespace", "pod_name", "container_name")
"""Pod labels of dcgm-exporter 1.x, used with `-o`."""
EXPORTED = tuple(f"exported_{name}" for name in POD_LABELS)
"""Prometheus renames a label that the scrape target also has (honor_labels: false)."""
JOB_LABEL = "hpc_job"
NAMELESS_LABELS = ("pod_uid", "container_id")
"""Labels that identify a holder whose pod name is unknown."""
HOLDER_LABELS = frozenset(
    {*POD_LABELS, *OLD_POD_LABELS, JOB_LABEL, *NAMELESS_LABELS, "vgpu"}
    | {f"dra_{part}" for part in ("claim_name", "claim_namespace", "device_name", "driver_name", "pool_name")}
    | {"dra_mig_device_uuid", "dra_mig_profile"}
)
"""Labels that describe the holder of a device, in all versions of dcgm-exporter and podgpu."""
CLOCK_EVENTS_FIELD = 112
CLOCK_EVENTS: dict[int, str] = {
    0x1: "gpu_idle",
    0x2: "clocks_setting",
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}
"""Bit of field 112 (DCGM_FI_DEV_CLOCKS_EVENT_REASONS) -> dcgm-exporter's name of the event."""
THROTTLE_REASONS: dict[int, str] = {
    240: "power_cap",
    241: "thermal",
    242: "sync_boost",
    243: "board_limit",
    244: "low_utilization",
    245: "reliability",
    1422: "sw_thermal",
    1423: "hw_thermal",
    1424: "hw_power_brake",
}
"""DCGM field id (a time in nanoseconds) -> label `reason` of podgpu_device_throttled_seconds_total."""


def clock_events_in_words(mask: int) -> str:
    return ", ".join(event for bit, event in CLOCK_EVENTS.items() if mask & bit) or "nothing"


@dataclass(frozen=True, slots=True)
class FamilySpec:
    name: str
    type: str
    help: str
    labels: tuple[str, ...]
    part: str = ""
    """Part of the document that contains the value, if each sample is one member of that part."""
    member: str = ""
    factor: int = 0
    """If not 0, the sample times this factor is the member, an integer. If 0, both are the same float."""

    def of(self, samples: Iterable[Sample]) -> Family:
        return Family(self.name, self.type, self.help, tuple(samples))


@cache
def families_in(group: str) -> Mapping[str, FamilySpec]:
    """Returns the families of a group of families.csv by name, in the order of the file."""
    return {
        row["name"]: FamilySpec(
            row["name"],
            row["type"],
            row["help"],
            tuple(row["labels"].split()),
            row["part"],
            row["member"],
            int(row["factor"] or 0),
        )
        for row in table_rows("families.csv")
        if row["group"] == group
    }


def make_families(group: str, samples: Mapping[str, Iterable[Sample]]) -> list[Family]:
    """Creates families of the group from their samples by name."""
    specs = families_in(group)
    return [specs[name].of(found) for name, found in samples.items()]
