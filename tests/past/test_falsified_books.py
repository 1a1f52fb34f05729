"""Cases in which history and bills lost or invented data. Each fails with the store of podgpu 0.3."""

from __future__ import annotations

import logging
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from podgpu.charge import Amounts, Charge, Figures, UsageAccount
from podgpu.clock import Clock
from podgpu.errors import Note
from podgpu.fleet.prices import Price, Prices
from podgpu.fleet.readings import ClusterReading
from podgpu.fleet.round import Cluster
from podgpu.fleet.settings import ViewSettings
from podgpu.model import DeviceTotals
from podgpu.past.books.gpu_sample import GpuSample
from podgpu.past.books.history_file import HistoryError
from podgpu.past.books.record import cluster_recorder, make_gpu_samples
from podgpu.past.books.recorder import HistoryRecorder
from podgpu.past.books.store import MAX_NEW_ACCOUNTS, HistoryStore
from podgpu.past.sqlite.sqlite_charges import read_range, read_usage_start
from podgpu.past.sqlite.sqlite_series import read_gpu
from tests.fleet.states import World, gpu, holder, node

HOUR = 3600
DAY = 86_400
START = 1_800_000_000 // DAY * DAY
FOREVER = 10**11
POD = UsageAccount("ml", "train")
PRICES = Prices("EUR", {"*": Price(1.0)})


def record(store: HistoryStore, at: float, *pods: Charge, node: str = "n1") -> None:
    store.append(at, [GpuSample(f"GPU-{node}", "", node, 0, Figures(0.5), pods)])


def held(seconds: float = 15.0, **more: Any) -> Charge:
    return Charge(POD, amounts=Amounts(seconds, **more))


def sum_hours(store: HistoryStore, start: float = 0.0, end: float = FOREVER) -> float:
    with store.reader() as db:
        charges = read_range(db, start, end)
    return sum(charge.amounts.allocated_seconds for charge in charges) / HOUR


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.db"


@pytest.mark.parametrize("hours_back", [1, 5, 9 * 24, 400 * 24])
def test_a_clock_that_is_set_back_and_corrected_overwrites_nothing(
    path: Path, hours_back: int
) -> None:
    store = HistoryStore(path)
    rounds = 0
    for start in (START, START + HOUR - hours_back * HOUR, START + HOUR):
        for number in range(240):
            record(store, start + 15 * number, held())
            rounds += 1
    assert sum_hours(store) == pytest.approx(rounds * 15 / HOUR)
    store.close()


def test_a_restart_after_a_jump_forward_closes_the_hour(path: Path) -> None:
    for start in (START, START + 365 * DAY, START + 600):
        store = HistoryStore(path)
        for number in range(40):
            record(store, start + 15 * number, held())
        store.close()
    store = HistoryStore(path)
    for number in range(8 * 24):
        record(store, START + HOUR + HOUR * number)
    assert sum_hours(store, START, START + HOUR) == pytest.approx(80 * 15 / HOUR)
    assert sum_hours(store) == pytest.approx(120 * 15 / HOUR)
    store.close()


@pytest.mark.parametrize("days_off", [9, 120])
def test_reports_are_complete_after_many_days_off(path: Path, days_off: int) -> None:
    store = HistoryStore(path)
    for number in range(20 * 24):
        record(store, START + number * HOUR, held(HOUR))
    store.close()
    store = HistoryStore(path)
    back = START + (20 + days_off) * DAY
    record(store, back, held())
    assert sum_hours(store, START, back) == pytest.approx(480)
    record(store, back + 300)
    record(store, back + 600)
    assert sum_hours(store, START, back) == pytest.approx(480)
    store.close()


def test_money_has_no_upper_limit(path: Path) -> None:
    """6,000 idle GPUs at 75,000 VND per hour cost more than 2^63 / 10^9 within a day."""
    store = HistoryStore(path)
    cost = 6000 * 75_000.0 * HOUR
    for number in range(90):
        record(store, START + number * HOUR, held(HOUR, cost=cost, idle_cost=cost))
    with store.reader() as db:
        [charge] = read_range(db, START, START + 90 * DAY)
    assert charge.amounts.cost == pytest.approx(90 * cost)
    store.close()


def test_impossible_increases_are_rejected_counted_and_shown_on_their_node() -> None:
    world = World()

    def run(second: int, energy_mj: int, busy_ns: int) -> list[GpuSample]:
        totals = DeviceTotals(method="exact")
        usage: dict[str, Any] = {"utilization_ratio": 0.5, "idle_ns": 0}
        bad = holder("bad", energy_mj=energy_mj, busy_ns=busy_ns, **usage)
        good = holder("good", energy_mj=second * 300_000, busy_ns=second * 10**9 // 2, **usage)
        state = world.round(
            node("n1", gpu(0, bad, usage=totals), read_at=second, exporter_id="a"),
            node("n2", gpu(1, good, usage=totals), read_at=second, exporter_id="b"),
            at=second,
            prices=PRICES,
        )
        return make_gpu_samples(state)

    run(15, 15_000, 10**9)
    bad, good = run(30, 9 * 10**18, 10**15)
    assert bad.charges[0].amounts.energy_joules == 0
    assert bad.charges[0].amounts.busy_seconds == 0
    assert bad.charges[0].amounts.allocated_seconds == 15
    assert bad.charges[0].amounts.cost == pytest.approx(15 / HOUR)
    assert good.charges[0].amounts.energy_joules == pytest.approx(15 * 300)
    assert world.state is not None
    notes = {entry.name: entry.notes for entry in world.state.nodes}
    assert notes["n2"] == ()
    assert "busy time: 1, energy: 1" in notes["n1"][0]

    bad, _ = run(45, 9 * 10**18 + 3_000_000, 10**15 + 10**9)
    assert bad.charges[0].amounts.energy_joules == pytest.approx(3000)
    assert bad.charges[0].amounts.busy_seconds == pytest.approx(1)


@pytest.mark.parametrize("ahead", [DAY, 4])
def test_another_exporter_of_the_node_starts_a_new_baseline(ahead: int) -> None:
    """The shown exporter is stopped. The other one has counted for a day longer, or for 4 s."""
    world = World()
    total = Amounts()
    for second in range(15, 121, 15):
        is_first = second <= 60
        seconds = second if is_first else ahead + second
        one = holder(
            utilization_ratio=0.5,
            busy_ns=seconds * 10**9 // 2,
            idle_ns=seconds * 10**9 // 2,
            energy_mj=seconds * 300_000,
        )
        totals = DeviceTotals(method="exact")
        target = "http://first" if is_first else "http://second"
        state = world.round(
            node(
                "n1", gpu(0, one, usage=totals), read_at=second, target=target, exporter_id=target
            ),
            at=second,
        )
        for charge in make_gpu_samples(state)[0].charges:
            total = total.plus(charge.amounts)
    assert total.allocated_seconds == 105
    assert total.busy_seconds == pytest.approx(90 / 2)
    assert total.energy_joules == pytest.approx(90 * 300)


def test_a_node_with_too_many_new_workloads_shares_one_account(path: Path) -> None:
    store = HistoryStore(path)
    pods = [
        Charge(UsageAccount("ml", f"p{number}"), amounts=Amounts(1.0)) for number in range(2500)
    ]
    record(store, START, *pods, node="evil")
    record(store, START, held(1.0), node="n1")
    with store.reader() as db:
        charges = read_range(db, START, START + HOUR)
    store.close()
    hours = {charge.account: charge.amounts.allocated_seconds for charge in charges}
    assert len(hours) == MAX_NEW_ACCOUNTS + 2
    assert hours[UsageAccount(job="more workloads of node evil")] == 2500 - MAX_NEW_ACCOUNTS
    assert hours[POD] == 1.0


def test_in_a_full_file_the_accounts_that_one_exporter_invented_go_first(path: Path) -> None:
    store = HistoryStore(path, max_bytes=1_500_000)
    for number in range(24):
        at = START + number * HOUR
        invented = [
            Charge(UsageAccount("evil", f"{number}-{pod}"), amounts=Amounts(1.0))
            for pod in range(1500)
        ]
        record(store, at, *invented, node="evil")
        record(store, at, held(HOUR))
    record(store, START + DAY + 600)
    with store.reader() as db:
        charges = read_range(db, START, START + 2 * DAY)
    store.close()
    honest = [charge for charge in charges if charge.account == POD]
    assert honest[0].amounts.allocated_seconds == 24 * HOUR
    assert len(charges) < 12_000


def test_in_a_full_file_a_node_keeps_ten_times_the_accounts_of_the_others(path: Path) -> None:
    def count_accounts() -> dict[str, int]:
        with store.reader() as db:
            return dict(db.execute("SELECT node, count(*) FROM account GROUP BY node").fetchall())

    def name_pods(namespace: str, number: int) -> list[Charge]:
        accounts = [UsageAccount(namespace, f"p{pod}") for pod in range(number)]
        return [Charge(account, amounts=Amounts(1.0)) for account in accounts]

    store = HistoryStore(path)
    for hour in range(3):
        record(store, START + hour * HOUR, *name_pods(f"evil-{hour}", 1000), node="evil")
    record(store, START + 3 * HOUR, *name_pods("ml", 200), node="n1")
    record(store, START + 3 * HOUR, *name_pods("web", 200), node="n2")
    record(store, START + 4 * HOUR)
    before = count_accounts()
    store.close()
    assert (before["evil"], before["n1"], before["n2"]) == (3000, 200, 200)

    store = HistoryStore(path, max_bytes=path.stat().st_size - 50_000)
    record(store, START + 5 * HOUR)
    after = count_accounts()
    store.close()
    assert (after["evil"], after["n1"], after["n2"]) == (2000, 200, 200)


def test_a_file_that_is_deleted_while_podgpu_runs_is_written_again(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = HistoryStore(path)
    record(store, START, held(HOUR))
    for file in path.parent.glob("history.db*"):
        if not file.name.endswith(".lock"):
            file.unlink()
    record(store, START + 15, held(HOUR))
    store.close()
    assert "was deleted while podgpu runs; it is written again" in caplog.text
    store = HistoryStore(path)
    assert sum_hours(store) == 2
    store.close()


def test_a_directory_that_is_deleted_while_podgpu_runs_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "history" / "history.db"
    store = HistoryStore(path)
    record(store, START, held(HOUR))
    shutil.rmtree(path.parent)
    record(store, START + 15, held(HOUR))
    with pytest.raises(HistoryError, match="in use by another podgpu"):
        HistoryStore(path)
    store.close()
    store = HistoryStore(path)
    assert sum_hours(store) == 2
    store.close()


def test_a_file_that_is_replaced_while_podgpu_runs_is_kept_beside_it(path: Path) -> None:
    store = HistoryStore(path)
    record(store, START, held(HOUR))
    path.rename(path.with_name("moved"))
    path.write_bytes(b"something else")
    record(store, START + 15, held(HOUR))
    assert sum_hours(store) == 2
    store.close()
    assert Path(f"{path}.other").read_bytes() == b"something else"


def test_a_second_damaged_file_does_not_overwrite_the_first(path: Path) -> None:
    for content in (b"first " * 999, b"second " * 999):
        path.write_bytes(content)
        HistoryStore(path).close()
        path.unlink()
    assert Path(f"{path}.damaged").read_bytes() == b"first " * 999
    assert Path(f"{path}.damaged-2").read_bytes() == b"second " * 999


def test_usage_that_was_kept_in_memory_is_added_to_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is locked by another process for two minutes."""
    caplog.set_level(logging.INFO)
    seconds = 0.0
    clock = Clock(lambda: seconds, lambda: START + seconds)
    other = HistoryStore(tmp_path / "history.db")
    recorder = HistoryRecorder(clock=clock, directory=str(tmp_path))
    for number in range(20):
        seconds = 15.0 * number
        if number == 8:
            other.close()
        recorder.add([GpuSample("GPU-0", "", "n1", 0, None, [held()])])
        recorder.record()
    with recorder._store.reader() as db:
        [charge] = read_range(db, 0, FOREVER)
    recorder.stop()
    assert charge.amounts.allocated_seconds == 20 * 15
    assert (tmp_path / "history.db").stat().st_size > 0


def test_the_page_says_that_the_clock_jumped_and_history_goes_on(tmp_path: Path) -> None:
    seconds = 0.0
    jump = 0.0
    clock = Clock(lambda: seconds, lambda: START + seconds + jump)
    recorder = HistoryRecorder(clock=clock, directory=str(tmp_path))

    def run(minutes: int) -> tuple[Note, ...]:
        nonlocal seconds
        for _ in range(4 * minutes):
            seconds += 15.0
            recorder.add([GpuSample("GPU-0", "", "n1", 0, None, [held()])])
            recorder.record()
        return recorder.warnings()

    assert run(30) == ()
    jump = 9.0 * DAY
    [note] = run(5)
    assert "jumped ahead by 777,600 s" in note.text
    with recorder._store.reader() as db:
        assert read_range(db, START + DAY, FOREVER) == []

    # After ten minutes, the clock is accepted, and the rounds since the jump are moved to it.
    assert run(6) == ()
    run(15)
    with recorder._store.reader() as db:
        [before] = read_range(db, START, START + DAY)
        [after] = read_range(db, START + 9 * DAY, FOREVER)
    recorder.stop()
    assert before.amounts.allocated_seconds + after.amounts.allocated_seconds == 56 * 60
    assert before.amounts.allocated_seconds == pytest.approx(30 * 60, abs=30)


def test_a_file_of_schema_4_is_converted_with_all_its_usage(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Recorded with podgpu 0.3: two days of an idle pod at 2 EUR, until 30 minutes past an hour."""
    shutil.copy(Path(__file__).parent / "history-schema-4.db", path)
    store = HistoryStore(path)
    with store.reader() as db:
        [charge] = read_range(db, 0, FOREVER)
        kinds = dict(db.execute("SELECT kind, count(*) FROM span GROUP BY kind"))
    store.close()
    assert charge.account.pod == "train"
    assert charge.amounts.allocated_seconds == pytest.approx(48.5 * HOUR)
    assert charge.amounts.cost == pytest.approx(2 * 48.5)
    assert charge.amounts.idle_seconds == pytest.approx(48.5 * HOUR)
    assert kinds == {"holder": 1, "idle": 1, "condition": 1}
    assert Path(f"{path}.schema4").exists()
    assert "was converted to schema 5" in caplog.text


def test_a_clock_that_is_accepted_while_the_disk_is_full_still_moves_its_rounds(
    tmp_path: Path,
) -> None:
    seconds = 0.0
    jump = 0.0
    clock = Clock(lambda: seconds, lambda: START + seconds + jump)
    recorder = HistoryRecorder(clock=clock, directory=str(tmp_path))

    def run(minutes: int) -> None:
        nonlocal seconds
        for _ in range(4 * minutes):
            seconds += 15.0
            recorder.add([GpuSample("GPU-0", "", "n1", 0, None, [held()])])
            recorder.record()

    run(30)
    jump = 9.0 * DAY
    run(8)
    recorder._store._db.execute("PRAGMA query_only = 1")  # writing fails
    run(4)
    recorder._store._db.execute("PRAGMA query_only = 0")
    run(15)
    store = recorder._store
    before = sum_hours(store, START, START + DAY)
    after = sum_hours(store, START + 9 * DAY)
    recorder.stop()
    assert before == pytest.approx(0.5, abs=1 / 240)
    assert before + after == pytest.approx(57 / 60)


def test_the_charges_of_the_round_that_accepts_the_clock_move_with_it(tmp_path: Path) -> None:
    """A round every 5 minutes."""
    seconds = 0.0
    jump = 0.0
    clock = Clock(lambda: seconds, lambda: START + seconds + jump)
    recorder = HistoryRecorder(clock=clock, directory=str(tmp_path))
    for number in range(12):
        seconds += 300.0
        jump = 9.0 * DAY if number >= 4 else 0.0
        recorder.add([GpuSample("GPU-0", "", "n1", 0, None, [held(2.0**number)])])
        recorder.record()
    store = recorder._store
    before = sum_hours(store, START, START + DAY)
    after = sum_hours(store, START + 9 * DAY)
    recorder.stop()
    # The charges of round 4 are for the time before the jump.
    assert before * HOUR == pytest.approx(0b11111)
    assert after * HOUR == pytest.approx(0b1111111_00000)


def test_a_round_that_is_added_while_the_file_is_opened_is_not_lost(
    tmp_path: Path,
) -> None:
    seconds = 0.0
    clock = Clock(lambda: seconds, lambda: START + seconds)
    other = HistoryStore(tmp_path / "history.db")
    recorder = HistoryRecorder(clock=clock, directory=str(tmp_path))
    gpus = [GpuSample("GPU-0", "", "n1", 0, None, [held()])]
    memory = recorder._store
    close = memory.close

    thread = threading.Thread(target=recorder.add, args=(gpus,))  # that of the cluster view

    def close_slowly() -> None:
        thread.start()
        close()

    memory.close = close_slowly  # type: ignore[method-assign]
    recorder.add(gpus)
    other.close()
    seconds = 60.0
    recorder.record()
    thread.join()
    recorder.record()
    assert sum_hours(recorder._store) * HOUR == 30
    recorder.stop()


def test_usage_that_was_kept_in_memory_keeps_its_hour(path: Path) -> None:
    """The file could not be opened for three days."""
    memory = HistoryStore()
    for hour in range(72):
        record(memory, START + hour * HOUR, held(HOUR))
    store = HistoryStore(path)
    store.take_over(memory)
    record(store, START + 72 * HOUR)
    assert sum_hours(store) == pytest.approx(72)
    assert sum_hours(store, START + 65 * HOUR, START + 72 * HOUR) == pytest.approx(7)
    assert sum_hours(store, START, START + DAY) == pytest.approx(24)
    store.close()


def test_no_field_of_an_account_is_lost_when_a_file_takes_over_the_history_in_memory(
    path: Path,
) -> None:
    account = UsageAccount(*(f"value of {name}" for name in UsageAccount._fields))
    amounts = Amounts(*(float(number) for number, _ in enumerate(Amounts._fields, start=1)))
    memory = HistoryStore()
    record(memory, START, Charge(account, amounts=amounts, currency="EUR"))
    store = HistoryStore(path)
    store.take_over(memory)
    record(store, START + HOUR)
    with store.reader() as db:
        [charge] = read_range(db, START, START + HOUR)
    assert charge == Charge(account, amounts=amounts, currency="EUR")
    store.close()


def test_a_disk_that_is_full_for_days_does_not_fill_the_memory(
    path: Path,
) -> None:
    store = HistoryStore(path, max_unwritten=50)
    store._db.execute("PRAGMA query_only = 1")  # writing fails
    for number in range(3 * DAY // 300):
        with pytest.raises(HistoryError):
            record(store, START + 300 * number, held(300.0))
        assert len(store._unwritten) <= 51
    store._db.execute("PRAGMA query_only = 0")
    record(store, START + 3 * DAY)
    assert sum_hours(store, START, START + DAY) == pytest.approx(24)
    assert sum_hours(store, START, START + 3 * DAY) == pytest.approx(72)
    store.close()


def open_schema_4(path: Path) -> sqlite3.Connection:
    shutil.copy(Path(__file__).parent / "history-schema-4.db", path)
    return sqlite3.connect(path)


def test_the_conversion_keeps_the_unit_of_every_amount(path: Path) -> None:
    with open_schema_4(path) as db:
        db.execute("DELETE FROM usage")
        # Milliseconds, 1/10^9 of the currency, and millijoules.
        amounts = (10_000, 9_000, 8 * 10**9, 7 * 10**9, 6_000, 5_000, 4_000, 3_000, 2_000, 1_000)
        row = (DAY, START, 1, "EUR", *amounts)
        db.execute(f"INSERT INTO usage VALUES ({', '.join('?' * len(row))})", row)
    db.close()
    store = HistoryStore(path)
    with store.reader() as db:
        [charge] = read_range(db, START, START + DAY)
    store.close()
    assert charge.amounts == Amounts(*range(10, 0, -1))


def test_the_conversion_keeps_what_was_at_which_time(path: Path) -> None:
    """Two days from 15 January 2027 on, and half an hour."""
    open_schema_4(path).close()
    store = HistoryStore(path)
    first = 1_799_971_200
    assert sum_hours(store, first, first + DAY) == pytest.approx(24)
    assert sum_hours(store, first + DAY, first + 2 * DAY) == pytest.approx(24)
    assert sum_hours(store, first + 5 * HOUR, first + 6 * HOUR) == pytest.approx(1)
    half = first + 2 * DAY + HOUR // 2
    assert sum_hours(store, half - 300, half) == pytest.approx(1 / 12)
    # Before the kept 5 minutes, a part of an hour is read as the whole hour.
    assert sum_hours(store, first + 600, first + 900) == pytest.approx(1)
    with store.reader() as db:
        kept = dict(db.execute("SELECT resolution, since FROM kept"))
    store.close()
    assert kept == {300: 1_800_134_700, HOUR: first, DAY: first}


def test_the_conversion_finds_the_holder_of_each_idle_time(path: Path) -> None:
    """`train` was idle twice. `other` held the GPU before, and `third` holds another GPU."""
    begin = 1_799_971_200
    text = "ml/{}/main holds it and does not use it"
    with open_schema_4(path) as db:
        db.execute("DELETE FROM span")
        for number, pod in ((2, "other"), (3, "third")):
            row = (number, "ml", pod)
            db.execute("INSERT INTO account (id, namespace, pod) VALUES (?, ?, ?)", row)
        rows = [
            (1, 1, "main", "", begin, None),
            (1, 2, "main", "", begin - 900, begin),
            (2, 3, "main", "", begin, None),
            (2, 1, "main", "", begin - 900, begin + 10),
            (1, 0, "idle", text.format("train"), begin, begin + 60),
            (1, 0, "idle", text.format("train"), begin + 90, None),
            (1, 0, "idle", text.format("other"), begin - 800, begin),
            (1, 0, "idle", text.format("other"), begin, begin + 1),  # it had ended
            (1, 0, "idle", text.format("third"), begin, begin + 1),  # it holds another GPU
            (2, 0, "idle", text.format("train"), begin + 10, begin + 20),  # it had ended
            (2, 0, "idle", text.format("third"), begin - 1, begin + 1),  # before its start
            (1, 0, "xid", "XID 48", begin, begin + 1),
        ]
        db.executemany("INSERT INTO span VALUES (?, ?, ?, ?, ?, ?)", rows)
    db.close()
    store = HistoryStore(path)
    with store.reader() as db:
        sql = "SELECT gpu, account, kind, started, ended FROM span ORDER BY kind, account, started"
        spans = db.execute(sql).fetchall()
    store.close()
    assert [span for span in spans if span[2] == "idle"] == [
        (1, 1, "idle", begin, begin + 60),
        (1, 1, "idle", begin + 90, None),
        (1, 2, "idle", begin - 800, begin),
    ]
    assert [span[:2] for span in spans if span[2] == "holder"] == [(2, 1), (1, 1), (1, 2), (2, 3)]
    assert [span for span in spans if span[2] == "condition"] == [
        (1, 0, "condition", begin, begin + 1)
    ]


def test_the_conversion_finds_the_users_of_jobs(path: Path) -> None:
    with open_schema_4(path) as db:
        for job in ("user ann", "17"):
            db.execute("INSERT INTO account (namespace, pod, job) VALUES ('', '', ?)", (job,))
        columns = "allocated, idle, cost, idle_cost, measured, busy, busy_min, busy_max, energy"
        db.execute(f"""
            INSERT INTO usage SELECT resolution, time, 2, currency, {columns}, waited FROM usage""")
    db.close()
    store = HistoryStore(path)
    with store.reader() as db:
        users = dict(db.execute("SELECT job, user FROM account"))
    assert sum_hours(store) == pytest.approx(2 * 48.5)
    store.close()
    assert users == {"": "", "user ann": "ann", "17": ""}


def test_the_copy_of_the_old_file_is_complete_and_private(path: Path) -> None:
    with open_schema_4(path) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA wal_autocheckpoint = 0")
        db.execute("UPDATE account SET pod = 'in the log'")
        db.commit()
        HistoryStore(path).close()
    db.close()
    copy = Path(f"{path}.schema4")
    assert copy.stat().st_mode & 0o777 == 0o600
    with sqlite3.connect(copy) as old:
        assert old.execute("SELECT pod FROM account").fetchall() == [("in the log",)]
        assert old.execute("PRAGMA user_version").fetchone() == (4,)
    old.close()


def test_a_file_is_converted_even_if_the_copy_has_no_room(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Path, copy: Path) -> None:
        copy.write_bytes(b"half")
        raise OSError("no space left")

    open_schema_4(path).close()
    monkeypatch.setattr(shutil, "copyfile", fail)
    store = HistoryStore(path)
    assert sum_hours(store) == pytest.approx(48.5)
    store.close()
    assert not Path(f"{path}.schema4").exists()
    assert "is converted without a copy of the old file: no space left" in caplog.text


def test_a_clock_that_jumps_does_not_apply_prices_of_another_year() -> None:
    """The price rises next year. The clock is a year ahead in one round."""
    seconds = 0.0
    jump = 0.0
    clock = Clock(lambda: seconds, lambda: START + seconds + jump)
    later = Prices("EUR", {"*": Price(100.0)})
    prices = Prices("EUR", {"*": Price(1.0)}, changes=[(START + 300.0 * DAY, later)])
    cluster = Cluster(
        lambda: pytest.fail("not started"), ViewSettings(), lambda: (prices, ()), clock
    )
    recorder = cluster_recorder(cluster)
    for number in range(5):
        seconds = 15.0 * number
        jump = 365.0 * DAY if number == 2 else 0.0
        reading = node("n1", gpu(0, holder()), read_at=seconds, exporter_id="a")
        cluster._publish(ClusterReading((reading,)))
        recorder.record()
    with recorder._store.reader() as db:
        [charge] = read_range(db, 0, FOREVER)
    recorder.stop()
    assert charge.amounts.cost == pytest.approx(60 / HOUR)


def test_a_restart_with_a_clock_that_is_behind_goes_on_after_the_last_round(
    tmp_path: Path,
) -> None:
    store = HistoryStore(tmp_path / "history.db")
    record(store, START + DAY, held())
    store.close()
    recorder = HistoryRecorder(clock=Clock(lambda: 0.0, lambda: START), directory=str(tmp_path))
    recorder.add([GpuSample("GPU-0", "", "n1", 0, None, [held()])])
    recorder.record()
    assert sum_hours(recorder._store, START + DAY) * HOUR == 30
    [note] = recorder.warnings()
    recorder.stop()
    assert "jumped back by 86,400 s" in note.text
    assert "stable for 10 minutes" in note.text


def test_the_page_says_that_the_file_cannot_be_opened_until_it_can(tmp_path: Path) -> None:
    seconds = 0.0
    clock = Clock(lambda: seconds, lambda: START + seconds)
    other = HistoryStore(tmp_path / "history.db")
    recorder = HistoryRecorder(clock=clock, directory=str(tmp_path))
    gpus = [GpuSample("GPU-0", "", "n1", 0, None, [held()])]
    recorder.add(gpus)
    recorder.record()
    [note] = recorder.warnings()
    assert "in use by another podgpu" in note.text
    assert "history is kept in memory only, and is lost when podgpu ends" in note.text
    other.close()
    for time, notes in ((59.0, 1), (60.0, 0)):
        seconds = time
        recorder.add(gpus)
        recorder.record()
        assert len(recorder.warnings()) == notes
    recorder.stop()


class Books:
    """A recorder with a clock that may be wrong, and a round every 15 s with one pod."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds = 0.0
        self.error = 0.0
        self.clock = Clock(lambda: self.seconds, lambda: START + self.seconds + self.error)
        self.open()

    def open(self) -> None:
        self.recorder = HistoryRecorder(clock=self.clock, directory=str(self.folder))

    def run(self, minutes: float) -> None:
        for _ in range(round(4 * minutes)):
            self.seconds += 15.0
            self.recorder.add([GpuSample("GPU-0", "", "n1", 0, Figures(0.5), [held()])])
            self.recorder.record()

    def fail_writes(self, is_failing: bool) -> None:
        self.recorder._store._db.execute(f"PRAGMA query_only = {int(is_failing)}")

    def minutes_of_day(self, day: int) -> float:
        start = START + day * DAY
        return sum_hours(self.recorder._store, start, start + DAY) * 60


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    books = Books(tmp_path)
    yield books
    books.recorder.stop()


def test_a_wrong_clock_at_boot_does_not_move_later_runs(books: Books) -> None:
    books.recorder.stop()
    books.error = 5.0 * DAY
    books.open()
    books.run(1)
    books.error = 0.0
    books.run(12)
    for _ in range(2):
        books.recorder.stop()
        books.open()
        books.run(5)
    assert books.recorder.warnings() == ()
    assert books.minutes_of_day(0) == pytest.approx(23)
    with books.recorder._store.reader() as db:
        history = read_gpu(db, "GPU-0", START, START + HOUR)
    assert history is not None
    assert [span.pod for span in history.holders] == ["train"]


def test_charges_from_before_a_jump_stay_if_the_disk_is_full(books: Books) -> None:
    books.run(20)
    books.fail_writes(True)
    books.run(5)
    books.error = 3.0 * DAY
    books.run(12)
    books.fail_writes(False)
    books.run(2)
    assert books.minutes_of_day(0) == pytest.approx(25, abs=0.26)
    assert books.minutes_of_day(3) == pytest.approx(14, abs=0.26)


def test_charges_from_after_a_jump_move_if_the_disk_was_full_at_the_jump(books: Books) -> None:
    books.run(20)
    books.fail_writes(True)
    books.error = 3.0 * DAY
    books.run(5)
    books.fail_writes(False)
    books.run(10)
    assert books.minutes_of_day(0) == pytest.approx(20, abs=0.26)
    assert books.minutes_of_day(3) == pytest.approx(15, abs=0.26)


def test_usage_from_memory_stays_if_the_clock_jumps_before_the_file_opens(tmp_path: Path) -> None:
    other = HistoryStore(tmp_path / "history.db")
    books = Books(tmp_path)
    books.run(120)
    books.error = 3.0 * DAY
    books.run(5)
    other.close()
    books.run(20)
    assert books.minutes_of_day(0) == pytest.approx(120, abs=0.26)
    assert books.minutes_of_day(3) == pytest.approx(25, abs=0.26)
    books.recorder.stop()


def test_a_file_that_is_deleted_while_the_clock_is_doubted_keeps_the_doubt(books: Books) -> None:
    books.run(20)
    books.error = 3.0 * DAY
    books.run(5)
    (books.folder / "history.db").unlink()
    books.run(10)
    assert books.minutes_of_day(0) == pytest.approx(20, abs=0.26)
    assert books.minutes_of_day(3) == pytest.approx(15, abs=0.26)


def test_a_stop_writes_the_last_round(books: Books) -> None:
    books.run(1)
    books.recorder.add([GpuSample("GPU-0", "", "n1", 0, None, [held(14.0)])])
    books.recorder.stop()
    books.open()
    assert books.minutes_of_day(0) * 60 == pytest.approx(74)


def test_a_stop_writes_what_a_full_disk_has_left(books: Books) -> None:
    books.run(1)
    books.fail_writes(True)
    books.run(3)
    books.fail_writes(False)
    books.recorder.stop()
    books.open()
    assert books.minutes_of_day(0) == pytest.approx(4)


def test_a_file_without_the_newest_columns_gets_them(path: Path) -> None:
    """As if an earlier version of this schema had written it."""
    store = HistoryStore(path)
    record(store, START, held(HOUR))
    store.close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("ALTER TABLE gpu DROP COLUMN taken_from")
        db.execute("ALTER TABLE usage DROP COLUMN counted")
    store = HistoryStore(path)
    record(store, START + 15, held(HOUR))
    assert sum_hours(store) == 2
    store.close()


def test_the_start_of_usage_is_known_if_no_round_is_left(path: Path) -> None:
    store = HistoryStore(path)
    record(store, START, held(HOUR))
    record(store, START + 900)
    store._db.execute("DELETE FROM round")
    store._db.commit()
    with store.reader() as db:
        assert read_usage_start(db) == START
    store.close()


def test_a_boot_in_1970_leaves_no_record_of_1970(books: Books) -> None:
    books.recorder.stop()
    books.error = -float(START)
    books.open()
    books.run(5)
    books.error = 0.0
    books.run(12)
    with books.recorder._store.reader() as db:
        assert read_usage_start(db) == START
        history = read_gpu(db, "GPU-0", START, START + HOUR)
    assert history is not None
    [span] = history.holders
    assert span.from_ == pytest.approx(START, abs=30)
    assert books.minutes_of_day(0) == pytest.approx(17)


def test_short_ranges_are_exact_again_after_hours_on_a_clock_that_was_ahead(books: Books) -> None:
    books.run(20)
    books.error = 30.0 * DAY
    books.run(300)
    books.error = 0.0
    books.run(100)
    now = START + books.seconds
    assert 600 <= sum_hours(books.recorder._store, now - 600, now) * 3600 <= 900
    assert books.minutes_of_day(0) + books.minutes_of_day(30) == pytest.approx(420, abs=0.26)


def test_a_file_is_converted_without_a_copy_if_the_disk_is_nearly_full(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    open_schema_4(path).close()
    size = path.stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * size))
    store = HistoryStore(path)
    assert sum_hours(store) == pytest.approx(48.5)
    store.close()
    assert not list(path.parent.glob("*.schema4*"))
    assert "converted without a copy of the old file" in caplog.text


def test_ten_minutes_are_ten_minutes_after_hours_on_a_clock_that_was_ahead(
    tmp_path: Path,
) -> None:
    seconds = 0.0
    jump = 0.0
    clock = Clock(lambda: seconds, lambda: START + seconds + jump)
    recorder = HistoryRecorder(clock=clock, directory=str(tmp_path))
    for minute in range(7 * 60):
        # The clock is 20 hours ahead from minute 30 on, until 25 minutes past an hour.
        jump = 20.0 * HOUR if 30 <= minute < 6 * 60 + 25 else 0.0
        seconds += 60.0
        recorder.add([GpuSample("GPU-0", "", "n1", 0, None, [held(60.0)])])
        recorder.record()
        now = START + seconds
        if minute >= 6 * 60 + 38:
            recent = sum_hours(recorder._store, now - 600, now)
            assert 10 * 60 <= recent * HOUR <= 15 * 60 + 60, minute
            whole = sum_hours(recorder._store, START + 6 * HOUR, START + 7 * HOUR)
            assert whole * HOUR == pytest.approx(60 * (minute + 1 - 6 * 60 - 25), abs=130)
            mixed = sum_hours(recorder._store, START + 5.9 * HOUR, min(now + 1, START + 7 * HOUR))
            assert mixed == pytest.approx(whole)
    recorder.stop()


def test_a_conversion_that_is_tried_again_does_not_copy_the_file_again(path: Path) -> None:
    open_schema_4(path).close()
    copy = Path(f"{path}.schema4")
    HistoryStore(path).close()
    first = copy.stat().st_ino

    # The conversion failed after the copy was made: the file still has schema 4.
    path.unlink()
    shutil.copy2(copy, path)
    HistoryStore(path).close()
    assert copy.stat().st_ino == first

    # podgpu 0.3 wrote to the file before this upgrade: the copy is old.
    with open_schema_4(path) as db:
        db.execute("DELETE FROM span")
    db.close()
    HistoryStore(path).close()
    with closing(sqlite3.connect(copy)) as db:
        assert db.execute("SELECT count(*) FROM span").fetchone() == (0,)
