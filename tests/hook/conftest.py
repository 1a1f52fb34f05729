"""A runtime, a hook beside it in this process, and a place for podlist.json."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podgpu.files import AtomicFile
from podgpu.hook.devices import Cards, read_cards
from podgpu.hook.loop import Hook, HookSettings
from tests.hook.runtime import Runtime, read_podlist


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
    """Starts hooks that connect to the runtime's socket; all are stopped at the end."""
    (folder / "proc").mkdir()
    started: list[Hook] = []

    def start(read: Callable[[str], Cards] = read_cards, **settings: object) -> Hook:
        chosen = {"socket": str(folder / "nri.sock"), "proc": str(folder / "proc"), **settings}
        hook = Hook(HookSettings(**chosen), AtomicFile(str(podlist), option="--podlist"), read)  # type: ignore[arg-type]
        hook.start(lambda: None)
        started.append(hook)
        return hook

    yield start
    for hook in started:
        hook.stop()


def until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    """Waits for what threads and processes do in their own time; the limit is for a test that has failed."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.002)


def written(runtime: Runtime, podlist: Path) -> None:
    """The file comes to say what the runtime has."""
    end = time.monotonic() + 60
    while (found := read_podlist(podlist)) != runtime.expected():
        if time.monotonic() > end:
            assert found == runtime.expected()
        time.sleep(0.002)
