"""Tests that faults in the hook do not delay or fail containers. Also tests `--inject`."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from podgpu.errors import SourceError
from podgpu.node.hook import HookCounters
from podgpu.node.hook.devices import Card, Cards
from podgpu.node.hook.nri import Plugin, PluginName, Session
from tests.hook.conftest import StartHook, wait_written
from tests.hook.runtime import Container, Pod, Runtime, gpu_pod, uuid
from tests.hook.test_gpus import KOORDINATOR, koordinator
from tests.hook.test_life import count, errors


class Troubled:
    """A plugin that returns given answers. A real plugin answers Configure and Synchronize."""

    def __init__(self, answer: Callable[[str], bytes]) -> None:
        self._plugin = Plugin(lambda picture: None, HookCounters())
        self._answer = answer
        self.asked: list[str] = []

    def answer(self, method: str, payload: bytes) -> bytes:
        self.asked.append(method)
        return (
            self._plugin.answer(method, payload)
            if method in ("Configure", "Synchronize")
            else self._answer(method)
        )


@contextmanager
def session_of(runtime: Runtime, plugin: Troubled) -> Iterator[HookCounters]:
    ours, theirs = socket.socketpair()
    tallies = HookCounters()
    session = Session(theirs, plugin.answer, PluginName("podgpu", "90"), tallies)
    thread = threading.Thread(target=session.run)
    thread.start()
    runtime.take(ours)
    yield tallies
    runtime.drop()
    thread.join()


def counted(tallies: HookCounters) -> dict[str, float]:
    return {
        sample.labels.pairs[0][1]: sample.value
        for sample in tallies.samples()["podgpu_hook_errors_total"]
    }


@pytest.mark.fault(
    "A bug in the hook raises while it handles a request of the runtime",
    (
        "The runtime gets an answer without an adjustment, so the container starts; "
        "podgpu_hook_errors_total counts it"
    ),
)
@pytest.mark.parametrize(
    ("error", "reason"), [(ZeroDivisionError("x"), "bug"), (SourceError("odd", "x"), "odd")]
)
def test_a_plugin_that_fails(runtime: Runtime, error: Exception, reason: str) -> None:
    def fail(method: str) -> bytes:
        raise error

    with session_of(runtime, Troubled(fail)) as tallies:
        for number in range(3):
            assert runtime.create(gpu_pod(number)) == {}
        assert counted(tallies) == {reason: 3}


@pytest.mark.fault(
    "The driver hangs while the hook reads the numbers of the GPUs",
    (
        "Pods start without delay; podlist.json has the numbers of the GPUs, and UUIDs once the "
        "driver answers"
    ),
)
def test_a_driver_that_hangs(runtime: Runtime, podlist: Path, start_hook: StartHook) -> None:
    well = threading.Event()

    def read(proc: str) -> Cards:
        well.wait()
        return Cards((Card(uuid(5), 1), Card(uuid(6), 0)))

    start_hook(read=read)
    runtime.accept()
    runtime.create(Container("c", Pod("s", "train"), devices=((195, 1),), gpus=("1",)))
    wait_written(runtime, podlist)
    well.set()
    runtime.containers["c"] = replace(runtime.containers["c"], gpus=(uuid(5),))
    wait_written(runtime, podlist)


def test_inject(runtime: Runtime, podlist: Path, start_hook: StartHook) -> None:
    hook = start_hook(inject=True)
    runtime.accept()
    given = Pod("s", "train", annotations=koordinator({"minor": 1}, {"minor": 3, "id": uuid(3)}))
    gpus = ("1", uuid(3))
    wanted = ",".join(gpus)
    assert runtime.create(Container("a", given, "a", gpus=gpus)) == {
        "NVIDIA_VISIBLE_DEVICES": wanted
    }
    # containerd rejects a variable that two plugins set, unless the second one removes it first.
    replaced = {"-NVIDIA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": wanted}
    assert (
        runtime.create(Container("b", given, "b", ("NVIDIA_VISIBLE_DEVICES=all",), gpus=gpus))
        == replaced
    )
    assert (
        runtime.create(Container("c", given, "c", (f"NVIDIA_VISIBLE_DEVICES={wanted}",), gpus=gpus))
        == {}
    )
    assert runtime.create(gpu_pod(7)) == {}, "a pod without koordinator's annotation is not changed"
    broken = Pod("s-2", "broken", annotations={KOORDINATOR: "{"})
    assert runtime.create(Container("d", broken, env=("NVIDIA_VISIBLE_DEVICES=all",))) == {}
    wait_written(runtime, podlist)
    assert count(hook, "podgpu_hook_adjustments_total") == 2
    assert errors(hook)["bad_annotation"] >= 1


def test_inject_writes_uuids_instead_of_minors(runtime: Runtime, start_hook: StartHook) -> None:
    start_hook(read=lambda proc: Cards((Card(uuid(5), 1), Card(uuid(6), 0))), inject=True)
    runtime.accept()
    given = Pod("s", "train", annotations=koordinator({"minor": 1}))
    assert runtime.create(Container("a", given, "a")) == {"NVIDIA_VISIBLE_DEVICES": uuid(5)}
