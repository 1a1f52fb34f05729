"""podlist.json, and how podgpu reads files that change."""

from __future__ import annotations

import json
import logging
import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.errors import SourceError
from podgpu.holders.node_files import PodlistAllocation, parse_podlist
from podgpu.model import Allocation, Device
from tests.holders.devices import failure, mig_uuid, uuid
from tests.nodes.clock import PATIENCE
from tests.privilege import mounted_file, without_privilege

FIXTURE = Path(__file__).parent / "podlist.json"
# The minors of the last two GPUs differ from their indices.
NODE = (
    *(Device(number, uuid(number), f"00000000:0{number}:00.0", "NVIDIA A100", minor=number) for number in range(6)),
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


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"", "it is empty"),
        (FIXTURE.read_bytes()[:-3], "truncated"),
        (b"\xff\xfe[]", "byte 0"),
        (b"[" * 100_000, ""),
        (json.dumps([entry("a"), 3]).encode(), "[1]"),
        (json.dumps([entry("a", namespace="")]).encode(), "[0].namespace"),
        (json.dumps([entry("a", gpu_list=[0])]).encode(), "[0].gpu_list[0]"),
        (json.dumps([entry("\ud800")]).encode(), ""),
    ],
)
def test_malformed_files(content: bytes, place: str) -> None:
    assert failure(lambda: parse_podlist(content, "/x/podlist.json"), "/x/podlist.json", place).reason == "malformed"


keys = st.sampled_from(["name", "namespace", "container", "gpu_list", "x"])
any_json = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=5),
    max_leaves=12,
)


@given(st.binary(max_size=100) | any_json.map(lambda content: json.dumps(content).encode()))
def test_any_bytes_are_read_or_malformed(content: bytes) -> None:
    with suppress(SourceError):
        repr(parse_podlist(content)).encode()


# Changing files


def test_changes_are_read_immediately(path: Path, source: PodlistAllocation) -> None:
    """Some changes are within one tick of the kernel's clock and have equal sizes."""
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
    assert failure(lambda: source.assignments(NODE), str(first), str(second)).reason == "file_missing"
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
    reading.join(PATIENCE)  # opening a pipe without a writer would block
    assert reasons == ["not_a_file"]


def test_missing_permissions(folder: Path) -> None:
    folder.chmod(0o755)
    path = folder / "podlist.json"
    path.write_text("[]")
    path.chmod(0o000)
    with without_privilege():
        assert reason(PodlistAllocation([str(path)])) == "permission_denied"
    folder.chmod(0o000)
    try:
        with without_privilege():
            source = PodlistAllocation((str(path), "/nowhere"))
            assert failure(lambda: source.assignments(NODE), "runAsUser").reason == "permission_denied"
    finally:
        folder.chmod(0o700)


def test_a_mounted_file_is_read_with_one_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = folder / "podlist.json"
    with mounted_file(path):
        source = PodlistAllocation([str(path)])
        for name in ("a", "b"):
            path.write_text(json.dumps([entry(name, "0")]))
            assert pods(source.assignments(NODE)) == [(uuid(0), name)]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
