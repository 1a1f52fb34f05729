"""Tests DcgmTelemetry and its ctypes code: watched fields, values, MIG, XIDs and computed
fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.errors import SourceError
from podgpu.metrics.fields import DEVICE_LEVELS, fields
from podgpu.metrics.values import Blank
from podgpu.node.gpu.dcgm.entities import decode
from podgpu.node.gpu.dcgm.structs import FieldType, FieldValueV2
from podgpu.node.gpu.source import FieldGroup
from tests.gpu.dcgm.double import (
    CI,
    FB_USED,
    GI,
    GPU,
    GR_ACTIVE,
    PLAIN,
    POWER,
    TEMP,
    UTIL,
    Bench,
    Double,
    uuid_of,
)
from tests.gpu.nvml_bench import of_gpu


def test_each_lane_has_its_own_interval(bench: Bench) -> None:
    known, ids = fields(), (TEMP, POWER, UTIL, FB_USED)
    slow = FieldGroup(tuple(known[i] for i in ids if i != POWER), 30.0)
    quick = FieldGroup((known[POWER],), 2.0)
    bench.telemetry.schedule((slow, quick))
    gpu = bench.telemetry.inventory().gpus[0]
    values = of_gpu(bench.telemetry.read(gpu, slow.fields))
    assert values == {TEMP: 40, UTIL: 77, FB_USED: 1024}
    assert of_gpu(bench.telemetry.read(gpu, quick.fields)) == {POWER: 123.456}
    watched = {
        i: tuple(bench.double.call("watch", i, what) for what in ("every", "keep", "most"))
        for i in ids
    }
    assert watched == dict.fromkeys(ids, (30.0, 600.0, 0.0)) | {POWER: (2.0, 600.0, 0.0)}
    made = bench.double.told("groups_made"), bench.double.told("field_groups_made")
    for _ in range(3):
        bench.telemetry.inventory()
        bench.telemetry.read(gpu, quick.fields)
        bench.telemetry.read(gpu, slow.fields)
    assert (bench.double.told("groups_made"), bench.double.told("field_groups_made")) == made


def test_a_late_reading_of_earlier_counters_keeps_the_watches(bench: Bench) -> None:
    known = fields()
    earlier, *groups = (FieldGroup((known[i],), 2.0) for i in (TEMP, POWER, UTIL))
    gpu = bench.telemetry.inventory().gpus[0]
    bench.telemetry.schedule(groups)
    for group in groups:
        bench.telemetry.read(gpu, group.fields)
    made = bench.double.told("field_groups_made")
    for group in (earlier, *groups):
        bench.telemetry.read(gpu, group.fields)
    assert bench.double.told("field_groups_made") == made


def test_watches_that_could_not_be_replaced_are_made_again(bench: Bench) -> None:
    known = fields()
    before = FieldGroup((known[TEMP],), 2.0)
    after = FieldGroup((known[UTIL],), 2.0)
    gpu = bench.telemetry.inventory().gpus[0]
    bench.telemetry.schedule((before,))
    bench.telemetry.read(gpu, before.fields)

    bench.double.call("refuse", UTIL, -49)
    bench.telemetry.schedule((after,))
    with pytest.raises(SourceError, match="insufficient resources"):
        bench.telemetry.read(gpu, after.fields)

    bench.telemetry.schedule((before,))
    assert of_gpu(bench.telemetry.read(gpu, before.fields)) == {TEMP: 40}


def test_two_hundred_fields_go_into_several_groups(bench: Bench) -> None:
    some = [
        f
        for f in fields().values()
        if f.level in DEVICE_LEVELS and f.type in ("int", "float") and f.id < 900
    ]
    some = [f for f in some if f.id not in (230, 55)][:200]
    assert len(some) == 200
    for field in some:
        give = bench.double.int if field.type == "int" else bench.double.double
        give((GPU, 0), field.id, 1)
    answer = bench.read_fields(tuple(some))
    assert bench.double.told("largest_group") == 128
    assert set(of_gpu(answer)) == {f.id for f in some}


@pytest.mark.parametrize(
    ("field", "blank"),
    [
        *(
            (TEMP, number)
            for number in (0x7FFFFFFFFFFFFFF0, 0x7FFFFFFFFFFFFFF4, 0x7FFFFFF0, 0x7FFFFFF1)
        ),
        *((POWER, number) for number in (140737488355328.0, 140737488355329.0, math.nan, math.inf)),
    ],
)
def test_blank_numbers_are_dropped(bench: Bench, field: int, blank: float) -> None:
    if isinstance(blank, int):
        bench.double.int((GPU, 0), field, blank)
    else:
        bench.double.double((GPU, 0), field, blank)
    answer = bench.read(*PLAIN)
    assert field not in of_gpu(answer)
    assert answer.dropped == (field,)
    assert len(of_gpu(answer)) == 3


@pytest.mark.parametrize("blank", ["<<<NULL>>>", "<<<NOT_FOUND>>>", "<<<NOT_PERM>>>", ""])
def test_blank_texts_are_dropped(bench: Bench, blank: str) -> None:
    bench.double.text((GPU, 0), 53, blank)
    answer = bench.read("DCGM_FI_DEV_SERIAL")
    assert of_gpu(answer) == {}
    assert answer.dropped == (53,)


def test_unsupported_values_are_not_counted_as_blank(bench: Bench) -> None:
    bench.double.int((GPU, 0), TEMP, 0x7FFFFFFFFFFFFFF2)
    bench.double.double((GPU, 0), POWER, 140737488355330.0)
    bench.double.int((GPU, 0), UTIL, 0, status=-6)
    answer = bench.read(*PLAIN)
    assert answer.unsupported == tuple((uuid_of(0), i) for i in (TEMP, POWER, UTIL))
    assert answer.dropped == ()
    assert set(of_gpu(answer)) == {FB_USED}


def test_values_with_an_old_timestamp_are_stale(bench: Bench) -> None:
    assert len(of_gpu(bench.read(*PLAIN))) == 4
    for _ in range(2):
        bench.pass_time()
        assert len(of_gpu(bench.read(*PLAIN))) == 4
    bench.pass_time()
    bench.double.tick()
    bench.double.int((GPU, 0), TEMP, 41)
    answer = bench.read(*PLAIN)
    assert of_gpu(answer) == {TEMP: 41}
    assert answer.errors == ("stale_data",)
    bench.double.speak(0)
    assert len(of_gpu(bench.read(*PLAIN))) == 4


def test_a_refused_field_does_not_affect_others(bench: Bench) -> None:
    bench.double.call("refuse", UTIL, -13)
    answer = bench.read(*PLAIN)
    assert set(of_gpu(answer)) == {TEMP, POWER, FB_USED}
    assert answer.unsupported == ((uuid_of(0), UTIL),)


@pytest.fixture
def mig(double: Double) -> Bench:
    double.gpu(0, mig=True, model="NVIDIA A100-SXM4-40GB")
    double.speak(0)
    double.instance(0, 0, 9, "1g.5gb")
    double.instance(1, 0, 2, "3g.20gb")
    for entity, used in ((0, 100), (1, 300)):
        double.int((GI, entity), FB_USED, used)
        double.double((GI, entity), GR_ACTIVE, used / 1000)
    return Bench(double)


def test_a_changed_mig_layout(mig: Bench) -> None:
    assert len(mig.read(*PLAIN).values) == 3
    mig.double.call("no_migs")
    mig.double.instance(3, 0, 7, "7g.40gb")
    mig.double.int((GI, 3), FB_USED, 700)
    _, *instances = mig.read(*PLAIN).values.items()
    assert [(device.gi_id, values) for device, values in instances] == [(7, {FB_USED: 700})]


def test_xids_of_gpus_and_instances_are_reported_once(mig: Bench) -> None:
    """DCGM may report an XID for the GPU, the MIG instance or the compute instance."""
    mig.double.call("xid", GPU, 0, mig.double.now - 5_000_000, 31)
    mig.read(*PLAIN)
    assert mig.telemetry.error_events() == []
    mig.double.tick()
    mig.double.call("xid", CI, 1, mig.double.now, 43)
    mig.double.call("xid", GPU, 0, mig.double.now + 10, 79)
    mig.double.call("xid", GPU, 0, mig.double.now + 20, 79)
    for _ in range(2):
        mig.telemetry.inventory()
    events = [(e.device, e.code) for e in mig.telemetry.error_events()]
    assert events == [(f"{uuid_of(0)}/gi2", 43), (uuid_of(0), 79), (uuid_of(0), 79)]
    mig.telemetry.inventory()
    assert mig.telemetry.error_events() == []


@given(
    st.sampled_from(sorted(fields())),
    st.sampled_from([*FieldType, 98]),
    st.integers(-60, 3),
    st.binary(max_size=64),
)
def test_any_value_is_decoded_or_rejected(
    field_id: int, kind: int, status: int, payload: bytes
) -> None:
    raw = FieldValueV2(fieldId=field_id, fieldType=kind, status=status)
    raw.value.blob = payload
    with suppress(Blank, SourceError):
        value = decode(fields()[field_id], raw)
        assert not isinstance(value, float) or math.isfinite(value)


UTIL_RATIO, FB_BYTES, CLOCK, CLOCK_HERTZ, ENERGY, JOULES = 1613, 1627, 100, 1603, 156, 1611
NEW = (UTIL_RATIO, FB_BYTES, CLOCK_HERTZ, JOULES)
OLD = (UTIL, FB_USED, CLOCK, ENERGY)


def watched(bench: Bench) -> set[int]:
    return {i for i in (*OLD, *NEW) if bench.double.call("watch", i, "every") != -1}


def values(bench: Bench, wanted: Sequence[int]) -> Mapping[int, object]:
    return of_gpu(bench.read_fields(tuple(fields()[i] for i in wanted)))


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
    assert found == {
        UTIL_RATIO: 0.945,
        FB_BYTES: 1_073_741_999,
        CLOCK_HERTZ: 1_980_500_000,
        JOULES: 12,
    }
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
