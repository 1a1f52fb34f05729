"""What is wrong with the GPUs, as families: each condition as 0 or 1, since when it lasts, who held what is lost."""

from __future__ import annotations

from functools import lru_cache

from podgpu.catalog import families as f
from podgpu.join.dcgm import model_name
from podgpu.join.own import Host, index_text, named
from podgpu.join.policy import Policy
from podgpu.model import Device, Family, Labels, Sample, Snapshot

Pairs = tuple[tuple[str, str], ...]


def health_families(snapshot: Snapshot, policy: Policy) -> list[Family]:
    health: list[Sample] = []
    since: list[Sample] = []
    last: list[Sample] = []
    host, blanks = policy.host, policy.replace_blanks_in_model_name
    for of in snapshot.health:
        device = of.device
        for finding in of.findings:
            condition = ("condition", finding.condition)
            health.append(Sample(_labels(device, host, blanks, condition), 1))
            detail = (("detail", finding.detail),) if finding.detail else ()
            since.append(Sample(_labels(device, host, blanks, condition, *detail), round(finding.since, 3)))
        health += (Sample(_labels(device, host, blanks, ("condition", name)), 0) for name in of.fine)
        last += (Sample(Labels([*_names(device, blanks), *named(holder)]), 1) for holder in of.last_holders)
    return [f.DEVICE_HEALTH.of(health), f.CONDITION_SINCE.of(since), f.LAST_HOLDER.of(last)]


@lru_cache(maxsize=1024)
def _labels(device: Device, host: Host, replace_blanks: bool, *more: tuple[str, str]) -> Labels:
    number, uuid, name, model = _names(device, replace_blanks)
    return Labels([number, uuid, ("pci_bus_id", device.pci_bus_id), name, model, *host, *more])


def _names(device: Device, replace_blanks: bool) -> Pairs:
    return (
        ("gpu", index_text(device)),
        ("UUID", device.uuid),
        ("device", device.name),
        ("modelName", model_name(device.model, replace_blanks)),
    )
