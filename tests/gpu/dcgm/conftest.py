"""Fixtures: a fake libdcgm with two GPUs, and the telemetry that reads it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.dcgm.double import Bench, Double


@pytest.fixture
def double() -> Double:
    return Double()


@pytest.fixture
def bench(double: Double) -> Iterator[Bench]:
    for index in (0, 1):
        double.gpu(index)
        double.speak(index)
    bench = Bench(double)
    yield bench
    assert bench.telemetry.release(1.0)
    assert double.told("initialised") == 0
