"""Which files of the history there are, when they go, and what becomes of a directory that fails now and then."""

from __future__ import annotations

from pathlib import Path

from podgpu.history.asking import RANGES, STEP
from podgpu.history.directory import Directory
from podgpu.history.journal import Journal
from podgpu.history.ring import Ring, Told
from podgpu.history.rows import Key
from tests.history.figures import NOON, gpu


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
