"""Values that several threads read at the same time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from podgpu.once import computed_once
from tests.nodes.clock import PATIENCE


class Slow:
    def __init__(self) -> None:
        self.calls = 0
        self.entered, self.go = threading.Event(), threading.Event()

    @computed_once
    def value(self) -> object:
        self.calls += 1
        self.entered.set()
        assert self.go.wait(PATIENCE)
        return object()


def test_many_threads_get_the_value_of_one_computation() -> None:
    slow = Slow()
    with ThreadPoolExecutor(20) as threads:
        values = [threads.submit(getattr, slow, "value") for _ in range(20)]
        assert slow.entered.wait(PATIENCE)
        slow.go.set()
        assert len({value.result(PATIENCE) for value in values}) == 1
    assert slow.calls == 1


def test_an_object_does_not_wait_for_another() -> None:
    slow, fast = Slow(), Slow()
    fast.go.set()
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(getattr, slow, "value")
        assert slow.entered.wait(PATIENCE)
        assert threads.submit(getattr, fast, "value").result(10)
        slow.go.set()
        assert waiting.result(PATIENCE)


def test_a_computation_that_fails_is_tried_again() -> None:
    class Failing:
        calls = 0

        @computed_once
        def value(self) -> int:
            self.calls += 1
            if self.calls == 1:
                raise ValueError("the first time")
            return self.calls

    failing = Failing()
    with pytest.raises(ValueError, match="the first time"):
        _ = failing.value
    assert failing.value == 2
    assert failing.value == 2
