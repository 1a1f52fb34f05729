"""What a driver may answer: numbers of any size and kind, structs of any bytes, lists of processes that cannot be.

A case is a seed in eight bytes: values that are no texts are drawn from it, so that it can be kept and run again.
"""

from __future__ import annotations

import math
from ctypes import Array, Structure, addressof, c_int, c_uint32, memmove, sizeof
from random import Random
from types import SimpleNamespace
from typing import Any

from endurance.fuzz.mutate import Case
from endurance.fuzz.target import Target
from podgpu.errors import SourceError
from podgpu.gpu.dcgm.entities import read_layout, read_outline
from podgpu.gpu.dcgm.health import check_health, read_p2p
from podgpu.gpu.dcgm.connection import translate
from podgpu.gpu.dcgm.structs import MAX_GPUS, FieldType, FieldValueV2
from podgpu.gpu.dcgm.values import decode
from podgpu.gpu.nvml.driver import DeviceHandle, NvmlDriver
from podgpu.gpu.nvml.mig import MigLayout
from podgpu.gpu.nvml.processes import ProcessList
from podgpu.gpu.nvml.switch_attribution import (
    FECS_RECORD,
    HIDDEN_PID,
    KERNEL_PID,
    RECORD,
    SAVED,
    SWITCHED_IN,
    WHOLE_GPU,
    Habits,
    RecordDecoder,
    Residency,
    SwitchLogError,
    Timeline,
    estimate_without_samples,
)
from podgpu.metrics.conversions import Blank, value_of, value_printed
from podgpu.metrics.fields import fields
from podgpu.model import Value
from podgpu.simulate.driver import SimulatedNvml

_FIELDS = tuple(fields().values())
_SENTINELS = {0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF, *range(0x7FFFFFF0, 0x80000000), *range(2**63 - 16, 2**63)}
_WHOLE = (0, 1, -1, 100, 101, 255, 2**31 - 16, 2**31 - 1, 2**32 - 1, 2**63 - 16, 2**63 - 1, 2**64 - 1, 10**30)
_REAL = (0.0, -0.0, 0.5, 1.0, 1.0000001, -1.0, 1e-7, 1e308, 140737488355328.0, math.nan, math.inf, -math.inf)


def _seed(rng: Random) -> bytes:
    return rng.randbytes(8)


def _drawn(case: Case) -> Random:
    assert isinstance(case, bytes)
    return Random(int.from_bytes(case, "little"))


def _number(rng: Random) -> Any:
    return rng.choice((rng.choice(_WHOLE), rng.choice(_REAL), rng.getrandbits(rng.choice((8, 16, 32, 33, 64, 80)))))


def _scalar(rng: Random) -> Any:
    texts = (b"", b"\xff", b"x", b"N/A\0", "", "é", "<<<NOT_SUPPORTED>>>", None)
    return _number(rng) if rng.random() < 0.7 else rng.choice((*texts, rng.randbytes(rng.randrange(20))))


def _struct(rng: Random) -> Any:
    """Every member that any conversion looks at: with a number of any size."""
    features = [SimpleNamespace(featureState=_number(rng), featureCode=_number(rng)) for _ in range(rng.randrange(3))]
    names = (
        "used",
        "total",
        "free",
        "reserved",
        "state",
        "status",
        "isGridLicenseSupported",
        "healthMask",
        "licensableFeaturesCount",
    )
    return SimpleNamespace(**{name: _number(rng) for name in names}, gridLicensableFeatures=features)


_STRUCTS = {"used_ratio", "fabric_status", "fabric_error", "vgpu_license"}
_LISTS_OF = {"count", "compute_capability", "guid", "hex64"}


def _answer(rng: Random, convert: str) -> Any:
    """Of the kind NVML gives for such a field: a struct, a list, or a number or text of any value."""
    if convert in _STRUCTS:
        return _struct(rng)
    if convert in _LISTS_OF:
        return rng.choice((rng.randbytes(rng.randrange(20)), [rng.randrange(256) for _ in range(rng.randrange(17))]))
    return _scalar(rng)


def _check(unit: str, value: Value) -> object:
    if isinstance(value, str):
        assert value, "an empty text"
        return value
    assert math.isfinite(value), "no number leaves as a value"
    assert isinstance(value, float) or unit.startswith("bitmask") or value not in _SENTINELS, "a sentinel leaves"
    assert not unit.startswith("%") or 0 <= value <= 100, "more than all of it"
    return value


def nvml_value(case: Case) -> object:
    rng = _drawn(case)
    known = rng.choice(_FIELDS)
    return _check(known.unit, value_of(known, _answer(rng, known.convert)))


def exposition_value(case: Case) -> object:
    rng = _drawn(case)
    known = rng.choice(_FIELDS)
    return _check(
        known.unit, value_printed(known, float(rng.choice((*_REAL, *map(float, _WHOLE), rng.random() * 1e19))))
    )


def dcgm_value(case: Case) -> object:
    """A struct of any bytes, more often than not with a type and a status that mean something."""
    rng = _drawn(case)
    known, raw = rng.choice(_FIELDS), FieldValueV2()
    head = rng.randbytes(64)
    memmove(addressof(raw), head, len(head))
    if rng.random() < 0.8:
        raw.fieldType = rng.choice(tuple(FieldType))
        raw.status = rng.choice((0, 0, 0, 0, -1, -6, -16, -35, 7))
        kind = rng.randrange(3)
        if kind == 0:
            raw.value.i64 = rng.choice(_WHOLE[:12]) & (2**63 - 1)
        elif kind == 1:
            raw.value.dbl = rng.choice(_REAL)
        else:
            raw.value.str = rng.choice((b"", b"<<<NOT_SUPPORTED>>>", b"<<<x>>>", b"\xff\xfe", b"name"))
    return _check(known.unit, decode(known, raw))


class _Library:
    """A host engine whose structs are full of anything: any states, counts past their arrays, texts without an end."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.library = SimpleNamespace(major=rng.choice((3, 4)))

    def call(self, name: str, *arguments: Any) -> None:
        rng = self._rng
        if rng.random() < 0.02:
            raise translate(rng.choice((-1, -6, -16, -21, -35)), name)
        for argument in arguments:
            filled = getattr(argument, "_obj", argument)
            if isinstance(filled, Structure):
                memmove(addressof(filled), rng.randbytes(min(sizeof(filled), 4000)), min(sizeof(filled), 4000))
                for count in ("count", "numGpus", "numNvSwitches", "numCpus", "incidentCount"):
                    if hasattr(filled, count):
                        setattr(filled, count, rng.choice((0, 1, 2, 31, 33, 4000)))
                if hasattr(filled, "identifiers"):
                    filled.identifiers.uuid = rng.choice(
                        (b"GPU-x", b"GPU-y", b"", b"<<<NOT_FOUND>>>", rng.randbytes(20))
                    )
            elif isinstance(filled, c_int):
                filled.value = rng.choice((0, 1, 1, 2, 3, 33, -1, 2**31 - 1))
            elif isinstance(filled, Array) and filled._type_ is c_uint32:
                filled[:] = [rng.randrange(MAX_GPUS) for _ in filled]


def dcgm_structs(case: Case) -> object:
    """Who is there, health and peers: whatever the structs hold, a layout or an error; each GPU once."""
    session: Any = _Library(_drawn(case))
    layout = read_layout(session, read_outline(session))
    "".join(key + each.device.model for key, each in layout.gpus.items()).encode()
    check_health(session, [0], range(MAX_GPUS))
    read_p2p(session, range(MAX_GPUS))
    return layout.gpus or None


_GPU = SimulatedNvml("1xH100/2x1g.10gb", clock=lambda: 5.0, wall=lambda: 5.0, unrest=0)
_GPU.nvmlInit()
_GRIP = DeviceHandle(_GPU.nvmlDeviceGetHandleByIndex(0))
_LISTS = [f"nvmlDeviceGet{kind}RunningProcesses_v3" for kind in ("Compute", "MPSCompute", "Graphics")]


def processes(case: Case) -> object:
    """Lists with pids and memory sizes that cannot be: each process once on a device, no sentinel among the bytes."""
    rng = _drawn(case)
    for name in _LISTS:
        entries = [
            SimpleNamespace(
                pid=rng.choice((0, 1, 42, 43, 2**22, 2**32 - 1)),
                usedGpuMemory=rng.choice((0, 1, 2**40, 2**64 - 1, None)),
                gpuInstanceId=rng.choice((0, 1, 7, 0xFFFFFFFF)),
                computeInstanceId=0,
            )
            for _ in range(rng.randrange(5))
        ]
        _GPU.faults.answer(name, entries)
    driver = NvmlDriver(_GPU)
    found = ProcessList(driver, _GRIP, "GPU-x").read(*MigLayout(driver, _GRIP, lambda: 5.0).read(max_age=0))
    places = [(process.device, process.pid) for process in found]
    assert len(set(places)) == len(places), "a process twice"
    assert all(process.memory is None or process.memory < 2**63 for process in found), "a sentinel leaves as bytes"
    return found or None


def _switch_records(rng: Random) -> bytes:
    """Contexts that come and go, now and then with a number, a time, a tag or a byte that cannot be."""
    number, at, tag, pid = rng.choice((0, 65_530, rng.randrange(1 << 16))), rng.choice((0, 1, 2**62)), SWITCHED_IN, 1
    at, odd, records = at + rng.randrange(10**9), rng.choice((0.0, 0.0, 0.02)), []
    for _ in range(rng.randrange(40)):
        if tag == SWITCHED_IN:
            pid = rng.choice((1, 2, 3, HIDDEN_PID, KERNEL_PID))
        stamp = min(at, 2**64 - 1)
        records.append(RECORD.pack(FECS_RECORD, 0, 0, tag, 0, number, 0, pid, 0, WHOLE_GPU, WHOLE_GPU, stamp))
        number, tag = (number + 1) % (1 << 16), SAVED if tag == SWITCHED_IN else SWITCHED_IN
        at += rng.choice((0, 1, 84_000, rng.randrange(10**6), rng.randrange(10**9)))
        if rng.random() < odd:
            number, at = rng.choice((number, (number + 1) % (1 << 16))), rng.choice((0, at, 2**64 - 1))
    chunk = bytearray(b"".join(records))
    if chunk and rng.random() < odd:
        chunk[rng.randrange(len(chunk))] = rng.randrange(256)
    return bytes(chunk[: len(chunk) - (rng.random() < odd)])


def context_switches(case: Case) -> object:
    """Whatever the log holds and however it is cut up, a window's parts are the window, and nobody ran longer than he
    was there. Or a SwitchLogError: then the driver's samples are used."""
    rng = _drawn(case)
    chunk = _switch_records(rng)
    reader, habits = RecordDecoder(), Habits()
    now = max(0, int.from_bytes(chunk[24:32], "little") - rng.choice((0, 1, 10**6, 10**9)))
    timeline = Timeline(now, lead=rng.choice((0, 1, 64_000, 10**9)))
    while chunk:
        part = RECORD.size * rng.randrange(1, 41)
        for resident, pid, at, _, _ in reader.decode(chunk[:part]):
            timeline.add(resident, pid, at)
        chunk, now = chunk[part:], now + rng.choice((0, 1, rng.randrange(10**9), rng.randrange(2**50)))
        _check_residency(timeline.take_window(now), habits, rng)
    return now or None


def _check_residency(residency: Residency, habits: Habits, rng: Random) -> None:
    lengths = [stay.until - stay.since for stay in residency.stays]
    assert min(residency.switching, residency.unknown, *lengths, 0) >= 0, "less than nothing"
    assert sum(lengths) + residency.switching + residency.unknown == residency.window, "the parts are not the whole"
    edges = [residency.since, *(edge for stay in residency.stays for edge in (stay.since, stay.until)), residency.until]
    assert edges == sorted(edges), "two on the engine at once"
    busy = rng.choice((0, 1, residency.window, 2 * residency.window, rng.randrange(residency.window + 1)))
    moments = [
        (rng.randrange(residency.since, residency.until + 1), rng.random() < 0.5) for _ in range(rng.randrange(9))
    ]
    habits.learn(residency, moments)
    resident = residency.sum_by_process()
    for figures in (estimate_without_samples(residency, busy), habits.estimate(residency, busy)):
        assert all(0 <= ns <= resident[pid] for pid, ns in figures.items()), "ran longer than it was there"
        assert sum(figures.values()) <= busy, "more than there was"


DRIVER_TARGETS = (
    Target("context-switches", _seed, context_switches, (SwitchLogError,)),
    Target("nvml-values", _seed, nvml_value, (Blank,)),
    Target("dcgm-values", _seed, dcgm_value, (Blank, SourceError)),
    Target("dcgm-structs", _seed, dcgm_structs),
    Target("values-of-expositions", _seed, exposition_value, (Blank,)),
    Target("process-lists", _seed, processes),
)
