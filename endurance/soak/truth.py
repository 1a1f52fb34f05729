"""The true state of the simulated node, for comparison with the metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

RELEASED_SECONDS = 900.0
"""How long released devices are stored. Longer than the metrics may still show their holders."""


class SoakClock:
    """A clock that moves only when `advance` is called."""

    def __init__(self) -> None:
        self._now = 1000.0

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return 1_700_000_000.0 + self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


class HeldDevice(NamedTuple):
    """A device and its holder, by the values of the metric labels."""

    uuid: str
    gi_id: str
    """Empty for a whole GPU."""
    namespace: str
    pod: str


@dataclass
class Truth:
    clock: SoakClock
    held: dict[HeldDevice, float] = field(default_factory=dict)
    """Device -> time of its allocation."""
    shares: dict[HeldDevice, float] = field(default_factory=dict)
    """Shares of time-sliced GPUs."""
    released: dict[HeldDevice, float] = field(default_factory=dict)
    kubelet_broken_until: float = 0.0
    """Time of the last repair; infinite while it is broken."""
    gpu_broken_until: dict[int, float] = field(default_factory=dict)
    """The same for each GPU, by number: lost, hung, reset, new MIG layout, or reloaded driver."""
    unlisted: set[int] = field(default_factory=set)
    """Numbers of GPUs that the driver did not list, until the metrics show them again."""
    hung_until: float = 0.0
    """Time when the last call that hung returned; infinite while a call hangs."""
    changed: dict[str, float] = field(default_factory=dict)
    """Time of the last change of holders, by UUID."""
    resets: set[str] = field(default_factory=set)
    """UUIDs of GPUs that were reset since the last check."""

    def hold(self, holding: HeldDevice, share: float | None = None) -> None:
        self.held[holding] = self.changed[holding.uuid] = self.clock.monotonic()
        if share is not None:
            self.shares[holding] = share

    def release(self, holding: HeldDevice) -> None:
        now = self.clock.monotonic()
        del self.held[holding]
        self.released[holding] = self.changed[holding.uuid] = now
        self.released = {
            past: at for past, at in self.released.items() if now - at < RELEASED_SECONDS
        }
        self.shares = {
            shared: share
            for shared, share in self.shares.items()
            if shared in self.held or shared in self.released
        }

    def kubelet_healthy_for(self) -> float:
        return self.clock.monotonic() - self.kubelet_broken_until

    def gpu_healthy_for(self, number: int) -> float:
        return self.clock.monotonic() - self.gpu_broken_until.get(number, 0.0)

    def no_call_hangs_for(self) -> float:
        return self.clock.monotonic() - self.hung_until

    def describe(self) -> str:
        """Returns a text about components that are broken or were repaired recently."""
        now = self.clock.monotonic()
        broken = {f"GPU {number}": until for number, until in self.gpu_broken_until.items()}
        broken["the kubelet"] = self.kubelet_broken_until
        texts = (
            f"{name} {'is broken' if until > now else f'was repaired {now - until:.0f} s ago'}"
            for name, until in broken.items()
        )
        return "; ".join(texts)

    def held_part_within(self, holding: HeldDevice, seconds: float) -> bool:
        """Returns `held_within` for the GPU or any of its instances."""
        known = (*self.held, *self.released)
        return any(
            part._replace(gi_id="") == holding and self.held_within(part, seconds) for part in known
        )

    def held_within(self, holding: HeldDevice, seconds: float) -> bool:
        """Returns True if the device is held, or was released at most `seconds` ago."""
        released = self.released.get(holding)
        return holding in self.held or (
            released is not None and self.clock.monotonic() - released <= seconds
        )
