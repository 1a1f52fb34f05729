"""History on disk: a keeper ends without a word, and the next one finds all it kept; full disks, torn and old files."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podgpu.errors import UsageError
from podgpu.history.asking import JSON, RANGES
from podgpu.history.keeper import Keeper
from tests.history.figures import MIB, HandClock, Run, fill, gpu, holder, pod, wrong


def killed_copy(directory: Path, to: Path) -> Path:
    """The directory as it is at this moment, in which the process may be killed."""
    return Path(shutil.copytree(directory, to, ignore=shutil.ignore_patterns("podgpu.lock")))


def test_a_restart_keeps_everything(tmp_path: Path, hand: HandClock) -> None:
    before = Run(tmp_path / "h", hand)
    shared = (holder(pod("a"), 0.25, 10 * MIB), holder(pod("b"), 0.5, 20 * MIB))
    for _ in range(60):  # a bit more than four hours
        before.tell(gpu(0, 0.25, holder(pod("a"))), times=2)
        before.tell(gpu(0, 0.75, *shared), gpu(1, 1.0), times=2)
        before.tell(gpu(0, 0.5, conditions=(wrong(says="XID 79"),)), pause=195)
    said = [before.gpu(n, asked) for n in (0, 1) for asked in RANGES]
    pods = [before.pod(name, asked) for name in "ab" for asked in RANGES]
    assert all(said)
    assert all(pods)
    after = Run(killed_copy(tmp_path / "h", tmp_path / "copy"), hand)
    assert [after.gpu(n, asked) for n in (0, 1) for asked in RANGES] == said
    assert [after.pod(name, asked) for name in "ab" for asked in RANGES] == pods
    assert after.keeper.notes() == ()
    # and it goes on, and is there after the next one too
    after.tell(gpu(0, 0.125, conditions=(wrong(says="XID 79"),)), times=3)
    third = Run(killed_copy(tmp_path / "copy", tmp_path / "third"), hand)
    assert third.line()[-3:] == [0.125] * 3
    assert third.gpu(0, "24h") == after.gpu(0, "24h")
    for run in (before, after, third):
        run.dies()


def told(said: JSON | None) -> JSON | None:
    """All but when a holder let go of a device that nobody told of any more: that is known to ten minutes."""
    return said and said | {"holders": [{**held, "to": "to" in held} for held in said["holders"]]}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lives=st.lists(
        st.lists(
            st.tuples(
                st.sampled_from([15.0, 15.0, 60.0, 900.0]),
                st.lists(st.none() | st.integers(0, 100), min_size=1, max_size=4),
                st.permutations([0, 1, 2, 3]),
            ),
            min_size=1,
            max_size=12,
        ),
        min_size=1,
        max_size=4,
    )
)
def test_many_lives_are_as_one(
    tmp_path_factory: pytest.TempPathFactory,
    lives: Sequence[Sequence[tuple[float, Sequence[int | None], Sequence[int]]]],
) -> None:
    """A process that is killed again and again knows what one knows that lived all the time."""
    folder = tmp_path_factory.mktemp("lives")
    hand, other = HandClock(), HandClock()
    one = Run(folder / "one", other)
    for life in lives:
        run = Run(folder / "many", hand)
        for pause, ratios, order in life:
            devices = [
                gpu(n, None if r is None else r / 100, holder(pod(f"p{n}")))
                for n, r in zip(order, ratios, strict=False)
            ]
            run.tell(*devices, pause=pause)
            one.tell(*devices, pause=pause)
        for number in range(4):
            for asked in RANGES:
                assert told(run.gpu(number, asked)) == told(one.gpu(number, asked)), (number, asked)
        run.dies()
    one.dies()
    shutil.rmtree(folder)


@pytest.mark.fault(
    "podgpu is killed in the middle of writing its history, or a disk gives back other bytes than were written",
    "what can be read of the file is there after the restart, the rest is passed over, and both are said",
)
@pytest.mark.parametrize("harm", ["torn", "middle", "garbage at the end", "empty", "zeros"])
def test_a_damaged_file_is_read_as_far_as_it_can_be(
    tmp_path: Path, hand: HandClock, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    run = Run(tmp_path / "h", hand)
    run.tell(gpu(0, 0.5), times=20)
    run.dies()
    (hour,) = (tmp_path / "h").glob("hour-*.history")
    content = hour.read_bytes()
    middle = len(content) // 2
    hour.write_bytes(
        {
            "torn": content[:-5],
            "middle": content[:middle] + b"\x00\xff\x00" + content[middle + 3 :],
            "garbage at the end": content + os.urandom(300),
            "empty": b"",
            "zeros": bytes(len(content)),
        }[harm]
    )
    with caplog.at_level(logging.WARNING):
        after = Run(tmp_path / "h", hand)
    readable = {"torn": 19, "middle": 19, "garbage at the end": 20, "empty": 0, "zeros": 0}[harm]
    assert len([value for value in (after.line() if readable else []) if value == 0.5]) == readable
    assert f"{hour}" in caplog.text
    assert ("is damaged" if readable else "is not a file of podgpu's history") in caplog.text
    after.tell(gpu(0, 0.25), times=2)
    assert after.line()[-2:] == [0.25, 0.25]
    assert after.keeper.notes() == ()
    after.dies()


@pytest.mark.fault(
    "the history directory has files of another version of podgpu",
    "they are left as they are, which is said, and history begins anew beside them",
)
def test_files_of_another_version_are_left_alone(
    tmp_path: Path, hand: HandClock, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, hand)
    run.tell(gpu(0, 0.5), times=3)
    run.dies()
    later = {
        path: path.read_bytes().replace(b"podgpu history 1 ", b"podgpu history 2 ", 1)
        for path in tmp_path.glob("*.history")
    }
    assert later
    for path, content in later.items():
        path.write_bytes(content)
    (tmp_path / "notes.txt").write_text("somebody's")
    with caplog.at_level(logging.WARNING):
        after = Run(tmp_path, hand)
    assert "is of version 2; this podgpu reads version 1; it is left as it is" in caplog.text
    after.tell(gpu(0, 0.25), times=2)
    assert [value for value in after.line() if value is not None] == [0.25, 0.25]
    assert {path: path.read_bytes() for path in later} == later
    assert (tmp_path / "notes.txt").read_text() == "somebody's"
    after.dies()
    again = Run(tmp_path, hand)
    assert [value for value in again.line() if value is not None] == [0.25, 0.25]
    again.dies()


# What cannot be written


@pytest.mark.fault(
    "the history directory's disk is full",
    "history goes on in memory, the page and /health say so, what was written stays, and it is written again once"
    " there is room",
)
def test_a_full_disk(small_disk: Path, hand: HandClock, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(small_disk / "h", hand)
    run.tell(gpu(0, 0.5), times=4)
    ballast = fill(small_disk)
    many = [gpu(number, 0.25) for number in range(1000)]
    with caplog.at_level(logging.INFO):
        run.tell(*many, times=4)
        (note,) = run.keeper.notes()
        assert "No space left on device" in note
        assert "history is kept in memory only" in note
        assert caplog.text.count("No space left on device") == 1
        assert run.line()[-5:] == [0.5, 0.25, 0.25, 0.25, 0.25]
        ballast.unlink()
        run.tell(gpu(0, 0.75), times=60)
        assert run.keeper.notes() == ()
        assert "history is written again" in caplog.text
    expected = run.line()
    run.dies()
    after = Run(small_disk / "h", hand)
    assert after.line() == expected
    after.dies()


@pytest.mark.fault(
    "the history directory is read-only, or somebody else's",
    "what is there is read, history goes on in memory, and the page and /health say so",
)
def test_a_directory_that_cannot_be_written(tmp_path: Path, hand: HandClock) -> None:
    run = Run(tmp_path / "h", hand)
    run.tell(gpu(0, 0.5), times=4)
    other = Run(tmp_path / "h", hand)
    assert "is in use by another podgpu" in other.keeper.notes()[0]
    assert other.line()[-4:] == [0.5] * 4
    other.tell(gpu(0, 0.75), times=2)
    assert other.line()[-2:] == [0.75] * 2
    run.dies()
    other.tell(gpu(0, 0.25), times=60)
    assert other.keeper.notes() == (), "it has it now"
    expected = other.line()
    other.dies()
    assert Run(tmp_path / "h", hand).line() == expected


def test_a_directory_that_cannot_be_made(tmp_path: Path, hand: HandClock) -> None:
    file = tmp_path / "file"
    file.touch()
    keeper = Keeper(tuple, hand.clock, str(file / "h"))
    keeper.write()
    assert f"{file / 'h'} cannot be written to (Not a directory)" in keeper.notes()[0]
    with pytest.raises(UsageError, match="is not a directory"):
        Keeper(tuple, hand.clock, str(file))


# Time


@pytest.mark.parametrize("seconds", [7200.0, -7200.0, 40 * 86_400.0, -40 * 86_400.0])
def test_the_clock_is_set_while_it_runs(tmp_path: Path, hand: HandClock, seconds: float) -> None:
    """What was a minute ago stays a minute ago, in memory and after a restart."""
    run = Run(tmp_path / "h", hand)
    run.tell(gpu(0, 0.5, holder(pod("a"))), times=30)
    hand.jump(seconds)
    run.tell(gpu(0, 0.75, holder(pod("a"))), times=10)
    said = run.gpu()
    assert said is not None
    assert said["series"]["utilization_ratio"][-41:] == [None] + [0.5] * 30 + [0.75] * 10
    assert 0 <= said["to"] - hand.unix <= 15
    (held,) = said["holders"]
    assert held["from"] == pytest.approx(hand.unix - 39 * 15)
    run.dies()
    after = Run(tmp_path / "h", hand)
    assert [v for v in after.line() if v is not None] == [0.5] * 30 + [0.75] * 10
    again = after.gpu()
    assert again is not None
    assert again["holders"][0]["from"] == pytest.approx(held["from"], abs=1)
    after.dies()


def test_the_clock_was_set_back_between_two_lives(
    tmp_path: Path, hand: HandClock, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path / "h", hand)
    run.tell(gpu(0, 0.5, holder(pod("a"))), times=30)
    run.dies()
    hand.jump(-7200.0)
    with caplog.at_level(logging.WARNING):
        after = Run(tmp_path / "h", hand)
    assert "the clock was set back" in caplog.text
    assert [v for v in after.line() if v is not None] == [0.5] * 30
    after.tell(gpu(0, 0.75), times=6)
    after.dies()
    caplog.clear()
    again = Run(tmp_path / "h", hand)
    assert [v for v in again.line() if v is not None] == [0.5] * 30 + [0.75] * 6
    assert caplog.text == ""
    again.dies()


def test_a_clock_that_is_set_all_the_time_costs_no_more(tmp_path: Path, hand: HandClock) -> None:
    """Everything is written anew at most once a minute, and there are never many files."""
    run = Run(tmp_path / "h", hand)
    seen = set()
    for number in range(80):
        hand.jump(3600.0 if number % 2 else -3600.0)
        run.tell(gpu(0, 0.5))
        names = [path.name for path in (tmp_path / "h").iterdir()]
        seen.update(names)
        assert len(names) <= 5
    assert len(seen) <= 2 * (80 // 4 + 2) + 2
    run.dies()


# Bounds


def test_two_days_leave_a_bounded_directory(tmp_path: Path, hand: HandClock) -> None:
    """100 GPUs: 8 bytes a sample, for an hour and a half and for a bit more than a day."""
    run = Run(tmp_path / "h", hand)
    devices = [gpu(number, 0.5, holder(pod(f"p{number}"))) for number in range(100)]
    largest = 0
    for number in range(2 * 288):
        run.tell(*devices, pause=300)
        if number % 24 == 0:
            largest = max(largest, sum(path.stat().st_size for path in (tmp_path / "h").iterdir()))
    assert largest < 100 * (8 * (360 + 288 + 60) + 40 * 200)
    assert len(list((tmp_path / "h").iterdir())) < 24
    run.dies()


def test_a_process_that_starts_again_and_again_leaves_few_files(tmp_path: Path, hand: HandClock) -> None:
    for _ in range(60):
        run = Run(tmp_path / "h", hand)
        run.tell(gpu(0, 0.5))
        run.dies()
    assert len(list((tmp_path / "h").iterdir())) <= 30
    assert [v for v in Run(tmp_path / "h", hand).line() if v is not None] == [0.5] * 60
