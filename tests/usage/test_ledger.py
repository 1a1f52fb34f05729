"""Tests the ledger with properties of random histories, and with an example for each rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from podgpu.model import (
    HIDDEN_PID,
    Assignment,
    Device,
    DeviceTotals,
    DeviceUsage,
    Holder,
    HolderUsage,
    NamespaceUsage,
    ProcessUsage,
    ProcessWaits,
    Workload,
    WorkloadKey,
)
from podgpu.node.agent.usage_collector import add_owners
from podgpu.node.usage.containers import ProcessOwner
from podgpu.node.usage.ledger import COUNTERS, Ledger

SECOND = 10**9
A = Workload("research", "a", "main", "uid-a")
B = Workload("research", "b", "main", "uid-b")
C = Workload("serving", "c", "main", "uid-c")
GPU = Device(0, "GPU-1", "0000:01:00.0", "NVIDIA H200")
CUT = Device(2, "GPU-3", "0000:03:00.0", "NVIDIA H200", mig_enabled=True)
INSTANCES = (replace(CUT, gi_id=1, profile="3g.71gb"), replace(CUT, gi_id=9, profile="1g.18gb"))


class Snapshot(NamedTuple):
    holders: Mapping[str, Mapping[WorkloadKey, Holder]]
    devices: Mapping[str, DeviceTotals]
    namespaces: Sequence[NamespaceUsage]


@dataclass(frozen=True)
class Turn:
    usages: Sequence[DeviceUsage]
    assignments: Sequence[Assignment] = ()
    owners: Mapping[int, ProcessOwner] = field(default_factory=dict)
    devices: Sequence[Device] = (GPU,)

    def enter(self, ledger: Ledger) -> Snapshot:
        owned = add_owners(self.devices, self.usages, self.assignments, self.owners)
        ledger.charge(
            owned,
            {u.device.uuid: u for u in self.usages if not u.device.is_instance},
            SECOND,
            1000.0,
        )
        uses = ledger.list_devices()
        holders = {key: {user.key: user for user in use.holders} for key, use in uses.items()}
        totals = {key: use.usage for key, use in uses.items() if use.usage is not None}
        return Snapshot(holders, totals, ledger.list_namespaces())


# Properties

PIDS = st.integers(1, 5)
AMOUNTS = st.sampled_from([0, 0, 1, SECOND]) | st.integers(0, 2 * SECOND)
MAYBE = st.none() | AMOUNTS
WORKLOADS = st.sampled_from(
    [A, B, C, structs.replace(A, uid="uid-new"), structs.replace(B, uid=""), Workload(job="7")]
)


WAITS = st.builds(
    ProcessWaits,
    st.dictionaries(PIDS, AMOUNTS.map(lambda ns: (ns, ns // 2, 2 * ns)), max_size=4),
    st.dictionaries(st.tuples(PIDS, PIDS), AMOUNTS, max_size=6),
    AMOUNTS,
)


def usages_of(device: Device) -> st.SearchStrategy[DeviceUsage]:
    processes = st.lists(
        st.builds(ProcessUsage, st.just(device.key), PIDS, MAYBE, st.booleans()), max_size=4
    )
    return st.builds(
        DeviceUsage,
        st.just(device),
        window_ns=st.sampled_from([0, SECOND]),
        busy_ns=MAYBE,
        energy_mj=st.none() if device.is_instance else MAYBE,
        memory_used=MAYBE,
        processes=st.none()
        | processes.map(lambda those: tuple({p.pid: p for p in those}.values())),
        process_busy_ns=st.none() | st.dictionaries(PIDS, MAYBE, max_size=4),
        method=st.sampled_from(["samples", "exact"]),
        resident_ns=st.none() | st.dictionaries(PIDS, AMOUNTS, max_size=4),
        waits=st.none() | WAITS,
        switching_ns=st.sampled_from([0, SECOND // 50]),
        bounded=st.booleans(),
        power_mw=st.none() | st.integers(1, 700_000),
    )


def optional(*devices: Device) -> st.SearchStrategy[list[DeviceUsage]]:
    some = st.tuples(*(st.none() | usages_of(device) for device in devices))
    return some.map(lambda usages: [usage for usage in usages if usage is not None])


ASSIGNMENTS = st.builds(
    Assignment,
    st.sampled_from([GPU.key, *(instance.key for instance in INSTANCES)]),
    WORKLOADS,
    st.just("kubelet"),
    share=st.none() | st.floats(0, 1),
)
OWNERS = st.dictionaries(
    PIDS,
    st.builds(
        ProcessOwner,
        st.none() | WORKLOADS,
        st.sampled_from(["", "", "", "unreadable"]),
        is_mps_server=st.sampled_from([False, False, True]),
    ),
)
HISTORIES = st.lists(
    st.builds(Turn, optional(GPU, CUT, *INSTANCES), st.lists(ASSIGNMENTS, max_size=5), OWNERS),
    max_size=6,
)


@given(HISTORIES)
def test_holders_and_the_unattributed_rest_add_up_and_counters_never_decrease(
    history: list[Turn],
) -> None:
    ledger, devices, energy = Ledger(), dict[str, DeviceTotals](), 0
    highest: dict[object, Mapping[str, int]] = {}
    for turn in history:
        snapshot = turn.enter(ledger)
        devices |= snapshot.devices
        energy += sum(usage.energy_mj or 0 for usage in turn.usages)
        assert sum(one.energy_mj or 0 for one in devices.values()) == energy
        for key, device in snapshot.devices.items():
            if device.unattributed_memory_bytes is not None:
                parts = sum(
                    h.usage.memory_used_bytes or 0 if h.usage else 0
                    for h in snapshot.holders.get(key, {}).values()
                )
                assert parts + device.unattributed_memory_bytes == device.memory_used_bytes
        for _, usage in all_holders(snapshot):
            assert (usage.utilization_ratio or 0) <= 1
            assert (usage.power_ratio or 0) <= 1
            if usage.busy_min_ns is not None and usage.busy_max_ns is not None:
                assert usage.busy_min_ns <= usage.busy_max_ns
            if (
                usage.wait_ns is not None
                and usage.wait_min_ns is not None
                and usage.wait_max_ns is not None
            ):
                assert usage.wait_min_ns <= usage.wait_ns <= usage.wait_max_ns
                assert (usage.wait_ratio or 0) + (usage.utilization_ratio or 0) <= 1
            assert sum(part.ratio for part in usage.waits_for) == pytest.approx(
                usage.wait_ratio or 0
            )
            if usage.wasted_underused_ns is not None:
                used = (usage.wasted_idle_ns or 0) + usage.wasted_underused_ns
                assert used <= (usage.allocated_ns or 0)
        for counted, counters in read_counters(snapshot).items():
            assert all(
                value >= highest.get(counted, {}).get(name, 0) for name, value in counters.items()
            )
            highest[counted] = {**highest.get(counted, {}), **counters}


def read_counters(snapshot: Snapshot) -> dict[object, dict[str, int]]:
    """Returns the counters of namespaces and of C. Other pods change their UID, which resets
    counters.
    """
    usages: dict[object, Any] = {(n.namespace, n.model, n.profile): n for n in snapshot.namespaces}
    usages |= {
        (key, h.key): h.usage
        for key, own in snapshot.holders.items()
        for h in own.values()
        if h.uid == C.uid
    }
    return {
        key: {name: value for name in COUNTERS if (value := getattr(usage, name, None)) is not None}
        for key, usage in usages.items()
    }


@given(HISTORIES)
def test_namespaces_and_the_unattributed_rest_add_up_to_the_devices(history: list[Turn]) -> None:
    """Jobs are removed from the histories, because they have no namespace."""
    ledger, devices = Ledger(), dict[str, DeviceTotals]()
    for turn in history:
        held = [one for one in turn.assignments if not one.holder.job]
        owners = {
            pid: owner
            for pid, owner in turn.owners.items()
            if not (owner.workload and owner.workload.job)
        }
        snapshot = replace(turn, assignments=held, owners=owners).enter(ledger)
        devices |= snapshot.devices
    for name in ("busy_ns", "energy_mj"):
        charged = sum(getattr(one, name) or 0 for one in ledger.list_namespaces())
        whole = [one for one in devices.values() if getattr(one, name) is not None]
        unseen = [one for one in whole if getattr(one, f"unattributed_{name}") is None]
        rest = sum(getattr(one, f"unattributed_{name}") or 0 for one in whole)
        assert charged + rest + sum(getattr(one, name) for one in unseen) == sum(
            getattr(one, name) for one in whole
        )
        assert rest >= 0


# Examples

OF_PID = {1: A, 2: B, 3: C}


def second(
    busy: Mapping[int, int | None], device_busy: int | None = None, **figures: Any
) -> DeviceUsage:
    """Returns the usage of the GPU in one second. Pids 1, 2 and 3 belong to A, B and C, pid 9 to
    the host.
    """
    total = sum(ns or 0 for ns in busy.values()) if device_busy is None else device_busy
    processes = tuple(ProcessUsage(GPU.key, pid, 10) for pid in busy)
    figures = {
        "memory_used": 100,
        "processes": processes,
        "process_busy_ns": busy,
        "power_mw": 100,
        **figures,
    }
    return DeviceUsage(GPU, SECOND, total, **figures)


def held(*holders: Workload, share: float | None = 0.5, device: Device = GPU) -> list[Assignment]:
    return [Assignment(device.key, holder, "kubelet", share=share) for holder in holders]


def charge(*turns: Turn) -> Snapshot:
    ledger = Ledger()
    return [turn.enter(ledger) for turn in turns][-1]


def turn(
    usage: DeviceUsage, *assignments: Assignment, owners: Mapping[int, Workload] = OF_PID
) -> Turn:
    return Turn([usage], assignments, {pid: ProcessOwner(owner) for pid, owner in owners.items()})


def all_holders(snapshot: Snapshot) -> list[tuple[Workload, HolderUsage]]:
    return [
        (holder, holder.usage)
        for holders in snapshot.holders.values()
        for holder in holders.values()
        if holder.usage is not None
    ]


def usage_of(snapshot: Snapshot, workload: Workload) -> HolderUsage:
    return next(usage for holder, usage in all_holders(snapshot) if holder.key == workload.key)


def test_a_holder_without_a_process_has_all_counters_from_the_first_turn() -> None:
    usage = usage_of(charge(turn(second({}, energy_mj=7)), turn(second({}), *held(A))), A)
    assert (usage.allocated_ns, usage.busy_ns, usage.idle_ns, usage.energy_mj) == (
        SECOND // 2,
        0,
        SECOND,
        0,
    )
    assert (usage.memory_used_bytes, usage.processes, usage.utilization_ratio) == (0, 0, 0.0)
    assert usage.idle_since == 999.0


def test_a_user_that_holds_nothing_has_no_allocated_or_idle_time() -> None:
    usage = usage_of(charge(turn(second({1: 500}), *held(B))), A)
    assert (usage.allocated_ns, usage.busy_ns, usage.idle_ns, usage.processes) == (
        None,
        500,
        None,
        1,
    )


def test_an_unknown_share_allocates_nothing() -> None:
    assert usage_of(charge(turn(second({}), *held(A, share=None))), A).allocated_ns is None


def test_the_last_busy_time_of_an_ended_process_belongs_to_its_holder() -> None:
    both = held(A, B)
    snapshot = charge(
        turn(second({1: 500, 2: 100}), *both), turn(second({2: 100}, device_busy=300), *both)
    )
    assert usage_of(snapshot, A).busy_ns == 700
    snapshot = charge(
        turn(second({1: 500, 2: 100}), *both), turn(second({}, device_busy=300), *both)
    )
    assert usage_of(snapshot, A).busy_ns == 500, (
        "not attributed if processes of two containers ended"
    )


def test_samples_do_not_prove_that_a_process_is_idle_if_another_is_busy() -> None:
    assert usage_of(charge(turn(second({1: 0, 2: 9}), *held(A))), A).idle_ns is None
    exact = second({1: 0, 2: 9}, method="exact")
    assert usage_of(charge(turn(exact, *held(A))), A).idle_ns == SECOND


def test_a_holder_is_idle_if_it_has_no_process_or_the_device_is_idle() -> None:
    absent = charge(turn(second({2: 9}), *held(A, B)))
    assert usage_of(absent, A).idle_ns == SECOND, "another container is busy"
    assert usage_of(charge(turn(second({1: 0}), *held(A))), A).idle_ns == SECOND


def test_a_holder_is_idle_since_it_was_last_busy() -> None:
    idle, busy = turn(second({}), *held(A)), turn(second({1: 9}), *held(A))
    assert usage_of(charge(busy), A).idle_since is None
    assert usage_of(charge(idle, idle, busy), A).idle_since is None
    assert usage_of(charge(idle, idle, busy, idle), A).idle_since == 999.0
    assert usage_of(charge(busy, idle, idle), A).idle_since == 998.0


def test_a_process_whose_busy_time_is_not_reported_hides_the_counters_of_its_container() -> None:
    bounded = turn(second({1: 300, 2: 400}, bounded=True), *held(A, B))
    unreported = turn(second({1: None, 2: 400}), *held(A, B))
    usage = usage_of(charge(bounded, unreported), A)
    assert (usage.busy_ns, usage.busy_max_ns, usage.energy_mj) == (None, None, None)
    assert usage_of(charge(bounded, unreported, bounded), A).busy_ns == 600, "reported again"
    assert usage_of(charge(bounded, unreported), B).busy_ns == 800


def test_a_busy_time_that_is_scaled_down_to_zero_is_not_idle() -> None:
    scaled = usage_of(charge(turn(second({1: 1, 2: 2 * SECOND}), *held(A, B))), A)
    assert (scaled.busy_ns, scaled.idle_ns) == (0, 0)


def test_samples_do_not_prove_that_a_hidden_process_is_idle() -> None:
    """The log hides the pids of A and B, so the driver's samples divide their time."""
    processes = (ProcessUsage(GPU.key, 1, 10), ProcessUsage(GPU.key, 2, 10))
    ms = 10**6
    usage = second(
        {HIDDEN_PID: 400 * ms},
        processes=processes,
        method="exact",
        bounded=True,
        sampled_busy_ns={2: 9},
        resident_ns={HIDDEN_PID: 500 * ms},
    )
    snapshot = charge(turn(usage, *held(A, B)))
    first = usage_of(snapshot, A)
    assert snapshot.devices[GPU.key].method == "samples"
    assert (first.busy_ns, first.idle_ns) == (0, None)
    assert (first.busy_min_ns, first.busy_max_ns) == (0, 400 * ms), "the time may be its own"


def test_the_time_of_hidden_processes_belongs_to_the_process_that_the_log_does_not_name() -> None:
    processes = (ProcessUsage(GPU.key, 1, 10), ProcessUsage(GPU.key, 2, 10))
    usage = second(
        {1: 100, HIDDEN_PID: 300},
        processes=processes,
        method="exact",
        resident_ns={1: 100, HIDDEN_PID: 300},
    )
    snapshot = charge(turn(usage, *held(A, B)))
    assert [usage_of(snapshot, each).busy_ns for each in (A, B)] == [100, 300]


def test_the_time_of_hidden_processes_is_not_that_of_a_process_that_the_log_names() -> None:
    ms = 10**6
    usage = second(
        {1: 100 * ms, HIDDEN_PID: 300 * ms},
        processes=tuple(ProcessUsage(GPU.key, pid, 10) for pid in OF_PID),
        method="exact",
        bounded=True,
        sampled_busy_ns={2: 9, 3: 9},
        resident_ns={1: 120 * ms, HIDDEN_PID: 300 * ms},
    )
    snapshot = charge(turn(usage, *held(A, B, C)))
    assert usage_of(snapshot, A).busy_max_ns == 120 * ms
    assert usage_of(snapshot, B).busy_max_ns == 300 * ms
    assert snapshot.devices[GPU.key].method == "exact", "of the process that is not hidden"


def test_the_unattributed_use_of_a_device_is_unknown_until_its_processes_were_visible() -> None:
    seen = turn(second({9: 100}, energy_mj=0), *held(A))
    unseen = turn(second({}, device_busy=300, processes=None, energy_mj=5), *held(A))
    before, after = charge(unseen).devices[GPU.key], charge(seen, unseen).devices[GPU.key]
    assert (before.busy_ns, before.unattributed_busy_ns) == (300, None)
    assert (before.energy_mj, before.unattributed_energy_mj) == (5, None)
    assert (after.busy_ns, after.unattributed_busy_ns) == (400, 400)


def wasted(*turns: Turn, workload: Workload = A) -> tuple[int | None, int | None]:
    """Returns the wasted time of a workload: idle and under-used."""
    usage = usage_of(charge(*turns), workload)
    return usage.wasted_idle_ns, usage.wasted_underused_ns


def test_idle_time_of_a_holder_wastes_its_share() -> None:
    idle = turn(second({}), *held(A, share=0.25))
    assert wasted(idle, idle) == (SECOND // 2, 0)
    unanswered = turn(DeviceUsage(GPU, 0, 0, processes=()), *held(A))
    assert wasted(idle, unanswered) == (SECOND // 4, 0), "without a window, nothing is certain"


def test_a_holder_that_uses_less_than_its_share_wastes_the_rest() -> None:
    """The wasted time is added up per reading: more use later does not make up for it."""
    little = turn(second({1: 100 * 10**6}), *held(A))
    much = turn(second({1: 900 * 10**6}), *held(A))
    assert wasted(little) == (0, 400 * 10**6)
    assert wasted(little, much, little) == (0, 800 * 10**6)
    whole = turn(second({1: 600 * 10**6}), *held(A, share=1.0))
    assert wasted(whole) == (0, 400 * 10**6)


def test_underused_time_does_not_depend_on_the_length_of_the_drivers_window() -> None:
    usage = replace(second({1: 400 * 10**6}), window_ns=800 * 10**6)
    assert wasted(turn(usage, *held(A, share=1.0))) == (0, SECOND // 2)


def test_samples_of_a_shared_gpu_prove_underuse_only_by_the_total() -> None:
    busy = {1: 10 * 10**6, 2: 290 * 10**6}
    assert wasted(turn(second(busy), *held(A, B))) == (0, 200 * 10**6)
    exact = second(busy, method="exact", switching_ns=20 * 10**6)
    assert wasted(turn(exact, *held(A, B))) == (0, 470 * 10**6)
    assert wasted(turn(exact, *held(A, B)), workload=B) == (0, 190 * 10**6)
    full = second({1: 10 * 10**6, 2: 790 * 10**6})
    assert wasted(turn(full, *held(A, B))) == (0, 0)


def test_uncertain_time_is_not_wasted() -> None:
    uncertain = turn(second({1: 0, 2: 9}), *held(A))
    assert wasted(uncertain) == (None, None), "samples do not prove that the process was idle"
    assert wasted(turn(second({}), *held(A, share=None))) == (None, None)
    assert wasted(turn(second({1: 5}), *held(B))) == (None, None), "it holds nothing"
    assert wasted(mps({1: A, 2: B}, {9})) == (None, None)
    known = turn(second({}), *held(A))
    assert wasted(known, uncertain, known) == (SECOND, 0), "the counter stands still meanwhile"


@pytest.mark.parametrize(
    ("busy", "part"),
    [({}, 250), ({1: 50, 9: 50}, 375), ({9: 50}, 125)],
    ids=["idle", "both", "other"],
)
def test_energy_of_an_idle_turn_goes_by_share_and_of_a_busy_one_by_use(
    busy: dict[int, int], part: int
) -> None:
    """The energy covers two readings with the same power. The GPU is idle in the second."""
    holder = held(A, share=0.25)
    turns = (
        turn(second({}, energy_mj=0)),
        turn(second(busy), *holder),
        turn(second({}, energy_mj=1000), *holder),
    )
    snapshot = charge(*turns)
    assert usage_of(snapshot, A).energy_mj == part
    assert snapshot.devices[GPU.key].unattributed_energy_mj == 1000 - part


def test_turns_of_an_energy_window_are_weighted_by_power() -> None:
    turns = [
        second({1: SECOND}, power_mw=300_000),
        second({2: SECOND}, power_mw=100_000, energy_mj=800),
    ]
    snapshot = charge(turn(second({}, energy_mj=0)), *(turn(usage, *held(A, B)) for usage in turns))
    assert (usage_of(snapshot, A).energy_mj, usage_of(snapshot, B).energy_mj) == (600, 200)
    assert (usage_of(snapshot, A).power_ratio, usage_of(snapshot, B).power_ratio) == (0.75, 0.25)


def test_energy_of_a_container_that_ended_before_the_reading_belongs_to_its_namespace() -> None:
    full: dict[str, Any] = {"share": 1.0}
    turns = (
        turn(second({1: 100}), *held(A, **full)),
        turn(second({3: 300}, energy_mj=1000), *held(C, **full)),
    )
    snapshot = charge(turn(second({}, energy_mj=0)), *turns)
    assert {n.namespace: n.energy_mj for n in snapshot.namespaces} == {
        "research": 500,
        "serving": 500,
    }


def test_wasted_time_of_a_container_that_ended_stays_with_its_namespace() -> None:
    half: dict[str, Any] = {"share": 0.5}
    idle = turn(second({}), *held(A, C, **half))
    without_a = turn(second({3: 200 * 10**6}), *held(C, **half))
    snapshot = charge(idle, idle, without_a)
    wasted_ns = {
        n.namespace: (n.wasted_idle_ns, n.wasted_underused_ns) for n in snapshot.namespaces
    }
    assert wasted_ns == {"research": (SECOND, 0), "serving": (SECOND, 300 * 10**6)}


def mig_turn(
    instances: Mapping[Device, tuple[int, list[Assignment]]],
    energy: int | None,
    device: Device = CUT,
) -> Turn:
    usages = [
        DeviceUsage(i, SECOND, busy, processes=(), memory_used=5)
        for i, (busy, _) in instances.items()
    ]
    whole = DeviceUsage(CUT, 0, energy_mj=energy, power_mw=100, processes=())
    return Turn(
        [whole, *usages], [one for _, those in instances.values() for one in those], devices=[CUT]
    )


def test_energy_of_a_mig_gpu_goes_by_busy_time_and_slices() -> None:
    large, small = INSTANCES
    devices = {
        large: (200, held(A, share=1.0, device=large)),
        small: (400, held(C, share=1.0, device=small)),
    }
    snapshot = charge(mig_turn(devices, 0), mig_turn(devices, 1000))
    assert (usage_of(snapshot, A).energy_mj, usage_of(snapshot, C).energy_mj) == (600, 400)
    assert {(n.model, n.profile) for n in snapshot.namespaces} == {
        (CUT.model, i.profile) for i in INSTANCES
    }
    idle = {large: (0, held(A, share=1.0, device=large)), small: (0, [])}
    snapshot = charge(mig_turn(idle, 0), mig_turn(idle, 700))
    assert usage_of(snapshot, A).energy_mj == 300, "idle energy is split by slices: 3 of 7"
    assert snapshot.devices[CUT.key].unattributed_energy_mj == 400
    free = {large: (0, []), small: (0, held(C, share=1.0, device=small))}
    snapshot = charge(mig_turn(free, 0), mig_turn(free, 700))
    assert usage_of(snapshot, C).energy_mj == 100, "1 of 7"


def test_the_only_holder_of_an_instance_has_its_values() -> None:
    large, small = INSTANCES
    devices = {
        large: (300, held(A, share=1.0, device=large)),
        small: (100, held(B, C, device=small)),
    }
    snapshot = charge(mig_turn(devices, None))
    assert usage_of(snapshot, A).busy_ns == 300
    assert usage_of(snapshot, B).busy_ns is None, "the driver has no values per process"
    assert snapshot.devices[small.key].unattributed_busy_ns == 100


def test_a_pod_of_the_same_name_starts_at_0_and_the_same_pod_continues() -> None:
    again, first, nothing = (
        structs.replace(A, uid="uid-new"),
        turn(second({1: 100}), *held(A)),
        turn(second({})),
    )
    assert usage_of(charge(first, turn(second({}), *held(again))), A).busy_ns == 0
    assert usage_of(charge(first, nothing, turn(second({}), *held(A))), A).busy_ns == 100
    without_uid = structs.replace(A, uid="")
    assert usage_of(charge(first, turn(second({}), *held(without_uid))), A).busy_ns == 100
    assert usage_of(charge(first, nothing, turn(second({}), *held(without_uid))), A).busy_ns == 0
    gone = Turn([], [], devices=[])
    assert usage_of(charge(first, gone, turn(second({}), *held(A))), A).busy_ns == 100


def test_the_only_user_does_not_wait_although_its_uid_is_not_reported_now() -> None:
    waits = ProcessWaits({1: (50, 50, 50)}, {(1, 2): 50}, 50)
    shared = turn(second({1: 100, 2: 100}, method="exact", waits=waits), *held(A, B))
    without_uid = structs.replace(A, uid="")
    alone = turn(second({1: 100}), *held(without_uid), owners={1: without_uid})
    assert usage_of(charge(shared), A).wait_ratio
    assert usage_of(charge(shared, alone), A).wait_ratio == 0


def test_processes_of_an_earlier_pod_are_unattributed() -> None:
    again = structs.replace(A, uid="uid-new")
    snapshot = charge(turn(second({1: 100}), *held(again)))
    assert usage_of(snapshot, again).busy_ns == 0
    assert snapshot.devices[GPU.key].unattributed_busy_ns == 100


def test_with_a_process_of_unknown_owner_holders_without_a_process_have_no_values() -> None:
    owners = {1: ProcessOwner(A), 8: ProcessOwner(problem="unreadable")}
    busy = Turn([second({1: 100, 8: 200})], held(A, B), owners)
    snapshot = charge(busy)
    first, other = usage_of(snapshot, A), usage_of(snapshot, B)
    assert (first.busy_ns, other.busy_ns, other.idle_ns, other.memory_used_bytes) == (
        100,
        None,
        None,
        None,
    )

    known = turn(second({1: 100, 2: 40}), *held(A, B)), turn(second({1: 100}), *held(A, B))
    assert usage_of(charge(*known, busy), B).busy_ns == 40, "the counter stands still"
    metered = charge(turn(second({}, energy_mj=0)), busy)
    assert usage_of(metered, B).energy_mj is None, "unknown, like its busy time"
    unreported = turn(second({1: None}), *held(A, B))
    hidden = Turn([second({8: 200})], held(A, B), owners)
    assert usage_of(charge(known[1], unreported, hidden), A).busy_ns is None, "still not known"
    idle = Turn([second({1: 100, 8: 0})], held(A, B), owners)
    other = usage_of(charge(idle), B)
    assert (other.busy_ns, other.processes) == (0, None), "whoever the process belongs to"


def test_idle_energy_of_a_holder_with_an_unknown_share() -> None:
    for holders, parts in (([A], [700]), ([A, B], [0, 0])):
        assignments = held(*holders, share=None)
        first, later = second({}, energy_mj=0), second({}, energy_mj=700)
        snapshot = charge(turn(first, *assignments), turn(later, *assignments))
        assert [usage_of(snapshot, each).energy_mj for each in holders] == parts


def test_a_gpu_that_does_not_answer_stays_held() -> None:
    snapshot = charge(turn(second({1: 100}), *held(A)), Turn([], held(A)))
    usage = usage_of(snapshot, A)
    assert (usage.busy_ns, usage.allocated_ns, usage.memory_used_bytes) == (100, SECOND, None)
    assert snapshot.devices[GPU.key].memory_used_bytes is None
    lost = charge(turn(second({1: 100}), *held(A)), Turn([], held(A), devices=[]))
    assert usage_of(lost, A).allocated_ns == SECOND


def test_neither_an_unanswered_reading_nor_the_time_of_an_ended_process_is_idle() -> None:
    unanswered = turn(DeviceUsage(GPU, 0, 0, processes=()), *held(A))
    assert usage_of(charge(turn(second({}), *held(A)), unanswered), A).idle_ns == SECOND
    ended = turn(second({}, device_busy=300), *held(A))
    usage = usage_of(charge(turn(second({1: 500}), *held(A)), ended), A)
    assert (usage.busy_ns, usage.idle_ns) == (800, 0)


def test_an_unknown_busy_time_of_a_device_is_not_that_of_its_holder() -> None:
    unknown = replace(second({1: 0}), busy_ns=None, process_busy_ns=None)
    snapshot = charge(turn(unknown, *held(A)))
    assert usage_of(snapshot, A).busy_ns is None
    assert snapshot.devices[GPU.key].method == ""


def test_busy_times_of_processes_that_are_not_visible_do_not_hide_counters() -> None:
    unseen = turn(second({1: 5}, processes=None), *held(A))
    assert usage_of(charge(turn(second({1: 100}), *held(A)), unseen), A).busy_ns == 100


def test_while_processes_are_not_visible_only_users_without_an_allocation_stay() -> None:
    unseen = second({}, processes=None)
    user = charge(turn(second({1: 100}), *held(B)), turn(unseen, *held(B)))
    assert {holder.pod for holder in user.holders[GPU.key].values()} == {"a", "b"}
    holder = charge(turn(second({1: 100}), *held(A, B)), turn(unseen, *held(B)))
    assert {holder.pod for holder in holder.holders[GPU.key].values()} == {"b"}


def test_use_without_an_allocation_is_reported_after_some_time() -> None:
    ledger = Ledger(unallocated_after=2.0)
    user = turn(second({1: 100}))
    owned = add_owners(user.devices, user.usages, user.assignments, user.owners)

    def read(at: float, *users: Workload) -> float | None:
        unallocated = [(GPU.key, each.key) for each in users]
        ledger.charge(owned, {GPU.uuid: user.usages[0]}, SECOND, at, unallocated)
        (holder,) = ledger.list_devices()[GPU.key].holders
        assert holder.usage is not None
        return holder.usage.unallocated_since

    assert read(1001.0, A) is None
    assert read(1002.0, A) == 1000.0
    assert read(1003.0, A) == 1000.0
    assert read(1004.0) is None
    assert read(1005.0, A) is None


def test_the_uid_of_a_workload_may_become_known_later_and_stays_known() -> None:
    unnamed = structs.replace(A, uid="")
    turns = [turn(second({}), *held(each)) for each in (unnamed, A, unnamed)]
    for snapshot in (charge(*turns[:2]), charge(*turns)):
        (holder,) = snapshot.holders[GPU.key].values()
        assert holder.uid == "uid-a"


def test_counters_of_a_workload_without_a_uid_start_again_when_it_returns() -> None:
    job = Workload(job="7")
    turns = [turn(second({1: 100}), *held(job), owners={1: job}), turn(second({}))]
    assert usage_of(charge(*turns, turns[0]), job).busy_ns == 100


def test_a_workload_is_counted_since_the_reading_before_its_first() -> None:
    snapshot = charge(turn(second({1: 100}, energy_mj=5), *held(A)))
    assert usage_of(snapshot, A).counted_since == 999.0
    assert snapshot.devices[GPU.key].counted_since == 999.0
    assert [usage.counted_since for usage in snapshot.namespaces] == [999.0]


def test_an_idle_user_that_holds_nothing_has_no_energy() -> None:
    first = turn(second({1: 0}, energy_mj=0), *held(B))
    later = turn(second({1: 0}, energy_mj=10**9), *held(B))
    assert usage_of(charge(first, later), A).energy_mj == 0


def use_instance(device: Device, busy: Mapping[int, int]) -> DeviceUsage:
    return DeviceUsage(
        device,
        SECOND,
        sum(busy.values()),
        processes=tuple(ProcessUsage(device.key, pid, 10) for pid in busy),
        process_busy_ns=busy,
    )


def test_unattributed_use_of_an_instance_has_the_energy_of_its_slices() -> None:
    """A process of the host is busy on three slices, and A for the same time on one."""
    usages = [
        DeviceUsage(CUT, SECOND, energy_mj=800, power_mw=100),
        use_instance(INSTANCES[0], {9: 500}),
        use_instance(INSTANCES[1], {1: 500}),
    ]
    holders = held(A, device=INSTANCES[1])
    owners = {1: ProcessOwner(A)}
    snapshot = charge(Turn(usages, holders, owners, devices=(CUT, *INSTANCES)))
    assert usage_of(snapshot, A).energy_mj == 200
    assert snapshot.devices[CUT.key].unattributed_energy_mj == 600


def test_time_in_which_no_instance_answered_has_no_energy_of_its_own() -> None:
    owners = {1: ProcessOwner(A)}
    gpu = DeviceUsage(CUT, SECOND, power_mw=100)
    holders = held(A, share=1.0, device=INSTANCES[0])
    silent = Turn([gpu], holders, owners, devices=(CUT, *INSTANCES))
    usages = [replace(gpu, energy_mj=900), use_instance(INSTANCES[0], {1: SECOND})]
    busy = replace(silent, usages=usages)
    assert usage_of(charge(silent, busy), A).energy_mj == 900


def test_an_instance_of_all_slices_has_all_energy_of_its_gpu() -> None:
    whole = replace(CUT, gi_id=0, profile="7g.141gb")
    usages = [
        DeviceUsage(CUT, SECOND, energy_mj=10**9),
        DeviceUsage(whole, SECOND, 0, processes=(), process_busy_ns={}),
    ]
    only = Turn(usages, held(A, share=1.0, device=whole), devices=(CUT, whole))
    snapshot = charge(only, only)
    assert usage_of(snapshot, A).energy_mj == 2 * 10**9
    assert snapshot.devices[CUT.key].unattributed_energy_mj == 0


def mps(owners: Mapping[int, Workload], servers: set[int]) -> Turn:
    processes = [ProcessUsage(GPU.key, pid, 10, mps=pid != 9) for pid in (*owners, 9)]
    usage = second({9: 500}, processes=tuple(processes))
    found = {
        pid: ProcessOwner(owners.get(pid), is_mps_server=pid in servers)
        for pid in owners.keys() | servers
    }
    return Turn([usage], held(*set(owners.values())), found)


def test_mps_clients_have_no_busy_time_unless_all_are_of_one_container() -> None:
    for snapshot in (charge(mps({1: A, 2: B}, {9})), charge(mps({1: A}, set()))):
        usage = usage_of(snapshot, A)
        assert (usage.busy_ns, usage.idle_ns, usage.energy_mj, usage.utilization_ratio) == (
            None,
        ) * 4
        assert (usage.busy_min_ns, usage.busy_max_ns) == (None, 500), (
            "the server's busy time is the upper bound"
        )
        assert (usage.memory_used_bytes, usage.processes) == (10, 1)
        assert snapshot.devices[GPU.key].unattributed_busy_ns == 500
        assert snapshot.devices[GPU.key].method == "mps"
    sole = charge(mps({1: A, 2: A}, {9}))
    assert (usage_of(sole, A).busy_ns, sole.devices[GPU.key].method) == (500, "samples")
    assert (usage_of(sole, A).processes, usage_of(sole, A).memory_used_bytes) == (2, 20), (
        "the server is not its process"
    )


def test_busy_time_before_and_after_mps_stays_within_the_upper_bound() -> None:
    alone, shared = turn(second({1: 300}), *held(A)), mps({1: A, 2: B}, {9})
    assert usage_of(charge(alone, shared), A).busy_max_ns == 300 + 500
    after = usage_of(charge(alone, shared, alone), A)
    assert (after.busy_ns, after.busy_max_ns) == (600, 1100)


def test_processes_that_report_more_than_the_device_or_the_window() -> None:
    more = charge(turn(second({1: 300, 2: 200}, device_busy=400), *held(A, B)))
    assert more.devices[GPU.key].busy_ns == 500
    beyond = charge(turn(second({1: SECOND, 2: SECOND}), *held(A, B)))
    assert beyond.devices[GPU.key].busy_ns == SECOND
    assert usage_of(beyond, A).busy_ns == SECOND // 2


def test_a_container_waits_for_other_containers_only() -> None:
    """Pids 1 and 3 belong to A, and pid 2 to B. Pid 9 runs on the host."""
    waits = ProcessWaits(
        {1: (400, 200, 600), 2: (300, 0, 300), 3: (100, 100, 100)},
        {(1, 2): 300, (1, 3): 100, (3, 1): 100, (2, 1): 100, (2, 9): 200},
        600,
    )
    usage = second({1: 10, 2: 20, 3: 30, 9: 5}, method="exact", waits=waits)
    snapshot = charge(turn(usage, *held(A, B), owners={1: A, 2: B, 3: A}))
    a, b = usage_of(snapshot, A), usage_of(snapshot, B)
    assert (a.wait_ns, a.wait_min_ns, a.wait_max_ns) == (300, 150, 450)
    assert [(part.pod, round(part.ratio * SECOND)) for part in a.waits_for] == [("b", 300)]
    assert [(part.pod, round(part.ratio * SECOND)) for part in b.waits_for] == [
        ("", 200),
        ("a", 100),
    ]
    assert snapshot.devices[GPU.key].pressure_ratio == 600 / SECOND


def test_waiting_is_absent_while_it_is_unknown_and_continues_later() -> None:
    measured = second(
        {1: 10, 2: 20}, method="exact", waits=ProcessWaits({1: (40, 0, 40)}, {(1, 2): 40}, 40)
    )
    shared, alone = second({1: 10, 2: 20}), second({1: 10})
    assert usage_of(charge(turn(shared, *held(A, B))), A).wait_ns is None
    figures = [
        [turn(measured, *held(A, B)), turn(then, *held(A, B))] for then in (shared, alone, measured)
    ]
    assert [usage_of(charge(*turns), A).wait_ns for turns in figures] == [None, 40, 80]
    assert charge(*figures[0]).devices[GPU.key].pressure_ratio is None


def test_waiting_and_busy_time_are_at_most_the_window() -> None:
    long = ProcessWaits({1: (2 * SECOND,) * 3}, {(1, 2): 2 * SECOND}, 3 * SECOND)
    usage = second({1: 10, 2: 20}, method="exact", waits=long)
    snapshot = charge(turn(usage, *held(A, B)))
    assert usage_of(snapshot, A).wait_ns == SECOND - 10
    assert snapshot.devices[GPU.key].pressure_ratio == (SECOND - 10) / SECOND


def test_a_process_waits_at_most_for_the_estimated_time() -> None:
    waits = ProcessWaits({1: (100, 50, 150), 2: (0, 0, 80)}, {(1, 2): 300}, 300)
    usage = second({1: 10, 2: 20}, method="exact", waits=waits)
    snapshot = charge(turn(usage, *held(A, B)))
    a, b = usage_of(snapshot, A), usage_of(snapshot, B)
    assert (a.wait_ns, a.wait_min_ns, a.wait_max_ns) == (100, 50, 150)
    assert (b.wait_ns, b.wait_max_ns) == (0, 0), "it is unknown for whom it may have waited"


def test_bounds_of_busy_time() -> None:
    """A and B were resident for 600 and 400 ms. The GPU was busy for 700 of these 1000 ms."""
    resident = {1: 600 * 10**6, 2: 400 * 10**6}
    usage = second(
        {1: 450 * 10**6, 2: 250 * 10**6}, method="exact", bounded=True, resident_ns=resident
    )
    found = usage_of(charge(turn(usage, *held(A, B))), A)
    assert (found.busy_min_ns, found.busy_max_ns) == (300 * 10**6, 600 * 10**6)
    shared = second({1: 300, 2: 400}, bounded=True)
    found = usage_of(charge(turn(shared, *held(A, B))), A)
    assert (found.busy_min_ns, found.busy_max_ns) == (0, 700)
    alone = usage_of(charge(turn(second({1: 300}, bounded=True), *held(A))), A)
    assert (alone.busy_min_ns, alone.busy_max_ns) == (300, 300)
    absent = usage_of(charge(turn(shared, *held(A, C))), C)
    assert (absent.busy_min_ns, absent.busy_max_ns) == (0, 0), "it has no process"
    unbounded = turn(second({1: 300, 2: 400}), *held(A, B))
    found = usage_of(charge(unbounded, unbounded), A)
    assert (found.busy_min_ns, found.busy_max_ns) == (None, None)


def test_bounds_by_residency_consider_switches_and_never_exclude_the_busy_time() -> None:
    ms = 10**6

    def find_bounds(busy: Mapping[int, int], **figures: Any) -> list[tuple[int | None, int | None]]:
        usage = second(busy, method="exact", bounded=True, **figures)
        snapshot = charge(turn(usage, *held(A, B)))
        usages = [usage_of(snapshot, workload) for workload in (A, B)]
        return [(usage.busy_min_ns, usage.busy_max_ns) for usage in usages]

    resident = {1: 600 * ms, 2: 400 * ms}
    switching = {"switching_ns": 50 * ms, "saving_ns": {1: 100 * ms}}
    busy = {1: 450 * ms, 2: 250 * ms}
    # 650 of the 700 ms are work. A could work for all but 500 of them, B for all but 600.
    found = find_bounds(busy, resident_ns=resident, **switching)
    assert found == [(150 * ms, 600 * ms), (50 * ms, 400 * ms)]
    found = find_bounds({1: 100 * ms, 2: 600 * ms}, resident_ns=resident)
    assert found == [(100 * ms, 600 * ms), (100 * ms, 600 * ms)]
    found = find_bounds({1: 700 * ms}, resident_ns={1: 300 * ms})
    assert found == [(300 * ms, 700 * ms), (0, 0)]


def test_busy_time_without_bounds_is_certain() -> None:
    shared = turn(second({1: 300, 2: 400}, bounded=True), *held(A, B))
    alone = turn(second({1: 50}), *held(A))
    found = usage_of(charge(shared, alone), A)
    assert (found.busy_ns, found.busy_min_ns, found.busy_max_ns) == (350, 50, 750)


def test_namespaces_are_bounded() -> None:
    ledger, names = Ledger(max_namespaces=3), count()
    for _ in range(10):
        others = held(Workload(f"ns-{next(names)}", "p", "main", "u"))
        snapshot = turn(second({}), *others, *held(C)).enter(ledger)
    assert "serving" in {n.namespace for n in snapshot.namespaces}
    assert len(snapshot.namespaces) == 3
