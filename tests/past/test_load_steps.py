"""What the store keeps of each pod and 5 minutes, for savings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from podgpu.charge import UNALLOCATED, Amounts, Charge, Figures, UsageAccount
from podgpu.past.books.gpu_sample import GpuSample
from podgpu.past.books.load_steps import PastLoad
from podgpu.past.books.store import HistoryStore
from podgpu.past.busy_steps import FULL, UNKNOWN, read_steps

STEP, HOUR = 300, 3600
START = 1_800_000_000 // HOUR * HOUR
ROUND = 60
GIB = 1 << 30
A = UsageAccount("ml", "a", methods="samples")
B = UsageAccount("ml", "b", methods="samples")


@pytest.fixture
def store() -> Iterator[HistoryStore]:
    store = HistoryStore()
    yield store
    store.close()


def used(
    seconds: float = ROUND, busy: float = 0.0, measured: float | None = None, **other: float
) -> Amounts:
    return Amounts(
        allocated_seconds=seconds,
        measured_seconds=seconds if measured is None else measured,
        busy_seconds=busy,
        **other,
    )


def gpu(
    *charges: Charge, memory: float | None = 8 * GIB, instance: str = "", node: str = "n"
) -> GpuSample:
    figures = None if memory is None else Figures(memory_used_bytes=memory)
    return GpuSample("GPU-1", instance, node, 0, figures, charges)


def charge(amounts: Amounts, account: UsageAccount = A, memory: float | None = None) -> Charge:
    figures = None if memory is None else Figures(memory_used_bytes=memory)
    return Charge(account, "main", amounts, figures)


def add_step(store: HistoryStore, *gpus: GpuSample, rounds: int = 5, number: int = 0) -> None:
    """Charges the same rounds in the step with this number."""
    for each in range(rounds):
        store.charge(START + number * STEP + each * ROUND, gpus)


def read(store: HistoryStore) -> dict[str, tuple[list[int], int | None]]:
    """Writes the steps that have ended. Returns the hour of each pod and its memory in MiB."""
    store.write(START + 2 * HOUR, ())
    sql = "SELECT pod, busy, memory FROM load JOIN account ON account.id = account WHERE time = ?"
    with store.reader() as db:
        rows = db.execute(sql, (START,)).fetchall()
    return {pod: (list(read_steps(busy)), memory) for pod, busy, memory in rows}


def read_first(store: HistoryStore, pod: str = "a") -> int:
    """Returns the only known step."""
    values, _ = read(store)[pod]
    assert values[1:] == [UNKNOWN] * 11
    return values[0]


def test_busy_time_and_memory_of_a_pod_alone(store: HistoryStore) -> None:
    add_step(store, gpu(charge(used(busy=15))))
    assert read(store) == {"a": ([FULL // 4] + [UNKNOWN] * 11, 8 * 1024)}


def test_each_step_has_its_place_in_the_hour_and_the_largest_memory_counts(
    store: HistoryStore,
) -> None:
    memory = {2: 3 * GIB, 3: 5 * GIB, 11: 4 * GIB}
    for number, most in memory.items():
        busy = ROUND * number / 20
        add_step(store, gpu(charge(used(busy=busy)), memory=most), number=number)
        store.write(START + (number + 1) * STEP, ())
    values, mib = read(store)["a"]
    expected = [UNKNOWN] * 12
    for number in memory:
        expected[number] = FULL * number // 20
    assert values == expected
    assert mib == 5 * 1024


def test_several_gpus_and_rounds_are_added_up(store: HistoryStore) -> None:
    """Memory is the largest sum of a round."""
    for each, (first, second) in enumerate([(1, 5), (4, 4), (6, 1), (1, 1), (1, 1)]):
        round_of = [
            gpu(charge(used(busy=30)), memory=first * GIB),
            gpu(charge(used(busy=60)), memory=second * GIB),
        ]
        store.charge(START + each * ROUND, round_of)
    assert read(store)["a"] == ([FULL * 3 // 2] + [UNKNOWN] * 11, 8 * 1024)


def test_several_gpus_of_a_pod_are_idle_only_together(store: HistoryStore) -> None:
    idle = charge(used(idle_seconds=ROUND))
    add_step(store, gpu(idle), gpu(idle))
    assert read_first(store) == 0


def test_one_idle_gpu_is_not_enough(store: HistoryStore) -> None:
    add_step(store, gpu(charge(used(idle_seconds=ROUND))), gpu(charge(used(busy=0.0))))
    assert read_first(store) == 1


@pytest.mark.parametrize(("rounds", "is_known"), [(4, True), (3, False)])
def test_a_step_needs_80_percent_of_its_time(
    rounds: int, is_known: bool, store: HistoryStore
) -> None:
    add_step(store, gpu(charge(used(busy=ROUND))), rounds=rounds)
    assert (read_first(store) == FULL) == is_known


@pytest.mark.parametrize(("measured", "is_known"), [(0.95, True), (0.94, False)])
def test_a_step_needs_measured_use(measured: float, is_known: bool, store: HistoryStore) -> None:
    add_step(store, gpu(charge(used(busy=15, measured=measured * ROUND))))
    assert (read_first(store) != UNKNOWN) == is_known


@pytest.mark.parametrize(("idle", "value"), [(0.999, 0), (0.998, 1)])
def test_idle_time_may_have_a_rounding_error(idle: float, value: int, store: HistoryStore) -> None:
    add_step(store, gpu(charge(used(idle_seconds=idle * ROUND))))
    assert read_first(store) == value


def test_the_use_that_another_exporter_estimates_is_unknown(store: HistoryStore) -> None:
    other = A._replace(methods="utilization")
    add_step(store, gpu(charge(used(busy=15), other)))
    assert read(store) == {"a": ([UNKNOWN] * 12, 8 * 1024)}


def test_pods_of_a_shared_gpu_have_their_upper_bound_and_their_own_memory(
    store: HistoryStore,
) -> None:
    """Both hold half of the GPU, so it is covered only if their times are added up."""
    half = used(ROUND / 2, busy=15, busy_max_seconds=30)
    add_step(store, gpu(charge(half, A, memory=GIB), charge(half, B, memory=2 * GIB)))
    expected = [FULL // 2] + [UNKNOWN] * 11
    assert read(store) == {"a": (expected, 1024), "b": (expected, 2 * 1024)}


def test_what_nobody_holds_has_no_load_but_counts_as_time_of_the_gpu(store: HistoryStore) -> None:
    half = used(ROUND / 2, busy=15, busy_max_seconds=30)
    add_step(store, gpu(charge(half), charge(used(ROUND / 2), UNALLOCATED)))
    assert read(store) == {"a": ([FULL // 4] + [UNKNOWN] * 11, 8 * 1024)}


def test_containers_of_a_pod_are_alone_on_its_gpu(store: HistoryStore) -> None:
    half = used(ROUND / 2, busy=15, busy_max_seconds=30)
    add_step(store, gpu(charge(half, memory=GIB), charge(half, memory=2 * GIB)))
    assert read(store) == {"a": ([FULL // 2] + [UNKNOWN] * 11, 3 * 1024)}


def test_an_unknown_memory_of_one_gpu_makes_that_of_the_round_unknown(
    store: HistoryStore,
) -> None:
    first = gpu(charge(used()))
    unknown = gpu(charge(used()), memory=None)
    for gpus in ([first, unknown], [unknown, first]):
        add_step(store, *gpus)
    _, mib = read(store)["a"]
    assert mib is None


def test_a_round_with_known_memory_is_enough(store: HistoryStore) -> None:
    add_step(store, gpu(charge(used()), memory=None), rounds=1)
    add_step(store, gpu(charge(used())))
    _, mib = read(store)["a"]
    assert mib == 8 * 1024


def test_a_mig_instance_is_known_although_its_size_is_not(store: HistoryStore) -> None:
    seventh = used(ROUND / 7, idle_seconds=ROUND / 7)
    add_step(store, gpu(charge(seventh), instance="3"))
    assert read_first(store) == 0


def test_a_job_on_several_nodes_is_one_row(store: HistoryStore) -> None:
    job = UsageAccount("ml", "", job="train", methods="samples")
    for number in range(2):
        add_step(
            store,
            gpu(charge(used(busy=15), job), node="m"),
            gpu(charge(used(busy=30), job), node="n", memory=4 * GIB),
            number=number,
        )
    values, mib = read(store)[""]
    assert values[:3] == [FULL * 3 // 4, FULL * 3 // 4, UNKNOWN]
    assert mib == 12 * 1024


def test_nodes_of_a_job_cover_the_same_time(store: HistoryStore) -> None:
    job = UsageAccount("ml", "", job="train", methods="samples")
    add_step(
        store,
        gpu(charge(used(busy=15), job), node="m"),
        gpu(charge(used(busy=15), job), node="n"),
        rounds=3,
    )
    assert read_first(store, "") == UNKNOWN


def test_nodes_of_a_job_are_measured_and_idle_only_together(store: HistoryStore) -> None:
    job = UsageAccount("ml", "", job="train", methods="samples")
    unmeasured = UsageAccount("ml", "", job="other", methods="samples")
    idle = used(idle_seconds=ROUND)
    add_step(
        store,
        gpu(charge(idle, job), charge(idle, unmeasured), node="m"),
        gpu(charge(used(), job), charge(used(measured=0.0), unmeasured), node="n"),
    )
    store.write(START + 2 * HOUR, ())
    with store.reader() as db:
        sql = "SELECT job, busy FROM load JOIN account ON account.id = account"
        first = {job: read_steps(busy)[0] for job, busy in db.execute(sql)}
    assert first == {"train": 1, "other": UNKNOWN}


def test_the_step_that_goes_on_is_not_written(store: HistoryStore) -> None:
    add_step(store, gpu(charge(used(busy=15))), rounds=2)
    store.write(START + 2 * ROUND, ())
    with store.reader() as db:
        assert db.execute("SELECT count(*) FROM load").fetchone() == (0,)
    for each in range(2, 5):
        store.charge(START + each * ROUND, [gpu(charge(used(busy=15)))])
    assert read_first(store) == FULL // 4


@pytest.mark.parametrize(("steps", "hours"), [(100, 9), (101, 1)])
def test_steps_that_cannot_be_written_are_dropped_if_they_are_too_many(
    steps: int, hours: int, store: HistoryStore
) -> None:
    """The last step stays."""
    gpus = []
    for number in range(1000):
        gpus.append(gpu(charge(used(STEP), UsageAccount("ml", f"pod-{number}"))))
    for number in range(steps):
        store.charge(START + number * STEP, gpus)
    last = START + steps * STEP
    store.write(last, ())
    with store.reader() as db:
        times = [time for (time,) in db.execute("SELECT DISTINCT time FROM load")]
    assert len(times) == hours
    assert max(times) == (last - STEP) // HOUR * HOUR


def test_past_loads_fill_whole_hours(store: HistoryStore) -> None:
    store.append_loads([PastLoad(START, A, "n", 0.25, 3 * GIB), PastLoad(START, B, "n", 0.0, 0)])
    assert read(store) == {"a": ([FULL // 4] * 12, 3 * 1024), "b": ([0] * 12, 0)}


def test_two_containers_of_a_pod_do_not_have_the_memory_of_their_gpu_twice(
    store: HistoryStore,
) -> None:
    half = used(ROUND / 2)
    add_step(store, gpu(charge(half), charge(half), memory=8 * GIB))
    _, memory = read(store)["a"]
    assert memory == 8 * 1024
