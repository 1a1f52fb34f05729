"""If the history exceeds its size limit, the least important rows are deleted first."""

from __future__ import annotations

from pathlib import Path

import pytest

from podgpu.charge import Amounts, Charge, UsageAccount
from podgpu.past.books.gpu_sample import ConditionRecord, GpuSample
from podgpu.past.books.store import HistoryStore
from podgpu.past.sqlite.sqlite_charges import read_range

HOUR = 3600
DAY = 86_400
START = 1_800_000_000 // DAY * DAY
DAYS = 40
END = START + DAYS * DAY
PODS = 200


def make_gpu(namespace: str = "ml", pods: int = PODS, node: str = "n1") -> GpuSample:
    accounts = [UsageAccount(namespace, f"p{number}") for number in range(pods)]
    charges = [Charge(account, amounts=Amounts(15.0)) for account in accounts]
    return GpuSample(f"GPU-{node}", "", node, 0, None, charges)


def sum_seconds(store: HistoryStore, start: int = START, end: int = END + DAY) -> float:
    with store.reader() as db:
        charges = read_range(db, start, end)
    return sum(charge.amounts.allocated_seconds for charge in charges)


def read_used_bytes(store: HistoryStore) -> int:
    with store.reader() as db:
        [used] = db.execute("""
            SELECT (page_count - freelist_count) * page_size
            FROM pragma_page_count, pragma_freelist_count, pragma_page_size""").fetchone()
    return int(used)


def read_oldest(store: HistoryStore) -> dict[str, int | None]:
    """Returns the time of the oldest loads, and of the oldest usage per hour and per day."""
    with store.reader() as db:
        usage = dict(db.execute("SELECT resolution, min(time) FROM usage GROUP BY resolution"))
        [load] = db.execute("SELECT min(time) FROM load").fetchone()
    return {"load": load, "hours": usage.get(HOUR), "days": usage.get(DAY)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.db"


@pytest.fixture
def full(path: Path) -> int:
    """A history of 40 days with 200 pods. Returns its size."""
    store = HistoryStore(path)
    for day in range(DAYS):
        store.append(START + day * DAY, [make_gpu()])
    store.append(END, [])
    used = read_used_bytes(store)
    assert read_oldest(store) == {"load": START, "hours": START, "days": START}
    store.close()
    return used


def test_loads_are_deleted_before_usage(path: Path, full: int) -> None:
    limit = round(full * 0.8)
    store = HistoryStore(path, max_bytes=limit)
    store.append(END + HOUR, [])
    oldest = read_oldest(store)
    assert oldest["load"] is not None
    assert oldest["load"] > START
    assert (oldest["hours"], oldest["days"]) == (START, START)
    assert 0.95 * limit < read_used_bytes(store) <= limit
    store.close()


def test_hours_of_usage_are_deleted_before_days(path: Path, full: int) -> None:
    limit = round(full * 0.6)
    store = HistoryStore(path, max_bytes=limit)
    store.append(END + HOUR, [])
    oldest = read_oldest(store)
    assert oldest["hours"] is not None
    assert oldest["hours"] > START
    assert oldest["days"] == START
    assert 0.95 * limit < read_used_bytes(store) <= limit
    assert sum_seconds(store) == DAYS * PODS * 15.0
    store.close()


def test_the_oldest_days_of_usage_are_deleted_last(path: Path, full: int) -> None:
    limit = round(full * 0.4)
    store = HistoryStore(path, max_bytes=limit)
    store.append(END + HOUR, [])
    oldest = read_oldest(store)
    assert oldest["days"] is not None
    assert START < oldest["days"] < END
    assert 0.95 * limit < read_used_bytes(store) <= limit
    days_kept = (END - oldest["days"]) // DAY
    assert sum_seconds(store) == days_kept * PODS * 15.0
    store.close()


def test_a_limit_that_cannot_be_met_still_records(path: Path, full: int) -> None:
    """All that can be deleted is deleted. The 5 minutes of the last day stay."""
    store = HistoryStore(path, max_bytes=1)
    for number in range(4):
        store.append(END + HOUR + 300 * number, [make_gpu(pods=1)])
    last = END + HOUR + 900
    assert sum_seconds(store, last, last + 300) == 15.0
    assert read_oldest(store) == {"load": None, "hours": None, "days": None}
    store.close()


def test_a_smaller_limit_is_met_at_once(path: Path) -> None:
    """Half of the ended spans is not enough here."""
    store = HistoryStore(path)
    for number in range(40):
        conditions = [ConditionRecord("xid", f"{number} {text}" * 50) for text in range(64)]
        gpu = make_gpu(pods=1)._replace(conditions=conditions)
        store.append(START + 15 * number, [gpu])
    store.append(START + HOUR, [])
    limit = read_used_bytes(store) // 8
    store.close()

    store = HistoryStore(path, max_bytes=limit)
    store.append(START + 2 * HOUR, [])
    assert read_used_bytes(store) <= limit
    assert sum_seconds(store) == 40 * 15.0, "usage stays"
    with store.reader() as db:
        [spans] = db.execute("SELECT count(*) FROM span").fetchone()
    assert spans > 0, "the newest spans stay"
    store.close()


def test_usage_of_a_deleted_account_is_recorded_again(path: Path) -> None:
    """A node with ten times the accounts of the others loses its newest accounts, here `late`."""
    store = HistoryStore(path)
    for number in range(2):
        store.append(START + number * HOUR, [make_gpu(f"evil-{number}", 1000, "evil")])
    honest = make_gpu("ml", 150, "n1")
    late = make_gpu("late", 300, "evil")
    store.append(START + 2 * HOUR, [honest, late])
    store.append(START + 3 * HOUR, [])
    limit = read_used_bytes(store) - 50_000
    store.close()

    def count(column: str, value: str) -> int:
        with store.reader() as db:
            sql = f"SELECT count(*) FROM account WHERE {column} = ?"
            [number] = db.execute(sql, (value,)).fetchone()
        return int(number)

    store = HistoryStore(path, max_bytes=limit)
    store.append(START + 4 * HOUR, [honest, late])
    assert count("node", "evil") == 1500
    assert count("namespace", "late") == 0
    store.append(START + 4 * HOUR + 15, [honest, late])
    assert count("namespace", "late") == 300
    assert sum_seconds(store, START + 4 * HOUR, START + 5 * HOUR) == 150 * 30.0 + 300 * 15.0
    store.close()
