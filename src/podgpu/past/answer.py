"""What the answers about a period have in common."""

from __future__ import annotations

import msgspec


class PeriodAnswer(msgspec.Struct, omit_defaults=True, kw_only=True):
    api: str = msgspec.field(default_factory=lambda: "podgpu/v1")
    from_: float = msgspec.field(name="from")
    to: float
    currency: str = ""
    prices: str = ""
    source: str = ""  # with Prometheus: name of the recording rule, or `counters`
    simulated: bool = False
    in_memory: bool = False  # a restart of podgpu loses the history
    notes: list[str] = []  # messages about missing data
