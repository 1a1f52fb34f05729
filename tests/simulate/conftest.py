"""A clock that tests move by hand, and drivers that use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.simulated import FaultyNvml

UNIX_AT_ZERO = 1_700_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def wall(self) -> float:
        return UNIX_AT_ZERO + self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def start(clock: Clock) -> Callable[..., FaultyNvml]:
    """Builds a driver on the test's clock and opens a session."""

    def build(spec: str, **options: Any) -> FaultyNvml:
        driver = FaultyNvml(spec, clock=clock, wall=clock.wall, **options)
        driver.nvmlInit()
        return driver

    return build
