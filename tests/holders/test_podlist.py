"""koordinator's podlist.json as a source, the reading of files on the way, and mounts that hide a new file."""

from __future__ import annotations

import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.errors import SourceError
from podgpu.files import SETTLED_NS, ReadOnChange, read_bounded
from podgpu.holders.podlist import (
    MOST_BYTES,
    PodlistAllocation,
    find_podlist,
    is_mount_point,
    map_podlist,
    parse_mount_points,
    parse_podlist,
)
from podgpu.holders.source import AllocationSource
from podgpu.model import Allocation, Assignment, Device, Unmapped, Workload
from tests.holders.devices import failure, uuid
from tests.nodes.clock import PATIENCE
from tests.privilege import without_privilege

FIXTURE = Path(__file__).parent / "podlist.json"


MIG_A, MIG_B = (f"MIG-{letter * 8}-1111-2222-3333-444444444444" for letter in "ab")
# Minors run against the index, as they may.
NODE = (
    *(Device(number, uuid(number), f"00000000:0{number}:00.0", "NVIDIA A100", minor=number) for number in range(6)),
    Device(6, uuid(6), "00000000:06:00.0", "NVIDIA A100", minor=7),
    Device(7, uuid(7), "00000000:07:00.0", "NVIDIA A100", minor=6, mig_enabled=True),
    Device(7, uuid(7), "00000000:07:00.0", "NVIDIA A100", 6, True, 11, "1g.5gb", (MIG_A,)),
    Device(7, uuid(7), "00000000:07:00.0", "NVIDIA A100", 6, True, 12, "1g.5gb", (MIG_B,)),
)


def entry(name: str, *ids: str, **more: object) -> dict[str, object]:
    return {"name": name, "namespace": "ns", "container": "main", "gpu_list": list(ids), **more}


def holder(name: str) -> Workload:
    return Workload("ns", name, "main")


def read(content: object) -> Allocation:
    return map_podlist(parse_podlist(json.dumps(content).encode()), NODE)


def pods_by_device(allocation: Allocation) -> list[tuple[str, str]]:
    return [(one.device, one.holder.pod) for one in allocation.assignments]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "podlist.json"


@pytest.fixture
def source(path: Path) -> PodlistAllocation:
    return PodlistAllocation(str(path))


def failed_reading(source: PodlistAllocation) -> SourceError:
    return failure(lambda: source.assignments(NODE), str(source.path))


# What it says


def test_it_is_an_allocation_source(source: PodlistAllocation) -> None:
    as_one: AllocationSource = source
    assert as_one.name == "podlist"
    source.close()
    source.close()


def test_a_file_as_koordinators_hook_writes_it() -> None:
    allocation = PodlistAllocation(str(FIXTURE)).assignments(NODE)
    assert allocation.assignments == (
        Assignment(uuid(0), Workload("research", "train-0", "main"), "podlist"),
        Assignment(uuid(1), Workload("research", "train-0", "main"), "podlist"),
        Assignment(uuid(2), Workload("serving", "serve-5d9f", "main"), "podlist"),
        Assignment(uuid(2), Workload("serving", "serve-7c2a", "main"), "podlist"),
        Assignment(f"{uuid(7)}/gi12", Workload("research", "slice-a", "main"), "podlist"),
    )
    moved = Workload("default", "moved-away", "main")
    assert allocation.unmapped == (
        Unmapped("podlist", "unknown_device", "9", "podlist", moved),
        Unmapped("podlist", "unrecognised_id", "card-one", "podlist", moved),
    )


@pytest.mark.parametrize("content", [[], None, [entry("a")], [entry("a", gpu_list=None)]])
def test_nobody_holds_anything(content: object) -> None:
    assert read(content) == Allocation()


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (uuid(3), uuid(3)),
        (uuid(3).lower(), uuid(3)),
        ("3", uuid(3)),
        ("nvidia3", uuid(3)),
        ("6", uuid(7)),
        ("7", uuid(6)),
        (MIG_A, f"{uuid(7)}/gi11"),
        ("nvidia6/gi12", f"{uuid(7)}/gi12"),
        (f"MIG-{uuid(7)}/12/0", f"{uuid(7)}/gi12"),
    ],
)
def test_forms_of_ids(text: str, key: str) -> None:
    assert read([entry("a", text)]) == Allocation((Assignment(key, holder("a"), "podlist"),))


@pytest.mark.parametrize("text", ["", "00", "-1", "+1", " 1", "1 ", "1.0", "٣", "³", "0x1", "1" * 5000, "/dev/nvidia0"])
def test_what_is_no_id_is_reported(text: str) -> None:
    assert read([entry("a", text)]) == Allocation(
        (), (Unmapped("podlist", "unrecognised_id", text, "podlist", holder("a")),)
    )


def test_a_replica_is_kept_and_duplicates_collapse() -> None:
    ids = [f"{uuid(0)}::10", f"{uuid(0)}::9", f"{uuid(0)}::9"]
    allocation = read([entry("a", *ids), entry("a", *ids, uuid(9), uuid(9))])
    assert allocation.assignments == (Assignment(uuid(0), holder("a"), "podlist", replica="9"),)
    assert len(allocation.unmapped) == 1


def test_keys_not_known_are_passed_over_and_the_container_may_be_empty() -> None:
    assert read([entry("a", "0", container="", phase={"x": [1]})]).assignments[0].holder == Workload("ns", "a", "")


# What it does not understand


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"", "it is empty"),
        (b"\n", "line 2 column 1"),
        (b"[", "line 1 column 2"),
        (b'[\n{"name": "a",\n "gpu_', "line 3 column 2"),
        (FIXTURE.read_bytes()[:-3], "line 7 column 101"),
        (b"[] []", "column 4"),
        (b"\xff\xfe[]", "position 0"),
        (b"\xef\xbb\xbf[]", "BOM"),
        (b"[" * 100_000, "recursion"),
        (b"[" + b"1" * 5000 + b"]", "4300"),
        (b"{}", "the whole is not a list"),
        (b'"a"', "the whole is not a list"),
        (b"NaN", "the whole is not a list"),
        (json.dumps([entry("a"), 3]).encode(), "entry 2 is not an object"),
        (json.dumps([entry("a"), None]).encode(), "entry 2 is not an object"),
        (json.dumps([{"name": "a", "namespace": "b", "container": "c"}]).encode(), "entry 1: there is no gpu_list"),
        (json.dumps([{"name": "a", "namespace": "b", "gpu_list": []}]).encode(), "entry 1: container is not a text"),
        (json.dumps([entry("a", namespace=None)]).encode(), "entry 1: namespace is not a text"),
        (json.dumps([entry("a", namespace="")]).encode(), "entry 1: namespace or name is empty"),
        (json.dumps([entry("")]).encode(), "entry 1: namespace or name is empty"),
        (json.dumps([entry("a", gpu_list="0")]).encode(), "entry 1: gpu_list is not a list"),
        (json.dumps([entry("a", gpu_list={"0": 1})]).encode(), "entry 1: gpu_list is not a list"),
        (json.dumps([entry("a", gpu_list=[0])]).encode(), "entry 1: an id in gpu_list is not a text"),
        (json.dumps([entry("\ud800")]).encode(), "entry 1: name has half a surrogate pair"),
    ],
)
def test_what_cannot_be_understood_is_no_reading_and_names_the_place(content: bytes, place: str) -> None:
    assert failure(lambda: parse_podlist(content, "/x/podlist.json"), "/x/podlist.json", place).reason == "malformed"


any_json = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "namespace", "container", "gpu_list", "x"]), inner, max_size=5)
    ),
    max_leaves=12,
)


def reasons(content: bytes) -> set[str]:
    """Read it if it can be read; why it cannot otherwise."""
    try:
        allocation = map_podlist(parse_podlist(content), NODE)
    except SourceError as error:
        return {error.reason, *(["several lines"] if "\n" in str(error) else [])}
    repr(allocation).encode()
    return set()


@given(st.binary(max_size=100))
def test_any_bytes_are_a_reading_or_malformed(content: bytes) -> None:
    assert reasons(content) <= {"malformed"}


@given(any_json)
def test_any_json_is_a_reading_or_malformed(content: object) -> None:
    assert reasons(json.dumps(content).encode()) <= {"malformed"}


@given(st.integers(0, FIXTURE.stat().st_size - 3))
def test_a_file_cut_short_is_malformed(length: int) -> None:
    assert reasons(FIXTURE.read_bytes()[:length]) == {"malformed"}


ids = st.sampled_from(["0", "1", "6", "9", uuid(0), uuid(6) + "::2", uuid(6) + "::10", MIG_A, "all", "x", ""])
entries = st.builds(lambda name, gpus: entry(name, *gpus), st.sampled_from("abc"), st.lists(ids, max_size=4))


@given(st.lists(entries, max_size=10), st.randoms(use_true_random=False))
def test_order_does_not_matter(content: list[dict[str, Any]], chance: random.Random) -> None:
    shuffled = [{**one, "gpu_list": chance.sample(one["gpu_list"], len(one["gpu_list"]))} for one in content]
    chance.shuffle(shuffled)
    nodes = chance.sample(NODE, len(NODE))
    assert map_podlist(parse_podlist(json.dumps(shuffled).encode()), nodes) == read(content)


# The file as it changes


def write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


def replace(path: Path, content: object) -> None:
    write(path.with_suffix(".new"), content)
    os.replace(path.with_suffix(".new"), path)


def test_a_replaced_file_is_seen_at_once(path: Path, source: PodlistAllocation) -> None:
    for number in range(20):
        replace(path, [entry(f"pod-{number}", "0")])
        assert pods_by_device(source.assignments(NODE)) == [(uuid(0), f"pod-{number}")]


def test_a_file_written_over_with_as_many_bytes_is_seen_at_once(path: Path, source: PodlistAllocation) -> None:
    """Within one tick of the kernel's clock nothing about the file tells."""
    for number in range(10, 99):
        write(path, [entry(f"pod-{number}", "0")])
        assert pods_by_device(source.assignments(NODE)) == [(uuid(0), f"pod-{number}")]


def test_a_truncated_rewrite_is_malformed_until_it_is_whole(path: Path, source: PodlistAllocation) -> None:
    write(path, [entry("a", "0")])
    source.assignments(NODE)
    whole = json.dumps([entry("b", "0")])
    for length in (0, 1, 20, len(whole) - 1):
        path.write_text(whole[:length])
        for _ in range(2):
            assert failed_reading(source).reason == "malformed"
    path.write_text(whole)
    assert pods_by_device(source.assignments(NODE)) == [(uuid(0), "b")]


def test_a_file_that_goes_and_comes(path: Path, source: PodlistAllocation) -> None:
    assert failed_reading(source).reason == "file_missing"
    write(path, [])
    assert source.assignments(NODE) == Allocation()
    path.unlink()
    assert failed_reading(source).reason == "file_missing"


def test_other_devices_are_mapped_anew(path: Path, source: PodlistAllocation) -> None:
    write(path, [entry("a", "0", "1")])
    assert len(source.assignments(NODE[:1]).unmapped) == 1
    assert len(source.assignments(NODE[:2]).assignments) == 2


def test_the_first_default_path_that_is_there(tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "podlist.json", tmp_path / "podlist.json"
    paths = (str(first), str(second))
    error = failure(lambda: find_podlist(paths), *paths, "koordinator")
    assert error.reason == "file_missing"
    second.touch()
    assert find_podlist(paths) == str(second)
    first.parent.mkdir()
    first.touch()
    assert find_podlist(paths) == str(first)


# Reading


def settled_clock() -> int:
    return time.time_ns() + SETTLED_NS


def decode(content: bytes, path: str) -> list[str]:
    return [content.decode()]


def test_an_unchanged_file_is_parsed_once(path: Path) -> None:
    path.write_text("one")
    file = ReadOnChange(decode, 100, clock=settled_clock)
    first = file.read(str(path))
    assert file.read(str(path)) is first
    path.write_text("other")
    assert file.read(str(path)) == ["other"]


def test_a_file_that_changed_a_moment_ago_is_not_trusted_to_be_the_same(path: Path) -> None:
    path.write_text("one")
    file = ReadOnChange(decode, 100)
    assert file.read(str(path)) is not file.read(str(path))


def test_another_path_is_another_file(path: Path) -> None:
    other = path.with_name("other")
    path.write_text("one")
    os.link(path, other)
    seen = ReadOnChange(lambda content, name: name, 100, clock=settled_clock)
    assert (seen.read(str(path)), seen.read(str(other))) == (str(path), str(other))


def changing(path: Path, times: int) -> Callable[[str, int], bytes]:
    left = iter(range(times))

    def read_and_append(name: str, limit: int) -> bytes:
        content = read_bounded(name, limit)
        if next(left, None) is not None:
            with path.open("a") as file:
                file.write("+")
        return content

    return read_and_append


def test_a_file_that_changes_while_it_is_read_is_read_again(path: Path) -> None:
    path.write_text("one")
    assert ReadOnChange(decode, 100, changing(path, times=2)).read(str(path)) == ["one++"]


def test_a_file_that_does_not_stop_changing_is_no_reading(path: Path) -> None:
    path.write_text("one")
    file = ReadOnChange(decode, 100, changing(path, times=3))
    assert failure(lambda: file.read(str(path)), str(path), "rename").reason == "being_written"
    assert file.read(str(path)) == ["one+++"]


def test_a_file_replaced_while_it_is_read_is_read_again(path: Path) -> None:
    path.write_text("old")
    path.with_name("new").write_text("new")

    def read_then_replace(name: str, limit: int) -> bytes:
        content = read_bounded(name, limit)
        if path.with_name("new").exists():
            os.replace(path.with_name("new"), path)
        return content

    assert ReadOnChange(decode, 100, read_then_replace).read(str(path)) == ["new"]


def test_the_limit(path: Path) -> None:
    path.write_bytes(b"x" * 10)
    assert read_bounded(str(path), 10) == b"x" * 10
    assert failure(lambda: read_bounded(str(path), 9), str(path), "9 bytes").reason == "too_large"


def test_a_file_of_many_gigabytes_is_not_read(path: Path, source: PodlistAllocation) -> None:
    path.touch()
    os.truncate(path, 10 * 1024**3)
    assert failed_reading(source).reason == "too_large"
    assert MOST_BYTES < 100 * 1024**2


def test_a_pipe_does_not_block(path: Path, source: PodlistAllocation) -> None:
    os.mkfifo(path)
    reasons: list[str] = []
    reading = threading.Thread(target=lambda: reasons.append(failed_reading(source).reason), daemon=True)
    reading.start()
    reading.join(PATIENCE)  # who waits for a writer waits for ever
    assert reasons == ["not_a_file"]


def test_other_things_that_are_no_files(path: Path, source: PodlistAllocation) -> None:
    path.mkdir()
    error = failed_reading(source)
    assert error.reason == "not_a_file"
    assert "a directory" in str(error)
    assert failure(lambda: read_bounded("/dev/zero", 100)).reason == "not_a_file"


def test_a_file_where_a_directory_should_be(path: Path) -> None:
    path.touch()
    assert failed_reading(PodlistAllocation(str(path / "podlist.json"))).reason == "file_missing"


def test_paths_nothing_can_be_at(path: Path, source: PodlistAllocation) -> None:
    path.symlink_to(path)
    assert failed_reading(source).reason == "unreadable"
    assert failure(lambda: read_bounded("a\0b", 1)).reason == "unreadable"
    assert failure(lambda: PodlistAllocation("a\0b").assignments(NODE)).reason == "unreadable"


def test_a_file_nobody_may_read(folder: Path) -> None:
    folder.chmod(0o755)
    path = folder / "podlist.json"
    write(path, [])
    path.chmod(0o000)
    with without_privilege():
        error = failed_reading(PodlistAllocation(str(path)))
    assert error.reason == "permission_denied"
    assert "runAsUser" in str(error)


def test_a_directory_nobody_may_enter_is_not_a_missing_file(folder: Path) -> None:
    path = folder / "podlist.json"
    write(path, [])
    folder.chmod(0o000)
    try:
        with without_privilege():
            assert failed_reading(PodlistAllocation(str(path))).reason == "permission_denied"
            assert find_podlist([str(path), "/nowhere"]) == str(path)
    finally:
        folder.chmod(0o700)


# Mounts

MOUNTINFO = rb"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
36 22 8:1 /var/lib/kubelet/pod-resources/podlist.json /podlist.json ro master:1 - ext4 /dev/sda1 rw
37 22 0:44 / /with\040blank\134and\011tab rw - tmpfs tmpfs rw
short line
"""


def test_mount_points() -> None:
    assert parse_mount_points(MOUNTINFO) == {b"/", b"/podlist.json", b"/with blank\\and\ttab"}


@given(st.sets(st.binary(min_size=1, max_size=10).filter(lambda path: b"\0" not in path), max_size=5))
def test_any_path_comes_back_from_its_escapes(paths: set[bytes]) -> None:
    def escape(path: bytes) -> bytes:
        return b"".join(rb"\%03o" % byte if byte in b" \t\n\\#" else bytes((byte,)) for byte in path)

    lines = (b"1 2 0:1 / " + escape(path) + b" rw - tmpfs tmpfs rw\n" for path in paths)
    assert parse_mount_points(b"".join(lines)) == paths


@given(st.binary(max_size=100))
def test_any_bytes_can_be_looked_at_for_mounts(content: bytes) -> None:
    assert all(isinstance(path, bytes) for path in parse_mount_points(content))


def test_the_real_mountinfo() -> None:
    assert is_mount_point("/proc", "/proc/self/mountinfo")
    assert not is_mount_point(__file__, "/proc/self/mountinfo")


def mountinfo_of(path: Path, folder: Path) -> str:
    mountinfo = folder / "mountinfo"
    mountinfo.write_text(f"36 22 8:1 /podlist.json {path} ro - ext4 /dev/sda1 rw\n")
    return str(mountinfo)


def test_a_mounted_file_is_read_and_warned_about_once(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(path)
    source = PodlistAllocation(str(link), mountinfo_of(path, tmp_path))
    failed_reading(source)
    assert caplog.records == []
    for name in ("a", "b"):
        write(path, [entry(name, "0")])
        assert pods_by_device(source.assignments(NODE)) == [(uuid(0), name)]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "mount the directory" in caplog.text


def test_no_warning_where_nothing_is_mounted_or_nobody_can_tell(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(path, [])
    for mountinfo in (mountinfo_of(tmp_path, tmp_path), "/nowhere", str(tmp_path)):
        PodlistAllocation(str(path), mountinfo).assignments(NODE)
    assert caplog.records == []
