"""Which of two fields with one figure an engine is asked for, by its version, and what becomes of the answer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from podgpu.gpu.dcgm.values import substitute_fields
from podgpu.metrics.fields import fields
from podgpu.metrics.names import successors
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
def test_an_engine_that_knows_the_new_ids_is_asked_for_them(bench: Bench, version: str) -> None:
    bench.double.call("versions", version, version)
    speak(bench)
    found = values(bench, NEW)
    assert found == {UTIL_RATIO: 0.945, FB_BYTES: 1_073_741_999, CLOCK_HERTZ: 1_980_500_000, JOULES: 12}
    assert watched(bench) == set(NEW)


@pytest.mark.parametrize("version", ["3.3.9", "4.2.3", "4.5.3", "4.6.0"])
def test_an_older_engine_is_asked_for_the_old_ones(bench: Bench, version: str) -> None:
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


def test_4_6_1_has_the_first_of_them(bench: Bench) -> None:
    bench.double.call("versions", "4.6.1", "4.6.1")
    speak(bench)
    values(bench, NEW)
    assert watched(bench) == {UTIL, FB_USED, CLOCK_HERTZ, JOULES}


@pytest.mark.parametrize(("library", "engine"), [("4.6.0", "4.7.0"), ("4.7.0", "4.6.0")])
def test_the_older_of_library_and_engine_decides(bench: Bench, library: str, engine: str) -> None:
    bench.double.call("versions", library, engine)
    speak(bench)
    values(bench, NEW)
    assert watched(bench) == set(OLD)


@pytest.mark.parametrize("version", ["4.6.0", "4.7.0"])
def test_old_names_are_asked_for_by_the_old_ids(bench: Bench, version: str) -> None:
    bench.double.call("versions", version, version)
    speak(bench)
    assert values(bench, OLD) == {UTIL: 94, FB_USED: 1024, CLOCK: 1980, ENERGY: 12_999}
    assert watched(bench) == set(OLD)


def test_both_at_once(bench: Bench) -> None:
    bench.double.call("versions", "4.6.0", "4.6.0")
    speak(bench)
    found = values(bench, (UTIL, UTIL_RATIO))
    assert found == {UTIL: 94, UTIL_RATIO: 0.94}


def test_what_the_old_field_cannot_tell_the_new_cannot_either(bench: Bench) -> None:
    bench.double.call("versions", "4.6.0", "4.6.0")
    bench.double.int((GPU, 0), UTIL, 0x7FFFFFFFFFFFFFF2)
    answer = bench.read_fields((fields()[UTIL_RATIO],))
    assert UTIL_RATIO in {i for _, i in answer.unsupported}
    assert UTIL_RATIO not in of_gpu(answer).values


def test_an_engine_that_does_not_tell_its_version_is_asked_for_what_every_version_has() -> None:
    asked = substitute_fields((), [fields()[i] for i in NEW])
    assert [f.id for f in asked.fields] == list(OLD)


@pytest.mark.parametrize("version", [(), (3, 3, 9), (4, 6, 1), (4, 7, 0)])
def test_nothing_wanted_is_forgotten_and_nothing_asked_twice(version: tuple[int, ...]) -> None:
    wanted = [f for f in fields().values() if f.recipe is not None]
    asked = substitute_fields(version, wanted)
    numbers = [f.id for f in asked.fields]
    assert len(numbers) == len(set(numbers))
    assert {f.id for f in wanted} <= set(numbers) | {f.id for f, _, _ in asked.substitutes}
    assert all(number in numbers for _, number, _ in asked.substitutes)
    assert (version >= (4, 7)) == (not asked.substitutes)
    assert len(successors()) >= len(asked.substitutes)
