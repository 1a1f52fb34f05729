"""This module packs the figures of many devices at one moment into a column of 8 bytes each, and makes means of
columns. Pure.

A column has all utilisations, then all watts, then temperature and memory, each an array in the machine's own order of
bytes: an array is packed, averaged and turned around much faster than as many records. Bits that are all ones say that
nothing is known, so that a column that is too short is made longer with them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

SAMPLE_BYTES = 8
NOTHING = b"\xff"
_NONE16, _NONE24, _NONE8 = 0xFFFF, 0xFFFFFF, 0xFF
_PARTS_OF_ONE = 10_000
_PARTS_OF_A_WATT = 10
_MIB = 1024 * 1024
BYTE_FULL, BYTE_NONE = 200, 255
"""Of a sparkline's bytes: a ratio of 1, and no data."""


class Sample(NamedTuple):
    """What is known of a device, or of what a holder uses of it. None: nobody knows."""

    utilization: float | None = None
    memory: int | None = None
    """Bytes; kept in whole MiB."""
    watts: float | None = None
    temperature: float | None = None


NO_SAMPLE = Sample()


# Packing


def pack(samples: Iterable[tuple[int, Sample]], count: int) -> bytes:
    """A column for `count` devices, with samples at their places in it."""
    utilizations = array("H", NOTHING * (2 * count))
    watts = array("H", NOTHING * (2 * count))
    rest = array("I", NOTHING * (4 * count))
    for place, (utilization, memory, power, temperature) in samples:
        if utilization is not None:
            utilizations[place] = _kept(min(utilization, 1.0), _PARTS_OF_ONE, _NONE16)
        if power is not None:
            watts[place] = _kept(power, _PARTS_OF_A_WATT, _NONE16)
        heat = _NONE8 if temperature is None else _kept(temperature, 1, _NONE8)
        used = _NONE24 if memory is None else _kept(memory / _MIB, 1, _NONE24)
        rest[place] = heat << 24 | used
    return utilizations.tobytes() + watts.tobytes() + rest.tobytes()


def _kept(value: float, scale: int, none: int) -> int:
    """What is above 0 stays above 0: a GPU that does a little is not idle. What does not fit in is not known."""
    if not 0 <= value * scale < none - 0.5:
        return none
    return round(value * scale) or (1 if value > 0 else 0)


def places(column: bytes) -> int:
    return len(column) // SAMPLE_BYTES


def sample_at(column: bytes, place: int) -> Sample:
    """What is beyond the column's end is not known."""
    count = places(column)
    if place >= count:
        return NO_SAMPLE
    view = memoryview(column)
    ratio, watts = view[: 2 * count].cast("H")[place], view[2 * count : 4 * count].cast("H")[place]
    rest = view[4 * count :].cast("I")[place]
    used, heat = rest & _NONE24, rest >> 24
    return Sample(
        None if ratio == _NONE16 else ratio / _PARTS_OF_ONE,
        None if used == _NONE24 else used * _MIB,
        None if watts == _NONE16 else watts / _PARTS_OF_A_WATT,
        None if heat == _NONE8 else heat,
    )


def moved(column: bytes, where: Sequence[int | None], count: int) -> bytes:
    """The column for `count` devices with each sample at its new place: `where` is that of each old one; None: none."""
    old = places(column)
    view = memoryview(column)
    parts: list[tuple[Sequence[int], array[int]]] = [
        (view[: 2 * old].cast("H"), array("H", NOTHING * (2 * count))),
        (view[2 * old : 4 * old].cast("H"), array("H", NOTHING * (2 * count))),
        (view[4 * old :].cast("I"), array("I", NOTHING * (4 * count))),
    ]
    for values, found in parts:
        for place, value in zip(where, values, strict=False):
            if place is not None:
                found[place] = value
    return b"".join(found.tobytes() for _, found in parts)


def without(column: bytes, gone: Iterable[int]) -> bytes:
    """The same column, with nothing known at these places."""
    count, found = places(column), bytearray(column)
    for place in gone:
        if place < count:
            found[2 * place : 2 * place + 2] = NOTHING * 2
            found[2 * (count + place) : 2 * (count + place) + 2] = NOTHING * 2
            found[4 * (count + place) : 4 * (count + place) + 4] = NOTHING * 4
    return bytes(found)


# Means


def mean(columns: Sequence[bytes]) -> bytes:
    """Of each device the mean of what is known of it; nothing where nothing is."""
    count = max(map(places, columns), default=0)
    ratios, watts = (_means(_arrays(columns, part, count), _NONE16) for part in (0, 1))
    both = [_rest(column, count) for column in columns]
    heat = _means([[value >> 24 for value in values] for values in both], _NONE8)
    used = _means([[value & _NONE24 for value in values] for values in both], _NONE24)
    rest = array("I", [hot << 24 | memory for hot, memory in zip(heat, used, strict=True)])
    return array("H", ratios).tobytes() + array("H", watts).tobytes() + rest.tobytes()


def mean_sample(samples: Sequence[Sample]) -> Sample:
    """Of one device what `mean` would say of it."""
    column = mean([pack([(0, sample)], 1) for sample in samples])
    return sample_at(column, 0) if column else NO_SAMPLE


def utilization_bytes(columns: Sequence[bytes], count: int) -> bytes:
    """The mean utilisation of each of `count` devices over the columns, a byte each, as sparklines have it."""
    if not columns:
        return bytes([BYTE_NONE]) * count
    means = _means(_arrays(columns, 0, count), _NONE16)
    step = _PARTS_OF_ONE // BYTE_FULL
    return bytes([BYTE_NONE if m == _NONE16 else (m + step // 2) // step or (1 if m else 0) for m in means])


def byte_of(ratio: float | None) -> int:
    """One utilisation as sparklines have it."""
    return BYTE_NONE if ratio is None else _kept(min(max(ratio, 0.0), 1.0), BYTE_FULL, BYTE_NONE)


def _arrays(columns: Iterable[bytes], part: int, count: int) -> list[Sequence[int]]:
    """Utilisations (0) or watts (1) of each column, as many in all."""
    found: list[Sequence[int]] = []
    for column in columns:
        own = places(column)
        values = column[2 * own * part : 2 * own * (part + 1)]
        found.append(memoryview((values + NOTHING * (2 * (count - own)))[: 2 * count]).cast("H"))
    return found


def _rest(column: bytes, count: int) -> Sequence[int]:
    own = places(column)
    return memoryview(column[4 * own :] + NOTHING * (4 * (count - own))).cast("I")


def _means(values: Sequence[Sequence[int]], none: int) -> list[int]:
    return [_mean(of_device, none) for of_device in zip(*values, strict=True)]


def _mean(values: tuple[int, ...], none: int) -> int:
    known = values if none not in values else tuple(value for value in values if value != none)
    if not known:
        return none
    total = sum(known)
    return (2 * total // len(known) + 1) // 2 or (1 if total else 0)
