"""Fixtures: a simulated container runtime, hooks in this process, and the path of podlist.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from podgpu.files import AtomicFile
from podgpu.node.hook.devices import read_cards
from podgpu.node.hook.loop import Hook
from tests.hook.runtime import Runtime, read_podlist
from tests.nodes.clock import wait_until


@pytest.fixture
def runtime(folder: Path) -> Iterator[Runtime]:
    runtime = Runtime(folder / "nri.sock")
    yield runtime
    runtime.stop()


@pytest.fixture
def podlist(folder: Path) -> Path:
    return folder / "podlist.json"


StartHook = Callable[..., Hook]


@pytest.fixture
def start_hook(folder: Path, podlist: Path) -> Iterator[StartHook]:
    """Returns a function that starts a hook. All hooks are stopped after the test."""
    (folder / "proc").mkdir()
    started: list[Hook] = []

    def start(**settings: Any) -> Hook:
        file = AtomicFile(str(podlist), option="--podlist")
        read = settings.pop("read", read_cards)
        hook = Hook(
            file,
            partial(read, str(folder / "proc")),
            **{"path": str(folder / "nri.sock"), **settings},
        )
        hook.start(lambda: None)
        started.append(hook)
        return hook

    yield start
    for hook in started:
        hook.stop()


def wait_written(runtime: Runtime, podlist: Path) -> None:
    """Waits until podlist.json lists the runtime's containers."""
    wait_until(
        lambda: read_podlist(podlist) == runtime.expected(), f"{podlist} has {runtime.expected()}"
    )
