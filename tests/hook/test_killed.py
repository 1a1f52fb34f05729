"""kill -9 at random moments, again and again: the file is always a state that was true, and at last the newest."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.hook.conftest import written
from tests.hook.runtime import Ended, Runtime, gpu_pod

KILLS = 60
_LONGEST = (0.005, 0.03)
"""Seconds of life after the synchronisation. What was found then is written at once, in a millisecond or two, and the
next is written 50 later: half of the hooks are killed about the first, the others wherever they are."""

# A process that has imported the command, and becomes it as often as it is told: a fresh interpreter for each would
# take minutes and change nothing.
_MOTHER = """
import gc, os, sys
import podgpu.cli.hook
from podgpu.cli.main import run
gc.collect()
gc.freeze()  # else each child looks through all of it, and what is looked at is copied
for _ in sys.stdin:
    child = os.fork()
    if child == 0:
        os._exit(run(sys.argv[1:]))
    print(child, flush=True)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""


class Hooks:
    """Starts real processes of the real command, one after the other."""

    def __init__(self, mother: subprocess.Popen[str]) -> None:
        self._mother = mother
        self.kill: Callable[[], None] = lambda: None
        """The one that was started last."""

    def start(self) -> Callable[[], None]:
        """What is called to kill it."""
        assert self._mother.stdin is not None
        assert self._mother.stdout is not None
        self._mother.stdin.write("\n")
        self._mother.stdin.flush()
        pid = int(self._mother.stdout.readline())
        ended: list[str] = []

        def kill() -> None:
            if not ended:
                os.kill(pid, signal.SIGKILL)
                ended.append(self._mother.stdout.readline())  # type: ignore[union-attr]

        self.kill = kill
        return kill


@contextmanager
def hooks(*arguments: str) -> Iterator[Hooks]:
    command = [sys.executable, "-c", _MOTHER, "hook", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as mother:
        started = Hooks(mother)
        try:
            yield started
        finally:
            started.kill()  # its mother waits for it


@pytest.mark.fault(
    "The hook is killed at any moment, again and again",
    "podlist.json is always whole and a state that was true; after the restart it is the newest one",
)
def test_killed_at_any_moment(folder: Path, podlist: Path) -> None:
    chance = random.Random(16)
    runtime = Runtime(folder / "nri.sock")
    states = {json.dumps(runtime.expected())}
    seen: set[str] = set()
    with hooks("--podlist", str(podlist), "--path-proc", str(folder), "--socket", str(runtime.path)) as started:
        for number in range(KILLS):
            kill = started.start()
            with suppress(Ended):
                runtime.accept()
                _live(runtime, chance, states)
            kill()
            if podlist.exists():
                found = json.dumps(json.loads(podlist.read_bytes()))
                assert found in states, f"after kill {number}"
                seen.add(found)
            if number % 25 == 24:
                kill = started.start()
                runtime.accept()
                written(runtime, podlist)
                kill()
    runtime.stop()
    assert len(seen) > KILLS / 6, "the file was hardly ever written"


def _live(runtime: Runtime, chance: random.Random, states: set[str]) -> None:
    """Events one after the other, for a random moment."""
    end = time.monotonic() + chance.uniform(0, chance.choice(_LONGEST))
    while time.monotonic() < end:
        number = chance.randrange(12)
        one = gpu_pod(number, sorted(chance.sample(range(8), chance.randint(1, 4))))
        if one.id in runtime.containers:
            runtime.end_pod(one.pod)
        else:
            runtime.create(one)
        states.add(json.dumps(runtime.expected()))
