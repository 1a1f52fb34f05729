"""An HPC scheduler's job files as a source: dcgm-exporter's convention, and files as prologs really leave them."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.holders.hpc import LONGEST_JOB, MOST_BYTES, MOST_JOBS, HpcAllocation, JobFile, map_jobs, parse_jobs
from podgpu.holders.source import AllocationSource
from podgpu.model import Allocation, Assignment, Device, Unmapped, Workload
from tests.holders.devices import failure, uuid
from tests.privilege import without_privilege

# Minors run against the index: job files go by the index.
NODE = (
    Device(0, uuid(0), "00000000:01:00.0", "NVIDIA H200", minor=1),
    Device(1, uuid(1), "00000000:02:00.0", "NVIDIA H200", minor=0, mig_enabled=True),
    Device(1, uuid(1), "00000000:02:00.0", "NVIDIA H200", 0, True, 7, "1g.18gb"),
    Device(10, uuid(2), "00000000:03:00.0", "NVIDIA H200", minor=10),
)


@pytest.fixture
def source(tmp_path: Path) -> HpcAllocation:
    return HpcAllocation(str(tmp_path))


def jobs_by_device(allocation: Allocation) -> list[tuple[str, str]]:
    return [(one.device, one.holder.job) for one in allocation.assignments]


def left_out(allocation: Allocation) -> list[tuple[str, str, str]]:
    return [(one.device_id, one.reason, one.holder.job) for one in allocation.unmapped]


# What it says


def test_it_is_an_allocation_source(source: HpcAllocation) -> None:
    as_one: AllocationSource = source
    assert as_one.name == "hpc"
    assert as_one.assignments(NODE) == Allocation()
    as_one.close()


def test_job_files_by_index_and_instance(source: HpcAllocation, tmp_path: Path) -> None:
    (tmp_path / "0").write_text("1234\n")
    (tmp_path / "1").write_text("77\n1234")
    (tmp_path / "1.7").write_text("88\n")
    (tmp_path / "10").write_text("")
    allocation = source.assignments(NODE)
    assert jobs_by_device(allocation) == [
        (uuid(0), "1234"),
        (uuid(1), "1234"),
        (uuid(1), "77"),
        (f"{uuid(1)}/gi7", "88"),
    ]
    assert allocation.assignments[0] == Assignment(uuid(0), Workload(job="1234"), "hpc")
    assert allocation.unmapped == ()


@pytest.mark.parametrize(
    "name", ["gpu0", "0.x", ".0", "0.", "0.7.1", "0~", "0.swp", "-1", "0 ", "0\n", "٠", "x" * 200, "README"]
)
def test_other_names_are_passed_over(source: HpcAllocation, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("1234\n")
    assert source.assignments(NODE) == Allocation()


@pytest.mark.parametrize("name", ["2", "00", "01", "0.7", "1.8", "1.07", "9" * 100])
def test_jobs_on_gpus_that_are_not_there_are_reported(source: HpcAllocation, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("1234\n")
    assert source.assignments(NODE) == Allocation(
        (), (Unmapped("hpc", "unknown_device", name, "hpc", Workload(job="1234")),)
    )
    (tmp_path / name).write_text("\n")
    assert source.assignments(NODE) == Allocation()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", JobFile()),
        (b"\n \n\t\n\r\n", JobFile()),
        (b"1\n2", JobFile(("1", "2"))),
        (b" 1 \r\n1\n\n1", JobFile(("1",))),
        (b"array[1-3] step", JobFile(("array[1-3] step",))),
        ('größe="1"\\'.encode(), JobFile(('größe="1"\\',))),
        (b"a\tb\n1", JobFile(("1",), ("bad_job_id",))),
        (b"a\rb\n\x00\n\x1b[31m\n1", JobFile(("1",), ("bad_job_id",))),
        (b"\xff\n1", JobFile(("1",), ("bad_job_id",))),
        ("a\u2028b\n\u202eabc\n1".encode(), JobFile(("1",), ("bad_job_id",))),
        (b"x" * LONGEST_JOB, JobFile(("x" * LONGEST_JOB,))),
        (b"x" * (LONGEST_JOB + 1), JobFile((), ("bad_job_id",))),
    ],
)
def test_lines(content: bytes, expected: JobFile) -> None:
    assert parse_jobs(content) == expected


def test_jobs_past_the_most_are_left_out() -> None:
    ids = [str(number) for number in range(MOST_JOBS + 2)]
    most = tuple(ids[:MOST_JOBS])
    assert parse_jobs("\n".join(ids[:MOST_JOBS] * 2).encode()) == JobFile(most)
    assert parse_jobs("\n".join(ids).encode()) == JobFile(most, ("too_many_jobs",))


def test_what_was_left_out_of_a_file_is_reported_once(source: HpcAllocation, tmp_path: Path) -> None:
    (tmp_path / "0").write_text("\n".join(["a\tb", "c\td", *map(str, range(100))]))
    allocation = source.assignments(NODE)
    assert len(allocation.assignments) == MOST_JOBS
    assert left_out(allocation) == [("0", "bad_job_id", ""), ("0", "too_many_jobs", "")]


@given(st.binary(max_size=300))
def test_any_bytes_are_jobs_that_can_be_printed(content: bytes) -> None:
    file = parse_jobs(content)
    assert all(job.isprintable() and 0 < len(job) <= LONGEST_JOB for job in file.jobs)
    assert set(file.left_out) <= {"bad_job_id", "too_many_jobs"}


names = st.sampled_from(["0", "1", "1.7", "10", "2", "00"])
job_lists = st.lists(st.sampled_from(["1", "2", "33", "", "a\tb"]), max_size=5)


@given(st.dictionaries(names, job_lists), st.randoms(use_true_random=False))
def test_order_does_not_matter(files: dict[str, list[str]], chance: random.Random) -> None:
    def mapped(listed: dict[str, list[str]]) -> Allocation:
        node = chance.sample(NODE, len(NODE))
        return map_jobs({name: parse_jobs("\n".join(jobs).encode()) for name, jobs in listed.items()}, node)

    shuffled = {name: chance.sample(files[name], len(files[name])) for name in chance.sample(list(files), len(files))}
    assert mapped(files) == mapped(shuffled)


# The directory as it changes


def test_jobs_come_and_go(source: HpcAllocation, tmp_path: Path) -> None:
    for job in ("1", "2", "3"):
        (tmp_path / "new").write_text(job)
        os.replace(tmp_path / "new", tmp_path / "0")
        assert jobs_by_device(source.assignments(NODE)) == [(uuid(0), job)]
    (tmp_path / "0").write_text("4")
    assert jobs_by_device(source.assignments(NODE)) == [(uuid(0), "4")]
    (tmp_path / "0").unlink()
    assert source.assignments(NODE) == Allocation()


def test_no_directory(tmp_path: Path) -> None:
    missing = HpcAllocation(str(tmp_path / "jobs"))
    error = failure(lambda: missing.assignments(NODE), missing.directory, "--hpc-job-mapping-dir")
    assert error.reason == "file_missing"
    (tmp_path / "jobs").mkdir()
    assert missing.assignments(NODE) == Allocation()


def test_a_file_or_pipe_instead_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for name in ("file", "pipe"):
        wrong = HpcAllocation(str(tmp_path / name))
        assert failure(lambda one=wrong: one.assignments(NODE), name).reason == "not_a_directory"  # type: ignore[misc]


def test_a_path_nothing_can_be_at() -> None:
    assert failure(lambda: HpcAllocation("a\0b").assignments(NODE)).reason == "unreadable"


def test_files_that_cannot_be_read_take_nothing_from_the_others(
    source: HpcAllocation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(tmp_path / "0")
    (tmp_path / "1").mkdir()
    (tmp_path / "1.7").write_bytes(b"1\n" * MOST_BYTES)
    (tmp_path / "2").symlink_to(tmp_path / "nowhere")
    (tmp_path / "10").write_text("1234")
    for _ in range(2):
        allocation = source.assignments(NODE)  # who opens the pipe and waits for a writer waits for ever
        assert jobs_by_device(allocation) == [(uuid(2), "1234")]
        assert left_out(allocation) == [("0", "not_a_file", ""), ("1", "not_a_file", ""), ("1.7", "too_large", "")]
    assert [record.getMessage().split()[0] for record in caplog.records] == [
        str(tmp_path / name) for name in ("0", "1", "1.7")
    ]


def test_what_nobody_may_read(folder: Path) -> None:
    source = HpcAllocation(str(folder))
    folder.chmod(0o755)
    (folder / "0").write_text("1")
    (folder / "0").chmod(0o000)
    (folder / "1").write_text("2")
    with without_privilege():
        allocation = source.assignments(NODE)
    assert (jobs_by_device(allocation), left_out(allocation)) == ([(uuid(1), "2")], [("0", "permission_denied", "")])
    folder.chmod(0o000)
    try:
        with without_privilege():
            assert failure(lambda: source.assignments(NODE), str(folder)).reason == "permission_denied"
    finally:
        folder.chmod(0o700)
