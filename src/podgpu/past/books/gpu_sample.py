"""What is recorded of a GPU in a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from podgpu.charge import Charge, Figures, UsageAccount


class ConditionRecord(NamedTuple):
    """A condition of a GPU, such as ("xid", "XID 79: fallen off the bus")."""

    name: str
    message: str
    since: float | None = None  # Unix time; None if it is unknown
    account: UsageAccount | None = None  # the holder, if it is a condition of a holder (idle)


class GpuSample(NamedTuple):
    """State of a GPU or MIG instance. `figures` is None if the GPU could not be read."""

    uuid: str
    instance: str = ""
    node: str = ""
    gpu_index: int | None = None
    figures: Figures | None = None
    charges: Sequence[Charge] = ()  # of holders and, for what nobody held, of `UNALLOCATED`
    conditions: Sequence[ConditionRecord] = ()
    holders_known: bool = True  # if False, the previous holders still count as holders
    taken_from: str = ""  # the node that had it before, if that node does not answer
