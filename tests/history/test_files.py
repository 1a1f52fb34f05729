"""Which files of the history there are, when they go, and what becomes of a directory that fails now and then."""

from __future__ import annotations

from pathlib import Path

import pytest

from podgpu.history import frames
from podgpu.history.asking import RANGES, STEP
from podgpu.history.directory import Directory
from podgpu.history.journal import Journal
from podgpu.history.ring import Ring, Told
from podgpu.history.rows import MOST_ROWS, Key
from tests.history.figures import NOON, HandClock, Run, fill, gpu, holder, pod, wrong


def test_gpus_that_make_room_for_each_other_all_the_time_leave_few_files(tmp_path: Path) -> None:
    """Each time every column changes, and is written again: what was written before goes."""
    ring = Ring(most_rows=10)
    journal = Journal(Directory(str(tmp_path)), ring)
    journal.load(NOON, 0.0)
    most = 0
    for turn in range(100):
        at = NOON + turn * STEP
        ring.record(at, [Told([gpu(turn + n, 0.5) for n in range(8)])])
        journal.save(at, 0.0)
        most = max(most, len(list(tmp_path.glob("*.history"))))
    assert most <= 27
    journal.close()
    again = Ring(most_rows=10)
    assert Journal(Directory(str(tmp_path)), again).load(at, 0.0) == []
    newest, asked = Key(f"GPU-{turn}"), RANGES["1h"]
    assert again.keep_of(newest, asked, at) == ring.keep_of(newest, asked, at)


@pytest.mark.fault(
    "the history directory's disk is full, and history's own old files are on it",
    "they go when they are old although nothing new can be written, and their room is used",
)
def test_a_full_disk_is_freed_of_what_is_old(small_disk: Path, hand: HandClock) -> None:
    run = Run(small_disk / "h", hand)
    many = [gpu(number, 0.25) for number in range(500)]
    run.tell(*many, times=130)
    first, second = sorted((small_disk / "h").glob("hour-*.history"))
    fill(small_disk)
    run.tell(*many, times=20)
    assert "No space left on device" in run.keeper.notes()[0]
    assert first.exists()
    assert second.exists()
    run.tell(*many, times=20, pause=300)
    assert not first.exists()
    assert run.keeper.notes() == (), "there was room again"
    run.dies()


def test_files_are_not_old_because_the_clock_was_set(small_disk: Path, hand: HandClock) -> None:
    """It is set forward by days while the disk is full: what is there stays until it can be written anew."""
    run = Run(small_disk / "h", hand)
    run.tell(gpu(0, 0.5), *[gpu(number, 0.25) for number in range(1, 500)], times=20)
    run.dies()
    run = Run(small_disk / "h", hand)
    run.tell(gpu(0, 0.5))
    before = sorted((small_disk / "h").glob("*.history"))
    fill(small_disk)
    hand.jump(5 * 86_400.0)
    run.tell(gpu(0, 0.5), times=8)
    assert "No space left on device" in run.keeper.notes()[0]
    assert sorted((small_disk / "h").glob("*.history")) == before
    run.dies()


def test_short_lives_keep_who_held_what_and_what_was_wrong(tmp_path: Path, hand: HandClock) -> None:
    """Lives of less than five minutes leave files without a column of them; what ended in one is known in the next."""
    for name in ("a", "b"):
        run = Run(tmp_path / "h", hand)
        run.tell(gpu(0, 0.5, holder(pod(name)), conditions=(wrong(says=f"XID of {name}"),)), times=3)
        run.tell(gpu(0, 0.0))
        run.dies()
    for _ in range(3):
        run = Run(tmp_path / "h", hand)
        run.tell(gpu(0, 0.0))
        found = run.gpu()
        assert found is not None
        assert [(held["pod"], held["to"] - held["from"]) for held in found["holders"]] == [("a", 45), ("b", 45)]
        assert [(mark["says"], mark["until"] - mark["at"]) for mark in found["marks"]] == [
            ("XID of a", 45),
            ("XID of b", 45),
        ]
        run.dies()
    hand.pass_(2 * 86_400)
    run = Run(tmp_path / "h", hand)
    run.tell(gpu(0, 0.0))
    assert len(list((tmp_path / "h").glob("*.history"))) == 2, "what is old goes all the same"
    run.dies()


@pytest.mark.fault(
    "the history directory cannot be read when podgpu starts, and can later",
    "that is said, nothing in it is touched, and once it can be read its history is there, with what was taken since",
)
def test_a_directory_that_cannot_be_read_at_the_start(tmp_path: Path, hand: HandClock) -> None:
    run = Run(tmp_path / "h", hand)
    run.tell(gpu(0, 0.5, holder(pod("a"))), times=10)
    run.tell(gpu(0, 0.0))
    run.dies()
    (tmp_path / "h").rename(tmp_path / "away")
    files = {path: path.read_bytes() for path in (tmp_path / "away").iterdir()}
    (tmp_path / "h").symlink_to("h")
    run = Run(tmp_path / "h", hand)
    run.tell(gpu(0, 0.75, holder(pod("b"))), times=3)
    (note,) = run.keeper.notes()
    assert f"{tmp_path / 'h'} cannot be read (Too many levels of symbolic links)" in note
    assert {path: path.read_bytes() for path in (tmp_path / "away").iterdir()} == files
    (tmp_path / "h").unlink()
    (tmp_path / "away").rename(tmp_path / "h")
    run.tell(gpu(0, 0.25, holder(pod("c"))), times=10)
    assert run.keeper.notes() == ()
    expected = [0.5] * 10 + [0.0] + [0.75] * 3 + [0.25] * 10
    run.dies()
    for life in (run, Run(tmp_path / "h", hand)):
        assert [value for value in life.line() if value is not None] == expected
        found = life.gpu()
        assert found is not None
        assert [held["pod"] for held in found["holders"]] == ["a", "b", "c"]


def test_a_disk_that_is_mounted_after_the_start_loses_nothing(tmp_path: Path, hand: HandClock) -> None:
    run = Run(tmp_path / "disk", hand)
    run.tell(gpu(0, 0.5), times=3)
    run.dies()
    files = {path.name: path.read_bytes() for path in (tmp_path / "disk").glob("*.history")}
    directory = Directory(str(tmp_path / "h"))
    assert directory.read() == ([], [])
    (tmp_path / "disk").rename(tmp_path / "h")
    directory.open()
    directory.begin("hour", [b"new"], NOON)
    directory.begin("day", [b"new"], NOON)
    directory.close()
    now = {path.name: path.read_bytes() for path in (tmp_path / "h").glob("*.history")}
    assert files.items() <= now.items()
    assert len(now) == len(files) + 2


@pytest.mark.fault(
    "somebody fills the history directory with files of gigabytes, or with many that are podgpu's own",
    "the newest are read, as much as podgpu ever keeps; the rest is left as it is, and that is said",
)
def test_no_more_is_read_than_is_ever_kept(tmp_path: Path) -> None:
    column = frames.column_frame("fine", NOON, bytes(8 * MOST_ROWS))
    for number in range(1, 5):
        (tmp_path / f"hour-0000000{number}.history").write_bytes(frames.head() + column * 200)  # 29 MB each
    with (tmp_path / "day-00000009.history").open("wb") as sparse:
        sparse.truncate(4 << 30)
    segments, words = Directory(str(tmp_path)).read()
    assert [len(segment.columns) for segment in segments] == [200, 200]
    assert [f"{name}.history has more than" in said for name, said in zip(LEFT_OUT, words, strict=True)] == [True] * 3
    assert len(list(tmp_path.iterdir())) == 5


LEFT_OUT = ("day-00000009", "hour-00000002", "hour-00000001")


def test_a_file_with_the_highest_number_is_not_the_last(tmp_path: Path, hand: HandClock) -> None:
    (tmp_path / "h").mkdir()
    (tmp_path / "h" / "day-99999999.history").touch()
    for life in range(3):
        run = Run(tmp_path / "h", hand)
        run.tell(gpu(0, 0.5), times=3)
        assert [value for value in run.line() if value is not None] == [0.5] * 3 * (life + 1)
        run.dies()
