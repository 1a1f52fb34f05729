"""What is really so on the simulated node, by the simulated clock: the judge holds every exposition against it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

REMEMBERED = 900.0
"""Seconds for which what was released is known: longer than any exposition may still name it."""


class SoakClock:
    """Moves when told. Every reader of it is in this process."""

    def __init__(self) -> None:
        self._now = 1000.0

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return 1_700_000_000.0 + self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


class Holding(NamedTuple):
    """One container has one device, as the exposition's labels name both."""

    uuid: str
    gi_id: str
    """Empty for a whole GPU."""
    namespace: str
    pod: str


@dataclass
class Truth:
    clock: SoakClock
    held: dict[Holding, float] = field(default_factory=dict)
    """Holding -> since when."""
    shares: dict[Holding, float] = field(default_factory=dict)
    """Where the device is cut into slices: the part the holder has."""
    released: dict[Holding, float] = field(default_factory=dict)
    kubelet_ill_until: float = 0.0
    """When it was last ill; the moment itself while it is."""
    gpu_ill_until: dict[int, float] = field(default_factory=dict)
    """The same for each GPU by its number: lost, hung, reset, relaid, or under a driver that was re-loaded."""
    changed: dict[str, float] = field(default_factory=dict)
    """UUID -> when somebody was last given the GPU or a part of it, or gave it back."""
    resets: set[str] = field(default_factory=set)
    """UUIDs of GPUs whose driver's own counters began anew since the last exposition."""

    def hold(self, holding: Holding, share: float | None = None) -> None:
        self.held[holding] = self.changed[holding.uuid] = self.clock.monotonic()
        if share is not None:
            self.shares[holding] = share

    def release(self, holding: Holding) -> None:
        now = self.clock.monotonic()
        del self.held[holding]
        self.released[holding] = self.changed[holding.uuid] = now
        self.released = {past: at for past, at in self.released.items() if now - at < REMEMBERED}
        self.shares = {
            shared: share for shared, share in self.shares.items() if shared in self.held or shared in self.released
        }

    def kubelet_well_for(self) -> float:
        return self.clock.monotonic() - self.kubelet_ill_until

    def gpu_well_for(self, number: int) -> float:
        return self.clock.monotonic() - self.gpu_ill_until.get(number, 0.0)

    def describe(self) -> str:
        """Who is ill, or was a moment ago."""
        now = self.clock.monotonic()
        ill = {f"GPU {number}": until for number, until in self.gpu_ill_until.items()}
        ill["the kubelet"] = self.kubelet_ill_until
        texts = (
            f"{who} {'is ill' if until > now else f'was ill {now - until:.0f} s ago'}" for who, until in ill.items()
        )
        return "; ".join(texts)

    def held_part_within(self, holding: Holding, seconds: float) -> bool:
        """The same of the GPU or any instance of it."""
        known = (*self.held, *self.released)
        return any(part._replace(gi_id="") == holding and self.held_within(part, seconds) for part in known)

    def held_within(self, holding: Holding, seconds: float) -> bool:
        """Whether it is held now, or was until at most so long ago."""
        released = self.released.get(holding)
        return holding in self.held or (released is not None and self.clock.monotonic() - released <= seconds)
