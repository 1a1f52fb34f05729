"""Energy that is told once for several turns: who pays for it, come or gone. Whatever the turns, it adds up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.model import Assignment, Device, DeviceUsage, ProcessUsage, Workload
from podgpu.usage.ledger import Ledger

SECOND = 10**9
JOULE = 10**9
"""In the nanojoules of estimates."""
GPU = Device(0, "GPU-1", "0000:01:00.0", "NVIDIA H200")
A, B = Workload("research", "a", "main", "u-a"), Workload("serving", "b", "main", "u-b")
OWNERS = {1: A, 2: B}


@dataclass
class Books:
    ledger: Ledger

    def turn(
        self,
        busy: dict[int, int],
        energy: int | None,
        estimate: int | None,
        *holders: Workload,
        since: int = 0,
        device: Device = GPU,
    ) -> None:
        usage = DeviceUsage(
            device,
            SECOND,
            busy_ns=sum(busy.values()),
            energy_mj=energy,
            processes=tuple(ProcessUsage(device.key, pid, 0) for pid in busy),
            process_busy_ns=busy,
            energy_estimate_nj=estimate,
            energy_since_nj=since,
        )
        held = [Assignment(device.key, holder, "kubelet", share=1 / len(holders)) for holder in holders]
        self.ledger.charge([usage], held, OWNERS.get, SECOND)

    def paid(self) -> dict[str, int | None]:
        return {one.holder.pod: one.energy_mj for one in self.ledger.statement().containers}

    def namespaces(self) -> dict[str, int | None]:
        return {one.namespace: one.energy_mj for one in self.ledger.statement().namespaces}

    @property
    def rest(self) -> int | None:
        return self.ledger.statement().devices[0].unattributed_energy_mj


@pytest.fixture
def books() -> Books:
    return Books(Ledger())


def test_every_second_of_a_stretch_is_paid_by_who_ran_in_it(books: Books) -> None:
    """Not by who ran in the last one."""
    for _ in range(4):
        books.turn({1: SECOND // 2}, None, 100 * JOULE, A, B)
    assert books.paid() == {"a": None, "b": None}, "nothing is told yet"
    books.turn({2: SECOND // 2}, 500_000, 100 * JOULE, A, B)
    assert books.paid() == {"a": 400_000, "b": 100_000}


def test_idle_seconds_are_paid_by_share_and_busy_ones_by_use(books: Books) -> None:
    """Four seconds of rest at 80 W are both holders'; the fifth, at 480 W, is the one's who worked."""
    for _ in range(4):
        books.turn({}, None, 80 * JOULE, A, B)
    books.turn({1: SECOND}, 800_000, 480 * JOULE, A, B)
    assert books.paid() == {"a": 640_000, "b": 160_000}


def test_who_is_gone_when_the_figure_comes_has_paid_all_the_same(books: Books) -> None:
    books.turn({1: SECOND}, None, 100 * JOULE, A)
    books.turn({1: SECOND}, None, 100 * JOULE, A)
    books.turn({2: SECOND}, 300_000, 100 * JOULE, B)
    assert books.paid() == {"b": 100_000}
    assert books.namespaces() == {"research": 200_000, "serving": 100_000}
    assert books.rest == 0


def test_who_is_gone_from_a_mig_instance_has_paid_too(books: Books) -> None:
    cut = Device(0, "GPU-1", "0000:01:00.0", "NVIDIA H200", mig_enabled=True)
    part = Device(0, "GPU-1", "0000:01:00.0", "NVIDIA H200", mig_enabled=True, gi_id=1, profile="7g.141gb")

    def turn(pid: int, who: Workload, energy: int | None) -> None:
        running = (ProcessUsage(part.key, pid, 0),)
        usages = [
            DeviceUsage(cut, 0, energy_mj=energy, processes=running, energy_estimate_nj=100 * JOULE),
            DeviceUsage(part, SECOND, busy_ns=SECOND, processes=running),
        ]
        held = [Assignment(part.key, who, "kubelet", share=1.0)]
        books.ledger.charge(usages, held, OWNERS.get, SECOND)

    turn(1, A, None)
    turn(2, B, 200_000)
    assert books.namespaces() == {"research": 100_000, "serving": 100_000}


def test_what_was_used_since_the_counter_was_asked_is_in_the_next(books: Books) -> None:
    """Telemetry asked half a second ago: A's second half is paid with the next figure, though only B runs by then."""
    books.turn({1: SECOND}, 50_000, 50 * JOULE, A, B, since=50 * JOULE)
    books.turn({2: SECOND}, 150_000, 100 * JOULE, A, B)
    assert books.paid() == {"a": 100_000, "b": 100_000}


def test_a_counter_that_began_anew_leaves_nothing_to_pay(books: Books) -> None:
    books.turn({1: SECOND}, None, 100 * JOULE, A, B)
    books.turn({2: SECOND}, None, None, A, B)
    books.turn({2: SECOND}, 100_000, 100 * JOULE, A, B)
    assert books.paid() == {"a": 0, "b": 100_000}


TURNS = st.lists(
    st.tuples(
        st.dictionaries(st.integers(1, 3), st.integers(0, SECOND), max_size=3),
        st.none() | st.integers(0, 10**7),
        st.none() | st.integers(0, 10**13),
        st.integers(0, 10**12),
        st.lists(st.sampled_from([A, B]), max_size=2, unique=True),
    ),
    max_size=12,
)


@given(TURNS)
def test_namespaces_and_rest_are_what_was_told_to_the_millijoule(
    turns: list[tuple[dict[int, int], int | None, int | None, int, list[Workload]]],
) -> None:
    books, told = Books(Ledger()), 0
    last: Counter[str] = Counter()
    for busy, energy, estimate, since, holders in turns:
        books.turn(busy, energy, estimate, *holders, since=since)
        told += energy or 0
        statement = books.ledger.statement()
        paid = Counter({one.namespace: one.energy_mj or 0 for one in statement.namespaces})
        assert all(paid[name] >= last[name] for name in last), "counters never fall"
        last = paid
        device = statement.devices[0]
        assert (device.energy_mj or 0) == told
        assert sum(paid.values()) + (device.unattributed_energy_mj or 0) == told
