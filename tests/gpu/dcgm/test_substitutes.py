"""Fields in base units: read directly, or computed from older fields with older engines."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from podgpu.metrics.fields import fields
from tests.gpu.dcgm.double import FB_USED, GPU, UTIL, Bench, of_gpu

UTIL_RATIO, FB_BYTES, CLOCK, CLOCK_HERTZ, ENERGY, JOULES = 1613, 1627, 100, 1603, 156, 1611
NEW = (UTIL_RATIO, FB_BYTES, CLOCK_HERTZ, JOULES)
OLD = (UTIL, FB_USED, CLOCK, ENERGY)


def watched(bench: Bench) -> set[int]:
    return {i for i in (*OLD, *NEW) if bench.double.call("watch", i, "every") != -1}


def values(bench: Bench, wanted: Sequence[int]) -> dict[int, object]:
    return dict(of_gpu(bench.read_fields(tuple(fields()[i] for i in wanted))).values)


def speak(bench: Bench) -> None:
    for field, number in ((UTIL, 94), (FB_USED, 1024), (CLOCK, 1980), (ENERGY, 12_999)):
        bench.double.int((GPU, 0), field, number)
    bench.double.double((GPU, 0), UTIL_RATIO, 0.945)
    for field, number in ((FB_BYTES, 1_073_741_999), (CLOCK_HERTZ, 1_980_500_000), (JOULES, 12)):
        bench.double.int((GPU, 0), field, number)


@pytest.mark.parametrize("version", ["4.7.0", "4.7.1", "4.8.0"])
def test_a_newer_engine_reads_the_new_fields(bench: Bench, version: str) -> None:
    bench.double.call("versions", version, version)
    speak(bench)
    found = values(bench, NEW)
    assert found == {UTIL_RATIO: 0.945, FB_BYTES: 1_073_741_999, CLOCK_HERTZ: 1_980_500_000, JOULES: 12}
    assert watched(bench) == set(NEW)


@pytest.mark.parametrize("version", ["3.3.9", "4.2.3", "4.5.3", "4.6.0"])
def test_an_older_engine_reads_the_old_fields(bench: Bench, version: str) -> None:
    bench.double.call("versions", version, version)
    speak(bench)
    found = values(bench, NEW)
    assert {i: found[i] for i in NEW} == {
        UTIL_RATIO: 0.94,
        FB_BYTES: 1024 << 20,
        CLOCK_HERTZ: 1_980_000_000,
        JOULES: 12,
    }
    assert watched(bench) == set(OLD)
