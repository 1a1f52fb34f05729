"""This module says who is who: of everything that was read, each node once and each GPU where it is. Pure but for what
was chosen last.

A node may be told of by several targets, and a GPU by several nodes: one node under two addresses, a GPU that moved, or
two nodes that both swear they have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from podgpu.cluster.reading import NodeReading, TargetOutcome
from podgpu.cluster.settings import ViewSettings
from podgpu.errors import few_of
from podgpu.figures.device import Condition, DeviceFigures, Trouble, has_identity
from podgpu.metrics.conditions import NODE_GONE

AHEAD_SECONDS = 5.0
BEHIND_SECONDS = 60.0
"""An exporter's figures are some seconds old by nature: behind says less than ahead."""
MOST_NOTES = 12
PATIENCE_ROUNDS = 1.5
"""Behind the newest may be who was chosen last: in the middle of a round one is read again before the other."""
DeviceKey = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node as the view has it."""

    name: str
    target: str
    devices: tuple[DeviceFigures, ...]
    """By index; each device once."""
    age: float
    """Seconds since what is here was true."""
    old: bool = False
    notes: tuple[str, ...] = ()
    simulated: bool = False
    gone: bool = False
    """Nobody has heard of it for longer than `ViewSettings.stale_after`."""
    trouble: Trouble = field(default_factory=Trouble)


@dataclass(frozen=True, slots=True)
class Settled:
    nodes: tuple[NodeView, ...] = ()
    """By name."""
    chosen: Mapping[str, NodeReading] = field(default_factory=dict)
    """Node -> the reading that counts, by name; those too that turned out to be another node's other address."""
    siblings: Mapping[str, tuple[NodeReading, ...]] = field(default_factory=dict)
    """Node -> what other targets said of it, which counts for nothing."""
    same: Mapping[str, str] = field(default_factory=dict)
    """Node -> the node it is another address of."""
    contested: frozenset[str] = frozenset()
    """UUIDs that several fresh nodes claim: they stay on each, and count once."""


class Choices:
    """Which target was believed about which node. Two that are asked at the same time would else take turns."""

    def __init__(self) -> None:
        self._target: dict[str, str] = {}

    def choose(self, node: str, readings: Sequence[NodeReading], patience: float) -> NodeReading:
        """Whoever had the name last keeps it: while its address is in the list of those to be asked, however late it
        is; where there is no such list, while it is as good as new. Else the newest. One that sees no GPU (an exporter
        without a driver beside another) counts only where no other is as good as new."""
        newest = min(readings, key=_newest_first)
        for reading in readings:
            if reading.target == self._target.get(node) and reading.listed and reading.devices:
                return reading
        seeing = [r for r in readings if r.devices and newest.read_at - r.read_at <= patience]
        if seeing:
            readings, newest = seeing, min(seeing, key=_newest_first)
        for reading in readings:
            if reading.target == self._target.get(node) and newest.read_at - reading.read_at <= patience:
                return reading
        return newest

    def keep(self, chosen: Mapping[str, NodeReading]) -> None:
        self._target = {node: reading.target for node, reading in chosen.items()}


def settle(
    readings: Iterable[NodeReading],
    outcomes: Mapping[str, TargetOutcome],
    choices: Choices,
    settings: ViewSettings,
    now: float,
    wall: float | None = None,
) -> Settled:
    """`outcomes`: target -> how it fared. `now` is monotonic, `wall` Unix time."""
    by_node, overdue = _known(readings, now - settings.drop_after)
    chosen, siblings = _choose(by_node, choices, PATIENCE_ROUNDS * settings.interval)
    claims = _Claims(chosen, settings, now)
    nodes = []
    for name, reading in chosen.items():
        devices = claims.left(name, reading)
        if devices or not (name in overdue or (reading.devices and name in claims.same)):
            notes = bounded((*_notes(reading, siblings.get(name, ()), outcomes), *claims.notes.get(name, ())))
            age = max(0.0, now - reading.read_at)
            gone = age > settings.stale_after
            if gone:
                devices = _of_gone(devices, None if wall is None else round(wall - age, 3))
            nodes.append(
                NodeView(
                    name,
                    reading.target,
                    devices,
                    age,
                    gone or not reading.dated,
                    notes,
                    simulated=reading.simulated,
                    gone=gone,
                    trouble=claims.trouble_left(name, reading),
                )
            )
    return Settled(tuple(nodes), chosen, siblings, claims.same, frozenset(claims.contested))


def _known(readings: Iterable[NodeReading], oldest: float) -> tuple[dict[str, list[NodeReading]], frozenset[str]]:
    """By node; and the names of those that nobody has heard of since `oldest`. They stay only while somebody still
    lists their exporter, with GPUs that may be out of order, and nobody else tells of them."""
    by_node: dict[str, list[NodeReading]] = {}
    overdue: dict[str, NodeReading] = {}
    for reading in readings:
        if reading.read_at >= oldest:
            by_node.setdefault(reading.node, []).append(reading)
        elif reading.listed and reading.devices:
            overdue[reading.node] = min(overdue.get(reading.node, reading), reading, key=_newest_first)
    overdue = {name: reading for name, reading in overdue.items() if name not in by_node}
    return by_node | {name: [reading] for name, reading in overdue.items()}, frozenset(overdue)


def _of_gone(devices: Iterable[DeviceFigures], since: float | None) -> tuple[DeviceFigures, ...]:
    """As they last were, and nobody knows what became of them."""
    gone = Condition.of(NODE_GONE, since)
    return tuple(replace(device, conditions=(*device.conditions, gone)) for device in devices)


def _choose(
    by_node: Mapping[str, list[NodeReading]], choices: Choices, patience: float
) -> tuple[dict[str, NodeReading], dict[str, tuple[NodeReading, ...]]]:
    chosen: dict[str, NodeReading] = {}
    siblings: dict[str, tuple[NodeReading, ...]] = {}
    for node, everybody in sorted(by_node.items()):
        # Whose address left the list is only heard while nobody else tells of the node: it has a successor.
        told = [r for r in everybody if r.listed is not False] or everybody
        if len(told) == 1:
            chosen[node] = told[0]
        else:
            chosen[node] = winner = choices.choose(node, told, patience)
            others = (r for r in told if r is not winner and r.target != winner.target)
            siblings[node] = tuple(sorted(others, key=lambda r: r.target))
    choices.keep(chosen)
    return chosen, siblings


def _newest_first(reading: NodeReading) -> tuple[float, float, str]:
    taken_at = float("-inf") if reading.taken_at is None else reading.taken_at
    return -reading.read_at, -taken_at, reading.target


class _Claims:
    """GPUs that several nodes say are theirs, and what becomes of each."""

    def __init__(self, chosen: Mapping[str, NodeReading], settings: ViewSettings, now: float) -> None:
        self.same: dict[str, str] = {}
        self.contested: set[str] = set()
        self.notes: dict[str, list[str]] = {}
        self._lost: dict[str, set[str]] = {}
        self._settings = settings
        self._now = now
        twice = _claimed_twice(chosen)
        here = {name: _present(chosen[name]) for name in frozenset().union(*twice.values())}
        for uuid, names in sorted(twice.items()):
            missing = frozenset(name for name in names if uuid not in here[name])
            claimants = sorted((chosen[name] for name in names), key=lambda r: self._best_first(r, missing))
            self._judge(uuid, claimants, missing)

    def left(self, name: str, reading: NodeReading) -> tuple[DeviceFigures, ...]:
        """The node's devices, less those that are another's."""
        lost = self._lost.get(name)
        devices = reading.devices
        return in_order(tuple(d for d in devices if d.uuid not in lost) if lost else devices)

    def trouble_left(self, name: str, reading: NodeReading) -> Trouble:
        """A GPU that is another's now is not one that nobody can name."""
        lost = self._lost.get(name)
        if not lost or not reading.trouble.lost:
            return reading.trouble
        missed = lost - _present(reading)
        return replace(reading.trouble, lost=max(0, reading.trouble.lost - len(missed)))

    def _judge(self, uuid: str, claimants: Sequence[NodeReading], missing: frozenset[str]) -> None:
        """`missing`: those that say that they had it, and that it is gone."""
        best = claimants[0]
        for other in claimants[1:]:
            if not (best.named and other.named):
                self._lose(uuid, other.node)
                self.same[other.node] = best.node
                self._note(best.node, f"also read as {other.node}: the same GPUs under another address")
            elif self._is_gone_from(other, best, missing) or best.read_at - other.read_at > self._settings.stale_after:
                self._lose(uuid, other.node)
                self._note(best.node, f"{uuid} was on {other.node} before")
                self._note(other.node, f"{uuid} is on {best.node} now")
            else:
                self.contested.add(uuid)
                self._note(best.node, f"{uuid} is on {other.node} too, it says")
                self._note(other.node, f"{uuid} is on {best.node} too, it says")

    def _is_gone_from(self, other: NodeReading, best: NodeReading, missing: frozenset[str]) -> bool:
        return self._is_old(other) or (other.node in missing and best.node not in missing)

    def _best_first(self, reading: NodeReading, missing: frozenset[str]) -> tuple[bool, bool, bool, float, str]:
        """Fresh before old, named before not, who has it before who misses it, newer before older. All fresh ones are
        equally new: the name decides among them, the same way in every round."""
        is_old = self._is_old(reading)
        newest = -reading.read_at if is_old else 0.0
        return is_old, not reading.named, reading.node in missing, newest, reading.node

    def _is_old(self, reading: NodeReading) -> bool:
        return not reading.dated or self._now - reading.read_at > self._settings.stale_after

    def _lose(self, uuid: str, node: str) -> None:
        self._lost.setdefault(node, set()).add(uuid)

    def _note(self, node: str, note: str) -> None:
        notes = self.notes.setdefault(node, [])
        if note not in notes:
            notes.append(note)


def _present(reading: NodeReading) -> frozenset[str]:
    return frozenset(device.uuid for device in reading.devices if device.present)


def _claimed_twice(chosen: Mapping[str, NodeReading]) -> dict[str, set[str]]:
    owner: dict[str, str] = {}
    twice: dict[str, set[str]] = {}
    for name, reading in chosen.items():
        for device in reading.devices:
            uuid = device.uuid
            other = owner.setdefault(uuid, name)
            if other is not name and other != name and has_identity(uuid):
                twice.setdefault(uuid, {other}).add(name)
    return twice


def in_order(devices: tuple[DeviceFigures, ...]) -> tuple[DeviceFigures, ...]:
    """By index, each device once. Most expositions have them so."""
    last = -1
    for device in devices:
        if device.index <= last:
            return _sorted_once(devices)
        last = device.index
    return devices if len({d.uuid for d in devices}) == len(devices) else _sorted_once(devices)


def _sorted_once(devices: Iterable[DeviceFigures]) -> tuple[DeviceFigures, ...]:
    found: dict[DeviceKey, DeviceFigures] = {}
    for device in devices:
        key = device.uuid, device.instance, device.model
        other = found.get(key)
        if other is None or repr(device) < repr(other):  # any one, but the same whatever order they come in
            found[key] = device
    return tuple(sorted(found.values(), key=lambda d: (d.place[1:], d.model)))


def bounded(notes: Sequence[str], most: int = MOST_NOTES) -> tuple[str, ...]:
    """Nobody reads a thousand."""
    return tuple(notes) if len(notes) <= most else (*notes[:most], f"and {len(notes) - most} more")


def _notes(
    reading: NodeReading, siblings: Sequence[NodeReading], outcomes: Mapping[str, TargetOutcome]
) -> tuple[str, ...]:
    notes = list(reading.notes)
    for copy in (reading, *siblings):
        outcome = outcomes.get(copy.target)
        if outcome is not None and outcome.error:
            notes.append(outcome.said)
    if siblings:
        others = few_of(sibling.target for sibling in siblings)
        notes.append(f"read from {reading.target}; also reported by {others}, which is ignored")
    if reading.listed is False:
        notes.append(f"{reading.target} is no longer in the list of exporters")
    skew = reading.skew_seconds
    if not reading.dated:
        notes.append("its snapshot is not of today, by its own clock, so it counts as old; set the node's clock")
    elif skew is not None and skew > AHEAD_SECONDS:
        notes.append(f"its clock is {skew:.0f} s ahead")
    elif skew is not None and skew < -BEHIND_SECONDS:
        notes.append(f"its clock is {-skew:.0f} s behind, or its figures are that old")
    return tuple(notes)
