"""The file itself: written whole, only when something changed, put back when it was taken away, and where it may be."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podgpu.files import AtomicFile
from podgpu.holders.podlist import PodlistEntry
from podgpu.hook.counters import HookCounters
from podgpu.hook.devices import Cards, ContainerFacts, Sandbox
from podgpu.hook.loop import Hook, HookSettings
from podgpu.hook.podlist import PodlistWriter, encode_podlist
from tests.hook.conftest import StartHook, wait_written
from tests.hook.runtime import Runtime, gpu_pod, read_podlist, uuid
from tests.hook.test_life import count, errors
from tests.nodes.clock import wait_until


def test_a_hook_that_starts_anew_leaves_a_right_file_alone(
    runtime: Runtime, podlist: Path, start_hook: StartHook
) -> None:
    one = gpu_pod(1)
    runtime.pods[one.pod.id], runtime.containers[one.id] = one.pod, one
    first = start_hook()
    runtime.accept()
    wait_written(runtime, podlist)
    first.stop()
    was = os.stat(podlist)
    second = start_hook()
    runtime.accept()
    wait_until(lambda: second.is_up_to_date)
    assert os.stat(podlist).st_ino == was.st_ino
    assert count(second, "podgpu_hook_podlist_writes_total") == 0


def keeper_of(podlist: Path) -> PodlistWriter:
    """A keeper whose turns are had one at a time."""
    return PodlistWriter(AtomicFile(str(podlist)), HookCounters(), Cards)


PICTURE = (Sandbox("s", "ml", "train", containers=(ContainerFacts("c", "main", uuid(1)),)),)
CONTENT = encode_podlist([PodlistEntry("train", "ml", "main", [uuid(1)])])


@pytest.mark.fault(
    "Somebody deletes podlist.json, or writes over it",
    "The hook puts it back within seconds, whole",
)
def test_a_file_taken_away_or_written_over_is_put_back(podlist: Path) -> None:
    keeper = keeper_of(podlist)
    keeper.write_changes()
    assert not podlist.exists(), "nothing was told yet"
    keeper.update(PICTURE)
    keeper.write_changes()
    assert podlist.read_bytes() == CONTENT
    podlist.unlink()
    keeper.write_changes()
    assert podlist.read_bytes() == CONTENT
    podlist.write_text("[]")
    keeper.write_changes()
    assert podlist.read_bytes() == CONTENT


# Where it cannot be written


@pytest.fixture
def remount(folder: Path) -> Iterator[Callable[[str], None]]:
    """A file system of its own under `folder/disk`, made read-only and writable again by `ro` and `rw`: permissions
    would not keep root from writing."""
    disk = folder / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", disk], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")

    def remount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", disk], check=True)

    yield remount
    subprocess.run(["umount", disk], check=True)


@pytest.mark.fault(
    "The directory of podlist.json is read-only when a container is created",
    "The container starts as ever; a log line says that the file before stands; it is written once that can be done",
)
def test_a_read_only_directory(
    runtime: Runtime, folder: Path, remount: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    podlist = folder / "disk/podlist.json"
    hook = Hook(HookSettings(str(folder / "nri.sock"), proc=str(folder)), AtomicFile(str(podlist)))
    hook.start(lambda: None)
    try:
        runtime.accept()
        runtime.create(gpu_pod(1))
        wait_written(runtime, podlist)
        was = podlist.read_bytes()
        remount("ro")
        assert runtime.create(gpu_pod(2)) == {}
        wait_until(lambda: errors(hook).get("not_written"))
        assert "Read-only file system); the previous file is unchanged" in caplog.text
        assert podlist.read_bytes() == was
        remount("rw")
        wait_written(runtime, podlist)
        wait_until(lambda: hook.is_up_to_date)
    finally:
        hook.stop()


@pytest.mark.fault(
    "The disk is full when podlist.json is to be written",
    "The file before stays whole; a log line says so; it is tried again until it works",
)
def test_a_full_disk(folder: Path, podlist: Path) -> None:
    """The kernel's limit on the size of files stands for it: a part is written, then an error comes."""
    runtime = Runtime(folder / "nri.sock")
    command = [sys.executable, "-m", "podgpu", "hook", "--socket", str(runtime.path), "--podlist", str(podlist)]

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))

    hook = subprocess.Popen([*command, "--path-proc", str(folder)], preexec_fn=limit, stderr=subprocess.PIPE, text=True)
    assert hook.stderr is not None
    try:
        runtime.accept()
        runtime.create(gpu_pod(1))
        wait_written(runtime, podlist)
        for number in range(2, 20):
            runtime.create(gpu_pod(number))
        said = next(line for line in hook.stderr if "was not written" in line)
        assert "File too large" in said
        found = read_podlist(podlist)
        assert isinstance(found, list)
        assert 1 <= len(found) < 19
        assert {one.name for one in folder.iterdir()} == {"nri.sock", "podlist.json"}
        for number in range(2, 20):
            runtime.end_pod(gpu_pod(number).pod)
        wait_written(runtime, podlist)
    finally:
        hook.kill()
        hook.communicate()
        runtime.stop()
