"""What is charged to whom, rule by rule. Histories of many turns: test_ledger_histories.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from msgspec import structs

from podgpu.model import (
    Assignment,
    ContainerUsage,
    Device,
    DeviceTotals,
    DeviceUsage,
    NamespaceTotals,
    ProcessUsage,
    Workload,
)
from podgpu.usage.ledger import MOST_CLOSED, MOST_NAMESPACES, Ledger

SECOND = 10**9
HOUR = 3600 * SECOND
GPU = Device(0, "GPU-1", "0000:01:00.0", "NVIDIA H200")
MIG = replace(GPU, mig_enabled=True)
A = Workload("research", "a", "main", "u-a")
B = Workload("research", "b", "main", "u-b")
C = Workload("serving", "c", "main", "u-c")
OWNERS = {1: A, 2: B, 3: C, 11: A}
"""Pid 9 is the host's own."""


def used(
    busy: Mapping[int, int | None] | None = None, memory: Mapping[int, int | None] | None = None, **figures: int | None
) -> DeviceUsage:
    """A GPU's second: what each pid ran and has. Who ran is there, with no memory, unless `memory` says who is."""
    sizes: Mapping[int, int | None] = dict.fromkeys(busy or {}, 0) if memory is None else memory
    processes = tuple(ProcessUsage(GPU.key, pid, size) for pid, size in sizes.items())
    told: dict[str, int | None] = {"window_ns": SECOND, **figures}
    return DeviceUsage(GPU, processes=processes, process_busy_ns=busy, **told)  # type: ignore[arg-type]


def instance(number: int, profile: str, **figures: int | None) -> DeviceUsage:
    """A MIG instance's second, with no processes."""
    device = replace(MIG, gi_id=number, profile=profile)
    return DeviceUsage(device, SECOND, processes=(), **figures)  # type: ignore[arg-type]


def held(holder: Workload, share: float | None = 1.0, device: str = GPU.key) -> Assignment:
    return Assignment(device, holder, "kubelet", share=share)


class Books:
    """A ledger, and its statements taken apart."""

    def __init__(self) -> None:
        self.ledger = Ledger()

    def turn(
        self,
        usages: DeviceUsage | Sequence[DeviceUsage] = (),
        holders: Sequence[Assignment] = (),
        elapsed: int = SECOND,
        owners: Mapping[int, Workload] = OWNERS,
        untold: Sequence[int] = (),
    ) -> Books:
        told = [usages] if isinstance(usages, DeviceUsage) else usages
        self.ledger.charge(told, holders, owners.get, elapsed, untold)
        return self

    def of(self, workload: Workload) -> ContainerUsage:
        """Without `idle_run_ns`, which has a test of its own."""
        return replace(self.statement_of(workload), idle_run_ns=None)

    def statement_of(self, workload: Workload) -> ContainerUsage:
        (found,) = (one for one in self.ledger.statement().containers if one.holder.pod == workload.pod)
        return found

    def people(self) -> list[str]:
        return [one.holder.pod or one.holder.job for one in self.ledger.statement().containers]

    def device(self, key: str = GPU.key) -> DeviceTotals:
        (found,) = (one for one in self.ledger.statement().devices if one.device == key)
        return found

    def namespaces(self) -> dict[str, NamespaceTotals]:
        return {one.namespace: one for one in self.ledger.statement().namespaces}


@pytest.fixture
def books() -> Books:
    return Books()


# Accounts


def test_a_holder_that_never_touched_its_gpu_has_everything(books: Books) -> None:
    books.turn(used({}, busy_ns=0, energy_mj=0, memory_used=0), [held(A)], elapsed=0)
    assert books.of(A) == ContainerUsage(GPU.key, A, 0.0, 0, 0, 0, 0, 0, 0)
    assert books.namespaces() == {"research": NamespaceTotals("research", "NVIDIA H200", 0, 0, 0)}


def test_who_uses_without_holding_has_an_account_but_nothing_allocated_or_idle(books: Books) -> None:
    books.turn(used({3: 400}, {3: 5}, busy_ns=400), [held(A)])
    assert books.of(C) == ContainerUsage(GPU.key, C, 400 / SECOND, 5, 1, None, 400, None, None)


@pytest.mark.fault(
    "who tells of the holders is ill for so long that a pod's mapping is withdrawn, and then tells of it again",
    "the pod's series end and come back; its counters go on where they were",
)
def test_an_account_ends_with_use_and_holding_and_goes_on_when_the_same_pod_is_back(books: Books) -> None:
    books.turn(used({1: 100}), [held(A)]).turn(used({1: 50}), [])
    assert (books.of(A).allocated_ns, books.of(A).busy_ns) == (SECOND, 150)
    books.turn(used({}), [])
    assert books.people() == []
    books.turn(used({1: 7}), [held(A)])
    assert (books.of(A).allocated_ns, books.of(A).busy_ns) == (2 * SECOND, 157)
    assert books.namespaces()["research"] == NamespaceTotals("research", "NVIDIA H200", 2 * SECOND, 157)


def test_one_whose_uid_nobody_knows_starts_anew_and_so_does_one_that_left_long_ago(books: Books) -> None:
    nameless = structs.replace(A, uid="")
    books.turn(used({1: 100}), [held(nameless)], owners={1: nameless}).turn(used({}), [])
    books.turn(used({1: 7}), [held(nameless)], owners={1: nameless})
    assert books.of(nameless).busy_ns == 7, "it may be another pod of that name"
    books.turn(used({1: 100}), [held(A)]).turn(used({}), [])
    for number in range(MOST_CLOSED):
        passing = structs.replace(B, pod=f"b{number}", uid=f"u-b{number}")
        books.turn(used({}), [held(passing)], owners={}).turn(used({}), [])
    books.turn(used({1: 7}), [held(A)])
    assert books.of(A).busy_ns == 7, "what is remembered is bounded"


def test_who_ran_within_the_window_and_is_gone_is_charged_still(books: Books) -> None:
    books.turn(used({1: 100}, memory={}))
    assert (books.of(A).busy_ns, books.of(A).processes) == (100, 0)
    assert books.turn(used({1: 0}, memory={})).people() == [], "a sample of nothing is no use"


def test_a_pod_made_anew_starts_anew(books: Books) -> None:
    again = structs.replace(A, uid="u-2")
    books.turn(used({1: 100}), [held(A)]).turn(used({1: 30}, busy_ns=30), [held(again)])
    assert books.of(A) == ContainerUsage(GPU.key, again, 0.0, 0, 0, SECOND, 0, SECOND)
    assert books.device().unattributed_busy_ns == 30, "what is left of the old one is not the new one's"
    books.turn(used({1: 5}), [held(again)], owners={1: again})
    assert books.of(A).busy_ns == 5


@pytest.mark.parametrize("first", [1, 2])
def test_without_a_holder_the_pod_that_was_there_stays_until_it_is_gone(books: Books, first: int) -> None:
    both, second = {1: A, 2: structs.replace(A, uid="u-2")}, 3 - first
    books.turn(used({first: 10}), owners=both).turn(used({first: 10, second: 1}), owners=both)
    assert (books.of(A).holder, books.of(A).busy_ns) == (both[first], 20)
    books.turn(used({second: 1}), owners=both)
    assert (books.of(A).holder, books.of(A).busy_ns) == (both[second], 1)


def test_a_uid_that_becomes_known_is_no_other_pod(books: Books) -> None:
    nameless = structs.replace(A, uid="")
    books.turn(used({}), [held(nameless)]).turn(used({1: 5}), [held(nameless)]).turn(used({}), [held(nameless)])
    assert books.of(A) == ContainerUsage(GPU.key, A, 0.0, 0, 0, 3 * SECOND, 5, 2 * SECOND)


def test_a_restarted_container_keeps_its_account(books: Books) -> None:
    first, second = structs.replace(A, container_id="c-1"), structs.replace(A, container_id="c-2")
    books.turn(used({1: 5}), [held(first)], owners={1: first})
    assert books.turn(used({1: 5}), [held(second)], owners={1: second}).of(A).busy_ns == 10


def test_a_job_has_an_account_and_no_namespace(books: Books) -> None:
    job = Workload(job="4711")
    books.turn(used({}, energy_mj=10), [held(job)])
    assert books.people() == ["4711"]
    assert books.ledger.statement().containers[0].energy_mj == 10
    assert books.namespaces() == {}


# Allocated and idle time


def test_allocated_time_is_exact_over_many_turns(books: Books) -> None:
    for _ in range(3000):
        books.turn(used({}), [held(A, 1 / 3), held(B, 0.1)], elapsed=1001)
    assert books.of(A).allocated_ns == 1001 * 1000
    assert books.of(B).allocated_ns == 1001 * 300


def test_a_share_that_changes_loses_less_than_a_nanosecond(books: Books) -> None:
    for share in (1 / 3, 0.5, 1 / 7):
        books.turn(used({}), [held(A, share)], elapsed=10)
    assert books.of(A).allocated_ns == 9  # 3 1/3 + 5 + 1 3/7


@pytest.mark.parametrize("share", [None, float("nan"), float("inf"), -0.5, 1.5])
def test_an_unknown_share_allocates_nothing(books: Books, share: float | None) -> None:
    books.turn(used({}), [held(A, share)])
    assert (books.of(A).allocated_ns, books.of(A).idle_ns) == (None, SECOND)
    assert books.namespaces()["research"].allocated_ns == 0


@pytest.mark.parametrize("elapsed", [0, -5, HOUR + 1])
def test_a_clock_that_jumps_charges_no_time(books: Books, elapsed: int) -> None:
    books.turn(used({2: 100}, energy_mj=8), [held(A), held(B, 0.5)], elapsed)
    assert (books.of(A).allocated_ns, books.of(A).idle_ns) == (0, 0)
    assert (books.of(B).busy_ns, books.of(B).energy_mj) == (100, 8), "these are the driver's own"


@pytest.mark.parametrize("window_ns", [0, -5, HOUR + 1])
def test_nor_does_the_drivers_clock(books: Books, window_ns: int) -> None:
    books.turn(used({1: 100}, busy_ns=50, energy_mj=8, window_ns=window_ns), [held(A)])
    assert books.of(A) == ContainerUsage(GPU.key, A, None, 0, 1, SECOND, 0, 0, 0)
    assert books.device() == DeviceTotals(GPU.key, 0, 8, None, 0, 8, method="samples")


def test_idle_is_a_turn_held_in_which_nothing_ran(books: Books) -> None:
    books.turn(used({1: 1}), [held(A, 0.5), held(B, 0.5)]).turn(used({}), [held(A, 0.5)])
    assert books.of(A).idle_ns == SECOND


# Busy time


def test_how_long_somebody_has_been_idle_begins_anew_whenever_it_runs(books: Books) -> None:
    told = []
    for busy in (0, 100, 0, 0):
        books.turn(used({1: busy} if busy else {}), [held(A)])
        told.append(books.statement_of(A).idle_run_ns)
    assert told == [SECOND, 0, SECOND, 2 * SECOND]
    assert books.statement_of(A).idle_ns == 3 * SECOND


def test_who_has_a_process_beside_a_busy_one_is_not_called_idle(books: Books) -> None:
    """The driver gives its samples to the busy one, whatever the other ran between."""
    books.turn(used({1: 100}, {1: 5, 2: 1}), [held(A, 0.5), held(B, 0.5)])
    assert (books.statement_of(B).busy_ns, books.statement_of(B).idle_ns) == (0, None)
    books.turn(used({}, {1: 5, 2: 1}), [held(A, 0.5), held(B, 0.5)])
    assert books.statement_of(B).idle_ns == SECOND, "the device did nothing, so neither did it"
    books.turn(used({1: 100}, {1: 5, 2: 1}), [held(A, 0.5), held(B, 0.5)])
    assert books.statement_of(B).idle_run_ns == 0
    books.turn(used({1: 100}, {1: 5}), [held(A, 0.5), held(B, 0.5)])
    assert books.statement_of(B).idle_run_ns == SECOND, "nothing of it is there any more"


def test_what_has_no_owner_is_in_the_rest(books: Books) -> None:
    books.turn(used({1: 100, 11: 20, 2: 200, 9: 50}, busy_ns=500), [held(A)])
    assert (books.of(A).busy_ns, books.of(B).busy_ns) == (120, 200)
    assert (books.of(A).utilization, books.of(A).processes) == (120 / SECOND, 2)
    assert (books.device().busy_ns, books.device().unattributed_busy_ns) == (500, 180)


def test_processes_that_come_to_more_than_the_device_are_its_figure(books: Books) -> None:
    books.turn(used({1: 300, 9: 50}, busy_ns=200))
    assert (books.device().busy_ns, books.device().unattributed_busy_ns, books.of(A).busy_ns) == (350, 50, 300)


def test_processes_that_come_to_more_than_the_window_are_scaled_to_it(books: Books) -> None:
    books.turn(used({1: 90, 2: 60, 9: 30}, busy_ns=80, window_ns=100))
    assert (books.of(A).busy_ns, books.of(B).busy_ns) == (50, 33)
    assert (books.device().busy_ns, books.device().unattributed_busy_ns) == (100, 17)


def test_without_a_device_figure_processes_are_it(books: Books) -> None:
    books.turn(used({1: 90, 2: 60}, window_ns=100))
    assert (books.device().busy_ns, books.device().unattributed_busy_ns) == (100, 0)


def test_a_driver_that_tells_more_than_the_window_is_cut_to_it(books: Books) -> None:
    books.turn(used({1: 50}, busy_ns=400, window_ns=100))
    assert (books.device().busy_ns, books.device().unattributed_busy_ns) == (100, 50)


def test_without_per_process_figures_busy_time_is_nobodys(books: Books) -> None:
    books.turn(used(None, {1: 5}, busy_ns=400, energy_mj=9, memory_used=7), [held(A)])
    assert books.of(A) == ContainerUsage(GPU.key, A, None, 5, 1, SECOND, None, None, None)
    assert books.device() == DeviceTotals(GPU.key, 400, 9, 7, 400, 9, 2)


def test_a_process_of_which_the_driver_tells_nonsense_leaves_its_container_untold(books: Books) -> None:
    books.turn(used({1: 100, 2: 50}, energy_mj=3), [held(A)])
    books.turn(used({1: None, 11: 30, 2: 50}, busy_ns=200, energy_mj=4), [held(A)])
    assert books.of(A) == ContainerUsage(GPU.key, A, None, 0, 2, 2 * SECOND, 100, 0, 2)
    assert (books.of(B).busy_ns, books.of(B).energy_mj) == (100, 2)
    assert (books.device().busy_ns, books.device().unattributed_busy_ns) == (350, 150)


# Processes that end


def test_a_processs_last_part_window_is_its_holders(books: Books) -> None:
    """The driver tells nothing any more of a process that has ended."""
    books.turn(used({1: 500}, busy_ns=500, energy_mj=10), [held(A)])
    books.turn(used({}, busy_ns=200, energy_mj=4), [held(A)])
    assert (books.of(A).busy_ns, books.of(A).idle_ns, books.of(A).energy_mj) == (700, 0, 14)
    assert books.device() == DeviceTotals(GPU.key, 700, 14, None, 0, 0, method="samples")
    books.turn(used({}, busy_ns=200), [held(A)])
    assert (books.of(A).busy_ns, books.device().unattributed_busy_ns) == (700, 200), "once"


def test_on_a_shared_gpu_it_is_what_the_others_do_not_account_for(books: Books) -> None:
    holders = [held(A, 0.5), held(C, 0.5)]
    books.turn(used({1: 300, 3: 300, 9: 50}), holders).turn(used({3: 310, 9: 40}, busy_ns=400), holders)
    assert [books.of(who).busy_ns for who in (A, C)] == [350, 610]
    assert books.device().unattributed_busy_ns == 90


@pytest.mark.parametrize(
    ("ended", "holders"),
    [
        ([1, 3], [held(A, 0.5), held(C, 0.5)]),
        ([1, 9], [held(A)]),
        ([9], [held(A)]),
        ([1], [held(C)]),
        ([1], []),
        ([], [held(A)]),
    ],
    ids=["two holders'", "a stranger's too", "a stranger's", "of no holder", "nobody holds", "none"],
)
def test_where_it_may_be_anothers_it_is_nobodys(
    books: Books, ended: Sequence[int], holders: Sequence[Assignment]
) -> None:
    there = {1: 100, 3: 100, 9: 100}
    left = {pid: ns for pid, ns in there.items() if pid not in ended}
    before = books.turn(used(there, busy_ns=300), holders).device().unattributed_busy_ns
    books.turn(used(left, busy_ns=400), holders)
    assert books.device().unattributed_busy_ns == (before or 0) + 400 - sum(left[pid] for pid in left if pid != 9)


def test_a_pid_taken_over_by_another_container_ended_too(books: Books) -> None:
    holders = [held(A, 0.5), held(C, 0.5)]
    books.turn(used({1: 500}, busy_ns=500), holders)
    books.turn(used({1: 100}, busy_ns=300), holders, owners={1: C})
    assert [books.of(who).busy_ns for who in (A, C)] == [700, 100]


def test_an_end_that_was_not_seen_at_once_is_seen_later(books: Books) -> None:
    books.turn(used({1: 500}, busy_ns=500), [held(A)]).turn([], [held(A)])
    assert books.turn(used({}, busy_ns=200), [held(A)]).of(A).busy_ns == 700


def test_a_gpu_that_left_and_came_back_knows_nobody_who_ended(books: Books) -> None:
    books.turn(used({1: 500}, busy_ns=500), [held(A)])
    books.ledger.forget_devices({GPU.key})
    assert books.ledger.statement().devices == ()
    books.turn(used({}, busy_ns=200), [held(A)])
    assert (books.of(A).busy_ns, books.device().unattributed_busy_ns) == (500, 200), "counters go on where they were"


def test_a_gpu_that_came_back_has_forgotten_who_left_meanwhile(books: Books) -> None:
    books.turn(used({1: 500}, busy_ns=500), [held(A)])
    books.ledger.forget_devices({GPU.key})
    books.turn(used({3: 200}, busy_ns=200), [held(C)])
    assert [one.holder for one in books.ledger.statement().containers] == [C]
    assert books.device().busy_ns == 700


def test_namespaces_are_bounded_and_what_is_forgotten_is_counted(books: Books) -> None:
    """Those that hold something are never forgotten, the longest unchanged of the others first."""
    stays = [held(Workload("stays", "p", "c", "u-stays"), 0.0)]
    for number in range(MOST_NAMESPACES // 1000 + 2):
        crowd = [held(Workload(f"ns-{number}-{n}", "p", "c", f"u-{number}-{n}"), 0.001) for n in range(1000)]
        books.turn(used({}, busy_ns=0), [*stays, *crowd])
    books.turn(used({}, busy_ns=0), stays)
    namespaces = {one.namespace for one in books.ledger.statement().namespaces}
    assert len(namespaces) == MOST_NAMESPACES
    assert books.ledger.namespaces_forgotten == 2001
    assert "stays" in namespaces
    assert "ns-0-0" not in namespaces
    assert f"ns-{MOST_NAMESPACES // 1000 + 1}-999" in namespaces


# What cannot be seen


def test_unseen_processes_leave_only_what_is_allocated(books: Books) -> None:
    blind = DeviceUsage(GPU, SECOND, 400, 9, 7, None, {1: 300})
    books.turn(blind, [held(A)])
    assert books.of(A) == ContainerUsage(GPU.key, A, allocated_ns=SECOND)
    assert books.device() == DeviceTotals(GPU.key, 400, 9, 7)
    assert books.namespaces()["research"] == NamespaceTotals("research", "NVIDIA H200", SECOND)
    assert books.turn(blind, []).people() == []


def test_a_process_that_may_be_anybodys_leaves_those_untold_who_seem_to_run_nothing(books: Books) -> None:
    holders = [held(A, 0.5), held(C, 0.5)]
    books.turn(used({1: 100}, {1: 5}, energy_mj=0, memory_used=50), holders)
    books.turn(used({1: 100, 8: 200}, {1: 5, 8: 20}, energy_mj=30, memory_used=50), holders, untold=[8])
    assert books.of(A) == ContainerUsage(GPU.key, A, 100 / SECOND, 5, 1, SECOND, 200, 0, 10)
    assert books.of(C) == ContainerUsage(GPU.key, C, None, None, None, SECOND, 0, SECOND, 0), "counters stand"
    assert books.device() == DeviceTotals(GPU.key, 400, 30, 50, 200, 20, 45, "samples")


def test_while_it_rests_only_memory_and_processes_are_untold(books: Books) -> None:
    books.turn(used({8: 0}, {8: 20}, busy_ns=0, energy_mj=30, memory_used=50), [held(C)], untold=[8])
    assert books.of(C) == ContainerUsage(GPU.key, C, 0.0, None, None, SECOND, 0, SECOND, 30)


def test_a_process_on_another_gpu_makes_nobody_untold(books: Books) -> None:
    books.turn(used({}), [held(C)], untold=[8])
    assert (books.of(C).processes, books.of(C).idle_ns) == (0, SECOND)


def test_once_seen_the_rest_has_what_was_not_seen_before(books: Books) -> None:
    blind = DeviceUsage(GPU, SECOND, 400, 9, 7)
    books.turn(blind, [held(A)]).turn(used({1: 100}, busy_ns=100, energy_mj=1), [held(A)]).turn(blind, [held(A)])
    assert (books.of(A).busy_ns, books.of(A).energy_mj, books.of(A).memory) == (100, 1, None)
    assert books.device() == DeviceTotals(GPU.key, 900, 19, 7, 800, 18, None)


def test_a_turn_that_lacks_figures_leaves_counters_and_clears_gauges(books: Books) -> None:
    books.turn(used({1: 100}, {1: 5}, energy_mj=3, memory_used=5), [held(A)])
    books.turn(used(None, {1: None}), [held(A)])
    assert books.of(A) == ContainerUsage(GPU.key, A, None, None, 1, 2 * SECOND, 100, 0, 3)
    assert books.device() == DeviceTotals(GPU.key, 100, 3, None, 0, 0, None)


def test_a_gpu_that_hangs_stays_held(books: Books) -> None:
    books.turn(used({1: 100, 3: 4}, {1: 5, 3: 1}), [held(A)]).turn([], [held(A)])
    assert books.of(A) == ContainerUsage(GPU.key, A, None, None, None, 2 * SECOND, 100, 0)
    assert books.of(C) == ContainerUsage(GPU.key, C, busy_ns=4), "nobody saw it end"
    assert books.device() == DeviceTotals(GPU.key, 104, None, None, 0)


@pytest.mark.fault(
    "a container leaves while the GPU it held does not answer",
    "its series end with its hold: nobody waits for the GPU to tell that the processes ended too",
)
def test_who_held_a_gpu_that_hangs_and_holds_it_no_more_is_gone(books: Books) -> None:
    books.turn(used({1: 100, 3: 4}, {1: 5, 3: 1}), [held(A)]).turn([], [held(A)]).turn([], [])
    assert books.people() == ["c"], "of c, which never held it, nobody knows"
    books.turn([], [held(A)])
    assert (books.of(A).allocated_ns, books.of(A).busy_ns) == (3 * SECOND, 100), "the same pod goes on"


def test_but_one_whose_uid_nobody_knows_stays_since_its_counters_would_fall(books: Books) -> None:
    nameless = structs.replace(A, uid="")
    books.turn(used({1: 200}), [held(nameless)], owners={1: nameless}).turn([], []).turn([], [held(nameless)])
    books.turn(used({1: 100}), [held(nameless)], owners={1: nameless})
    assert books.of(nameless).busy_ns == 300


def test_nor_is_it_there_when_the_gpu_is_back_and_cannot_tell_of_processes_yet(books: Books) -> None:
    books.turn(used({1: 500}, busy_ns=500), [held(A)])
    books.ledger.forget_devices({GPU.key})
    assert books.turn(DeviceUsage(GPU, SECOND, 400), []).people() == []


def test_a_gpu_that_never_answered_has_no_model(books: Books) -> None:
    books.turn([], [held(A)])
    assert books.of(A) == ContainerUsage(GPU.key, A, allocated_ns=SECOND)
    assert books.namespaces()["research"] == NamespaceTotals("research", "", SECOND)


def test_a_gpu_that_left_is_forgotten_with_its_instances(books: Books) -> None:
    books.turn([used({1: 100}), instance(1, "1g.18gb")], [held(A), held(B, 1.0, "GPU-1/gi1")])
    books.ledger.forget_devices({"GPU-1"})
    statement = books.ledger.statement()
    assert (statement.containers, statement.devices) == ((), ())
    assert [one.busy_ns for one in statement.namespaces] == [100, None], "the GPU's, and the instance's"


# Memory


def test_memory_is_the_processes_own_and_the_rest_is_nobodys(books: Books) -> None:
    books.turn(used({}, {1: 100, 11: 20, 2: 30, 9: 7}, memory_used=200), [held(A), held(C)])
    assert [books.of(who).memory for who in (A, B, C)] == [120, 30, 0]
    assert (books.device().memory_used, books.device().unattributed_memory) == (200, 50)


def test_a_process_that_does_not_tell_leaves_its_container_untold(books: Books) -> None:
    books.turn(used({}, {1: 100, 11: None, 2: 30}, memory_used=200))
    assert (books.of(A).memory, books.of(A).processes, books.of(B).memory) == (None, 2, 30)
    assert books.device().unattributed_memory == 170


def test_memory_beyond_the_devices_wins(books: Books) -> None:
    books.turn(used({}, {1: 100, 2: 30, 9: 50}, memory_used=120))
    assert (books.device().memory_used, books.device().unattributed_memory) == (130, 0)


# Energy


def test_energy_goes_by_busy_time(books: Books) -> None:
    books.turn(used({1: 300, 2: 100, 9: 50}, busy_ns=500, energy_mj=1001), [held(A, 0.1), held(C, 0.9)])
    assert [books.of(who).energy_mj for who in (A, B, C)] == [601, 200, 0]
    assert (books.device().energy_mj, books.device().unattributed_energy_mj) == (1001, 200)


@pytest.mark.parametrize(
    ("shares", "parts"),
    [
        ([0.5, 0.25], [50, 25, 25]),
        ([1.0, 1.0], [50, 50, 0]),
        ([0.5, None], [50, 0, 50]),
        ([None, None], [0, 0, 100]),
        ([None], [100, 0]),
        ([0.25], [25, 75]),
        ([1 / 3, 1 / 3, 1 / 3], [34, 33, 33, 0]),
        ([], [100]),
    ],
)
def test_energy_goes_by_share_when_nobody_ran(
    books: Books, shares: Sequence[float | None], parts: Sequence[int]
) -> None:
    holders = [held(workload, share) for workload, share in zip((A, B, C), shares, strict=False)]
    books.turn(used({}, busy_ns=0, energy_mj=100), holders)
    charged = [one.energy_mj for one in books.ledger.statement().containers]
    assert [*charged, books.device().unattributed_energy_mj] == list(parts)


@pytest.mark.parametrize("turned", [1, -1])
def test_the_unit_that_cannot_be_divided_goes_by_name(books: Books, turned: int) -> None:
    books.turn(used({}, energy_mj=101), [held(A, 0.5), held(B, 0.5)][::turned])
    books.turn(used(dict([(1, 100), (2, 100)][::turned]), energy_mj=101))
    assert (books.of(A).energy_mj, books.of(B).energy_mj) == (102, 100)


def test_who_only_sits_there_pays_nothing_when_nobody_ran(books: Books) -> None:
    books.turn(used({}, {2: 5}, busy_ns=0, energy_mj=100), [held(A)])
    assert (books.of(A).energy_mj, books.of(B).energy_mj) == (100, 0)


# MIG

SMALL, LARGE = "GPU-1/gi9", "GPU-1/gi1"


def whole(energy_mj: int | None) -> DeviceUsage:
    """What the GPU says in MIG mode, and a process that is an instance's."""
    return DeviceUsage(MIG, SECOND, 77, energy_mj, 88, (ProcessUsage(SMALL, 1, 5),), {1: 5})


@pytest.mark.fault(
    "a GPU that a pod held whole is cut into MIG instances after the pod has ended",
    "the pod's series on the whole GPU end; when the GPU is whole again no time of others' is charged to the pod",
)
def test_accounts_on_a_whole_gpu_end_when_it_is_cut(books: Books) -> None:
    books.turn([used({1: SECOND // 2}, busy_ns=SECOND // 2)], [held(A)])
    assert [one.holder for one in books.ledger.statement().containers] == [A]
    books.turn([whole(None), instance(9, "1g.18gb", busy_ns=0)], [held(B, device=SMALL)])
    assert [(one.device, one.holder) for one in books.ledger.statement().containers] == [(SMALL, B)]
    books.turn([used({}, busy_ns=SECOND // 2)], [held(A), held(B)])
    assert {one.holder: one.busy_ns for one in books.ledger.statement().containers if one.device == GPU.key} == {
        A: SECOND // 2,
        B: 0,
    }, "no process of A's has ended in this turn: the time is nobody's"


def test_an_instance_with_one_holder_takes_the_instances_figures(books: Books) -> None:
    small = replace(instance(9, "1g.18gb", busy_ns=SECOND // 2, memory_used=9), processes=(ProcessUsage(SMALL, 1, 5),))
    books.turn([whole(None), small], [held(A, device=SMALL)])
    assert books.of(A) == ContainerUsage(SMALL, A, 0.5, 5, 1, SECOND, SECOND // 2, 0)
    assert books.device(SMALL) == DeviceTotals(SMALL, SECOND // 2, None, 9, 0, None, 4, "samples")
    assert books.device() == DeviceTotals(GPU.key), "or sums would count the instances twice"


def test_a_list_of_all_the_gpus_processes_gives_each_instance_its_own(books: Books) -> None:
    listed = (ProcessUsage(SMALL, 1, 5), ProcessUsage(LARGE, 3, 6))
    pieces = [replace(instance(number, "1g.18gb", busy_ns=1), processes=listed) for number in (1, 9)]
    books.turn(pieces, [held(A, device=SMALL), held(C, device=LARGE)])
    assert [(books.of(who).memory, books.of(who).busy_ns) for who in (A, C)] == [(5, 1), (6, 1)]


@pytest.mark.parametrize("second", [[held(B, 0.5, SMALL)], []])
def test_an_instance_with_several_has_memory_only(books: Books, second: list[Assignment]) -> None:
    there = (ProcessUsage(SMALL, 1, 5), ProcessUsage(SMALL, 2, 6))
    small = replace(instance(9, "1g.18gb", busy_ns=100), processes=there)
    books.turn([whole(70), small], [held(A, 0.5, SMALL), *second])
    assert books.of(A) == ContainerUsage(SMALL, A, None, 5, 1, SECOND // 2)
    assert (books.of(B).memory, books.of(B).busy_ns, books.of(B).energy_mj) == (6, None, None)
    assert books.device(SMALL).unattributed_busy_ns == 100
    assert books.device().unattributed_energy_mj == 70


def test_a_gpus_energy_goes_by_its_instances_use_and_size(books: Books) -> None:
    small, large = instance(9, "1g.18gb", busy_ns=300), instance(1, "3g.71gb", busy_ns=100)
    unheld = instance(2, "2g.35gb", busy_ns=200)
    books.turn([whole(1000), small, large, unheld], [held(A, device=SMALL), held(C, device=LARGE)])
    assert (books.of(A).energy_mj, books.of(C).energy_mj) == (300, 300)
    assert books.device() == DeviceTotals(GPU.key, None, 1000, None, None, 400)
    assert books.device(SMALL).energy_mj is None


def test_idle_instances_pay_by_their_size(books: Books) -> None:
    usages = [whole(700), instance(9, "1g.18gb", busy_ns=0), instance(1, "3g.71gb", busy_ns=0)]
    books.turn(usages, [held(A, 0.5, SMALL), held(C, None, LARGE)])
    assert (books.of(A).energy_mj, books.of(C).energy_mj) == (50, 300)
    assert books.device().unattributed_energy_mj == 350


def test_idle_instances_pay_for_their_part_of_the_slices_their_model_has(books: Books) -> None:
    """An A30 is cut into four: who holds all four pays all, and two of four pay half."""
    pieces = [whole(800), instance(1, "2g.12gb", busy_ns=0), instance(9, "1g.6gb", busy_ns=0)]
    of_a30 = [replace(usage, device=replace(usage.device, model="NVIDIA A30")) for usage in pieces]
    books.turn(of_a30, [held(A, device=SMALL), held(C, device=LARGE)])
    assert (books.of(A).energy_mj, books.of(C).energy_mj) == (200, 400)
    assert books.device().unattributed_energy_mj == 200, "the slice that was not made into an instance"


@pytest.mark.parametrize(
    "other",
    [
        [instance(1, "3g.71gb")],
        [instance(1, "", busy_ns=5)],
        [replace(instance(1, "3g.71gb", busy_ns=5), window_ns=0)],
        [],
    ],
    ids=["no busy time", "no profile", "no window", "no answer"],
)
def test_an_instance_that_cannot_tell_leaves_the_energy_to_nobody(books: Books, other: list[DeviceUsage]) -> None:
    small = instance(9, "1g.18gb", busy_ns=300)
    books.turn([whole(70), small, *other], [held(A, device=SMALL), held(C, device=LARGE)])
    assert (books.of(A).energy_mj, books.of(C).energy_mj) == (None, None)
    assert books.device().unattributed_energy_mj == 70


def test_instances_whose_processes_cannot_be_seen_pay_nothing(books: Books) -> None:
    books.turn([whole(70), replace(instance(9, "1g.18gb", busy_ns=300), processes=None)], [held(A, device=SMALL)])
    assert books.of(A) == ContainerUsage(SMALL, A, allocated_ns=SECOND)
    assert books.device() == DeviceTotals(GPU.key, None, 70)


# Namespaces


def test_namespaces_are_by_model(books: Books) -> None:
    other = replace(GPU, uuid="GPU-2", model="NVIDIA A100")
    books.turn([used({1: 100}), DeviceUsage(other, SECOND)], [held(A), held(A, 0.5, "GPU-2"), held(C, 1.0, "GPU-2")])
    assert books.ledger.statement().namespaces == (
        NamespaceTotals("research", "NVIDIA A100", SECOND // 2),
        NamespaceTotals("research", "NVIDIA H200", SECOND, 100),
        NamespaceTotals("serving", "NVIDIA A100", SECOND),
    )


def test_hours_of_mig_instances_are_not_hours_of_gpus(books: Books) -> None:
    books.turn([whole(None), instance(9, "1g.18gb", busy_ns=5)], [held(A, device=SMALL)])
    assert books.ledger.statement().namespaces == (NamespaceTotals("research", "NVIDIA H200 MIG 1g.18gb", SECOND, 5),)
