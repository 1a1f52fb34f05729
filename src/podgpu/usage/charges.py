"""This module says what of one device's turn is whose: busy time, memory and energy. Pure; knows one turn and nothing
before it.

Every division leaves a rest that nobody can be charged for, so that parts and rest are the device's figure again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import lcm

from podgpu.metrics.mig import slices_of_gpu, slices_of_profile
from podgpu.model import Device, DeviceUsage, ProcessUsage, Who

Weight = int | Fraction
Weights = tuple[Mapping[Who, Weight], Weight]
"""What each is to pay in proportion, and what nobody is."""

LONGEST_NS = 3600 * 10**9
"""No turn is longer. What says so is a clock that jumped."""


def believed(ns: int) -> int:
    """A length of time, or 0 where a clock jumped."""
    return ns if 0 < ns <= LONGEST_NS else 0


@dataclass(frozen=True, slots=True)
class Charge:
    """A device's figure of one turn and what of it is charged to whom."""

    whole: int | None = None
    """None: the driver does not tell."""
    parts: Mapping[Who, int] | None = None
    """None: whose it is cannot be told. Who is missing from it could not be charged this time."""

    @property
    def rest(self) -> int | None:
        return None if self.whole is None else self.whole - sum((self.parts or {}).values())


UNKNOWN = Charge()


@dataclass(frozen=True)
class Scene:
    """One device in one turn, and who is there."""

    usage: DeviceUsage
    shares: Mapping[Who, Fraction | None] = field(default_factory=dict)
    """Of the holders; None where nobody knows it."""
    payers: Mapping[int, Who] = field(default_factory=dict)
    """Pid -> who is charged for that process. Nobody is for those that are missing."""
    untold: frozenset[int] = frozenset()
    """Processes of which it cannot be told whose they are: of any holder, as far as is known."""
    left: Who | None = None
    """The holder whose processes ended since the last turn, where all that ended were its."""

    @property
    def device(self) -> Device:
        return self.usage.device

    @cached_property
    def window(self) -> int:
        return believed(self.usage.window_ns)

    @cached_property
    def processes(self) -> tuple[ProcessUsage, ...] | None:
        return processes_on(self.usage)

    @cached_property
    def people(self) -> list[Who]:
        """Holders and users, always in the same order: ties are decided by it."""
        return sorted(self.shares.keys() | set(self.payers.values()))

    def certain(self, untold: bool) -> list[Who]:
        """The people, but for holders without a process that is known for theirs where there are `untold` ones."""
        seen = set(self.payers.values())
        return [who for who in self.people if who in seen] if untold else self.people


def in_pieces(device: Device) -> bool:
    """In MIG mode nothing runs on the GPU as such. What its instances tell would be counted twice if it told it too."""
    return device.mig_enabled and not device.is_instance


def processes_on(usage: DeviceUsage) -> tuple[ProcessUsage, ...] | None:
    """None where they cannot be seen. NVML lists those of all instances on the GPU, each with its instance."""
    if usage.processes is None or in_pieces(usage.device):
        return None
    return tuple(process for process in usage.processes if process.device == usage.device.key)


# Busy time


def charge_busy(scene: Scene) -> Charge:
    if in_pieces(scene.device):
        return UNKNOWN
    told = scene.usage.busy_ns
    busy = None if told is None else min(max(told, 0), scene.window)
    if scene.processes is None:
        return Charge(busy)
    if scene.usage.process_busy_ns is not None:
        return _by_process(scene, scene.usage.process_busy_ns, busy)
    if busy is not None and scene.device.is_instance and len(scene.shares) == 1 and len(scene.people) == 1:
        return Charge(busy, {scene.people[0]: busy})
    return Charge(busy)


def _by_process(scene: Scene, process_busy: Mapping[int, int | None], told: int | None) -> Charge:
    """The driver's figure, unless its processes' own come to more: then their sum, within the window.

    The driver tells nothing of a process that has ended (measured). What nobody who still runs accounts for was its.
    """
    unknown = {scene.payers.get(pid) for pid, ns in process_busy.items() if ns is None}
    certain = scene.certain(any(process_busy.get(pid, 0) != 0 for pid in scene.untold))
    parts, others = {who: 0 for who in certain if who not in unknown}, 0
    for pid, ns in process_busy.items():
        who = scene.payers.get(pid)
        if who in parts:
            parts[who] += max(ns or 0, 0)
        else:
            others += max(ns or 0, 0)
    together = sum(parts.values()) + others
    if told is not None and together <= told:
        if scene.left in parts and not unknown and scene.usage.method == "samples":
            parts[scene.left] += told - together
        return Charge(told, parts)
    if together <= scene.window:
        return Charge(together, parts)
    return _divide(scene.window, parts, others)


def bound_busy(scene: Scene, busy: Charge) -> Mapping[Who, tuple[int, int]]:
    """The least and the most each can have run, where that is wanted. The figure itself always lies between them."""
    if not scene.usage.bounded or busy.parts is None or busy.whole is None:
        return {}
    found = _residency_bounds(scene, busy.whole) or _sample_bounds(scene, busy)
    return {
        who: (min(least, busy.parts[who]), max(most, busy.parts[who]))
        for who, (least, most) in found.items()
        if who in busy.parts
    }


def _residency_bounds(scene: Scene, whole: int) -> dict[Who, tuple[int, int]] | None:
    """A context on the engine may rest, but nobody works without being on it."""
    if scene.usage.resident_ns is None:
        return None
    resident, saving = dict.fromkeys(scene.people, 0), dict.fromkeys(scene.people, 0)
    for pid, ns in scene.usage.resident_ns.items():
        if pid in scene.payers:
            resident[scene.payers[pid]] += ns
            saving[scene.payers[pid]] += scene.usage.saving_ns.get(pid, 0)
    everybody = sum(scene.usage.resident_ns.values())
    worked = max(0, whole - scene.usage.switching_ns)
    return {who: bounds(own, everybody - own + saving[who], worked) for who, own in resident.items()}


def _sample_bounds(scene: Scene, busy: Charge) -> dict[Who, tuple[int, int]]:
    """Samples tell the whole; with one at work it is that one's, with several anybody's."""
    at_work = set(scene.payers.values())
    alone = len(at_work) == 1 and not scene.untold
    whole, parts = busy.whole or 0, busy.parts or {}
    return {who: (part, part) if alone else (0, whole if who in at_work else part) for who, part in parts.items()}


def bounds(resident: int, others: int, busy: int) -> tuple[int, int]:
    """The least and the most somebody can have run, of `busy` in all, while the others were resident for so long."""
    return min(resident, max(0, busy - others)), min(resident, busy)


# Memory


def charge_memory(scene: Scene) -> Charge:
    """Where the people's own comes to more than the device's figure, theirs is the figure."""
    if in_pieces(scene.device):
        return UNKNOWN
    told = scene.usage.memory_used
    if scene.processes is None:
        return Charge(told)
    parts = dict.fromkeys(scene.certain(_untold_listed(scene, scene.processes)), 0)
    for process in scene.processes:
        who = scene.payers.get(process.pid)
        if who is None or who not in parts:
            continue
        if process.memory is None:
            del parts[who]  # the sum of the others would be taken for all of it
        else:
            parts[who] += process.memory
    return Charge(told if told is None else max(told, sum(parts.values())), parts)


def count_processes(scene: Scene) -> Mapping[Who, int] | None:
    if scene.processes is None:
        return None
    counts = dict.fromkeys(scene.certain(_untold_listed(scene, scene.processes)), 0)
    for process in scene.processes:
        if process.pid in scene.payers:
            counts[scene.payers[process.pid]] += 1
    return counts


def _untold_listed(scene: Scene, processes: Iterable[ProcessUsage]) -> bool:
    return bool(scene.untold) and any(process.pid in scene.untold for process in processes)


# Energy


def charge_energy(energy: int | None, weights: Weights | None) -> Charge:
    return Charge(energy) if energy is None or weights is None else _divide(energy, *weights)


def weigh_energy(scene: Scene, busy: Charge) -> Weights | None:
    """By busy time; by share when nobody ran. MIG instances have none of their own: see `weigh_mig_energy`."""
    return None if scene.device.is_instance or busy.parts is None else _weights(scene, busy, ran=bool(busy.whole))


def weigh_mig_energy(model: str, instances: Mapping[str, tuple[Scene, Charge]]) -> Weights | None:
    """A GPU's energy among the people of its instances (by key, with their busy time), whom it calls (key, *who).

    By busy time and size; by share and size when nobody ran. What an instance with several holders used is in the
    rest. If one instance cannot tell its busy time, nobody else's part can be told either.
    """
    ran = any(busy.whole for _, busy in instances.values())
    slices = {key: slices_of_profile(scene.device.profile) or 0 for key, (scene, _) in instances.items()}
    if not all(slices.values()) or not all(_tells(scene, busy, ran) for scene, busy in instances.values()):
        return None
    parts: dict[Who, Weight] = {}
    rest: Weight = 0 if ran else max(0, slices_of_gpu(model) - sum(slices.values()))
    for key, (scene, busy) in sorted(instances.items()):
        weights, left = _weights(scene, busy, ran)
        parts |= {(key, *who): weight * slices[key] for who, weight in weights.items()}
        rest += left * slices[key]
    return parts, rest


def _tells(scene: Scene, busy: Charge, ran: bool) -> bool:
    """Where others ran, an instance without a window says nothing by being at 0."""
    return busy.whole is not None and (scene.window > 0 or not ran)


def _weights(scene: Scene, busy: Charge, ran: bool) -> Weights:
    """What each is to pay in proportion, and what nobody is."""
    if busy.parts is None:
        return {}, (busy.whole or 0) if ran else 1
    return (busy.parts, busy.rest or 0) if ran else _idle_weights(scene)


def _idle_weights(scene: Scene) -> Weights:
    """By share, 1 in all; for what nobody is known to hold nobody pays. Without a window, nobody for anything.

    A sole holder has all of the device. Of several, who has no known share pays nothing.
    """
    fallback = Fraction(1 if len(scene.shares) == 1 else 0)
    shares = {who: fallback if share is None else share for who, share in scene.shares.items()} if scene.window else {}
    given = sum(shares.values(), start=Fraction(0))
    if given > 1:
        return {who: shares.get(who, 0) / given for who in scene.people}, 0
    return {who: shares.get(who, 0) for who in scene.people}, 1 - given


def _divide(whole: int, weights: Mapping[Who, Weight], rest: Weight) -> Charge:
    """Ties go by the order of the weights; nobody pays for `rest`."""
    unit = lcm(rest.denominator, *(weight.denominator for weight in weights.values()))
    *parts, _ = split(whole, [int(weight * unit) for weight in (*weights.values(), rest)])
    return Charge(whole, dict(zip(weights, parts, strict=True)))


# Whole numbers that add up again: exact at any size, no floats


def split(total: int, weights: Sequence[int]) -> list[int]:
    """`total` in proportion to the weights, each part less than one unit from its exact proportion.

    What rounding down leaves goes to the largest remainders, the earlier of two equal ones first. Where all weights
    are 0 so are the parts, which is the only case in which they do not add up: whose it is then, the caller says.
    """
    whole = sum(weights)
    if whole == 0:
        return [0] * len(weights)
    parts, remainders = [], []
    for weight in weights:
        part, remainder = divmod(total * weight, whole)
        parts.append(part)
        remainders.append(remainder)
    by_remainder = sorted(range(len(weights)), key=lambda place: -remainders[place])
    for place in by_remainder[: total - sum(parts)]:
        parts[place] += 1
    return parts
