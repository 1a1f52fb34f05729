"""Job files of an HPC scheduler: dcgm-exporter's format, and files as prologs leave them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from podgpu.holders.node_files import HpcAllocation, parse_jobs
from podgpu.model import Allocation, Assignment, Device, Unmapped, Workload
from tests.holders.devices import failure, uuid
from tests.privilege import without_privilege

# Minors and indices differ: job files are named by index.
NODE = (
    Device(0, uuid(0), "00000000:01:00.0", "NVIDIA H200", minor=1),
    Device(1, uuid(1), "00000000:02:00.0", "NVIDIA H200", minor=0, mig_enabled=True),
    Device(1, uuid(1), "00000000:02:00.0", "NVIDIA H200", 0, True, 7, "1g.18gb"),
    Device(10, uuid(2), "00000000:03:00.0", "NVIDIA H200", minor=10),
)


@pytest.fixture
def source(tmp_path: Path) -> HpcAllocation:
    return HpcAllocation(str(tmp_path))


def jobs(allocation: Allocation) -> list[tuple[str, str]]:
    return [(one.device, one.holder.job) for one in allocation.assignments]


def unmapped(allocation: Allocation) -> list[tuple[str, str]]:
    return [(one.device_id, one.reason) for one in allocation.unmapped]


def test_job_files_by_index_and_instance(source: HpcAllocation, tmp_path: Path) -> None:
    assert source.assignments(NODE) == Allocation()
    for name, text in {"0": "1234\n", "1": "77\n1234", "1.7": "88\n", "10": ""}.items():
        (tmp_path / name).write_text(text)
    allocation = source.assignments(NODE)
    assert jobs(allocation) == [(uuid(0), "1234"), (uuid(1), "1234"), (uuid(1), "77"), (f"{uuid(1)}/gi7", "88")]
    assert allocation.assignments[0] == Assignment(uuid(0), Workload(job="1234"), "hpc")
    assert allocation.unmapped == ()


@pytest.mark.parametrize("name", ["gpu0", "0.x", ".0", "0.", "0.7.1", "0~", "-1", "0\n", "٠", "README"])
def test_other_names_are_ignored(source: HpcAllocation, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("1234\n")
    assert source.assignments(NODE) == Allocation()


@pytest.mark.parametrize("name", ["2", "00", "0.7", "1.07", "9" * 100])
def test_jobs_on_unknown_gpus_are_reported(source: HpcAllocation, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("1234\n")
    assert source.assignments(NODE).unmapped == (Unmapped("hpc", "unknown_device", name, "hpc", Workload(job="1234")),)


@pytest.mark.parametrize(
    ("content", "jobs"),
    [
        (b"\n \n\t\n\r\n", []),
        (b" 1 \r\n1\n\n2", ["1", "2"]),
        ('größe="1"\\'.encode(), ['größe="1"\\']),
        (b"\xff\n1", ["\ufffd", "1"]),
    ],
)
def test_lines(content: bytes, jobs: list[str]) -> None:
    assert parse_jobs(content) == jobs


def test_no_directory(tmp_path: Path) -> None:
    missing = HpcAllocation(str(tmp_path / "jobs"))
    error = failure(lambda: missing.assignments(NODE), missing.directory, "--hpc-job-mapping-dir")
    assert error.reason == "file_missing"


def test_unreadable_files_do_not_affect_the_others(folder: Path) -> None:
    source = HpcAllocation(str(folder))
    folder.chmod(0o755)
    os.mkfifo(folder / "0")
    (folder / "1").write_text("1")
    (folder / "1").chmod(0o000)
    (folder / "1.7").write_bytes(b"1\n" * 256 * 1024)
    (folder / "2").symlink_to(folder / "nowhere")
    (folder / "10").write_text("1234")
    with without_privilege():
        allocation = source.assignments(NODE)
    assert jobs(allocation) == [(uuid(2), "1234")]
    assert unmapped(allocation) == [("0", "not_a_file"), ("1", "permission_denied"), ("1.7", "too_large")]
