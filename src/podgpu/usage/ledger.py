"""Ledger knows who used how much of which device since podgpu started: it integrates turn after turn, in whole ns, mJ
and bytes. Pure.

In every turn, what the accounts of a device are charged and what nobody could be is the device's own figure, to the
last unit. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import TypeVar

from podgpu.metrics.mig import billed_name
from podgpu.model import Assignment, Device, DeviceUsage, Usage, Who, Workload, physical
from podgpu.usage.accounts import Account, DeviceBook, Entry, NamespaceBook
from podgpu.usage.charges import (
    UNKNOWN,
    Charge,
    Scene,
    Weights,
    believed,
    bound_busy,
    charge_busy,
    charge_memory,
    count_processes,
    in_pieces,
    processes_on,
    weigh_energy,
    weigh_mig_energy,
)
from podgpu.usage.presence import Holding, differ, holdings_of, presence_of
from podgpu.usage.stretch import Stretch

B = TypeVar("B")
MOST_NAMESPACES = 5_000
"""Namespaces and models. Past that, those of namespaces that hold and use nothing any more are forgotten, the longest
unchanged first, as in the cluster."""
MOST_AWAY = 64
"""GPUs that are gone, of which it is remembered what was used: one that comes back goes on where it was."""
MOST_CLOSED = 1_000
"""Accounts of containers that left, of which what they used is remembered."""
Owner = Callable[[int], Workload | None]
"""Pid -> its container with all its names; None when it is in none, or nobody knows."""


@dataclass(slots=True)
class _DeviceTurn:
    """One device in this turn. Without a scene it did not answer."""

    shares: Mapping[Who, Fraction | None]
    scene: Scene | None = None
    busy: Charge = UNKNOWN
    energy: Charge = UNKNOWN
    memory: Charge = UNKNOWN
    processes: Mapping[Who, int] | None = None
    busy_bounds: Mapping[Who, tuple[int, int]] = field(default_factory=dict)
    seen_into: bool = False
    """Whether processes could be seen, on the device or on an instance of it."""

    @property
    def window(self) -> int:
        return self.scene.window if self.scene else 0


@dataclass(frozen=True, slots=True)
class _Away:
    """The books of a GPU that is gone, and of its instances."""

    accounts: dict[str, dict[Who, Account]]
    devices: dict[str, DeviceBook]


class Ledger:
    def __init__(self) -> None:
        self._accounts: dict[str, dict[Who, Account]] = {}
        self._running: dict[str, dict[int, Who | None]] = {}
        """By device, the processes when they were last seen, and who was charged for each."""
        self._devices: dict[str, DeviceBook] = {}
        self._stretches: dict[str, Stretch] = {}
        """By GPU: turns whose energy is not told yet."""
        self._away: dict[str, _Away] = {}
        self._closed: dict[tuple[str, Who], Account] = {}
        """By device and whom; the longest closed first."""
        self._namespaces: dict[tuple[str, str], NamespaceBook] = {}
        """The longest unchanged first."""
        self.namespaces_forgotten = 0

    def charge(
        self,
        usages: Sequence[DeviceUsage],
        assignments: Sequence[Assignment],
        owner: Owner,
        elapsed_ns: int,
        untold: Collection[int] = (),
    ) -> None:
        """Enters one turn: `elapsed_ns` is the time since the last, as our own monotonic clock has it.

        `untold`: processes of which it is not known whose they are, so that no holder may be called idle for them.
        """
        told = {usage.device.key: usage for usage in usages}
        held = holdings_of(assignments)
        self._welcome_back({physical(key) for key in told.keys() | held.keys()})
        ask = cache(owner)
        turns = {
            key: self._meet(key, told.get(key), held.get(key, {}), ask, untold)
            for key in told.keys() | held.keys() | self._accounts.keys()
        }
        self._divide_energy(turns)
        for key, turn in turns.items():
            self._enter_people(key, turn, believed(elapsed_ns))
            self._enter_device(key, turn)
        self._forget_namespaces()

    def statement(self) -> Usage:
        return Usage(
            tuple(
                account.statement(key)
                for key, people in sorted(self._accounts.items())
                for _, account in sorted(people.items())
            ),
            tuple(book.statement(key) for key, book in sorted(self._devices.items())),
            tuple(book.statement(*name) for name, book in sorted(self._namespaces.items())),
        )

    def forget_devices(self, keys: Collection[str]) -> None:
        """Puts away GPUs that are listed no more, with their MIG instances. Namespaces keep what was used of them."""
        for gpu in keys:
            away = _Away(_taken_out(self._accounts, gpu), _taken_out(self._devices, gpu))
            _taken_out(self._running, gpu)
            self._stretches.pop(gpu, None)
            if away.devices or away.accounts:
                self._away[gpu] = away
        for gpu in list(self._away)[:-MOST_AWAY]:
            del self._away[gpu]

    def _welcome_back(self, gpus: Collection[str]) -> None:
        """Counters never fall: what they stood at they go on from. Who is no longer there is found out in this turn."""
        for gpu in self._away.keys() & gpus:
            away = self._away.pop(gpu)
            self._accounts |= away.accounts
            self._devices |= away.devices

    # Who is there

    def _meet(
        self,
        key: str,
        usage: DeviceUsage | None,
        holders: Mapping[Who, Holding],
        ask: Owner,
        untold: Collection[int],
    ) -> _DeviceTurn:
        """Opens and closes accounts, and divides what the device tells among them."""
        known = {who: account.workload for who, account in self._accounts.get(key, {}).items()}
        users = _users_of(usage, ask)
        presence = presence_of(holders, users or {}, known)
        shares = {who: holding.share for who, holding in holders.items()}
        seen = None if users is None else set(presence.payers.values())
        self._open_and_close(key, presence.workloads, holders, seen)
        if usage is None:
            return _DeviceTurn(shares)
        self._devices.setdefault(key, DeviceBook(billed_model(usage.device)))
        left = self._who_left(key, usage, shares, presence.payers)
        return _divide(Scene(usage, shares, presence.payers, frozenset(untold), left))

    def _who_left(
        self, key: str, usage: DeviceUsage, holders: Collection[Who], payers: Mapping[int, Who]
    ) -> Who | None:
        """The holder whose processes ended. Where somebody else's did too there is no telling, and nobody is named."""
        if in_pieces(usage.device):
            self._running.pop(key, None)
        if processes_on(usage) is None:
            return None
        before, now = self._running.get(key, {}), {pid: payers.get(pid) for pid in _pids_of(usage)}
        self._running[key] = now
        leavers = {who for pid, who in before.items() if pid not in now or now[pid] != who}
        return next(iter(leavers)) if len(leavers) == 1 and leavers <= set(holders) else None

    def _open_and_close(
        self, key: str, present: Mapping[Who, Workload], holders: Collection[Who], users: set[Who] | None
    ) -> None:
        """Where processes cannot be seen (`users` is None) who was at work is taken to be still. Not who held the
        device and no longer does: its container is gone, and its processes with it. Unless nobody knows its uid: if
        it is named again its account could not be found again, and its counters would fall."""
        before, now = self._accounts.pop(key, {}), dict[Who, Account]()
        for who, workload in present.items():
            account = before.pop(who, None) or self._reopened(key, who, workload)
            if account is None or differ(account.workload, workload):
                account = Account(workload)
            account.workload = workload
            now[who] = account
        if users is None:
            now |= {who: account for who, account in before.items() if account.using and not account.has_left}
        for who, account in now.items():
            account.holding = who in holders
            account.using = account.using if users is None else who in users
        if now:
            self._accounts[key] = now
        self._close({(key, who): account for who, account in before.items() if who not in now})

    def _reopened(self, key: str, who: Who, workload: Workload) -> Account | None:
        account = self._closed.pop((key, who), None)
        return account if account is not None and account.workload.uid == workload.uid else None

    def _close(self, accounts: Mapping[tuple[str, Who], Account]) -> None:
        """A pod that comes back under the same uid was there all the time: whoever tells of it was ill, and its
        counters go on. Of one without a uid nobody could say that it is the same."""
        self._closed |= {place: account for place, account in accounts.items() if account.workload.uid}
        for place in list(self._closed)[:-MOST_CLOSED]:
            del self._closed[place]

    # What they pay

    def _enter_people(self, key: str, turn: _DeviceTurn, elapsed: int) -> None:
        for who, account in self._accounts.get(key, {}).items():
            entry = _entry(who, account, turn, elapsed)
            account.add(entry)
            account.utilization = entry.busy_ns / turn.window if entry.busy_ns is not None and turn.window else None
            account.memory = (turn.memory.parts or {}).get(who)
            account.processes = (turn.processes or {}).get(who)
            if account.workload.namespace:
                self._namespace(account.workload.namespace, key).add(entry)

    # What the GPUs used

    def _divide_energy(self, turns: Mapping[str, _DeviceTurn]) -> None:
        instances: dict[str, dict[str, _DeviceTurn]] = {}
        for key, turn in turns.items():
            if key != physical(key):
                instances.setdefault(physical(key), {})[key] = turn
        for key, turn in turns.items():
            if turn.scene is None or key != physical(key):
                continue
            pieces = instances.get(key, {}) if in_pieces(turn.scene.device) else {}
            names = self._names(key)
            for part in pieces:
                names |= {(part, *who): name for who, name in self._names(part).items()}
            stretch = self._stretches.setdefault(key, Stretch())
            turn.energy = stretch.turn(turn.scene.usage, _weigh(turn, pieces), names)
            for part, other in pieces.items():
                other.energy = _part_of(turn.energy, part)
            self._pay_for_the_gone(key, turn.energy, stretch.namespaces, names)

    def _names(self, key: str) -> dict[Who, str]:
        return {who: account.workload.namespace for who, account in self._accounts.get(key, {}).items()}

    def _pay_for_the_gone(self, key: str, energy: Charge, then: Mapping[Who, str], now: Mapping[Who, str]) -> None:
        """Who left before the energy of its last seconds was told has no account; its namespace pays all the same."""
        for who, part in (energy.parts or {}).items():
            if who not in now and then.get(who):
                self._namespace(then[who], self._book_of(who, key)).add(Entry(energy_mj=part))

    def _book_of(self, who: Who, gpu: str) -> str:
        """The instance that stands in front of a name where the GPU is cut by MIG; else the GPU."""
        return who[0] if who[0] in self._devices else gpu

    def _namespace(self, namespace: str, key: str) -> NamespaceBook:
        """A device that never answered has no model yet."""
        name = (namespace, self._devices[key].model if key in self._devices else "")
        book = self._namespaces.pop(name) if name in self._namespaces else NamespaceBook()
        self._namespaces[name] = book
        return book

    def _forget_namespaces(self) -> None:
        if len(self._namespaces) <= MOST_NAMESPACES:
            return
        present = {account.workload.namespace for people in self._accounts.values() for account in people.values()}
        absent = [name for name in self._namespaces if name[0] not in present]
        for name in absent[: len(self._namespaces) - MOST_NAMESPACES]:
            del self._namespaces[name]
            self.namespaces_forgotten += 1

    def _enter_device(self, key: str, turn: _DeviceTurn) -> None:
        book = self._devices.get(key)
        if book is None:
            return
        book.add(turn.busy, turn.energy)
        book.memory = turn.memory
        book.method = turn.scene.usage.method if turn.scene and turn.busy.parts is not None else None
        book.seen_into |= turn.seen_into


def _taken_out(books: dict[str, B], gpu: str) -> dict[str, B]:
    """Of the GPU itself and of its instances."""
    return {key: books.pop(key) for key in [key for key in books if physical(key) == gpu]}


def billed_model(device: Device) -> str:
    return billed_name(device.model, device.profile) if device.is_instance else device.model


def _users_of(usage: DeviceUsage | None, ask: Owner) -> dict[int, Workload] | None:
    """Containers by pid, of the processes that are and of those that ran within the window; None: cannot be seen."""
    if usage is not None and in_pieces(usage.device):
        return {}  # nobody is at work on the GPU as such any more: who was is on an instance now, or gone
    if usage is None or processes_on(usage) is None:
        return None
    owners = {pid: ask(pid) for pid in _pids_of(usage)}
    return {pid: workload for pid, workload in owners.items() if workload is not None}


def _pids_of(usage: DeviceUsage) -> set[int]:
    ran = {pid for pid, ns in (usage.process_busy_ns or {}).items() if ns != 0}
    return ran.union(process.pid for process in processes_on(usage) or ())


def _divide(scene: Scene) -> _DeviceTurn:
    busy = charge_busy(scene)
    return _DeviceTurn(
        scene.shares,
        scene,
        busy,
        memory=charge_memory(scene),
        processes=count_processes(scene),
        busy_bounds=bound_busy(scene, busy),
        seen_into=scene.processes is not None,
    )


def _weigh(turn: _DeviceTurn, pieces: Mapping[str, _DeviceTurn]) -> Weights | None:
    """If one of the instances did not answer, nobody knows its use: all of the energy stays on the GPU."""
    if turn.scene is None or not in_pieces(turn.scene.device):
        return None if turn.scene is None else weigh_energy(turn.scene, turn.busy)
    turn.seen_into = any(other.seen_into for other in pieces.values())
    met = {key: (other.scene, other.busy) for key, other in pieces.items() if other.scene is not None}
    return weigh_mig_energy(turn.scene.device.model, met) if len(met) == len(pieces) else None


def _part_of(energy: Charge, instance: str) -> Charge:
    """What of a GPU's energy is paid on one of its instances."""
    if energy.parts is None:
        return UNKNOWN
    return Charge(parts={who[1:]: part for who, part in energy.parts.items() if who[0] == instance})


def _entry(who: Who, account: Account, turn: _DeviceTurn, elapsed: int) -> Entry:
    share = turn.shares.get(who)
    busy = (turn.busy.parts or {}).get(who)
    energy = (turn.energy.parts or {}).get(who)
    return Entry(
        None if share is None else account.allocate(share, elapsed),
        busy,
        _idle(who, busy, turn, elapsed),
        energy,
        turn.busy_bounds.get(who),
    )


def _idle(who: Who, busy: int | None, turn: _DeviceTurn, elapsed: int) -> int | None:
    """The driver gives each of its samples (6 a second) to one process alone: beside a busy one, bursts of a few
    milliseconds are charged to nobody (measured on an H200: 10 % of the time, and never listed). Whoever has a process
    while others ran may have run too, so it is not called idle. Context switches do tell: who was on the engine for no
    moment of the window ran nothing."""
    if busy is None or who not in turn.shares:
        return None
    if busy or not turn.window:
        return 0
    sampled = turn.scene is None or turn.scene.usage.method == "samples"
    return None if sampled and turn.busy.whole and (turn.processes or {}).get(who) else elapsed
