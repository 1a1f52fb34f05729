"""This module makes of NVML's answers what a DCGM field means, and refuses answers that are no values. Pure.

`value_of` is the door: a sentinel, a NaN or an impossible figure does not pass it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from podgpu.metrics.fields import Field
from podgpu.model import Value

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
_MIB = 1024 * 1024
_FABRIC_COMPLETED = 3
_VGPU_FEATURE = 1
_MAX_TEMPERATURE = 200
_RATIO_ROUNDING = 1.01  # GPM overshoots 100 % by a hair at full load; more than that is garbage


class Blank(ValueError):
    """The driver answered, but with no value (sentinel, NaN, impossible figure)."""


def _temperature(raw: int) -> int:
    if raw > _MAX_TEMPERATURE:
        raise Blank(f"{raw} degrees")
    return raw


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
    """DcgmFMStatus: 0 not supported, 1 not started, 2 in progress, 3 success, 4 failure, 5 unrecognised."""
    if info.state < _FABRIC_COMPLETED:
        return int(info.state)
    if info.state > _FABRIC_COMPLETED:
        return 5
    return 3 if info.status == 0 else 4


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
    return int(any(f.featureCode == _VGPU_FEATURE and f.featureState > 0 for f in listed))


def _bit_error_ratio(raw: int) -> float:
    return float(((raw >> 8) & 0xF) * 10.0 ** -(raw & 0xFF))


CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "": lambda raw: raw,
    "milli": lambda raw: raw / 1000.0,
    "milli_whole": lambda raw: raw // 1000,
    "bytes_to_mib": lambda raw: raw // _MIB,
    "mib_to_bytes": lambda raw: int(raw * _MIB),
    "mhz_to_hertz": lambda raw: raw * 1_000_000,
    "mega": lambda raw: raw * 1_000_000,
    "nano": lambda raw: raw / 1_000_000_000,
    "percent_to_ratio": lambda raw: raw / 100.0,
    "kib_rate": lambda raw: int(raw / 1000),  # raw is already KiB per second
    "kib_rate_bytes": lambda raw: int(raw * 1024),
    "temperature": _temperature,
    "unless_255": _unless_255,
    "used_ratio": _used_ratio,
    "count": len,
    "brand": lambda raw: BRANDS[raw] if 0 <= raw < len(BRANDS) else BRANDS[0],
    "compute_mode": lambda raw: {0: 0, 2: 1, 3: 2}[raw],
    "compute_capability": lambda raw: (raw[0] << 16) | raw[1],
    "inforom_valid": int,
    "fabric_status": _fabric_status,
    "fabric_error": _fabric_error,
    "guid": _guid,
    "hex64": lambda raw: f"0x{int.from_bytes(bytes(raw), 'big'):016x}",
    "vgpu_license": _vgpu_license,
    "bit_error_ratio": _bit_error_ratio,
}

# NVML's "not available" (all bits set), and DCGM's blanks: 16 codes at the top of each signed range.
_UNSIGNED_BLANKS = frozenset({0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF})
_DCGM_BLANKS = frozenset(range(0x7FFFFFF0, 0x80000000)) | frozenset(range(0x7FFFFFFFFFFFFFF0, 0x8000000000000000))
_DCGM_FLOAT_BLANK = 140737488355328.0
_NEVER_NEGATIVE = frozenset(
    {"mJ", "J", "W", "bytes", "MiB", "B/s", "KB/s", "MB/s", "Hz", "MHz", "ns", "ms", "s", "cycles", "count"}
    | {"banks", "pages", "rows", "lanes", "ratio"}
)
"""NVML's are unsigned, but an engine's and an exposition's need not be."""
_TOO_MUCH_FOR_64_BITS = 2.0**63


def value_of(field: Field, raw: Any) -> Value:
    """The field's value from NVML's answer; raises Blank when the answer is none."""
    if field.type != "text" and isinstance(raw, bytes) and len(raw) == 1:
        raw = raw[0]  # pynvml hands out single-byte numbers as bytes
    try:
        converted = CONVERSIONS[field.convert](raw)
    except (LookupError, TypeError, ValueError, OverflowError) as e:
        raise Blank(f"{raw!r}") from e
    if field.type == "text":
        return _text(converted)
    if not isinstance(converted, int | float):
        raise Blank(f"{converted!r} where a number belongs")
    return _number(field, raw, converted)


def value_printed(field: Field, number: float) -> int | float:
    """The field's value from a number DCGM has printed; raises Blank when it printed that there is none.

    dcgm-exporter 2.x prints the blanks themselves. Those of 64 bits are no floats: they read as 2 to the 63rd.
    """
    if not math.isfinite(number) or number >= _TOO_MUCH_FOR_64_BITS:
        raise Blank(str(number))
    if field.type != "float" and number.is_integer():
        return _number(field, int(number), int(number))
    return _number(field, number, number)


def _text(raw: Any) -> str:
    text = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)
    if not text:
        raise Blank("empty text")
    return text


def _number(field: Field, raw: Any, converted: int | float) -> int | float:
    if isinstance(converted, float) and not math.isfinite(converted):
        raise Blank(str(converted))
    if not field.unit.startswith("bitmask") and _is_sentinel(raw, converted):
        raise Blank(f"sentinel {raw}")
    number = float(converted) if field.type == "float" else int(converted)
    return within_unit(field, number)


def _is_sentinel(raw: Any, converted: int | float) -> bool:
    for value in (raw, converted):
        if isinstance(value, int) and (value in _UNSIGNED_BLANKS or value in _DCGM_BLANKS):
            return True
    return isinstance(converted, float) and converted >= _DCGM_FLOAT_BLANK


def within_unit(field: Field, number: int | float) -> int | float:
    """The number, if there can be so much of it; raises Blank."""
    if field.unit in _NEVER_NEGATIVE and number < 0:
        raise Blank(f"{number} {field.unit}")
    if field.unit.startswith("%") and not 0 <= number <= 100:
        raise Blank(f"{number} %")
    if field.unit == "ratio 0-1":
        if not 0 <= number <= _RATIO_ROUNDING:
            raise Blank(f"ratio {number}")
        return min(number, 1.0)
    return number
