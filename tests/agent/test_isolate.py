"""Isolation: deadlines, abandoned calls, late answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from podgpu.agent.isolate import Isolation
from podgpu.errors import SourceError


@pytest.fixture
def isolation() -> Iterator[Isolation]:
    isolation = Isolation()
    yield isolation
    isolation.close()


def test_values_and_errors_come_back(isolation: Isolation) -> None:
    def fail() -> int:
        raise SourceError("broken", "it broke")

    results = isolation.run({"good": lambda: 1, "bad": fail}, 5.0)
    assert results["good"].value == 1
    assert results["good"].error is None
    assert isinstance(results["bad"].error, SourceError)
    assert results["bad"].error.reason == "broken"


def test_a_hung_call_is_abandoned_and_not_started_again_until_it_returns(isolation: Isolation) -> None:
    release, started = threading.Event(), []

    def hang() -> str:
        started.append(1)
        release.wait(30)
        return "late"

    first = isolation.run({"sick": hang, "well": lambda: "fine"}, 0.05)
    assert first["sick"].error is not None
    assert first["sick"].error.reason == "deadline"  # type: ignore[union-attr]
    assert first["well"].value == "fine"
    second = isolation.run({"sick": hang, "well": lambda: "fine"}, 5.0)
    assert second["sick"].error.reason == "hung"  # type: ignore[union-attr]
    assert second["well"].value == "fine"
    assert started == [1]
    release.set()
    while isolation.run({"sick": lambda: "new"}, 5.0)["sick"].value != "new":
        pass  # the worker is free a moment after the late return; its answer was thrown away


def test_a_bug_in_one_source_is_contained(isolation: Isolation, caplog: pytest.LogCaptureFixture) -> None:
    def bug() -> None:
        raise ZeroDivisionError("oops")

    result = isolation.run({"buggy": bug}, 5.0)["buggy"]
    assert result.error is not None
    assert result.error.reason == "bug"  # type: ignore[union-attr]
    assert "please report" in caplog.text


def test_workers_are_daemons_so_a_hang_never_keeps_the_process(isolation: Isolation) -> None:
    isolation.run({"one": lambda: None}, 5.0)
    assert all(t.daemon for t in threading.enumerate() if t.name.startswith("read-"))
