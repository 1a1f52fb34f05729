"""Files that are read up to a limit, cached until they change, and written atomically."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from podgpu.errors import SourceError, UsageError
from podgpu.files import (
    AtomicFile,
    OutputError,
    ReadOnChange,
    identify_file,
    read_bounded,
    read_settled,
)
from tests.privilege import without_privilege

HOUR_NS = 3_600 * 10**9


def test_written_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "gpu.prom"
    AtomicFile(str(path)).write(b"a 1\n")
    assert path.read_bytes() == b"a 1\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    AtomicFile(str(path), mode=0o600).write(b"a 2\n")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"a 2\n", 0o600)
    assert os.listdir(tmp_path) == ["gpu.prom"]


def test_refused_paths(tmp_path: Path) -> None:
    (tmp_path / "link.prom").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "pipe.prom")
    for name in (".", "link.prom", "pipe.prom"):
        with pytest.raises(UsageError) as raised:
            AtomicFile(str(tmp_path / name))
        text = "is a symbolic link or not a regular file; set the path of a file"
        assert str(raised.value) == f"--out {tmp_path / name}: {text}"
    with pytest.raises(UsageError) as raised:
        AtomicFile(str(tmp_path / "missing/gpu.prom"), option="--in-place")
    assert str(raised.value) == (
        f"--in-place {tmp_path}/missing/gpu.prom: "
        f"the directory {tmp_path}/missing does not exist; create or mount it"
    )


def test_a_directory_that_cannot_be_searched(folder: Path) -> None:
    """Methods of pathlib would end the program with a traceback."""
    folder.chmod(0o700)
    with without_privilege():
        file = AtomicFile(str(folder / "gpu.prom"))
        with pytest.raises(OutputError, match=r"gpu.prom was not written \(Permission denied\)"):
            file.write(b"a 1\n")


def test_later_symbolic_link_is_replaced(tmp_path: Path) -> None:
    file = AtomicFile(str(tmp_path / "gpu.prom"))
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    file.path.symlink_to(victim)
    file.write(b"a 1\n")
    assert victim.read_bytes() == b"mine"
    assert not file.path.is_symlink()


def test_the_time_of_a_file(tmp_path: Path) -> None:
    file = AtomicFile(str(tmp_path / "podlist.json"))
    file.write(b"{}")
    os.utime(file.path, ns=(HOUR_NS, HOUR_NS))
    file.touch()
    assert file.path.stat().st_mtime_ns > HOUR_NS
    assert file.path.read_bytes() == b"{}"


def test_a_file_that_cannot_be_written_or_removed(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    file = AtomicFile(str(folder / "gpu.prom"))
    # A killed process left its temporary file.
    (folder / ".gpu.prom.podgpu-tmp").write_bytes(b"half")
    file.write(b"a 1\n")
    assert os.listdir(folder) == ["gpu.prom"]
    file.remove()
    file.remove()
    assert os.listdir(folder) == []

    with pytest.raises(OutputError) as raised:
        file.touch()
    text = "was not updated (No such file or directory): check the permissions of its directory"
    assert str(raised.value) == f"the time of {file.path} {text}"

    file.path.mkdir()
    with pytest.raises(OutputError) as raised:
        file.write(b"a 2\n")
    text = "was not written (Is a directory); the previous file is unchanged"
    assert (str(raised.value), raised.value.reason) == (f"{file.path} {text}", "not_written")
    assert os.listdir(folder) == ["gpu.prom"]
    with pytest.raises(OutputError) as raised:
        file.remove()
    text = "was not removed (Is a directory): check the permissions of its directory"
    assert str(raised.value) == f"{file.path} {text}"


# Reading


def refused(read: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(SourceError) as raised:
        read()
    return raised.value.reason, str(raised.value)


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "counters.csv"
    path.write_bytes(b"12345")
    assert read_bounded(str(path), 5) == b"12345"
    assert refused(lambda: read_bounded(str(path), 4)) == (
        "too_large",
        f"{path} is larger than the limit of 4 bytes: is it the right file?",
    )


def test_a_file_without_a_size_is_read_up_to_its_limit() -> None:
    """The kernel reports the size 0 for files in /proc."""
    path = "/proc/self/status"
    content = read_bounded(path, 1_000_000)
    assert b"Name:" in content
    assert identify_file(path).size == 0
    text = f"{path} is larger than the limit of 5 bytes: is it the right file?"
    assert refused(lambda: read_bounded(path, 5)) == ("too_large", text)


def test_the_identity_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    os.utime(path, ns=(1, HOUR_NS))
    status = path.stat()
    assert identify_file(str(path)) == (
        status.st_dev,
        status.st_ino,
        HOUR_NS,
        5,
        status.st_ctime_ns,
    )


def test_what_is_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("x")
    advice = (
        "is a directory or a device: set the path of the file itself, and mount its directory "
        "(mounting a file that does not exist yet creates a directory with its name)"
    )
    for name in ("", "pipe"):
        path = os.path.join(tmp_path, name)
        assert refused(lambda path=path: read_bounded(path, 10)) == (  # type: ignore[misc]
            "not_a_file",
            f"{path} {advice}",
        )
    missing = (
        "does not exist: mount the host's directory that contains it, "
        "or set the path where it is mounted"
    )
    for name in ("missing", "text/inside"):
        path = f"{tmp_path}/{name}"
        assert refused(lambda path=path: identify_file(path)) == (  # type: ignore[misc]
            "file_missing",
            f"{path} {missing}",
        )
    assert refused(lambda: identify_file("a\0b")) == (
        "unreadable",
        "cannot read a\0b (the path contains a null byte): check the path and its disk",
    )
    long = f"{tmp_path}/{'n' * 300}"
    assert refused(lambda: identify_file(long)) == (
        "unreadable",
        f"cannot read {long} (File name too long): check the path and its disk",
    )


def test_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    path.write_text("x")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    # Tests may run as root, whom the kernel does not refuse.
    monkeypatch.setattr("os.open", refuse)
    reason, text = refused(lambda: read_bounded(str(path), 10))
    assert reason == "permission_denied"
    assert text == (
        f"no permission to read {path}: set securityContext.runAsUser to a user with permission, "
        "usually 0 (no capability is needed)"
    )


class Parser:
    def __init__(self) -> None:
        self.parsed: list[tuple[bytes, str]] = []

    def __call__(self, content: bytes, path: str) -> int:
        self.parsed.append((content, path))
        return len(self.parsed)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "podlist.json"
    path.write_bytes(b"one")
    return path


def test_a_file_is_parsed_again_when_it_changes(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = identify_file(str(file)).changed_ns + HOUR_NS
    monkeypatch.setattr("time.time_ns", lambda: now)
    parser = Parser()
    reader = ReadOnChange(parser, 10)
    assert [reader.read(str(file)) for _ in range(3)] == [1, 1, 1]
    file.write_bytes(b"two")
    monkeypatch.setattr("time.time_ns", lambda: identify_file(str(file)).changed_ns + HOUR_NS)
    assert [reader.read(str(file)) for _ in range(2)] == [2, 2]
    assert parser.parsed == [(b"one", str(file)), (b"two", str(file))]
    file.write_bytes(b"much too long")
    assert refused(lambda: reader.read(str(file)))[0] == "too_large"


@pytest.mark.parametrize(("age_ns", "parsed"), [(0, 3), (1_999_999_999, 3), (2_000_000_000, 1)])
def test_a_new_file_is_not_cached(
    age_ns: int, parsed: int, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second change within a tick of the file system's clock would be missed."""
    now = identify_file(str(file)).changed_ns + age_ns
    monkeypatch.setattr("time.time_ns", lambda: now)
    parser = Parser()
    reader = ReadOnChange(parser, 10)
    for _ in range(3):
        reader.read(str(file))
    assert len(parser.parsed) == parsed


def test_a_file_that_changes_while_it_is_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program appends to the file after it was opened."""
    really_open = os.open

    def open_and_append(*arguments: int, **options: int) -> int:
        number = really_open(*arguments, **options)  # type: ignore[arg-type]
        with file.open("ab") as stream:
            stream.write(b"+")
        return number

    monkeypatch.setattr("os.open", open_and_append)
    parser = Parser()
    reason, text = refused(lambda: ReadOnChange(parser, 10).read(str(file)))
    assert reason == "being_written"
    assert text == (
        f"{file} changed while it was read: podgpu retries; if this persists, "
        "the program that writes it should replace it by rename, and less often"
    )
    assert not parser.parsed


@pytest.mark.parametrize("content", [b"a 1\nb 1\n", b"a 2\n"], ids=["longer", "of the same size"])
def test_a_file_that_is_written_over_while_it_is_read(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in.prom"
    path.write_bytes(b"a 1\n")
    os.utime(path, ns=(0, HOUR_NS))
    assert read_settled(str(path), 100) == b"a 1\n"

    real = os.fstat

    def write_after(descriptor: int) -> os.stat_result:
        status = real(descriptor)
        path.write_bytes(content)
        return status

    monkeypatch.setattr(os, "fstat", write_after)
    assert read_settled(str(path), 100) is None


def test_a_file_of_which_only_a_part_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer truncates it after the size was read, and has written the same size again."""
    path = tmp_path / "in.prom"
    path.write_bytes(b"a 1\n")
    status = path.stat()
    path.write_bytes(b"")
    monkeypatch.setattr(os, "fstat", lambda _: status)
    assert read_settled(str(path), 100) is None
