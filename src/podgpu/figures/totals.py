"""This module owns the totals of a picture: how many GPUs are allocated, used, idle, free, broken, and what that costs.

Everything is in GPUs: a MIG instance is the part of one that its compute slices are, a share is a part of its device.
At all times allocated = used + idle + unknown and gpus = allocated + free, to the last digit that is written. Broken
ones are among all of these. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import fsum
from typing import Literal

from podgpu.figures.device import DeviceFigures, HolderFigures
from podgpu.figures.parts import WHOLE, PhysicalGpu, holder_parts, physical_gpus_once
from podgpu.figures.picture import NamespacePicture, NodePicture, Picture
from podgpu.model import Workload

Use = Literal["used", "idle", "unknown"]
BLIND = frozenset({"lost", "unreadable", "driver_away", "node_gone"})
"""Conditions with which nothing that is known of a device is of now."""
_WRITTEN = 10_000
"""Totals are whole numbers of this part of a GPU."""


@dataclass(frozen=True, slots=True)
class Totals:
    """In GPUs. Money is None without prices, or where nothing that is held has one."""

    gpus: int = 0
    allocated: float = 0.0
    used: float = 0.0
    idle: float = 0.0
    """Held and idle, from the first second on."""
    unknown: float = 0.0
    """Held, and nobody knows whether anything runs there."""
    free: float = 0.0
    """Held by nobody; a broken one too."""
    broken: int = 0
    power_watts: float | None = None
    cost_per_hour: float | None = None
    wasted_per_hour: float | None = None
    """What is held and idle costs so much."""


def use_of(device: DeviceFigures, of: HolderFigures, watched: bool = False) -> Use:
    """What a holder does with what it holds. `watched`: somebody follows every holder, so that one without `idle_since`
    has run something lately, though it may run nothing at this moment."""
    if is_blind(device):
        return "unknown"
    if of.idle_since is not None:
        return "idle"
    ratio = device.utilization if of.utilization is None else of.utilization
    if ratio:
        return "used"
    if of.utilization == 0 and of.processes and device.utilization:
        # The driver's samples go to the busiest process alone: beside it, a 0 says nothing of who has a process too.
        return "unknown"
    if ratio is None and of.processes != 0:
        return "unknown"
    return "used" if watched and ratio is not None else "idle"


@dataclass(slots=True)
class Tally:
    """Totals as far as they were counted: of a picture, or of one namespace in it."""

    gpus: int = 0
    uses: dict[Use, int] = field(default_factory=lambda: {"used": 0, "idle": 0, "unknown": 0})
    """In parts of a GPU."""
    broken: int = 0
    watts: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    wasted: list[float] = field(default_factory=list)
    held: bool = False

    def hold(self, part: int, use: Use, cost: float | None) -> None:
        self.held = True
        self.uses[use] += part
        if cost is not None:
            self.costs.append(cost)
            if use == "idle":
                self.wasted.append(cost)

    def totals(self, priced: bool) -> Totals:
        """`priced`: there are prices."""
        allocated = round_half_up(sum(self.uses.values()))
        used, idle, unknown = _rounded_to(allocated, tuple(self.uses.values()))
        has_cost = priced and (bool(self.costs) or not self.held)
        return Totals(
            gpus=self.gpus,
            allocated=allocated / _WRITTEN,
            used=used / _WRITTEN,
            idle=idle / _WRITTEN,
            unknown=unknown / _WRITTEN,
            free=max(0, self.gpus * _WRITTEN - allocated) / _WRITTEN,
            broken=self.broken,
            power_watts=fsum(self.watts) if self.watts else None,
            cost_per_hour=fsum(self.costs) if has_cost else None,
            wasted_per_hour=fsum(self.wasted) if has_cost else None,
        )


class Tallies:
    """Nodes as far as they were counted, and what each group of holders has of them: each namespace, unless told
    otherwise."""

    def __init__(self, watched: bool = False, group: Callable[[Workload], str] = lambda who: who.namespace) -> None:
        """`group`: the name of the group a holder is in, empty: of none."""
        self.whole = Tally()
        self.groups: dict[str, Tally] = {}
        self._watched = watched
        self._group = group
        self._counted: set[str] = set()

    def add_nodes(self, nodes: Iterable[NodePicture]) -> None:
        for node in nodes:
            self.add_node(node.devices, node.old)

    def add_node(self, devices: Iterable[DeviceFigures], old: bool = False) -> None:
        """`old`: what is known of it is not of now."""
        for gpu in physical_gpus_once(devices, self._counted):
            self._add(gpu, old)

    def _add(self, gpu: PhysicalGpu, old: bool) -> None:
        whole = self.whole
        whole.gpus += 1
        whole.broken += any(device.conditions or not device.present for device in gpu.devices)
        if not old and gpu.power_watts is not None:
            whole.watts.append(gpu.power_watts)
        blind = old or gpu_is_blind(gpu)
        for device, part in gpu.slots():
            for of, share in holder_parts(device.holders, part) if device.holders else ():
                use: Use = "unknown" if blind else use_of(device, of, self._watched)
                whole.hold(share, use, of.cost_per_hour)
                if group := self._group(of.holder):
                    self._of(group).hold(share, use, of.cost_per_hour)

    def _of(self, group: str) -> Tally:
        tally = self.groups.get(group)
        if tally is None:
            tally = self.groups[group] = Tally()
        return tally


def is_blind(device: DeviceFigures) -> bool:
    """Whether nothing that is known of it is of now."""
    return not device.present or any(condition.name in BLIND for condition in device.conditions)


def gpu_is_blind(gpu: PhysicalGpu) -> bool:
    """What takes a GPU away takes its instances with it."""
    return gpu.own is not None and is_blind(gpu.own)


def totals_of(picture: Picture) -> Totals:
    tallies = Tallies(picture.idle_after_seconds is not None)
    tallies.add_nodes(picture.nodes)
    return tallies.whole.totals(bool(picture.currency))


def pod_totals(picture: Picture, namespace: str, pod: str) -> Totals:
    """Of what one pod holds. `gpus`, `free` and `broken` are no pod's: 0."""
    tallies = Tallies(
        picture.idle_after_seconds is not None,
        lambda who: "it" if (who.namespace, who.pod) == (namespace, pod) else "",
    )
    tallies.add_nodes(picture.nodes)
    return tallies.groups.get("it", Tally()).totals(bool(picture.currency))


def namespace_totals(nodes: Iterable[NodePicture], *, watched: bool, priced: bool) -> Mapping[str, Totals]:
    """Of each namespace that holds anything. `gpus`, `free` and `broken` are no namespace's: 0."""
    tallies = Tallies(watched)
    tallies.add_nodes(nodes)
    return {name: tally.totals(priced) for name, tally in tallies.groups.items()}


def totals_of_devices(
    devices: Iterable[DeviceFigures], *, watched: bool = False, priced: bool = False, old_nodes: Container[str] = ()
) -> Totals:
    """The same of devices that say themselves which node they are on, as `podgpu top` has them."""
    nodes: dict[str, list[DeviceFigures]] = {}
    for device in devices:
        nodes.setdefault(device.node, []).append(device)
    tallies = Tallies(watched)
    for name, of_node in nodes.items():
        tallies.add_node(of_node, old=name in old_nodes)
    return tallies.whole.totals(priced)


def with_totals(of: NamespacePicture, held: Totals | None, priced: bool) -> NamespacePicture:
    """What the namespace holds, beside what it used; None: nothing any more."""
    held = held or Tally().totals(priced)
    return replace(
        of,
        allocated_gpus=held.allocated,
        used_gpus=None if held.allocated and held.unknown == held.allocated else held.used,
        idle_gpus=held.idle,
        unknown_gpus=held.unknown,
        cost_per_hour=held.cost_per_hour,
        wasted_per_hour=held.wasted_per_hour,
    )


# Rounding


def round_half_up(parts: int) -> int:
    """Parts of a GPU as whole numbers of what is written."""
    return (2 * parts * _WRITTEN + WHOLE) // (2 * WHOLE)


def _rounded_to(total: int, parts: tuple[int, ...]) -> list[int]:
    """Each part as it is written, so that they add up to the total: the largest rests are rounded up."""
    written = [part * _WRITTEN // WHOLE for part in parts]
    rests = sorted(range(len(parts)), key=lambda place: -(parts[place] * _WRITTEN % WHOLE))
    for place in rests[: total - sum(written)]:
        written[place] += 1
    return written
