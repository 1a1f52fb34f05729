"""Tests sources that read podlist.json, the kubelet's checkpoint or job files."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path

import pytest

from podgpu.model import Allocation, Assignment, Device, Unmapped, Workload
from podgpu.node.holders.node_files import (
    CheckpointAllocation,
    HpcAllocation,
    PodlistAllocation,
    parse_checkpoint,
    parse_jobs,
    parse_podlist,
)
from tests.holders.devices import failure, gpu, mig_uuid, uuid
from tests.nodes.clock import PATIENCE, FakeClock
from tests.privilege import mounted_file, without_privilege

FIXTURE = Path(__file__).parent / "podlist.json"
REAL_CHECKPOINT = (
    Path(__file__).parents[1] / "fixtures" / "kubelet-1.36" / "kubelet_internal_checkpoint"
)
# The minors of the last two GPUs differ from their indices, so that a mix-up fails.
NODE = (
    *(
        Device(number, uuid(number), f"00000000:0{number}:00.0", "NVIDIA A100", minor=number)
        for number in range(6)
    ),
    Device(6, uuid(6), "00000000:06:00.0", "NVIDIA A100", minor=7),
    Device(7, uuid(7), "00000000:07:00.0", "NVIDIA A100", minor=6, mig_enabled=True),
    Device(7, uuid(7), "00000000:07:00.0", "NVIDIA A100", 6, True, 11, "1g.5gb", (mig_uuid("a"),)),
    Device(7, uuid(7), "00000000:07:00.0", "NVIDIA A100", 6, True, 12, "1g.5gb", (mig_uuid("b"),)),
)


def entry(name: str, *ids: str, **more: object) -> dict[str, object]:
    return {"name": name, "namespace": "ns", "container": "main", "gpu_list": list(ids), **more}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "podlist.json"


@pytest.fixture
def source(path: Path) -> PodlistAllocation:
    return PodlistAllocation([str(path)])


def read(path: Path, content: object) -> Allocation:
    path.write_text(json.dumps(content))
    return PodlistAllocation([str(path)]).assignments(NODE)


def pods(allocation: Allocation) -> list[tuple[str, str]]:
    return [(one.device, one.holder.pod) for one in allocation.assignments]


def reason(source: PodlistAllocation) -> str:
    return failure(lambda: source.assignments(NODE)).reason


@pytest.mark.parametrize("content", [[], None, [entry("a")], [entry("a", gpu_list=None)]])
def test_nothing_is_held(path: Path, content: object) -> None:
    assert read(path, content) == Allocation()


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("nvidia3", uuid(3)),
        ("6", uuid(7)),
        ("7", uuid(6)),
        (mig_uuid("a"), f"{uuid(7)}/gi11"),
        ("nvidia6/gi12", f"{uuid(7)}/gi12"),
    ],
)
def test_forms_of_ids(path: Path, text: str, key: str) -> None:
    assert pods(read(path, [entry("a", text, text), entry("a", text)])) == [(key, "a")]


@pytest.mark.parametrize("text", ["", "00", "-1", " 1", "1.0", "٣", "1" * 5000, "/dev/nvidia0"])
def test_unrecognised_ids(path: Path, text: str) -> None:
    assert [one.reason for one in read(path, [entry("a", text)]).unmapped] == ["unrecognised_id"]


# The heartbeat of podgpu's hook


def test_a_file_without_a_heartbeat_is_stale(path: Path) -> None:
    """The age after the first reading does not depend on the wall clock."""
    clock = FakeClock()
    source = PodlistAllocation([str(path)], clock.monotonic)
    path.write_text(json.dumps([entry("a", "0", uid="u-1")]))
    os.utime(path, (5e9, 5e9))  # the clock was set back after the hook wrote the file
    expected = [(uuid(0), "a")]
    assert pods(source.assignments(NODE)) == expected
    clock.advance(60.0)
    assert pods(source.assignments(NODE)) == expected
    clock.advance(1.0)
    assert failure(lambda: source.assignments(NODE), "delete the file").reason == "stale"

    for wall_time in (0.0, 4e9):  # the clock of the node is set, and the hook continues
        os.utime(path, (wall_time, wall_time))
        assert pods(source.assignments(NODE)) == expected
        clock.advance(60.0)
        assert pods(source.assignments(NODE)) == expected


@pytest.mark.parametrize(("age", "is_stale"), [(30.0, False), (90.0, True), (-1e6, False)])
def test_the_age_of_a_file_at_the_first_reading(path: Path, age: float, is_stale: bool) -> None:
    path.write_text(json.dumps([entry("a", "0", uid="u-1")]))
    written_at = time.time() - age
    os.utime(path, (written_at, written_at))
    clock = FakeClock()
    source = PodlistAllocation([str(path)], clock.monotonic)
    if is_stale:
        assert reason(source) == "stale"
    else:
        assert len(source.assignments(NODE).assignments) == 1
        clock.advance(61.0)
        assert reason(source) == "stale"


def test_only_files_of_podgpus_hook_have_a_heartbeat(path: Path) -> None:
    path.write_text(json.dumps([entry("a", "0")]))
    os.utime(path, (0, 0))
    source = PodlistAllocation([str(path)])
    assert pods(source.assignments(NODE)) == [(uuid(0), "a")]
    assert pods(source.assignments(NODE)) == [(uuid(0), "a")]


def test_the_uid_of_an_entry_identifies_its_pod(path: Path) -> None:
    (assignment,) = read(path, [entry("a", "0", uid="u-1")]).assignments
    assert assignment.holder == Workload("ns", "a", "main", "u-1")


# Changing files


def test_changes_are_read_immediately(path: Path, source: PodlistAllocation) -> None:
    """Some changes keep the size of the file, and its time within the resolution of the kernel's
    clock.
    """
    for number in range(10, 18):
        new = path.with_suffix(".new") if number % 2 else path
        new.write_text(json.dumps([entry(f"pod-{number}", "0")]))
        os.replace(new, path)
        assert pods(source.assignments(NODE)) == [(uuid(0), f"pod-{number}")]
    path.write_text("[")
    assert reason(source) == "malformed"
    path.unlink()
    assert reason(source) == "file_missing"


def test_the_first_default_path_that_exists(tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "podlist.json", tmp_path / "podlist.json"
    source = PodlistAllocation((str(first), str(second)))
    assert failure(lambda: source.assignments(NODE), str(first)).reason == "file_missing"
    second.write_text(json.dumps([entry("second", "0")]))
    assert pods(source.assignments(NODE)) == [(uuid(0), "second")]
    first.parent.mkdir()
    first.write_text(json.dumps([entry("first", "0")]))
    assert pods(source.assignments(NODE)) == [(uuid(0), "first")]


def test_large_files_and_other_kinds_of_files(path: Path, source: PodlistAllocation) -> None:
    path.touch()
    os.truncate(path, 10 * 1024**3)
    assert reason(source) == "too_large"
    path.unlink()
    path.mkdir()
    assert reason(source) == "not_a_file"
    path.rmdir()
    path.symlink_to(path)
    assert reason(source) == "unreadable"
    path.unlink()
    os.mkfifo(path)
    reasons: list[str] = []
    reading = threading.Thread(target=lambda: reasons.append(reason(source)), daemon=True)
    reading.start()
    reading.join(PATIENCE)  # an implementation that opens the pipe would block
    assert reasons == ["not_a_file"]


def test_missing_permissions(folder: Path) -> None:
    folder.chmod(0o755)
    path = folder / "podlist.json"
    path.write_text("[]")
    path.chmod(0o000)
    with without_privilege():
        source = PodlistAllocation((str(path), "/nowhere"))
        assert failure(lambda: source.assignments(NODE), "runAsUser").reason == "permission_denied"


def test_a_mounted_file_is_read_with_one_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "podlist.json"
    with mounted_file(path):
        source = PodlistAllocation([str(path)])
        for name in ("a", "b"):
            path.write_text(json.dumps([entry(name, "0")]))
            assert pods(source.assignments(NODE)) == [(uuid(0), name)]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


# The kubelet's checkpoint


CHECKPOINT_NODE = (
    *(gpu(number) for number in range(8)),
    Device(7, uuid(7), "00000000:07:00.0", "NVIDIA A100", 7, True, 12, "1g.5gb", (mig_uuid("b"),)),
)


def pod_entry(uid: str, ids: object, resource: str = "nvidia.com/gpu") -> dict[str, object]:
    return {
        "PodUID": uid,
        "ContainerName": "main",
        "ResourceName": resource,
        "DeviceIDs": ids,
        "AllocResp": "Cg==",
    }


def checkpoint(entries: object, registered: object = None) -> bytes:
    content = {
        "Data": {"PodDeviceEntries": entries, "RegisteredDevices": registered},
        "Checksum": 1,
    }
    return json.dumps(content).encode()


def read_checkpoint(path: Path, content: bytes) -> Allocation:
    path.write_bytes(content)
    return CheckpointAllocation(str(path)).assignments(CHECKPOINT_NODE)


def test_the_real_checkpoint() -> None:
    allocation = CheckpointAllocation(str(REAL_CHECKPOINT)).assignments(CHECKPOINT_NODE)
    assert [
        (one.device, one.holder.uid[:4], one.replica, one.share) for one in allocation.assignments
    ] == [
        (uuid(0), "e14e", "", 1.0),
        (uuid(1), "bcfd", "", 1.0),
        (uuid(4), "bcfd", "", 1.0),
        (uuid(5), "e14e", "", 1.0),
        (uuid(6), "42f8", "1", 1 / 3),
        (uuid(6), "b93d", "0", 1 / 3),
        (f"{uuid(7)}/gi12", "7854", "", 1.0),
    ]
    assert allocation.unmapped == ()
    holder = Workload(container="sidecar", uid="bcfd1eab25dc5a2c101abd9532272891")
    assert allocation.assignments[1] == Assignment(uuid(1), holder, "checkpoint", share=1.0)


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param({"-1": [uuid(1), uuid(0)]}, id="no NUMA nodes"),
        pytest.param({"0": [uuid(0), uuid(1)], "1": [uuid(0), uuid(1)]}, id="on both NUMA nodes"),
        pytest.param({"0": [uuid(0), uuid(1)], "1": None}, id="nothing on one"),
    ],
)
def test_device_ids_by_numa_node(path: Path, ids: object) -> None:
    allocation = read_checkpoint(path, checkpoint([pod_entry("a", ids)]))
    assert [(one.device, one.share) for one in allocation.assignments] == [
        (uuid(0), 1.0),
        (uuid(1), 1.0),
    ]


# Job files


# Job files are named by index. Minors differ here, so that a mix-up fails.
JOB_NODE = (
    Device(0, uuid(0), "00000000:01:00.0", "NVIDIA H200", minor=1),
    Device(1, uuid(1), "00000000:02:00.0", "NVIDIA H200", minor=0, mig_enabled=True),
    Device(1, uuid(1), "00000000:02:00.0", "NVIDIA H200", 0, True, 7, "1g.18gb"),
    Device(10, uuid(2), "00000000:03:00.0", "NVIDIA H200", minor=10),
)


@pytest.fixture
def job_source(tmp_path: Path) -> HpcAllocation:
    return HpcAllocation(str(tmp_path))


def jobs(allocation: Allocation) -> list[tuple[str, str]]:
    return [(one.device, one.holder.job) for one in allocation.assignments]


def unmapped(allocation: Allocation) -> list[tuple[str, str]]:
    return [(one.device_id, one.reason) for one in allocation.unmapped]


def test_job_files_by_index_and_instance(job_source: HpcAllocation, tmp_path: Path) -> None:
    assert job_source.assignments(JOB_NODE) == Allocation()
    for name, text in {"0": "1234\n", "1": "77\n1234", "1.7": "88\n", "10": ""}.items():
        (tmp_path / name).write_text(text)
    allocation = job_source.assignments(JOB_NODE)
    assert jobs(allocation) == [
        (uuid(0), "1234"),
        (uuid(1), "1234"),
        (uuid(1), "77"),
        (f"{uuid(1)}/gi7", "88"),
    ]
    assert allocation.assignments[0] == Assignment(uuid(0), Workload(job="1234"), "hpc")
    assert allocation.unmapped == ()


@pytest.mark.parametrize(
    "name", ["gpu0", "0.x", ".0", "0.", "0.7.1", "0~", "-1", "0\n", "٠", "README"]
)
def test_other_names_are_ignored(job_source: HpcAllocation, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("1234\n")
    assert job_source.assignments(JOB_NODE) == Allocation()


@pytest.mark.parametrize("name", ["2", "00", "0.7", "1.07", "9" * 100])
def test_jobs_on_unknown_gpus_are_reported(
    job_source: HpcAllocation, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("1234\n")
    assert job_source.assignments(JOB_NODE).unmapped == (
        Unmapped("hpc", "unknown_device", name, "hpc", Workload(job="1234")),
    )


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
    error = failure(lambda: missing.assignments(JOB_NODE), missing.directory)
    assert error.reason == "file_missing"


def test_unreadable_files_do_not_affect_the_others(folder: Path) -> None:
    job_source = HpcAllocation(str(folder))
    folder.chmod(0o755)
    os.mkfifo(folder / "0")
    (folder / "1").write_text("1")
    (folder / "1").chmod(0o000)
    (folder / "1.7").write_bytes(b"1\n" * 256 * 1024)
    (folder / "2").symlink_to(folder / "nowhere")
    (folder / "10").write_text("1234")
    with without_privilege():
        allocation = job_source.assignments(JOB_NODE)
    assert jobs(allocation) == [(uuid(2), "1234")]
    assert unmapped(allocation) == [
        ("0", "not_a_file"),
        ("1", "permission_denied"),
        ("1.7", "too_large"),
    ]


# Malformed files


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"", "it is empty"),
        (FIXTURE.read_bytes()[:-3], "truncated"),
        (b"[" * 100_000, ""),
        (json.dumps([entry("a", namespace="")]).encode(), "[0].namespace"),
        (json.dumps([entry("a", gpu_list=[0])]).encode(), "[0].gpu_list[0]"),
    ],
)
def test_malformed_podlists(content: bytes, place: str) -> None:
    assert (
        failure(lambda: parse_podlist(content, "/x/podlist.json"), "/x/podlist.json", place).reason
        == "malformed"
    )


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (REAL_CHECKPOINT.read_bytes()[:-1], "truncated"),
        (checkpoint([pod_entry("", [])]), "Data.PodDeviceEntries[0].PodUID"),
        (checkpoint([pod_entry("a", {"0": [1]})]), "DeviceIDs"),
    ],
)
def test_malformed_checkpoints(content: bytes, place: str) -> None:
    assert (
        failure(
            lambda: parse_checkpoint(content, "/x/checkpoint", frozenset()), "/x/checkpoint", place
        ).reason
        == "malformed"
    )
