"""What pods came to, kept in `--history-dir`: as functions, over real files, and across a SIGKILL of the process."""

from __future__ import annotations

import json
import logging
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.errors import SourceError
from podgpu.figures.device import Owner
from podgpu.figures.parts import WHOLE
from podgpu.figures.prices import Prices
from podgpu.figures.waste import NS, Amounts, Holding, Left, Pod, PodWaste, WasteLedger, WasteStatement
from podgpu.history.keeper import Keeper
from podgpu.history.waste_file import NAME, SET_ASIDE, EarlierWaste, WasteFile, dump_waste, load_waste
from podgpu.model import Workload
from tests.history.figures import HandClock
from tests.nodes.clock import wait_until
from tests.web.process import EXPORTER, Process, podgpu

WALL = 1_794_744_000.0
NAMES = st.text(max_size=20)
OWNERS = st.none() | st.builds(Owner, st.text(min_size=1, max_size=9), st.text(max_size=9))
MOMENTS = st.none() | st.floats(0, 2e9)


@st.composite
def amounts(draw: st.DrawFn) -> Amounts:
    allocated = draw(st.integers(1, 1 << 90))
    return Amounts(allocated, draw(st.integers(0, allocated)), draw(st.none() | st.integers(0, 1 << 120)))


@st.composite
def pods(draw: st.DrawFn) -> PodWaste:
    named = Pod(*(draw(NAMES) for _ in range(5)))
    return PodWaste(named, draw(OWNERS), draw(amounts()), ended_at=draw(MOMENTS))


STATEMENTS = st.builds(
    WasteStatement,
    counting_since=MOMENTS,
    currency=NAMES,
    pods=st.lists(pods(), max_size=5, unique_by=lambda pod: pod.pod).map(tuple),
    left=st.dictionaries(st.builds(Left, NAMES, OWNERS), amounts(), max_size=3),
)


@given(STATEMENTS, st.floats(0, 2e9))
def test_what_is_written_is_read(statement: WasteStatement, at: float) -> None:
    assert load_waste(dump_waste(statement, at)) == EarlierWaste(statement, at)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda whole: whole[:-3], "damaged"),
        (lambda whole: whole.replace(b"train", b"brain"), "damaged"),
        (lambda whole: whole.replace(b"waste 1 ", b"waste 2 "), "another podgpu (version 2"),
        (lambda whole: b"{}", "not a file of waste"),
        (lambda whole: b"", "not a file of waste"),
    ],
)
def test_a_file_that_is_of_no_use_says_why(change: Any, says: str) -> None:
    statement = WasteStatement(WALL, "", (PodWaste(Pod("ml", "train"), None, Amounts(5, 1)),))
    with pytest.raises(SourceError, match=says.replace("(", r"\(")):
        load_waste(change(dump_waste(statement, WALL)))


# Counting on


def held(pod: str, at: float, *, idle: bool = True) -> Holding:
    workload = Workload("ml", pod, "main")
    return Holding(("", f"GPU-{pod}", "", workload.who), workload, WHOLE, "idle" if idle else "used", None, 10**12, at)


def counted(ledger: WasteLedger, pod: str) -> tuple[float, float | None, float | None]:
    """Idle seconds, money, when it ended."""
    (found,) = (one for one in ledger.statement(500.0, WALL, 0.0).pods if one.pod.pod == pod)
    return found.amounts.idle_hours * 3600, found.amounts.money, found.ended_at


EUROS, DOLLARS = Prices("EUR"), Prices("USD")


def earlier() -> WasteStatement:
    ledger = WasteLedger()
    for at in (0.0, 10.0, 20.0):
        ledger.turn([held("stays", at), held("ends", at)], at, 15.0, prices=EUROS)
    return ledger.statement(20.0, WALL - 480.0, WALL - 500.0)


def test_who_is_there_again_goes_on_and_who_is_not_ended_then() -> None:
    ledger = WasteLedger()
    ledger.restore(earlier(), WALL - 480.0, 470.0, WALL - 30.0)
    ledger.turn([held("stays", 490.0)], 490.0, 15.0, prices=EUROS)
    assert counted(ledger, "stays")[::2] == (20.0, None), "the time between is in no sum"
    ledger.turn([held("stays", 500.0)], 500.0, 15.0, prices=EUROS)
    assert counted(ledger, "stays") == (30.0, pytest.approx(30 / 3600), None)
    assert counted(ledger, "ends") == (20.0, pytest.approx(20 / 3600), pytest.approx(WALL - 480.0))


def test_what_is_read_late_is_added_to_what_was_counted_meanwhile() -> None:
    ledger = WasteLedger()
    for at in (480.0, 490.0):
        ledger.turn([held("stays", at)], at, 15.0, prices=EUROS)
    ledger.restore(earlier(), WALL - 480.0, 495.0, WALL - 5.0)
    assert counted(ledger, "stays") == (30.0, pytest.approx(30 / 3600), None)


def test_money_of_another_currency_is_not_taken() -> None:
    ledger = WasteLedger()
    ledger.restore(earlier(), WALL - 480.0, 480.0, WALL - 20.0)
    ledger.turn([held("stays", 490.0)], 490.0, 15.0, prices=DOLLARS)
    assert counted(ledger, "ends")[:2] == (20.0, None)
    late = WasteLedger()
    late.turn([held("stays", 490.0)], 490.0, 15.0, prices=DOLLARS)
    late.restore(earlier(), WALL - 480.0, 495.0, WALL - 5.0)
    assert counted(late, "stays")[0] == 20.0
    assert counted(late, "ends")[1] is None


def test_what_ended_more_than_a_day_ago_is_only_in_the_sums() -> None:
    ledger = WasteLedger()
    ledger.restore(earlier(), WALL - 100_000.0, 500.0, WALL)
    stated = ledger.statement(500.0, WALL, None)
    assert stated.pods == ()
    (left,) = stated.left.values()
    assert left.idle_hours * 3600 == pytest.approx(40.0)


def test_a_clock_that_was_set_back_leaves_moments_as_long_ago_as_they_were() -> None:
    pods = (
        PodWaste(Pod("ml", "gone"), None, Amounts(5, 1), ended_at=WALL - 60.0),
        PodWaste(Pod("ml", "p"), None, Amounts(5)),
    )
    seen = EarlierWaste(WasteStatement(WALL - 600.0, "", pods), WALL).seen_at(WALL - 3600.0)
    assert seen.statement.counting_since == WALL - 4200.0
    assert [pod.ended_at for pod in seen.statement.pods] == [WALL - 3660.0, None]
    assert seen.written_at == WALL - 3600.0


# The file


class Counting:
    """Stands for whoever counts."""

    def __init__(self, statement: WasteStatement | None = None) -> None:
        self.statement = statement
        self.restored: list[EarlierWaste] = []

    def file(self, directory: Path) -> WasteFile:
        return WasteFile(str(directory), lambda: self.statement, self.restored.append, lambda: WALL)


STATEMENT = WasteStatement(WALL - 60.0, "EUR", (PodWaste(Pod("ml", "train"), None, Amounts(50, 10, 3)),))


@pytest.mark.fault(
    "the file of waste in --history-dir is damaged, or of another version",
    "it is said, set aside under another name, and waste is counted anew; the rest of the history is there",
)
@pytest.mark.parametrize("content", [b"garbage", b"podgpu waste 9 00000000\n{}", dump_waste(STATEMENT, WALL)[:-1]])
def test_a_file_that_cannot_be_read_is_set_aside(
    tmp_path: Path, hand: HandClock, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / NAME).write_bytes(content)
    counting = Counting(STATEMENT)
    keeper = Keeper(tuple, hand.clock, str(tmp_path), counting.file(tmp_path))
    with caplog.at_level(logging.WARNING):
        keeper.write()
    assert "waste is counted anew" in caplog.text
    assert keeper.notes() == ()
    assert (tmp_path / SET_ASIDE).read_bytes() == content
    assert load_waste((tmp_path / NAME).read_bytes()).statement == STATEMENT
    assert counting.restored == []
    keeper.stop()


def test_nothing_is_written_over_before_what_was_there_is_taken(tmp_path: Path, hand: HandClock) -> None:
    before = dump_waste(STATEMENT, WALL - 100.0)
    (tmp_path / NAME).write_bytes(before)
    counting = Counting(None)
    keeper = Keeper(tuple, hand.clock, str(tmp_path), counting.file(tmp_path))
    keeper.write()
    assert [one.statement for one in counting.restored] == [STATEMENT]
    keeper.stop()
    assert (tmp_path / NAME).read_bytes() == before
    counting.statement = WasteStatement()
    counting.file(tmp_path).save()
    assert (tmp_path / NAME).read_bytes() == before, "who has not begun to count has nothing to write"


def test_a_file_that_may_not_be_read_now_is_not_written_over(tmp_path: Path, hand: HandClock) -> None:
    (tmp_path / NAME).mkdir()
    (tmp_path / SET_ASIDE).mkdir()
    (tmp_path / SET_ASIDE / "full").touch()
    keeper = Keeper(tuple, hand.clock, str(tmp_path), Counting(STATEMENT).file(tmp_path))
    keeper.write()
    (words,) = keeper.notes()
    assert "cannot be set aside" in words
    assert (tmp_path / NAME).is_dir()
    keeper.stop()


# The processes


def get(process: Process, path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(process.client.ask(path).body)
    return found


def rows(process: Process) -> dict[str, float]:
    return {row["pod"]: row["allocated_hours"] for row in get(process, "/api/v1/waste").get("rows", ()) if "pod" in row}


def a_week_ago(directory: Path) -> None:
    """As a podgpu would have written that ran for a week and was killed a minute ago."""
    directory.mkdir(exist_ok=True)
    hour = WHOLE * 3600 * NS
    notebook = PodWaste(Pod("ml", "idle-notebook"), Owner("Notebook", "ada"), Amounts(100 * hour, 90 * hour))
    statement = WasteStatement(time.time() - 7 * 86_400, "", (notebook,))
    (directory / NAME).write_bytes(dump_waste(statement, time.time() - 60))


@pytest.mark.fault(
    "podgpu with --history-dir is killed with SIGKILL",
    "the next one goes on counting waste from what was counted until a minute before; counting_since says since when",
)
def test_the_waste_is_there_again(tmp_path: Path) -> None:
    for name in ("exporter", "first", "second"):
        (tmp_path / name).mkdir()
    of_node, of_cluster = tmp_path / "node-history", tmp_path / "cluster-history"
    a_week_ago(of_node)
    a_week_ago(of_cluster)
    with podgpu([*EXPORTER, "--history-dir", str(of_node)], tmp_path / "exporter") as exporter:
        wait_until(lambda: rows(exporter).get("idle-notebook") == 100, "the exporter has its week again")
        target = f"http://127.0.0.1:{exporter.client.address.port}/metrics"
        words = [
            "cluster",
            "--scrape",
            target,
            "-a",
            "127.0.0.1:0",
            "--interval",
            "1s",
            "--history-dir",
            str(of_cluster),
        ]
        since = []
        for name in ("first", "second"):
            with podgpu(words, tmp_path / name) as cluster:
                wait_until(lambda: rows(cluster).get("idle-notebook") == 100, "the week is there again")
                told = get(cluster, "/api/v1/waste")
                since.append(told["counting_since"])
                (row,) = (row for row in told["rows"] if row.get("pod") == "idle-notebook")
                assert (row["idle_hours"], row["owner"]["name"]) == (90, "ada")
                assert row["ended_at"] < since[-1] + 7 * 86_400
                cluster.popen.send_signal(signal.SIGKILL)
                cluster.popen.wait()
        assert since[1] == pytest.approx(since[0], abs=5)
