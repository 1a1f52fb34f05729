"""This module says what containers ask tkestack gpu-manager for: hundredths of a card and blocks of 256 MiB. Pure.

Its device ids count over the whole node and say nothing about the card: how many there are is all they tell.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from podgpu.errors import SourceError
from podgpu.holders.holdings import HeldId
from podgpu.holders.source import LAGGING
from podgpu.model import Allocation, Unmapped, VcudaRequest, Who, Workload, parts_of

CORE = "tencent.com/vcuda-core"
MEMORY = "tencent.com/vcuda-memory"

_ID = re.compile(r"tencent\.com/vcuda-(?P<kind>core|memory-268435456)-[0-9]+", re.ASCII)


def count_vcuda(held: Iterable[HeldId]) -> tuple[VcudaRequest, ...]:
    """From the ids in the containers' hands. An id counts once, on however many NUMA nodes it is listed."""
    ids: dict[Workload, set[str]] = {}
    for held_id in held:
        if held_id.resource in (CORE, MEMORY):
            ids.setdefault(held_id.holder, set()).add(held_id.text)
    return in_order(request for holder, texts in ids.items() if (request := _count(holder, texts)))


def _count(holder: Workload, texts: Iterable[str]) -> VcudaRequest | None:
    kinds = Counter(found["kind"] for text in texts if (found := _ID.fullmatch(text)))
    return VcudaRequest(holder, kinds["core"], kinds["memory-268435456"]) if kinds else None


def merge_vcuda(
    readings: Mapping[str, Allocation],
    complete: Callable[[Workload], Workload],
) -> tuple[tuple[VcudaRequest, ...], list[Unmapped]]:
    """One for each workload, by the most trusted source that names it; and those whose identity is refused."""
    merged: dict[Who, VcudaRequest] = {}
    refused: list[Unmapped] = []
    for source, reading in readings.items():
        if LAGGING.get(source) in readings:
            continue
        for request in reading.vcuda:
            try:
                holder = complete(request.holder)
            except SourceError as e:
                refused.append(Unmapped(source, e.reason, "", CORE, request.holder))
            else:
                merged.setdefault(holder.who, replace(request, holder=holder))
    return in_order(merged.values()), refused


def in_order(requests: Iterable[VcudaRequest]) -> tuple[VcudaRequest, ...]:
    return tuple(sorted(requests, key=lambda request: parts_of(request.holder)))
