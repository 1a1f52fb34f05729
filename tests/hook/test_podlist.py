"""Tests that podlist.json is written only if it changes, restored if removed, and kept if the disk
is full.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import pytest

from podgpu.errors import SourceError
from podgpu.files import AtomicFile
from podgpu.model import Device, Workload
from podgpu.node.holders.node_files import PodlistAllocation, PodlistEntry
from podgpu.node.hook import HookCounters, nri_pb2
from podgpu.node.hook.devices import Cards, Sandbox
from podgpu.node.hook.loop import PodlistWriter, encode_podlist
from tests.hook.conftest import StartHook, wait_written
from tests.hook.runtime import Runtime, gpu_pod, read_podlist, uuid
from tests.hook.test_command import options, running
from tests.hook.test_life import count
from tests.nodes.clock import PATIENCE, wait_until


def test_a_restarted_hook_does_not_write_a_correct_file(
    runtime: Runtime, podlist: Path, start_hook: StartHook
) -> None:
    one = gpu_pod(1)
    runtime.pods[one.pod.id], runtime.containers[one.id] = one.pod, one
    first = start_hook()
    runtime.accept()
    wait_written(runtime, podlist)
    first.stop()
    before = os.stat(podlist)
    second = start_hook()
    runtime.accept()
    wait_until(lambda: second.writer.is_up_to_date)
    assert os.stat(podlist).st_ino == before.st_ino
    assert count(second, "podgpu_hook_podlist_writes_total") == 0


MAIN = nri_pb2.Container(id="c", name="main", env=[f"NVIDIA_VISIBLE_DEVICES={uuid(1)}".encode()])
PICTURE = (Sandbox(nri_pb2.PodSandbox(id="s", namespace="ml", name="train"), (MAIN,)),)
CONTENT = encode_podlist([PodlistEntry("train", "ml", "main", [uuid(1)])])


@pytest.mark.fault("podlist.json is deleted or overwritten", "The hook restores it within seconds")
def test_a_removed_or_overwritten_file_is_restored(podlist: Path) -> None:
    writer = PodlistWriter(AtomicFile(str(podlist)), HookCounters(), Cards)
    writer.write_changes()
    assert not podlist.exists(), "must not be written before the runtime has reported containers"
    writer.update(PICTURE)
    writer.write_changes()
    assert podlist.read_bytes() == CONTENT
    podlist.unlink()
    writer.write_changes()
    assert podlist.read_bytes() == CONTENT
    podlist.write_text("[]")
    writer.write_changes()
    assert podlist.read_bytes() == CONTENT


@pytest.mark.fault(
    "The disk is full when podlist.json is to be written",
    "The previous file stays complete, with a log line; writing is retried until it works",
)
def test_a_full_disk(runtime: Runtime, folder: Path, podlist: Path) -> None:
    """A limit on file sizes simulates a full disk. Writing fails after some bytes."""
    with running(*options(folder)) as hook:
        assert hook.stderr is not None
        runtime.accept()
        resource.prlimit(hook.pid, resource.RLIMIT_FSIZE, (600, 600))  # Python ignores SIGXFSZ
        runtime.create(gpu_pod(1))
        wait_written(runtime, podlist)
        for number in range(2, 20):
            runtime.create(gpu_pod(number))
        message = next(line for line in hook.stderr if "was not written" in line)
        assert "File too large" in message
        found = read_podlist(podlist)
        assert isinstance(found, list)
        assert 1 <= len(found) < 19
        assert {one.name for one in folder.iterdir()} == {"nri.sock", "podlist.json"}
        for number in range(2, 20):
            runtime.end_pod(gpu_pod(number).pod)
        wait_written(runtime, podlist)


@pytest.mark.parametrize("offset", [-30.0, 1e6], ids=["old", "written before the clock was set"])
def test_the_hook_updates_the_time_of_the_file(podlist: Path, offset: float) -> None:
    """Readers recognise by its time that no hook maintains the file any more."""
    connected = [True]
    writer = PodlistWriter(
        AtomicFile(str(podlist)), HookCounters(), is_synchronised=lambda: connected[0]
    )
    writer.update(PICTURE)
    writer.write_changes()
    fresh = os.stat(podlist)
    writer.write_changes()
    assert os.stat(podlist) == fresh, "not for each check"

    outdated = time.time() + offset
    os.utime(podlist, (outdated, outdated))
    connected[0] = False
    writer.write_changes()
    assert os.stat(podlist).st_mtime == pytest.approx(outdated)
    connected[0] = True
    writer.write_changes()
    assert os.stat(podlist).st_mtime == pytest.approx(time.time(), abs=PATIENCE)
    assert os.stat(podlist).st_ino == fresh.st_ino


def test_a_hook_that_lost_the_runtime_does_not_update_the_time(
    runtime: Runtime, podlist: Path, start_hook: StartHook
) -> None:
    hook = start_hook()
    runtime.accept()
    runtime.create(gpu_pod(1))
    wait_written(runtime, podlist)
    wait_until(lambda: hook.writer.is_up_to_date)
    os.utime(podlist, (0, 0))
    hook.writer.write_changes()
    assert os.stat(podlist).st_mtime > 0

    runtime.stop()
    wait_until(lambda: not hook.is_synchronised)
    os.utime(podlist, (0, 0))
    hook.writer.write_changes()
    assert os.stat(podlist).st_mtime == 0


def test_the_exporter_reads_what_the_hook_writes(podlist: Path) -> None:
    pod = nri_pb2.PodSandbox(id="s", namespace="ml", name="train", uid="u-1")
    writer = PodlistWriter(AtomicFile(str(podlist)), HookCounters())
    writer.update((Sandbox(pod, (MAIN,)),))
    writer.write_changes()
    source = PodlistAllocation([str(podlist)])
    (assignment,) = source.assignments([Device(0, uuid(1))]).assignments
    assert assignment.holder == Workload("ml", "train", "main", "u-1")
    os.utime(podlist, (0, 0))
    with pytest.raises(SourceError, match="podgpu hook"):
        PodlistAllocation([str(podlist)]).assignments([])
