"""Tests of the history store through its public functions, with real files, processes and
mounts.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from podgpu.charge import UNALLOCATED, Amounts, Charge, Figures, UsageAccount
from podgpu.clock import Clock
from podgpu.past.books.gpu_sample import ConditionRecord, GpuSample
from podgpu.past.books.history_file import HistoryError
from podgpu.past.books.recorder import FILE_NAME, HistoryRecorder
from podgpu.past.books.store import MAX_NEW_ACCOUNTS, HistoryStore
from podgpu.past.gpu_history import MAX_DEVICES, MAX_POINTS
from podgpu.past.sqlite.sqlite_charges import read_range, read_usage_start
from podgpu.past.sqlite.sqlite_series import read_gpu, read_job, read_pod
from tests.privilege import without_privilege

COARSE, HOUR, DAY = 300, 3600, 86_400
START = 1_800_000_000 // DAY * DAY
LLM = UsageAccount("research", "llm-0", owner_kind="StatefulSet", owner_name="llm")
NOTEBOOK = UsageAccount("research", "notebook")
USAGE = Amounts(15.0, 10.0, 0.015, 0.01)


def make_round(
    at: int, *holders: Charge, utilization: float | None = 0.5, xid: str = ""
) -> tuple[int, list[GpuSample]]:
    figures = Figures(utilization, 80 << 30, 412.5, 61.0)
    gpu = GpuSample(
        "GPU-1", "", "node-1", 0, figures, holders, [ConditionRecord("xid", xid)] if xid else []
    )
    return at, [gpu]


def usage_in(db: sqlite3.Connection) -> list[Charge]:
    return read_range(db, START - DAY, START + 100 * DAY)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.db"


@pytest.fixture
def store(path: Path) -> Iterator[HistoryStore]:
    store = HistoryStore(path)
    yield store
    store.close()


def test_a_short_range_has_a_point_for_every_round_and_gaps_are_not_zero(
    store: HistoryStore,
) -> None:
    store.append(*make_round(START, utilization=0.0))
    store.append(*make_round(START + 15, utilization=None))
    store.append(*make_round(START + 45, utilization=0.25))
    with store.reader() as db:
        history = read_gpu(db, "GPU-1", START, START + 60)
        assert read_gpu(db, "GPU-2", START, START + 60) is None
    assert history is not None
    assert (history.node, history.index, history.from_, history.step_seconds) == (
        "node-1",
        0,
        START,
        15,
    )
    assert history.series["utilization_ratio"] == [0.0, None, None, 0.25]
    assert history.series["memory_used_bytes"] == [80 << 30, 80 << 30, None, 80 << 30]


def test_long_ranges_are_means_of_at_most_500_points_up_to_now(store: HistoryStore) -> None:
    end = START + 3 * HOUR + 60
    for at in range(START, end, 15):
        store.append(*make_round(at, utilization=0.2 if at % COARSE < COARSE / 2 else 0.4))
    with store.reader() as db:
        day, week = (read_gpu(db, "GPU-1", end - length, end) for length in (DAY, 7 * DAY))
    assert day is not None
    assert week is not None
    known = [value for value in day.series["utilization_ratio"] if value is not None]
    assert known == pytest.approx([0.3] * 36 + [0.2])  # the last minute is not aggregated yet
    assert len(week.series["power_watts"]) <= MAX_POINTS
    assert week.series["power_watts"][-1] == 412.5


def test_a_pod_has_its_own_figures_on_a_shared_gpu_while_it_holds_it(store: HistoryStore) -> None:
    own = Charge(LLM, "main", USAGE, Figures(0.1, 8 << 30))
    store.append(*make_round(START, Charge(NOTEBOOK, "jupyter")))
    store.append(*make_round(START + 15, own, Charge(NOTEBOOK, "jupyter", figures=Figures())))
    store.append(*make_round(START + 30, xid="XID 79"))
    store.append(*make_round(START + 45))
    with store.reader() as db:
        [llm] = read_pod(db, "research", "llm-0", START, START + 60)
        [notebook] = read_pod(db, "research", "notebook", START, START + 60)
    assert llm.series["utilization_ratio"] == [None, 0.1, None, None]
    assert notebook.series["utilization_ratio"] == [0.5, None, None, None]
    assert [(span.container, span.pod, span.from_, span.to) for span in llm.holders] == [
        ("jupyter", "notebook", START, START + 30),
        ("main", "llm-0", START + 15, START + 30),
    ]
    assert [(mark.condition, mark.at, mark.until) for mark in llm.marks] == [
        ("xid", START + 30, START + 45)
    ]


def run_job(at: int, *pods: tuple[str, str]) -> tuple[int, list[GpuSample]]:
    """A round in which each pod of a job holds a GPU. `pods`: name and UUID."""
    samples = []
    for number, (pod, uuid) in enumerate(pods):
        account = UsageAccount("ml", pod, owner_kind="JobSet", owner_name="run")
        figures = Figures(0.9, 40 << 30, 500.0, 60.0)
        charge = Charge(account, "main", USAGE)
        samples.append(GpuSample(uuid, "", "node-1", number, figures, [charge], []))
    return at, samples


def test_a_job_has_the_figures_of_all_its_pods_also_of_earlier_ones(store: HistoryStore) -> None:
    store.append(*run_job(START, ("run-a", "GPU-1"), ("run-b", "GPU-2")))
    store.append(*run_job(START + 15))
    store.append(*run_job(START + 30, ("run-c", "GPU-1")))
    store.append(*make_round(START + 45, Charge(NOTEBOOK), xid="XID 79"))
    with store.reader() as db:
        job = read_job(db, "JobSet", "ml", "run", START, START + 60)
        for kind, namespace, name in (
            ("Job", "ml", "run"),
            ("JobSet", "other", "run"),
            ("JobSet", "ml", "walk"),
        ):
            assert read_job(db, kind, namespace, name, START, START + 60) is None
    assert job is not None
    assert (job.kind, job.name, job.left_out, job.marks) == ("JobSet", "run", 0, [])
    lines = {device.uuid: device.series["utilization_ratio"] for device in job.devices}
    assert lines == {"GPU-1": [0.9, None, 0.9, None], "GPU-2": [0.9, None, None, None]}
    held = [[span.pod for span in device.holders] for device in job.devices]
    assert held == [["run-a", "run-c"], ["run-b"]]


def test_pods_of_a_job_that_share_a_gpu_add_up(store: HistoryStore) -> None:
    parts = []
    for pod, ratio in (("run-a", 0.7), ("run-b", 0.5)):
        account = UsageAccount("ml", pod, owner_kind="JobSet", owner_name="run")
        parts.append(Charge(account, "main", USAGE, Figures(ratio, 8 << 30, 100.0, 61.0)))
    store.append(*make_round(START, *parts))
    with store.reader() as db:
        job = read_job(db, "JobSet", "ml", "run", START, START + 15)
    assert job is not None
    [device] = job.devices
    assert device.series["utilization_ratio"] == [1.0]
    assert device.series["memory_used_bytes"] == [16 << 30]
    assert device.series["power_watts"] == [200.0]
    assert device.series["temperature_celsius"] == [61.0]


def test_the_history_of_a_job_has_a_limited_number_of_gpus(store: HistoryStore) -> None:
    pods = [(f"run-{number}", f"GPU-{number}") for number in range(MAX_DEVICES + 3)]
    store.append(*run_job(START, *pods))
    with store.reader() as db:
        job = read_job(db, "JobSet", "ml", "run", START, START + 15)
    assert job is not None
    assert (len(job.devices), job.left_out) == (MAX_DEVICES, 3)
    assert job.devices[-1].uuid == f"GPU-{MAX_DEVICES - 1}"


def test_holders_of_a_gpu_that_cannot_be_read_stay_and_nothing_else_does(
    store: HistoryStore,
) -> None:
    at, [first] = make_round(START, Charge(LLM), xid="XID 79")
    second = first._replace(uuid="GPU-2", charges=[Charge(NOTEBOOK)], conditions=[])
    store.append(at, [first, second])
    unread = first._replace(charges=[], conditions=[], holders_known=False)
    store.append(at + 15, [unread, second._replace(charges=[])])
    with store.reader() as db:
        gpus = [read_gpu(db, uuid, START, START + 60) for uuid in ("GPU-1", "GPU-2")]
    ends = [[span.to for span in gpu.holders] for gpu in gpus if gpu is not None]
    assert ends == [[None], [START + 15]]
    assert gpus[0] is not None
    assert [mark.until for mark in gpus[0].marks] == [START + 15]


def test_an_ended_pod_has_the_figures_until_its_end_in_long_ranges(store: HistoryStore) -> None:
    for at in range(START, START + 3 * COARSE, 15):
        held = at < START + COARSE // 2
        store.append(
            *make_round(at, *([Charge(LLM)] if held else []), utilization=0.99 if held else 0.0)
        )
    with store.reader() as db:
        [llm] = read_pod(db, "research", "llm-0", START - DAY, START + COARSE)
        gpu = read_gpu(db, "GPU-1", START - DAY, START + COARSE)
    assert [value for value in llm.series["utilization_ratio"] if value is not None] == [0.99]
    assert gpu is not None
    assert gpu.series["utilization_ratio"][-1] == pytest.approx(0.495)


def test_usage_includes_ended_pods_and_owners_that_became_known_later(store: HistoryStore) -> None:
    accounts = [LLM._replace(owner_name="", owner_kind="")] + [LLM] * 29 + [NOTEBOOK] * 30
    for hour, account in enumerate(accounts):
        store.append(
            *make_round(START + hour * HOUR, Charge(account, amounts=USAGE, currency="USD"))
        )
    with store.reader() as db:
        llm, notebook = usage_in(db)
        assert read_usage_start(db) == START
    assert (llm.account, llm.currency, notebook.account) == (LLM, "USD", NOTEBOOK)
    assert llm.amounts == pytest.approx(Amounts(450.0, 300.0, 0.45, 0.3))


def test_old_rows_are_deleted(store: HistoryStore) -> None:
    """The last 90 recorded days, 8 days of hours, and 8 days of samples every 5 minutes are kept."""
    for day in range(100):
        pod = LLM if day else NOTEBOOK
        store.append(*make_round(START + day * DAY, Charge(pod, amounts=USAGE)))
    for number in range(9 * DAY // COARSE):
        at = START + 100 * DAY + number * COARSE
        store.append(*make_round(at, Charge(LLM, amounts=USAGE)))
    end = START + 109 * DAY
    with store.reader() as db:
        oldest = dict(db.execute("SELECT resolution, min(time) FROM usage GROUP BY resolution"))
        assert oldest[DAY] == end - 90 * DAY
        assert oldest[HOUR] == end - 8 * DAY
        assert oldest[COARSE] == end - 26 * HOUR  # whole hours, at least 25
        samples = dict(db.execute("SELECT resolution, min(time) FROM sample GROUP BY resolution"))
        # Rows are deleted every quarter of an hour.
        assert samples == {COARSE: end - 8 * DAY - 3 * COARSE, 15: end - 482 * COARSE}
        [oldest_load] = db.execute("SELECT min(time) FROM load").fetchone()
        assert oldest_load == end - 8 * DAY
        times = dict(db.execute("SELECT resolution, min(time) FROM period GROUP BY resolution"))
        assert times[DAY] == times[HOUR] == end - 90 * DAY  # which hours a day has stays known
        assert times[COARSE] == oldest[COARSE]
        assert db.execute("SELECT pod FROM account").fetchall() == [("llm-0",)]


def test_a_gpu_whose_name_was_deleted_is_stored_again(store: HistoryStore) -> None:
    for day in range(100):
        store.append(*make_round(START + day * DAY, Charge(LLM, amounts=USAGE)))
    figures: Figures | None = None
    for number in range(12):
        if number == 10:
            figures = Figures(0.25)
        at, gpus = make_round(START + 100 * DAY + number * COARSE, Charge(LLM, amounts=USAGE))
        store.append(at, [*gpus, GpuSample("GPU-2", "", "node-1", 1, figures)])
    with store.reader() as db:
        history = read_gpu(db, "GPU-2", START + 100 * DAY, START + 100 * DAY + HOUR)
    assert history is not None
    assert 0.25 in history.series["utilization_ratio"]


def test_at_most_the_rows_of_one_day_are_deleted_at_a_time(store: HistoryStore) -> None:
    """Nothing is deleted while the time is not settled: four days here."""
    for number in range(4 * DAY // COARSE):
        at, gpus = make_round(START + number * COARSE, Charge(LLM, amounts=USAGE))
        store.charge(at, gpus, is_settled=False)
        store.write(at, gpus, is_settled=False)
    oldest = []
    end = START + 4 * DAY
    for number in range(7):
        store.append(*make_round(end + number * COARSE))
        with store.reader() as db:
            oldest += db.execute("SELECT min(time) FROM round WHERE resolution = 15").fetchone()
    kept = end - 480 * COARSE  # as many as two hours have
    assert oldest[:3] == [START + DAY] * 3
    assert oldest[3:6] == [START + 2 * DAY] * 3
    assert oldest[6] == kept + 7 * COARSE


def test_the_size_limit_deletes_samples_before_usage(path: Path) -> None:
    store = HistoryStore(path, max_bytes=400_000)
    holders = [Charge(LLM, amounts=USAGE)]
    gpus = [
        GpuSample(f"GPU-{n}", "", "node-1", n, Figures(0.5, 1 << 30, 300, 50), holders)
        for n in range(50)
    ]
    for at in range(START, START + 3 * DAY, COARSE):
        store.append(at, gpus)
    with store.reader() as db:
        [row] = usage_in(db)
        assert db.execute("SELECT min(time) FROM sample").fetchone()[0] > START + DAY
    assert row.amounts.allocated_seconds == 15.0 * 50 * 3 * DAY / COARSE
    store.close()
    assert path.stat().st_size < 800_000


WRITER = """
import sys
from pathlib import Path
from podgpu.past.books.store import HistoryStore
from podgpu.charge import Charge
from tests.past.test_store import LLM, USAGE, make_round
store = HistoryStore(Path(sys.argv[1]))
for number in range(int(sys.argv[2]), 10**9):
    store.append(*make_round(number * 15, Charge(LLM, amounts=USAGE)))
    print(number, flush=True)
"""


def start_writer(path: Path, first: int) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    command = [sys.executable, "-c", WRITER, str(path), str(first)]
    writer = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    writer.stdout.readline()  # the first round is written
    return writer


def test_kill_9_loses_no_round_and_a_restart_continues(path: Path) -> None:
    first = written = START // 15
    for attempt in range(10):
        writer = start_writer(path, written)
        time.sleep(0.0063 * attempt)  # a round takes about 1 ms
        writer.kill()
        reported = [str(written), *writer.communicate()[0].split()]
        store = HistoryStore(path)
        with store.reader() as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            (newest,) = db.execute(
                "SELECT max(time) / 15 FROM round WHERE resolution = 15"
            ).fetchone()
            [row] = usage_in(db)
            assert db.execute("SELECT count(*) FROM span").fetchone() == (
                1,
            )  # the holder never changed
        store.close()
        assert newest >= int(reported[-1])
        assert row.amounts.allocated_seconds == 15.0 * (
            newest + 1 - first
        )  # each round counts exactly once
        written = newest + 1


def test_a_pod_that_ended_while_podgpu_was_down_ends_with_the_last_round(path: Path) -> None:
    for at, holders in ((START, [Charge(LLM)]), (START + HOUR, [])):
        store = HistoryStore(path)
        store.append(*make_round(at, *holders))
        with store.reader() as db:
            [history] = read_pod(db, "research", "llm-0", START, START + HOUR)
        store.close()
    assert history.holders[0].to == START + 15


def test_a_second_process_is_refused(path: Path) -> None:
    writer = start_writer(path, START // 15)
    with pytest.raises(HistoryError, match="in use by another podgpu"):
        HistoryStore(path)
    writer.kill()
    writer.communicate()
    HistoryStore(path).close()


def test_another_schema_is_refused_and_left_alone(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 7")
    before = path.read_bytes()
    for _ in range(2):  # the second attempt shows that the first released the lock
        with pytest.raises(
            HistoryError, match=r"another version of podgpu \(schema 7; this version supports 5\)"
        ):
            HistoryStore(path)
    assert path.read_bytes() == before


def test_a_damaged_file_is_moved_aside_with_a_message(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(b"not a database" * 1000)
    store = HistoryStore(path)
    store.append(*make_round(START))
    store.close()
    assert Path(f"{path}.damaged").read_bytes() == b"not a database" * 1000
    assert "is damaged (file is not a database); it was renamed to" in caplog.text


def test_a_file_with_other_tables_is_moved_aside(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.executescript("CREATE TABLE account (id); CREATE TABLE usage (time)")
    store = HistoryStore(path)
    store.append(*make_round(START))
    store.close()
    assert Path(f"{path}.damaged").exists()
    assert "it was renamed to" in caplog.text


def test_damage_found_while_reading_starts_a_new_file_with_the_next_round(
    path: Path, store: HistoryStore
) -> None:
    store.append(*make_round(START))
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    path.write_bytes(path.read_bytes()[:4096] + b"\xff" * (path.stat().st_size - 4096))
    with pytest.raises(HistoryError, match="malformed"), store.reader() as db:
        read_gpu(db, "GPU-1", START, START + HOUR)
    store.append(*make_round(START + 15))
    with store.reader() as db:
        assert read_gpu(db, "GPU-1", START, START + HOUR)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_a_full_disk_loses_figures_but_no_usage(small_disk: Path) -> None:
    store = HistoryStore(small_disk / "history.db")
    (small_disk / "filler").write_bytes(b"x" * 33_000_000)
    failed = 0
    for number in range(240):
        try:
            store.append(*make_round(START + 15 * number, Charge(LLM, amounts=USAGE)))
        except HistoryError:
            failed += 1
            if failed == 20:
                (small_disk / "filler").unlink()
    with store.reader() as db:
        [row] = usage_in(db)
    store.close()
    assert failed == 20
    assert row.amounts.allocated_seconds == 15.0 * 240


def test_an_unexpected_error_loses_no_usage(store: HistoryStore) -> None:
    at, (gpu,) = make_round(START, Charge(LLM, amounts=USAGE))
    with pytest.raises(UnicodeEncodeError):
        store.append(at, [gpu._replace(node="\ud800")])
    store.append(at + 15, [gpu])
    with store.reader() as db:
        [row] = usage_in(db)
    assert row.amounts.allocated_seconds == 30.0


def test_small_amounts_on_several_gpus_are_summed_before_they_are_rounded(
    store: HistoryStore,
) -> None:
    at, (gpu,) = make_round(START, Charge(LLM, amounts=Amounts(1.0, waited_seconds=0.0004)))
    store.append(at, [gpu._replace(uuid=f"GPU-{number}") for number in range(5)])
    with store.reader() as db:
        [row] = usage_in(db)
    assert row.amounts.waited_seconds == 0.002


def test_ids_of_a_round_that_failed_are_not_used_again(store: HistoryStore) -> None:
    store._db.execute("""
        CREATE TEMP TRIGGER fail BEFORE INSERT ON usage
        BEGIN SELECT raise(ABORT, 'disk full'); END""")
    with pytest.raises(HistoryError, match="disk full"):
        store.append(*make_round(START, Charge(LLM, amounts=USAGE), xid="XID 79"))
    store._db.execute("DROP TRIGGER fail")
    store.append(*make_round(START + 15, Charge(LLM, amounts=USAGE), xid="XID 79"))
    with store.reader() as db:
        [row] = usage_in(db)
        [history] = read_pod(db, "research", "llm-0", START, START + 60)
    assert row.amounts.allocated_seconds == 30.0
    assert [mark.at for mark in history.marks] == [START + 15]


def test_a_short_failure_keeps_the_5_minutes_of_the_usage(store: HistoryStore) -> None:
    at = START + 2 * COARSE
    store._db.execute("PRAGMA query_only = 1")  # writing fails
    with pytest.raises(HistoryError):
        store.append(*make_round(at, Charge(LLM, amounts=USAGE)))
    store._db.execute("PRAGMA query_only = 0")
    store.append(*make_round(at + COARSE))
    with store.reader() as db:
        [row] = read_range(db, at, at + COARSE)
    assert row.amounts.allocated_seconds == 15.0


def test_a_file_that_is_locked_is_not_moved_aside(path: Path) -> None:
    HistoryStore(path).close()
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(HistoryError, match="locked"):
            HistoryStore(path)
        other.execute("ROLLBACK")
    other.close()
    assert list(path.parent.glob("*.damaged*")) == []
    assert path.exists()


def test_other_users_cannot_read_the_file(path: Path, store: HistoryStore) -> None:
    assert path.stat().st_mode & 0o777 == 0o600


def test_spans_end_one_by_one(store: HistoryStore) -> None:
    """Each span differs from the one that ends in one field."""
    gpu = GpuSample("GPU-1", "", "node-1", 0)
    ending = gpu._replace(
        charges=[Charge(LLM, "a"), Charge(LLM, "b"), Charge(NOTEBOOK, "a")],
        conditions=[
            ConditionRecord("xid", "1"),
            ConditionRecord("xid", "2"),
            ConditionRecord("lost", "1"),
            ConditionRecord("a", "", account=LLM),
        ],
    )
    other = gpu._replace(uuid="GPU-2", charges=[Charge(LLM, "a")])
    remaining = ending._replace(charges=ending.charges[1:], conditions=ending.conditions[1:])
    store.append(START, [ending, other])
    store.append(START + 15, [remaining, other])
    with store.reader() as db:
        ended = db.execute(
            "SELECT uuid, kind, name, message FROM span JOIN gpu ON id = gpu"
            " WHERE ended IS NOT NULL ORDER BY kind"
        ).fetchall()
    assert ended == [("GPU-1", "condition", "xid", "1"), ("GPU-1", "holder", "a", "")]


def test_a_gpu_that_nobody_holds_has_no_holder(store: HistoryStore) -> None:
    store.append(*make_round(START, Charge(UNALLOCATED, amounts=USAGE)))
    with store.reader() as db:
        history = read_gpu(db, "GPU-1", START, START + 15)
        [row] = usage_in(db)
    assert history is not None
    assert history.holders == []
    assert row.account == UNALLOCATED


@pytest.mark.parametrize(
    ("since", "started"),
    [
        (None, START + 75),
        (START + 70.4, START + 70),
        (START + 3, START + 3),  # less than a minute before the last round
        (START, START + 75),  # only its message changed
        (START + 76.4, START + 76),
        (START + 77, START + 75),  # in the future
    ],
)
def test_a_condition_starts_when_it_began_if_that_is_new(
    store: HistoryStore, since: float | None, started: int
) -> None:
    gpu = GpuSample("GPU-1", "", "node-1", 0)
    store.append(START + 60, [gpu])
    store.append(START + 75.9, [gpu._replace(conditions=[ConditionRecord("xid", "79", since)])])
    with store.reader() as db:
        history = read_gpu(db, "GPU-1", START, START + 300)
    assert history is not None
    assert [mark.at for mark in history.marks] == [started]


def test_a_holder_that_ends_without_a_gap_ends_with_the_round_that_misses_it(
    store: HistoryStore,
) -> None:
    store.append(*make_round(START, Charge(LLM)))
    store.append(*make_round(START + COARSE))
    with store.reader() as db:
        [history] = read_pod(db, "research", "llm-0", START, START + HOUR)
    assert history.holders[0].to == START + COARSE


def test_the_mean_of_a_pod_has_no_value_of_the_next_5_minutes(store: HistoryStore) -> None:
    """The pod starts in the middle of a step."""
    for at in range(START, START + 3 * COARSE, 15):
        holders = [Charge(LLM)] if at >= START + 150 else []
        busy = 0.25 if at < START + COARSE else 1.0
        store.append(*make_round(at, *holders, utilization=busy))
    with store.reader() as db:
        sql = """
        SELECT utilization FROM sample JOIN account ON id = account
        WHERE resolution = 300 AND time = ?"""
        assert db.execute(sql, (START,)).fetchall() == [(2500,)]


def test_a_read_only_disk_is_refused(small_disk: Path) -> None:
    HistoryStore(small_disk / "history.db").close()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(HistoryError, match="Read-only file system"):
        HistoryStore(small_disk / "history.db")


def test_in_memory_history_has_the_last_day() -> None:
    store = HistoryStore()
    for at in range(START, START + 2 * HOUR, 15):
        store.append(*make_round(at))
    with store.reader() as db:
        history = read_gpu(db, "GPU-1", START, START + 2 * HOUR)
    store.close()
    assert history is not None
    assert None not in history.series["utilization_ratio"]


def test_after_the_clock_was_set_back_new_rounds_replace_old_ones(store: HistoryStore) -> None:
    store.append(*make_round(START + HOUR, Charge(LLM)))
    store.append(*make_round(START + 15, utilization=0.25))
    store.append(*make_round(START + HOUR, utilization=0.75))
    with store.reader() as db:
        history = read_gpu(db, "GPU-1", START, START + 2 * HOUR)
    assert history is not None
    assert [value for value in history.series["utilization_ratio"] if value is not None] == [
        0.25,
        0.75,
    ]


def hours_at(store: HistoryStore, start: int) -> dict[str, float]:
    """Returns the allocated seconds of each pod in the 5 minutes from `start` on."""
    with store.reader() as db:
        charges = read_range(db, start, start + COARSE)
    return {charge.account.pod: charge.amounts.allocated_seconds for charge in charges}


def test_only_charges_of_a_time_that_was_not_settled_move_with_the_clock(path: Path) -> None:
    store = HistoryStore(path)
    later = START + 2 * HOUR
    for is_settled, account in ((True, LLM), (False, NOTEBOOK)):
        at, gpus = make_round(START, Charge(account, amounts=USAGE))
        store.charge(at, gpus, is_settled)
    store.settle_unwritten(2 * HOUR)
    store.write(*make_round(later))
    assert hours_at(store, START) == {"llm-0": 15.0}
    assert hours_at(store, later) == {"notebook": 15.0}

    at, gpus = make_round(START + HOUR, Charge(NOTEBOOK, amounts=USAGE))
    store.charge(at, gpus, is_settled=False)
    store.write(at, gpus, is_settled=False)
    store.close()

    store = HistoryStore(path)
    store.settle(2 * HOUR, START + 3 * HOUR)
    assert hours_at(store, START + HOUR) == {"notebook": 15.0}, "settled when the file is opened"
    store.close()


def test_a_holder_ends_with_the_round_that_misses_it_after_the_clock_was_corrected(
    store: HistoryStore,
) -> None:
    later = START + 2 * HOUR
    store.write(*make_round(START, Charge(LLM)), is_settled=False)
    store.settle(2 * HOUR, later)
    store.write(*make_round(later + 15))
    with store.reader() as db:
        gpu = read_gpu(db, "GPU-1", START, later + HOUR)
    assert gpu is not None
    assert [(span.from_, span.to) for span in gpu.holders] == [(later, later + 15)]


def test_only_figures_of_a_time_that_was_not_settled_move_with_the_clock(
    store: HistoryStore,
) -> None:
    store.write(*make_round(START, utilization=0.25))
    store.write(*make_round(START + 15, utilization=0.75), is_settled=False)
    store.settle(HOUR, START + HOUR + 15)
    with store.reader() as db:
        times = db.execute("SELECT time, utilization FROM sample ORDER BY time").fetchall()
    assert [time for time, _ in times] == [START, START + HOUR + 15]


def test_5_minutes_are_kept_again_after_a_clock_that_was_ahead(store: HistoryStore) -> None:
    for number in range(2 * DAY // COARSE):
        store.append(*make_round(START + number * COARSE, Charge(LLM, amounts=USAGE)))

    def read_kept() -> dict[int, int]:
        with store.reader() as db:
            return dict(db.execute("SELECT resolution, since FROM kept").fetchall())

    assert read_kept()[COARSE] > START
    store.write(*make_round(START + 2 * DAY), is_settled=False)
    store.settle(-2 * DAY, START + 15)
    assert read_kept()[COARSE] == START


def test_hours_are_kept_again_after_a_clock_that_was_ahead(store: HistoryStore) -> None:
    for number in range(12 * 24):
        store.append(*make_round(START + number * HOUR, Charge(LLM, amounts=USAGE)))

    def read_kept() -> int:
        with store.reader() as db:
            [since] = db.execute(f"SELECT since FROM kept WHERE resolution = {HOUR}").fetchone()
        return int(since)

    assert read_kept() > START + DAY
    store.write(*make_round(START + 12 * DAY + HOUR), is_settled=False)
    store.settle(-12 * DAY, START + HOUR + 15)
    assert read_kept() == START + DAY, "the first day that begins on the right clock"


def test_accounts_that_are_known_are_not_new_in_the_next_hour(store: HistoryStore) -> None:
    charges = [
        Charge(UsageAccount("ml", f"pod-{number}"), amounts=USAGE)
        for number in range(MAX_NEW_ACCOUNTS + 1)
    ]
    store.append(*make_round(START, *charges[:MAX_NEW_ACCOUNTS]))
    store.append(*make_round(START + HOUR, *charges))
    assert hours_at(store, START + HOUR)[f"pod-{MAX_NEW_ACCOUNTS}"] == 15.0


def test_the_limit_of_new_accounts_is_that_of_an_hour(store: HistoryStore) -> None:
    for number in range(MAX_NEW_ACCOUNTS // 500 + 1):
        charges = [
            Charge(UsageAccount("ml", f"pod-{number}-{each}"), amounts=USAGE) for each in range(500)
        ]
        store.append(*make_round(START + 15 * number, *charges))
    pods = hours_at(store, START)
    assert len(pods) == MAX_NEW_ACCOUNTS + 1
    assert pods[""] == 500 * 15.0, "the common account"
    later = Charge(UsageAccount("ml", "later"), amounts=USAGE)
    store.append(*make_round(START + HOUR, later))
    assert hours_at(store, START + HOUR) == {"later": 15.0}


def test_a_directory_that_cannot_be_searched(folder: Path) -> None:
    folder.chmod(0o700)
    with without_privilege():
        recorder = HistoryRecorder(lambda: None, directory=str(folder / "history"))
        [note] = recorder.warnings()
        recorder.stop()
    assert "Permission denied" in note.text
    assert "history is kept in memory only" in note.text


@pytest.mark.fault(
    "two processes of podgpu have one history directory for some time, as in a rolling update",
    "the second one continues the history; the time of both is charged once",
)
@pytest.mark.parametrize("overlap", [0, 40, 2000])
def test_the_time_of_two_processes_is_charged_once(tmp_path: Path, overlap: int) -> None:
    now = float(START)
    clock = Clock(monotonic=lambda: now, wall=lambda: now)
    first = HistoryRecorder(clock=clock, directory=str(tmp_path))
    processes = [first]
    _, gpus = make_round(START, Charge(LLM, "main", USAGE))

    def run(rounds: int) -> None:
        nonlocal now
        for _ in range(rounds):
            now += 15.0
            for process in processes:
                process.add(gpus)
                process.record()

    run(100)
    second = HistoryRecorder(clock=clock, directory=str(tmp_path))
    processes.append(second)
    run(overlap)
    processes.remove(first)
    first.stop()
    run(20)
    second.stop()

    store = HistoryStore(tmp_path / FILE_NAME)
    with store.reader() as db:
        charged = sum(charge.amounts.allocated_seconds for charge in usage_in(db))
    store.close()
    assert charged == pytest.approx((100 + overlap + 20) * 15.0, abs=30.0)


def test_files_of_the_previous_release_are_named_and_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("hour-00000001.history", "waste.json"):
        (tmp_path / name).write_bytes(b"0.2")
    HistoryRecorder(lambda: None, directory=str(tmp_path)).stop()
    for name in ("hour-00000001.history", "waste.json"):
        assert name in caplog.text
        assert (tmp_path / name).read_bytes() == b"0.2"


def test_a_file_of_a_version_that_knew_fewer_amounts_gets_their_columns(path: Path) -> None:
    store = HistoryStore(path)
    store.append(*make_round(START, Charge(LLM, "main", USAGE)))
    store.close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("ALTER TABLE usage DROP COLUMN busy")
        db.commit()

    store = HistoryStore(path)
    store.append(*make_round(START + 15, Charge(LLM, "main", Amounts(busy_seconds=7.0))))
    with store.reader() as db:
        [charge] = usage_in(db)
    store.close()
    assert charge.amounts == USAGE._replace(busy_seconds=7.0)
