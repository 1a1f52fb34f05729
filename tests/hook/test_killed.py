"""kill -9 at random moments: the file is always a state that was true, and at last the newest."""

from __future__ import annotations

import json
import random
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.hook.conftest import wait_written
from tests.hook.runtime import Ended, Runtime, gpu_pod
from tests.hook.test_command import options, running

KILLS = 8


@pytest.mark.fault(
    "The hook is killed at any moment, again and again",
    "podlist.json is always whole and a state that was true; after the restart it is the newest one",
)
def test_killed_at_any_moment(runtime: Runtime, folder: Path, podlist: Path) -> None:
    chance = random.Random(16)
    states = {json.dumps(runtime.expected())}
    for number in range(KILLS):
        with running(*options(folder)), suppress(Ended):  # killed at the end
            runtime.accept()
            _live(runtime, chance, states)
        if podlist.exists():
            assert json.dumps(json.loads(podlist.read_bytes())) in states, f"after kill {number}"
    with running(*options(folder)):
        runtime.accept()
        wait_written(runtime, podlist)


def _live(runtime: Runtime, chance: random.Random, states: set[str]) -> None:
    """Events one after the other, for a random moment. The hook writes at most every 50 ms."""
    end = time.monotonic() + chance.uniform(0, 0.08)
    while time.monotonic() < end:
        one = gpu_pod(chance.randrange(12), sorted(chance.sample(range(8), chance.randint(1, 4))))
        if one.id in runtime.containers:
            runtime.end_pod(one.pod)
        else:
            runtime.create(one)
        states.add(json.dumps(runtime.expected()))
