"""Stretch divides the energy of several turns, told at once, among the turns by what each is thought to have used, and
within each turn as always. Pure.

The energy counter is dear to read, so while the same processes run it is read once in some seconds. Who ran in one of
those seconds pays for that second, be it gone when the figure comes; parts and rest are the figure, to the millijoule.
"""

from __future__ import annotations

from collections.abc import Mapping

from podgpu.model import DeviceUsage, Who
from podgpu.usage.charges import Charge, Weights, charge_energy


class Stretch:
    """Of one GPU: the turns whose energy is not told yet."""

    def __init__(self) -> None:
        self._parts: dict[Who, int] = {}
        """What each is thought to have used, in nanojoules."""
        self._rest = 0
        self.namespaces: dict[Who, str] = {}
        """Of everybody in it: who is gone when the figure comes has no account any more."""

    def turn(self, usage: DeviceUsage, weights: Weights | None, namespaces: Mapping[Who, str]) -> Charge:
        """One turn more; what is charged now. `weights` None: whose the turn's energy is cannot be told."""
        if usage.energy_estimate_nj is None:
            self._begin_anew()  # either each turn has its own figure, or what was used is lost
            return charge_energy(usage.energy_mj, weights)
        self._add(usage.energy_estimate_nj, weights, namespaces)
        if usage.energy_mj is None:
            return Charge()
        charge = self._divide(usage.energy_mj, weights)
        self._begin_anew(keep=charge.parts or {})
        self._add(usage.energy_since_nj, weights, namespaces)
        return charge

    def _add(self, estimate: int, weights: Weights | None, namespaces: Mapping[Who, str]) -> None:
        charge = charge_energy(estimate, weights)
        for who, part in (charge.parts or {}).items():
            self._parts[who] = self._parts.get(who, 0) + part
        self._rest += charge.rest or 0
        self.namespaces.update(namespaces)

    def _divide(self, energy: int, weights: Weights | None) -> Charge:
        if not self._rest and not any(self._parts.values()):
            return charge_energy(energy, weights)
        ordered = {who: self._parts[who] for who in sorted(self._parts)}
        return charge_energy(energy, (ordered, self._rest))

    def _begin_anew(self, keep: Mapping[Who, int] | None = None) -> None:
        self._parts, self._rest = {}, 0
        self.namespaces = {who: name for who, name in self.namespaces.items() if keep and who in keep}
