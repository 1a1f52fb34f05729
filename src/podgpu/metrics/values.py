"""Converts and checks values of DCGM's fields, and computes attributes of `NodeState` from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from podgpu.metrics.fields import (
    DECIMALS,
    ENGINE,
    FB_FREE,
    FB_RESERVED,
    FB_TOTAL,
    FB_USED,
    POWER,
    TEMPERATURE,
    UTIL,
    Field,
    fields,
)
from podgpu.model import MIB, NS, Value

BRANDS = (
    "Unknown",
    "Quadro",
    "Tesla",
    "NVS",
    "Grid",
    "GeForce",
    "Titan",
    "NVIDIA Virtual Applications",
    "NVIDIA Virtual PC",
    "NVIDIA Virtual Compute Server",
    "NVIDIA RTX Virtual Workstation",
    "NVIDIA vGaming",
    "Quadro RTX",
    "NVIDIA RTX",
    "NVIDIA",
    "GeForce RTX",
    "Titan RTX",
)
"""Names in the order of NVML's nvmlBrandType_t."""
_FABRIC_COMPLETED = 3
_VGPU_FEATURE = 1
_MAX_TEMPERATURE = 200
MAX_RATIO = 1.01  # a ratio can exceed 1, because GPM rounds, or its counter is read slightly late
_CLOSE = 1e-6  # a number this close to a whole number is rounded to it


class Blank(ValueError):
    """The driver returned an invalid value: a sentinel, NaN, or an impossible number."""


def _unless_255(raw: int) -> int:
    if raw == 255:
        raise Blank("255")
    return raw


def _used_ratio(memory: Any) -> float:
    usable = memory.total - memory.reserved
    if usable <= 0:
        raise Blank("no usable memory")
    return float(memory.used / usable)


def _fabric_status(info: Any) -> int:
    """Returns DcgmFMStatus.

    0: not supported, 1: not started, 2: in progress, 3: success, 4: failure, 5: unrecognised.
    """
    if info.state < _FABRIC_COMPLETED:
        return int(info.state)
    if info.state > _FABRIC_COMPLETED:
        return 5
    if info.status == 0:
        return 3
    return 4


def _fabric_error(info: Any) -> int:
    if info.state != _FABRIC_COMPLETED:
        raise Blank("fabric not up")
    return int(info.status)


def _guid(raw: Any) -> str:
    text = bytes(raw).hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _vgpu_license(features: Any) -> int:
    if not features.isGridLicenseSupported:
        return 0
    listed = features.gridLicensableFeatures[: features.licensableFeaturesCount]
    for feature in listed:
        if feature.featureCode == _VGPU_FEATURE and feature.featureState > 0:
            return 1
    return 0


CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "": lambda raw: raw,
    "milli": lambda raw: raw / 1000.0,
    "milli_whole": lambda raw: raw // 1000,
    "bytes_to_mib": lambda raw: raw // MIB,
    "mib_to_kb": lambda raw: int(raw * MIB / 1000),
    "mib_to_bytes": lambda raw: int(raw * MIB),
    "mhz_to_hertz": lambda raw: raw * 1_000_000,
    "nano": lambda raw: raw / NS,
    "percent_to_ratio": lambda raw: raw / 100.0,
    # `raw` is in KiB per second. DCGM's MB have 1,000 KiB.
    "kib_rate": lambda raw: int(raw / 1000),
    "kib_rate_bytes": lambda raw: int(raw * 1024),
    "unless_255": _unless_255,
    "used_ratio": _used_ratio,
    "count": len,
    "brand": lambda raw: BRANDS[raw] if 0 <= raw < len(BRANDS) else BRANDS[0],
    # NVML's mode 1, exclusive thread, no longer exists.
    "compute_mode": lambda raw: {0: 0, 2: 1, 3: 2}[raw],
    "compute_capability": lambda raw: (raw[0] << 16) | raw[1],
    "fabric_status": _fabric_status,
    "fabric_error": _fabric_error,
    "guid": _guid,
    "hex64": lambda raw: f"0x{int.from_bytes(bytes(raw), 'big'):016x}",
    "vgpu_license": _vgpu_license,
    # Four bits of mantissa, and below them eight bits of a negative decimal exponent.
    "bit_error_ratio": lambda raw: ((raw >> 8) & 0xF) * 10.0 ** -(raw & 0xFF),
}

# Codes for "no value". NVML sets all bits. DCGM uses the 16 largest values of signed 32-bit and
# 64-bit integers.
_BLANKS = frozenset(
    {
        0xFFFFFFFF,
        0xFFFFFFFFFFFFFFFF,
        *range(0x7FFFFFF0, 0x80000000),
        *range(0x7FFFFFFFFFFFFFF0, 0x8000000000000000),
    }
)
_DCGM_FLOAT_BLANK = 140737488355328.0
_AMOUNT_UNITS = ("mJ", "J", "W", "bytes", "MiB", "B/s", "KB/s", "MB/s", "Hz", "MHz", "cycles")
_TIME_UNITS = ("ns", "ms", "s")
_COUNT_UNITS = ("count", "banks", "pages", "rows", "lanes", "ratio")
_LIMITS = {
    **dict.fromkeys(_AMOUNT_UNITS + _TIME_UNITS + _COUNT_UNITS, (0.0, math.inf)),
    "%": (0.0, 100.0),
    "% (0-100)": (0.0, 100.0),
    "C": (-math.inf, _MAX_TEMPERATURE),
    "ratio 0-1": (0.0, MAX_RATIO),
}
"""Unit -> least and largest possible value."""
_TOO_MUCH_FOR_64_BITS = 2.0**63


def value_of(field: Field, raw: Any, is_converted: bool = False) -> Value:
    """Converts a value from NVML to the field's unit and checks it.

    Raises Blank if the value is invalid.
    """
    # pynvml returns numbers of one byte as bytes.
    if isinstance(raw, bytes) and field.type != "text" and len(raw) == 1:
        raw = raw[0]

    conversion = "" if is_converted else field.convert
    try:
        converted = CONVERSIONS[conversion](raw)
    except (LookupError, TypeError, ValueError, OverflowError) as e:
        raise Blank(f"{raw!r}") from e

    if field.type == "text":
        if isinstance(converted, bytes):
            converted = converted.decode("utf-8", "replace")
        if converted == "":
            raise Blank("empty text")
        return str(converted)

    if not isinstance(converted, int | float):
        raise Blank(f"{converted!r} is not a number")
    return _number(field, raw, converted)


def value_printed(field: Field, number: float) -> int | float:
    """Checks a number that an exporter printed. Raises Blank if it is invalid.

    dcgm-exporter 2.x prints DCGM's codes for "no value". The 64-bit codes become 2**63 when they
    are parsed as floats.
    """
    if not math.isfinite(number) or number >= _TOO_MUCH_FOR_64_BITS:
        raise Blank(str(number))
    raw: int | float = number
    if field.type != "float" and number.is_integer():
        raw = int(number)
    return _number(field, raw, raw)


def _number(field: Field, raw: Any, converted: int | float) -> int | float:
    if not math.isfinite(converted):
        raise Blank(str(converted))
    if not field.unit.startswith("bitmask") and _is_sentinel(raw, converted):
        raise Blank(f"sentinel {raw}")
    if field.type == "float":
        return within_unit(field, float(converted))
    return within_unit(field, int(converted))


def _is_sentinel(raw: Any, converted: int | float) -> bool:
    if isinstance(raw, int) and raw in _BLANKS:
        return True
    if isinstance(converted, float):
        return converted >= _DCGM_FLOAT_BLANK
    return converted in _BLANKS


def within_unit(field: Field, number: int | float) -> int | float:
    """Returns the number. Raises Blank if it is impossible in the field's unit.

    Ratios slightly above 1 become 1.
    """
    if not is_within_unit(field, number):
        raise Blank(f"{number} {field.unit}")
    if field.unit == "ratio 0-1":
        return min(number, 1.0)
    return number


def is_within_unit(field: Field, number: int | float) -> bool:
    """Returns whether the number is possible in the field's unit."""
    least, most = _LIMITS.get(field.unit, (-math.inf, math.inf))
    return least <= number <= most


def scale_number(field: Field, number: int | float, factor: float) -> int | float:
    """Multiplies the number by the factor and converts it to the field's type.

    Integers are truncated, as in DCGM.
    """
    exact = number * factor
    if field.type != "int":
        return round(exact, DECIMALS)
    if factor < 1:
        return math.floor(exact + _CLOSE)
    return round(exact)


def in_legacy_units(values: Mapping[int, float]) -> dict[int, float]:
    """Returns the values by field id.

    If a value is present only in a base unit, adds it in the older unit.
    """
    completed = dict(values)
    for number, value in values.items():
        field = fields()[number]
        if field.legacy is not None:
            completed.setdefault(field.legacy, round(value / field.factor, DECIMALS))

    return completed


# Values that are also attributes of DeviceState or GpuOrInstance


def gpu_figures(values: Mapping[str, float]) -> dict[str, float | None]:
    """Computes attributes of `DeviceState` from fields in the units of dcgm-exporter 4.8."""
    power = values.get(POWER)
    return {
        "power_mw": None if power is None else round(power * 1000),
        "temperature_celsius": values.get(TEMPERATURE),
    }


def device_figures(values: Mapping[str, float]) -> dict[str, float | None]:
    """Computes attributes of `GpuOrInstance` from fields.

    MIG instances have no GPU_UTIL, so `ENGINE` is used.
    """
    used = values.get(FB_USED)
    total = values.get(FB_TOTAL)
    if total is None and used is not None and FB_FREE in values:
        total = used + values[FB_FREE] + values.get(FB_RESERVED, 0)

    ratio = values.get(ENGINE)
    if UTIL in values:
        ratio = values[UTIL] / 100
    if ratio is not None and not 0 <= ratio <= MAX_RATIO:
        ratio = None

    return {
        "utilization_ratio": ratio,
        "memory_used_bytes": _to_bytes(used),
        "memory_total_bytes": _to_bytes(total),
    }


def _to_bytes(mebibytes: float | None) -> int | None:
    return None if mebibytes is None else round(mebibytes * MIB)
