"""Whatever happens, turn after turn, what the ledger says adds up and never goes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from podgpu.model import (
    Assignment,
    ContainerUsage,
    Device,
    DeviceUsage,
    ProcessUsage,
    Usage,
    Workload,
    physical,
)
from podgpu.usage.ledger import Ledger

WHOLE = Device(0, "GPU-1", "0000:01:00.0", "NVIDIA H200")
OTHER = Device(1, "GPU-2", "0000:02:00.0", "NVIDIA A100")
CUT = Device(2, "GPU-3", "0000:03:00.0", "NVIDIA H200", mig_enabled=True)
PIECES = (replace(CUT, gi_id=1, profile="3g.71gb"), replace(CUT, gi_id=9, profile="1g.18gb"))
DEVICES = (WHOLE, OTHER, CUT, *PIECES)
COUNTERS = ("allocated_ns", "busy_ns", "idle_ns", "energy_mj")
SUMMED = ("allocated_ns", "busy_ns", "energy_mj")


@dataclass(frozen=True)
class Turn:
    usages: Sequence[DeviceUsage]
    assignments: Sequence[Assignment]
    owners: Mapping[int, Workload]
    elapsed_ns: int
    gone: frozenset[str]
    untold: frozenset[int]

    def shuffled(self, random: Random) -> Turn:
        usages = [
            replace(
                usage,
                processes=None if usage.processes is None else tuple(_shuffled(usage.processes, random)),
                process_busy_ns=None
                if usage.process_busy_ns is None
                else dict(_shuffled(list(usage.process_busy_ns.items()), random)),
            )
            for usage in self.usages
        ]
        return replace(self, usages=_shuffled(usages, random), assignments=_shuffled(list(self.assignments), random))

    @property
    def told_owners(self) -> Mapping[int, Workload]:
        return {pid: owner for pid, owner in self.owners.items() if pid not in self.untold}

    def enter(self, ledger: Ledger) -> Usage:
        ledger.forget_devices(self.gone)
        ledger.charge(self.usages, self.assignments, self.told_owners.get, self.elapsed_ns, self.untold)
        return ledger.statement()


def _shuffled(items: Sequence, random: Random) -> list:  # type: ignore[type-arg]
    return random.sample(items, len(items))


PIDS = st.integers(1, 6)
AMOUNTS = st.integers(0, 30) | st.integers(0, 10**15)
MAYBE = st.none() | AMOUNTS
SHARES = st.none() | st.sampled_from([0.0, 0.1, 0.25, 1 / 3, 0.5, 1.0, 1.5]) | st.floats()
WORKLOADS = st.one_of(
    st.builds(Workload, st.sampled_from("xy"), st.sampled_from("ab"), st.just("main"), st.sampled_from(["", "1", "2"])),
    st.builds(Workload, job=st.just("4711")),
    st.builds(Workload, uid=st.sampled_from(["", "3"])),
)


def usages_of(device: Device) -> st.SearchStrategy[DeviceUsage]:
    processes = st.dictionaries(PIDS, MAYBE, max_size=4).map(
        lambda sizes: tuple(ProcessUsage(device.key, pid, size) for pid, size in sizes.items())
    )
    busy = st.none() if device.is_instance else st.none() | st.dictionaries(PIDS, MAYBE, max_size=4)
    return st.builds(
        DeviceUsage,
        st.just(device),
        window_ns=st.just(10**9) | st.integers(-5, 100) | st.just(10**15),
        busy_ns=MAYBE,
        energy_mj=st.none() if device.is_instance else MAYBE,
        memory_used=MAYBE,
        processes=st.none() | processes,
        process_busy_ns=busy,
    )


TURNS = st.builds(
    Turn,
    usages=st.tuples(*(st.none() | usages_of(device) for device in DEVICES)).map(
        lambda usages: [usage for usage in usages if usage is not None]
    ),
    assignments=st.lists(
        st.builds(
            Assignment, st.sampled_from([device.key for device in DEVICES]), WORKLOADS, st.just("kubelet"), share=SHARES
        ),
        max_size=6,
    ),
    owners=st.dictionaries(PIDS, WORKLOADS),
    elapsed_ns=st.just(10**9) | st.integers(-5, 100) | st.just(10**15),
    gone=st.just(frozenset()) | st.frozensets(st.sampled_from([gpu.key for gpu in (WHOLE, OTHER, CUT)]), max_size=1),
    untold=st.just(frozenset()) | st.frozensets(PIDS, max_size=2),
)
HISTORIES = st.lists(TURNS, max_size=6)
Names = tuple[str, str, str, str, str, str]


def names(one: ContainerUsage) -> Names:
    """What tells accounts apart: a pod by its names, and only what has none by its uid."""
    holder = one.holder
    return (one.device, holder.namespace, holder.pod, holder.container, holder.job, "" if holder.pod else holder.uid)


@dataclass
class Remembered:
    """What a ledger has of accounts that are not in its last statement."""

    ended: dict[Names, ContainerUsage] = field(default_factory=dict)
    """Closed: one that comes back under the same uid goes on."""
    away: dict[Names, ContainerUsage] = field(default_factory=dict)
    """Those of GPUs that are gone: with its GPU an account comes back as it was."""


def increases(
    before: Usage, now: Usage, turn: Turn, remembered: Remembered
) -> list[tuple[ContainerUsage, dict[str, int]]]:
    """What each living account got in a turn. Fails where a counter of one that goes on fell or vanished."""
    away, ended = remembered.away, remembered.ended
    old = {names(one): one for one in before.containers}
    away |= {key: old.pop(key) for key in list(old) if physical(key[0]) in turn.gone}
    back = {physical(usage.device.key) for usage in turn.usages} | {physical(a.device) for a in turn.assignments}
    old |= {key: away.pop(key) for key in list(away) if physical(key[0]) in back}
    here = {names(one) for one in now.containers}
    ended |= {key: one for key, one in old.items() if key not in here and one.holder.uid}
    found = []
    for one in now.containers:
        last, closed = old.get(names(one)), ended.pop(names(one), None)
        if last is None and closed is not None and closed.holder.uid == one.holder.uid:
            last = closed
        if last is None or (last.holder.uid and last.holder.uid != one.holder.uid):
            last = ContainerUsage(one.device, one.holder)
        steps = {}
        for counter in COUNTERS:
            was, is_ = getattr(last, counter), getattr(one, counter)
            assert was is None or (is_ is not None and is_ >= was)
            steps[counter] = (is_ or 0) - (was or 0)
        found.append((one, steps))
    return found


def parts_and_rest_are_the_devices_figure_in_every_turn(history: list[Turn]) -> None:
    ledger, before = Ledger(), Usage()
    remembered = Remembered()
    busy: Counter[str] = Counter()
    for turn in history:
        now = turn.enter(ledger)
        for one, steps in increases(before, now, turn, remembered):
            busy[one.device] += steps["busy_ns"]
        for device in now.devices:
            memory = sum(one.memory or 0 for one in now.containers if one.device == device.device)
            if device.busy_ns is not None and device.unattributed_busy_ns is not None:
                assert busy[device.device] + device.unattributed_busy_ns == device.busy_ns
            if device.memory_used is not None and device.unattributed_memory is not None:
                assert memory + device.unattributed_memory == device.memory_used
        before = now


def energy_on_a_gpu_and_its_instances_is_the_gpus(history: list[Turn]) -> None:
    ledger, before = Ledger(), Usage()
    remembered = Remembered()
    paid: Counter[str] = Counter()
    for turn in history:
        now = turn.enter(ledger)
        for one, steps in increases(before, now, turn, remembered):
            paid[physical(one.device)] += steps["energy_mj"]
        for device in now.devices:
            if device.unattributed_energy_mj is not None:
                assert paid[device.device] + device.unattributed_energy_mj == device.energy_mj
            elif device.device == physical(device.device):
                assert paid[device.device] == 0
        before = now


def namespaces_have_what_all_their_accounts_ever_had(history: list[Turn]) -> None:
    ledger, before = Ledger(), Usage()
    remembered = Remembered()
    sums: dict[str, Counter[str]] = {}
    for turn in history:
        now = turn.enter(ledger)
        for one, steps in increases(before, now, turn, remembered):
            if one.holder.namespace:
                sums.setdefault(one.holder.namespace, Counter()).update(steps)
        assert {total.namespace for total in now.namespaces} == sums.keys()
        for namespace, expected in sums.items():
            totals = [total for total in now.namespaces if total.namespace == namespace]
            for counter in SUMMED:
                assert sum(getattr(total, counter) or 0 for total in totals) == expected[counter]
        last = {(total.namespace, total.model): total for total in before.namespaces}
        for total in now.namespaces:
            was = last.pop((total.namespace, total.model), None)
            assert was is None or all((getattr(total, c) or 0) >= (getattr(was, c) or 0) for c in SUMMED)
        assert not last
        before = now


def nothing_is_negative_and_nobody_is_there_twice(history: list[Turn]) -> None:
    ledger = Ledger()
    for turn in history:
        now = turn.enter(ledger)
        for one in (*now.containers, *now.devices, *now.namespaces):
            figures = [getattr(one, name) for name in one.__slots__]
            assert all(figure >= 0 for figure in figures if isinstance(figure, int | float))
        assert all(one.utilization is None or one.utilization <= 1 for one in now.containers)
        assert len({names(one) for one in now.containers}) == len(now.containers)


def accounts_are_for_those_who_hold_or_were_seen_using(history: list[Turn]) -> None:
    ledger = Ledger()
    for turn in history:
        now = {
            (one.device, one.holder.namespace, one.holder.pod, one.holder.job) for one in turn.enter(ledger).containers
        }
        held = {
            (a.device, a.holder.namespace, a.holder.pod, a.holder.job)
            for a in turn.assignments
            if a.holder != Workload()
        }
        assert held <= now
        for usage in turn.usages:
            key, owned = usage.device.key, turn.told_owners
            if usage.processes is None or usage.device == CUT:
                continue
            pids = {process.pid for process in usage.processes} | (usage.process_busy_ns or {}).keys()
            users = {(key, owned[p].namespace, owned[p].pod, owned[p].job) for p in pids & owned.keys()}
            assert {one for one in now if one[0] == key} <= held | users


def the_order_things_come_in_does_not_matter(history: list[Turn], random: Random) -> None:
    ledger, other = Ledger(), Ledger()
    for turn in history:
        assert turn.enter(ledger) == turn.shuffled(random).enter(other)


@settings(max_examples=50)
@given(HISTORIES, st.randoms(use_true_random=False))
def test_whatever_happens(history: list[Turn], random: Random) -> None:
    """All that is true of a history is asked of the same one: it takes hypothesis long to make up."""
    parts_and_rest_are_the_devices_figure_in_every_turn(history)
    energy_on_a_gpu_and_its_instances_is_the_gpus(history)
    namespaces_have_what_all_their_accounts_ever_had(history)
    nothing_is_negative_and_nobody_is_there_twice(history)
    accounts_are_for_those_who_hold_or_were_seen_using(history)
    the_order_things_come_in_does_not_matter(history, random)
