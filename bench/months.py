"""History of months: the size of the SQLite file, and the bills of 30 and 90 days by owner.

One day of rounds is written. Its rows are copied to earlier days, as many as are kept, with other
pods in each week.
"""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from random import Random

from bench.figures import Figure, cpu_seconds_of_each
from bench.history import INTERVAL, make_round
from podgpu.charge import HeldTime, charge
from podgpu.fleet.prices import Price, Prices
from podgpu.past.bills.bill import RangeAnswer, RangeQuery
from podgpu.past.books.gpu_sample import GpuSample
from podgpu.past.books.store import HistoryStore
from podgpu.past.sqlite.sqlite_bills import read_range_answer
from podgpu.past.time_steps import COARSE, DAY, FINE, HOUR
from tests.fleet.states import state_of

MAX_GIB = 2.0
MAX_MONTH_SECONDS = 0.9
MAX_QUARTER_SECONDS = 2.3
_START = 1_794_700_800  # a UTC day begins
_DAYS = 90
_DAYS_OF_HOURS = 8
_PODS_PER_OWNER = 16
_PRICES = Prices("EUR", {"*": Price(2.0)}, "file")


def measure(gpus: int = 8000, rounds: int = DAY // COARSE) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="podgpu-bench-") as folder:
        path = Path(folder) / "history.db"
        _write_day(path, gpus, rounds)
        with closing(sqlite3.connect(path)) as db:
            _copy_days(db)
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            size = path.stat().st_size
            end = float(_START + DAY)
            state = state_of(prices=_PRICES)

            def ask(days: int) -> RangeAnswer:
                return read_range_answer(db, RangeQuery("owner", days * DAY, end=end), end, state)

            month, quarter = cpu_seconds_of_each(3, lambda: ask(30), lambda: ask(_DAYS))
            rows = len(ask(_DAYS).rows)
            [(pods,)] = db.execute("SELECT count(*) FROM account").fetchall()
    name = f"{gpus:,} GPUs, {pods:,} pods"
    return [
        Figure(f"{name}, {rows:,} owners, 30 days: CPU", month, "s", at_most=MAX_MONTH_SECONDS),
        Figure(f"  {_DAYS} days: CPU", quarter, "s", at_most=MAX_QUARTER_SECONDS),
        Figure(f"  file of {_DAYS} days", size / 2**30, "GiB", at_most=MAX_GIB),
    ]


def _write_day(path: Path, gpus: int, rounds: int) -> None:
    random = Random(1)
    samples = [[_own(gpu) for gpu in make_round(gpus, random)] for _ in range(4)]
    store = HistoryStore(path)
    for number in range(rounds):
        store.append(_START + number * DAY // rounds, samples[number % len(samples)])
    store.append(_START + DAY, [])
    store.close()


def _own(gpu: GpuSample) -> GpuSample:
    """Gives the pods owners, prices and all amounts of a GPU that they share."""
    charges = []
    for one in gpu.charges:
        number = int(one.account.pod.partition("-")[2])
        owner = f"owner-{number // _PODS_PER_OWNER}"
        account = one.account._replace(owner_kind="Deployment", owner_name=owner)
        share = 1 / len(gpu.charges)
        busy = one.amounts.idle_seconds * share
        time = HeldTime(
            held=INTERVAL,
            share=share,
            busy=busy,
            busy_min=busy * 0.9,
            busy_max=min(INTERVAL, busy * 1.1),
            idle=(INTERVAL - busy) / 2,
            waited=busy / 10,
            joules=300.0 * INTERVAL * share,
            underused=(INTERVAL - busy) / 4 * share,
        )
        charges.append(
            one._replace(account=account, amounts=charge(time, 1.0, 2.0), currency="EUR")
        )
    return gpu._replace(charges=charges)


def _copy_days(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA synchronous = OFF")
    [(pods,)] = db.execute("SELECT max(id) FROM account").fetchall()
    names = _columns(db, "account", "id", "pod")
    for week in range(1, _DAYS // 7 + 1):
        db.execute(
            f"INSERT INTO account (id, pod, {names})"
            f" SELECT id + {week * pods}, pod || '-{week}', {names} FROM account WHERE id <= {pods}"
        )
        columns = _columns(db, "span", "account")
        db.execute(
            f"INSERT INTO span (account, {columns})"
            f" SELECT account + {week * pods}, {columns} FROM span WHERE account <= {pods}"
        )
    for day in range(1, _DAYS):
        more = day // 7 * pods
        for table in ("usage", "period"):
            _copy(db, table, day, more, f"resolution = {DAY}")
        if day < _DAYS_OF_HOURS:
            _copy(db, "usage", day, more, f"resolution = {HOUR}")
            _copy(db, "load", day, more, "true")
            for table in ("sample", "round"):
                _copy(db, table, day, more, f"resolution = {COARSE}")
    # The newest 480 rounds of 15 s are kept.
    fine = f"resolution = {FINE} AND time > {_START + DAY - (2 * HOUR // FINE) * COARSE + DAY}"
    for table in ("sample", "round"):
        _copy(db, table, 1, 0, fine)
    db.execute("DELETE FROM kept")
    kept = [(HOUR, _START - (_DAYS_OF_HOURS - 1) * DAY), (COARSE, _START)]
    db.executemany("INSERT INTO kept VALUES (?, ?)", kept)
    db.commit()


def _copy(db: sqlite3.Connection, table: str, days: int, more: int, where: str) -> None:
    """Copies the rows of the written day to an earlier day. `more`: is added to the accounts."""
    written = f"{where} AND time >= {_START} AND time < {_START + DAY}"
    columns = _columns(db, table, "time")
    values = columns.replace("account", f"iif(account = 0, 0, account + {more})")
    db.execute(
        f"INSERT INTO {table} (time, {columns})"
        f" SELECT time - {days * DAY}, {values} FROM {table} WHERE {written}"
    )


def _columns(db: sqlite3.Connection, table: str, *without: str) -> str:
    names = [name for _, name, *_ in db.execute(f"PRAGMA table_info({table})")]
    return ", ".join(name for name in names if name not in without)
