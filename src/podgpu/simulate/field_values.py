"""This module knows what nvmlDeviceGetFieldValues answers on a simulated GPU: one table from field number to type and
value."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pynvml

from podgpu.simulate.gpu import NVLINK_BYTES, PCIE_RX_BYTES, PCIE_TX_BYTES, SimulatedGpu

_UINT = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
_ULL = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
_SINT = pynvml.NVML_VALUE_TYPE_SIGNED_INT
_MEMBER = {_UINT: "uiVal", _ULL: "ullVal", _SINT: "siVal"}

_ALL_LINKS = 0xFFFFFFFF

Reader = Callable[[SimulatedGpu, int], int | None]
"""From GPU and scope to the value; None: this part does not have it."""


def read_field_values(gpu: SimulatedGpu, asked: Iterable[Any], answer_for: Callable[[int, int], Any]) -> Any:
    """A ctypes array as pynvml returns it; `answer_for(field, gpu)` may know better than the table."""
    wanted = [entry if isinstance(entry, tuple | list) else (entry, 0) for entry in asked]
    values = (pynvml.c_nvmlFieldValue_t * len(wanted))()
    for value, (field_id, scope) in zip(values, wanted, strict=True):
        value.fieldId, value.scopeId = field_id, scope
        value.timestamp = gpu.wall_us
        told = answer_for(field_id, gpu.number)
        if told is not None and told.error:
            value.nvmlReturn = told.error
            continue
        kind, reader = _FIELDS.get(field_id, (_UINT, _absent))
        number = reader(gpu, scope) if told is None else told.value
        value.valueType = kind
        if number is None:
            value.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
        else:
            setattr(value.value, _MEMBER[kind], number)
    return values


def _absent(gpu: SimulatedGpu, scope: int) -> int | None:
    return None


def _zero(gpu: SimulatedGpu, scope: int) -> int | None:
    return 0


def _zero_where(has: Callable[[SimulatedGpu], bool]) -> Reader:
    return lambda gpu, scope: 0 if has(gpu) else None


def _nvlink_kib(gpu: SimulatedGpu, scope: int) -> int | None:
    """Data sent or received since the reset, on one link or on all of them."""
    links = gpu.nvlinks
    if not links or (scope >= links and scope != _ALL_LINKS):
        return None
    return int(gpu.meter.busy * NVLINK_BYTES / 1024) * (links if scope == _ALL_LINKS else 1)


def _link_state(gpu: SimulatedGpu, scope: int) -> int | None:
    return None if scope >= gpu.nvlinks else int(scope not in gpu.links_down)


def _low_word(count: float) -> int:
    # A real H200 gives the PCIe byte counters as 32-bit numbers, so they must wrap.
    return int(count) & 0xFFFFFFFF


_ECC = _zero_where(lambda gpu: gpu.model.ecc)
_REMAPPING = _zero_where(lambda gpu: gpu.model.row_remapping)
_RETIREMENT = _zero_where(lambda gpu: gpu.model.page_retirement)
_LINKED = _zero_where(lambda gpu: gpu.nvlinks > 0)

_FIELDS: dict[int, tuple[int, Reader]] = {
    1: (_ULL, lambda gpu, scope: 1 if gpu.model.ecc else None),
    2: (_ULL, lambda gpu, scope: 1 if gpu.model.ecc else None),
    **dict.fromkeys(range(3, 7), (_ULL, _ECC)),
    **dict.fromkeys(range(29, 32), (_ULL, _RETIREMENT)),
    **dict.fromkeys((38, 45, 52, 59, 160, 161, 162, 163), (_ULL, _LINKED)),
    74: (_ULL, lambda gpu, scope: int(gpu.capped_seconds * 1e9)),
    75: (_ULL, _zero),
    76: (_ULL, _zero),
    77: (_ULL, _zero),
    78: (_ULL, lambda gpu, scope: int(gpu.idle_seconds * 1e9)),
    79: (_ULL, _zero),
    80: (_ULL, lambda gpu, scope: int((gpu.capped_seconds + gpu.idle_seconds) * 1e9)),
    81: (_ULL, lambda gpu, scope: int(gpu.idle_seconds * 1e9)),
    82: (_UINT, lambda gpu, scope: gpu.memory_celsius),
    83: (_ULL, lambda gpu, scope: gpu.energy_mj),
    91: (_UINT, lambda gpu, scope: gpu.nvlinks or None),
    94: (_UINT, _zero),
    95: (_UINT, _zero),
    138: (_ULL, _nvlink_kib),
    139: (_ULL, _nvlink_kib),
    **dict.fromkeys(range(142, 146), (_ULL, _REMAPPING)),
    165: (_UINT, _link_state),
    **dict.fromkeys(range(173, 184), (_UINT, _zero)),
    185: (_UINT, lambda gpu, scope: gpu.milliwatts),
    186: (_UINT, lambda gpu, scope: gpu.milliwatts),
    187: (_UINT, lambda gpu, scope: gpu.model.power[1] * 1000),
    **dict.fromkeys((188, 189, 190, 192), (_UINT, lambda gpu, scope: gpu.model.power[2] * 1000)),
    191: (_ULL, lambda gpu, scope: gpu.energy_mj),
    197: (_UINT, lambda gpu, scope: _low_word(gpu.meter.busy * PCIE_TX_BYTES)),
    198: (_UINT, lambda gpu, scope: _low_word(gpu.meter.busy * PCIE_RX_BYTES)),
    230: (_UINT, _zero),
    **dict.fromkeys(range(269, 272), (_ULL, _zero)),
}
